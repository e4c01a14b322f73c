#!/usr/bin/env python
"""Lists the samples of a dataset whose hidden states the store lacks: sample_key and tokens.

Loads no model. A sample that the target cannot take is refused here, by name, and states that the disk cannot take.
"""

import argparse
from pathlib import Path

import pandas as pd

from aerie import cli
from aerie.extraction import Job, SampleSet
from aerie.hidden_states import HiddenStateStore, among, write_table
from aerie.stage import Recipe, read_manifest
from aerie.store import Use, open_store, record_use
from aerie.targets import Target


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    parser.add_argument("--dataset", type=Path, required=True, help="the dataset's folder")
    return parser


def main(args: argparse.Namespace) -> None:
    job = Job.of(Recipe.read(args.recipe), Target.read(args.target))
    samples = SampleSet.of_dataset(args.dataset)
    samples.check(job.max_tokens)
    open_store(args.store)
    dataset = f"prepare_dataset/{read_manifest(args.dataset)['key']}"
    record_use(args.store, args.recipe, Use(captures={job.capture_key: dataset}))
    store = HiddenStateStore(args.store, job.capture_key)
    known = set(store.known(remember=True)["sample_key"].to_list())
    wanted = pd.DataFrame({"sample_key": samples.keys, "tokens": samples.tokens}).drop_duplicates("sample_key")
    lacking = wanted[~among(wanted["sample_key"], known)].sort_values("sample_key", ignore_index=True)
    failed = job.given_up(store, lacking["sample_key"], len(wanted))
    missing = lacking[~among(lacking["sample_key"], failed)]
    write_table(missing, args.output)
    found, tokens = len(wanted) - len(lacking), int(missing["tokens"].sum())
    without = f"; {len(failed):,} failed before and are left out" if failed else ""
    cli.say(f"hidden states: {found:,} of {len(wanted):,} samples are in the store, {tokens:,} tokens to extract{without}")
    job.check_disk(len(missing), tokens, args.store)


if __name__ == "__main__":
    cli.run(main, build_parser())
