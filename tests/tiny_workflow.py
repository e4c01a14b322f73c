"""A complete workflow on a tiny target in a folder of its own: what the workflow tests edit, plan and run."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from conftest import ROOT

CONFIG: dict[str, Any] = {
    "runs": "config/runs.tsv",
    "targets": {"tiny": {"path": "target", "dtype": "float32", "device": "cpu"}},
    "datasets": {
        "talk": {
            "sources": ["talk.jsonl"],
            "max_length": 128,
            "validation_share": 0.1,
            "regenerate": {"max_new_tokens": 16, "temperature": 1.0},
        }
    },
    "drafts": {"eagle3": {"stored_dtype": "float32", "vocab_size": 200, "training": {"epochs": 1, "batch_tokens": 256}}},
    "evaluation": {"prompts": "prompts.jsonl", "max_new_tokens": 16},
}


class TinyWorkflow:
    """folder: the working directory; config: edit it and call write()."""

    def __init__(self, folder: Path, conversations: int = 40) -> None:
        self.folder = folder
        self.config = copy.deepcopy(CONFIG)
        (folder / "config").mkdir(parents=True, exist_ok=True)
        (folder / "config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\na\ttiny\ttalk\teagle3\n")
        rows = [{"prompt": f"What is {n} and {n}?", "response": f"The answer is {2 * n}."} for n in range(conversations)]
        (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Tell me of {n}."}) + "\n" for n in range(6)))
        self.write()

    def write(self) -> None:
        """Writes the configuration as it now is."""
        (self.folder / "config/config.yaml").write_text(yaml.safe_dump(self.config))

    def command(self, *arguments: str) -> list[str]:
        snakemake = str(Path(sys.executable).parent / "snakemake")
        return [snakemake, "-s", str(ROOT / "Snakefile"), "-d", str(self.folder), "--cores", "2", "--resources", "gpu=8", *arguments]

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts Snakemake in a process group of its own."""
        output = open(self.folder / "terminal.txt", "w")  # noqa: SIM115 - the process keeps it
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            self.command(*arguments), stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
        )

    def run(self, *arguments: str) -> "Result":
        process = self.start(*arguments)
        try:
            code = process.wait(600)
        finally:
            kill(process)
        return Result(code, (self.folder / "terminal.txt").read_text())

    def plan(self, *arguments: str) -> Counter[str]:
        """Rules that a dry run names, with the number of their jobs."""
        result = self.run("-n", *arguments)
        assert result.code == 0, result.text
        return result.rules

    def manifest(self, *parts: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.folder.joinpath("results", *parts, "manifest.json").read_text())
        return found


class Result:
    """What one Snakemake call gave. rules: jobs by rule; restored: stages taken from the store."""

    def __init__(self, code: int, text: str) -> None:
        self.code, self.text = code, text
        self.rules = Counter(re.findall(r"^(?:local)?rule (\w+):", text, re.MULTILINE))
        self.restored = Counter(re.findall(r"^(\w+): found in the store", text, re.MULTILINE))


def kill(process: "subprocess.Popen[str]") -> None:
    """kill -9 of the whole process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
