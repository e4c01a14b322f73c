"""Preflight: sound targets pass; each planted fault is found by the check that should find it."""

import json

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import preflight_target
from aerie.targets import Target
from tiny_targets import make_tiny_deepseek_v3, make_tiny_llama

SETTINGS = {"engine": "vllm", "trust_remote_code": False, "aux_layer_ids": [None, [1, 3, 6]]}


def verdicts(folder, settings=SETTINGS):
    target = Target("t", "d", {"path": str(folder)}, False)
    return {check.check: check for check in preflight_target.examine(target, settings)}


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_deepseek_v3])
def test_no_false_alarm(make, tmp_path):
    found = verdicts(make(tmp_path))
    assert {check.verdict for check in found.values()} == {"ok"} and len(found) == 6, found
    assert "one row a conversation" in found["chat template"].found


def no_template(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def deaf_template(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages | length }} messages{% if add_generation_prompt %}, your turn{% endif %}"
    tokenizer.save_pretrained(folder)


def no_head(folder):
    stored = load_file(folder / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def lost_shard(folder):
    stored = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, "model.safetensors") | {"lm_head.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        (no_template, "chat template", "has none"),
        (deaf_template, "chat template", "no answer can be told apart"),
        (no_head, "weights", "no lm_head"),
        (lost_shard, "weights", "model-2.safetensors"),
        (lambda folder: edit_config(folder, architectures=["NobodyForCausalLM"]), "architecture", "NobodyForCausalLM is not known"),
        (lambda folder: edit_config(folder, architectures=["Gemma3ForCausalLM"]), "architecture", "no EAGLE-3 interface"),
        (lambda folder: edit_config(folder, vocab_size=200), "vocabulary", "280 ids, the config's vocabulary 200"),
        (lambda folder: edit_config(folder, num_hidden_layers=6), "layer ids", "has 6 layers"),
    ],
    ids=["template", "deaf", "head", "shard", "architecture", "interface", "vocabulary", "layers"],
)
def test_a_fault_is_found_by_its_check(fault, check, words, tmp_path):
    folder = make_tiny_llama(tmp_path)
    fault(folder)
    found = verdicts(folder)[check]
    assert found.verdict == "failed" and words in found.found + found.remedy
