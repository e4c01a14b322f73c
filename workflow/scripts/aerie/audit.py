"""The page to look at before spending GPU-days: what became of the rows, and samples with their supervised tokens coloured."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .pages import render
from .preparation import Prepared

SAMPLES = 12
LONGEST = 4000  # tokens shown of one sample


def page(title: str, stats: dict[str, Any], prepared: Prepared, tokenizer: Any, folder: Path) -> str:
    """The page: the ledger by source, and some samples of each. folder: where it will lie, with the files that it names."""
    shown = [_shown(prepared, number, tokenizer) for number in pick(prepared)]
    return render("audit.html.j2", title=title, stats=stats, samples=shown, folder=folder)


def pick(prepared: Prepared) -> list[int]:
    """Samples to show: of each source in turn those of lowest hash, and in the end the longest and the one with most turns."""
    by_source: dict[int, list[int]] = {}
    for number in prepared.chosen:
        by_source.setdefault(prepared.entries[number].source, []).append(number)
    rounds = max(map(len, by_source.values()), default=0)
    found: dict[int, None] = {}
    for place in range(min(rounds, SAMPLES)):
        for numbers in by_source.values():
            if place < len(numbers) and len(found) < SAMPLES - 2:
                found[numbers[place]] = None
    if prepared.chosen:
        found[max(prepared.chosen, key=lambda number: prepared.lengths[number])] = None
        found[max(prepared.chosen, key=lambda number: prepared.entries[number].turns)] = None
    return list(found)


def _shown(prepared: Prepared, number: int, tokenizer: Any) -> dict[str, Any]:
    sample, entry, fate = prepared.sample(number), prepared.entries[number], prepared.fate_of(number)
    ids, mask = list(map(int, sample.input_ids)), list(map(int, sample.loss_mask))
    return {
        "key": sample.key,
        "place": f"{fate.file}:{fate.line}",
        "split": sample.split,
        "tokens": len(ids),
        "supervised": entry.supervised,
        "turns": entry.turns,
        "runs": runs(ids[:LONGEST], mask[:LONGEST], tokenizer),
        "hidden": max(0, len(ids) - LONGEST),
    }


def runs(ids: Sequence[int], mask: Sequence[int], tokenizer: Any) -> list[tuple[bool, str]]:
    """(supervised, text) of each run of tokens that are treated alike."""
    found = []
    for supervised, group in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        found.append((supervised, str(tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False))))
    return found
