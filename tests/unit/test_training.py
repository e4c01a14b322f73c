"""Training a draft: what is paired with what, that it learns, survives kill -9, and that vLLM serves what it exports."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aerie import vocabulary
from aerie.checkpoints import Checkpoints
from aerie.cpu_speed import PACKED_ATTENTION, Float32Muon, orthogonalize, packed_attention, supervised_loss
from aerie.draft_model import DraftShape, aux_columns, build_draft, decoder_config, rotary_parameters
from aerie.errors import AerieError
from aerie.hidden_states import Capture, HiddenStateStore, StatesIndex, StoredSample
from aerie.samples import Sample, load_samples, write_samples
from aerie.targets import Target
from aerie.train_run import train
from aerie.training import TrainingSettings
from aerie.training_data import DraftSamples, ShardTransfer, batch_counts, batches, model_inputs, rows_of
from aerie.validation import TargetHead, count_hits, walk
from checkout import SCRIPTS
from tiny_targets import MAX_POSITIONS, VOCAB_SIZE, make_tiny_llama

CPU = torch.device("cpu")
LAYERS = (2, 4, 5, 8)
SETTINGS: dict[str, Any] = {
    "layers": 1,
    "aux_layer_ids": [2, 4, 5],
    "training": {"epochs": 6, "batch_tokens": 256, "max_length": 256, "learning_rate": 0.01},
}
RUNTIME = {"device": "cpu", "gpus": 0, "checkpoint_seconds": 0}


class HandMade:
    """States whose value tells layer and position: 100 * layer + position, the hidden size is 2."""

    layer_ids = LAYERS

    def __init__(self, tokens: dict[str, list[int]]) -> None:
        self.tokens = tokens

    def __contains__(self, key: str) -> bool:
        return key in self.tokens

    def token_ids(self, key: str) -> np.ndarray:
        return np.asarray(self.tokens[key], dtype=np.int32)

    def states(self, key: str) -> torch.Tensor:
        positions = torch.arange(len(self.tokens[key])).view(-1, 1, 1)
        return (100.0 * torch.tensor(LAYERS).view(1, -1, 1) + positions).expand(-1, -1, 2)


def hand_made(samples: list[tuple[list[int], list[int]]], tmp_path: Path, max_length: int = 99, ttt_steps: int = 1) -> DraftSamples:
    rows = [Sample(ids, mask, "s") for ids, mask in samples]
    write_samples(rows, tmp_path / "samples")
    dataset = load_samples(tmp_path)
    states = HandMade({row.key: row.input_ids for row in rows})
    transfer = ShardTransfer(states, dataset["sample_key"], [0, 2, 3])
    return DraftSamples(dataset, transfer, max_length, ttt_steps, torch.float32)


# What is paired with what


def test_row_pairs_states_with_the_next_token(tmp_path: Path):
    row = hand_made([([11, 12, 13, 14], [0, 0, 1, 1])], tmp_path)[0]
    assert row["input_ids"].tolist() == [12, 13, 14]  # the token after the states'
    assert row["hidden_states"].tolist() == [[200 + t, 200 + t, 500 + t, 500 + t] for t in range(3)]  # layers 2 and 5
    assert row["verifier_last_hidden_states"][:, 0].tolist() == [801, 802, 803]  # what predicts the token after that
    assert row["loss_mask"].tolist() == [False, True, True]
    assert row["position_ids"].tolist() == [1, 2, 3]


def test_long_sample_is_cut(tmp_path: Path):
    rows = hand_made([([11, 12, 13, 14, 15], [1] * 5)], tmp_path, max_length=4)
    assert rows.approx_lengths == [3]
    assert rows[0]["input_ids"].tolist() == [12, 13, 14]


def test_packing_keeps_samples_apart(tmp_path: Path):
    """Rows whose later targets would be another sample's are not trained on, even if a sample is supervised throughout."""
    steps = 3
    rows = hand_made([([11, 12, 13, 14, 15, 16], [1] * 6), ([21, 22, 23, 24, 25, 26, 27], [1] * 7)], tmp_path, ttt_steps=steps)
    loader = batches(rows, 2, 2, 64, seed=0, pad=False)
    (batch,) = list(loader)
    assert rows_of(batch) == 11 and batch["input_ids"].shape == (1, 11)  # not padded
    documents, mask = batch["document_ids"][0], batch["loss_mask"][0]
    for step in range(steps):
        crossing = documents[: 11 - step] != documents[step:]
        assert not (mask[step:] & crossing).any()
    assert mask.sum() == 11 - 2 * (steps - 1)
    assert sorted(model_inputs(batch, CPU)["document_lengths"]) == [5, 6]
    padded = next(iter(batches(rows, 2, 2, 64, seed=0, pad=True)))
    assert padded["input_ids"].shape == (1, 64) and rows_of(padded) == 11


