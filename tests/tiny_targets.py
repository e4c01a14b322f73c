"""Tiny target models with random weights, for tests: real configs, real safetensors, a real tokenizer.

    make_tiny_llama(folder)          Llama: grouped-query attention
    make_tiny_deepseek_v3(folder)    DeepSeek-V3: MLA, mixture of experts with a correction bias

Each has 8 layers, so the default aux layer ids [2, n/2, n-3] are 2, 4, 5; hidden size 64; a vocabulary of
320, of which the tokenizer uses 280 (real models pad theirs too); 512 positions. The tokenizer is byte-level
BPE with a ChatML template, `<|im_end|>` ends a turn and a generation. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

VOCAB_SIZE = 320
HIDDEN_SIZE = 64
NUM_LAYERS = 8
MAX_POSITIONS = 512
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = [
    ("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("a", "n"), ("an", "d"), ("Ġ", "a"),
    ("o", "n"), ("e", "r"), ("r", "e"), ("Ġ", "t"), ("o", "u"), ("y", "ou"), ("Ġ", "you"), ("e", "n"),
    ("Ġ", "and"), ("i", "s"), ("Ġ", "is"), ("o", "r"),
]  # fmt: skip


def make_tiny_llama(folder: Path | str, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> Path:
    """Write a Llama target into `folder` and return it; `config` overrides LlamaConfig's arguments."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = dict(
        **_common_config(dtype),
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        rms_norm_eps=1e-5,
    )
    return _write_target(Path(folder), LlamaForCausalLM, LlamaConfig(**{**settings, **config}), seed, dtype)


def make_tiny_deepseek_v3(folder: Path | str, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> Path:
    """Write a DeepSeek-V3 target into `folder` and return it; `config` overrides DeepseekV3Config's arguments."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = dict(
        **_common_config(dtype),
        intermediate_size=128,
        moe_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=512,  # with the rotary 64, the only size that vLLM's CPU kernel for MLA takes
        qk_nope_head_dim=16,
        qk_rope_head_dim=64,
        v_head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        rms_norm_eps=1e-6,
    )
    folder = _write_target(Path(folder), DeepseekV3ForCausalLM, DeepseekV3Config(**{**settings, **config}), seed, dtype)
    # transformers does not save these two, and vLLM needs them to load `e_score_correction_bias`.
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    saved |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps(saved, indent=2, sort_keys=True))
    return folder


def make_tiny_tokenizer():
    """A byte-level BPE tokenizer: 4 special tokens, 256 bytes, 20 merges, ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _common_config(dtype: torch.dtype) -> dict:
    return dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        tie_word_embeddings=False,
        dtype=dtype,
    )


def _write_target(folder: Path, model_class: type, config, seed: int, dtype: torch.dtype) -> Path:
    """Random weights, large enough that every layer, norm and expert leaves its mark on the states."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model_class(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tensors = dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
        }
        for name, tensor in sorted(tensors.items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.05 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(noise)
            else:  # unit-variance inputs give outputs of about unit variance
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder
