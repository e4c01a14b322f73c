"""Training a draft: what is paired with what, that it learns, survives kill -9, and that vLLM serves what it exports."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.train.data import CollateFn
from torch.optim._muon import _zeropower_via_newtonschulz

import train_draft
from aerie import vocabulary
from aerie.checkpoints import Checkpoints
from aerie.draft_attention import FLEX_ATTENTION, PACKED_ATTENTION, Packing, flex_packed_attention, packed_attention
from aerie.draft_model import DraftShape, aux_columns, build_draft, decoder_config, rotary_parameters, sliding_window, start_from
from aerie.errors import AerieError
from aerie.model_card import model_card
from aerie.muon import SharedMuon, orthogonalize, owners
from aerie.ranks import ALONE
from aerie.samples import Sample, load_samples, write_samples
from aerie.supervised_loss import _distribution, _judge, _target_distribution, supervised_loss
from aerie.targets import Target
from aerie.train_run import select_split, train
from aerie.training import DraftTrainer, TrainingSettings
from aerie.training_data import DraftSamples, PackLoader, PackOrder, ShardTransfer, rows_of, step_counts, supervised_counts
from aerie.validation import TargetHead, count_hits, walk
from checkout import SCRIPTS
from known_faults import skip_where
from tiny_targets import MAX_POSITIONS, VOCAB_SIZE, make_tiny_llama
from training_problem import LAYERS, RUNTIME, SETTINGS, make_problem

CPU = torch.device("cpu")


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
    states = HandMade({row.key: ids for row, (ids, _) in zip(rows, samples, strict=True)})
    transfer = ShardTransfer(states, dataset["sample_key"], [0, 2, 4])
    return DraftSamples(dataset, transfer, max_length, ttt_steps, torch.float32)


def loader_of(
    rows: DraftSamples,
    batch_tokens: int,
    packs: int = 1,
    seed: int = 0,
    pad_to: int | None = None,
    hidden: int = 2,
    aux: int = 2,
    threads: int = 0,
):
    return PackLoader(rows, PackOrder(rows.approx_lengths, rows.supervised, batch_tokens, packs, seed), hidden, aux, pad_to, threads)


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
    (batch,) = list(loader_of(rows, 64))
    assert rows_of(batch) == 11 and batch["input_ids"].shape == (1, 11)  # not padded
    documents, mask = batch["document_ids"][0], batch["loss_mask"][0]
    for step in range(steps):
        crossing = documents[: 11 - step] != documents[step:]
        assert not (mask[step:] & crossing).any()
    assert mask.sum() == 11 - 2 * (steps - 1)
    padded = next(iter(loader_of(rows, 64, pad_to=64)))
    assert padded["input_ids"].shape == (1, 64) and rows_of(padded) == 11


def test_order_depends_on_seed_and_epoch_only(tmp_path: Path):
    rows = hand_made([([n, n + 1, n + 2, n + 3], [1] * 4) for n in range(20)], tmp_path)

    def order(seed, epoch, step=0):
        loader = loader_of(rows, 9, seed=seed)
        loader.order.start(epoch, step)
        return [batch["input_ids"].tolist() for batch in loader]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2) and order(0, 1) != order(1, 1)
    assert order(0, 1, step=3) == order(0, 1)[3:]
    assert step_counts(loader_of(rows, 9).order, 2) == [len(order(0, 0)), len(order(0, 1))]


@pytest.mark.parametrize("pad_to", [None, 64])
def test_batches_are_those_of_speculators(tmp_path: Path, pad_to):
    """Its CollateFn is the right value; threads change neither the batches nor their order."""
    rows = hand_made([([n] * (4 + n % 5), [0, 0, 0] + [1] * (1 + n % 5)) for n in range(20)], tmp_path)
    made = list(loader_of(rows, 21, pad_to=pad_to))
    order = loader_of(rows, 21).order
    assert len(made) == len(order) > 3
    for batch, pack in zip(made, order, strict=True):
        samples = [rows[index] for index in pack]
        expected = CollateFn(pad_to or sum(int(sample["lengths"]) for sample in samples), 2, 2, torch.float32)(samples)
        for name in ("hidden_states", "verifier_last_hidden_states", "input_ids", "loss_mask", "position_ids", "document_ids"):
            assert batch[name].dtype == expected[name].dtype and torch.equal(batch[name], expected[name]), name
    ahead = list(loader_of(rows, 21, pad_to=pad_to, threads=3))
    assert [one.keys() for one in ahead] == [one.keys() for one in made]
    assert all(torch.equal(one[name], two[name]) for one, two in zip(ahead, made, strict=True) for name in one if name != "bad")


def test_what_a_reading_thread_finds_is_raised_where_the_batch_is_due(tmp_path: Path):
    rows = hand_made([([n, n + 1, n + 2, n + 3], [1] * 4) for n in range(20)], tmp_path)
    loader = loader_of(rows, 3, threads=2)
    lost = rows.samples[next(iter(list(loader.order)[5]))]["sample_key"]
    del rows.transfer.states.tokens[lost]
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with pytest.raises(AerieError, match=f"sample {lost}: no hidden states"):
        next(batches)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("packing")]


def test_ranks_share_the_packs_of_each_step():
    """Whoever computes them, a step has the same packs, and their shares of its supervised tokens add up to 1."""
    lengths, supervised = [5] * 11, np.array([4, 0, 3, 2, 4, 4, 1, 0, 2, 3, 4])

    def order(rank, ranks):
        return PackOrder(lengths, supervised, 5, packs_per_step=4, seed=0, rank=rank, ranks=ranks)

    (whole,), (first, second) = [[order(rank, ranks) for rank in range(ranks)] for ranks in (1, 2)]
    assert [one.steps for one in (whole, first, second)] == [3, 3, 3]  # of 4, 4 and 3 packs
    packs, ones, others = list(whole), list(first), list(second)
    assert packs == [ones[0], others[0], ones[1], others[1], ones[2], others[2], ones[3], others[3], ones[4], others[4], ones[5]]
    assert sorted(index for pack in packs for index in pack) == list(range(11))
    for step in range(3):
        assert sum(first.shares(step) + second.shares(step)) == pytest.approx(1)
        counts = [supervised[pack].sum() for pack in packs[4 * step : 4 * step + 4]]
        assert whole.shares(step) == pytest.approx([count / sum(counts) for count in counts])
    assert len(first) == 6 and len(second) == 5 and whole.rows(2) == 15


def test_the_packs_of_a_step_are_alike():
    """Ranks wait for each other: of 41 packs with 0 to 40 supervised tokens, each step has two neighbours, in random order."""
    lengths, supervised = [5] * 41, np.random.default_rng(0).permutation(41)
    order = PackOrder(lengths, supervised, 5, packs_per_step=2, seed=0)
    seen = []
    for epoch in range(2):
        order.start(epoch)
        counts = [int(supervised[pack].sum()) for pack in order]
        steps = [counts[i : i + 2] for i in range(0, 40, 2)]
        assert sorted(counts) == list(range(41)) and all(
            high - low in (1, 2) for low, high in steps
        )  # 2: the last pack, alone, lay between
        assert steps != sorted(steps)
        seen.append(steps)
    assert seen[0] != seen[1]
    ones = PackOrder(lengths, supervised, 5, packs_per_step=1, seed=0)
    assert list(ones) == [pack.tolist() for pack in ones._sampler]


def test_supervised_tokens_are_counted_where_they_are_judged(tmp_path: Path):
    masks = [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
    samples = [([10 * n + i for i in range(len(mask))], mask) for n, mask in enumerate(masks, 1)]
    rows = hand_made(samples, tmp_path, max_length=5, ttt_steps=3)
    found = dict(zip((row["input_ids"][0] for row in rows.samples), rows.supervised.tolist(), strict=True))
    assert found == {10: 2, 20: 0, 30: 1, 40: 0}  # tokens 3 and 4 of each
    assert {row: int(rows[row]["loss_mask"].sum()) for row in range(4)} == dict(enumerate(rows.supervised.tolist()))
    assert supervised_counts(rows.samples.select([3, 1]), 5, 3).tolist() == [rows.supervised[3], rows.supervised[1]]


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
        bad[1, 4, 0] = value
        states.states = lambda key, bad=bad: bad
        with pytest.raises(AerieError, match=f"sample {key}: hidden states that are not finite at 1 of 3 positions, the first at 1"):
            rows[0]


def test_bad_samples_are_left_out_if_so_configured(tmp_path: Path):
    rows = hand_made([([11, 12, 13, 14], [1] * 4), ([21, 22, 23], [1] * 3)], tmp_path)
    rows.skip_bad = True
    states, key = rows.transfer.states, next(row["sample_key"] for row in rows.samples if row["input_ids"][0] == 11)
    plain = states.states
    states.states = lambda wanted: plain(wanted) * float("nan") if wanted == key else plain(wanted)
    (batch,) = list(loader_of(rows, 64))
    assert batch["input_ids"].tolist() == [[22, 23]]
    (said,) = batch["bad"]
    assert said.startswith(f"sample {key}: hidden states that are not finite at 4 of 4 positions")
    states.states = lambda wanted: plain(wanted) * float("nan")
    (batch,) = list(loader_of(rows, 64))
    assert len(batch["bad"]) == 2 and rows_of(batch) == 0 and not batch["loss_mask"].any()


def test_samples_without_supervised_tokens_are_named(problem, monkeypatch, capsys):
    sample = problem.samples[0]
    silent = problem.samples.select([0]).map(lambda row: {"loss_mask": [0] * len(row["input_ids"]), "split": "train"})
    from datasets import concatenate_datasets

    both = concatenate_datasets([silent, problem.samples.select(range(1, len(problem.samples)))])
    expected = f"1 of .* train samples have no supervised token that training could judge: {sample['sample_key']}"
    with pytest.raises(AerieError, match=expected + ".*on_bad_sample: skip"):
        select_split(both, "train", TrainingSettings())
    chosen = select_split(both, "train", TrainingSettings(on_bad_sample="skip"))
    assert sample["sample_key"] not in chosen["sample_key"] and sample["sample_key"] in capsys.readouterr().err
    with pytest.raises(AerieError, match="no usable train sample"):
        select_split(silent, "train", TrainingSettings(on_bad_sample="skip"))


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


@pytest.mark.parametrize("autocast", [False, True])
def test_divergence_is_float32_also_where_products_are_not(autocast):
    """Against torch's own in float64; autocast would take a sum of products to bfloat16."""
    torch.manual_seed(0)
    targets, logits = torch.randn(2, 7, 300).mul(4).unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        probabilities, negentropy, target_best = _distribution(targets.clone(), None)
        divergence, best, gradient = _judge(logits.clone(), probabilities, negentropy)
    expected, drafted = targets.double().softmax(-1), logits.double().requires_grad_()
    losses = torch.nn.functional.kl_div(drafted.log_softmax(-1), expected, reduction="none").sum(-1)
    losses.sum().backward()
    torch.testing.assert_close(divergence.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), drafted.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(best, logits.argmax(-1)) and torch.equal(target_best, targets.argmax(-1))