def test_order_depends_on_seed_and_epoch_only(tmp_path: Path):
    rows = hand_made([([n, n + 1, n + 2, n + 3], [1] * 4) for n in range(20)], tmp_path)

    def order(seed, epoch):
        loader = batches(rows, 2, 2, 9, seed, pad=False)
        loader.batch_sampler.set_epoch(epoch)
        return [batch["input_ids"].tolist() for batch in loader]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2) and order(0, 1) != order(1, 1)
    assert batch_counts(batches(rows, 2, 2, 9, 0, pad=False), 2) == [len(order(0, 0)), len(order(0, 1))]


def test_bad_states_are_named_by_sample(tmp_path: Path):
    rows = hand_made([([11, 12, 13], [1, 1, 1])], tmp_path)
    key = rows.samples[0]["sample_key"]
    states = rows.transfer.states
    states.tokens = {}
    with pytest.raises(AerieError, match=f"sample {key}: no hidden states"):
        rows[0]
    states.tokens = {key: [11, 12, 99]}
    with pytest.raises(AerieError, match=f"sample {key}: its hidden states are those of other tokens"):
        rows[0]
    states.tokens = {key: [11, 12, 13]}
    good = states.states(key)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = good.clone()
        bad[1, 3, 0] = value
        states.states = lambda key, bad=bad: bad
        with pytest.raises(AerieError, match=f"sample {key}: hidden states that are not finite at 1 of 3 positions, the first at 1"):
            rows[0]


def test_layers_are_found_by_id():
    shape = DraftShape(1, (5, 2))
    assert shape.aux_layer_ids == (2, 5)  # vLLM's order
    assert aux_columns([2, 4, 5, 8], shape, 8) == ([0, 2], 3)
    with pytest.raises(AerieError, match=r"hold layers \[2, 4, 8\].*\[5\] not captured"):
        aux_columns([2, 4, 8], shape, 8)
    with pytest.raises(AerieError, match=r"\[8\] not captured"):
        aux_columns([2, 5], shape, 8)


# How validation counts


def test_hits_counted_by_hand():
    """Seven rows of one sample; rows 1 to 5 are supervised, so draft tokens at rows 2 to 5's tokens count."""
    supervised = torch.tensor([0, 1, 1, 1, 1, 1, 0]).bool()
    greedy = torch.tensor([50, 51, 52, 53, 54, 55, 56])
    #                        row  0   1   2   3   4   5   6
    drafted = torch.tensor([[50, 51, 99, 53, 54, 55, 56], [51, 52, 53, 99, 55, 56, 0]])
    starts, accepted, reached, starting, right = count_hits(drafted, greedy, supervised, torch.zeros(7, dtype=torch.long))
    # First token: rows 1 to 4 start (row 5's draft token is not supervised); row 2 is wrong.
    # Second: rows 1 to 3 (row 4's is not supervised); 1 right; 2 is right but after a wrong one; 3 is wrong.
    assert starts.tolist() == [4, 3]
    assert accepted.tolist() == [3, 1]
    assert reached.tolist() == [4, 2]
    # Serving starts at row 1, where both are right, then three rows on, at row 4, whose one token is right.
    drafts, served = walk(starting, right)
    assert (drafts, served.tolist()) == (2, [2, 1])


def test_serving_starts_again_after_the_targets_own_token():
    starting = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0]).bool()
    right = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0], [0, 0, 1, 0, 1, 0, 0, 0]]).bool()
    # Row 1 accepts one token, row 3 none, row 4 two, and row 7 is no start: of six rows, three start.
    drafts, served = walk(starting, right)
    assert (drafts, served.tolist()) == (3, [2, 1])


def test_hits_do_not_cross_samples():
    supervised = torch.ones(6).bool()
    documents = torch.tensor([0, 0, 0, 1, 1, -1])
    greedy = torch.arange(6)
    drafted = torch.stack([torch.arange(6), torch.arange(1, 7)])  # always right
    starts, accepted, *_ = count_hits(drafted, greedy, supervised, documents)
    assert starts.tolist() == [3, 1] and accepted.tolist() == [3, 1]


