#!/usr/bin/env python
"""Prepares a dataset: rows of any known shape, rendered with the target's chat template, become samples with a loss mask.

    prepare_dataset.py --recipe R --target fingerprint.json --store S --output DIR --workers N --log L

Output: samples/ (datasets, Arrow), stats.json (the ledger: rows in = kept + rejected), rejects.jsonl (each rejected row and
why), audit.html (some samples with their supervised tokens coloured), manifest.json.
Settings: max_length, max_samples, validation_share, max_rejected, last_turn_only, system_prompt, template_options.
Runtime: sources (the files; their content is in the key, their names are not).
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aerie import audit, cli
from aerie.errors import AerieError
from aerie.preparation import NOT_COUNTED, Fate, Options, Prepared, check_rejected, choose, prepare, write_rejects
from aerie.regeneration import cut_off_warning
from aerie.samples import write_samples
from aerie.sources import Source, by_reason, numbered_rows, sources_digest
from aerie.stage import Recipe, StageResult, read_manifest, run_stage
from aerie.targets import Target

VERSION = 5


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)
    sources = [Source.of(item) for item in recipe.runtime["sources"]]

    def compute(work: Path, out: Path) -> StageResult:
        settings = recipe.settings
        tokenizer = target.tokenizer()
        options = Options(
            tokenizer=target.tokenizer,
            end_tokens=target.end_tokens(tokenizer),
            vocab_size=target.vocab_size,
            **{name: settings[name] for name in ("max_length", "system_prompt", "last_turn_only", "template_options")},
        )
        listed, rows = numbered_rows(sources)
        prepared = prepare([source.name for source in listed], rows, options, work / "tokens", args.workers)
        choose(prepared, listed, settings["validation_share"], settings["max_samples"])
        write_rejects(prepared.rejects(), work / "rejects.jsonl")
        check(prepared, settings["max_rejected"], work / "rejects.jsonl")
        digest = write_samples(prepared.samples(), out / "samples")
        stats = describe(prepared) | regeneration(sources)
        (out / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
        write_rejects(prepared.rejects(), out / "rejects.jsonl")
        title = f"Dataset {args.output.name} for {target.name}"
        (out / "audit.html").write_text(audit.page(title, stats, prepared, tokenizer, args.output), encoding="utf-8")
        rejected = stats["rows"] - stats["kept"]
        cli.say(f"dataset: {stats['rows']:,} rows, {stats['samples']:,} samples, {stats['tokens']:,} tokens, {rejected:,} rows rejected")
        return StageResult(digest, {name: stats[name] for name in ("rows", "samples", "tokens", "supervised_tokens", "rejected")})

    inputs = {"target": target.digest, "sources": sources_digest(sources)}
    run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log)


def check(prepared: Prepared, max_rejected: float, where: Path) -> None:
    """AerieError where too many rows were rejected, or nothing is left to train on or to validate with."""
    faulty = [
        f"{fate.file}:{fate.line}: {fate.reason}{': ' + fate.detail if fate.detail else ''}"
        for fate in prepared.fates
        if fate.reason and fate.reason not in NOT_COUNTED
    ]
    reasons = by_reason(_reasons(prepared.fates))
    check_rejected(faulty, reasons, len(prepared.fates), max_rejected, where)
    if not prepared.fates:
        raise AerieError(f"no row in {', '.join(prepared.sources)}; expected conversations. Check the dataset's sources.")
    for split in ("train", "validation"):
        if split not in prepared.chosen.values():
            raise AerieError(
                f"no {split} sample is left of {len(prepared.fates)} rows ({reasons or 'no row was rejected'}); training needs "
                "conversations with at least two different first messages. Add data, or look at the reasons."
            )


def _reasons(fates: list[Fate]) -> dict[str, int]:
    return dict(sorted(Counter(fate.reason for fate in fates if fate.reason).items()))


def regeneration(sources: Sequence[Source]) -> dict[str, Any]:
    """{"regeneration": what became of the prompts, by reason}, from the manifest beside regenerated answers; empty without them."""
    for path in (Path(source.path) for source in sources):
        if path.name == "responses.parquet" and path.with_name("manifest.json").exists():
            figures = read_manifest(path.parent)["figures"]
            counts = {name: figures[name] for name in ("prompts", "kept", "cut_off", "dropped", "shortened")}
            return {"regeneration": counts | {"folder": str(path.parent), "warning": cut_off_warning(figures)}}
    return {}


def describe(prepared: Prepared) -> dict[str, Any]:
    """What stats.json holds: the ledger, counts, and a histogram of lengths in tokens; in all and by source."""
    sources = []
    for number, name in enumerate(prepared.sources):
        fates = [fate for fate in prepared.fates if fate.source == number]
        chosen = [sample for sample in prepared.chosen if prepared.entries[sample].source == number]
        sources.append({"source": name, **_counts(prepared, fates, chosen, prepared.notes[number])})
    return {
        **_counts(prepared, prepared.fates, list(prepared.chosen), sum(prepared.notes, Counter())),
        "splits": {split: _split(prepared, split) for split in sorted(set(prepared.chosen.values()))},
        "sources": sources,
    }


def _split(prepared: Prepared, split: str) -> dict[str, int]:
    numbers = [number for number, its in prepared.chosen.items() if its == split]
    return {
        "samples": len(numbers),
        "tokens": sum(prepared.lengths[number] for number in numbers),
        "supervised_tokens": sum(prepared.entries[number].supervised for number in numbers),
    }


def _counts(prepared: Prepared, fates: list[Fate], chosen: list[int], notes: "Counter[str]") -> dict[str, Any]:
    lengths = [prepared.lengths[number] for number in chosen]
    supervised = sum(prepared.entries[number].supervised for number in chosen)
    counts, edges = np.histogram(lengths, bins=min(30, max(1, max(lengths) - min(lengths)))) if lengths else (np.zeros(0), np.zeros(0))
    rejected = _reasons(fates)
    return {
        "rows": len(fates),
        "kept": len(fates) - sum(rejected.values()),
        "rejected": rejected,
        "notes": dict(sorted(notes.items())),
        "samples": len(chosen),
        "turns": sum(prepared.entries[number].turns for number in chosen),
        "tokens": sum(lengths),
        "supervised_tokens": supervised,
        "supervised_share": round(supervised / sum(lengths), 4) if lengths else 0.0,
        "lengths": {"edges": edges.tolist(), "counts": counts.tolist(), "longest": max(lengths, default=0)},
    }


if __name__ == "__main__":
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    parser.add_argument("--workers", type=int, default=1, help="processes; the result does not depend on them")
    cli.run(main, parser)
