#!/usr/bin/env python
"""Says what the next run would do and why, how much it would write and how long it would take. Computes nothing."""

import argparse
from pathlib import Path

from aerie import cli
from aerie.configuration import Plan
from aerie.planning import Planner, dry_run


def main(args: argparse.Namespace) -> None:
    plan = Plan.handed_over()
    for line in Planner(plan, dry_run(args.snakefile, plan)).lines():
        print(line)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--snakefile", type=Path, required=True)
    cli.run(main, parser)
