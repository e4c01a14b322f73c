#!/usr/bin/env python
"""Trains an EAGLE-3 draft on a dataset's hidden states and exports it as vLLM serves it.

Writes config.json, model.safetensors, README.md (the model card), metrics.jsonl and manifest.json.
"""

import argparse
import shutil
from pathlib import Path

from aerie import cli
from aerie.devices import lease
from aerie.model_card import model_card
from aerie.samples import load_samples
from aerie.stage import Recipe, StageResult, input_digests, read_manifest, run_stage
from aerie.targets import Target
from aerie.vocabulary import load_map

VERSION = 4


def build_parser() -> argparse.ArgumentParser:
    parser = cli.engine_parser(__doc__)
    parser.add_argument("--dataset", type=Path, required=True, help="the dataset's folder")
    parser.add_argument("--hidden-states", type=Path, required=True, help="the capture's folder, with index.parquet")
    parser.add_argument("--vocab-map", type=Path, required=True, help="folder with d2t.npy and t2d.npy")
    parser.add_argument("--init-from", type=Path, help="folder of the draft whose weights are the first")
    return parser


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    target = Target.read(args.target)

    def compute(work: Path, out: Path) -> StageResult:
        # Imported here: a draft that the store has needs no torch.
        from aerie.hidden_states import StatesIndex

        samples = load_samples(args.dataset)
        states = StatesIndex(args.hidden_states, args.store)
        if states.failed:
            cli.say(f"train_draft: left out: {len(states.failed):,} of {len(samples):,} samples, which have no hidden states")
            samples = samples.select([i for i, key in enumerate(samples["sample_key"]) if key not in states.failed])
        vocab_map = load_map(args.vocab_map, target.vocab_size)
        settings = recipe.settings | {"aux_layer_ids": target.aux_layer_ids(recipe.settings["aux_layer_ids"])}
        with lease(recipe.runtime["gpus"], args.gpus):
            # Not earlier: speculators looks for GPUs when it is imported, and CUDA then keeps to those it found.
            from aerie.train_run import train

            runtime = recipe.runtime | {"ranks": max(1, recipe.runtime["gpus"])}
            figures, digest = train(target, samples, states, vocab_map, settings, runtime, work, out, args.init_from)
        shutil.copyfile(work / "metrics.jsonl", out / "metrics.jsonl")
        covered = read_manifest(args.vocab_map)["figures"]
        card = model_card(target, recipe.settings, recipe.key(inputs), inputs, covered, figures)
        (out / "README.md").write_text(card)
        return StageResult(digest=digest, figures=figures)

    folders = {"dataset": args.dataset, "hidden_states": args.hidden_states, "vocab_map": args.vocab_map}
    inputs = input_digests({"target": args.target, **folders}, args.init_from)
    run_stage(recipe, VERSION, inputs, args.output, args.store, compute, args.log)


if __name__ == "__main__":
    cli.run(main, build_parser())
