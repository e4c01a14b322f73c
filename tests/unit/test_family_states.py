"""Captured states of every family's random-weight twin against transformers' own forward, layer by layer in float32.

The weights are made by transformers and read by vLLM. The reference is one unbatched forward of transformers' model.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from aerie import engine_transformers, engine_vllm, twin
from aerie.engine_choice import choose_engine
from aerie.errors import AerieError
from aerie.extraction import Job, SampleSet
from aerie.hidden_states import HiddenStateStore, read_shard
from aerie.targets import Target
from families import CONFIGS
from known_faults import skip_where

pytestmark = pytest.mark.long
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "sliding_window": None,
}
_DEEPSEEK_V2 = {  # DeepSeek-V2-Lite's layers, with the scaling of queries that Mistral-Large-3 brought to this class
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
}
FAMILIES = {name: CONFIGS[name] for name in ("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "kimi-k2.5")} | {
    "mistral-7b": _MISTRAL,
    "deepseek-v2-llama-4-scaling": _DEEPSEEK_V2,
}
# One of each kind: dense, mixtures of experts, sliding windows, latent attention, a wrapper.
ENGINES = ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "kimi-k2.5")
LAYER_IDS = (1, 2, 3, 4)
PROMPTS = (1, 33, 150, 300)  # tokens


def make_twin(folder: Path, raw: dict[str, Any]) -> tuple[Target, Any]:
    """A target folder with random weights, and transformers' model of it."""
    folder.mkdir()
    target = Target("t", "d", {"path": str(folder)}, "auto_map" in raw)
    (folder / "config.json").write_text(json.dumps(raw))
    config = twin.shrink(raw, target.text_config)
    (folder / "config.json").write_text(json.dumps(config))
    target = Target("t", "d", {"path": str(folder)}, "auto_map" in raw)
    model = twin.build_reference(config.get("text_config", config), config, target)
    twin.save_as_target(model, folder, "language_model.model.embed_tokens.weight" if "text_config" in config else None)
    return target, model


def norm_latents_as_vllm(model: Any) -> None:
    """vLLM takes rms_norm_eps in the norms of latents, too; transformers 1e-6 there, which is DeepSeek's own and not Kimi's."""
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps


def scale_queries(model: Any, beta: float, original: int) -> None:
    """llama_4_scaling: queries at position p times 1 + beta ln(1 + floor(p / original))."""

    def scaled(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(output.shape[1])
        return output * (1 + beta * torch.log(1 + torch.floor(positions / original)))[:, None]

    for name, module in model.named_modules():
        if name.endswith(("q_b_proj", "q_proj")):
            module.register_forward_hook(scaled)


def plain_states(model: Any, prompt: list[int]) -> list[torch.Tensor]:
    """Inputs of layers 1, 2, … [tokens, hidden], and the last layer's output before the norm."""
    before_norm = []
    hook = model.get_decoder().norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        found = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    hook.remove()
    return [*(one[0] for one in found[1:-1]), before_norm[0][0]]


def check(job: Job, extract: Any, model: Any, folder: Path) -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(1, 512, length).tolist() for length in PROMPTS]
    samples, store = SampleSet.of(prompts), HiddenStateStore(folder / "store", job.capture_key)
    outcome = extract(job, samples, store)
    outcome.raise_failures()
    captured: dict[int, list[torch.Tensor]] = {layer: [] for layer in LAYER_IDS}
    expected: dict[int, list[torch.Tensor]] = {layer: [] for layer in LAYER_IDS}
    for key, prompt in zip(samples.keys, prompts, strict=True):
        shard = read_shard(store.folder / outcome.written[key])
        place = list(shard.keys).index(key)
        with safe_open(shard.path, framework="pt") as file:
            states = file.get_slice("hidden_states")[int(shard.offsets[place]) : int(shard.offsets[place + 1])]
        plain = plain_states(model, prompt)
        for number, layer in enumerate(LAYER_IDS):
            captured[layer].append(states[:, number])
            expected[layer].append(plain[layer - 1])
    for layer in LAYER_IDS:
        for other in {layer - 1, layer, layer + 1} & set(LAYER_IDS):
            states, plain_layer = torch.cat(captured[layer]), torch.cat(expected[other])
            error = float((states - plain_layer).norm() / plain_layer.norm())
            assert error <= 1e-5 if other == layer else error > 0.05, (layer, other, error)  # one layer off is far off


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.engines] if name in ENGINES else []) for name in FAMILIES])
def test_vllm(name, tmp_path):
    if name == "gpt-oss-20b":
        skip_where("sinks")
    target, model = make_twin(tmp_path / "target", FAMILIES[name])
    assert choose_engine(target)[0] == "vllm"
    norm_latents_as_vllm(model)
    scaling = getattr(target.text_config, "llama_4_scaling", None)
    if scaling:
        assert scaling["original_max_position_embeddings"] < max(PROMPTS) and not math.isclose(scaling["beta"], 0)
        scale_queries(model, scaling["beta"], scaling["original_max_position_embeddings"])
    check(Job(target, LAYER_IDS, "float32", "float32", "vllm", "cpu", 1, {"max_num_seqs": 8}), engine_vllm.extract, model, tmp_path)


@pytest.mark.parametrize("served", [None, 512])
def test_longrope_is_that_of_the_length_that_is_served(served, tmp_path):
    """Phi-3 has other factors where more than its original length is served; transformers goes by the prompt's length."""
    from transformers import Phi3Config, Phi3ForCausalLM

    long, short = [4.0 + i for i in range(16)], [1.0] * 16

    def build(short: list[float]) -> Any:
        config = Phi3Config(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, vocab_size=512,
            max_position_embeddings=1024, original_max_position_embeddings=512, pad_token_id=0,
            rope_scaling={"rope_type": "longrope", "short_factor": short, "long_factor": long},
        )  # fmt: skip
        return Phi3ForCausalLM(config).eval()

    torch.manual_seed(0)
    model = build(short)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "target")
    target = Target("t", "d", {"path": str(tmp_path / "target")}, False)
    reference = build(short if served else long)
    reference.load_state_dict(model.state_dict())
    options = {"max_num_seqs": 8} | ({"max_model_len": served} if served else {})
    job = Job(target, LAYER_IDS, "float32", "float32", "vllm", "cpu", 1, options)
    check(job, engine_vllm.extract, reference, tmp_path)
    if served:
        with pytest.raises(AerieError, match="max_length to 504"):
            engine_vllm.extract(job, SampleSet.of([[5] * 505]), HiddenStateStore(tmp_path, "k"))


@pytest.mark.parametrize("name", ["llama-3.1-8b", pytest.param("deepseek-v3", marks=pytest.mark.engines)])
def test_vllm_on_two_ranks(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    target, model = make_twin(tmp_path / "target", FAMILIES[name])
    check(Job(target, LAYER_IDS, "float32", "float32", "vllm", "cpu", 2, {"max_num_seqs": 8}), engine_vllm.extract, model, tmp_path)


def test_gemma3_through_transformers(tmp_path):
    """vLLM's class has no EAGLE-3 interface, so the other engine is chosen; its batches are padded, the reference is not."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=512, max_position_embeddings=1024, sliding_window=32, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "target")
    target = Target("t", "d", {"path": str(tmp_path / "target")}, False)
    assert choose_engine(target)[0] == "transformers"
    check(Job(target, LAYER_IDS, "float32", "float32", "transformers", "cpu", 1, {}), engine_transformers.extract, model, tmp_path)
