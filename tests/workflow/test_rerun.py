"""Nothing twice: what a changed setting, a lost .snakemake and a kill make the workflow do again."""

import contextlib
import json
import re
import shutil
import time

import pytest

from aerie.hidden_states import HiddenStateStore
from tiny_targets import make_tiny_llama
from tiny_workflow import Result, TinyWorkflow, kill

RECIPE = {"write_recipe": 1, "all": 1}


def test_a_finished_run_has_nothing_to_do(llama):
    assert not llama.plan()


def test_only_the_learning_rate(llama):
    """Changed: training and what follows. Changed back: the same rules, all restored from the store."""
    llama.config["drafts"]["eagle3"]["training"]["learning_rate"] = 0.002
    llama.write()
    expected = {"train_draft": 1, "evaluate_draft": 1, "build_report": 1, **RECIPE}
    assert llama.plan() == expected
    before = llama.manifest("drafts", "a")
    result = llama.run()
    assert result.code == 0 and result.rules == expected and not result.restored, result.text
    assert llama.manifest("drafts", "a")["key"] != before["key"]
    llama.config["drafts"]["eagle3"]["training"]["learning_rate"] = 0.001
    llama.write()
    assert llama.plan() == expected
    result = llama.run()
    assert result.code == 0 and result.restored == {"train_draft": 1, "evaluate_draft": 1}, result.text
    assert llama.manifest("drafts", "a") == before
    assert not llama.plan()


@pytest.mark.parametrize(
    ("edit", "rules"),
    [
        (lambda config: config["evaluation"].update(max_new_tokens=8), {"evaluate_draft"}),
        (
            lambda config: config["drafts"]["eagle3"].update(vocab_size=265),
            {"preflight_target", "map_vocabulary", "train_draft", "evaluate_draft"},
        ),
        (
            lambda config: config["drafts"]["eagle3"].update(aux_layer_ids=[1, 3, 6]),
            {"preflight_target", "find_missing_states", "extract_hidden_states", "index_hidden_states", "train_draft", "evaluate_draft"},
        ),
        (
            lambda config: config["datasets"]["talk"].update(max_length=100),
            {"preflight_target", "prepare_dataset", "find_missing_states", "extract_hidden_states", "index_hidden_states", "map_vocabulary"}
            | {"train_draft", "evaluate_draft"},
        ),
    ],
    ids=["evaluation", "vocabulary", "layers", "length"],
)
def test_an_edit_plans_the_stages_that_may_change(llama, edit, rules):
    edit(llama.config)
    llama.write()
    assert set(llama.plan()) == rules | {"build_report", *RECIPE}


def test_samples_that_failed_are_left_out_of_training(llama):
    """One of the store's samples is lost, and noted as one that the target has no states for."""
    before = llama.manifest("hidden_states", "tiny", "talk", "default_float32")
    store = HiddenStateStore(llama.folder / "results/.store", before["capture_key"])
    shard = store.shards()[0]
    shard.path.unlink()
    store.note_failed({shard.keys[0]: "its states hold NaN"})
    llama.config["extraction"] = {"max_failed": 0.1}
    llama.write()
    states = ("extract_hidden_states", "tiny/talk/default_float32")
    with contextlib.chdir(llama.folder):
        planner = llama.planner()
        assert planner.extraction(states).missing_samples == len(shard.keys) - 1
        assert "; 1 failed and are left out" in "\n".join(planner.lines())
        foreseen = planner.key(("train_draft", "a"))
    result = llama.run()
    assert result.code == 0 and "1 failed before and are left out" in result.text, result.text
    after = llama.manifest("hidden_states", "tiny", "talk", "default_float32")
    assert after["figures"]["samples"] == before["figures"]["samples"] - 1
    assert after["failed"] == {shard.keys[0]: "its states hold NaN"}
    assert llama.manifest("drafts", "a")["key"] == foreseen
    log = (llama.folder / "results/logs/train_draft/a.log").read_text()
    assert f"left out: 1 of {before['figures']['samples']} samples, which have no hidden states" in log


def test_a_pilot_is_not_examined_again_and_what_follows_a_pilot_is(llama):
    findings = llama.folder / "results/preflight/tiny.json"
    found = json.loads(findings.read_text())
    assert found["max_samples"] is None
    pilot = llama.plan("--config", "max_samples=10")
    assert pilot["prepare_dataset"] == 1 and not pilot["preflight_target"]
    findings.write_text(json.dumps(found | {"max_samples": 10}))
    assert llama.plan() == {"preflight_target": 1}
    planner = llama.planner()
    with contextlib.chdir(llama.folder):
        assert planner.forecast(("preflight_target", "tiny")) == ("run", "made for fewer samples")


def test_a_line_that_moved_plans_nothing(llama):
    """The preflight is told in which line a setting stands."""
    path = llama.folder / "config/config.yaml"
    path.write_text("# a comment\n" + path.read_text())
    assert not llama.plan()


