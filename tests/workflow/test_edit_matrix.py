"""Every kind of edit on a finished run: which stages then run, which restore from the store, and what was promised before.

Stages that keep nothing in the store (fingerprint_target, preflight_target) can only run. An extraction "restores" where
no state was missing, so the target was not loaded.
"""

import json
import os
import re
import shutil
import time

import pytest

from checkout import ROOT
from tiny_targets import CHAT_TEMPLATE

pytestmark = pytest.mark.long

RUN, RESTORE = "run", "restore"
TRAIN = {"train_draft": RUN, "evaluate_draft": RUN}
RESTORED_DRAFT = {"train_draft": RESTORE, "evaluate_draft": RESTORE}
EXTRACT = {"extract_hidden_states": RUN, **TRAIN}
DATA = {"regenerate_responses": RUN, "prepare_dataset": RUN, "map_vocabulary": RUN, **EXTRACT}
TARGET = {"fingerprint_target": RUN, "preflight_target": RUN}
ALL_RESTORED = {stage: RESTORE for stage in DATA}


class Edited:
    """A finished workflow under edit; its scripts can be edited, too, once `checkout` has copied them."""

    def __init__(self, workflow):
        self.workflow, self.folder, self.config = workflow, workflow.folder, workflow.config
        self.root = ROOT

    @property
    def draft(self):
        return self.config["drafts"]["eagle3"]

    def checkout(self):
        self.root = self.folder / "checkout"
        for name in ("workflow", "profiles", "envs", "config"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "Snakefile", self.root)

    def script(self, name):
        """A script of this test's own copy of the workflow."""
        if self.root == ROOT:
            self.checkout()
        return self.root / "workflow/scripts" / name

    def edit_script(self, name, before, after):
        path = self.script(name)
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, after))

    def raise_version(self, name):
        path = self.script(name)
        text, count = re.subn(r"(?m)^VERSION = (\d+)$", lambda found: f"VERSION = {int(found[1]) + 1}", path.read_text())
        assert count == 1
        path.write_text(text)

    def rows(self):
        return [json.loads(line) for line in (self.folder / "talk.jsonl").read_text().splitlines()]

    def write_rows(self, rows):
        (self.folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(self):
        return ["-s", str(self.root / "Snakefile")]

    def run(self):
        self.workflow.write()
        return self.workflow.run(*self.arguments())

    def forecasts(self):
        self.workflow.write()
        return self.workflow.forecasts(*self.arguments(), scripts=self.root / "workflow/scripts")


@pytest.fixture
def edited(llama):
    return Edited(llama)


def outcome(result):
    """{stage: run or restore} of what Snakemake's output says was done."""
    found = {stage: RUN for stage in result.rules if stage in {*DATA, *TARGET}}
    found |= {stage: RESTORE for stage in result.restored}
    parts = [int(number) for number in re.findall(r"^hidden states: part \d+ of \d+ is complete, (\d+) samples", result.text, re.MULTILINE)]
    if parts:
        found["extract_hidden_states"] = RUN if sum(parts) else RESTORE
    return found


def promised(forecast, done):
    """Whether a forecast covers what was done: restoring may be promised as running, never running as restoring."""
    allowed = {RUN: {"run", "unknown"}, RESTORE: {"run", "restore", "unknown"}}
    return all(forecast.get(stage) in allowed[what] for stage, what in done.items())


def touch_inputs(edit):
    for path in [edit.folder / "talk.jsonl", edit.folder / "prompts.jsonl", *(edit.folder / "target").iterdir()]:
        path.touch()


def reformat(edit):
    edit.edit_script(
        "train_draft.py",
        "    recipe = Recipe.read(args.recipe)\n",
        "    # Read first.\n    recipe = Recipe.read(\n        args.recipe\n    )\n",
    )
    edit.edit_script("aerie/keys.py", '"""Keys (of inputs)', '"""All keys (of inputs)')


def raise_version(edit):
    edit.raise_version("prepare_dataset.py")


def raise_version_with_effect(edit):
    edit.raise_version("map_vocabulary.py")
    edit.edit_script("map_vocabulary.py", "choose_tokens(counts, size,", "choose_tokens(counts, size - 1,")


def edit_a_row(edit):
    rows = edit.rows()
    rows[3]["prompt"] = "What is three plus three?"
    edit.write_rows(rows)


def change_a_byte(edit):
    path = edit.folder / "target/model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1  # a low bit of the last weight's mantissa
    path.write_bytes(raw)


def move_target(edit):
    (edit.folder / "target").rename(edit.folder / "elsewhere")
    edit.config["targets"]["tiny"]["path"] = "elsewhere"


def change_template(edit):
    path = edit.folder / "target/chat_template.jinja"
    assert path.read_text() == CHAT_TEMPLATE
    changed = CHAT_TEMPLATE.replace("'<|im_end|>\n'", "'<|im_end|>'")
    assert changed != CHAT_TEMPLATE
    path.write_text(changed)


def change_prompts(edit):
    (edit.folder / "prompts.jsonl").write_text('{"prompt": "Tell me of two."}\n{"prompt": "And of 3?"}\n')


def add_a_run(edit):
    with open(edit.folder / "config/runs.tsv", "a") as file:
        file.write("b\ttiny\ttalk\teagle3\n")


def set_the_clock_back(edit):
    """Whatever was made lies in the future."""
    later = time.time() + 7200
    for path in [*edit.folder.joinpath("results").rglob("*"), *edit.folder.joinpath(".snakemake").rglob("*")]:
        os.utime(path, (later, later), follow_symlinks=False)
    edit.draft["training"]["learning_rate"] = 0.002


MATRIX = {
    "touch every input": (touch_inputs, TARGET | ALL_RESTORED),
    "reformat scripts": (reformat, {}),
    "VERSION without effect": (
        raise_version,
        {"prepare_dataset": RUN, "extract_hidden_states": RESTORE, "map_vocabulary": RESTORE, **RESTORED_DRAFT},
    ),
    "VERSION with effect": (raise_version_with_effect, {"map_vocabulary": RUN, **TRAIN}),
    "edit a row": (edit_a_row, DATA),
    "append rows": (lambda edit: edit.write_rows([*edit.rows(), {"prompt": "And one more?", "response": "Yes."}]), DATA),
    "reorder rows": (
        lambda edit: edit.write_rows(edit.rows()[::-1]),
        ALL_RESTORED | {"regenerate_responses": RUN, "prepare_dataset": RUN},
    ),  # the ledger's lines
    "learning rate": (lambda edit: edit.draft["training"].update(learning_rate=0.002), TRAIN),
    "epochs": (lambda edit: edit.draft["training"].update(epochs=2), TRAIN),
    "draft vocabulary": (lambda edit: edit.draft.update(vocab_size=265), {"preflight_target": RUN, "map_vocabulary": RUN, **TRAIN}),
    "draft layers": (lambda edit: edit.draft.update(layers=2), TRAIN),
    "aux layer ids": (lambda edit: edit.draft.update(aux_layer_ids=[1, 3, 6]), {"preflight_target": RUN, **EXTRACT}),
    "stored dtype": (lambda edit: edit.draft.update(stored_dtype="bfloat16"), {"preflight_target": RUN, **EXTRACT}),
    "a byte of the weights": (change_a_byte, TARGET | DATA),
    "target folder moved": (move_target, TARGET | ALL_RESTORED),
    "chat template": (change_template, TARGET | DATA),
    "temperature": (lambda edit: edit.config["datasets"]["talk"]["regenerate"].update(temperature=0.5), DATA),
    "parts": (lambda edit: edit.config.update(extraction={"parts": 4}), {"extract_hidden_states": RESTORE, **RESTORED_DRAFT}),
    "evaluation prompts": (change_prompts, {"evaluate_draft": RUN}),
    "a second run": (add_a_run, {"map_vocabulary": RESTORE, **RESTORED_DRAFT}),
    "no .snakemake": (lambda edit: shutil.rmtree(edit.folder / ".snakemake"), {}),
    "clock set back": (set_the_clock_back, TRAIN),
}


@pytest.mark.parametrize("name", MATRIX)
def test_an_edit(edited, name):
    edit, expected = MATRIX[name]
    edit(edited)
    forecast = edited.forecasts()
    result = edited.run()
    assert result.code == 0, result.text
    done = outcome(result)
    assert done == expected
    if name != "a second run":  # the forecasts are of run a, to which nothing happens
        assert promised(forecast, done), (forecast, done)
    assert set(edited.run().rules) <= {"all"}


def test_there_and_back_without_records(edited):
    shutil.rmtree(edited.folder / ".snakemake")
    edited.draft["training"]["learning_rate"] = 0.002
    assert outcome(edited.run()) == TRAIN
    shutil.rmtree(edited.folder / ".snakemake")
    edited.draft["training"]["learning_rate"] = 0.001
    assert edited.forecasts() == RESTORED_DRAFT
    assert outcome(edited.run()) == RESTORED_DRAFT
    assert set(edited.run().rules) <= {"all"}


def test_results_copied_to_another_place(edited, tmp_path):
    """As `cp -r` does it: new paths, new modification times in any order."""
    copied = tmp_path / "other"
    shutil.copytree(edited.folder, copied, copy_function=shutil.copyfile)
    edited.workflow.folder = copied
    forecast = edited.forecasts()
    result = edited.run()
    assert result.code == 0, result.text
    done = outcome(result)
    assert {stage for stage, what in done.items() if what == RUN} <= set(TARGET) and promised(forecast, done)
    edited.draft["training"]["learning_rate"] = 0.002
    assert outcome(edited.run()) == TRAIN


def test_damaged_states_are_extracted_again(edited):
    """verify sets the shard aside and fails; the next run extracts, and finds all that follows in the store."""
    [shard] = edited.folder.glob("results/.store/hidden_states/*/*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert edited.workflow.run("verify").code != 0
    assert promised(edited.forecasts(), {"extract_hidden_states": RUN, **RESTORED_DRAFT})
    assert outcome(edited.run()) == {"extract_hidden_states": RUN, **RESTORED_DRAFT}
    result = edited.workflow.run("verify")
    assert result.code == 0 and "no damage found" in result.text
