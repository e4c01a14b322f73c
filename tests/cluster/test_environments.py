"""The conda environments install the locks. Conda itself is not needed: a stand-in makes virtual environments instead."""

import hashlib
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from checkout import ROOT
from tiny_workflow import TinyWorkflow

CONDA = f"""#!/bin/sh
case "$1" in
    info) echo '{{"conda_prefix": "PREFIX", "platform": "linux-64"}}' ;;
    --version) echo "conda 25.9.1" ;;
    config) echo '{{"get": {{"channel_priority": "strict"}}}}' ;;
    env) {sys.executable} -m venv --without-pip "$(echo "$*" | sed 's/.*--prefix //')" && uv --version ;;
esac
"""


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_environment_names_its_lock_and_the_uv_that_installs_it(name):
    """Snakemake makes an environment anew when its file changes, and knows nothing of the lock: so the lock's digest is in the file."""
    text = (ROOT / f"envs/{name}.yaml").read_text()
    assert hashlib.sha256((ROOT / f"envs/{name}.txt").read_bytes()).hexdigest() in text
    assert f"uv={(ROOT / 'envs/uv-version').read_text().strip()}" in yaml.safe_load(text)["dependencies"]


@pytest.fixture
def workflow(tmp_path, monkeypatch):
    """Its Snakemake finds the stand-in; uv looks for wheels where pip does."""
    (tmp_path / "conda/bin").mkdir(parents=True)
    (tmp_path / "conda/bin/conda").write_text(CONDA.replace("PREFIX", str(tmp_path / "conda")))
    (tmp_path / "conda/bin/conda").chmod(0o755)
    (tmp_path / "conda/bin/activate").write_text('export CONDA_PREFIX="$1" PATH="$1/bin:$PATH"\n')
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "conda/bin"), str(Path(sys.executable).parent), os.environ["PATH"]]))
    found = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True)
    monkeypatch.setenv("UV_FIND_LINKS", found.stdout.strip())
    made = TinyWorkflow(tmp_path / "work")
    (made.folder / "target").mkdir()
    (made.folder / "target/config.json").write_text("{}")
    return made


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("cuda", "cuda")])
def test_the_dry_run_takes_the_environment_of_the_targets_device(workflow, device, name):
    workflow.config["targets"]["tiny"]["device"] = device
    workflow.write()
    result = workflow.run("-n", "--sdm", "conda")
    assert result.code == 0, result.text
    assert re.findall(r"Conda environment (\S+) will be created", result.text) == [str(ROOT / f"envs/{name}.yaml")]


@pytest.mark.long
def test_snakemake_installs_the_lock(workflow):
    result = workflow.run("--sdm", "conda", "--conda-create-envs-only")
    assert result.code == 0, result.text
    [made] = (workflow.folder / ".snakemake/conda").glob("*/lib/python3*/site-packages")
    installed = {canonical(one.name): one.version for one in distributions(path=[str(made)])}
    lock = dict(re.findall(r"^([\w.-]+)==([^ \\\n]+)", (ROOT / "envs/cpu.txt").read_text(), re.MULTILINE))
    assert installed == {canonical(name): version for name, version in lock.items()}


def canonical(name):
    return re.sub("[-_.]+", "-", name).lower()