@pytest.fixture
def dynamo():
    """What flex attention needs, and a vLLM that was started in this process has turned off."""
    import torch._dynamo

    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.mark.parametrize("attention", [packed_attention, flex_packed_attention])
@pytest.mark.parametrize("window", [None, 2])
def test_attention_is_masked_attention(attention, window, dynamo):
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(0)
    documents, rows, steps = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, -1, -1]), 12, 3
    row = torch.arange(rows)
    first = (row[:, None] >= row) & (documents[:, None] == documents) & (documents[:, None] >= 0)
    if window:
        first &= row > row[:, None] - window
    first |= torch.eye(rows).bool()
    mask = torch.cat([first, *[torch.eye(rows).bool()] * (steps - 1)], dim=1)[None, None]
    query = torch.randn(1, 4, rows, 16)
    key, value = (torch.randn(1, 2, rows * steps, 16) for _ in range(2))
    module = torch.nn.Identity()

    def expected(blocks):
        keys = rows * blocks
        return scaled_dot_product_attention(query, key[:, :, :keys], value[:, :, :keys], attn_mask=mask[..., :keys], enable_gqa=True)

    for later in (torch.tensor([1, 2, 4, 7]), torch.tensor([1, 2, 4, 7, 7, 7])):  # none of the third sample
        packing = Packing(documents, later, window).with_masks(CPU)
        found, _ = attention(module, query, key[:, :, :rows], value[:, :, :rows], None, packing=packing)
        own = documents >= 0 if attention is packed_attention else slice(None)  # a CPU's packs have no padding
        torch.testing.assert_close(found[:, own], expected(1).transpose(1, 2)[:, own])
        columns = torch.cat([row, *(step * rows + later for step in range(1, steps))])
        found, _ = attention(module, query[:, :, later], key[:, :, columns], value[:, :, columns], None, packing=packing)
        torch.testing.assert_close(found, expected(3)[:, :, later].transpose(1, 2))
        with pytest.raises(ValueError, match="do not add up"):
            attention(module, query[:, :, :5], key, value, None, packing=packing)


