"""A GGUF file, written here from known weights as llama.cpp lays them out, becomes the model that it was made of."""

import hashlib
import json

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file
from transformers import AutoTokenizer

import convert_target
from tiny_targets import CHAT_TEMPLATE, MERGES, make_tiny_llama, make_tiny_tokenizer

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def gguf_name(name):
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def rotated(weight, heads):
    """Rows of a projection to queries or keys as GGUF has them: halves of a head interleaved."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder, path):
    """The tiny Llama in `folder` as Q4_1 (norms in float32); returns {name: what a dequantised copy has, float32}."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    vocabulary = make_tiny_tokenizer().get_vocab()
    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    words += [f"<|unused{number}|>" for number in range(config["vocab_size"] - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(vocabulary["<|bos|>"])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_chat_template(CHAT_TEMPLATE)
    expected = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        values = weight.float().numpy()
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            expected[name] = values
            continue
        packed = quants.quantize(rotated(values, heads) if heads else values, GGMLQuantizationType.Q4_1)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=GGMLQuantizationType.Q4_1)
        # Blocks lie within a row, so the rows' order does not change what quantisation makes of them.
        expected[name] = quants.dequantize(quants.quantize(values, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_a_gguf_file_becomes_the_model_it_was_made_of(tmp_path):
    """Another result for the same file needs another VERSION (then record its digest here)."""
    recorded = {1: "27650e88e22d051169f415b9704c95e433020a94d51ecaba2b2281661dd15200"}
    (tmp_path / "files").mkdir()
    expected = write_gguf(make_tiny_llama(tmp_path / "llama"), tmp_path / "files/tiny.gguf")
    convert_target.convert(tmp_path / "files/tiny.gguf", tmp_path / "model")
    found = load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], torch.from_numpy(np.ascontiguousarray(values)).bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]  # the pre-tokenizer that transformers drops
    assert tokenizer.chat_template == CHAT_TEMPLATE
    content = b"".join(name.encode() + found[name].view(torch.int16).numpy().tobytes() for name in sorted(found))
    encoded = json.dumps(tokenizer("In 2024, the <|im_end|>")["input_ids"])
    assert hashlib.sha256(content + encoded.encode()).hexdigest() == recorded[convert_target.VERSION]
