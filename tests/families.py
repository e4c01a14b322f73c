"""Folders of well-known targets as the preflight sees them: true configurations, a synthetic weight index, no weights.

The configurations are those of the published config.json files, as far as they describe the language model. The tokenizer
is the tests' own byte-level one, filled up to the family's vocabulary with tokens that no text uses: its size is true, its
merges are not. The indexes name every tensor of the true layer and expert counts, with the true total size.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiny_targets import CHAT_TEMPLATE, MERGES, SPECIAL_TOKENS

_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": _YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_KIMI_TEXT = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262144,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": _YARN | {"factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}
_LLAMA_3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "pad_token_id": 163839,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "use_unified_vision_chunk": True,
        "text_config": _KIMI_TEXT,
        "vision_config": {
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": 1152,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "text_hidden_size": 7168,
            "vt_hidden_size": 1152,
            "vt_intermediate_size": 4304,
            "vt_num_attention_heads": 16,
            "vt_num_hidden_layers": 27,
        },
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "qwen3-8b": _QWEN3,
    "llama-3.1-8b": _LLAMA_3,
    "qwen3-30b-a3b": {name: value for name, value in _QWEN3.items() if name != "architectures"}
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    # The shape of Mistral-Large-3 in DeepSeek's format, whose decoder takes llama_4_scaling as a fourth argument.
    "mistral-large-3": _DEEPSEEK_V3
    | {
        "architectures": ["MistralLarge3ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "intermediate_size": 16384,
        "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 4096,
        "n_group": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": 0,
        "rope_scaling": _YARN | {"factor": 36.0, "original_max_position_embeddings": 8192},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": None,  # as vLLM translates it
        "vocab_size": 131072,
    },
}
# The small files of a wrapper beside config.json and the tokenizer's. The code is what vLLM asks of it, no more; newer
# releases have their own.
FILES: dict[str, dict[str, str]] = {
    "kimi-k2.5": {
        "preprocessor_config.json": json.dumps(
            {
                "auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"},
                "media_proc_cfg": {
                    "fixed_output_tokens": None,
                    "image_mean": [0.5, 0.5, 0.5],
                    "image_std": [0.5, 0.5, 0.5],
                    "in_patch_limit": 16384,
                    "in_patch_limit_each_frame": 4096,
                    "in_patch_limit_video": None,
                    "merge_kernel_size": 2,
                    "patch_limit_on_one_side": 512,
                    "patch_size": 14,
                    "temporal_merge_kernel_size": 4,
                },
            }
        ),
        "kimi_k25_vision_processing.py": (
            "from transformers.image_processing_utils import BaseImageProcessor\n\n\n"
            "class KimiK25VisionProcessor(BaseImageProcessor):\n"
            "    def __init__(self, media_proc_cfg, **kwargs):\n"
            "        super().__init__(**kwargs)\n"
            "        self.media_proc_cfg = media_proc_cfg\n"
            "        self.num_frames_per_chunk = media_proc_cfg['temporal_merge_kernel_size']\n\n"
            "    def media_tokens_calculator(self, media):\n"
            "        return 1\n"
        ),
    },
}
TOTAL_BYTES = {
    "kimi-k2.5": 547 * 10**9,
    "deepseek-v3": 688_586_727_753,
    "qwen3-8b": 16_381_470_720,
    "llama-3.1-8b": 16_060_522_496,
    "qwen3-30b-a3b": 61_064_245_248,
    "gpt-oss-20b": 13_761_264_768,
    "mistral-large-3": 682 * 10**9,
}
# Tokens that the published tokenizers have; the configurations' vocabularies are padded beyond.
TOKENS = {"deepseek-v3": 128815, "qwen3-8b": 151669, "qwen3-30b-a3b": 151669, "gpt-oss-20b": 200019}


def make_family(folder: Path, name: str) -> Path:
    """Writes a family's config.json, tokenizer, other small files and weight index into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for file, content in FILES.get(name, {}).items():
        (folder / file).write_text(content)
    text = config.get("text_config", config)
    make_tokenizer(TOKENS.get(name, text["vocab_size"])).save_pretrained(folder)
    prefix = "language_model." if text is not config else ""
    names = list(_tensors(text, prefix))
    shards = max(1, TOTAL_BYTES[name] // (5 * 10**9))
    where = {one: f"model-{number * shards // len(names) + 1:05d}-of-{shards:05d}.safetensors" for number, one in enumerate(names)}
    index = {"metadata": {"total_size": TOTAL_BYTES[name]}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_tokenizer(size: int) -> Any:
    """The tiny tokenizer, filled up to `size` tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    words += [f"<unused{number}>" for number in range(size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _tensors(text: dict[str, Any], prefix: str) -> Iterator[str]:
    """Names of the weights of all layers, experts one by one."""
    experts = text.get("n_routed_experts") or text.get("num_experts") or 0
    yield f"{prefix}model.embed_tokens.weight"
    for layer in range(text["num_hidden_layers"] + (text.get("num_nextn_predict_layers") or 0)):
        at = f"{prefix}model.layers.{layer}"
        yield from (f"{at}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm"))
        attention = (
            ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj") if "kv_lora_rank" in text else ("q_proj", "k_proj", "v_proj")
        )
        yield from (f"{at}.self_attn.{part}.weight" for part in (*attention, "o_proj"))
        if experts and layer >= text.get("first_k_dense_replace", 0):
            yield f"{at}.mlp.gate.weight"
            yield from (
                f"{at}.mlp.experts.{expert}.{part}.weight" for expert in range(experts) for part in ("gate_proj", "up_proj", "down_proj")
            )
        else:
            yield from (f"{at}.mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj"))
    yield f"{prefix}model.norm.weight"
    yield f"{prefix}lm_head.weight"
