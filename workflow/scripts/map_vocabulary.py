#!/usr/bin/env python
"""Chooses the draft's vocabulary: the target's most frequent supervised tokens of the train split.

Writes d2t.npy, t2d.npy (speculators' convention), coverage.json and manifest.json.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aerie import cli, vocabulary
from aerie.errors import AerieError
from aerie.samples import load_samples
from aerie.stage import Recipe, StageResult, input_digests, run_stage
from aerie.targets import Target

VERSION = 3


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    parser.add_argument("--dataset", type=Path, required=True, help="the dataset's folder")
    parser.add_argument("--init-from", type=Path, help="folder of the draft whose vocabulary is kept")
    return parser


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)
    size: int | None = recipe.settings["vocab_size"]

    def compute(work: Path, out: Path) -> StageResult:
        tokenizer = target.tokenizer()
        by_source = vocabulary.count_supervised(train_rows(args.dataset), target.vocab_size)
        if args.init_from:
            chosen = vocabulary.draft_map(args.init_from)
            if len(chosen.t2d) != target.vocab_size:
                raise AerieError(
                    f"{args.init_from}: a draft for {len(chosen.t2d)} target ids; target {target.name} has {target.vocab_size}"
                )
        elif size is None:
            chosen = vocabulary.full_map(target.vocab_size)
        else:
            counts = sum(by_source.values(), np.zeros(target.vocab_size, dtype=np.int64))
            pinned = vocabulary.pinned_tokens(tokenizer, target.end_tokens(tokenizer), counts)
            tokens = vocabulary.choose_tokens(counts, size, pinned, tokenizer.get_vocab().values())
            chosen = vocabulary.map_of(tokens, target.vocab_size)
        vocabulary.save_map(chosen, out)
        figures = vocabulary.coverage(by_source, chosen, lambda token: tokenizer.decode([token]))
        if not figures["supervised_tokens"]:
            raise AerieError(
                f"{args.dataset}: the train split has no supervised token, so a draft could learn nothing from it; see its stats.json"
            )
        vocabulary.write_coverage(figures, out)
        cli.say(
            f"map_vocabulary: {chosen.size:,} of {target.vocab_size:,} tokens cover {figures['coverage']:.2%} of "
            f"the train split's {figures['supervised_tokens']:,} supervised tokens"
        )
        return StageResult(figures={name: value for name, value in figures.items() if name != "most_frequent_lost"})

    inputs = input_digests({"target": args.target, "dataset": args.dataset}, args.init_from)
    found = run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log)["figures"]
    wanted = recipe.runtime["min_coverage"]
    if found["coverage"] < wanted:
        remedy = f"It is that of {args.init_from}: leave out init_from" if args.init_from else "Raise vocab_size"
        raise AerieError(
            f"the draft's vocabulary of {found['draft_vocab_size']:,} tokens covers {found['coverage']:.2%} of the train split's supervised "
            f"tokens, and min_coverage is {wanted:.2%}: what it lacks, the draft can never propose. {remedy}, or lower min_coverage."
        )


def train_rows(dataset: Path) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """(input_ids, loss_mask, source) of the train split, as views of the file, which for a million samples saves minutes."""
    for batch in load_samples(dataset).with_format("arrow").iter(1000):
        columns = [batch[name].combine_chunks() for name in ("input_ids", "loss_mask")]
        bounds = np.concatenate([[0], np.cumsum(np.diff(columns[0].offsets.to_numpy()))])
        ids, mask = (column.flatten().to_numpy() for column in columns)
        for row, (split, source) in enumerate(zip(batch["split"].to_pylist(), batch["source"].to_pylist(), strict=True)):
            if split == "train":
                yield ids[bounds[row] : bounds[row + 1]], mask[bounds[row] : bounds[row + 1]], source


if __name__ == "__main__":
    cli.run(main, build_parser())
