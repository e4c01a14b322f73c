"""Checkpoints of a training that may be killed at any moment, and what it takes to go on exactly from one.

A checkpoint is step-XXXXXXXX.pt with a marker step-XXXXXXXX.json beside it that is written after it: without a marker that
fits, it is not one. All tensors keep their precision (speculators' own checkpoints round to bfloat16).
"""

import json
import os
import random
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import cli
from .errors import AerieError
from .files import is_damage
from .stage import sync_folder, write_atomically
from .store import free_bytes, size_text

_KEPT = 2


class Checkpoints:
    """The checkpoints in a folder; the newest two are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Mapping[str, Any]) -> float:
        """Writes a checkpoint so that a kill at any time leaves the earlier ones whole. Returns the seconds it took."""
        started = time.monotonic()
        for left in self.folder.glob("*.tmp"):
            left.unlink()
        path = self._path(step)
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch raises the latter over the former
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            refused = error if isinstance(error, OSError) else error.__context__
            if not isinstance(refused, OSError):
                raise
            raise AerieError(
                f"{path}: this checkpoint cannot be written: {refused.strerror or refused}; {size_text(free_bytes(self.folder))} are free "
                "there. Make room (`snakemake gc`); the same command goes on from the checkpoint before."
            ) from error
        size = temporary.stat().st_size
        temporary.replace(path)
        sync_folder(self.folder)
        write_atomically(path.with_suffix(".json"), json.dumps({"step": step, "bytes": size}))
        for old in self._complete()[_KEPT:]:
            old.with_suffix(".json").unlink()
            old.unlink()
        return time.monotonic() - started

    def newest(self) -> dict[str, Any] | None:
        """The state of the newest complete checkpoint, tensors on the CPU; None if there is none.

        A damaged one is set aside, and the one before is taken. AerieError for one that may not be read, and may be whole.
        """
        for path in self._complete():
            try:
                with zipfile.ZipFile(path) as file:
                    damaged = file.testzip()  # torch.load looks at no checksum
                if damaged:
                    raise ValueError(f"the checksum of {damaged} is wrong")
                return self._read(path)
            except (OSError, RuntimeError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                if isinstance(error, OSError) and not is_damage(error):
                    raise AerieError(f"{path}: this checkpoint may not be read: {error}. Mend that; it may be whole.") from error
                cli.say(f"train_draft: checkpoint {path} is damaged ({type(error).__name__}: {error}) and set aside")
                path.with_suffix(".json").unlink()
                path.replace(path.with_suffix(".damaged"))
        return None

    def at(self, step: int) -> dict[str, Any]:
        """The state of the checkpoint of this step, as `newest` gave it to another process."""
        return self._read(self._path(step))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _read(self, path: Path) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def _complete(self) -> list[Path]:
        """Paths of complete checkpoints, newest first."""
        found = []
        for marker in sorted(self.folder.glob("step-*.json"), reverse=True):
            path = marker.with_suffix(".pt")
            with suppress(ValueError, KeyError, TypeError, FileNotFoundError):
                if path.stat().st_size == json.loads(marker.read_text())["bytes"]:
                    found.append(path)
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
