"""One engine over several nodes, here two on one machine: a stand-in for srun starts the second node's workers beside the first's.

tests/cluster/test_slurm.py has the same with Slurm's own srun.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from test_capture import (
    LAYER_IDS,
    Workplace,
    error,
    job_of,
    make_samples,
    reference_model,
    sequences,
    states_in,
    targets,  # noqa: F401 - a fixture
)

from aerie import nodes
from aerie.engine_vllm import extract
from aerie.errors import AerieError
from aerie.extraction import SampleSet
from aerie.hidden_states import HiddenStateStore

# It has srun's options, then the command.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job of two nodes, as far as `nodes` looks; the folder of its programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "squeue": "#!/bin/sh\necho 2\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return programs


def test_states_of_two_nodes_are_those_of_a_plain_forward(slurm, targets, tmp_path):  # noqa: F811
    target = targets["llama"]
    samples = SampleSet.of(sequences())
    job = job_of(target, "vllm", tensor_parallel=2, nodes=2)
    store = HiddenStateStore(tmp_path / "store", job.capture_key)
    outcome = extract(job, samples, store)
    assert not outcome.failed, outcome.failed
    stored = states_in(store)
    assert set(stored) == set(samples.keys)
    model = reference_model(target)
    for ids, states in stored.values():
        plain = model(ids[None].long(), output_hidden_states=True)
        for at, layer in enumerate(LAYER_IDS[:-1]):
            assert error(states[:, at], plain.hidden_states[layer][0]) < 1e-5