def test_flex_attention_skips_what_no_query_sees():
    """Blocks of other samples are left out, and blocks that are seen whole need no mask."""
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([256, 128, 384]))
    packing = Packing(documents, torch.arange(3, 700, 5)).with_masks(CPU)
    assert packing.masks is not None
    first = packing.masks[0]
    assert first.kv_num_blocks.tolist() == [[[1] * 6]]  # the diagonal's
    assert first.full_kv_num_blocks.tolist() == [[[0, 1, 0, 0, 1, 2]]]
    dense = first.to_dense()[0, 0].bool()
    assert dense.tolist() == [[c in row for c in range(6)] for row in ([0], [0, 1], [2], [3], [3, 4], [3, 4, 5])]


@pytest.fixture(scope="module")
def packed_batch(problem) -> dict:
    transfer = ShardTransfer(problem.states, problem.samples["sample_key"], [0, 1, 2, 4])
    samples = DraftSamples(problem.samples, transfer, 64, 3, torch.float32)
    return next(iter(loader_of(samples, 256, hidden=64, aux=3)))


@pytest.mark.parametrize("window", [None, 7])
def test_loss_at_supervised_rows_is_speculators_loss(problem, packed_batch, window):
    """Loss, gradients and metrics are those of speculators' forward, which computes every row with dense attention."""
    found = []
    for attention in ("sdpa", PACKED_ATTENTION):
        torch.manual_seed(0)
        model = build_draft(problem.target, DraftShape(2, (2, 4, 5), window), problem.vocab_map, 3, attention)
        assert model.uses_sliding_window_attn == (window is not None) == (sliding_window(model.config.transformer_layer_config) == 7)
        if attention == "sdpa":
            inputs = {name: value for name, value in packed_batch.items() if isinstance(value, torch.Tensor)}
            kwargs = model.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", ttt_steps=3, ttt_step_loss_decay=0.7)[0]
            drafted, loss, metrics = model(**inputs, **kwargs)
            hits = [float(metrics[f"full_acc_{step}_sum"]) for step in range(3)]
        else:
            judged = supervised_loss(model, packed_batch, 3, 0.7, window)
            assert judged is not None
            loss, hits = judged.loss, judged.sums[:, 1].tolist()
            for step in range(3):
                assert judged.best[step].tolist() == drafted[step][0, judged.supervised - step].tolist()
        loss.backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        found.append((loss.detach(), gradients, hits))
    (loss, gradients, hits), (own_loss, own_gradients, own_hits) = found
    torch.testing.assert_close(own_loss, loss)
    assert own_hits == hits and own_gradients.keys() == gradients.keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_loss_with_the_gpus_attention_is_the_cpus(problem, packed_batch, window, dynamo):
    """flex attention has no gradient on a CPU, so its loss alone is compared; the benchmark compares gradients on a GPU."""
    losses = []
    for attention in (PACKED_ATTENTION, FLEX_ATTENTION):
        torch.manual_seed(0)
        model = build_draft(problem.target, DraftShape(2, (2, 4, 5), window), problem.vocab_map, 3, attention)
        with torch.no_grad():
            judged = supervised_loss(model, packed_batch, 3, 0.7, window)
        assert judged is not None
        losses.append(judged)
    torch.testing.assert_close(losses[1].loss, losses[0].loss)
    torch.testing.assert_close(losses[1].sums, losses[0].sums)


