#!/usr/bin/env python
"""Prepares a dataset: conversations, rendered with the target's chat template, become samples with a loss mask."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aerie import cli
from aerie.chat import Conversation, read_conversations, render
from aerie.errors import AerieError
from aerie.keys import digest_of, file_sha256
from aerie.progress import Progress
from aerie.samples import Sample, samples_digest, write_samples
from aerie.stage import Recipe, StageResult, read_manifest, run_stage
from aerie.targets import Target

VERSION = 1


class Prepared(NamedTuple):
    """samples in canonical order; rejects: {source, line, reason} a row; rows read."""

    samples: list[Sample]
    rejects: list[dict[str, Any]]
    rows: int


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)

    def compute(work: Path, out: Path) -> StageResult:
        tokenizer = target.tokenizer()
        conversations = list(read_conversations(args.sources))
        settings = recipe.settings
        prepared = prepare(conversations, tokenizer, target.end_tokens(tokenizer), settings["max_length"], settings["validation_share"])
        kept = limit(prepared.samples, settings["max_samples"])
        check(kept, prepared)
        write_samples(kept, out / "samples")
        stats = describe(kept, prepared)
        (out / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
        (out / "rejects.jsonl").write_text("".join(json.dumps(reject, ensure_ascii=True) + "\n" for reject in prepared.rejects))
        cli.say(
            f"dataset: {stats['rows']:,} rows, {stats['samples']:,} samples, {stats['tokens']:,} tokens, {len(prepared.rejects):,} rejected"
        )
        figures = ("rows", "samples", "tokens", "supervised_tokens", "rejected")
        return StageResult(samples_digest(kept), {name: stats[name] for name in figures})

    # Order, place and name of the sources are in no key; their content is.
    inputs = {"target": target.digest, "sources": digest_of(sorted(map(source_digest, args.sources)))}
    run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log)


def source_digest(path: Path) -> str:
    """Content digest of a source: that of its manifest where a stage made it, else the file's sha256."""
    manifest = path.with_name("manifest.json")
    if path.name == "responses.parquet" and manifest.exists():
        return str(read_manifest(manifest)["digest"])
    return file_sha256(path)


def prepare(
    conversations: Iterable[Conversation], tokenizer: Any, end_tokens: Sequence[int], max_length: int, validation_share: float
) -> Prepared:
    """Renders, masks, truncates to `max_length` tokens, removes exact duplicates and splits.

    Validation is chosen by the hash of the first user message, so it is stable when data is added or regenerated.
    """
    found: dict[str, tuple[Sample, str]] = {}
    rejects: list[dict[str, Any]] = []
    rows = list(conversations)
    progress = Progress("prepare_dataset", len(rows), "conversations")
    for row in rows:
        progress.update(1)
        reason = row.problem
        if not reason:
            samples, reason = _samples(row, tokenizer, end_tokens, max_length)
            first = next(message["content"] for message in row.messages if message["role"] == "user")
            fresh = [sample for sample in samples if sample.order not in found]
            found.update({sample.order: (sample, digest_of(first)) for sample in fresh})
            if samples and not fresh:
                reason = "duplicate"
        if reason:
            rejects.append({"source": row.source, "line": row.line, "reason": reason})
    progress.done()
    samples = _split([found[order] for order in sorted(found)], validation_share)
    return Prepared(samples, rejects, len(rows))


def _samples(row: Conversation, tokenizer: Any, end_tokens: Sequence[int], max_length: int) -> tuple[list[Sample], str]:
    """The samples of a conversation, and the reason where there is none."""
    try:
        rendered = render(row, tokenizer, end_tokens)
    except Exception as error:  # noqa: BLE001 - a template may raise anything; its words become the reason
        return [], f"chat template: {type(error).__name__}: {error}"
    if not rendered:
        return [], "no assistant turn with text"
    samples = [Sample(each.input_ids[:max_length], each.loss_mask[:max_length], Path(row.source).name) for each in rendered]
    kept = [sample for sample in samples if any(sample.loss_mask)]
    return kept, "" if kept else "no supervised token within max_length"


def _split(pairs: list[tuple[Sample, str]], share: float) -> list[Sample]:
    """Marks as validation the samples whose first message's hash falls into the share; at least one message does."""
    prompts = sorted({prompt for _, prompt in pairs})
    chosen = {prompt for prompt in prompts if int(prompt[:8], 16) < share * 2**32} or set(prompts[:1])
    return [sample._replace(split="validation" if prompt in chosen else "train") for sample, prompt in pairs]


def limit(samples: list[Sample], most: int | None) -> list[Sample]:
    """The `most` samples of lowest hash in canonical order, so that a larger number contains the smaller.

    Where these happen to be of one split only, the last is exchanged for the first of the other.
    """
    kept = samples[:most]
    for split in ("train", "validation"):
        if len(kept) > 1 and not any(sample.split == split for sample in kept):
            kept = kept[:-1] + [sample for sample in samples if sample.split == split][:1]
    return kept


def check(kept: Sequence[Sample], prepared: Prepared) -> None:
    """AerieError where there is nothing to train on or nothing to validate with."""
    for split in ("train", "validation"):
        if not any(sample.split == split for sample in kept):
            reasons = ", ".join(f"{count} × {reason}" for reason, count in _reasons(prepared).items()) or "no row was rejected"
            raise AerieError(
                f"no {split} sample is left of {prepared.rows} rows ({reasons}); training needs conversations with at least two different "
                "first messages. Add data, or look at the reasons."
            )


def _reasons(prepared: Prepared) -> dict[str, int]:
    return dict(sorted(Counter(reject["reason"] for reject in prepared.rejects).items()))


def describe(kept: Sequence[Sample], prepared: Prepared) -> dict[str, Any]:
    """What stats.json holds: counts, and a histogram of lengths in tokens."""
    lengths = [len(sample.input_ids) for sample in kept]
    counts, edges = np.histogram(lengths, bins=min(30, max(1, max(lengths) - min(lengths))))
    return {
        "rows": prepared.rows,
        "samples": len(kept),
        "splits": dict(Counter(sample.split for sample in kept)),
        "tokens": sum(lengths),
        "supervised_tokens": sum(sum(sample.loss_mask) for sample in kept),
        "lengths": {"edges": edges.tolist(), "counts": counts.tolist(), "longest": max(lengths)},
        "rejected": _reasons(prepared),
    }


if __name__ == "__main__":
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    parser.add_argument("--sources", type=Path, nargs="+", required=True, help="files of conversations")
    cli.run(main, parser)
