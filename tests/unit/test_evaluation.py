"""The evaluation's arithmetic by hand, and a real vLLM serving tiny drafts, counted a second time from its answers."""

import hashlib
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import evaluate_draft
import real_files
import tiny_targets
from aerie import drafts, evaluation, generation
from aerie.chat import Renderer
from aerie.errors import AerieError
from aerie.evaluation import EngineRun, EvaluationPrompt, Pass, PassResult, Room, planned_passes
from aerie.generation import ServedAnswer, SpeculationCounters, read_counters, with_cut
from aerie.keys import digest_of, file_sha256
from aerie.samples import Sample, write_samples
from aerie.sources import RawRow
from aerie.stage import Recipe
from aerie.targets import Target
from checkout import SCRIPTS
from known_faults import skip_where

SETTINGS = {
    "num_draft_tokens": 3,
    "max_new_tokens": 20,
    "max_prompts": None,
    "batch_sizes": [20, 8],
    "temperatures": [0, 0.8],
    "ngram": True,
    "dtype": "float32",
}
ENGINE = {"device": "cpu", "gpus": 0, "tensor_parallel": 1, "engine_options": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}}
SAID = [20, 106]  # what the target likes to say
VOCABULARY = [3, 20, *range(100, 200), 267]  # the draft's


def answer(ids, accepted=(), first=0.5, rest=0.1, steps=None):
    return ServedAnswer(list(ids), "stop", first, rest, list(accepted), steps)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_acceptance_by_hand():
    # Four steps of three draft tokens, of which 3, 1, 0 and 2 were accepted; 1 + 4 + 6 tokens.
    counts = evaluation.step_counts([answer(range(7), [3, 1]), answer(range(5), [0, 2])], 3)
    assert counts.tolist() == [[2, 2, 1, 1], [2, 1, 1, 0]]
    found = evaluation.acceptance(counts)
    assert found["acceptance_length"] == 2.5
    assert found["accepted_per_position"] == [0.75, 0.5, 0.25]
    # Of ten, half with 3 and half with 2 tokens a step, the resamples' mean is 2 and a tenth of a number that is binomial:
    # it is 1 or less in 1.1 % of them, 2 or less in 5.5 %, and so on the other side.
    assert evaluation.acceptance(np.tile(counts, (5, 1)))["confidence"]["acceptance_length"] == [2.2, 2.8]


def test_steps_without_a_proposal_count():
    # n-gram: 9 tokens, the first from the prompt; one step proposed 3 and had 2 accepted, five proposed nothing.
    assert evaluation.step_counts([answer(range(9), [2], steps=6)], 3).tolist() == [[6, 1, 1, 0]]
    # 8 tokens, the first from the prompt; five steps proposed nothing, the last had 3 accepted, of which the answer has room for one.
    cut = evaluation.step_counts([answer(range(8), [3], steps=6)], 3)
    assert cut.tolist() == [[6, 1, 1, 1]] and evaluation.acceptance(cut)["acceptance_length"] == 1.5
    # A draft whose last tokens lie behind the end of the answer.
    assert evaluation.step_counts([answer(range(3), [3])], 3).tolist() == [[1, 1, 1, 1]]


def test_confidence_is_that_of_a_mean():
    """With one step a prompt, the share's standard error is known."""
    drawn = np.random.default_rng(1).random(400) < 0.3
    found = evaluation.acceptance(np.stack([np.ones(400, dtype=int), drawn.astype(int)], axis=1))
    share = drawn.mean()
    error = 1.96 * math.sqrt(share * (1 - share) / 400)
    assert found["confidence"]["accepted_per_position"][0] == pytest.approx([share - error, share + error], abs=0.006)


