"""Training a draft: speculators' model and optimizers in a loop of our own that is exact, and safe against any kill.

The weights and the optimizers' state are float32, the learning rate depends on the step, and a step's packs are the same
whatever the number of devices: so an interrupted training goes on to the very weights of an unbroken one, and one on
several devices to those of one device, but for the rounding of sums in another order.
"""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from transformers import get_linear_schedule_with_warmup

from . import cli
from .checkpoints import Checkpoints, random_state, restore_random_state
from .draft_model import sliding_window
from .errors import AerieError
from .muon import SharedMuon
from .progress import Progress
from .ranks import ALONE, GradientSum, Ranks
from .supervised_loss import supervised_loss
from .training_data import Batch, PackLoader, on_device, step_counts

logger = logging.getLogger(__name__)

_LOGGED_STEPS = 10
_GRADIENT_NORM = 1.0
# A checkpoint takes at most this share of the time, however large the draft is.
_CHECKPOINT_SHARE = 0.05
_STATE = ("epoch", "epoch_step", "step", "tokens", "seconds", "waited", "left_out", "best")  # of a DraftTrainer


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """The recipe's `training`: what can change the trained draft; config/README.md explains the keys.

    max_length: samples are cut to it, in tokens. compute_dtype: of forward and backward; auto is bfloat16 on a GPU, float32
    on a CPU.
    """

    epochs: int = 3
    learning_rate: float = 1e-3
    warmup: float = 0.01
    optimizer: Literal["muon", "adamw"] = "muon"
    ttt_steps: int = 3
    ttt_step_loss_decay: float = 1.0
    batch_tokens: int = 2048
    packs_per_step: int = 1
    validations_per_epoch: int = 1
    on_bad_sample: Literal["fail", "skip"] = "fail"
    max_length: int = 2048
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("optimizer", ("muon", "adamw")),
            ("on_bad_sample", ("fail", "skip")),
            ("compute_dtype", ("auto", "float32", "bfloat16")),
        ):
            if getattr(self, name) not in allowed:
                raise AerieError(f"training.{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}")
        for name in ("epochs", "ttt_steps", "batch_tokens", "packs_per_step", "validations_per_epoch", "max_length"):
            if getattr(self, name) < 1:
                raise AerieError(f"training.{name} is {getattr(self, name)}; expected at least 1")
        if self.max_length > self.batch_tokens + 1:
            raise AerieError(
                f"training.max_length {self.max_length} does not fit into batches of batch_tokens {self.batch_tokens}: "
                "raise batch_tokens, or lower max_length (longer samples are cut)"
            )

    @classmethod
    def from_recipe(cls, settings: Mapping[str, Any]) -> "TrainingSettings":
        """AerieError where a key is not known."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise AerieError(f"training: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**settings)

    def dtype(self, device: torch.device) -> torch.dtype:
        """The dtype in which forward and backward compute; weights and optimizer are float32."""
        if self.compute_dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.float32 if self.compute_dtype == "float32" else torch.bfloat16


def pick_device(wanted: str) -> torch.device:
    """The device for auto, cpu or cuda; AerieError where cuda is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise AerieError("device is cuda, but torch sees no GPU; set device: cpu or auto, or install the CUDA environment")
    return torch.device("cuda", 0)


