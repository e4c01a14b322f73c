"""Dry runs of the demo and of every preset; nothing is resolved, fetched or loaded while parsing."""

import json
import re

import pytest

from aerie.stage import Recipe
from checkout import ROOT
from tiny_targets import make_tiny_llama
from tiny_workflow import TinyWorkflow, run

UTILITIES = ("plan", "status", "gc", "verify")
PRESETS = sorted(path.stem for path in (ROOT / "config/presets").glob("*.yaml"))


def snakemake(folder, *arguments):
    """Snakemake beside a copy of the configuration, so that what was run in this checkout does not matter."""
    (folder / "config").symlink_to(ROOT / "config")
    return run(folder, *arguments)


def test_the_demo_plans_every_stage(tmp_path):
    result = snakemake(tmp_path, "-n")
    assert result.code == 0, result.text
    assert result.rules["train_draft"] == result.rules["convert_target"] == 1 and result.rules["fetch_package_file"] == 5


def test_another_table_of_runs_for_the_default_configuration(tmp_path):
    table = (ROOT / "config/runs.tsv").read_text()
    (tmp_path / "mine.tsv").write_text(table + table.splitlines()[-1].replace("demo", "second", 1) + "\n")
    result = snakemake(tmp_path, "-n", "--config", "runs=mine.tsv")
    assert result.code == 0 and result.rules["train_draft"] == 2, result.text


def test_the_presets():
    assert PRESETS == ["deepseek-v3", "kimi-k2.5", "llama-3.1-8b", "own-data-cpu", "qwen3-8b"]


def test_the_preset_for_own_data_plans_a_run_on_cpu_cores(tmp_path):
    (tmp_path / "my-chats.jsonl").write_text('{"prompt": "Hello", "response": "Hi."}\n')
    result = snakemake(tmp_path, "-n", "--configfile", "config/presets/own-data-cpu.yaml")
    assert result.code == 0, result.text
    assert result.rules["extract_hidden_states"] == result.rules["train_draft"] == result.rules["regenerate_responses"] == 1
    assert result.rules["fetch_package_file"] == 2 and not re.search(r"^    resources: .*gpu=[1-9]", result.text, re.MULTILINE)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "own-data-cpu"])
def test_a_preset_plans_without_asking_the_hub(preset, tmp_path):
    result = snakemake(tmp_path, "-n", "--configfile", f"config/presets/{preset}.yaml", "--config", "max_samples=10")
    assert result.code == 0, result.text
    assert (
        result.rules["extract_hidden_states"] == (1 if preset in ("deepseek-v3", "kimi-k2.5") else 8) and result.rules["train_draft"] == 1
    )
    assert "gpu=8" in result.text if preset in ("deepseek-v3", "kimi-k2.5") else "gpu=1" in result.text


def test_a_target_of_two_nodes_asks_for_them(tmp_path):
    workflow = TinyWorkflow(tmp_path)
    make_tiny_llama(tmp_path / "target")
    workflow.config["targets"]["tiny"] |= {"device": "cuda", "tensor_parallel": 4, "nodes": 2}
    workflow.write()
    found = re.findall(r"rule (\w+):.*?resources: ([^\n]*)", workflow.run("-n").text, re.DOTALL)
    asked = {rule: set(resources.split(", ")) for rule, resources in found}
    engines = {"preflight_target", "regenerate_responses", "extract_hidden_states", "evaluate_draft"}
    wanted = {"gpu=4", "nodes=2", "tasks=2", "tasks_per_gpu=0", "mpi=srun", "mem_mb=32000"}
    assert {rule for rule, resources in asked.items() if wanted <= resources} == engines
    assert not any("mpi" in str(resources) for rule, resources in asked.items() if rule not in engines)
    workflow.config["targets"]["tiny"]["nodes"] = 1
    workflow.write()
    assert not re.search("mpi=|tasks", workflow.run("-n").text)