@pytest.mark.parametrize(
    ("steps", "confident"), [([4], False), ([4] * 2, False), ([4] * 9, False), ([4] * 9 + [0], False), ([4] * 10, True)]
)
def test_few_prompts_have_no_confidence(steps, confident):
    """An answer without a step says nothing."""
    found = evaluation.acceptance(np.array([[count, count // 2] for count in steps]))
    assert found["acceptance_length"] == 1.5 and (found["confidence"] is not None) is confident


def test_fewer_draft_tokens_by_hand():
    found = evaluation.by_draft_tokens([0.75, 0.5, 0.25])
    assert [(row["num_draft_tokens"], row["acceptance_length"]) for row in found] == [(1, 1.75), (2, 2.25), (3, 2.5)]


def test_context_is_what_stands_before_a_draft():
    # Drafts after 14 + 1, 14 + 1 + 3 and 30 + 1 tokens; the last after 30 + 1 + 1.
    found = evaluation.by_context([(14, answer(range(5), [2, 0])), (30, answer(range(3), [0, 1]))], 2)
    assert [(row["from"], row["below"], row["steps"], row["acceptance_length"]) for row in found] == [
        (8, 16, 1, 3.0),
        (16, 32, 2, 1.0),
        (32, 64, 1, 2.0),
    ]


def test_categories_are_counted_apart():
    prompts = [EvaluationPrompt(number, "", category, [1]) for number, category in enumerate(("b", "a", "b"))]
    found = evaluation.by_category(prompts, np.array([[2, 2], [4, 1], [2, 0]]))
    assert [(row["category"], row["prompts"], row["steps"], row["acceptance_length"]) for row in found] == [
        ("a", 1, 4, 1.25),
        ("b", 2, 4, 1.5),
    ]
    assert evaluation.by_category([EvaluationPrompt(1, "", "", [1])], np.array([[2, 2]])) == []


def test_accepted_tokens_are_coloured():
    tokenizer = tiny_targets.make_tiny_tokenizer()
    ids = tokenizer("abcdé", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6  # é is two bytes
    # a from the prompt; b, c accepted, d the target's own; the first byte of é accepted, the second the target's.
    assert evaluation.coloured(answer(ids, [2, 1]), tokenizer) == [["a", False], ["bc", True], ["dé", False]]
    # Nothing is marked behind the last draft, and what was accepted behind the answer's end is left out.
    assert evaluation.coloured(answer(ids[:3], [0, 3]), tokenizer) == [["ab", False], ["c", True]]


def test_every_set_and_temperature_at_the_largest_batch_the_rest_at_the_first_set():
    assert planned_passes({"x": 80, "y": 5}, [0.7, 0], [1, 32, 8]) == [
        Pass("x", 0, 32),
        Pass("y", 0, 32),
        Pass("x", 0.7, 32),
        Pass("y", 0.7, 32),
        Pass("x", 0, 8),
        Pass("x", 0, 1),
    ]
    assert planned_passes({"x": 80}, [0], [80]) == [Pass("x", 0, 80)]


@pytest.mark.parametrize(
    ("prompts", "measured"),
    [(6, [32, 4, 1]), (4, [32, 1]), (1, [32]), (8, [32, 4, 1]), (9, [32, 8, 4, 1]), (32, [32, 16, 8, 4, 1]), (99, [32, 16, 8, 4, 1])],
)
def test_a_batch_size_that_the_prompts_do_not_fill_is_measured_once(prompts, measured):
    passes = planned_passes({"x": prompts, "y": 1000}, [0], [1, 4, 8, 16, 32])
    assert passes == [Pass("x", 0, 32), Pass("y", 0, 32), *(Pass("x", 0, size) for size in measured[1:])]
    in_flight = [min(size, prompts) for size in measured]
    assert len(set(in_flight)) == len(in_flight)


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


# --- prompts ----------------------------------------------------------------------------------------------------------


def rows(count):
    return [RawRow("p", line, {"prompt": f"question {line}", "category": "abc"[line % 3]}) for line in range(1, count + 1)]


def test_more_prompts_contain_fewer():
    few, many = evaluation.first_turns(rows(20), 5), evaluation.first_turns(rows(20), 12)
    assert len(few) == 5 and set(map(str, few)) < set(map(str, many))
    assert [turn.line for turn in many] == sorted(turn.line for turn in many)


def test_first_turns_keep_the_system_prompt_only():
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    row = json.dumps({"messages": messages, "category": "math"})
    assert evaluation.first_turns([RawRow("p", 1, row)], None) == [("p", 1, "math", messages[:2], None)]


def test_prompts_are_what_is_served(tmp_path):
    """With the tools of their rows and the dataset's system prompt, as the template itself renders them."""
    qwen = real_files.tokenizer("qwen3")
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
    asked, own = {"role": "user", "content": "Where?"}, {"role": "system", "content": "Be brief."}
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": "Where?"}, {"messages": [asked], "tools": tools}, {"messages": [own, asked], "functions": [tools[0]["function"]]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"role": "system", "content": "Be kind."}
    for prompt, before in ((None, []), ("Be kind.", [given])):
        found = evaluation.read_prompts(file, Renderer(qwen, []), None, Room(10_000, 10), prompt)
        expected = [
            qwen.apply_chat_template(messages, tools=offered, add_generation_prompt=True, tokenize=False)
            for messages, offered in (([*before, asked], None), ([*before, asked], tools), ([own, asked], tools))
        ]
        assert [qwen.decode(one.token_ids) for one in found] == expected
        assert [one.text for one in found] == ["Where?"] * 3


def test_prompts_that_differ_in_their_tools_alone_are_chosen_each_by_its_own_hash():
    tools = [{"type": "function", "function": {"name": f"look{n}"}} for n in range(8)]
    rows = [RawRow("p", n, {"prompt": "Where?", "tools": [tool]}) for n, tool in enumerate(tools)]
    assert [turn.line for turn in evaluation.first_turns(rows, 4)] != [0, 1, 2, 3]


def test_an_unusable_prompt_is_an_error():
    with pytest.raises(AerieError, match="p:7: no messages"):
        evaluation.first_turns([RawRow("p", 7, {"messages": []})], None)


def test_validation_prompts_end_where_the_answer_begins(tmp_path):
    tokenizer = tiny_targets.make_tiny_tokenizer()
    asked = Renderer(tokenizer, []).prompt([{"role": "user", "content": "Why?"}])
    made = [
        Sample([*asked, 50, 3], [0] * len(asked) + [1, 1], "a", "validation"),
        Sample([*asked, 60, 3], [0] * len(asked) + [1, 1], "a", "validation"),  # the same prompt again
        Sample([*asked, 70, 3, 4], [0] * (len(asked) + 2) + [1], "a", "validation"),  # a longer one
        Sample([*asked, 80, 81, 3], [0] * (len(asked) + 2) + [1], "a", "train"),
    ]
    write_samples(made, tmp_path / "samples")
    room = Room(len(asked) + 12, 10)  # just enough
    found, left_out = evaluation.validation_prompts(tmp_path, tokenizer, None, room)
    assert sorted(prompt.token_ids for prompt in found) == sorted([asked, [*asked, 70, 3]]) and left_out == 0
    assert len(evaluation.validation_prompts(tmp_path, tokenizer, 1, room)[0]) == 1
    # One that leaves no room is left out before so many are chosen.
    found, left_out = evaluation.validation_prompts(tmp_path, tokenizer, 1, Room(len(asked) + 11, 10))
    assert [prompt.token_ids for prompt in found] == [asked] and left_out == 1
    with pytest.raises(AerieError, match=r"of 2 different prompts in the validation split none leaves room for 10 new tokens"):
        evaluation.validation_prompts(tmp_path, tokenizer, 1, Room(len(asked) + 9, 10))


def test_left_out_prompts_are_told_and_other_sets_are_not_shortened(tmp_path, capfd):
    tokenizer = tiny_targets.make_tiny_tokenizer()
    renderer = Renderer(tokenizer, [])
    made = [Sample([*range(5, 5 + length), 50, 3], [0] * length + [1, 1], "a", "validation") for length in (20, 40, 60)]
    write_samples(made, tmp_path / "validation/samples")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?"}\n')
    paths = {"mine": tmp_path / "mine.jsonl", "validation": tmp_path / "validation"}
    sets, left_out = evaluate_draft.read_sets(paths, renderer, {"max_prompts": None}, Room(50, 10))
    assert [len(prompt.token_ids) for prompt in sets["validation"]] == [20, 40] and left_out == {"validation": 1}
    assert "1 prompts of the set validation are left out: with 10 new tokens they exceed the target's 50" in capfd.readouterr().err
    with pytest.raises(AerieError, match=r"mine.jsonl:1: a prompt of \d+ tokens and 45 new ones exceed the target's 50"):
        evaluate_draft.read_sets(paths, renderer, {"max_prompts": None}, Room(50, 45))


# --- the stage's files ------------------------------------------------------------------------------------------------


def handmade():
    """Two prompt sets and three engines with answers written by hand; the draft differs from the baseline once."""
    tokenizer = tiny_targets.make_tiny_tokenizer()
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("abcdef", "abxdef", "ghi")}
    sets = {
        "one": [EvaluationPrompt(1, "first?", "math", [5] * 10), EvaluationPrompt(2, "second?", "prose", [6] * 20)],
        "two": [EvaluationPrompt(1, "third?", "", [7] * 40)],
    }
    accepted = {"one": ([2, 1], [1, 0, 0, 0]), "two": ([1],)}
    texts = {"baseline": ("abcdef", "abcdef"), "ngram": ("abcdef", "abcdef"), "draft": ("abcdef", "abxdef")}
    runs = {}
    for engine, (first, second) in texts.items():
        passes = {}
        for planned in planned_passes({"one": 2, "two": 1}, [0, 1], [4, 1]):
            found = [ids[first], ids[second]] if planned.prompt_set == "one" else [ids["ghi"]]
            steps = accepted[planned.prompt_set] if engine == "draft" else ([1], []) if engine == "ngram" else ([], [])
            answers = [answer(*pair) for pair in zip(found, steps[: len(found)], strict=True)]
            total = sum(map(sum, steps[: len(found)]))
            drafts_made = sum(map(len, steps[: len(found)]))
            counters = None if engine == "baseline" else SpeculationCounters(drafts_made, 2 * drafts_made, total, (total, 0))
            passes[planned] = PassResult(answers, {"baseline": 2.0, "ngram": 1.0, "draft": 0.5}[engine] / planned.batch_size, counters)
        runs[engine] = EngineRun(engine, "a device", "float32", passes)
    return sets, runs, {"num_draft_tokens": 2, "max_new_tokens": 8, "batch_sizes": [4, 1]}, tokenizer


def test_summary_by_hand(tmp_path):
    sets, runs, settings, tokenizer = handmade()
    evaluate_draft.write_results(sets, {}, runs, settings, tokenizer, tmp_path)
    found = json.loads((tmp_path / "acceptance.json").read_text())
    # 6 drafts accepted 2, 1, 1, 0, 0 and 0 tokens; 2 + 6 + 4 = 12 tokens.
    assert (found["drafts"], found["accepted_tokens"], found["acceptance_length"]) == (6, 4, 1.666667)
    assert found["accepted_per_position"] == [0.5, 0.166667] and found["tokens_past_the_end"] == 0
    assert found["tokens_per_second"] == {"baseline": 24.0, "ngram": 48.0, "draft": 96.0} and found["speed_up"] == 4
    assert found["identical_outputs"] == {"same": 1, "different": 1}
    different = {"prompt_set": "one", "line": 2, "first_difference": 2, "baseline_token_there": "c", "draft_token_there": "x"}
    assert found["differences"] == [different]
    assert [(row["prompt_set"], row["category"], row["acceptance_length"]) for row in found["by_category"]] == [
        ("one", "math", 2.5),
        ("one", "prose", 1.25),
    ]
    named = {(row["engine"], row["prompt_set"], row["temperature"]): row for row in found["acceptance"]}
    assert len(named) == 8 and named["draft", "two", 0]["acceptance_length"] == 2
    assert named["ngram", "one", 0]["acceptance_length"] == pytest.approx(1 + 1 / 9, abs=1e-6)  # 4 + 5 steps
    assert "identical_outputs" in named["draft", "one", 0] and "identical_outputs" not in named["draft", "one", 1]
    speeds = {(row["engine"], row["batch_size"]): row for row in found["speed"]}
    assert list(speeds) == [(engine, size) for size in (1, 2) for engine in ("baseline", "ngram", "draft")]
    assert speeds["ngram", 1]["tokens_per_second"] == 12 and speeds["ngram", 1]["speed_up"] == 2
    assert speeds["draft", 1]["time_to_first_token_ms"] == {"median": 500, "p90": 500}
    assert speeds["draft", 1]["time_per_output_token_ms"]["median"] == 100


def test_golden(tmp_path):
    """The same answers give the same files for ever, or VERSION is raised (then record the new digest with it)."""
    recorded = {5: "259f0b8349e42b3d5583e81980bc35f12191089336d07fd672569115c8a5c713"}
    sets, runs, settings, tokenizer = handmade()
    evaluate_draft.write_results(sets, {}, runs, settings, tokenizer, tmp_path)
    table = pq.read_table(tmp_path / "per_prompt.parquet")
    content = (tmp_path / "acceptance.json").read_text() + str(table.schema) + json.dumps(table.to_pylist())
    assert hashlib.sha256(content.encode()).hexdigest() == recorded[evaluate_draft.VERSION]


def test_an_engine_run_survives_its_file():
    _, runs, _, _ = handmade()
    for run in runs.values():
        assert EngineRun.from_json(run.to_json()) == run


@pytest.mark.parametrize(("speed_up", "marked"), [(2.5, False), (2.501, True)])
def test_a_ratio_that_cannot_be_is_marked_where_it_is_told(speed_up, marked):
    """2.5 tokens a step make it 2.5 times as fast at most."""
    figures = {"acceptance_length": 2.5, "accepted_per_position": [], "speed_up": speed_up, "prompts": 1}
    figures |= {"tokens_per_second": {"draft": 2.0, "baseline": 1.0}, "identical_outputs": {"same": 1}}
    said = evaluate_draft.told(figures)
    assert ("(x 2.50 (!))" in said[0]) is marked and len(said) == 1 + marked
    assert not marked or "cannot be" in said[1]


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="expects vLLM's CPU build")
def test_other_threads_are_another_speed():
    """What was timed on one thread is not compared with what is timed on two."""
    recipe = Recipe("evaluate_draft", 1, SETTINGS, ENGINE)
    target, before = Target("t", "d", {"path": "nowhere"}, False), torch.get_num_threads()
    keys = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            keys[threads] = evaluate_draft.engine_key("baseline", recipe, target, "p")
            assert generation.device_name(1).startswith(("1 thread on ", "2 threads on ")[threads - 1])
    finally:
        torch.set_num_threads(before)
    assert keys[1] != keys[2]


def test_answers_too_short_to_speculate_are_an_error(tmp_path):
    sets, runs, settings, tokenizer = handmade()
    short = PassResult([answer([5]), answer([6])], 1.0, SpeculationCounters(0, 0, 0, (0, 0)))
    runs["draft"].passes[Pass("one", 0, 4)] = short
    with pytest.raises(AerieError, match="no draft"):
        evaluate_draft.write_results(sets, {}, runs, settings, tokenizer, tmp_path)


def test_a_folder_that_is_no_draft_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(AerieError, match=r"config\.json and weights"):
        drafts.check_kind(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    with pytest.raises(AerieError, match="weights"):
        drafts.check_kind(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    drafts.check_kind(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    drafts.check_kind(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(AerieError, match="its kind is LlamaForCausalLM"):
        drafts.check_kind(tmp_path)


@pytest.mark.parametrize(("least", "code"), [(1.4, 0), (1.5, 1)])
def test_a_draft_below_the_least_acceptance_fails_the_run(tmp_path, least, code):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/acceptance.json").write_text(json.dumps({"acceptance_length": 1.45, "prompt_set": "mt-bench"}))
    recipe = {"stage": "check_acceptance", "version": 1, "settings": {"min_acceptance_length": least}, "runtime": {}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, SCRIPTS / "check_acceptance.py", "--recipe", tmp_path / "recipe.json"]
    done = subprocess.run([*command, "--acceptance", tmp_path / "mine/acceptance.json"], capture_output=True, text=True)
    assert done.returncode == code
    assert (
        not code or "run mine: its draft has an acceptance length of 1.450 on mt-bench; min_acceptance_length asks for 1.5" in done.stderr
    )


# --- served -----------------------------------------------------------------------------------------------------------


def make_target(folder: Path) -> Path:
    """A tiny target that often says one of two tokens, so that a random draft is right now and then."""
    from safetensors.torch import load_file, save_file

    tiny_targets.make_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[SAID] *= 4
    head[3] *= 3  # the end token
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_draft(folder: Path, target: Path) -> Path:
    """A one-layer EAGLE-3 draft with random weights and the target's own head for VOCABULARY, as speculators saves it."""
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
        draft_vocab_size=len(VOCABULARY),
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
    chosen = torch.tensor(VOCABULARY)
    in_draft = torch.zeros(sizes["vocab_size"], dtype=torch.bool)
    in_draft[chosen] = True
    model.load_vocab_mappings(in_draft, chosen - torch.arange(len(chosen)))
    weights = load_file(target / "model.safetensors")
    with torch.no_grad():
        model.embed_tokens.weight.copy_(weights["model.embed_tokens.weight"])
        model.lm_head.weight.copy_(weights["lm_head.weight"][chosen])
    model.save_pretrained(folder)
    return folder


def shuffle_d2t(folder: Path) -> None:
    """Makes a draft wrong: its d2t names the same target tokens, each at another draft token's place."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    places = torch.arange(len(weights["d2t"]))
    weights["d2t"] = (places + weights["d2t"]).roll(50) - places
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Served:
    """The evaluation's command, run in a folder with a tiny target, drafts and prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []  # on the terminal, by the first run
        target = make_target(folder / "target")
        make_draft(folder / "draft", target)
        (folder / "draft/manifest.json").write_text(json.dumps({"digest": "d" * 64}))
        fingerprint = {
            "name": "tiny",
            "digest": digest_of("tiny"),
            "location": {"path": str(target)},
            "trust_remote_code": False,
            "files": {},
        }
        (folder / "fingerprint.json").write_text(json.dumps(fingerprint))
        questions = [{"turns": [f"tell me about the {n}", "more"], "category": "odd" if n % 2 else "even"} for n in range(20)]
        (folder / "question.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
        (folder / "other.jsonl").write_text("".join(json.dumps({"prompt": f"and {n}?"}) + "\n" for n in range(4)))

    def run(self, name: str, folder: str = "draft", settings=SETTINGS, **runtime) -> subprocess.CompletedProcess:
        prompts = [["questions", str(self.folder / "question.jsonl")], ["others", str(self.folder / "other.jsonl")]]
        recipe = {
            "stage": "evaluate_draft",
            "version": evaluate_draft.VERSION,
            "settings": settings,
            "runtime": ENGINE | {"prompts": prompts} | runtime,
        }
        path = self.folder / f"{name}.recipe.json"
        path.write_text(json.dumps(recipe))
        command = [sys.executable, SCRIPTS / "evaluate_draft.py", "--recipe", path, "--target", self.folder / "fingerprint.json"]
        command += ["--draft", self.folder / folder, "--store", self.folder / "store"]
        command += ["--output", self.folder / name, "--log", self.folder / f"{name}.log"]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True)

    def acceptance(self, name: str) -> dict:
        return json.loads((self.folder / name / "acceptance.json").read_text())

    def rows(self, name: str) -> list[dict]:
        return pq.read_table(self.folder / name / "per_prompt.parquet").to_pylist()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    skip_where("speculation")
    made = Served(tmp_path_factory.mktemp("served"))
    done = made.run("first")
    assert done.returncode == 0, done.stderr
    made.said = done.stderr.splitlines()
    return made


def test_a_long_evaluation_shows_how_far_it_is(served):
    """Of each engine: that it loads, then prompts done of all: 24 at two temperatures, and the first set's 20 at another batch size."""
    begun = [number for number, line in enumerate(served.said) if line.startswith("evaluate: answering the prompts")]
    assert len(begun) == 3
    for first in begun:
        loads, loaded, *_ = served.said[first + 1 :]
        assert loads == "evaluate: the engine loads" and loaded.startswith("evaluate: the engine is loaded, ")
    assert sum(line.startswith("evaluate: 68/68 prompts, ") for line in served.said) == 3
    log = (served.folder / "first.log").read_text()  # which `snakemake status` reads
    assert len(re.findall(r"^evaluate: 68/68 prompts, [\d.,]+ prompts/s, .* taken$", log, re.MULTILINE)) == 3


def test_figures_are_vllms_own(served):
    found, answers = served.acceptance("first"), served.rows("first")
    steps = [count for row in answers if row["prompt_set"] == "questions" for count in row["accepted_per_step"]]
    assert found["prompts"] == 20 and len(answers) == 24 and sum(steps) >= 20
    assert len({row["draft_answer"] for row in answers}) >= 8  # else nothing could go wrong
    assert found["vllm_counters"] == {
        "drafts": len(steps),
        "draft_tokens": 3 * len(steps),
        "accepted_tokens": sum(steps),
        "accepted_per_position": [sum(count >= position for count in steps) for position in (1, 2, 3)],
    }
    assert found["acceptance_length"] == pytest.approx(1 + sum(steps) / len(steps), abs=1e-6)
    assert found["accepted_per_position"] == pytest.approx([sum(c >= p for c in steps) / len(steps) for p in (1, 2, 3)], abs=1e-6)
    low, high = found["confidence"]["acceptance_length"]
    assert low < found["acceptance_length"] < high
    produced = sum(row["draft_tokens"] for row in answers if row["prompt_set"] == "questions")
    assert found["output_tokens"] == dict.fromkeys(("baseline", "ngram", "draft"), produced)
    assert 20 + found["drafts"] + found["accepted_tokens"] == produced + found["tokens_past_the_end"]


def test_steps_without_a_draft_are_counted(served):
    """Tokens after the first are one a step and what it accepted, but for what the end of the answer cut off the last draft."""
    from vllm.outputs import CompletionOutput

    runs = [EngineRun.from_json(path.read_text()) for path in (served.folder / "store/baselines").glob("*.json")]
    [ngram] = [run for run in runs if run.engine == "ngram"]
    answers = [one for found in ngram.passes.values() for one in found.answers]
    cut = [(one.steps or 0) + sum(one.accepted) - (len(one.token_ids) - 1) for one in answers]
    assert all(0 <= more <= (one.accepted[-1] if one.accepted else 0) for more, one in zip(cut, answers, strict=True))
    assert sum(cut) > 0  # else nothing was tested
    without = sum((one.steps or 0) - len(one.accepted) for one in answers)
    # Releases that do not count by request name every step's accepted tokens, 0 where there was no draft.
    assert without > 0 if "spec_decode_metrics" in CompletionOutput.__dataclass_fields__ else without == 0
    [baseline] = [run for run in runs if run.engine == "baseline"]
    assert {one.steps for found in baseline.passes.values() for one in found.answers} == {None}


def test_in_float32_speculation_changes_no_token(served):
    found, answers = served.acceptance("first"), served.rows("first")
    assert found["identical_outputs"] == {"same": 20, "different": 0} and found["differences"] == []
    assert all(row["same"] and row["baseline_answer"] == row["draft_answer"] for row in answers)
    greedy = [row for row in found["acceptance"] if row["temperature"] == 0]
    assert len(greedy) == 4 and all(row["identical_outputs"]["different"] == 0 for row in greedy)


def test_every_engine_set_temperature_and_batch_size_is_there(served):
    found = served.acceptance("first")
    passes = [(row["engine"], row["prompt_set"], row["temperature"]) for row in found["acceptance"]]
    assert sorted(passes) == sorted((e, s, t) for e in ("draft", "ngram") for s in ("questions", "others") for t in (0, 0.8))
    assert all(row["steps"] > 0 for row in found["acceptance"])
    assert [(row["batch_size"], row["engine"]) for row in found["speed"]] == [
        (s, e) for s in (8, 20) for e in ("baseline", "ngram", "draft")
    ]
    for row in found["speed"]:
        assert row["tokens_per_second"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=0.01)
        assert 0 < row["time_to_first_token_ms"]["median"] <= row["time_to_first_token_ms"]["p90"] < 1000 * row["seconds"]
        assert 0 < row["time_per_output_token_ms"]["median"] < 1000 * row["seconds"]
    assert [row["category"] for row in found["by_category"]] == ["even", "odd"] and sum(
        row["prompts"] for row in found["by_category"]
    ) == 20
    assert sum(row["steps"] for row in found["by_context"]) == sum(len(row["accepted_per_step"]) for row in served.rows("first"))
    shown = {row["line"]: row["draft_answer"] for row in served.rows("first") if row["prompt_set"] == "questions"}
    assert len(found["samples"]) == 6
    assert all("".join(text for text, _ in sample["pieces"]) == shown[sample["line"]] for sample in found["samples"])


SAMPLE = """
import json, sys
from pathlib import Path
from aerie import generation
from aerie.targets import Target

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    runtime = json.loads((folder / "first.recipe.json").read_text())["runtime"]
    speculation = {"method": "eagle3", "model": str(folder / "draft"), "num_speculative_tokens": 3}
    engine = generation.start(Target.read(folder / "fingerprint.json"), runtime, end_tokens=[], max_length=64, dtype="float32",
        speculation=speculation, max_num_seqs=64, disable_log_stats=False)
    print("SAID", json.dumps([one.token_ids for one in engine.serve([[20, 21, 22]] * 600, 5, 64, temperature=0.5)]))
    engine.close()
"""


def test_what_is_sampled_with_a_draft_is_the_targets_distribution(served):
    """A token that is drawn from a distribution has on average, by definition, minus its entropy as log probability."""
    from transformers import AutoModelForCausalLM

    (served.folder / "sample.py").write_text(SAMPLE)
    done = subprocess.run([sys.executable, served.folder / "sample.py", served.folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("SAID"))[5:])
    said = torch.nn.utils.rnn.pad_sequence([torch.tensor(answer) for answer in answers], batch_first=True, padding_value=-1)
    there = said >= 0  # an answer that ends early has its end's token
    said = said.clamp(min=0)
    model = AutoModelForCausalLM.from_pretrained(served.folder / "target", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor([[20, 21, 22]]).expand(len(said), -1), said], dim=1)).logits[:, 2:-1]
    likely = (logits / 0.5).log_softmax(-1)
    entropy = -(likely.exp() * likely).sum(-1)
    excess = likely.gather(2, said[:, :, None])[:, :, 0] + entropy
    for place in range(5):
        here = excess[there[:, place], place]
        assert len(here) > 300 and abs(here.mean()) < 5 * here.std() / len(here) ** 0.5, (place, here.mean(), here.std())
    assert entropy[there].mean() > 0.5  # not certain anyhow


COUNT = """
import json, os, sys
from pathlib import Path
from aerie import generation
from aerie.targets import Target

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    prompts = json.loads((folder / "count.json").read_text())
    runtime = json.loads((folder / "first.recipe.json").read_text())["runtime"]
    speculation = {"method": "eagle3", "model": str(folder / "draft"), "num_speculative_tokens": 3}
    engine = generation.start(Target.read(folder / "fingerprint.json"), runtime, end_tokens=prompts["end_tokens"], max_length=200,
        dtype="float32", speculation=speculation, max_num_seqs=4, enable_prefix_caching=False)
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    llm = engine._llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=prompts["end_tokens"], output_kind=RequestOutputKind.DELTA)
    came = {}
    for number, ids in enumerate(prompts["ids"]):
        llm.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    while llm.has_unfinished_requests():
        for output in llm.step():
            came.setdefault(output.request_id, []).append(list(output.outputs[0].token_ids))
    print("CAME", json.dumps([came[str(number)] for number in range(len(prompts["ids"]))]))
    engine._counts_accepted = True  # as with a vLLM that does not count by request
    made = generation._finished
    generation._finished = lambda output, number: setattr(one := made(output, number), "spec_decode_metrics", None) or one
    for batch_size in (4, 1):
        print(f"SERVED{batch_size}", json.dumps([[one.token_ids, one.accepted] for one in engine.serve(prompts["ids"], 20, batch_size)]))
    engine.close()
"""


def test_counts_agree_with_tokens_as_they_come(served):
    """vLLM's counts by request, where it has them, against tokens as they come at each step; and where it has none, those as served."""
    tokenizer = tiny_targets.make_tiny_tokenizer()
    renderer = Renderer(tokenizer, [])
    answers = [row for row in served.rows("first") if row["prompt_set"] == "questions"]
    ids = [renderer.prompt([{"role": "user", "content": row["prompt"]}]) for row in answers]
    (served.folder / "count.py").write_text(COUNT)
    (served.folder / "count.json").write_text(json.dumps({"end_tokens": [3], "ids": ids}))
    done = subprocess.run([sys.executable, served.folder / "count.py", served.folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    came, four, alone = (
        json.loads(next(line for line in done.stdout.splitlines() if line.startswith(name))[len(name) :])
        for name in ("CAME", "SERVED4", "SERVED1")
    )
    assert len(came) == len(four) == len(alone) == 20
    cut = 0
    for row, steps, (token_ids, together), (_, by_step) in zip(answers, came, four, alone, strict=True):
        steps = [step for step in steps if step]
        assert sum(map(len, steps)) == row["draft_tokens"] == row["baseline_tokens"]
        accepted = [len(step) - 1 for step in steps[1:]]  # the first token comes from the prompt
        # The last step's tokens can end with the answer, before what was accepted does.
        assert accepted[:-1] == row["accepted_per_step"][: len(accepted) - 1]
        assert len(accepted) == len(row["accepted_per_step"])
        assert not accepted or accepted[-1] <= row["accepted_per_step"][-1]
        assert by_step == row["accepted_per_step"] and token_ids == [token for step in steps for token in step]
        assert together[:-1] == by_step[:-1]
        cut += sum(by_step) - sum(accepted)
    assert cut > 0  # else nothing was tested
    for position in range(3):  # of answers that end in one step, which the cut token belongs to is not known; their sum is
        assert len({sum(count > position for _, steps in each for count in steps) for each in (four, alone)}) == 1


def test_tokens_cut_with_the_answers_are_given_to_the_steps_that_ended():
    assert with_cut([0], [1, 1, 0]) == [2]
    assert with_cut([0, 1, 3], [1, 1, 0]) == [1, 2, 3]  # reached: 3, 2, 1
    assert with_cut([0, 2], [0, 0, 0]) == [0, 2]
    assert with_cut([1, 1], [0, 1, 1]) == [1, 3]


def test_nothing_is_served_twice(served):
    done = served.run("again")
    assert done.returncode == 0, done.stderr
    assert "found in the store" in done.stderr
    assert (served.folder / "again/acceptance.json").read_bytes() == (served.folder / "first/acceptance.json").read_bytes()


def test_a_wrong_draft_made_elsewhere_accepts_nothing_and_changes_nothing(served):
    """d2t shuffled; only its own engine is loaded, since the others know nothing of the draft."""
    make_draft(served.folder / "wrong", served.folder / "target")
    shuffle_d2t(served.folder / "wrong")
    done = served.run("wrong.out", "wrong", draft=str(served.folder / "wrong"))
    assert done.returncode == 0, done.stderr
    assert "found the answers without a draft" in done.stderr and "found the answers with n-gram speculation" in done.stderr
    right, wrong = served.acceptance("first"), served.acceptance("wrong.out")
    assert right["acceptance_length"] > 1.2 and wrong["acceptance_length"] < 1.02
    assert wrong["identical_outputs"] == {"same": 20, "different": 0}
    assert [row["draft_answer"] for row in served.rows("wrong.out")] == [row["baseline_answer"] for row in served.rows("first")]


def test_finished_engines_are_used_again(served):
    # Another draft of the same target, killed after its engine: nothing is loaded.
    (served.folder / "draft/manifest.json").write_text(json.dumps({"digest": "e" * 64}))
    recipe = Recipe.read(served.folder / "first.recipe.json")
    digests = [["questions", file_sha256(served.folder / "question.jsonl")], ["others", file_sha256(served.folder / "other.jsonl")]]
    inputs = {"target": digest_of("tiny"), "draft": "e" * 64, "prompts": digest_of(digests)}
    work = served.folder / "store/evaluate_draft" / f"{recipe.key(inputs)}.partial/work"
    work.mkdir(parents=True)
    runs = map(EngineRun.from_json, (path.read_text() for path in (served.folder / "store/baselines").glob("*.json")))
    ngram = next(run for run in runs if run.engine == "ngram")
    key = evaluate_draft.engine_key("draft", recipe, Target.read(served.folder / "fingerprint.json"), inputs["prompts"])
    (work / f"draft-{key[:16]}.json").write_text(replace(ngram, engine="draft").to_json())
    done = served.run("other")
    assert done.returncode == 0, done.stderr
    for what in ("without a draft", "with n-gram speculation", "with the draft"):
        assert f"found the answers {what}" in done.stderr
    rows = {row["engine"]: row for row in served.acceptance("other")["acceptance"]}
    assert rows["draft"]["acceptance_length"] == rows["ngram"]["acceptance_length"]


def test_a_failed_engine_says_why(served):
    done = served.run("failed", settings=SETTINGS | {"ngram": False}, engine_options={"nonsense": 7})
    assert done.returncode == 1
    assert "evaluate_draft failed: the run without a draft ended with exit code 1" in done.stderr
    assert "engine_options nonsense: vLLM has no such options" in done.stderr  # the cause, from the child's report in the log
    assert not (served.folder / "failed/acceptance.json").exists()


def test_a_prompt_without_room_for_an_answer_is_named_before_anything_is_loaded(served):
    done = served.run("long", settings=SETTINGS | {"max_new_tokens": 600})
    assert done.returncode == 1
    assert "question.jsonl:" in done.stderr and "600 new ones exceed the target's 512" in done.stderr
    assert "answering the prompts" not in done.stderr
