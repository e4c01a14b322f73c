"""GPU leases: disjoint, all or none, waiting; with the devices named by CUDA_VISIBLE_DEVICES, so no GPU is needed."""

import os
import subprocess
import sys
import textwrap

import pytest

from aerie import devices
from aerie.devices import lease
from aerie.errors import AerieError


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")


def test_leases_are_disjoint(tmp_path, monkeypatch):
    with lease(2, 2, tmp_path) as first:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(first)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
        with lease(2, 2, tmp_path) as second:
            assert sorted(first + second) == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


def test_too_few_granted_is_refused(tmp_path):
    with pytest.raises(AerieError, match="needs 8 GPUs and was granted 2: run snakemake with --resources gpu=8"), lease(8, 2, tmp_path):
        pass
    with pytest.raises(AerieError, match="needs 5 GPUs, this host offers 4"), lease(5, 8, tmp_path):
        pass


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            "echo Failed to initialize NVML: Driver/library version mismatch; exit 18",
            "exit code 18: Failed to initialize NVML: Driver/library",
        ),
        ("sleep 60", "nvidia-smi does not answer within 1 s"),
    ],
)
def test_a_driver_that_fails_is_told(tmp_path, monkeypatch, script, found):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "_SECONDS_TO_ANSWER", 1)
    with pytest.raises(AerieError, match=found), lease(1, 1, tmp_path / "locks"):
        pass


def test_a_host_holds_its_share_of_several_nodes(tmp_path):
    with lease(6, 6, tmp_path, nodes=2) as held:
        assert len(held) == 3 and os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(held)
    with pytest.raises(AerieError, match="needs 16 GPUs and was granted 8"), lease(16, 8, tmp_path, nodes=2):
        pass
    with pytest.raises(AerieError, match="needs 8 GPUs on each of its nodes, this host offers 3"), lease(16, 16, tmp_path, nodes=2):
        pass


def test_no_gpu_needed_takes_none(tmp_path):
    with lease(0, 0, tmp_path) as held:
        assert held == [] and not list(tmp_path.iterdir())


HOST = {"0": "GPU-aaaa1111", "1": "GPU-bbbb2222"}
PRESETS = {  # CUDA_VISIBLE_DEVICES: the locks of what CUDA then sees
    "0,1": ["GPU-aaaa1111", "GPU-bbbb2222"],
    "1, 0": ["GPU-aaaa1111", "GPU-bbbb2222"],
    "GPU-bbbb2222": ["GPU-bbbb2222"],
    "GPU-bb": ["GPU-bbbb2222"],
    "1,GPU-bbbb2222": ["GPU-bbbb2222"],
    "MIG-GPU-aaaa1111/1/0": ["MIG-GPU-aaaa1111_1_0"],
    "MIG-5c89": ["MIG-5c89"],
    "0,-1,1": ["GPU-aaaa1111"],
    "-1": [],
    "": [],
    "NoDevFiles": [],
    "7": [],
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_device_has_one_lock_whatever_it_is_called(tmp_path, monkeypatch, preset):
    monkeypatch.setattr(devices, "gpu_uuids", lambda: HOST)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", preset)
    locks = PRESETS[preset]
    if locks:
        with lease(len(locks), len(locks), tmp_path):
            assert sorted(path.name for path in tmp_path.iterdir()) == locks
            assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == len(locks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", preset)
    with pytest.raises(AerieError, match=f"this host offers {len(locks)} .*Lower"), lease(len(locks) + 1, 8, tmp_path):
        pass


def test_jobs_meet_whatever_their_tmpdir_is(tmp_path):
    command = [sys.executable, "-c", "from aerie.devices import LOCKS; print(LOCKS)"]
    told = [
        subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=True).stdout
        for more in ({}, {"TMPDIR": str(tmp_path)})
    ]
    assert told[0] == told[1]


HOLD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from aerie.devices import lease

    with lease(int(sys.argv[2]), 8, Path(sys.argv[1])) as held:
        print(",".join(held), flush=True)
        sys.stdin.readline()
    """
)


def hold(folder, count):
    command = [sys.executable, "-c", HOLD, str(folder), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_larger_job_waits_for_a_smaller_one_and_a_kill_frees_devices(tmp_path):
    small = hold(tmp_path, 3)
    assert small.stdout.readline().strip() == "GPU-a,GPU-b,GPU-c"
    large = hold(tmp_path, 4)
    assert "waiting for 4 free GPUs of 4" in large.stderr.readline()
    small.kill()
    assert large.stdout.readline().strip() == "GPU-a,GPU-b,GPU-c,GPU-d"
    large.communicate("\n", timeout=10)
    assert large.returncode == 0
    small.communicate()
