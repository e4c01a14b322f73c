#!/usr/bin/env python
"""Lists what in the store no configuration references, with sizes; with --action delete removes what is older than a day."""

import argparse
from pathlib import Path

from aerie import cli, garbage
from aerie.configuration import Plan
from aerie.store import check_layout, size_text


def main(args: argparse.Namespace) -> None:
    plan = Plan.handed_over()
    store = Path(plan.config["store"])
    check_layout(store)
    if not store.is_dir():
        print(f"store {store}: nothing there yet")
        return
    if args.action == "delete":
        with garbage.alone(store):
            findings = garbage.find(store, plan)
            print("\n".join(garbage.lines(store, findings)))
            print(f"deleted: {size_text(garbage.delete(store, findings))}")
    else:
        print("\n".join(garbage.lines(store, garbage.find(store, plan))))
        print("Nothing was deleted; `snakemake gc --config gc=delete` does.")


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--action", choices=["list", "delete"], default="list")
    cli.run(main, parser)
