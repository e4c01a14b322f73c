#!/usr/bin/env python
"""Writes a recipe (a stage's resolved settings), beside those of other configurations."""

import argparse
from pathlib import Path

from aerie import cli
from aerie.stage import write_recipe


def main(args: argparse.Namespace) -> None:
    write_recipe(args.output, args.text)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--text", required=True, help="the recipe, as JSON")
    parser.add_argument("--output", type=Path, required=True)
    cli.run(main, parser)
