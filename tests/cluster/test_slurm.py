"""The tiny pipeline as jobs of a real Slurm, and what extraction loses when its jobs are cancelled, run out of time or lose their node."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import psutil
import pytest
from slurm_cluster import PROGRAMS, SlurmCluster

from aerie.hidden_states import part_of, read_shard
from checkout import ROOT
from tiny_targets import make_tiny_llama
from tiny_workflow import Result, TinyWorkflow, kill

MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm's programs are missing here: {', '.join(MISSING)} (make test-slurm installs them)"),
]
STATES = "results/hidden_states/tiny/talk/default_float32"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Submitted:
    """`snakemake --profile profiles/slurm` on the cluster, with a status check every few seconds; squeue, since there is no accounting."""

    def __init__(self, workflow: TinyWorkflow, cluster: SlurmCluster, *arguments: str) -> None:
        self.terminal, self.cluster = workflow.folder / "terminal.txt", cluster
        self.before = {job["JobId"] for job in cluster.jobs()}
        snakemake = [str(Path(sys.executable).parent / "snakemake"), "-s", str(ROOT / "Snakefile"), "-d", str(workflow.folder)]
        options = ["--profile", str(ROOT / "profiles/slurm"), "--slurm-status-command", "squeue"]
        options += ["--slurm-init-seconds-before-status-checks", "3"]
        with open(self.terminal, "w") as output:
            command = [*snakemake, *arguments, *options]
            self.process = subprocess.Popen(
                command, env=cluster.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> Result:
        try:
            code = self.process.wait(1500)
        finally:
            kill(self.process)
        return Result(code, self.terminal.read_text())

    def jobs(self) -> list[dict[str, str]]:
        """Slurm's jobs of this call."""
        return [job for job in self.cluster.jobs() if job["JobId"] not in self.before]

    def job_of_part(self, part: int) -> dict[str, str]:
        [job] = [job for job in self.jobs() if "extract_hidden_states" in job["Comment"] and f"_{part}_2" in job["Comment"]]
        return job


def rule_of(job):
    return job["Comment"].removeprefix("rule_").partition("_wildcards_")[0]


def test_the_whole_pipeline_runs_as_slurm_jobs(cluster, tmp_path):
    workflow = TinyWorkflow(tmp_path)
    make_tiny_llama(tmp_path / "target")
    workflow.config["extraction"] = {"parts": 2}
    workflow.write()
    # The target is on the CPU; one GPU a part is asked for all the same, to see that it comes.
    submitted = Submitted(workflow, cluster, "--set-resources", "extract_hidden_states:gpu=1")
    result = submitted.wait()
    assert result.code == 0, result.text
    jobs = submitted.jobs()
    assert {job["JobState"] for job in jobs} == {"COMPLETED"}
    stages = ["fingerprint_target", "preflight_target", "regenerate_responses", "prepare_dataset", "map_vocabulary", "train_draft"]
    # and nothing else: recipes, lists and the report are made on the spot
    assert Counter(map(rule_of, jobs)) == Counter([*stages, "evaluate_draft", *["extract_hidden_states"] * 2])
    parts = [job for job in jobs if rule_of(job) == "extract_hidden_states"]
    assert {job.get("TresPerJob") for job in parts} == {"gres:gpu:1"}
    assert not any(job.get("TresPerJob") for job in jobs if job not in parts)
    assert {job["NumNodes"] for job in jobs} == {"1"} and {job["TimeLimit"] for job in jobs} == {"1-00:00:00"}
    for part in range(2):
        log = tmp_path / f"results/logs/extract_hidden_states/tiny/talk/default_float32/part-{part}-of-2.log"
        assert "--gpus 1" in log.read_text().splitlines()[0]
    assert json.loads((tmp_path / "results/evaluations/a/acceptance.json").read_text())["prompts"] == 6
    assert (tmp_path / "results/report.html").exists()
    again = Submitted(workflow, cluster, "--set-resources", "extract_hidden_states:gpu=1").wait()
    assert again.code == 0 and "Nothing to be done" in again.text


