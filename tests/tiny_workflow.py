"""A complete workflow on a tiny target in a folder of its own: what the workflow tests edit, plan and run."""

import contextlib
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
from snakemake.utils import validate

from aerie.configuration import Plan, read_versions
from aerie.planning import Planner, parse_dry_run
from checkout import ROOT, SCRIPTS

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
    "drafts": {"eagle3": {"stored_dtype": "float32", "vocab_size": 270, "training": {"epochs": 1, "batch_tokens": 256}}},
    "evaluation": {"prompts": {"talk": "prompts.jsonl"}, "max_new_tokens": 16},
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

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return start(self.folder, *arguments)

    def run(self, *arguments: str) -> "Result":
        return run(self.folder, *arguments)

    def plan(self, *arguments: str) -> Counter[str]:
        """Rules that a dry run names, with the number of their jobs."""
        result = self.run("-n", *arguments)
        assert result.code == 0, result.text
        return result.rules

    def planner(self, *arguments: str, scripts: Path = SCRIPTS) -> Planner:
        """What `snakemake plan` prints from, over a dry run with these arguments. Use it in this workflow's folder."""
        result = self.run("-n", *arguments)
        assert result.code == 0, result.text
        plan = self.resolved(scripts)
        with contextlib.chdir(self.folder):
            return Planner(plan, parse_dry_run(result.text, plan))

    def resolved(self, scripts: Path = SCRIPTS) -> Plan:
        """The configuration with its defaults, as the Snakefile makes it."""
        config = copy.deepcopy(self.config)
        validate(config, schema=str(ROOT / "workflow/schemas/config.schema.yaml"))
        with contextlib.chdir(self.folder):
            return Plan(config, read_versions(scripts), False)

    def forecasts(self, *arguments: str, scripts: Path = SCRIPTS) -> dict[str, str]:
        """{stage: verdict} of every stage of run a that is not said to do nothing, by `snakemake plan`'s means."""
        planner = self.planner(*arguments, scripts=scripts)
        with contextlib.chdir(self.folder):
            steps = planner.plan.steps(planner.plan.runs["a"])
            verdicts = {step[0]: planner.forecast(step).verdict for step in steps}
        return {stage: verdict for stage, verdict in verdicts.items() if verdict != "nothing"}

    def manifest(self, *parts: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.folder.joinpath("results", *parts, "manifest.json").read_text())
        return found


class Result:
    """What one Snakemake call gave. rules: jobs by rule; restored: stages taken from the store."""

    def __init__(self, code: int, text: str) -> None:
        self.code, self.text = code, text
        self.rules = Counter(re.findall(r"^(?:local)?rule (\w+):", text, re.MULTILINE))
        self.restored = Counter(re.findall(r"^(\w+): found in the store", text, re.MULTILINE))


def start(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Starts Snakemake on this checkout's workflow in `folder`, in a process group of its own; its output goes to terminal.txt."""
    snakemake = str(Path(sys.executable).parent / "snakemake")
    # --resources takes every word that follows it, so it comes last.
    command = [snakemake, "-s", str(ROOT / "Snakefile"), "-d", str(folder), *arguments, "--cores", "all", "--resources", "gpu=8"]
    with open(folder / "terminal.txt", "w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def run(folder: Path, *arguments: str) -> Result:
    """Runs Snakemake to its end."""
    process = start(folder, *arguments)
    try:
        code = process.wait()
    finally:
        kill(process)
    return Result(code, (folder / "terminal.txt").read_text())


def kill(process: "subprocess.Popen[bytes]") -> None:
    """kill -9 of the whole process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
