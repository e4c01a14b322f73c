"""What manifests say of where a result came from."""

import subprocess
from pathlib import Path

import pytest

from aerie import provenance
from aerie.stage import Recipe, StageResult, run_stage


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A checkout of its own: one script, one commit."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "a.py").write_text("A = 1\n")
    monkeypatch.setattr(provenance, "_SCRIPTS", folder)
    for cached in (provenance.code_digest, provenance.git_state):
        cached.cache_clear()
    yield folder
    for cached in (provenance.code_digest, provenance.git_state):
        cached.cache_clear()


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=n@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(scripts, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(scripts.parent))
    assert provenance.git_state() is None
    git(scripts, "init", "-q")
    git(scripts, "add", ".")
    git(scripts, "commit", "-qm", "first")
    provenance.git_state.cache_clear()
    assert provenance.git_state() == {"commit": git(scripts, "rev-parse", "HEAD"), "dirty": False}
    (scripts / "a.py").write_text("A = 2\n")
    provenance.git_state.cache_clear()
    assert provenance.git_state() == {"commit": git(scripts, "rev-parse", "HEAD"), "dirty": True}


def test_the_code_digest_follows_names_and_bytes(scripts):
    def digest():
        provenance.code_digest.cache_clear()
        return provenance.code_digest()

    first = digest()
    assert first == digest() and len(first) == 64
    (scripts / "a.py").write_text("A = 1  # more\n")
    second = digest()
    (scripts / "a.py").rename(scripts / "b.py")
    assert len({first, second, digest()}) == 3


def test_the_gpus_are_those_of_this_job(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-aa, NVIDIA H200, 570.1'\necho '1, GPU-bb, NVIDIA H100, 570.1'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert provenance.gpu_state() == {"gpus": ["NVIDIA H200", "NVIDIA H100"], "driver": "570.1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert provenance.gpu_state() == {"gpus": ["NVIDIA H100"], "driver": "570.1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert provenance.gpu_state() == {"gpus": [], "driver": None}


def test_a_manifest_says_where_it_came_from(tmp_path):
    manifest = run_stage(Recipe("s", 1, {}, {}), 1, {"data": "d"}, tmp_path / "a", tmp_path / "store", lambda work, out: StageResult())
    assert {"settings", "inputs", "code", "versions", "host", "gpus", "driver", "git", "started", "seconds"} <= set(manifest)
    assert manifest["versions"]["python"] and manifest["host"] and Path(tmp_path / "a/manifest.json").exists()
