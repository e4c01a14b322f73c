"""Dataset preparation: the ledger adds up, order does not matter, the split is stable and never empty."""

import json
import random

import pytest
from transformers import AutoTokenizer

import prepare_dataset
from aerie.chat import Conversation
from aerie.errors import AerieError, Terminated
from aerie.samples import load_samples, samples_digest, write_samples
from tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path_factory.mktemp("target")))


def talk(question, answer, line=1):
    return Conversation("f.json", line, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def prepare(rows, tokenizer, max_length=512, share=0.1):
    return prepare_dataset.prepare(rows, tokenizer, [tokenizer.eos_token_id], max_length, share)


def many(count):
    return [talk(f"question {number}", f"answer {number * number}", number) for number in range(count)]


def test_rows_are_kept_or_rejected(tokenizer):
    rows = [*many(30), talk("question 3", "answer 9", 31), talk("only", "", 32), Conversation("f.json", 33, [], "no messages")]
    found = prepare(rows, tokenizer)
    assert len(found.samples) + len(found.rejects) == found.rows == 33
    assert [(reject["line"], reject["reason"]) for reject in found.rejects] == [
        (31, "duplicate"),
        (32, "no assistant turn with text"),
        (33, "no messages"),
    ]


def test_order_of_rows_changes_nothing(tokenizer):
    rows = many(40)
    shuffled = random.Random(0).sample(rows, len(rows))
    assert prepare(rows, tokenizer).samples == prepare(shuffled, tokenizer).samples


def test_the_split_is_stable_under_growth_and_regeneration(tokenizer):
    small, large = prepare(many(50), tokenizer), prepare(many(200), tokenizer)
    splits = {sample.order: sample.split for sample in large.samples}
    assert all(splits[sample.order] == sample.split for sample in small.samples)
    again = prepare([talk(f"question {n}", f"another {n}", n) for n in range(50)], tokenizer)
    assert sum(sample.split == "validation" for sample in again.samples) == sum(sample.split == "validation" for sample in small.samples)
    # 20 of 200 expected; 4 standard deviations of the binomial are 17
    assert 3 <= sum(sample.split == "validation" for sample in large.samples) <= 37


def test_validation_is_never_empty(tokenizer):
    found = prepare(many(2), tokenizer, share=1e-9)
    assert sorted(sample.split for sample in found.samples) == ["train", "validation"]
    alone = prepare(many(1), tokenizer)
    with pytest.raises(AerieError, match="no train sample is left of 1 rows"):
        prepare_dataset.check(alone.samples, alone)


def test_limits_contain_each_other(tokenizer):
    samples = prepare(many(60), tokenizer).samples
    for fewer, more in [(2, 5), (5, 20), (20, 60)]:
        small, large = prepare_dataset.limit(samples, fewer), prepare_dataset.limit(samples, more)
        assert len(small) == fewer and {sample.split for sample in small} == {"train", "validation"}
        # all but the one that may be exchanged for the other split's sake
        assert len({s.order for s in small} - {s.order for s in large}) <= 1


def test_truncation_and_rows_without_supervision(tokenizer):
    [sample] = prepare([talk("q", "a " * 100)], tokenizer, max_length=64).samples
    assert len(sample.input_ids) == len(sample.loss_mask) == 64 and sum(sample.loss_mask) > 20
    assert prepare([talk("q " * 100, "a")], tokenizer, max_length=64).rejects[0]["reason"] == "no supervised token within max_length"


def test_samples_come_back_from_disk(tokenizer, tmp_path):
    samples = prepare(many(10), tokenizer).samples
    write_samples(samples, tmp_path / "samples")
    rows = load_samples(tmp_path)
    assert [row["input_ids"] for row in rows] == [sample.input_ids for sample in samples]
    assert [row["loss_mask"] for row in rows] == [sample.loss_mask for sample in samples]
    assert samples_digest(samples) == samples_digest(samples[::-1]) != samples_digest(samples[1:])


def test_stats_add_up(tokenizer):
    found = prepare([*many(20), talk("x", "")], tokenizer)
    stats = prepare_dataset.describe(found.samples, found)
    assert sum(stats["lengths"]["counts"]) == stats["samples"] == 20
    assert stats["tokens"] == sum(len(sample.input_ids) for sample in found.samples)
    assert stats["rejected"] == {"no assistant turn with text": 1}
    json.dumps(stats)


def test_the_end_of_the_job_is_no_rejected_row(tokenizer, monkeypatch):
    def ended(*_):
        raise Terminated("ended by SIGTERM")

    monkeypatch.setattr(prepare_dataset, "render", ended)
    with pytest.raises(Terminated):
        prepare(many(3), tokenizer)


def test_golden(tokenizer):
    """The same input gives the same samples for ever, or VERSION is raised (then record the new digest with it)."""
    recorded = {1: "1014517878a16511ef04ba340e13baf92ce860a0133a8cf2e1f17ee533de8259"}
    assert samples_digest(prepare(many(12), tokenizer).samples) == recorded[prepare_dataset.VERSION]
