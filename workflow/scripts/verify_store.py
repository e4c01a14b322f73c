#!/usr/bin/env python
"""Reads everything in the store again: digests, lengths, finite values. Sets aside what is damaged, and then fails."""

import argparse
from pathlib import Path

from aerie import cli
from aerie.configuration import Plan
from aerie.errors import AerieError
from aerie.store import check_layout
from aerie.verification import forget_recipes, set_aside, verify


def main(args: argparse.Namespace) -> None:
    plan = Plan.handed_over()
    store = Path(plan.config["store"])
    check_layout(store)
    count, damages = verify(store)
    if not damages:
        print(f"store {store}: {count:,} objects, shards and answers read, no damage found")
        return
    aside = set_aside(store, damages)
    again = forget_recipes(damages, plan)
    raise AerieError(
        f"store {store}: {len(damages):,} of {count:,} objects, shards and answers are damaged, and now lie in {aside}:\n"
        + "\n".join(f"  {damage.problem}" for damage in damages)
        + f"\nThe next run extracts again what is lost of: {', '.join(again) or 'nothing here'}. Objects are made anew when they are needed. "
        "In other working directories that use these states, run `snakemake --forcerun find_missing_states`."
    )


if __name__ == "__main__":
    cli.run(main, cli.parser(__doc__))
