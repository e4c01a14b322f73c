"""The draft's vocabulary: which of the target's tokens it can propose.

Speculators' and vLLM's convention: draft ids are in the order of target ids; `d2t` [draft vocabulary] int64 holds offsets,
target id = draft id + d2t[draft id]; `t2d` [target vocabulary] bool marks the target ids that the draft has.
A draft with the full vocabulary has d2t all zero and t2d all true.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .errors import AerieError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LISTED_LOST_TOKENS = 50
_COUNTED_AT_ONCE = 1_000_000  # tokens; each sample by itself would take minutes for a million


@dataclass(frozen=True)
class VocabMap:
    """d2t int64 [draft vocabulary] and t2d bool [target vocabulary]; checked against each other when made."""

    d2t: np.ndarray
    t2d: np.ndarray

    def __post_init__(self) -> None:
        check_map(self.d2t, self.t2d)

    @property
    def size(self) -> int:
        """Number of tokens that the draft can propose."""
        return len(self.d2t)

    @property
    def is_full(self) -> bool:
        """Whether the draft has the target's whole vocabulary, and so needs no map."""
        return len(self.d2t) == len(self.t2d)

    @property
    def target_ids(self) -> np.ndarray:
        """Target id of each draft id, int64, ascending."""
        return np.arange(len(self.d2t)) + self.d2t


def check_map(d2t: np.ndarray, t2d: np.ndarray) -> None:
    """AerieError unless both arrays describe one and the same choice of tokens."""
    wanted = "expected d2t int64 [draft vocabulary] and t2d bool [target vocabulary]"
    if d2t.ndim != 1 or t2d.ndim != 1 or d2t.dtype != np.int64 or t2d.dtype != np.bool_:
        raise AerieError(f"vocabulary map: d2t is {d2t.dtype} {list(d2t.shape)}, t2d is {t2d.dtype} {list(t2d.shape)}; {wanted}")
    marked = np.flatnonzero(t2d)
    if len(marked) != len(d2t):
        raise AerieError(f"vocabulary map: d2t has {len(d2t)} tokens, t2d marks {len(marked)}; they belong to different maps")
    targets = np.arange(len(d2t)) + d2t
    if not np.array_equal(targets, marked):
        first = int(np.flatnonzero(targets != marked)[0])
        raise AerieError(
            f"vocabulary map: draft id {first} is target id {int(targets[first])} in d2t but {int(marked[first])} in t2d; "
            "they belong to different maps. Delete the map and run snakemake again."
        )


def count_supervised(samples: Iterable[tuple[ArrayLike, ArrayLike, str]], vocab_size: int) -> dict[str, np.ndarray]:
    """Counts of each target id among supervised tokens, {source: int64 [vocab_size]}, over (input_ids, loss_mask, source)."""
    counts: dict[str, np.ndarray] = {}
    waiting: dict[str, list[np.ndarray]] = {}
    tokens = 0

    def count() -> None:
        for source, arrays in waiting.items():
            ids = np.concatenate(arrays)
            if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
                raise AerieError(
                    f"the samples hold token id {int(ids.max())}, the target's vocabulary has {vocab_size} ids: "
                    "they were made with another tokenizer. Run prepare_dataset for this target."
                )
            counts.setdefault(source, np.zeros(vocab_size, dtype=np.int64))
            counts[source] += np.bincount(ids, minlength=vocab_size)

    for input_ids, loss_mask, source in samples:
        ids = np.asarray(input_ids, dtype=np.int64)[np.asarray(loss_mask, dtype=bool)]
        waiting.setdefault(str(source), []).append(ids)
        tokens += len(ids)
        if tokens > _COUNTED_AT_ONCE:
            count()
            waiting, tokens = {}, 0
    count()
    return counts


def special_tokens(tokenizer: "PreTrainedTokenizerBase", end_tokens: Iterable[int], counts: np.ndarray) -> set[int]:
    """Ids that a draft must have: those that end a generation, begin or pad one, and special ones that chats use.

    counts: int64 [target vocabulary] of supervised tokens. The hundreds of reserved special tokens are left out.
    """
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *end_tokens)
    special = [token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special and token < len(counts)]
    return {token for token in named if token is not None} | {token for token in special if counts[token]}


def byte_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Ids of the tokens that stand for single bytes, with which any text can be written: of a byte-level BPE (GPT-2's
    printable stand-ins) or of a SentencePiece model's byte fallback (<0x00> to <0xFF>).

    Those that the tokenizer has: many lack bytes that UTF-8 never has, or that were not in their data. Empty for one without bytes.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = tokenizer.get_vocab()
    for name_of in (bytes_to_unicode().__getitem__, "<0x{:02X}>".format):
        # A stand-in may also be a letter of its own, in a vocabulary of words or pieces: what it is decoded to tells.
        if tokenizer.convert_tokens_to_string([name_of(ord("\n"))]) == "\n":
            return {vocabulary[name_of(byte)] for byte in range(256) if name_of(byte) in vocabulary}
    return set()


def pinned_tokens(tokenizer: "PreTrainedTokenizerBase", end_tokens: Iterable[int], counts: np.ndarray) -> set[int]:
    """Ids that a draft's vocabulary has whatever the data: special, end-of-turn and single-byte tokens; see `special_tokens`."""
    return (special_tokens(tokenizer, end_tokens, counts) | byte_tokens(tokenizer)) & set(tokenizer.get_vocab().values())


