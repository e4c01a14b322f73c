"""`engine: auto`: the choice that is read from vLLM's source is the one that its classes would give."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from aerie.engine_choice import _has_interface, _registered, choose_engine
from aerie.extraction import Job
from aerie.stage import Recipe
from aerie.targets import Target

WITH = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"]
WITH += ["DeepseekV2ForCausalLM", "KimiK25ForConditionalGeneration"]
WITHOUT = ["Gemma3ForCausalLM", "NobodyKnowsThisForCausalLM"]


def target_of(folder, architecture):
    folder.mkdir(exist_ok=True)
    layers = {"num_hidden_layers": 8, "hidden_size": 64, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "llama", **layers}))
    return Target("t", "digest", {"path": str(folder)}, False)


@pytest.mark.parametrize("architecture", WITH + WITHOUT)
def test_vllm_where_its_class_hands_out_states(tmp_path, architecture):
    engine, why = choose_engine(target_of(tmp_path / "t", architecture))
    assert engine == ("vllm" if architecture in WITH else "transformers")
    assert "EAGLE-3 interface" in why or f"does not know {architecture}" in why


def test_a_chosen_engine_is_taken_and_auto_gives_the_same_states(tmp_path):
    target = target_of(tmp_path / "t", "LlamaForCausalLM")
    assert choose_engine(target, "transformers")[0] == "transformers"
    settings: dict[str, Any] = {"aux_layer_ids": None, "stored_dtype": "bfloat16", "compute_dtype": "float32", "value_options": {}}
    recipes = {name: Recipe("s", 1, settings | {"engine": name}, {"engine_options": {}}) for name in ("auto", "vllm", "transformers")}
    keys = {name: Job.of(recipe, target).capture_key for name, recipe in recipes.items()}
    assert keys["auto"] == keys["vllm"] != keys["transformers"]


@pytest.mark.long
@pytest.mark.engines
def test_every_class_of_vllm_agrees():
    import vllm
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    packages, wrong, seen = Path(vllm.__file__).parents[1], [], 0
    for architecture, place in _registered(packages).items():
        try:
            found = ModelRegistry.models[architecture].load_model_cls()
        except Exception:  # noqa: BLE001 - needs a package that is not here
            continue
        if "NotImplementedError" in inspect.getsource(found.__init__):  # in place of a class for other devices
            continue
        seen += 1
        if bool(supports_eagle3(found)) != _has_interface(packages, *place):
            wrong.append(architecture)
    assert seen > 100 and not wrong
