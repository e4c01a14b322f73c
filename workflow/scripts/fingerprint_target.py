#!/usr/bin/env python
"""Writes a target's fingerprint: where it is, and the digest of everything that decides its behaviour."""

import argparse
import json

from aerie import cli
from aerie.stage import Recipe, write_atomically
from aerie.targets import fingerprint

VERSION = 1


def main(args: argparse.Namespace) -> None:
    recipe = Recipe.read(args.recipe)
    found = fingerprint(**recipe.settings, cache=args.store / "file_hashes")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output, json.dumps(found, indent=1, sort_keys=True) + "\n")
    cli.say(f"target {found['name']}: {len(found['files'])} files, fingerprint {found['digest'][:12]}")


if __name__ == "__main__":
    cli.run(main, cli.stage_parser(__doc__))
