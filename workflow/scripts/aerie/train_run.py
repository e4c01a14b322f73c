"""One training from inputs to exported draft: puts the parts together."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import cli
from .checkpoints import seed_everything
from .cpu_memory import keep_freed_memory
from .draft_attention import attention_for
from .draft_model import DraftShape, aux_columns, build_draft, export_draft, start_from
from .errors import AerieError
from .gpu_speed import fuse_modules
from .keys import draft_digest
from .ranks import ALONE, Ranks, run_in_ranks
from .training import DraftTrainer, TrainingSettings, pick_device
from .training_data import DraftSamples, PackLoader, PackOrder, ShardTransfer, States, padded_size, supervised_counts
from .validation import TargetHead, Validation
from .vocabulary import VocabMap

if TYPE_CHECKING:
    from datasets import Dataset

    from .targets import Target

_CHECKPOINT_SECONDS = 120.0
_NAMED = 5  # samples in a message


def train(
    target: "Target",
    samples: "Dataset",
    states: States,
    vocab_map: VocabMap,
    settings: Mapping[str, Any],
    runtime: Mapping[str, Any],
    work: Path,
    out: Path,
    init_from: Path | None = None,
) -> tuple[dict[str, Any], str]:
    """Trains and exports into `out`; returns the manifest's figures and the draft's content digest.

    settings: the recipe's, {layers, aux_layer_ids, …DraftShape, training: {…TrainingSettings}}.
    runtime: {device: auto | cpu | cuda, ranks (default 1), threads (that read), checkpoint_seconds}. work: folder that outlives a kill.
    init_from: folder of a draft whose weights are the first.
    """
    device, ranks = pick_device(runtime.get("device", "auto")), int(runtime.get("ranks", 1))
    arguments = (target, samples, states, vocab_map, settings, runtime, work, out, init_from)
    if ranks == 1:
        _train_rank(ALONE, device, *arguments)
    else:
        run_in_ranks(ranks, device, _train_rank, arguments, work)
    figures: dict[str, Any] = json.loads((work / "figures.json").read_text())
    return figures, draft_digest(out)


def _train_rank(
    ranks: Ranks,
    device: torch.device,
    target: "Target",
    samples: "Dataset",
    states: States,
    vocab_map: VocabMap,
    settings: Mapping[str, Any],
    runtime: Mapping[str, Any],
    work: Path,
    out: Path,
    init_from: Path | None,
) -> None:
    """Trains on one device; rank 0 exports, and leaves figures.json in `work`."""
    shape = DraftShape.from_recipe({name: value for name, value in settings.items() if name != "training"})
    training = TrainingSettings.from_recipe(settings.get("training", {}))
    keep_freed_memory()
    if device.type == "cuda":  # what is left to the CPU is small, and its threads would wait for those that read
        torch.set_num_threads(1)
    aux, last = aux_columns(states.layer_ids, shape, target.num_layers)
    threads = int(runtime.get("threads", 6 if device.type == "cuda" else 0))
    skip_bad = training.on_bad_sample == "skip"
    left_out = 0

    def loader_of(split: str, packs_per_step: int, threads: int) -> PackLoader:
        nonlocal left_out
        chosen = select_split(samples, split, training, quiet=ranks.rank > 0)
        left_out += sum(one == split for one in samples["split"]) - len(chosen)
        rows = DraftSamples(
            chosen, ShardTransfer(states, chosen["sample_key"], [*aux, last]), training.max_length, training.ttt_steps,
            training.dtype(device), skip_bad,
        )  # fmt: skip
        order = PackOrder(
            rows.approx_lengths, rows.supervised, training.batch_tokens, packs_per_step, training.seed, ranks.rank, ranks.count
        )
        pad_to = padded_size(training.batch_tokens) if device.type == "cuda" else None
        return PackLoader(rows, order, target.hidden_size, len(aux), pad_to, threads, device)

    train_loader, validation_loader = loader_of("train", training.packs_per_step, threads), loader_of("validation", ranks.count, threads)
    seed_everything(training.seed)
    model = build_draft(target, shape, vocab_map, training.ttt_steps, attention_for(device))
    fuse_modules(model, device)
    if init_from:
        start_from(model, init_from)
    head = TargetHead.of(target)
    validate = Validation(validation_loader, head, device, training, ranks)
    seconds = float(runtime.get("checkpoint_seconds", _CHECKPOINT_SECONDS))
    trainer = DraftTrainer(model.to(device), training, train_loader, validate, work, device, seconds, ranks)
    best = trainer.run()
    if ranks.rank:
        return
    export_draft(model, head.lm_head.dtype, out)
    figures = {
        "validation": best,
        "best_step": trainer.best["step"],
        "epochs": training.epochs,
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "seconds": round(trainer.seconds, 1),
        "tokens_per_second": round(trainer.tokens / trainer.seconds, 1),
        "waiting_for_data": round(trainer.waited / trainer.seconds, 4),
        "samples_left_out": left_out + validate.left_out + trainer.left_out // training.epochs,
        "trained_parameters": sum(value.numel() for value in trainer.trained.values()),
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "devices": ranks.count,
    }
    (work / "figures.json").write_text(json.dumps(figures))


def select_split(samples: "Dataset", split: str, training: TrainingSettings, quiet: bool = False) -> "Dataset":
    """The split's samples that something can be learnt from; says, unless quiet, which are not.

    AerieError if there are none, or if others are not to be skipped.
    """
    own = np.asarray(samples["split"]) == split
    judged = supervised_counts(samples, training.max_length, training.ttt_steps) > 0
    useless = np.flatnonzero(own & ~judged)
    if len(useless):
        keys = samples.select(useless[:_NAMED])["sample_key"]
        named = ", ".join(keys) + (f" and {len(useless) - _NAMED:,} more" if len(useless) > _NAMED else "")
        said = f"{len(useless):,} of {int(own.sum()):,} {split} samples have no supervised token that training could judge: {named}"
        if training.on_bad_sample == "fail":
            raise AerieError(
                f"{said}. Expected one behind the first {training.ttt_steps} tokens and within max_length {training.max_length}: "
                "mend the data, or set training.on_bad_sample: skip"
            )
        if not quiet:
            cli.say(f"train_draft: left out: {said}")
    chosen = samples.select(np.flatnonzero(own & judged))
    if not len(chosen):
        raise AerieError(f"the dataset has no usable {split} sample among its {len(samples)}; see its stats.json")
    return chosen
