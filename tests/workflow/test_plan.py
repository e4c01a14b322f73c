"""snakemake plan and status: what they promise, why, and that they change nothing. The full edit matrix is in test_edit_matrix.py."""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import time
from pathlib import Path

import pytest

from aerie.configuration import Plan
from aerie.errors import AerieError
from aerie.planning import Planner, Until, differences
from aerie.status import Status
from aerie.store import command_words
from tiny_workflow import TinyWorkflow

STATES = ("extract_hidden_states", "tiny/talk/default_float32")


@pytest.fixture
def inside(llama):
    """The finished workflow, with its folder as the working directory."""
    with contextlib.chdir(llama.folder):
        yield llama


def planned(workflow, jobs=()):
    """A planner as if Snakemake wanted to run these steps."""
    plan = workflow.resolved()
    return Planner(plan, {step: ["why not"] for step in jobs})


def kept_steps(plan):
    return [step for step in plan.steps(plan.runs["a"]) if step[0] not in ("fingerprint_target", "preflight_target")]


def test_keys_are_those_that_the_stages_made(inside):
    """Each stage's key, worked out from the configuration and the digests of its inputs, is its manifest's."""
    planner = planned(inside)
    steps = [step for step in kept_steps(planner.plan) if step != STATES]
    assert len(steps) == 5
    for step in steps:
        assert planner.key(step) == planner.manifest(step)["key"], step
    planner = planned(inside, planner.plan.recipes)  # everything is due: nothing is taken from results/
    for step in kept_steps(planner.plan):
        assert planner.digest(step) == planner.manifest(step)["digest"], step
        assert planner.forecast(step).verdict == "restore"
    assert planner.digest(("fingerprint_target", "tiny")) == json.loads(Path("results/targets/tiny/fingerprint.json").read_text())["digest"]


@pytest.mark.parametrize(
    ("edit", "verdicts", "stage", "why"),
    [
        (
            lambda config: config["drafts"]["eagle3"].update(vocab_size=265),
            {"preflight_target": "run", "map_vocabulary": "run", "train_draft": "unknown", "evaluate_draft": "unknown"},
            "map_vocabulary",
            "vocab_size 270 → 265",
        ),
        (
            lambda config: config["drafts"]["eagle3"].update(aux_layer_ids=[1, 3, 6]),
            {"preflight_target": "run", "extract_hidden_states": "run", "train_draft": "run", "evaluate_draft": "unknown"},
            "train_draft",
            "aux_layer_ids null → [1, 3, 6]; hidden_states changed",
        ),
        (
            lambda config: config["datasets"]["talk"].update(max_length=100),
            {"preflight_target": "run", "prepare_dataset": "run"}
            | dict.fromkeys(["extract_hidden_states", "map_vocabulary", "train_draft", "evaluate_draft"], "unknown"),
            "extract_hidden_states",
            "until prepare_dataset has run",
        ),
        (
            lambda config: config.update(extraction={"parts": 4}),
            dict.fromkeys(["extract_hidden_states", "train_draft", "evaluate_draft"], "restore"),
            "extract_hidden_states",
            "parts 1 → 4",
        ),
    ],
    ids=["vocabulary", "layers", "length", "parts"],
)
def test_an_edit_is_told_with_its_reason(inside, edit, verdicts, stage, why):
    edit(inside.config)
    inside.write()
    planner = inside.planner()
    forecasts = {step[0]: planner.forecast(step) for step in planner.plan.steps(planner.plan.runs["a"])}
    assert {name: found.verdict for name, found in forecasts.items() if found.verdict != "nothing"} == verdicts
    assert forecasts[stage].why == why


def test_missing_states_are_counted_with_their_bytes(inside):
    shutil.rmtree("results/.store/hidden_states")
    planner = planned(inside, [STATES])
    found = planner.extraction(STATES)
    figures = planner.manifest(STATES)["figures"]
    assert (found.missing_samples, found.missing_tokens) == (figures["samples"], figures["tokens"]) == (found.samples, found.tokens)
    assert found.missing_bytes == figures["bytes"] == figures["tokens"] * (4 * 64 * 4 + 4)  # 4 layers of 64 float32, and an id
    assert planner.seconds(STATES) == pytest.approx(figures["tokens"] / figures["tokens_per_second"])
    text = "\n".join(planner.lines())
    assert f"the store lacks the states of {figures['samples']}" in text and "free on the disk" in text
    assert "`snakemake --forcerun find_missing_states`" in "\n".join(planned(inside).lines())


def test_a_source_that_is_not_there_yet_leaves_its_stages_unknown(inside):
    planner = planned(inside, [step for step in inside.resolved().recipes])
    (inside.folder / "talk.jsonl").unlink()
    assert planner.key(("prepare_dataset", "tiny/talk")) == Until("fetch_package_file")


