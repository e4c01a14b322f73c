#!/usr/bin/env python
"""Fails where a draft is accepted less than the configuration asks for; says nothing else and writes nothing.

    check_acceptance.py --recipe R --acceptance acceptance.json --log L

Settings: min_acceptance_length.
"""

import argparse
import json
from pathlib import Path

from aerie import cli
from aerie.errors import AerieError
from aerie.stage import Recipe

VERSION = 1


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="the least acceptance")
    parser.add_argument("--acceptance", type=Path, required=True, help="acceptance.json of the evaluation")
    return parser


def main(args: argparse.Namespace) -> None:
    least = Recipe.read(args.recipe).settings["min_acceptance_length"]
    found = json.loads(args.acceptance.read_text())
    if found["acceptance_length"] < least:
        raise AerieError(
            f"run {args.acceptance.parent.name}: its draft has an acceptance length of {found['acceptance_length']:.3f} on "
            f"{found['prompt_set']}; min_acceptance_length asks for {least}. results/report.html shows where it is weak; train "
            "longer or on more data, or lower min_acceptance_length."
        )


if __name__ == "__main__":
    cli.run(main, build_parser())