@pytest.mark.parametrize("window", [None, 2])
def test_losses_sit_where_they_must(problem, window):
    """By hand: 12 tokens, of which 5 to 7 are supervised, so rows 4 to 6 are judged: the positions before them.

    Whatever a step's divergence depends on is found by changing one row of one input.
    """
    steps, tokens = 3, 12
    torch.manual_seed(0)
    batch = {
        "hidden_states": torch.randn(1, tokens - 1, 3 * 64),
        "verifier_last_hidden_states": torch.randn(1, tokens - 1, 64),
        "input_ids": torch.randint(4, 280, (1, tokens - 1)),
        "loss_mask": torch.tensor([[token in (5, 6, 7) for token in range(1, tokens)]]),
        "position_ids": torch.arange(1, tokens)[None],
        "document_ids": torch.zeros(1, tokens - 1, dtype=torch.long),
    }
    model = build_draft(problem.target, DraftShape(1, (2, 4, 5), window), problem.vocab_map, steps, PACKED_ATTENTION)

    def divergences(changed):
        with torch.no_grad():
            judged = supervised_loss(model, changed, steps, 1.0, window)
        assert judged is not None and judged.supervised.tolist() == [4, 5, 6]
        return judged.sums[:, 0]

    plain = divergences(batch)

    def rows_that_matter(name):
        found: list[list[int]] = [[] for _ in range(steps)]
        for row in range(tokens - 1):
            value = batch[name].clone()
            value[0, row] = (value[0, row] + 17) % 280 if name == "input_ids" else value[0, row] + torch.randn(value.shape[-1])
            for step, differs in enumerate((divergences({**batch, name: value}) - plain).abs() > 1e-5):
                if differs:
                    found[step].append(row)
        return found

    # The target's distributions: of the judged rows, at every step; nothing of the stale edge to the right.
    assert rows_that_matter("verifier_last_hidden_states") == [[4, 5, 6]] * steps
    # Step k drafts from k rows earlier, with the states up to there: all of them, or a window of two.
    starts = [[4 - step, 5 - step, 6 - step] for step in range(steps)]
    seen = [list(range(rows[-1] + 1)) if window is None else [rows[0] - 1, *rows] for rows in starts]
    assert rows_that_matter("hidden_states") == seen
    # Of the tokens it sees those up to its own, and those of the k steps since.
    assert rows_that_matter("input_ids") == [list(range(rows[0], 7)) for rows in seen]
    assert divergences({**batch, "document_ids": torch.tensor([[0] * 4 + [1] * 7])}).tolist() != plain.tolist()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 20)])
def test_muon_is_torchs(shape):
    """But for the rounding: torch's is in bfloat16."""
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]

    def trained(dtype: torch.dtype | None) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Muon([parameter], lr=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        if dtype:
            optimizer = SharedMuon(optimizer, dtype, ALONE)
            assert optimizer.param_groups[0]["momentum"] == 0.9
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    for dtype, rounding in ((torch.bfloat16, 0.03), (torch.float32, 0.02)):
        assert (trained(dtype) - trained(None)).norm() < rounding * (trained(None) - start).norm()


def test_ranks_share_the_work_of_muon():
    """Of a layer's matrices, for two ranks: work is rows * columns * the smaller of both."""
    wide, square, narrow = torch.Size([40, 140]), torch.Size([40, 40]), torch.Size([10, 40])
    shapes = [wide, square, narrow, wide, wide, square]
    assert owners(shapes, 1) == [0] * 6
    owner = owners(shapes, 2)
    work = [sum(min(shape) * shape.numel() for shape, own in zip(shapes, owner, strict=True) if own == rank) for rank in (0, 1)]
    assert set(owner) == {0, 1} and sorted(work) == [40 * 40 * (140 + 40 + 40) + 10 * 10 * 40, 40 * 40 * 280]


def test_orthogonalize_makes_singular_values_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(6, 20), (3.4445, -4.775, 2.0315), 5, 1e-7))
    assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.parametrize("shape", [(48, 60), (60, 48), (48, 150), (150, 48), (150, 40)])
