"""Training a draft: speculators' trainer (model, losses, optimizers, schedule), made exact and safe against any kill.

Overridden of speculators' Trainer, and why:
  setup_trainer    its device is an index of an accelerator; here it may be the CPU
  setup_optimizer  going on from our checkpoints, whose learning rate depends on the step, not on the epoch
  train_epoch      its step timer needs an accelerator; progress, metrics and checkpoints by time
  run_training     it saves in bfloat16, trusts the newest folder, and saves when interrupted in the middle of a step
"""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.utils import normalize_counted_metrics
from torch.utils.data import DataLoader
from transformers import get_scheduler

from . import cli
from .checkpoints import Checkpoints, random_state, restore_random_state
from .cpu_speed import PACKED_ATTENTION, Float32Muon, supervised_loss
from .errors import AerieError
from .progress import Progress
from .training_data import Batch, batch_counts, model_inputs, order_of, rows_of

logger = logging.getLogger(__name__)

_LOGGED_STEPS = 10
_GRADIENT_NORM = 1.0
# A checkpoint takes at most this share of the time, however large the draft is.
_CHECKPOINT_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """The recipe's `training`: what can change the trained draft.

    learning_rate: peak, of both Muon (matrices) and AdamW (the rest). warmup: share of all steps. ttt_steps: draft tokens
    that training unrolls. ttt_step_loss_decay: weight of step k is this to the power k. batch_tokens: rows a step.
    max_length: samples are cut to it, in tokens. compute_dtype: auto is bfloat16 on a GPU, float32 on a CPU.
    """

    epochs: int = 3
    learning_rate: float = 1e-3
    optimizer: Literal["muon", "adamw"] = "muon"
    weight_decay: float = 0.01
    muon_weight_decay: float = 0.1
    schedule: Literal["linear", "cosine", "none"] = "linear"
    warmup: float = 0.01
    loss: str = "kl_div"
    ttt_steps: int = 3
    ttt_step_loss_decay: float = 1.0
    batch_tokens: int = 2048
    max_length: int = 2048
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("optimizer", ("muon", "adamw")),
            ("schedule", ("linear", "cosine", "none")),
            ("compute_dtype", ("auto", "float32", "bfloat16")),
        ):
            if getattr(self, name) not in allowed:
                raise AerieError(f"training.{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}")
        for name in ("epochs", "ttt_steps", "batch_tokens", "max_length"):
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

    def call_kwargs(self) -> dict[str, Any]:
        """What speculators' model takes with each batch. Its fused losses need a GPU and fail under torch.compile."""
        return Eagle3DraftModel.get_trainer_kwargs(
            loss_fn=self.loss,
            loss_implementation="eager",
            ttt_steps=self.ttt_steps,
            ttt_step_loss_decay=self.ttt_step_loss_decay,
        )[0]


