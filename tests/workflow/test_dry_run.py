"""Dry runs of the demo and of every preset; nothing is resolved, fetched or loaded while parsing."""

import re

import pytest

from checkout import ROOT
from tiny_workflow import run

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


def test_the_presets_are_the_four():
    assert PRESETS == ["deepseek-v3", "kimi-k2.5", "llama-3.1-8b", "qwen3-8b"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_plans_without_asking_the_hub(preset, tmp_path):
    result = snakemake(tmp_path, "-n", "--configfile", f"config/presets/{preset}.yaml", "--config", "max_samples=10")
    assert result.code == 0, result.text
    assert (
        result.rules["extract_hidden_states"] == (1 if preset in ("deepseek-v3", "kimi-k2.5") else 8) and result.rules["train_draft"] == 1
    )
    assert "gpu=8" in result.text if preset in ("deepseek-v3", "kimi-k2.5") else "gpu=1" in result.text


def test_an_unknown_key_is_named(tmp_path):
    result = snakemake(tmp_path, "-n", "--config", "learning_rate=1")
    assert result.code != 0 and "learning_rate" in result.text


def test_every_rule_declares_log_environment_resources_and_benchmark():
    texts = [path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk"))]
    rules = [part for text in texts for part in re.split(r"^rule ", text, flags=re.MULTILINE)[1:]]
    assert len(rules) == 20
    for text in rules:
        name = text.split(":")[0]
        for directive in ("log:", "conda:", "resources:", "shell:", *(["benchmark:"] if name not in UTILITIES else [])):
            assert f"    {directive}" in text, (name, directive)
