"""A problem for training that is solved in seconds: a tiny target, its own greedy answers, their states in real shards."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from aerie import vocabulary
from aerie.hidden_states import Capture, HiddenStateStore, StatesIndex, StoredSample
from aerie.samples import Sample, load_samples, write_samples
from aerie.targets import Target
from tiny_targets import VOCAB_SIZE, make_tiny_llama

LAYERS = (2, 4, 5, 6, 8)
SETTINGS: dict[str, Any] = {
    "layers": 1,
    "aux_layer_ids": [2, 4, 5],
    "training": {"epochs": 6, "batch_tokens": 256, "max_length": 256, "learning_rate": 0.01},
}
RUNTIME = {"device": "cpu", "gpus": 0, "init_from": None, "checkpoint_seconds": 0}


def predictable_target(folder: Path) -> Path:
    """A tiny Llama whose next token depends mostly on the current one, so that a draft can learn it in seconds."""
    from safetensors.torch import load_file, save_file

    make_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    successor = torch.randperm(280, generator=torch.Generator().manual_seed(2))
    head = torch.zeros_like(embeddings)
    head[successor] = embeddings[:280]
    save_file(
        {**weights, "model.embed_tokens.weight": 3 * embeddings, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def make_problem(root: Path) -> SimpleNamespace:
    """A tiny target, its own greedy answers as samples, their states in real shards, and a vocabulary map."""
    from transformers import AutoModelForCausalLM

    folder = predictable_target(root / "target")
    described = {"name": "tiny", "digest": "t", "location": {"path": str(folder)}, "trust_remote_code": False}
    (root / "fingerprint.json").write_text(json.dumps(described))
    target = Target.read(root / "fingerprint.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, 280, (40, 8), generator=generator)
    answers = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=56, eos_token_id=None)
    samples = [
        Sample(ids, [0] * 8 + [1] * (len(ids) - 8), "tiny", "validation" if row % 5 == 0 else "train")
        for row, ids in enumerate(answers.tolist())
    ]
    (root / "dataset").mkdir()
    write_samples(samples, root / "dataset" / "samples")
    (root / "dataset" / "manifest.json").write_text(json.dumps({"digest": "d"}))

    capture = Capture("c", LAYERS, "float32", "float32", "transformers", {}, {})
    stored = []
    with torch.no_grad():
        for sample in samples:
            captured: list[torch.Tensor] = []
            hook = model.model.norm.register_forward_pre_hook(lambda module, args, kept=captured: kept.append(args[0]))
            states = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
            hook.remove()
            layers = torch.stack([*(states[layer] for layer in LAYERS[:-1]), captured[0]], dim=2)[0]
            stored.append(StoredSample(sample.key, np.asarray(sample.input_ids, dtype=np.int32), layers, None))
    store = HiddenStateStore(root / "store", "c")
    store.write_shard(capture, stored, 1.0)
    (root / "states").mkdir()
    store.known().to_parquet(root / "states" / "index.parquet")
    manifest = {"digest": "h", "capture_key": "c", "layer_ids": list(LAYERS), "settings": {"stored_dtype": "float32"}}
    (root / "states" / "manifest.json").write_text(json.dumps(manifest))

    dataset = load_samples(root / "dataset")
    counts = vocabulary.count_supervised([(row["input_ids"], row["loss_mask"], "tiny") for row in dataset], VOCAB_SIZE)["tiny"]
    vocab_map = vocabulary.map_of(vocabulary.choose_tokens(counts, 200, [3], range(280)), VOCAB_SIZE)
    (root / "map").mkdir()
    vocabulary.save_map(vocab_map, root / "map")
    (root / "map" / "manifest.json").write_text(json.dumps({"digest": "v"}))
    states_index = StatesIndex(root / "states", root / "store")
    return SimpleNamespace(root=root, target=target, samples=dataset, states=states_index, vocab_map=vocab_map)
