"""Two invocations in two working directories on one store, with overlapping runs: nothing is computed twice."""

import re
import time

import pytest

from aerie.hidden_states import read_shard
from tiny_targets import make_tiny_llama
from tiny_workflow import TinyWorkflow, kill

pytestmark = pytest.mark.long
# What a stage says when it computes, and only then.
COMPUTING = {
    "regenerate_responses": r"^regenerate: \d+ of \d+ prompts found answered",
    "prepare_dataset": r"^dataset: \d+ rows",
    "map_vocabulary": r"^map_vocabulary: .* cover",
    "train_draft": r"^train_draft: epoch 1 of",
    "evaluate_draft": r"^evaluate: answering the prompts with the draft",
    "baseline": r"^evaluate: answering the prompts without a draft",
}


@pytest.fixture
def pair(tmp_path):
    """The first with run a, the second with runs a and b, which differ in the learning rate."""
    made = []
    for name, rows in (("first", ["a"]), ("second", ["a", "b"])):
        (tmp_path / name).mkdir()
        workflow = TinyWorkflow(tmp_path / name)
        make_tiny_llama(workflow.folder / "target")
        workflow.config["store"] = str(tmp_path / "store")
        workflow.config["drafts"]["other"] = {
            **workflow.config["drafts"]["eagle3"],
            "training": {"batch_tokens": 256, "learning_rate": 0.002},
        }
        table = "".join(f"{row}\ttiny\ttalk\t{'eagle3' if row == 'a' else 'other'}\n" for row in rows)
        (workflow.folder / "config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\n" + table)
        workflow.write()
        made.append(workflow)
    return made, tmp_path / "store"


def text_of(workflow):
    return (workflow.folder / "terminal.txt").read_text()


def times_computed(workflows):
    text = "\n".join(map(text_of, workflows))
    return {stage: len(re.findall(pattern, text, re.MULTILINE)) for stage, pattern in COMPUTING.items()}


def test_each_stage_is_computed_once_and_both_succeed(pair):
    workflows, store = pair
    processes = [workflow.start() for workflow in workflows]
    assert [process.wait() for process in processes] == [0, 0], "\n".join(map(text_of, workflows))
    once = dict.fromkeys(COMPUTING, 1)
    assert times_computed(workflows) == once | {"train_draft": 2, "evaluate_draft": 2}
    keys = [key for path in store.glob("hidden_states/*/*.safetensors") for key in read_shard(path).keys]
    first, second = (workflow.manifest("hidden_states", "tiny", "talk", "default_float32") for workflow in workflows)
    assert len(keys) == len(set(keys)) == first["figures"]["samples"]
    assert first["digest"] == second["digest"]
    assert workflows[0].manifest("drafts", "a") == workflows[1].manifest("drafts", "a")
    for workflow in workflows:
        assert not workflow.plan()


def test_when_one_is_killed_the_other_goes_on(pair):
    workflows, store = pair
    first, second = (workflow.start() for workflow in workflows)
    end = time.monotonic() + 600
    while not any(store.glob("train_draft/*.partial/work/checkpoints/*")):
        assert first.poll() is None and time.monotonic() < end, text_of(workflows[0])
        time.sleep(0.05)
    kill(first)
    assert second.wait() == 0, text_of(workflows[1])
    assert workflows[0].run().code == 0
    assert workflows[0].manifest("drafts", "a") == workflows[1].manifest("drafts", "a")
