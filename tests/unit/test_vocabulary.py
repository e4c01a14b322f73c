"""The draft's vocabulary: which tokens are chosen, and that a map which does not fit is noticed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

import map_vocabulary
from aerie import vocabulary
from aerie.errors import AerieError
from aerie.keys import digest_of
from aerie.samples import Sample, write_samples
from aerie.vocabulary import VocabMap
from checkout import SCRIPTS
from tiny_targets import make_tiny_llama


@pytest.mark.parametrize("at_once", [1, 3, 1_000_000])
def test_only_supervised_tokens_are_counted(monkeypatch, at_once):
    monkeypatch.setattr(vocabulary, "_COUNTED_AT_ONCE", at_once)
    rows = [([5, 1, 1, 2], [0, 1, 1, 1], "a"), ([2, 3], [1, 0], "a"), ([4, 4], [1, 1], "b")]
    counts = vocabulary.count_supervised(rows, 6)
    assert {source: own.tolist() for source, own in counts.items()} == {"a": [0, 2, 2, 0, 0, 0], "b": [0, 0, 0, 0, 2, 0]}
    assert counts["a"].dtype == np.int64


def test_token_beyond_the_vocabulary_is_an_error():
    with pytest.raises(AerieError, match="token id 9, the target's vocabulary has 6"):
        vocabulary.count_supervised([([9], [1], "a")], 6)


def test_choice_pins_then_counts_then_fills():
    #         id  0  1  2  3  4  5  6  7  8 (padding: no real id)
    counts = np.array([0, 5, 2, 0, 9, 2, 0, 1, 7])
    real = range(8)

    def chosen(size):
        return vocabulary.choose_tokens(counts, size, [6], real).tolist()

    assert chosen(1) == [6]
    assert chosen(3) == [1, 4, 6]
    assert chosen(4) == [1, 2, 4, 6]  # of 2 and 5, equally frequent, the lower
    assert chosen(6) == [1, 2, 4, 5, 6, 7]
    assert chosen(7) == [0, 1, 2, 4, 5, 6, 7]  # filled with the lowest unused
    assert chosen(8) == list(range(8))
    with pytest.raises(AerieError, match="larger than the target's 8 real tokens"):
        chosen(9)
    with pytest.raises(AerieError, match="no room for the 2 special and single-byte tokens"):
        vocabulary.choose_tokens(counts, 1, [6, 7], real)


def test_map_follows_speculators_convention():
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = np.array([0, 5, 0, 0, 9, 2, 0, 0])
    made = vocabulary.map_of(vocabulary.choose_tokens(counts, 3, [], range(8)), 8)
    assert made.d2t.tolist() == [1, 3, 3]  # draft ids 0, 1, 2 are target ids 1, 4, 5
    assert np.flatnonzero(made.t2d).tolist() == made.target_ids.tolist() == [1, 4, 5]
    d2t, t2d = build_vocab_mappings_from_distribution({1: 5, 4: 9, 5: 2}, 3, 8)
    assert d2t.tolist() == made.d2t.tolist() and t2d.tolist() == made.t2d.tolist()


def test_full_vocabulary_maps_nothing():
    full = vocabulary.full_map(5)
    assert full.is_full and not full.d2t.any() and full.t2d.all()


def test_special_tokens_are_the_named_and_the_used():
    entry = SimpleNamespace(special=True)
    plain = SimpleNamespace(special=False)
    added = {0: entry, 1: entry, 2: entry, 3: plain, 99: entry}
    tokenizer = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=None, added_tokens_decoder=added)
    counts = np.array([0, 0, 4, 4, 0, 0])
    assert vocabulary.special_tokens(tokenizer, [1, 5], counts) == {0, 1, 2, 5}


def test_byte_tokens_are_those_of_the_tokenizer():
    from tiny_targets import make_tiny_tokenizer

    tokenizer = make_tiny_tokenizer()
    found = vocabulary.byte_tokens(tokenizer)
    assert found == set(range(4, 260))  # behind the 4 special ones, before the merges
    assert set(tokenizer("Grüße, 世界 \x00\n🦅")["input_ids"]) <= found | set(range(260, 280))


def wrapped(model, decoder):
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_tokenizer_may_lack_some_bytes():
    """As SmolLM2's."""
    some = {token: number for number, token in enumerate(["a", "Ġ", "Ċ", "Ã", "Ġa", "Ċa"])}
    assert vocabulary.byte_tokens(wrapped(BPE(some, []), decoders.ByteLevel())) == {0, 1, 2, 3}


