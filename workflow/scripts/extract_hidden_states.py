#!/usr/bin/env python
"""Extracts one part of the hidden states that the store lacks, and lists where they lie.

A part takes the samples whose key falls into its share of 256 buckets and holds those buckets' locks, so any mix of
parts, whatever their number, does everything once. With nothing to do the target is not loaded.
"""

import argparse
import time
from pathlib import Path

import pandas as pd

from aerie import cli
from aerie.devices import lease
from aerie.errors import AerieError
from aerie.extraction import Job, Outcome, SampleSet
from aerie.hidden_states import HiddenStateStore, among, bucket_of, part_of, write_table
from aerie.stage import Recipe, kept_log
from aerie.targets import Target

VERSION = 1  # aerie.hidden_states.VERSION, which is in the capture's key


def build_parser() -> argparse.ArgumentParser:
    parser = cli.engine_parser(__doc__)
    parser.add_argument("--dataset", type=Path, required=True, help="the dataset's folder")
    parser.add_argument("--missing", type=Path, required=True, help="table of missing samples (find_missing_states)")
    parser.add_argument("--part", type=int, required=True, help="number of this part, from 0")
    parser.add_argument("--parts", type=int, required=True, help="number of parts")
    return parser


def main(args: argparse.Namespace) -> None:
    if not 0 <= args.part < args.parts:
        raise AerieError(f"part {args.part} of {args.parts}: parts are numbered from 0 to {args.parts - 1}")
    recipe = Recipe.read(args.recipe)
    job = Job.of(recipe, Target.read(args.target))
    store = HiddenStateStore(args.store, job.capture_key)
    missing = pd.read_parquet(args.missing)["sample_key"].to_list()
    wanted = {key for key in missing if part_of(key, args.parts) == args.part}
    if wanted:
        samples = SampleSet.of_dataset(args.dataset)
        total = len(set(samples.keys))
        with store.locked(bucket_of(key) for key in wanted):
            # Another process may have extracted some since the table was made.
            lacking = wanted - set(store.known(remember=True)["sample_key"].to_list())
            if len(lacking) < len(wanted):
                cli.say(
                    f"hidden states: {len(wanted) - len(lacking):,} of the {len(wanted):,} samples were written meanwhile or by an earlier attempt"
                )
            failed = job.given_up(store, lacking, total)
            if lacking - set(failed):
                samples = choose(samples, lacking - set(failed), args.dataset)
                job.check_disk(len(samples), int(samples.tokens.sum()), args.store)
                store.remove_stale()
                attempt = store.folder / "attempts" / time.strftime(f"%Y%m%dT%H%M%S-part-{args.part}-of-{args.parts}.log", time.gmtime())
                with kept_log(args.log, attempt), lease(recipe.runtime["gpus"], args.gpus, nodes=job.nodes):
                    outcome = extract(job, samples, store)
                    store.note_failed({failure.key: failure.cause for failure in outcome.failed.values() if failure.its_own})
                    outcome.raise_failures(job.max_failed * total - len(failed))
    known = store.known(remember=True)
    found = known[among(known["sample_key"], wanted)].sort_values("sample_key", ignore_index=True)
    lost = wanted - set(found["sample_key"].to_list())
    if lost and lost - set(job.given_up(store, lost, total)):
        raise AerieError(f"{len(lost):,} of {len(wanted):,} samples were written and are not in {store.folder}. Check the disk.")
    write_table(found.drop(columns="seconds"), args.output)
    without = f", {len(lost):,} of them without states" if lost else ""
    cli.say(f"hidden states: part {args.part} of {args.parts} is complete, {len(wanted):,} samples{without}")


def choose(samples: SampleSet, keys: set[str], dataset: Path) -> SampleSet:
    """The samples with these keys; AerieError where the dataset lacks one."""
    chosen = samples.chosen(keys)
    unknown = keys - set(chosen.keys)
    if unknown:
        raise AerieError(
            f"{len(unknown):,} missing samples are not in {dataset} ({min(unknown)}, …): it has changed since. Run snakemake again."
        )
    return chosen


def extract(job: Job, samples: SampleSet, store: HiddenStateStore) -> Outcome:
    """Runs the job's engine, which is imported only here: both take seconds and a GPU's memory."""
    if job.engine == "vllm":
        from aerie import engine_vllm

        return engine_vllm.extract(job, samples, store)
    from aerie import engine_transformers

    return engine_transformers.extract(job, samples, store)


if __name__ == "__main__":
    cli.run(main, build_parser())
