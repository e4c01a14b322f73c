"""The evaluation's arithmetic by hand, and a real vLLM serving a tiny draft, counted a second time from its answers."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import evaluate_draft
import tiny_targets
from aerie import evaluation
from aerie.conversations import Conversation
from aerie.errors import AerieError
from aerie.evaluation import EvaluationPrompt, Half
from aerie.generation import SpeculationCounters, read_counters
from aerie.keys import digest_of, file_sha256

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
SETTINGS = {"num_draft_tokens": 3, "max_new_tokens": 24, "max_prompts": None, "batch_size": 4, "dtype": "float32"}
RUNTIME = {"device": "cpu", "gpus": 0, "tensor_parallel": 1, "engine_options": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}}


def half(role, ids, seconds=2.0, counters=None):
    return Half(role, ids, ["text"] * len(ids), ["stop"] * len(ids), seconds, counters, "device", "float32")


def test_acceptance_by_hand():
    # Four drafts of three tokens, of which 3, 1, 0 and 2 were accepted.
    found = evaluation.acceptance(SpeculationCounters(4, 12, 6, (3, 2, 1)))
    assert found["acceptance_length"] == 2.5
    assert found["accepted_per_position"] == [0.75, 0.5, 0.25]


def test_acceptance_without_drafts_is_an_error():
    with pytest.raises(AerieError, match="no draft"):
        evaluation.acceptance(SpeculationCounters(0, 0, 0, (0, 0, 0)))


def test_counters_leave_out_the_warm_up():
    later, earlier = SpeculationCounters(10, 30, 12, (6, 4, 2)), SpeculationCounters(4, 12, 6, (3, 2, 1))
    assert later.since(earlier) == SpeculationCounters(6, 18, 6, (3, 2, 1))


def test_missing_metrics_are_an_error():
    with pytest.raises(AerieError, match="spec_decode_num_drafts"):
        read_counters([])


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 4, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [5], 0), ([], [], None)],
)
def test_first_difference(one, other, position):
    assert evaluation.first_difference(one, other) == position


def test_summary_by_hand():
    # Two prompts: 2 first tokens + 4 drafts + 6 accepted = 12 tokens, of which one lies behind an end token.
    counters = SpeculationCounters(4, 12, 6, (3, 2, 1))
    baseline = half("baseline", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]], seconds=2.0)
    draft = half("draft", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 6]], seconds=4.0, counters=counters)
    found = evaluation.summary(baseline, draft, SETTINGS)
    assert found["tokens_past_the_end"] == 1
    assert found["identical_outputs"] == {"same": 1, "different": 1}
    assert found["tokens_per_second"] == {"baseline": 5.5, "draft": 2.8}
    assert found["speed_up"] == 0.5


def test_a_half_survives_its_file():
    one = half("draft", [[1], [2, 3]], counters=SpeculationCounters(1, 3, 2, (1, 1, 0)))
    assert Half.from_json(one.to_json()) == one


def test_per_prompt_names_both_tokens():
    tokenizer = tiny_targets.make_tiny_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("abc", "abd", "ab")]
    prompts = [EvaluationPrompt(number, "prompt", [1]) for number in (1, 2)]
    rows = evaluation.per_prompt(prompts, half("baseline", [ids[0], ids[0]]), half("draft", [ids[1], ids[2]]), tokenizer)
    assert [row["first_difference"] for row in rows] == [2, 2]
    assert [(row["baseline_token_there"], row["draft_token_there"]) for row in rows] == [("c", "d"), ("c", "")]


def test_more_prompts_contain_fewer():
    rows = [Conversation("p", line, [{"role": "user", "content": f"question {line}"}]) for line in range(1, 21)]
    few, many = evaluation.first_turns(rows, 5), evaluation.first_turns(rows, 12)
    assert len(few) == 5
    assert {line for line, _ in few} < {line for line, _ in many}
    assert [line for line, _ in many] == sorted(line for line, _ in many)


def test_first_turns_keep_the_system_prompt_only():
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert evaluation.first_turns([Conversation("p", 1, messages)], None) == [(1, messages[:2])]


def test_an_unusable_prompt_is_an_error():
    with pytest.raises(AerieError, match="p:7: no messages"):
        evaluation.first_turns([Conversation("p", 7, [], "no messages")], None)


def make_target(folder: Path) -> Path:
    """A tiny target that says only a few different tokens, so that a random draft is right now and then."""
    from safetensors.torch import load_file, save_file

    tiny_targets.make_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[[10, 20, 30, 40]] *= 6
    head[3] *= 4  # the end token
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_draft(folder: Path, target: Path) -> Path:
    """A one-layer EAGLE-3 draft with random weights and the target's own head, as speculators saves it."""
    from safetensors.torch import load_file
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    sizes = json.loads((target / "config.json").read_text())
    keep = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    keep += ["vocab_size", "max_position_embeddings"]
    layer = LlamaConfig(**{name: sizes[name] for name in keep}, num_hidden_layers=1, rms_norm_eps=1e-5)
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=layer.vocab_size,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=sizes["architectures"]),
        ),
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config).to(torch.float32)
    weights = load_file(target / "model.safetensors")
    with torch.no_grad():
        model.embed_tokens.weight.copy_(weights["model.embed_tokens.weight"])
        model.lm_head.weight.copy_(weights["lm_head.weight"])
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The evaluation's command on a tiny target and draft: its folders and what it said."""
    folder = tmp_path_factory.mktemp("served")
    target = make_target(folder / "target")
    draft = make_draft(folder / "draft", target)
    (draft / "manifest.json").write_text(json.dumps({"digest": "d" * 64}))
    fingerprint = {"name": "tiny", "digest": digest_of("tiny"), "location": {"path": str(target)}, "trust_remote_code": False, "files": {}}
    (folder / "fingerprint.json").write_text(json.dumps(fingerprint))
    questions = [{"question_id": number, "turns": [f"tell me about the {number}", "more"]} for number in range(6)]
    (folder / "question.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    recipe = {"stage": "evaluate_draft", "version": 1, "settings": SETTINGS, "runtime": RUNTIME}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder, run(folder, "first")


def run(folder: Path, name: str) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPTS / "evaluate_draft.py", "--recipe", folder / "recipe.json", "--target", folder / "fingerprint.json"]
    command += ["--draft", folder / "draft", "--prompts", folder / "question.jsonl", "--store", folder / "store"]
    command += ["--output", folder / name, "--log", folder / f"{name}.log"]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def test_served_draft_is_counted_right(served):
    folder, done = served
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "first" / "acceptance.json").read_text())
    rows = pq.read_table(folder / "first" / "per_prompt.parquet").to_pylist()
    assert found["prompts"] == len(rows) == 6
    # float32: speculation changes no answer.
    assert found["identical_outputs"] == {"same": 6, "different": 0}
    assert all(row["same"] and row["first_difference"] is None for row in rows)
    # Counted from the answers: a first token each, then one token and what was accepted for each verified draft.
    produced = sum(row["draft_tokens"] for row in rows)
    assert found["output_tokens"] == {"baseline": produced, "draft": produced}
    assert 6 + found["drafts"] + found["accepted_tokens"] == produced + found["tokens_past_the_end"]
    assert 0 <= found["tokens_past_the_end"] <= 6 * 3
    assert found["accepted_tokens"] > 0
    assert found["draft_tokens"] == 3 * found["drafts"]
    per_position = found["accepted_per_position"]
    assert per_position == sorted(per_position, reverse=True)
    assert sum(per_position) == pytest.approx(found["acceptance_length"] - 1, abs=1e-5)
    assert found["tokens_per_second"]["baseline"] > 0
    assert found["tokens_per_second"]["draft"] > 0
    assert (folder / "first" / "manifest.json").exists()


