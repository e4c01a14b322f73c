"""Keys (of inputs) and digests (of bytes): every hash that Aerie compares is made here."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spare white space; the same value gives the same text on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """sha256 (64 hex digits) of the value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 (64 hex digits) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_key(token_ids: Sequence[int] | np.ndarray) -> str:
    """Key of a token sequence: the first 32 hex digits of the sha256 of its ids as little-endian int32."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()[:32]


def draft_digest(folder: Path, weights: str | None = None) -> str:
    """Content digest of an exported draft: weights and configuration, without paths and package versions.

    weights: sha256 of its model.safetensors, where that is known.
    """
    config = json.loads((folder / "config.json").read_text())
    for name in ("transformers_version", "speculators_version"):
        config.pop(name, None)
    config["speculators_config"]["verifier"].pop("name_or_path", None)
    return digest_of({"config": config, "weights": weights or file_sha256(folder / "model.safetensors")})
