#!/usr/bin/env python
"""Writes a recipe (a stage's resolved settings) and removes its older siblings."""

import argparse
from pathlib import Path

from aerie import cli
from aerie.stage import write_atomically


def main(args: argparse.Namespace) -> None:
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for sibling in args.output.parent.glob("*.json"):
        sibling.unlink()
    write_atomically(args.output, args.text)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--text", required=True, help="the recipe, as JSON")
    parser.add_argument("--output", type=Path, required=True)
    cli.run(main, parser)