def test_one_engine_over_two_nodes(cluster, tmp_path, monkeypatch):
    """The whole pipeline with a target that takes both nodes; then the preflight of one that takes their GPUs, too."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # both nodes' workers are on this machine's cores
    workflow = TinyWorkflow(tmp_path)
    make_tiny_llama(tmp_path / "target")
    workflow.config["targets"]["tiny"] |= {"tensor_parallel": 2, "nodes": 2}
    workflow.write()
    submitted = Submitted(workflow, cluster)
    result = submitted.wait()
    assert result.code == 0, result.text
    jobs = {rule_of(job): job for job in submitted.jobs()}
    engines = {"preflight_target", "regenerate_responses", "extract_hidden_states", "evaluate_draft"}
    assert {rule: job["NumNodes"] for rule, job in jobs.items()} == {rule: "2" if rule in engines else "1" for rule in jobs}
    assert {job["JobState"] for job in jobs.values()} == {"COMPLETED"} and engines < set(jobs)
    log = (tmp_path / "results/logs/extract_hidden_states/tiny/talk/default_float32/part-0-of-1.log").read_text()
    assert "world_size=2 rank=1 local_rank=0" in log  # said by a worker of the second node
    keys = [key for path in tmp_path.glob("results/.store/hidden_states/*/*.safetensors") for key in read_shard(path).keys]
    assert len(keys) == len(set(keys)) == workflow.manifest(*Path(STATES).parts[1:])["figures"]["samples"] > 30
    assert json.loads((tmp_path / "results/evaluations/a/acceptance.json").read_text())["prompts"] == 6
    assert "2 in the job, each for 1 of the engine's workers" in (tmp_path / "results/preflight/tiny.txt").read_text()

    workflow.config["targets"] = {"far": {"path": "target", "device": "cuda", "tensor_parallel": 2, "nodes": 2}}
    workflow.write()
    (tmp_path / "config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\na\tfar\ttalk\teagle3\n")
    submitted = Submitted(workflow, cluster, "results/preflight/far.json")
    result = submitted.wait()
    assert result.code == 0, result.text  # that the host has no GPU is a warning
    [job] = [job for job in submitted.jobs() if rule_of(job) == "preflight_target"]
    assert (job["NumNodes"], job["TresPerJob"], job["MinMemoryNode"]) == ("2", "gres:gpu:2", "16000M")
    assert "2 in the job, each for 1 of the engine's workers" in (tmp_path / "results/preflight/far.txt").read_text()


@pytest.fixture
def wide(tmp_path):
    """A target whose states are so large (80 kB a token) that a part writes a shard every 3,200 tokens; 64,000 tokens in all."""
    workflow = TinyWorkflow(tmp_path)
    make_tiny_llama(tmp_path / "target", hidden_size=5120, intermediate_size=64)
    rows = [
        {"prompt": f"What is {n}?", "response": f"{n} is {n - 1} and one, {' '.join(str(n * k) for k in range(2, 40))}"} for n in range(600)
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workflow.config["extraction"] = {"parts": 2}
    del workflow.config["datasets"]["talk"]["regenerate"]
    workflow.write()
    return workflow


class Extraction:
    """What is stored of a workflow's states, and the hand that stops a part in its work."""

    def __init__(self, workflow: TinyWorkflow) -> None:
        self.folder = workflow.folder

    def shards(self, part: int) -> dict[str, list[str]]:
        """{file name: sample keys} of the shards that a part of two has written."""
        found = {}
        for path in self.folder.glob("results/.store/hidden_states/*/*.safetensors"):
            keys = read_shard(path).keys
            if part_of(keys[0], 2) == part:
                found[path.name] = keys
        return found

    def stop_after_a_shard(self, submitted: Submitted, part: int) -> dict[str, list[str]]:
        """Waits until a part has written one more shard and stops it at once (SIGSTOP), to be ended by what comes; it had more to write."""
        before, end = self._files(), time.monotonic() + 1200
        while not (command := self._command(part)):
            assert submitted.process.poll() is None and time.monotonic() < end, submitted.terminal.read_text()
            time.sleep(0.2)
        while not self.shards(part).keys() - before:
            assert submitted.process.poll() is None and time.monotonic() < end, submitted.terminal.read_text()
            time.sleep(0.01)
        for process in (command, *command.children(recursive=True)):  # the engine is a child
            process.suspend()
        stored = self.shards(part)
        wanted = pd.read_parquet(self.folder / STATES / "missing.parquet")["sample_key"]
        stored_keys = {key for keys in stored.values() for key in keys}
        assert {key for key in wanted if part_of(key, 2) == part} - stored_keys, "it had written all: give it more samples"
        return stored

    def _files(self) -> set[str]:
        return {path.name for path in self.folder.glob("results/.store/hidden_states/*/*.safetensors")}

    def _command(self, part: int) -> psutil.Process | None:
        """The process of a part's command that watches over the others."""
        for process in psutil.process_iter(["cmdline", "cwd"]):
            words = process.info["cmdline"] or []
            if process.info["cwd"] == str(self.folder) and f"--part {part} " in " ".join(words) and "python" in words[0]:
                return process
        return None


