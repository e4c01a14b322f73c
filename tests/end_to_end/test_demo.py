"""The demo as a user runs it, killed on the way in three stages; about 20 minutes on two cores, and it fetches its inputs."""

import json
import re
import time

import pytest

from checkout import ROOT
from tiny_workflow import kill, run, start

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("demo")
    (made / "config").symlink_to(ROOT / "config")
    return made


def kill_when(folder, there):
    """Starts the plain command and kills its whole process group as soon as `there()`."""
    process = start(folder)
    while not there():
        assert process.poll() is None, (folder / "terminal.txt").read_text()
        time.sleep(0.1)
    kill(process)


def test_killed_in_three_stages_the_demo_is_complete(folder):
    store = folder / "results/.store"
    kill_when(folder, lambda: len(list(store.glob("answers/*/*.parquet"))) >= 2)
    batches = len(list(store.glob("answers/*/*.parquet")))
    kill_when(folder, lambda: len(list(store.glob("hidden_states/*/*.safetensors"))) >= 1)
    shards = {path.name for path in store.glob("hidden_states/*/*.safetensors")}
    assert shards and batches >= 2
    kill_when(folder, lambda: any(store.glob("train_draft/*.partial/work/checkpoints/*")))
    assert shards <= {path.name for path in store.glob("hidden_states/*/*.safetensors")}
    result = run(folder)
    assert result.code == 0, result.text
    assert not result.rules["regenerate_responses"] and not result.rules["extract_hidden_states"]
    assert re.search("resumed at", (folder / "results/logs/train_draft/demo.log").read_text())
    assert not list(store.glob("*/*.partial"))


def test_the_draft_is_good(folder):
    acceptance = json.loads((folder / "results/evaluations/demo/acceptance.json").read_text())
    assert acceptance["prompts"] == 80 and acceptance["acceptance_length"] >= 1.40
    served = acceptance["accepted_per_position"][0]
    validation = json.loads((folder / "results/drafts/demo/manifest.json").read_text())["figures"]["validation"]
    assert abs(served - validation["accuracy"][0]) <= 0.05
    assert json.loads((folder / "results/vocab_maps/demo/coverage.json").read_text())["coverage"] >= 0.9


def test_a_second_run_has_nothing_to_do(folder):
    began = time.monotonic()
    result = run(folder)
    assert result.code == 0 and "Nothing to be done" in result.text and time.monotonic() - began < 10


def test_a_learning_rate_is_trained_and_its_old_value_restored(folder):
    before = (folder / "results/drafts/demo/manifest.json").read_bytes()
    change = ("--config", "drafts={eagle3: {training: {learning_rate: 0.002}}}")
    planned = run(folder, "-n", *change).rules
    assert planned == {"train_draft": 1, "evaluate_draft": 1, "build_report": 1, "write_recipe": 1, "all": 1}
    # as if it had been trained: only the recipe is written, then the setting is changed back
    assert run(folder, "--until", "write_recipe", *change).code == 0
    result = run(folder)
    assert result.code == 0 and result.restored == {"train_draft": 1, "evaluate_draft": 1}, result.text
    assert (folder / "results/drafts/demo/manifest.json").read_bytes() == before
