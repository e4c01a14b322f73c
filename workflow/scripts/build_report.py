#!/usr/bin/env python
"""Builds the report of all runs: one self-contained HTML page, and a summary as text.

    build_report.py --recipe R --results results --output results/report.html --summary results/summary.txt --log L

The recipe's settings: {"runs": [[run, target, dataset, draft], …]}. What is missing of a run is named, not an error.
"""

import argparse
from pathlib import Path

from aerie import cli, report
from aerie.run_results import collect
from aerie.stage import Recipe, write_atomically

VERSION = 5


def build_parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="names the runs")
    parser.add_argument("--results", type=Path, required=True, help="folder of all results")
    parser.add_argument("--output", type=Path, required=True, help="the page")
    parser.add_argument("--summary", type=Path, help="file that gets the summary table as text")
    return parser


def main(args: argparse.Namespace) -> None:
    rows = Recipe.read(args.recipe).settings["runs"]
    runs = [collect(args.results, *row) for row in rows]
    summary = report.summary_text(runs)
    write_atomically(args.output, report.page(runs))
    if args.summary:
        write_atomically(args.summary, summary)
    print(summary)


if __name__ == "__main__":
    cli.run(main, build_parser())
