"""The conda environments install the locks, as far as can be seen without conda."""

import hashlib

import pytest
import yaml

from checkout import ROOT


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_environment_names_its_lock_and_the_uv_that_installs_it(name):
    """Snakemake makes an environment anew when its file changes, and knows nothing of the lock: so the lock's digest is in the file."""
    text = (ROOT / f"envs/{name}.yaml").read_text()
    assert hashlib.sha256((ROOT / f"envs/{name}.txt").read_bytes()).hexdigest() in text
    assert f"uv={(ROOT / 'envs/uv-version').read_text().strip()}" in yaml.safe_load(text)["dependencies"]