def test_nothing_is_lost_when_a_job_is_cancelled_runs_out_of_time_or_loses_its_node(cluster, wide):
    extraction = Extraction(wide)
    goal = f"{STATES}/manifest.json"

    submitted = Submitted(wide, cluster, goal)
    first = extraction.stop_after_a_shard(submitted, 0)
    cluster.run("scancel", submitted.job_of_part(0)["JobId"])
    result = submitted.wait()
    assert result.code != 0 and "CANCELLED" in result.text, result.text
    assert submitted.job_of_part(0)["JobState"] == "CANCELLED" and submitted.job_of_part(1)["JobState"] == "COMPLETED"

    submitted = Submitted(wide, cluster, goal)
    second = extraction.stop_after_a_shard(submitted, 0)
    cluster.run("scontrol", "update", f"jobid={submitted.job_of_part(0)['JobId']}", "timelimit=1")  # minutes, which it soon has had
    result = submitted.wait()
    assert result.code != 0 and "TIMEOUT" in result.text, result.text
    assert submitted.job_of_part(0)["JobState"] == "TIMEOUT"
    assert Counter(map(rule_of, submitted.jobs())) == {"extract_hidden_states": 1}

    submitted = Submitted(wide, cluster, goal)
    third = extraction.stop_after_a_shard(submitted, 0)
    node = submitted.job_of_part(0)["NodeList"]
    for state in ("drain", "down"):
        cluster.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
    try:
        result = submitted.wait()  # Slurm itself starts the job again, on the node that is left
        assert result.code == 0, result.text
        assert submitted.job_of_part(0)["NodeList"] not in (node, "(null)")
    finally:
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")

    last = extraction.shards(0)
    assert first.items() <= second.items() <= third.items() <= last.items() and len(last) > len(third) > len(second) > len(first)
    keys = [key for part in range(2) for shard in extraction.shards(part).values() for key in shard]
    samples = wide.manifest(*Path(STATES).parts[1:])["figures"]["samples"]
    assert len(keys) == len(set(keys)) == samples == 600
    log = (wide.folder / "results/logs/extract_hidden_states/tiny/talk/default_float32/part-0-of-2.log").read_text()
    found = re.search(r"hidden states: (\d+) of the (\d+) samples were written meanwhile or by an earlier attempt", log)
    assert found and int(found[1]) >= sum(map(len, third.values())) - sum(map(len, second.values()))
    again = Submitted(wide, cluster, goal).wait()
    assert again.code == 0 and "Nothing to be done" in again.text
