"""One engine over several nodes, here two on one machine: a stand-in for srun starts the second node's workers beside the first's.

tests/cluster/test_slurm.py does the same with Slurm's own.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from test_capture import (
    LAYER_IDS,
    SCRIPTS,
    Workplace,
    error,
    job_of,
    make_samples,
    reference_model,
    sequences,
    states_in,
    targets,  # noqa: F401 - a fixture
)

from aerie import generation, nodes
from aerie.engine_vllm import extract
from aerie.errors import AerieError
from aerie.extraction import SampleSet
from aerie.hidden_states import HiddenStateStore

# Leaves out srun's options, and runs the command.
SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


class Job:
    """What the programs of a Slurm job say and do."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, program, text):
        (self.folder / program).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / program).chmod(0o755)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job of two nodes, which this process is in."""
    job = Job(tmp_path / "bin")
    job.folder.mkdir()
    job.write("srun", SRUN)
    job.write("squeue", "echo 2")
    monkeypatch.setenv("PATH", f"{job.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return job


def test_states_of_two_nodes_are_those_of_a_plain_forward(slurm, targets, tmp_path):  # noqa: F811
    samples = SampleSet.of(sequences())
    job = job_of(targets["llama"], "vllm", tensor_parallel=2, nodes=2)
    store = HiddenStateStore(tmp_path / "store", job.capture_key)
    outcome = extract(job, samples, store)
    assert not outcome.failed, outcome.failed
    stored = states_in(store)
    assert set(stored) == set(samples.keys)
    model = reference_model(targets["llama"])
    for ids, states in stored.values():
        plain = model(ids[None].long(), output_hidden_states=True)
        for at, layer in enumerate(LAYER_IDS[:-1]):
            assert error(states[:, at], plain.hidden_states[layer][0]) < 1e-5
    assert not steps()  # the second node's workers have ended with the engine


def steps():
    """The processes that `nodes` has started."""
    return [one for one in psutil.process_iter(["cmdline"]) if "aerie.nodes" in (one.info["cmdline"] or ())]


@pytest.mark.long
def test_answers_of_two_nodes_are_those_of_one(slurm, targets):  # noqa: F811
    prompts = {number: sample.input_ids for number, sample in enumerate(make_samples(5, 20))}
    answers: dict[int, dict[int, list[int]]] = {}
    for count in (2, 1):
        runtime = {"device": "cpu", "tensor_parallel": count, "nodes": count}
        engine = generation.start(targets["llama"], runtime, end_tokens=[3], max_length=60, dtype="float32")
        found = answers[count] = {}
        engine.converse(prompts, lambda number, answer: found.update({number: answer.token_ids}), 16)  # noqa: B023 - called at once
        engine.close()
    assert answers[1] == answers[2] and len(answers[1]) == 5


@pytest.mark.parametrize("at", ["start", pytest.param("work", marks=pytest.mark.long), pytest.param("engine", marks=pytest.mark.long)])
def test_the_end_of_one_nodes_workers_ends_all(slurm, targets, tmp_path, at):  # noqa: F811
    """start: srun refuses; work: the second node's worker is killed; engine: the job's own process is."""
    if at == "start":
        slurm.write("srun", "echo srun: error: no such node >&2; exit 5")
    place = Workplace(tmp_path, targets["llama"], make_samples(2000, 100), engine="vllm", tensor_parallel=2, nodes=2)
    place.find()
    command = [sys.executable, str(SCRIPTS / "extract_hidden_states.py"), *place.part(), "--log", str(tmp_path / "log")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    if at != "start":
        while process.poll() is None and not list(place.store.folder.glob("*.safetensors")):
            time.sleep(0.05)
        [step] = steps()
        (step.children()[-1] if at == "work" else psutil.Process(process.pid)).kill()
    killed = time.monotonic()
    said = process.communicate(timeout=300)[1]
    assert process.returncode != 0
    if at == "start":
        assert "job step on node 1 ended with exit code 5" in said and "srun: error: no such node" in said
        return
    if at == "work":
        assert "job step on node 1 ended with exit code 1" in said
    while steps():
        assert time.monotonic() < killed + 60, "the second node's workers live on"
        time.sleep(0.2)
    with place.store.locked(range(256)):  # nobody is left who writes
        assert 0 < len(states_in(place.store)) < 2000


def passes_over(**arguments):
    """As vLLM's probing of Triton and of platforms does with all that is raised in it."""
    with suppress(Exception):
        time.sleep(60)
    time.sleep(60)


def makes_another_of(**arguments):
    """As pydantic does in vLLM's configuration."""
    try:
        time.sleep(60)
    except Exception as error:
        raise ValueError("another") from error


@pytest.mark.parametrize("loading", [passes_over, makes_another_of])
def test_the_end_of_a_step_is_told_whatever_vllm_makes_of_it(slurm, monkeypatch, loading):
    slurm.write("srun", "sleep 1; exit 5")
    monkeypatch.setattr("vllm.LLM", loading)
    began = time.monotonic()
    with pytest.raises(ChildProcessError, match="job step on node 1 ended with exit code 5"):
        nodes.load({"model": "none", "tensor_parallel_size": 2, "nnodes": 2})
    assert time.monotonic() < began + 50


@pytest.mark.parametrize(
    ("squeue", "job", "found"),
    [
        ("echo 1", "7", "Slurm job 7 has 1"),
        ("echo 2", None, "this is no Slurm job"),
        ("echo down >&2; exit 1", "7", "squeue does not say .*: down"),
        ("echo 2; echo 1", "7", r"'2\\n1'; expected one number"),
        ("true", "7", "''; expected one number"),
    ],
)
def test_too_few_nodes_are_refused(slurm, monkeypatch, squeue, job, found):
    slurm.write("squeue", squeue)
    if job is None:
        monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(AerieError, match=found):
        nodes.load({"model": "none", "tensor_parallel_size": 2, "nnodes": 2})