def test_a_restored_draft_asks_for_no_gpu(tmp_path):
    """Everything before the training is pretended; then the store is, too."""
    workflow = TinyWorkflow(tmp_path)
    workflow.config["targets"]["tiny"]["device"] = "cuda"
    workflow.config["drafts"]["eagle3"]["training"] |= {"gpus": 4, "packs_per_step": 8}
    workflow.write()
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text("{}")
    plan, wanted = workflow.resolved(), {}
    for (stage, name), text in plan.recipes.items():
        wanted[stage] = tmp_path / f"results/.recipes/{stage}/{name}/{plan.recipe_digest(stage, name)}.json"
        wanted[stage].parent.mkdir(parents=True)
        wanted[stage].write_text(text)
    manifests = {
        "target": "targets/tiny/fingerprint.json",
        "dataset": "datasets/tiny/talk/manifest.json",
        "hidden_states": "hidden_states/tiny/talk/default_float32/manifest.json",
        "vocab_map": "vocab_maps/a/manifest.json",
    }
    for name, path in manifests.items():
        (tmp_path / "results" / path).parent.mkdir(parents=True)
        (tmp_path / "results" / path).write_text(json.dumps({"digest": name}))
    draft = "results/drafts/a/manifest.json"

    def training():
        result = workflow.run("-n", draft, "--allowed-rules", "train_draft", "--rerun-triggers", "mtime")
        assert result.code == 0 and result.rules["train_draft"] == 1, result.text
        return result.text

    assert "gpu=4" in training()
    key = Recipe.read(wanted["train_draft"]).key({name: name for name in manifests})
    (tmp_path / "results/.store/train_draft" / key).mkdir(parents=True)
    (tmp_path / "results/.store/train_draft" / key / "manifest.json").write_text("{}")
    assert "gpu=0" in training()


def test_a_draft_that_starts_from_another_waits_for_it(tmp_path):
    workflow = TinyWorkflow(tmp_path)
    (tmp_path / "target").mkdir()
    workflow.config["drafts"]["next"] = workflow.config["drafts"]["eagle3"] | {"init_from": "results/drafts/a"}
    workflow.write()
    with open(tmp_path / "config/runs.tsv", "a") as runs:
        runs.write("b\ttiny\ttalk\tnext\n")
    result = workflow.run("-n")
    assert result.code == 0 and result.rules["train_draft"] == result.rules["map_vocabulary"] == 2, result.text
    jobs = re.split(r"^(?=rule )", result.text, flags=re.MULTILINE)
    inputs = {(job.split(":")[0][5:], job.split("wildcards: run=")[1][0]): job for job in jobs if "wildcards: run=" in job}
    for rule in ("map_vocabulary", "train_draft"):
        assert "results/drafts/a/model.safetensors" in inputs[rule, "b"] and "results/drafts/a" not in inputs[rule, "a"].split("output:")[0]
    workflow.config["drafts"]["next"]["init_from"] = "results/drafts/b"
    workflow.write()
    text = workflow.run("-n").text
    assert re.search(r"config\.yaml:\d+: run b: draft next is to start from this very run's draft", text) and "Error:" not in text, text


def test_numbers_inside_a_value_of_the_command_line_are_numbers(tmp_path):
    """Snakemake leaves them text: the schema would refuse them."""
    change = "drafts={eagle3: {aux_layer_ids: [3, 9, 27], sliding_window: null, training: {learning_rate: 0.002}}}"
    result = snakemake(tmp_path, "-n", "--config", change)
    assert result.code == 0, result.text
    assert result.rules["train_draft"] == 1 and "hidden_states/smollm2-135m/chat/3-9-27_bfloat16" in result.text


def test_a_name_of_the_command_line_that_no_run_uses_is_refused(tmp_path):
    result = snakemake(tmp_path, "-n", "--config", "drafts={eagle4: {training: {epochs: 5}}}")
    assert result.code != 0 and "--config: drafts.eagle4: no run uses this name" in result.text and "did you mean eagle3?" in result.text


def test_an_unknown_key_is_named(tmp_path):
    result = snakemake(tmp_path, "-n", "--config", "learning_rate=1")
    assert result.code != 0 and "--config: learning_rate: unknown key; it belongs to drafts.NAME.training.learning_rate" in result.text
    assert "schema" not in result.text and len(result.text.splitlines()) < 10


def test_a_configuration_without_runs_is_not_filled_from_the_demo(tmp_path):
    (tmp_path / "mine.yaml").write_text("targets: {t: {path: x}}\n")
    result = snakemake(tmp_path, "-n", "--configfile", str(tmp_path / "mine.yaml"))
    assert result.code != 0 and "mine.yaml: runs: missing" in result.text


def test_every_rule_declares_log_environment_resources_and_benchmark():
    texts = [path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk"))]
    rules = [part for text in texts for part in re.split(r"^rule ", text, flags=re.MULTILINE)[1:]]
    assert len(rules) == 20
    for text in rules:
        name = text.split(":")[0]
        for directive in ("log:", "conda:", "resources:", "shell:", *(["benchmark:"] if name not in UTILITIES else [])):
            assert f"    {directive}" in text, (name, directive)


@pytest.mark.parametrize("utility", UTILITIES)
def test_what_a_utility_says_when_it_fails_is_not_buried(utility, tmp_path):
    """Snakemake repeats the command line that failed; the configuration is not on it."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/letter.txt").write_text("Dear store, …")
    result = snakemake(tmp_path, utility, "--config", "store=taken")
    assert result.code != 0 and "taken" in result.text
    assert len(max(result.text.split(), key=len)) < 300