def test_target_head_is_the_targets(problem):
    """Greedy tokens from stored last-layer states are those of the whole model."""
    from transformers import AutoModelForCausalLM

    target = problem.target
    weights = target.head_weights()
    head = TargetHead(weights["norm"], target.text_config.rms_norm_eps, weights["lm_head"])
    sample = problem.samples[0]
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.as_tensor(sample["input_ids"])[None]).logits[0].argmax(-1)
    assert torch.equal(head.greedy(problem.states.states(sample["sample_key"])[:, -1], CPU), expected)


# The CPU's stand-ins


def test_packed_attention_is_masked_attention():
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(0)
    lengths, rows, steps = [3, 5, 2], 10, 2
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    row = torch.arange(rows)
    first = (row[:, None] >= row) & (documents[:, None] == documents)
    mask = torch.cat([first, torch.eye(rows).bool()], dim=1)[None, None]
    query = torch.randn(1, 4, rows, 8)
    key, value = (torch.randn(1, 2, rows * steps, 8) for _ in range(2))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None, None, lengths)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    later = torch.tensor([1, 2, 4, 7])  # none of the last sample
    columns = torch.cat([row, rows + later])
    found, _ = packed_attention(
        torch.nn.Identity(), query[:, :, later], key[:, :, columns], value[:, :, columns], None, None, lengths, later
    )
    torch.testing.assert_close(found, expected[:, :, later].transpose(1, 2))
    with pytest.raises(ValueError, match="do not add up"):
        packed_attention(torch.nn.Identity(), query, key, value, None, None, [3])


def test_loss_at_supervised_rows_is_speculators_loss(problem):
    """Loss, gradients and metrics are those of speculators' forward, which computes every row with dense attention."""
    transfer = ShardTransfer(problem.states, problem.samples["sample_key"], [*range(3), 3])
    samples = DraftSamples(problem.samples, transfer, 64, 3, torch.float32)
    batch = next(iter(batches(samples, 64, 3, 256, 0, False)))
    found = []
    for attention in ("sdpa", PACKED_ATTENTION):
        torch.manual_seed(0)
        model = build_draft(problem.target, DraftShape(2, (2, 4, 5)), problem.vocab_map, 3, attention)
        inputs, kwargs = model_inputs(batch, CPU), TrainingSettings(ttt_step_loss_decay=0.7).call_kwargs()
        if attention == "sdpa":
            del inputs["document_lengths"]
            _, loss, metrics = model(**inputs, **kwargs)
        else:
            loss, metrics = supervised_loss(model, **inputs, **kwargs)
        loss.backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        found.append((loss.detach(), gradients, metrics))
    (loss, gradients, metrics), (own_loss, own_gradients, own_metrics) = found
    torch.testing.assert_close(own_loss, loss)
    assert own_gradients.keys() == gradients.keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[name], gradient, rtol=1e-4, atol=1e-6)
    for name, value in own_metrics.items():
        torch.testing.assert_close(value.float(), metrics[name].float())


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_float32_muon_is_muon_but_for_rounding(shape):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    found = []
    for replace in (False, True):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Muon([parameter], lr=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        if replace:
            optimizer = Float32Muon.instead_of(optimizer)
            assert type(optimizer) is Float32Muon and optimizer.param_groups[0]["momentum"] == 0.9
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        found.append(parameter.detach())
    moved = (found[0] - start).norm()
    assert (found[0] - found[1]).norm() < 0.02 * moved


def test_orthogonalize_makes_singular_values_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(6, 20), (3.4445, -4.775, 2.0315), 5, 1e-7))
    assert ((values > 0.6) & (values < 1.3)).all()


# Configuration


def test_draft_configuration_is_what_vllm_reads():
    config = SimpleNamespace(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=512, initializer_range=0.02, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 128,
                         "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
    )  # fmt: skip
    decoder = decoder_config(config, DraftShape(2, (2, 4, 5, 6)))
    assert decoder.num_hidden_layers == 2 and decoder.max_position_embeddings == 512
    saved = decoder.to_diff_dict()
    assert saved["num_aux_hidden_states"] == 4 and saved["norm_output"] and saved["norm_before_fc"]
    assert "layer_types" not in saved or set(saved["layer_types"]) == {"full_attention"}
    assert set(rotary_parameters(config)) == {"rope_type", "rope_theta", "factor", "original_max_position_embeddings"}