def choose_tokens(counts: np.ndarray, size: int, pinned: Iterable[int], real_ids: Iterable[int]) -> np.ndarray:
    """`size` target ids, ascending, int64: pinned ones, then by count (ties: lower id), then unused real ids, lowest first.

    counts: int64 [target vocabulary]. real_ids: ids that the tokenizer can produce; padding ids of the embedding are not.
    """
    real = np.zeros(len(counts), dtype=bool)
    real[[token for token in real_ids if 0 <= token < len(counts)]] = True
    pins = sorted({token for token in pinned if 0 <= token < len(counts) and real[token]})
    if size < max(1, len(pins)):
        raise AerieError(f"vocab_size {size} has no room for the {len(pins)} special and single-byte tokens; raise vocab_size")
    if size > int(real.sum()):
        raise AerieError(
            f"vocab_size {size} is larger than the target's {int(real.sum())} real tokens (its vocabulary of {len(counts)} "
            "ids is padded); lower it, or set vocab_size: null for the full vocabulary"
        )
    # lexsort: the last key decides first. Real ids that were never supervised have count 0 and so come last, lowest first.
    order = np.lexsort((np.arange(len(counts)), -counts))
    order = order[real[order] & ~np.isin(order, pins)]
    return np.sort(np.concatenate([np.asarray(pins, dtype=np.int64), order[: size - len(pins)]]))


def map_of(tokens: np.ndarray, vocab_size: int) -> VocabMap:
    """The map for these target ids (ascending, int64)."""
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[tokens] = True
    return VocabMap(tokens - np.arange(len(tokens)), t2d)


def full_map(vocab_size: int) -> VocabMap:
    """The map of a draft with the target's whole vocabulary: nothing is mapped."""
    return VocabMap(np.zeros(vocab_size, dtype=np.int64), np.ones(vocab_size, dtype=bool))


def coverage(by_source: Mapping[str, np.ndarray], vocab_map: VocabMap, text_of: Callable[[int], str]) -> dict[str, Any]:
    """What the map keeps and loses of the supervised tokens counted (`count_supervised`), in all and by source."""
    counts = sum(by_source.values(), np.zeros(len(vocab_map.t2d), dtype=np.int64))
    lost = np.flatnonzero((counts > 0) & ~vocab_map.t2d)
    lost = lost[np.lexsort((lost, -counts[lost]))]
    return {
        "draft_vocab_size": vocab_map.size,
        "target_vocab_size": len(vocab_map.t2d),
        **_covered(counts, vocab_map),
        "by_source": {source: _covered(own, vocab_map) for source, own in sorted(by_source.items())},
        "distinct_tokens": int((counts > 0).sum()),
        "distinct_tokens_lost": len(lost),
        "most_frequent_lost": [
            {"id": int(token), "text": text_of(int(token)), "count": int(counts[token])} for token in lost[:_LISTED_LOST_TOKENS]
        ],
    }


def _covered(counts: np.ndarray, vocab_map: VocabMap) -> dict[str, Any]:
    total, kept = int(counts.sum()), int(counts[vocab_map.t2d].sum())
    return {"supervised_tokens": total, "covered_tokens": kept, "coverage": kept / total if total else 1.0}


def save_map(vocab_map: VocabMap, folder: Path) -> None:
    """Writes d2t.npy and t2d.npy, as `speculators train --d2t-path --t2d-path` reads them too."""
    np.save(folder / "d2t.npy", vocab_map.d2t)
    np.save(folder / "t2d.npy", vocab_map.t2d)


def load_map(folder: Path, target_vocab_size: int) -> VocabMap:
    """Reads and checks a map; AerieError if it is broken or for a target with another vocabulary."""
    try:
        vocab_map = VocabMap(np.load(folder / "d2t.npy"), np.load(folder / "t2d.npy"))
    except (OSError, EOFError, ValueError) as error:
        raise AerieError(f"{folder}: the vocabulary map cannot be read ({error}). Delete it and run snakemake again.") from error
    except AerieError as error:
        raise AerieError(f"{folder}: {error}") from None
    if len(vocab_map.t2d) != target_vocab_size:
        raise AerieError(f"{folder}: the vocabulary map is for a target of {len(vocab_map.t2d)} ids, this target has {target_vocab_size}")
    return vocab_map


def write_coverage(figures: dict[str, Any], folder: Path) -> None:
    """Writes coverage.json."""
    (folder / "coverage.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


def draft_map(folder: Path) -> VocabMap:
    """The map of an exported draft, checked against its configuration and its head; reads nothing else of the weights.

    AerieError where they do not belong together, or where a file is missing.
    """
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text())
        draft_size, target_size = int(config["draft_vocab_size"]), int(config["transformer_layer_config"]["vocab_size"])
        with safe_open(folder / "model.safetensors", framework="np") as file:
            names = set(file.keys())
            head, embeddings = (file.get_slice(name).get_shape()[0] for name in ("lm_head.weight", "embed_tokens.weight"))
            maps = [file.get_tensor(name) for name in ("d2t", "t2d") if name in names]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise AerieError(
            f"{folder}: no EAGLE-3 draft as train_draft writes it ({type(error).__name__}: {error}). Expected config.json with "
            "draft_vocab_size and transformer_layer_config, and model.safetensors with lm_head and embed_tokens."
        ) from error
    if not maps and draft_size == target_size:
        found = full_map(target_size)
    elif len(maps) == 2:
        try:
            found = VocabMap(*maps)
        except AerieError as error:
            raise AerieError(f"{folder}: {error}") from None
    else:
        raise AerieError(f"{folder}: {draft_size} of {target_size} ids, and not both d2t and t2d in model.safetensors; train it again")
    for what, size, expected in (
        ("d2t", found.size, draft_size),
        ("lm_head", head, draft_size),
        ("t2d", len(found.t2d), target_size),
        ("embed_tokens", embeddings, target_size),
    ):
        if size != expected:
            raise AerieError(f"{folder}: {what} has {size} rows, config.json says {expected}; weights and config.json are of two drafts")
    return found
