"""Checkpoints of a training that may be killed at any moment, and what it takes to go on exactly from one.

A checkpoint is step-XXXXXXXX.pt with a marker step-XXXXXXXX.json beside it that is written after it: without a marker that
fits, it is not one. All tensors keep their precision (speculators' own checkpoints round to bfloat16).
"""

import json
import logging
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .stage import sync_folder, write_atomically

logger = logging.getLogger(__name__)

_KEPT = 2


class Checkpoints:
    """The checkpoints in a folder; the newest two are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Mapping[str, Any]) -> float:
        """Writes a checkpoint so that a kill at any time leaves the earlier ones whole. Returns the seconds it took."""
        started = time.monotonic()
        path = self.folder / f"step-{step:08d}.pt"
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(path)
        sync_folder(self.folder)
        write_atomically(path.with_suffix(".json"), json.dumps({"step": step, "bytes": size}))
        for old in self._complete()[_KEPT:]:
            old.with_suffix(".json").unlink()
            old.unlink()
        return time.monotonic() - started

    def newest(self) -> dict[str, Any] | None:
        """The state of the newest complete checkpoint, tensors on the CPU; None if there is none."""
        for path in self._complete():
            try:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, an older one may be right
                logger.warning("checkpoint %s cannot be read (%s: %s); trying the one before", path, type(error).__name__, error)
                continue
            return state
        return None

    def _complete(self) -> list[Path]:
        """Paths of complete checkpoints, newest first."""
        found = []
        for marker in sorted(self.folder.glob("step-*.json"), reverse=True):
            path = marker.with_suffix(".pt")
            size = json.loads(marker.read_text())["bytes"]
            if path.exists() and path.stat().st_size == size:
                found.append(path)
            else:
                logger.warning("checkpoint %s is not complete; skipped", path)
        return found


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's random numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of torch's random numbers (nothing in the loop draws from Python's or numpy's)."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Puts back what `random_state` gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