def test_settings_are_checked():
    with pytest.raises(AerieError, match="unknown keys learning_rat;"):
        TrainingSettings.from_recipe({"learning_rat": 1})
    with pytest.raises(AerieError, match="expected one of muon, adamw"):
        TrainingSettings.from_recipe({"optimizer": "sgd"})
    with pytest.raises(AerieError, match="does not fit into batches"):
        TrainingSettings(batch_tokens=100, max_length=200)
    with pytest.raises(AerieError, match="unknown keys layer;"):
        DraftShape.from_recipe({"layer": 1, "aux_layer_ids": [1]})
    with pytest.raises(AerieError, match="one or more different"):
        DraftShape(1, (2, 2))


def test_layer_ids_beyond_the_target(problem):
    with pytest.raises(AerieError, match="layer ids 0 to 8"):
        build_draft(problem.target, DraftShape(1, (2, 9)), problem.vocab_map, 3, "sdpa")


# Checkpoints


def newest(checkpoints: Checkpoints) -> dict:
    state = checkpoints.newest()
    assert state is not None
    return state


def test_half_written_checkpoints_are_skipped(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    for step in (1, 2, 3):
        checkpoints.save(step, {"step": step, "weights": torch.full((3,), float(step))})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{n}.{end}" for n in (2, 3) for end in ("json", "pt")]
    (tmp_path / "step-00000009.tmp").write_bytes(b"killed while writing")
    (tmp_path / "step-00000008.pt").write_bytes(b"killed before the marker")
    assert newest(checkpoints)["step"] == 3
    whole = (tmp_path / "step-00000003.pt").read_bytes()
    (tmp_path / "step-00000003.pt").write_bytes(whole[:-1])  # cut short
    assert newest(checkpoints)["step"] == 2
    (tmp_path / "step-00000003.pt").write_bytes(bytes(len(whole)))  # the right size, and nothing in it
    assert newest(checkpoints)["step"] == 2
    assert newest(checkpoints)["weights"].dtype == torch.float32


# Whole trainings of a tiny target


def predictable_target(folder: Path) -> Path:
    """A tiny Llama whose next token depends mostly on the current one, so that a draft can learn it in seconds."""
    from safetensors.torch import load_file, save_file

    make_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    successor = torch.randperm(280, generator=torch.Generator().manual_seed(2))
    head = torch.zeros_like(embeddings)
    head[successor] = embeddings[:280]
    save_file(
        {**weights, "model.embed_tokens.weight": 3 * embeddings, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


@pytest.fixture(scope="module")
def problem(tmp_path_factory) -> SimpleNamespace:
    """A tiny target, its own greedy answers as samples, their states in real shards, and a vocabulary map."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("problem")
    folder = predictable_target(root / "target")
    described = {"name": "tiny", "digest": "t", "location": {"path": str(folder)}, "trust_remote_code": False}
    (root / "fingerprint.json").write_text(json.dumps(described))
    target = Target.read(root / "fingerprint.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, 280, (40, 8), generator=generator)
    answers = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=56, eos_token_id=None)
    samples = [
        Sample(ids, [0] * 8 + [1] * (len(ids) - 8), "tiny", "validation" if row % 5 == 0 else "train")
        for row, ids in enumerate(answers.tolist())
    ]
    samples.append(Sample(prompts[0].tolist(), [0] * 8, "tiny", "train"))  # nothing supervised
    (root / "dataset").mkdir()
    write_samples(samples, root / "dataset" / "samples")
    (root / "dataset" / "manifest.json").write_text(json.dumps({"digest": "d"}))

    capture = Capture("c", LAYERS, "float32", "float32", "transformers", {}, {})
    stored = []
    with torch.no_grad():
        for sample in samples:
            captured: list[torch.Tensor] = []
            hook = model.model.norm.register_forward_pre_hook(lambda module, args, kept=captured: kept.append(args[0]))
            states = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
            hook.remove()
            layers = torch.stack([states[2], states[4], states[5], captured[0]], dim=2)[0]
            stored.append(StoredSample(sample.key, np.asarray(sample.input_ids, dtype=np.int32), layers, None))
    store = HiddenStateStore(root / "store", "c")
    store.write_shard(capture, stored, 1.0)
    (root / "states").mkdir()
    store.known().to_parquet(root / "states" / "index.parquet")
    manifest = {"digest": "h", "capture_key": "c", "layer_ids": list(LAYERS), "settings": {"stored_dtype": "float32"}}
    (root / "states" / "manifest.json").write_text(json.dumps(manifest))

    dataset = load_samples(root / "dataset")
    counts = vocabulary.count_supervised([(row["input_ids"], row["loss_mask"]) for row in dataset], VOCAB_SIZE)
    vocab_map = vocabulary.map_of(vocabulary.choose_tokens(counts, 200, [3], range(280)), VOCAB_SIZE)
    (root / "map").mkdir()
    vocabulary.save_map(vocab_map, root / "map")
    (root / "map" / "manifest.json").write_text(json.dumps({"digest": "v"}))
    states_index = StatesIndex(root / "states", root / "store")
    return SimpleNamespace(root=root, target=target, samples=dataset, states=states_index, vocab_map=vocab_map)


@pytest.fixture(scope="module")
def trained(problem) -> SimpleNamespace:
    """The draft after SETTINGS, trained in this process."""
    torch.set_num_threads(1)
    work, out = problem.root / "trained-work", problem.root / "trained"
    work.mkdir()
    out.mkdir()
    figures, digest = train(problem.target, problem.samples, problem.states, problem.vocab_map, SETTINGS, RUNTIME, work, out)
    return SimpleNamespace(work=work, out=out, figures=figures, digest=digest, metrics=read_metrics(work / "metrics.jsonl"))


def read_metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_learns(trained):
    validation = [line for line in trained.metrics if line["split"] == "validation"]
    assert [line["epoch"] for line in validation] == [1, 2, 3, 4, 5, 6]
    assert validation[-1]["loss"] < 0.8 * validation[0]["loss"]
    figures = trained.figures["validation"]
    assert figures["accuracy"] == validation[-1]["accuracy"]
    assert figures["accuracy"][0] > 0.3
    assert figures["acceptance_length"] == pytest.approx(1 + sum(figures["accepted_per_position"]))
    assert figures["conditional_accuracy"][0] == figures["accuracy"][0]
    assert trained.figures["steps"] == trained.metrics[-1]["step"]
    assert trained.figures["tokens"] == 6 * (32 * 63 + 7)


def test_export_is_the_trained_model(problem, trained):
    """Loaded again by speculators, the export gives the logits of the model that was trained, from its checkpoint."""
    from speculators import SpeculatorModel
    from speculators.models.eagle3 import Eagle3DraftModel

    config = json.loads((trained.out / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["draft_vocab_size"] == 200
    assert config["norm_before_residual"] and config["norm_before_fc"] and config["norm_output"] and config["dtype"] == "float32"
    assert config["transformer_layer_config"]["max_position_embeddings"] == MAX_POSITIONS
    model = build_draft(problem.target, DraftShape(1, (2, 4, 5)), problem.vocab_map, 3, "sdpa")
    model.load_state_dict(newest(Checkpoints(trained.work / "checkpoints"))["trained"], strict=False)
    loaded_config = Eagle3DraftModel.config_class.from_pretrained(trained.out)
    loaded_config.transformer_layer_config._attn_implementation = "sdpa"
    loaded = SpeculatorModel.from_pretrained(str(trained.out), config=loaded_config)
    assert loaded.d2t.tolist() == problem.vocab_map.d2t.tolist() and loaded.t2d.tolist() == problem.vocab_map.t2d.tolist()
    torch.manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 12, 3 * 64),
        "input_ids": torch.randint(0, 280, (1, 12)),
        "document_ids": torch.zeros(1, 12, dtype=torch.long),
    }
    logits: dict[str, list[torch.Tensor]] = {"built": [], "loaded": []}
    for name, draft in (("built", model), ("loaded", loaded.float())):
        draft.eval()
        draft.lm_head.register_forward_hook(lambda module, args, output, kept=logits[name]: kept.append(output))
        with torch.no_grad():
            draft(**inputs)
    assert len(logits["built"]) == 3
    for built, again in zip(logits["built"], logits["loaded"], strict=True):
        torch.testing.assert_close(built, again)


def test_full_vocabulary_trains(problem, tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    settings = {**SETTINGS, "training": {**SETTINGS["training"], "epochs": 1}}
    full = vocabulary.full_map(VOCAB_SIZE)
    figures, _ = train(problem.target, problem.samples, problem.states, full, settings, RUNTIME, tmp_path / "work", tmp_path / "out")
    # Each drafting step passes over one token and those accepted: 55 of each sample, but for what the last one adds.
    passed = figures["validation"]["drafts"] * figures["validation"]["acceptance_length"]
    assert 8 * 55 <= passed < 8 * (55 + 3)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == VOCAB_SIZE


def test_golden(trained):
    """Figures of VERSION 1. If this fails on purpose, raise VERSION in train_draft.py and record the new ones."""
    assert trained.figures["steps"] == 54
    assert trained.figures["validation"]["loss"] == pytest.approx(7.63, abs=0.05)


def run_command(problem, output: str, script: Path = SCRIPTS / "train_draft.py", **popen) -> subprocess.Popen:
    recipe = {"stage": "train_draft", "version": 1, "settings": SETTINGS, "runtime": RUNTIME}
    (problem.root / "recipe.json").write_text(json.dumps(recipe))
    paths = {
        "recipe": "recipe.json",
        "store": "store",
        "target": "fingerprint.json",
        "dataset": "dataset",
        "hidden-states": "states",
        "vocab-map": "map",
        "output": output,
        "log": f"{output}.log",
    }
    arguments = [part for name, value in paths.items() for part in (f"--{name}", str(problem.root / value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(script), *arguments], env=environment, **popen)


def test_a_trainer_that_dies_without_a_word_is_named(problem, tmp_path: Path):
    script = tmp_path / "faulty.py"
    script.write_text(
        "import train_draft\nfrom aerie import cli\nfrom aerie.training import DraftTrainer\n"
        "class Silent(Exception):\n    pass\n"
        "def fail(self, batch, epoch):\n    raise Silent()\n"
        "DraftTrainer.train_step = fail\n"
        "cli.run(train_draft.main, train_draft.build_parser())\n"
    )
    process = run_command(problem, "dead", script, stderr=subprocess.PIPE, text=True)
    said = process.communicate()[1]
    assert process.returncode == 1
    assert "Silent: (no message; Silent())" in said and f"{script}:7, fail" in said


def test_killed_training_goes_on(problem, trained):
    """kill -9 in the middle; the same command goes on and ends with the very draft that an unbroken training gives."""
    process = run_command(problem, "killed", stderr=subprocess.DEVNULL)
    enough = 12
    deadline = time.monotonic() + 120
    while True:
        markers = [int(path.stem.removeprefix("step-")) for path in problem.root.glob("store/train_draft/*/work/checkpoints/*.json")]
        if max(markers, default=0) >= enough:
            break
        assert process.poll() is None and time.monotonic() < deadline, (problem.root / "killed.log").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (problem.root / "killed").exists()
    process = run_command(problem, "killed", stderr=subprocess.PIPE, text=True)
    _, terminal = process.communicate(timeout=240)
    assert process.returncode == 0, terminal
    resumed = int(terminal.split("resumed at step ")[1].split()[0])
    assert enough <= resumed < trained.figures["steps"]
    manifest = json.loads((problem.root / "killed" / "manifest.json").read_text())
    assert manifest["figures"]["steps"] == trained.figures["steps"] and manifest["figures"]["tokens"] == trained.figures["tokens"]
    metrics = read_metrics(problem.root / "killed" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [line["step"] for line in trained.metrics]
    assert [line["loss"] for line in metrics] == [line["loss"] for line in trained.metrics]
    assert manifest["digest"] == trained.digest


SERVE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    target, draft, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(model=target, dtype="float32", max_model_len=128, max_num_seqs=8, enforce_eager=True, disable_log_stats=False,
              speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 3})
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=56, ignore_eos=True))
    found = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in llm.get_metrics() if "spec_decode" in m.name}
    print("RESULT" + json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "metrics": found}))
"""


def test_vllm_serves_the_export(problem, trained, tmp_path: Path):
    """vLLM drafts with it, its output is the target's own, and it accepts what validation promised."""
    pytest.importorskip("vllm")
    (tmp_path / "serve.py").write_text(SERVE)
    chosen = [row["input_ids"] for row in problem.samples if row["split"] == "validation"]
    prompts = json.dumps([ids[:8] for ids in chosen])
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "serve.py"), str(problem.target.folder), str(trained.out), prompts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    assert found["tokens"] == [ids[8:] for ids in chosen]
    metrics = found["metrics"]
    accepted = [count / metrics["vllm:spec_decode_num_drafts"] for count in metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    # Drafting steps in serving are those after accepted tokens, not every position: near, not equal.
    assert accepted == pytest.approx(trained.figures["validation"]["accuracy"], abs=0.15)