def test_the_summary_is_shown_where_it_is_of_these_settings(llama, finished_llama):
    """Up to a stage before the report, the table that lies there is an earlier run's."""
    heading = "accept. length"
    assert heading in finished_llama[1].text and heading in (llama.folder / "results/summary.txt").read_text()
    llama.config["drafts"]["eagle3"]["vocab_size"] = 265
    llama.write()
    result = llama.run("--until", "map_vocabulary")
    assert result.code == 0 and result.rules["map_vocabulary"] == 1 and heading not in result.text, result.text
    result = llama.run("results/vocab_maps/a/manifest.json", "--forcerun", "map_vocabulary")
    assert result.code == 0 and result.rules["map_vocabulary"] == 1 and heading not in result.text, result.text


def test_without_snakemakes_records_nothing_is_computed(llama):
    shutil.rmtree(llama.folder / ".snakemake")
    before = llama.manifest("drafts", "a")
    result = llama.run()
    assert result.code == 0
    assert not result.rules or set(result.restored) >= set(result.rules) - {"all", "build_report", "preflight_target", "write_recipe"}
    assert llama.manifest("drafts", "a") == before


def test_without_snakemakes_records_a_changed_setting_counts(llama):
    shutil.rmtree(llama.folder / ".snakemake")
    llama.config["drafts"]["eagle3"]["training"]["learning_rate"] = 0.003
    llama.write()
    assert llama.plan() == {"train_draft": 1, "evaluate_draft": 1, "build_report": 1, **RECIPE}


def test_a_sample_more_extracts_one(llama):
    """New conversations cost what they are: the store's states serve the old ones."""
    llama.config["datasets"]["talk"]["regenerate"] = None
    llama.write()
    assert llama.run("results/hidden_states/tiny/talk/default_float32/manifest.json").code == 0
    first = llama.manifest("hidden_states", "tiny", "talk", "default_float32")["figures"]["samples"]
    with open(llama.folder / "talk.jsonl", "a") as file:
        file.write('{"prompt": "And one more?", "response": "Yes."}\n')
    result = llama.run("results/hidden_states/tiny/talk/default_float32/manifest.json")
    assert result.code == 0, result.text
    assert "40 of 41 samples are in the store" in result.text
    assert llama.manifest("hidden_states", "tiny", "talk", "default_float32")["figures"]["samples"] == first + 1 == 41


def wait_for(process, condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def test_after_a_kill_the_same_command_goes_on(llama):
    """kill -9 of the whole group while a stage works: the plain command finishes, without unlock or flag."""
    llama.config["drafts"]["eagle3"]["training"].update(epochs=6, seed=5)
    llama.write()
    process = llama.start()
    store = llama.folder / "results/.store"
    wait_for(process, lambda: any(store.glob("train_draft/*.partial/work/checkpoints/*.json")))
    kill(process)
    result = llama.run()
    assert result.code == 0, result.text
    assert "resumed at" in (llama.folder / "results/logs/train_draft/a.log").read_text()
    assert llama.manifest("drafts", "a")["settings"]["training"]["epochs"] == 6
    assert not llama.plan()


def test_two_configurations_in_one_folder_leave_each_other_their_recipes(tmp_path):
    """Alternately or at once: neither's recipes are ever gone, and what the other's settings made is made again, even without records."""
    workflow = TinyWorkflow(tmp_path)
    make_tiny_llama(tmp_path / "target")
    one = ["results/targets/tiny/fingerprint.json"]
    other = [*one, "--config", "targets={tiny: {trust_remote_code: true}}"]

    def recipes():
        return {path: path.read_text() for path in (tmp_path / "results/.recipes").rglob("*.json")}

    assert workflow.run(*one).code == 0
    first = recipes()
    assert len(first) == 1
    assert workflow.run(*other).code == 0
    both = recipes()
    assert len(both) == 2 and first.items() <= both.items()
    shutil.rmtree(tmp_path / ".snakemake")
    process = workflow.start(*one)
    while process.poll() is None:  # written again, never missing
        assert all(path.exists() for path in both)
        time.sleep(0.005)
    assert process.returncode == 0 and recipes() == both
    assert Result(0, (tmp_path / "terminal.txt").read_text()).rules == {"write_recipe": 1, "fingerprint_target": 1}
    assert not workflow.plan(*one) and workflow.plan(*other) == {"write_recipe": 1, "fingerprint_target": 1}


def test_a_failing_job_says_why(llama):
    (llama.folder / "talk.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": \n')
    result = llama.run()
    assert result.code != 0
    assert "talk.jsonl:2: not valid JSON" in result.text


def test_a_path_that_is_not_there_is_named_though_there_are_results(llama):
    """Snakemake misses no input of a job that need not run: it would show the old results."""
    for section, value, named in (
        ("datasets", {**llama.config["datasets"]["talk"], "sources": ["talk.jsonl", "talks.jsonl"]}, "datasets.talk.sources.1"),
        ("targets", {**llama.config["targets"]["tiny"], "path": "targets"}, "targets.tiny.path"),
    ):
        name = named.split(".")[1]
        right, llama.config[section][name] = llama.config[section][name], value
        llama.write()
        for arguments in ((), ("plan",)):
            result = llama.run(*arguments)
            assert result.code != 0 and re.search(rf"config/config.yaml:\d+: {named}: there is no t", result.text), result.text
        llama.config[section][name] = right
    llama.write()
    assert llama.run("status").code == 0