def test_orthogonalize_is_newton_schulz(shape):
    """Singular values of 1 to 1e-3, and those of rank one: in float64 it is the iteration, in bfloat16 as near as torch's own."""
    torch.manual_seed(0)
    coefficients, least = (3.4445, -4.775, 2.0315), min(shape)
    left, right = (torch.linalg.qr(torch.randn(size, least, dtype=torch.float64))[0] for size in shape)
    for values in (torch.logspace(0, -3, least, dtype=torch.float64), torch.eye(least, dtype=torch.float64)[0]):
        matrix = left * values @ right.T
        expected = values / values.norm()
        for _ in range(5):
            expected = coefficients[0] * expected + coefficients[1] * expected**3 + coefficients[2] * expected**5
        whole = left * expected @ right.T
        torch.testing.assert_close(orthogonalize(matrix, coefficients, 5, 1e-7), whole, rtol=0, atol=1e-10)

        def error(found: torch.Tensor, whole: torch.Tensor = whole) -> float:
            return float((found.double() - whole).norm() / whole.norm())

        assert error(orthogonalize(matrix.float(), coefficients, 5, 1e-7)) < 1e-4
        torchs = _zeropower_via_newtonschulz(matrix.float(), coefficients, 5, 1e-7)
        assert error(orthogonalize(matrix.bfloat16(), coefficients, 5, 1e-7)) < 1.2 * error(torchs)


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
    with pytest.raises(AerieError, match="packs_per_step is 0; expected at least 1"):
        TrainingSettings(packs_per_step=0)
    with pytest.raises(AerieError, match="does not fit into batches"):
        TrainingSettings(batch_tokens=100, max_length=200)
    with pytest.raises(AerieError, match="unknown keys layer;"):
        DraftShape.from_recipe({"layer": 1, "aux_layer_ids": [1]})
    with pytest.raises(AerieError, match="one or more different"):
        DraftShape(1, (2, 2))
    with pytest.raises(AerieError, match="sliding_window is 0"):
        DraftShape(1, (2,), 0)


def test_layer_ids_beyond_the_target(problem):
    with pytest.raises(AerieError, match="layer ids 0 to 8"):
        build_draft(problem.target, DraftShape(1, (2, 9)), problem.vocab_map, 3, "sdpa")


def granite(**settings):
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**settings, logits_scaling=6.0, embedding_multiplier=12.0, residual_multiplier=0.22))


def gemma2(**settings):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**settings, final_logit_softcapping=2.0, head_dim=32))


