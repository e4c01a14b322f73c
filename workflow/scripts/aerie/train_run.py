"""One training from inputs to exported draft: puts the parts together."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .checkpoints import seed_everything
from .cpu_memory import keep_freed_memory
from .draft_model import DraftShape, aux_columns, build_draft, draft_digest, export_draft, norm_gain
from .errors import AerieError
from .training import DraftTrainer, TrainingSettings, attention_for, pick_device
from .training_data import DraftSamples, ShardTransfer, States, batches, token_counts
from .validation import TargetHead, Validation
from .vocabulary import VocabMap

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.utils.data import DataLoader

    from .targets import Target

_CHECKPOINT_SECONDS = 120.0


def train(
    target: "Target",
    samples: "Dataset",
    states: States,
    vocab_map: VocabMap,
    settings: Mapping[str, Any],
    runtime: Mapping[str, Any],
    work: Path,
    out: Path,
) -> tuple[dict[str, Any], str]:
    """Trains and exports into `out`; returns the manifest's figures and the draft's content digest.

    settings: the recipe's, {layers, aux_layer_ids, …DraftShape, training: {…TrainingSettings}}.
    runtime: {device: auto | cpu | cuda, workers, checkpoint_seconds}. work: folder that outlives a kill.
    """
    shape = DraftShape.from_recipe({name: value for name, value in settings.items() if name != "training"})
    training = TrainingSettings.from_recipe(settings.get("training", {}))
    device = pick_device(runtime.get("device", "auto"))
    dtype = training.dtype(device)
    if device.type == "cpu":
        keep_freed_memory()
    aux, last = aux_columns(states.layer_ids, shape, target.num_layers)
    workers = int(runtime.get("workers", 4 if device.type == "cuda" else 0))

    def loader_of(split: str, workers: int) -> "DataLoader":
        chosen = select_split(samples, split)
        transfer = ShardTransfer(states, chosen["sample_key"], [*aux, last])
        rows = DraftSamples(chosen, transfer, training.max_length, training.ttt_steps, dtype)
        pad = device.type == "cuda"
        return batches(rows, target.hidden_size, len(aux), training.batch_tokens, training.seed, pad, workers)

    train_loader, validation_loader = loader_of("train", workers), loader_of("validation", 0)
    seed_everything(training.seed)
    model = build_draft(target, shape, vocab_map, training.ttt_steps, attention_for(device))
    weights = target.head_weights()
    head = TargetHead(norm_gain(weights["norm"], target.text_config), target.text_config.rms_norm_eps, weights["lm_head"])
    validate = Validation(validation_loader, head, device, training.call_kwargs())
    seconds = float(runtime.get("checkpoint_seconds", _CHECKPOINT_SECONDS))
    trainer = DraftTrainer(model, training, train_loader, validate, work, device, seconds)
    trainer.run_training()
    export_draft(model, weights["lm_head"].dtype, out)
    figures = {
        "validation": trainer.last_validation,
        "epochs": training.epochs,
        "steps": trainer.global_step,
        "tokens": trainer.tokens,
        "seconds": round(trainer.seconds, 1),
        "tokens_per_second": round(trainer.tokens / trainer.seconds, 1),
        "trained_parameters": sum(value.numel() for value in model.parameters() if value.requires_grad),
        "device": str(device),
    }
    return figures, draft_digest(out)


def select_split(samples: "Dataset", split: str) -> "Dataset":
    """The split's samples that are long enough to make a row (two tokens); AerieError if there are none."""
    lengths = token_counts(samples)
    chosen = samples.select(np.flatnonzero((np.asarray(samples["split"]) == split) & (lengths >= 2)))
    if not len(chosen):
        raise AerieError(f"the dataset has no usable {split} sample among its {len(samples)}; see its stats.json")
    return chosen
