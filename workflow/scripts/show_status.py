#!/usr/bin/env python
"""Shows the runs by stage, with their key figures. Computes nothing, and may be asked while a run is going on."""

import argparse

from aerie import cli
from aerie.configuration import Plan
from aerie.report import aligned
from aerie.status import Status


def main(args: argparse.Namespace) -> None:
    status = Status(Plan.handed_over())
    print("\n".join([*aligned(status.table()), *status.notes(args.words)]))


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--words", required=True, help="how the configuration was given on the command line")
    cli.run(main, parser)