@pytest.mark.parametrize("make", [granite, gemma2])
def test_the_distribution_taught_is_the_targets_own(tmp_path, make):
    """Also where its logits are scaled (Granite) or capped (Gemma 2, whose norm stores gains less 1)."""
    torch.manual_seed(0)
    settings = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    reference = make(**settings, vocab_size=320, initializer_range=0.3, pad_token_id=0).eval()
    reference.save_pretrained(tmp_path)
    target = Target("t", "t", {"path": str(tmp_path)}, False)
    caught = []
    reference.model.norm.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0][0]))
    with torch.no_grad():
        expected = reference(torch.randint(4, 280, (1, 64))).logits[0].log_softmax(-1)
    [states] = caught
    model = build_draft(target, DraftShape(1, (2, 4, 5)), vocabulary.full_map(320), 3, PACKED_ATTENTION)
    probabilities, negentropy, best = _target_distribution(model, states, torch.float32)
    torch.testing.assert_close(probabilities, expected.exp(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(negentropy, (expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-4)
    assert best.tolist() == expected.argmax(-1).tolist()
    torch.testing.assert_close(TargetHead.of(target).log_probabilities(states), expected, rtol=1e-4, atol=1e-4)


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
    assert newest(checkpoints)["weights"].dtype == torch.float32
    (tmp_path / "step-00000003.json").write_text("")  # lost with the power
    assert newest(checkpoints)["step"] == 2
    checkpoints.save(4, {"step": 4})
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("block", [0.0, 0.6])
def test_damaged_checkpoints_are_set_aside(tmp_path: Path, block, capsys):
    """Of the right size, and with a block of zeros: torch.load itself sees none among the weights."""
    checkpoints = Checkpoints(tmp_path)
    for step in (8, 9):
        checkpoints.save(step, {"step": step, "weights": torch.full((100_000,), float(step))})
    path = tmp_path / "step-00000009.pt"
    content = bytearray(path.read_bytes())
    start = int(len(content) * block)
    content[start : start + 4096] = bytes(4096)
    path.write_bytes(content)
    assert newest(checkpoints)["step"] == 8
    assert f"checkpoint {path} is damaged" in capsys.readouterr().err
    checkpoints.save(1, {"step": 1})  # kept, though its step is lower than that of the damaged one
    assert sorted(one.name for one in tmp_path.glob("*.pt")) == ["step-00000001.pt", "step-00000008.pt"]
    assert (tmp_path / "step-00000009.damaged").exists()


def test_a_checkpoint_that_may_be_whole_is_not_passed_over(tmp_path: Path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"step": 7})

    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", stale)
        with pytest.raises(AerieError, match=r"step-00000007\.pt: this checkpoint may not be read: .*Stale file handle"):
            checkpoints.newest()
    assert newest(checkpoints)["step"] == 7


def test_a_full_disk_ends_a_checkpoint_with_its_reason(tmp_path: Path):
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "aerie-test", tmp_path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, {"step": 1})
        with pytest.raises(AerieError, match=r"step-00000002\.pt: this checkpoint cannot be written: No space left on device; .* are free"):
            checkpoints.save(2, {"weights": torch.zeros(1_000_000)})
        assert not list(tmp_path.glob("*.tmp")) and newest(checkpoints)["step"] == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# Whole trainings of a tiny target


@pytest.fixture(scope="module")
def problem(tmp_path_factory) -> SimpleNamespace:
    return make_problem(tmp_path_factory.mktemp("problem"))


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
    assert trained.figures["tokens"] == 6 * 32 * 63


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


def test_the_best_weights_are_exported(problem, tmp_path: Path):
    """Those of the validation with the longest acceptance, the first of equal ones, whatever came after."""
    lengths, seen = [1.2, 1.5, 1.5, 1.1], []
    shape, settings = DraftShape(1, (2, 4, 5)), TrainingSettings(epochs=2, batch_tokens=256, max_length=256, validations_per_epoch=2)
    transfer = ShardTransfer(problem.states, problem.samples["sample_key"], [0, 1, 2, 4])
    loader = loader_of(DraftSamples(problem.samples, transfer, 256, 3, torch.float32), 256, hidden=64, aux=3)
    model = build_draft(problem.target, shape, problem.vocab_map, 3, PACKED_ATTENTION)

    def validate(draft):
        seen.append(draft.fc.weight.detach().clone())
        return {"acceptance_length": lengths[len(seen) - 1], "accuracy": [0.0], "loss": 0.0}

    trainer = DraftTrainer(model, settings, loader, validate, tmp_path, CPU, 1000.0)
    figures = trainer.run()
    assert len(seen) == 4 and figures["acceptance_length"] == 1.5 and trainer.best["step"] == trainer.epoch_steps[0]
    assert torch.equal(model.fc.weight, seen[1]) and not torch.equal(model.fc.weight, seen[2])
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["split"] == "validation"]
    first, second = trainer.epoch_steps
    assert steps == [(first + 1) // 2, first, first + (second + 1) // 2, first + second]


def test_a_loss_out_of_range_ends_the_training(problem, tmp_path: Path):
    """Nothing that it has spoilt is kept."""
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    settings = {**SETTINGS, "training": {**SETTINGS["training"], "learning_rate": 1e30}}
    with pytest.raises(AerieError, match=r"the loss is nan at step \d+ .*lower training.learning_rate"):
        train(problem.target, problem.samples, problem.states, problem.vocab_map, settings, RUNTIME, tmp_path / "work", tmp_path / "out")
    for path in (tmp_path / "work/checkpoints").glob("*.pt"):
        assert all(value.isfinite().all() for value in torch.load(path)["trained"].values())
    assert not any((tmp_path / "out").iterdir())


def test_a_draft_starts_from_another(problem, trained, tmp_path: Path):
    shape = DraftShape(1, (2, 4, 5))
    other = build_draft(problem.target, shape, problem.vocab_map, 3, PACKED_ATTENTION)
    start_from(other, trained.out)
    stored = load_file(trained.out / "model.safetensors")
    for name, value in other.named_parameters():
        if value.requires_grad:
            assert torch.equal(value.detach(), stored[name])
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    settings = {**SETTINGS, "training": {**SETTINGS["training"], "epochs": 1, "learning_rate": 1e-9}}
    arguments = (problem.target, problem.samples, problem.states, problem.vocab_map, settings, RUNTIME, work, out)
    figures, _ = train(*arguments, init_from=trained.out)
    assert figures["validation"]["loss"] == pytest.approx(trained.figures["validation"]["loss"], abs=1e-3)


def test_a_draft_of_another_kind_is_no_start(problem, trained, tmp_path: Path):
    def refused(shape, vocab_map, message, folder=trained.out):
        with pytest.raises(AerieError, match=message):
            start_from(build_draft(problem.target, shape, vocab_map, 3, PACKED_ATTENTION), folder)

    refused(DraftShape(2, (2, 4, 5)), problem.vocab_map, r"layers\.1\.\S+ None, not \(")
    refused(DraftShape(1, (2, 4, 6)), problem.vocab_map, r"layer_ids \[2, 4, 5\], not \[2, 4, 6\]")
    refused(DraftShape(1, (2, 4)), problem.vocab_map, r"fc\.weight \(64, 192\), not \(64, 128\)")
    swapped = problem.vocab_map.target_ids.copy()
    unused = np.setdiff1d(np.arange(280), swapped)[:1]
    another = vocabulary.map_of(np.sort(np.concatenate([swapped[1:], unused])), VOCAB_SIZE)
    refused(DraftShape(1, (2, 4, 5)), another, "its vocabulary .200 of 320 ids. is not this draft's .200 of 320.")
    refused(DraftShape(1, (2, 4, 5)), vocabulary.full_map(VOCAB_SIZE), "is not this draft's .320 of 320.")
    refused(DraftShape(1, (2, 4, 5)), problem.vocab_map, "no EAGLE-3 draft as train_draft writes it", tmp_path)


def test_a_drafts_map_is_checked_on_every_load(problem, trained, tmp_path: Path):
    def changed(name, **tensors):
        shutil.copytree(trained.out, tmp_path / name)
        stored = load_file(trained.out / "model.safetensors") | tensors
        save_file({key: value for key, value in stored.items() if value is not None}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    found = vocabulary.draft_map(trained.out)
    assert found.d2t.tolist() == problem.vocab_map.d2t.tolist() and found.t2d.tolist() == problem.vocab_map.t2d.tolist()
    stored = load_file(trained.out / "model.safetensors")
    for name, tensors, message in (
        ("stale", {"d2t": stored["d2t"] + 1}, "draft id 0 is target id 1 in d2t but 0 in t2d|in d2t but"),
        ("lost", {"t2d": None}, "200 of 320 ids, and not both d2t and t2d"),
        ("head", {"lm_head.weight": stored["lm_head.weight"][:-1].clone()}, "lm_head has 199 rows, config.json says 200"),
        ("embeddings", {"embed_tokens.weight": stored["embed_tokens.weight"][:-1].clone()}, "embed_tokens has 319 rows"),
    ):
        folder = changed(name, **tensors)
        with pytest.raises(AerieError, match=message):
            vocabulary.draft_map(folder)


def test_model_card_says_what_the_draft_is(problem, trained):
    import yaml

    own = {"supervised_tokens": 1000, "covered_tokens": 980, "coverage": 0.98}
    coverage = {**own, "draft_vocab_size": 200, "target_vocab_size": 320, "by_source": {"chats.jsonl": own}}
    card = model_card(problem.target, SETTINGS, "k" * 64, {"dataset": "d" * 64}, coverage, trained.figures)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "license": "other", "library_name": "speculators", "tags": ["eagle3", "speculative-decoding", "draft-model"],
    }  # fmt: skip
    length = trained.figures["validation"]["acceptance_length"]
    for text in (f"acceptance length {length:.3f}", "200 of 320 tokens", "98.00% of the train split's supervised tokens",
                 "The train split, by source:", "| chats.jsonl | 1,000 | 98.00% |", "train_draft " + "k" * 64,
                 "dataset " + "d" * 64, '"learning_rate": 0.01', "its folder names none"):  # fmt: skip
        assert text in body
    (problem.target.folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A target\n")
    card = model_card(problem.target, SETTINGS, "k" * 64, {}, coverage, trained.figures)
    (problem.target.folder / "README.md").unlink()
    assert 'license: "apache-2.0"' in card and "- target: apache-2.0" in card


HUB = {"hub_id": "moonshotai/Kimi-K2.5", "revision": "54383e83fa343a1331754112fb9e3410c55efa2f"}
CACHED = "hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218"


@pytest.mark.parametrize(
    ("folder", "location", "trusted", "base"),
    [
        ("my models/tiny", None, True, None),  # no id, so none is invented
        (CACHED, None, False, "Qwen/Qwen3-8B"),
        (CACHED, HUB, True, "moonshotai/Kimi-K2.5"),
    ],
)
def test_model_card_names_the_target_so_that_others_find_it(folder, location, trusted, base, trained, tmp_path, monkeypatch):
    import yaml
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.chdir(tmp_path)  # where snakemake is given: the configuration's relative paths begin there
    make_tiny_llama(folder)
    target = Target("a-key-of-the-configuration", "d", location or {"path": folder}, trusted)
    vars(target)["folder"] = Path(folder)  # nothing is downloaded
    own = {"supervised_tokens": 1000, "covered_tokens": 980, "coverage": 0.98}
    coverage = {**own, "draft_vocab_size": 200, "target_vocab_size": 320, "by_source": {"chats.jsonl": own}}
    card = model_card(target, SETTINGS, "k" * 64, {}, coverage, trained.figures)
    assert yaml.safe_load(card.split("---\n", 2)[1]).get("base_model") == base
    assert f"# EAGLE-3 draft for {base or 'a-key-of-the-configuration'}\n" in card
    [line] = [line for line in card.splitlines() if line.startswith("vllm serve ")]
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", *shlex.split(line)[2:]])
    assert parsed.model == (location["hub_id"] if location else folder) and parsed.trust_remote_code == trusted
    assert parsed.revision == (location["revision"] if location else None)
    assert parsed.speculative_config == {"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3}
    if not location:
        assert AsyncEngineArgs.from_cli_args(parsed).create_model_config().get_vocab_size() == VOCAB_SIZE


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


class Spoilt:
    """The states of a capture, those of some samples not a number."""

    def __init__(self, states, keys) -> None:
        self._states, self._keys = states, keys
        self.layer_ids = states.layer_ids

    def __contains__(self, key):
        return key in self._states

    def token_ids(self, key):
        return self._states.token_ids(key)

    def states(self, key):
        found = self._states.states(key)
        return found * float("nan") if key in self._keys else found


def test_spoilt_validation_samples_are_named_and_counted(problem, tmp_path: Path, capsys):
    keys = [row["sample_key"] for row in problem.samples if row["split"] == "validation"]
    settings = {**SETTINGS, "training": {**SETTINGS["training"], "epochs": 1, "on_bad_sample": "skip"}}

    def run(spoilt):
        for name in ("work", "out"):
            (tmp_path / name).mkdir()
        states = Spoilt(problem.states, spoilt)
        return train(problem.target, problem.samples, states, problem.vocab_map, settings, RUNTIME, tmp_path / "work", tmp_path / "out")

    with pytest.raises(AerieError, match=f"no supervised token .*; {len(keys)} of its samples are left out, since their states are not"):
        run(keys)
    assert not (tmp_path / "work/metrics.jsonl").exists()  # before the first step
    shutil.rmtree(tmp_path / "work")
    shutil.rmtree(tmp_path / "out")
    capsys.readouterr()
    figures, _ = run(keys[1:])
    said = capsys.readouterr().err
    assert figures["samples_left_out"] == len(keys) - 1 and all(f"left out: sample {key}" in said for key in keys[1:])
    passed = figures["validation"]["drafts"] * figures["validation"]["acceptance_length"]
    assert 55 <= passed < 55 + 3  # one sample's supervised tokens


def test_golden(trained):
    """Figures of VERSION 2 to 4. If this fails on purpose, raise VERSION in train_draft.py and record the new ones."""
    assert trained.figures["steps"] == 48
    assert trained.figures["validation"]["loss"] == pytest.approx(8.79, abs=0.05)


def run_command(problem, output: str, script: Path = SCRIPTS / "train_draft.py", **popen) -> subprocess.Popen:
    recipe = {"stage": "train_draft", "version": train_draft.VERSION, "settings": SETTINGS, "runtime": RUNTIME}
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
        "def fail(self, batches, shares):\n    raise Silent()\n"
        "DraftTrainer._step = fail\n"
        "cli.run(train_draft.main, train_draft.build_parser())\n"
    )
    process = run_command(problem, "dead", script, stderr=subprocess.PIPE, text=True)
    said = process.communicate()[1]
    assert process.returncode == 1
    assert "Silent: (no message; Silent())" in said and f"{script}:7, fail" in said


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


def served(problem, draft: Path, tmp_path: Path) -> tuple[list, list[list[int]], list[float]]:
    """(expected answers, vLLM's with the draft, accepted at each position) on the validation split."""
    pytest.importorskip("vllm")
    skip_where("speculation")
    (tmp_path / "serve.py").write_text(SERVE)
    chosen = [row["input_ids"] for row in problem.samples if row["split"] == "validation"]
    prompts = json.dumps([ids[:8] for ids in chosen])
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "serve.py"), str(problem.target.folder), str(draft), prompts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    metrics = found["metrics"]
    accepted = [count / metrics["vllm:spec_decode_num_drafts"] for count in metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    return [ids[8:] for ids in chosen], found["tokens"], accepted


def test_vllm_serves_the_export(problem, trained, tmp_path: Path):
    """vLLM drafts with it, its output is the target's own, and it accepts what validation promised."""
    expected, answers, accepted = served(problem, trained.out, tmp_path)
    assert answers == expected
    assert accepted == pytest.approx(trained.figures["validation"]["accepted_per_position"], abs=0.03)


@pytest.mark.long
@pytest.mark.parametrize("shape", [{"aux_layer_ids": [2, 4, 5, 6]}, {"sliding_window": 8}, {"layers": 2}])
def test_vllm_serves_other_shapes(problem, tmp_path: Path, shape):
    """Four aux layers, a sliding window, two decoder layers: what is trained is what is served."""
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    arguments = (problem.target, problem.samples, problem.states, problem.vocab_map, {**SETTINGS, **shape}, RUNTIME)
    figures, _ = train(*arguments, tmp_path / "work", tmp_path / "out")
    expected, answers, accepted = served(problem, tmp_path / "out", tmp_path)
    assert answers == expected
    assert accepted[0] > 0.2 and accepted == pytest.approx(figures["validation"]["accepted_per_position"], abs=0.03)