class MetricsFile:
    """metrics.jsonl: one JSON object a line. It is cut back to a checkpoint's length when training goes on from there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, **values: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def length(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, length: int) -> None:
        """Drops what was written after the first `length` bytes."""
        if self.length() < length:
            logger.warning("%s is shorter than when the checkpoint was made; earlier metrics are lost", self.path)
        elif self.path.exists():
            with open(self.path, "rb+") as file:
                file.truncate(length)


class DraftTrainer:
    """Trains until all epochs are done, in this process or earlier ones (`run`); the model then has the best weights.

    model: on `device`. loader: of batches in a PackOrder of these ranks. work: folder that outlives the process; rank 0
    writes there. validate: figures of the model, with acceptance_length, the same on every rank.
    checkpoint_seconds: time between checkpoints; there is one after each validation anyway.
    """

    def __init__(
        self,
        model: Eagle3DraftModel,
        settings: TrainingSettings,
        loader: PackLoader,
        validate: Callable[[Eagle3DraftModel], dict[str, Any]],
        work: Path,
        device: torch.device,
        checkpoint_seconds: float,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.settings, self.loader, self.validate = model, settings, loader, validate
        self.device, self.checkpoint_seconds, self.ranks = device, checkpoint_seconds, ranks
        self.order = loader.order
        self.dtype = settings.dtype(device)
        self.window = sliding_window(model.config.transformer_layer_config)
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.gradients = GradientSum(self.trained.values(), ranks)
        self.epoch_steps = step_counts(loader.order, settings.epochs)
        self.total_steps = sum(self.epoch_steps)
        self.optimizers = optimizers_of(model, settings, device, ranks)
        warm = int(self.total_steps * settings.warmup)
        self.schedulers = [get_linear_schedule_with_warmup(optimizer, warm, self.total_steps) for optimizer in self.optimizers]
        self.checkpoints = Checkpoints(work / "checkpoints")
        self.metrics_file = MetricsFile(work / "metrics.jsonl")
        self.epoch, self.epoch_step, self.step = 0, 0, 0  # steps done of the epoch (from 0) and in all
        self.tokens = 0  # rows that are not padding
        self.seconds, self.waited = 0.0, 0.0  # of steps, and of these waiting for data
        self.left_out = 0  # samples, once for each epoch
        self.best: dict[str, Any] = {}  # figures, step and trained weights of the best validation
        self._window: list[torch.Tensor] = []  # sums of the steps since the last line of metrics.jsonl, see `_step`
        self._last_loss = "-"
        self._go_on()

    def _go_on(self) -> None:
        """Takes up the newest checkpoint, if there is one."""
        state = self._common_state()
        if state is None:
            if not self.ranks.rank:
                self.metrics_file.cut(0)
            return
        if state["trained"].keys() != self.trained.keys():
            wrong = sorted(state["trained"].keys() ^ self.trained.keys())
            raise AerieError(f"the checkpoint in {self.checkpoints.folder} is of another draft ({wrong}); delete the folder")
        self._take_weights(state["trained"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        restore_random_state(state["random"])
        for name in _STATE:
            setattr(self, name, state[name])
        self._window = [sums.to(self.device) for sums in state["window"]]
        if not self.ranks.rank:
            self.metrics_file.cut(state["metrics_bytes"])
            cli.say(f"train_draft: resumed at step {self.step} of {self.total_steps}, epoch {self.epoch + 1}")

    def _common_state(self) -> dict[str, Any] | None:
        """The newest checkpoint, the same on every rank."""
        state = None if self.ranks.rank else self.checkpoints.newest()
        step = torch.tensor(-1 if state is None else state["step"], device=self.device)
        self.ranks.spread(step, 0)()
        return self.checkpoints.at(int(step)) if self.ranks.rank and step >= 0 else state

    def _take_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.trained.items():
                value.copy_(weights[name])

    def save(self) -> float:
        """A checkpoint of the training as it stands. Returns the seconds it took."""
        state = {
            "trained": {name: value.detach() for name, value in self.trained.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "random": random_state(),
            "metrics_bytes": self.metrics_file.length(),
            "window": self._window,
        }
        return self.checkpoints.save(self.step, state | {name: getattr(self, name) for name in _STATE})

    def run(self) -> dict[str, Any]:
        """Trains; returns the best validation's figures. The model then has the weights that they are of."""
        self.progress = Progress("train_draft", self.total_steps, "steps", start=self.step, every=10.0 if not self.ranks.rank else math.inf)
        while self.epoch < self.settings.epochs:
            self._run_epoch()
            self.epoch, self.epoch_step = self.epoch + 1, 0
        if not self.ranks.rank:
            self.progress.done()
        self._take_weights(self.best["trained"])
        return dict(self.best["figures"])

    def _run_epoch(self) -> None:
        steps = self.epoch_steps[self.epoch]
        parts = self.settings.validations_per_epoch
        validated = {-(-steps * part // parts) for part in range(1, parts + 1)}
        self.order.start(self.epoch, self.epoch_step)
        batches = on_device(self._timed(self.loader), self.device)
        self.model.train()
        saved_at, pause = time.monotonic(), self.checkpoint_seconds
        while self.epoch_step < steps:
            started = time.monotonic()
            self._step(batches, self.order.shares(self.epoch_step))
            self.epoch_step += 1
            self.step += 1
            self.seconds += time.monotonic() - started
            due = self.epoch_step in validated
            if self.step % _LOGGED_STEPS == 0 or self.epoch_step == steps:
                self._log()
            if due:
                self._validate()
                self.model.train()
            if due or time.monotonic() - saved_at >= pause:
                for sums in self._window:
                    self._check(sums[0, 0])
                if not self.ranks.rank:
                    pause = max(self.checkpoint_seconds, self.save() / _CHECKPOINT_SHARE)
                saved_at = time.monotonic()

    def _timed(self, loader: PackLoader) -> Iterator[Batch]:
        batches = iter(loader)
        while True:
            started = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.monotonic() - started
            yield batch

    def _step(self, batches: Iterator[Batch], shares: list[float]) -> None:
        """Forward and backward of this rank's packs, whose shares are given, and one step of optimizers and schedule.

        The step's loss is the mean over all its supervised tokens, whichever pack and rank they are in.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        # First row: loss, supervised rows, samples left out. Then, for each step of training-time test, see Judged.sums.
        sums = torch.zeros(self.settings.ttt_steps + 1, 3, device=self.device)
        learnt = 0
        for number, share in enumerate(shares, 1):
            batch = next(batches)
            for bad in batch["bad"]:
                cli.say(f"train_draft: left out: {bad}")
            sums[0, 2] += len(batch["bad"])
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
                judged = supervised_loss(self.model, batch, self.settings.ttt_steps, self.settings.ttt_step_loss_decay, self.window)
            if judged is None:
                continue
            if number == len(shares):
                self.gradients.last_backward()
            (judged.loss * share).backward()
            learnt += len(judged.supervised)
            sums[0, 0] += judged.loss.detach() * share
            sums[1:, :2] += judged.sums
        sums[0, 1] += learnt
        self.gradients.finish()
        self.ranks.sum(sums)
        if learnt or float(sums[0, 1]):  # else there is nothing to learn in the whole step, and no rank moves
            torch.nn.utils.clip_grad_norm_(self.trained.values(), _GRADIENT_NORM)
            for optimizer in self.optimizers:
                optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.tokens += self.order.rows(self.epoch_step)
        self._window.append(sums)
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.progress.update(1, **{"tok/s": f"{rate:,.0f}", "loss": self._last_loss})

    def _validate(self) -> None:
        figures = self.validate(self.model)
        if not self.best or figures["acceptance_length"] > self.best["figures"]["acceptance_length"]:
            weights = {name: value.detach().to("cpu", copy=True) for name, value in self.trained.items()}
            self.best = {"figures": figures, "step": self.step, "trained": weights}
        if not self.ranks.rank:
            self.metrics_file.add(split="validation", epoch=self.epoch + 1, step=self.step, **figures)
            shown = ", ".join(f"{value:.3f}" for value in figures["accuracy"])
            cli.say(
                f"train_draft: epoch {self.epoch + 1} of {self.settings.epochs}, validation loss {figures['loss']:.3f}, "
                f"accuracy {shown}, acceptance length {figures['acceptance_length']:.3f}"
            )

    def _log(self) -> None:
        """One line for the steps since the last one; AerieError if their loss is not a number."""
        sums = torch.stack(self._window).sum(0).double().cpu()
        steps, judged = len(self._window), max(1.0, float(sums[0, 1]))
        self._check(sums[0, 0])
        self._window.clear()
        self.left_out += int(sums[0, 2])
        loss = float(sums[0, 0]) / steps
        self._last_loss = f"{loss:.3f}"
        if not self.ranks.rank:
            self.metrics_file.add(
                split="train",
                epoch=self.epoch + 1,
                step=self.step,
                loss=loss,
                loss_per_step=(sums[1:, 0] / judged).tolist(),
                # Against the target's best token within the draft's vocabulary, so better than serving will be.
                accuracy_in_draft_vocabulary=(sums[1:, 1] / judged).tolist(),
                learning_rate=self.optimizers[0].param_groups[0]["lr"],
                tokens=self.tokens,
            )

    def _check(self, loss: torch.Tensor) -> None:
        """No checkpoint is to keep weights that a loss out of range has spoilt."""
        if not math.isfinite(float(loss)):
            raise AerieError(
                f"the loss is {float(loss)} at step {self.step} (epoch {self.epoch + 1}); lower training.learning_rate, or see "
                "whether the target's states or head hold values out of range"
            )


def optimizers_of(
    model: Eagle3DraftModel, settings: TrainingSettings, device: torch.device, ranks: Ranks = ALONE
) -> list[torch.optim.Optimizer]:
    """Speculators' optimizers: AdamW, or Muon for the matrices and AdamW for the rest, at one peak learning rate."""
    rate = settings.learning_rate
    config = TrainerConfig(lr=rate, muon_lr=rate, optimizer=settings.optimizer, num_epochs=settings.epochs, save_path="")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    made = build_optimizers(model, config)
    return [SharedMuon(optimizer, dtype, ranks) if isinstance(optimizer, torch.optim.Muon) else optimizer for optimizer in made]
