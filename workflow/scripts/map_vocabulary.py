#!/usr/bin/env python
"""Chooses the draft's vocabulary: the target's most frequent supervised tokens of the train split.

Writes d2t.npy, t2d.npy (speculators' convention), coverage.json and manifest.json.
"""

import argparse
from pathlib import Path

import numpy as np

from aerie import cli, vocabulary
from aerie.samples import load_samples
from aerie.stage import Recipe, StageResult, read_manifest, run_stage
from aerie.targets import Target

VERSION = 1


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    parser.add_argument("--dataset", type=Path, required=True, help="the dataset's folder")
    return parser


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)
    size: int | None = recipe.settings["vocab_size"]

    def compute(work: Path, out: Path) -> StageResult:
        tokenizer = target.tokenizer()
        samples = load_samples(args.dataset).with_format("numpy")
        train = samples.select(np.flatnonzero(np.asarray(samples["split"]) == "train"))
        pairs = (pair for batch in train.iter(1000) for pair in zip(batch["input_ids"], batch["loss_mask"], strict=True))
        counts = vocabulary.count_supervised(pairs, target.vocab_size)
        if size is None:
            chosen = vocabulary.full_map(target.vocab_size)
        else:
            pinned = vocabulary.special_tokens(tokenizer, target.end_tokens(tokenizer), counts)
            tokens = vocabulary.choose_tokens(counts, size, pinned, tokenizer.get_vocab().values())
            chosen = vocabulary.map_of(tokens, target.vocab_size)
        vocabulary.save_map(chosen, out)
        figures = vocabulary.coverage(counts, chosen, lambda token: tokenizer.decode([token]))
        vocabulary.write_coverage(figures, out)
        cli.say(
            f"map_vocabulary: {chosen.size:,} of {target.vocab_size:,} tokens cover {figures['coverage']:.2%} of "
            f"{figures['supervised_tokens']:,} supervised tokens"
        )
        return StageResult(figures={name: value for name, value in figures.items() if name != "most_frequent_lost"})

    inputs = {"target": target.digest, "dataset": read_manifest(args.dataset)["digest"]}
    run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log)


if __name__ == "__main__":
    cli.run(main, build_parser())