def test_letters_of_other_tokenizers_are_no_bytes():
    """Words and SentencePiece's pieces have letters that stand for bytes elsewhere."""
    letters = {token: number for number, token in enumerate(["a", "Ġ", "Ċ", "é", "Ã", "[UNK]"])}
    assert vocabulary.byte_tokens(wrapped(WordLevel(letters, "[UNK]"), None)) == set()
    assert vocabulary.byte_tokens(wrapped(WordPiece(letters, unk_token="[UNK]"), decoders.WordPiece())) == set()
    assert vocabulary.byte_tokens(wrapped(BPE(letters, []), decoders.Metaspace())) == set()
    fallback = letters | {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert vocabulary.byte_tokens(wrapped(BPE(fallback, [], byte_fallback=True), decoder)) == set(range(10, 266))
    del fallback["<0x80>"]
    assert vocabulary.byte_tokens(wrapped(BPE(fallback, [], byte_fallback=True), decoder)) == set(range(10, 266)) - {10 + 0x80}


def test_coverage_counts_what_is_lost():
    by_source = {"b": np.array([0, 5, 0, 0, 9, 2]), "a": np.array([0, 0, 3, 0, 0, 0])}
    figures = vocabulary.coverage(by_source, vocabulary.map_of(np.array([1, 4]), 6), "<{}>".format)
    assert figures["supervised_tokens"] == 19 and figures["covered_tokens"] == 14
    assert figures["coverage"] == pytest.approx(14 / 19)
    assert figures["by_source"] == {
        "a": {"supervised_tokens": 3, "covered_tokens": 0, "coverage": 0.0},
        "b": {"supervised_tokens": 16, "covered_tokens": 14, "coverage": 14 / 16},
    }
    assert figures["distinct_tokens"] == 4 and figures["distinct_tokens_lost"] == 2
    assert figures["most_frequent_lost"] == [{"id": 2, "text": "<2>", "count": 3}, {"id": 5, "text": "<5>", "count": 2}]


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([1, 3], [0, 1, 0, 0, 0, 1], "draft id 1 is target id 4 in d2t but 5 in t2d"),
        ([1], [0, 1, 0, 0, 0, 1], "d2t has 1 tokens, t2d marks 2"),
        ([1.0, 3.0], [0, 1, 0, 0, 1, 0], "d2t is float64"),
    ],
)
def test_maps_that_do_not_belong_together(d2t, t2d, message):
    with pytest.raises(AerieError, match=message):
        VocabMap(np.array(d2t), np.array(t2d, dtype=bool))


def test_load_checks_again(tmp_path: Path):
    made = vocabulary.map_of(np.array([1, 4]), 6)
    vocabulary.save_map(made, tmp_path)
    assert vocabulary.load_map(tmp_path, 6).target_ids.tolist() == [1, 4]
    with pytest.raises(AerieError, match="target of 6 ids, this target has 7"):
        vocabulary.load_map(tmp_path, 7)
    np.save(tmp_path / "d2t.npy", np.array([2, 3]))
    with pytest.raises(AerieError, match=r"draft id 0 is target id 2 in d2t but 1 in t2d"):
        vocabulary.load_map(tmp_path, 6)
    (tmp_path / "d2t.npy").write_bytes(b"")
    with pytest.raises(AerieError, match="cannot be read"):
        vocabulary.load_map(tmp_path, 6)


def test_command(tmp_path: Path):
    """On a real tokenizer: the train split alone counts, the end of a turn is there, padding ids are not."""
    folder = make_tiny_llama(tmp_path / "target")
    location = {"path": str(folder)}
    described = {"name": "tiny", "digest": "t", "location": location, "trust_remote_code": False}
    (tmp_path / "fingerprint.json").write_text(json.dumps(described))
    samples = [
        Sample([60, 270, 270, 80], [0, 1, 1, 1], "a", "train"),
        Sample([90, 90, 90], [1, 1, 1], "a", "validation"),
    ]
    (tmp_path / "dataset").mkdir()
    write_samples(samples, tmp_path / "dataset" / "samples")
    (tmp_path / "dataset" / "manifest.json").write_text(json.dumps({"digest": "d"}))

    def run(size, least=0.9):
        recipe = {"stage": "map_vocabulary", "version": map_vocabulary.VERSION, "settings": {"vocab_size": size}}
        recipe["runtime"] = {"min_coverage": least, "init_from": None}
        (tmp_path / "recipe.json").write_text(json.dumps(recipe))
        names = {"target": "fingerprint.json", "dataset": "dataset", "recipe": "recipe.json", "store": "store", "output": "map"}
        arguments = [part for name, value in names.items() for part in (f"--{name}", str(tmp_path / value))]
        return subprocess.run([sys.executable, str(SCRIPTS / "map_vocabulary.py"), *arguments], capture_output=True, text=True)

    done = run(262)
    assert done.returncode == 0, done.stderr
    made = vocabulary.load_map(tmp_path / "map", 320)
    manifest = json.loads((tmp_path / "map" / "manifest.json").read_text())
    # bos, eos (end of turn), pad (1, 3, 0) and the bytes (4 to 259) are pinned; 270 is supervised; 2 and 260 are the lowest unused.
    assert made.target_ids.tolist() == [*range(261), 270]
    assert manifest["figures"]["coverage"] == 1.0 and manifest["figures"]["supervised_tokens"] == 3
    assert json.loads((tmp_path / "map/coverage.json").read_text())["by_source"]["a"]["covered_tokens"] == 3
    # Golden: the output of VERSION 2 and 3. If this fails, raise VERSION in map_vocabulary.py and put the new digest here.
    arrays = [made.d2t.tolist(), made.t2d.tolist()]
    assert digest_of(arrays) == "64389c76586538c92c5b03bdc8944921960ad990e7e689f65156aa3b30d67e84"

    done = run(259)  # room for what is pinned only
    assert done.returncode == 1
    said = "vocabulary of 259 tokens covers 33.33% of the train split's supervised tokens, and min_coverage is 90.00%"
    assert said in done.stderr and "Raise vocab_size, or lower min_coverage" in done.stderr
    assert run(259).returncode == 1  # also where the store has it
    assert run(259, least=0.3).returncode == 0
    write_samples([Sample([60, 270], [0, 0], "a", "train"), samples[1]], tmp_path / "dataset" / "samples")
    (tmp_path / "dataset" / "manifest.json").write_text(json.dumps({"digest": "silent"}))
    done = run(262)
    assert done.returncode == 1 and "the train split has no supervised token" in done.stderr
    done = run(258)
    assert done.returncode == 1 and "no room for the 259 special and single-byte tokens" in done.stderr
