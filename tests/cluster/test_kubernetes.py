"""The Kubernetes profile without a cluster: a stand-in for kubectl keeps each Job and runs its command at once, as a node would."""

import json
import os
import subprocess
import sys

import pytest

from checkout import ROOT
from tiny_targets import make_tiny_llama
from tiny_workflow import TinyWorkflow

KUBECTL = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
folder = Path(__file__).parent
if sys.argv[1] == "create":
    job = json.load(sys.stdin)
    container = job["spec"]["template"]["spec"]["containers"][0]
    code = subprocess.run(container["command"], cwd=container["workingDir"], stdout=sys.stderr).returncode
    name = job["metadata"]["generateName"] + "x7k2p"
    (folder / name).write_text(json.dumps({{"job": job, "code": code}}))
    print(name, end="")
elif sys.argv[1] == "get" and (folder / sys.argv[3]).exists():
    print(sys.argv[3], *([" 1"] if json.loads((folder / sys.argv[3]).read_text())["code"] else ["1", ""]))
"""


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """The folder in which the stand-in keeps the Jobs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_job_is_made_created_and_followed(tmp_path, kubectl):
    workflow = TinyWorkflow(tmp_path / "work")
    make_tiny_llama(workflow.folder / "target")
    (workflow.folder / "profiles").symlink_to(ROOT / "profiles")
    options = ["--profile", str(ROOT / "profiles/kubernetes"), "--seconds-between-status-checks", "1"]
    goal = "results/targets/tiny/fingerprint.json"
    result = workflow.run(goal, *options, "--set-resources", "fingerprint_target:gpu=2")
    assert result.code == 0, result.text
    assert json.loads((workflow.folder / goal).read_text())["digest"]
    [path] = kubectl.glob("aerie-*")
    assert path.name == "aerie-fingerprint-target-x7k2p"
    container = json.loads(path.read_text())["job"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "1000M"},
        "limits": {"memory": "1000M", "nvidia.com/gpu": "2"},
    }
    assert container["workingDir"] == str(workflow.folder)
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/aerie", "/dev/shm"}


@pytest.mark.parametrize(("job", "said"), [({"code": 0}, "success"), ({"code": 1}, "failed"), (None, "failed")])
def test_the_status_is_in_snakemakes_words(kubectl, job, said):
    if job:
        (kubectl / "aerie-x").write_text(json.dumps(job))
    done = subprocess.run([ROOT / "profiles/kubernetes/status.sh", "aerie-x"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{said}\n"
