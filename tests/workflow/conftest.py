"""A finished run of the tiny workflow, made once; tests copy it and edit their copy."""

import copy
import shutil
from pathlib import Path

import pytest

from tiny_targets import make_tiny_llama
from tiny_workflow import TinyWorkflow


@pytest.fixture(scope="session")
def finished_llama(tmp_path_factory):
    """The workflow after its first complete run, with a tiny Llama; not to be edited."""
    made = TinyWorkflow(tmp_path_factory.mktemp("llama"))
    make_tiny_llama(made.folder / "target")
    result = made.run()
    assert result.code == 0, result.text
    return made, result


@pytest.fixture
def llama(finished_llama, tmp_path):
    """A copy of the finished workflow, free to edit."""
    made, _ = finished_llama
    edited = copy.copy(made)
    edited.folder = Path(shutil.copytree(made.folder, tmp_path / "copy", symlinks=True))
    edited.config = copy.deepcopy(made.config)
    return edited