def test_differences_name_the_setting():
    assert differences({"a": {"b": 1, "c": [1]}}, {"a": {"b": 2, "c": [1]}, "d": None}) == ["a.b 1 → 2"]
    assert differences({"x": None}, {"x": "y"}) == ['x null → "y"']
    capture = {"dataset": {"name": "d", "max_samples": 900}, "aux_layer_ids": [2, 4]}
    fewer = {"dataset": {"name": "d", "max_samples": 10}, "aux_layer_ids": [2, 4]}
    assert differences({"captures": [capture, capture]}, {"captures": [capture, fewer]}) == ["captures[1].dataset.max_samples 900 → 10"]
    assert differences({"captures": [capture]}, {"captures": [capture, fewer]}) == ["captures 1 → 2 entries"]
    [line] = differences({"sources": ["a.jsonl"]}, {"sources": [f"{number}.jsonl" for number in range(99)]})
    assert line.startswith('sources ["a.jsonl"] → ["0.jsonl", ') and line.endswith("…") and len(line) < 120


def test_what_is_not_known_is_not_counted_as_nothing(tmp_path, monkeypatch):
    """Before anything was made: each download is named, and neither time nor bytes are said to be 0."""
    workflow = TinyWorkflow(tmp_path)
    downloads = {name: {"package": "x==1", "sha256": "0" * 64, "member": name} for name in ("one", "two")}
    workflow.config["downloads"] = downloads
    workflow.config["datasets"]["talk"]["sources"] = [f"results/downloads/{name}/x.jsonl" for name in downloads]
    monkeypatch.chdir(tmp_path)
    text = "\n".join(planned(workflow, workflow.resolved().recipes).lines())
    assert "fetch_package_file     run      one: not made yet\n  fetch_package_file     run      two: not made yet" in text
    assert "time more where unknown stages have to run: not known; no measured rate yet for evaluate_draft, " in text
    assert "hidden states to write: not known yet; free on" in text and " 0 " not in text


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A workflow with manifests of a draft and an evaluation, and no dataset."""
    workflow = TinyWorkflow(tmp_path)
    monkeypatch.chdir(tmp_path)
    planner = planned(workflow)
    files = {"results/targets/tiny/fingerprint.json": {"digest": "t" * 64}}
    for stage, folder in (("train_draft", "drafts"), ("evaluate_draft", "evaluations")):
        recipe = planner.recipe((stage, "a"))
        manifest = {"settings": recipe.settings, "runtime": recipe.runtime, "version": recipe.version, "inputs": {"target": "t" * 64}}
        files[f"results/{folder}/a/manifest.json"] = manifest | {"seconds": 100, "figures": {"seconds": 90, "tokens_per_second": 10}}
    for path, content in files.items():
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text(json.dumps(content))
    return workflow


def test_a_rate_counts_for_its_own_dtype(measured):
    step = ("evaluate_draft", "a")
    assert planned(measured).seconds(step) == 100
    measured.config["targets"]["tiny"]["dtype"] = "bfloat16"
    assert planned(measured).seconds(step) is None


def test_a_pilots_time_is_not_the_full_runs(measured):
    step = ("evaluate_draft", "a")
    measured.config["evaluation"]["max_new_tokens"] = 32
    assert planned(measured).seconds(step) is None


def test_regeneration_takes_as_long_as_it_did_for_the_same_prompts(inside):
    step = ("regenerate_responses", "tiny/talk")
    path = Path("results/regenerated/tiny/talk/manifest.json")
    shutil.rmtree("results/.store/regenerate_responses")
    made = json.loads(path.read_text())
    path.write_text(json.dumps(made | {"seconds": 30.0, "figures": made["figures"] | {"prompts": 40, "asked": 10}}))
    assert planned(inside).seconds(step) == pytest.approx(30 * 40 / 10)
    with open("talk.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "One more?", "response": "No."}) + "\n")
    assert planned(inside, [step]).seconds(step) is None


def test_a_measured_training_without_its_dataset_lacks_no_rate(measured):
    jobs = [step for step in measured.resolved().recipes if step[0] != "fingerprint_target"]
    text = "\n".join(planned(measured, jobs).lines())
    assert "at measured rates; no measured rate yet for extract_hidden_states, " in text
    assert "; how much data is not known yet for train_draft" in text


def test_status_tells_what_is_done_unfinished_and_running(inside):
    header, row = Status(inside.resolved()).table()
    cells = dict(zip(header, row, strict=True))
    figures = inside.manifest("datasets", "tiny", "talk")["figures"]
    assert cells["run"] == "a" and cells["dataset"] == f"{figures['samples']} samples, {figures['tokens']:,} tokens"
    assert cells["evaluation"].startswith("acceptance length")
    key = inside.manifest("drafts", "a")["key"]
    store = inside.folder / "results/.store/train_draft"
    (store / key).rename(store / f"{key}.partial")
    shutil.rmtree("results/drafts/a")
    (inside.folder / "results/logs/train_draft/a.log").write_text("train_draft: 30/120 steps, 2.0 steps/s, 45 s left, loss 1.5\n")
    assert Status(inside.resolved()).table()[1][5] == "unfinished"
    with open(store / f"{key}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert Status(inside.resolved()).table()[1][5] == "running, 30/120 steps, 2.0 steps/s, 45 s left, loss 1.5"
    inside.config["evaluation"]["max_new_tokens"] = 8
    assert Status(inside.resolved()).table()[1][5:] == ["unfinished", "made with other settings"]


def test_status_marks_every_stage_that_other_settings_or_inputs_made(inside):
    """A pilot's states, vocabulary and draft have the same settings as the full run's, and other inputs."""
    plan = inside.resolved()
    assert not list(Status(plan).notes("--configfile config/config.yaml"))
    plan.config["max_samples"] = 10
    status = Status(Plan(plan.config, plan.versions, False))
    assert status.table()[1][1:] == ["made with other settings"] * 6
    [line, command] = status.notes("--configfile config/config.yaml --config max_samples=10")
    assert "made with other settings" in line and command == "  snakemake status --cores 1 --configfile config/config.yaml"
    [line] = status.notes("--configfile config/config.yaml")  # edited since: there is no other command
    assert line == "made with other settings: `snakemake plan` says which"
    manifest = Path("results/datasets/tiny/talk/manifest.json")
    right = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(right | {"digest": "of other samples"}))
    _, answers, dataset, *rest = Status(inside.resolved()).table()[1]
    assert "kept" in answers and "samples" in dataset and rest == ["of an earlier run"] * 4
    manifest.write_text(json.dumps(right | {"inputs": right["inputs"] | {"sources": "other answers"}}))
    assert Status(inside.resolved()).table()[1][2:] == ["of an earlier run"] * 5


@pytest.mark.parametrize(("file", "first"), [("talk.jsonl", 1), ("prompts.jsonl", 6)])
def test_status_marks_what_was_made_of_older_files(inside, file, first):
    before = Status(inside.resolved()).table()[1]
    os.utime(file, (time.time() + 5,) * 2)
    assert Status(inside.resolved()).table()[1] == [*before[:first], *["of an earlier run"] * (7 - first)]


def test_a_configuration_as_words_of_a_command():
    overrides = {"max_samples": 10, "gc": "delete", "drafts": {"e": {"training": {"epochs": 5}}}, "store": "a b"}
    expected = ["--configfile", "my own.yaml", "--config", 'drafts={"e": {"training": {"epochs": 5}}}', "max_samples=10", "store=a b"]
    assert shlex.split(command_words(["my own.yaml"], overrides)) == expected


def snapshot(folder):
    paths = [path for path in sorted(folder.rglob("*")) if "logs" not in path.parts and path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def test_plan_and_status_work_beside_a_run_and_change_nothing(llama):
    llama.config["drafts"]["eagle3"]["training"]["learning_rate"] = 0.002
    llama.write()
    before = snapshot(llama.folder / "results")
    with open(next((llama.folder / "results/.store/hidden_states").glob("*/.locks/00")), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        plan, status = llama.run("plan"), llama.run("status")
    assert plan.code == status.code == 0, plan.text + status.text
    assert "train_draft            run      training.learning_rate 0.001 → 0.002" in plan.text
    assert "evaluate_draft         unknown  until train_draft has run" in plan.text
    assert "the store has all their states" in plan.text
    assert "running" in status.text and "made with other settings: `snakemake plan` says which\n" in status.text
    assert snapshot(llama.folder / "results") == before
    assert llama.plan() == {"train_draft": 1, "evaluate_draft": 1, "build_report": 1, "write_recipe": 1, "all": 1}


def test_states_that_the_disk_cannot_take_are_refused(inside):
    job = planned(inside)._job(STATES)
    job.check_disk(1, 1000, inside.folder / "results/.store")
    with pytest.raises(AerieError, match=r"the hidden states of 7 samples take 1,028\.0 PB, .* free"):
        job.check_disk(7, 10**15, inside.folder / "results/.store")


def test_damaged_states_are_looked_for_by_the_next_run(inside):
    [shard] = inside.folder.glob("results/.store/hidden_states/*/*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    result = inside.run("verify")
    assert result.code != 0 and "1 of 8" in result.text and "another sha256" in result.text and shard.name in result.text
    assert not shard.exists()
    planner = inside.planner()
    assert planner.forecast(STATES).verdict == "run"
    assert planner.extraction(STATES).missing_samples == planner.manifest(STATES)["figures"]["samples"] > 0
