#!/usr/bin/env python
"""Checks a target before anything is loaded, and runs a small twin of it through the capture.

Prints a table of the findings, and writes it beside the output as .txt; one failed check fails the run.
"""

import argparse
import json

from aerie import cli
from aerie.devices import has_driver, lease
from aerie.engine_choice import choose_engine
from aerie.errors import AerieError
from aerie.preflight import Row, Subject, examine, limited, table
from aerie.provenance import versions
from aerie.stage import Recipe, write_atomically
from aerie.targets import Target

VERSION = 8


def main(args: argparse.Namespace) -> None:
    recipe, target = Recipe.read(args.recipe), Target.read(args.target)
    engine, why = choose_engine(target, recipe.settings["engine"])
    settings = limited(recipe.settings, args.max_samples) | {"engine": engine}
    told = (args.vocab_sizes, args.layer_ids, args.evaluation, args.unprepared)
    subject = Subject(target, settings, recipe.runtime, args.gpus, args.store, *told)
    rows = [Row("engine", "ok", f"{engine}: {why}", "")]
    # One GPU for the twin, and that before anything looks for GPUs: CUDA keeps to those that it found.
    with lease(int(subject.needs_gpus and has_driver() and args.gpus > 0), args.gpus):
        for row in examine(subject):
            rows.append(row)
            print(f"{row.verdict:8}{row.check}: {row.found}", flush=True)  # to the log, in case the next one ends the process
    shown = table(rows)
    cli.say(f"preflight of target {target.name}\n{shown}")
    failed = [row.check for row in rows if row.verdict == "failed"]
    if failed:
        raise AerieError(f"target {target.name}: {len(failed)} of {len(rows)} checks failed: {', '.join(failed)}. See the table above.")
    found = {
        "target": target.name,
        "fingerprint": target.digest,
        "max_samples": args.max_samples,
        "versions": versions(),
        "checks": [row._asdict() for row in rows],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output.with_suffix(".txt"), shown)
    write_atomically(args.output, json.dumps(found, indent=1) + "\n")


def build_parser() -> argparse.ArgumentParser:
    parser = cli.engine_parser(__doc__)
    parser.add_argument("--max-samples", type=json.loads, help="at most so many samples of each dataset, or null")
    parser.add_argument("--vocab-sizes", type=json.loads, default={}, help="{where a draft's vocab_size is set: what it is}")
    parser.add_argument("--layer-ids", type=json.loads, default={}, help="{where a draft's aux_layer_ids are set: what they are}")
    parser.add_argument("--evaluation", type=json.loads, default={}, help="{prompts: {name: file}, max_prompts: …, max_new_tokens: …}")
    parser.add_argument("--unprepared", type=json.loads, default=[], help="names of datasets of which no sample is made")
    return parser


if __name__ == "__main__":
    cli.run(main, build_parser())