def test_nothing_is_served_twice(served):
    folder, _ = served
    done = run(folder, "again")
    assert done.returncode == 0, done.stderr
    assert "found in the store" in done.stderr
    assert (folder / "again" / "acceptance.json").read_bytes() == (folder / "first" / "acceptance.json").read_bytes()


def test_finished_halves_are_used_again(served):
    # Another draft of the same target, killed after its half: neither half is run.
    folder, _ = served
    (folder / "draft" / "manifest.json").write_text(json.dumps({"digest": "e" * 64}))
    (baseline,) = (folder / "store" / "baselines").glob("*.json")
    half_made = json.loads(baseline.read_text())
    counters = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 5, "accepted_per_position": [3, 1, 1]}
    inputs = {"target": digest_of("tiny"), "draft": "e" * 64, "prompts": file_sha256(folder / "question.jsonl")}
    key = digest_of({"stage": "evaluate_draft", "version": 1, "settings": SETTINGS, "inputs": inputs})
    work = folder / "store" / "evaluate_draft" / f"{key}.partial" / "work"
    work.mkdir(parents=True)
    (work / f"draft-{baseline.stem[:16]}.json").write_text(json.dumps(half_made | {"role": "draft", "counters": counters}))
    done = run(folder, "other")
    assert done.returncode == 0, done.stderr
    assert "found the answers without a draft" in done.stderr
    assert "found the answers with the draft" in done.stderr
    assert json.loads((folder / "other" / "acceptance.json").read_text())["acceptance_length"] == 1.5


def test_a_failed_half_says_why(served):
    folder, _ = served
    recipe = {"stage": "evaluate_draft", "version": 1, "settings": SETTINGS | {"max_new_tokens": 600}, "runtime": RUNTIME}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    done = run(folder, "failed")
    assert done.returncode == 1
    assert "evaluate_draft failed: the run without a draft ended with exit code 1" in done.stderr
    assert "600 new ones exceed the target's 512" in done.stderr  # the cause, from the child's report in the log
    assert not (folder / "failed" / "acceptance.json").exists()


def test_a_folder_that_is_no_draft_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(AerieError, match="expected an EAGLE-3 draft"):
        evaluate_draft.check_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    with pytest.raises(AerieError, match=r"no EAGLE-3 draft as train_draft writes it .*Expected config\.json with"):
        evaluate_draft.check_draft(tmp_path)