def pick_device(wanted: str) -> torch.device:
    """The device for auto, cpu or cuda; AerieError where cuda is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise AerieError("device is cuda, but torch sees no GPU; set device: cpu or auto, or install the CUDA environment")
    return torch.device("cuda", 0)


def attention_for(device: torch.device) -> str:
    """Name of the draft's attention: speculators' flex attention is compiled for GPUs."""
    return "simple_flex_attention" if device.type == "cuda" else PACKED_ATTENTION


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


class DraftTrainer(Trainer):
    """Speculators' trainer for one device. `run_training` returns when all epochs are done, in this process or earlier ones.

    work: folder that outlives the process. validate: called with model and compute dtype after each epoch.
    checkpoint_seconds: time between checkpoints; there is one at the end of each epoch anyway.
    """

    def __init__(
        self,
        model: Eagle3DraftModel,
        settings: TrainingSettings,
        loader: DataLoader,
        validate: Callable[[Eagle3DraftModel, torch.dtype], dict[str, Any]],
        work: Path,
        device: torch.device,
        checkpoint_seconds: float,
    ) -> None:
        self.settings, self.device, self.validate = settings, device, validate
        self.draft = model
        self.checkpoint_seconds = checkpoint_seconds
        self.checkpoints = Checkpoints(work / "checkpoints")
        self.metrics_file = MetricsFile(work / "metrics.jsonl")
        self.epoch_steps = batch_counts(loader, settings.epochs)
        self.call_kwargs = settings.call_kwargs()
        self.tokens = 0
        self.seconds = 0.0
        self.last_validation: dict[str, Any] = {}
        self._window: list[dict[str, torch.Tensor]] = []  # metrics of the steps since the last line of metrics.jsonl
        self._last_loss = "-"
        config = TrainerConfig(
            lr=settings.learning_rate,
            num_epochs=settings.epochs,
            save_path=str(work / "speculators"),  # looked at, never written
            optimizer=settings.optimizer,
            weight_decay=settings.weight_decay,
            muon_lr=settings.learning_rate,
            muon_weight_decay=settings.muon_weight_decay,
            hidden_states_dtype=settings.dtype(device),
        )
        super().__init__(model, config, loader)

    @property
    def total_steps(self) -> int:
        return sum(self.epoch_steps)

    def setup_trainer(self) -> None:
        self.local_rank = self.device  # type: ignore[assignment]  # only ever handed to .to()
        self.device_type = self.device.type
        self.current_epoch = 0
        self.global_step = 0
        self._resume_local_step = 0

    def setup_optimizer(self) -> None:
        self.optimizers = build_optimizers(self.model, self.config)
        if self.device.type == "cpu":
            self.optimizers = [Float32Muon.instead_of(optimizer) for optimizer in self.optimizers]
        warmup_steps = int(self.total_steps * self.settings.warmup)
        self.schedulers = (
            [get_scheduler(self.settings.schedule, optimizer, warmup_steps, self.total_steps) for optimizer in self.optimizers]
            if self.settings.schedule != "none"
            else []
        )
        self._go_on()

    def _go_on(self) -> None:
        """Takes up the newest checkpoint, if there is one."""
        state = self.checkpoints.newest()
        if state is None:
            self.metrics_file.cut(0)
            return
        missing = self.model.load_state_dict(state["trained"], strict=False).unexpected_keys
        if missing:
            raise AerieError(f"the checkpoint in {self.checkpoints.folder} is of another draft ({missing}); delete the folder")
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        restore_random_state(state["random"])
        self.metrics_file.cut(state["metrics_bytes"])
        self._window = state["window"]
        self.current_epoch, self._resume_local_step = state["epoch"], state["epoch_step"]
        self.global_step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        cli.say(f"train_draft: resumed at step {self.global_step} of {self.total_steps}, epoch {self.current_epoch + 1}")

    def save(self, epoch: int, epoch_step: int) -> float:
        """A checkpoint after `epoch_step` steps of `epoch` (from 0). Returns the seconds it took."""
        trained = {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}
        state = {
            "trained": trained,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "random": random_state(),
            "epoch": epoch,
            "epoch_step": epoch_step,
            "step": self.global_step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "metrics_bytes": self.metrics_file.length(),
            "window": self._window,
        }
        return self.checkpoints.save(self.global_step, state)

    def run_training(self) -> None:
        self.progress = Progress("train_draft", self.total_steps, "steps", start=self.global_step)
        for epoch in range(self.current_epoch, self.settings.epochs):
            self.train_epoch(epoch)
            self.last_validation = self.validate(self.draft, self.config.hidden_states_dtype)
            self.metrics_file.add(split="validation", epoch=epoch + 1, step=self.global_step, **self.last_validation)
            shown = ", ".join(f"{value:.3f}" for value in self.last_validation["accuracy"])
            cli.say(
                f"train_draft: epoch {epoch + 1} of {self.settings.epochs}, validation loss {self.last_validation['loss']:.3f}, "
                f"accuracy {shown}, acceptance length {self.last_validation['acceptance_length']:.3f}"
            )
        self.progress.done()

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        self.model.train()
        order_of(self.train_loader).set_epoch(epoch)
        epoch_step = self._prepare_resume_skip(epoch)
        if epoch_step >= self.epoch_steps[epoch]:
            return
        saved_at, pause = time.monotonic(), self.checkpoint_seconds
        for batch in self.train_loader:
            started = time.monotonic()
            self.train_step(batch, epoch)
            epoch_step += 1
            self.seconds += time.monotonic() - started
            last = epoch_step == self.epoch_steps[epoch]
            if self.global_step % _LOGGED_STEPS == 0 or last:
                self._log(epoch)
            if last or time.monotonic() - saved_at >= pause:
                if not all(math.isfinite(float(metrics["loss"])) for metrics in self._window):
                    self._log(epoch)  # raises: no checkpoint is to keep such weights
                pause = max(self.checkpoint_seconds, self.save(epoch, epoch_step) / _CHECKPOINT_SHARE)
                saved_at = time.monotonic()

    def train_step(self, batch: Batch, epoch: int) -> None:
        """Forward, backward and one step of optimizers and schedule, as in speculators' loop."""
        inputs, dtype = model_inputs(batch, self.device), self.config.hidden_states_dtype
        if self.device.type == "cpu" and dtype == torch.float32:
            loss, metrics = supervised_loss(self.draft, **inputs, **self.call_kwargs)
        else:
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
                _drafted, loss, metrics = self.model(**inputs, **self.call_kwargs)
        self._optimizers_zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_NORM)
        self._optimizers_step()
        self._schedulers_step()
        rows = rows_of(batch)
        self.global_step += 1
        self.tokens += rows
        self._window.append({"loss": loss.detach(), **metrics})
        self.progress.update(1, **self._shown())

    def _shown(self) -> dict[str, str]:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return {"tok/s": f"{rate:,.0f}", "loss": self._last_loss}

    def _log(self, epoch: int) -> None:
        """One line for the steps since the last one; AerieError if their loss is not a number."""
        sums: dict[str, float] = {}
        for metrics in self._window:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        loss = sums.pop("loss") / len(self._window)
        self._window.clear()
        if not math.isfinite(loss):
            raise AerieError(
                f"the loss is {loss} at step {self.global_step} (epoch {epoch + 1}); lower training.learning_rate, or see "
                "whether the target's states or head hold values out of range"
            )
        means = normalize_counted_metrics(sums)
        steps = range(self.settings.ttt_steps)
        self._last_loss = f"{loss:.3f}"
        self.metrics_file.add(
            split="train",
            epoch=epoch + 1,
            step=self.global_step,
            loss=loss,
            loss_per_step=[means[f"loss_{step}"] for step in steps],
            # Against the target's best token within the draft's vocabulary, so better than serving will be.
            accuracy_in_draft_vocabulary=[means[f"full_acc_{step}"] for step in steps],
            learning_rate=self.optimizers[0].param_groups[0]["lr"],
            tokens=self.tokens,
        )
