#!/usr/bin/env python
"""Writes the index of a dataset's hidden states: which shard holds which sample. The states stay in the store.

Writes index.parquet (sample_key, shard, sample, tokens) and manifest.json.
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from aerie import cli
from aerie.errors import AerieError
from aerie.extraction import Job, SampleSet
from aerie.hidden_states import HiddenStateStore, among, write_table
from aerie.keys import digest_of, file_sha256
from aerie.provenance import versions
from aerie.stage import Recipe, read_manifest, write_atomically
from aerie.targets import Target


def build_parser() -> argparse.ArgumentParser:
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    parser.add_argument("--dataset", type=Path, required=True, help="the dataset's folder")
    return parser


def main(args: argparse.Namespace) -> None:
    recipe, target = Recipe.read(args.recipe), Target.read(args.target)
    job = Job.of(recipe, target)
    keys = sorted(set(SampleSet.of_dataset(args.dataset).keys))
    store = HiddenStateStore(args.store, job.capture_key)
    known = store.known()
    failed = without_states(job, store, set(keys) - set(known["sample_key"].to_list()), len(keys))
    keys = [key for key in keys if key not in failed]
    found = pick(known, keys)
    index = found.drop(columns="seconds")
    store.verify_token_ids(index)
    path = args.output / "index.parquet"
    write_table(index, path)
    digest = digest_of({"capture_key": job.capture_key, "sample_keys": keys})
    counts = figures(found, job.row_bytes)
    manifest = {
        "stage": recipe.stage,
        "version": recipe.version,
        "key": digest,
        "digest": digest,
        "capture_key": job.capture_key,
        "layer_ids": list(job.layer_ids),
        "settings": recipe.settings,
        "runtime": recipe.runtime,
        "inputs": {"target": target.digest, "dataset": read_manifest(args.dataset)["digest"]},
        "files": {"index.parquet": {"sha256": file_sha256(path), "bytes": path.stat().st_size}},
        "figures": counts | {"failed": len(failed)},
        "failed": failed,
        "versions": versions(),
        "seconds": counts["seconds"],  # of the extraction: the same whenever the index is made anew
    }
    write_atomically(args.output / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def without_states(job: Job, store: HiddenStateStore, lacking: set[str], samples: int) -> dict[str, str]:
    """{sample key: cause} of those that have no states and are left out; AerieError where more failed than may."""
    failed, left_out = sorted(store.failed() & lacking), job.given_up(store, lacking, samples)
    if failed and not left_out:
        raise AerieError(
            f"{len(failed):,} of {samples:,} samples have no hidden states, and extraction.max_failed is {job.max_failed:g} of them: "
            f"{failed[0]} ({store.why_failed(failed[0])}), …. Raise extraction.max_failed to go on without them."
        )
    return left_out


def pick(known: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The rows of the store's table for these keys, in their order; AerieError where one is missing."""
    index = known[among(known["sample_key"], set(keys))].sort_values("sample_key", ignore_index=True)
    if len(index) != len(keys):
        lost = sorted(set(keys) - set(index["sample_key"]))
        raise AerieError(
            f"the store lacks the hidden states of {len(lost):,} of {len(keys):,} samples ({lost[0]}, …), "
            "which it had when they were listed. Run `snakemake --forcerun find_missing_states`."
        )
    return index


def figures(found: pd.DataFrame, bytes_a_token: int) -> dict[str, float | int]:
    """Counts, and the extraction's speed as the shards recorded it (time shared by tokens with what else they hold)."""
    tokens, seconds = int(found["tokens"].sum()), float(found["seconds"].sum())
    return {
        "samples": len(found),
        "tokens": tokens,
        "bytes": tokens * bytes_a_token,
        "shards": found["shard"].nunique(),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
    }


if __name__ == "__main__":
    cli.run(main, build_parser())
