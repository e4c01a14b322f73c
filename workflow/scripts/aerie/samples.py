"""Samples on disk: one token sequence with its loss mask a row, in results/datasets/{target}/{dataset}/samples."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from .errors import AerieError
from .keys import digest_of, sample_key

if TYPE_CHECKING:
    from datasets import Dataset


class Sample(NamedTuple):
    """input_ids and loss_mask [tokens]; 1 in the mask is a supervised token. Two samples are equal if both are."""

    input_ids: list[int]
    loss_mask: list[int]
    source: str
    split: str = "train"

    @property
    def key(self) -> str:
        """Key of the token ids: what hidden states are stored under."""
        return sample_key(self.input_ids)

    @property
    def order(self) -> str:
        """Hash of ids and mask: the canonical order of samples, and their identity."""
        return hashlib.sha256(self.key.encode() + np.asarray(self.loss_mask, dtype=np.uint8).tobytes()).hexdigest()


def samples_digest(samples: Sequence[Sample]) -> str:
    """Content digest of a set of samples; order does not matter, split does."""
    return digest_of(sorted([sample.order, sample.split] for sample in samples))


def write_samples(samples: Sequence[Sample], folder: Path) -> None:
    """Saves samples as a datasets folder: sample_key, split, source, input_ids (int32), loss_mask (uint8)."""
    from datasets import Dataset, Features, List, Value

    features = Features(
        {
            "sample_key": Value("string"),
            "split": Value("string"),
            "source": Value("string"),
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("uint8")),
        }
    )
    rows = {
        "sample_key": [sample.key for sample in samples],
        "split": [sample.split for sample in samples],
        "source": [sample.source for sample in samples],
        "input_ids": [sample.input_ids for sample in samples],
        "loss_mask": [sample.loss_mask for sample in samples],
    }
    Dataset.from_dict(rows, features=features).save_to_disk(folder)


def sample_lengths(folder: Path) -> pd.DataFrame:
    """sample_key and tokens of a dataset's distinct samples, without reading them or importing `datasets`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = []
    for path in sorted((folder / "samples").glob("*.arrow")):
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        parts.append(pd.DataFrame({"sample_key": table["sample_key"].to_pandas(), "tokens": pc.list_value_length(table["input_ids"])}))
    if not parts:
        raise AerieError(f"{folder}: no samples there; prepare_dataset has not finished. Run snakemake.")
    return pd.concat(parts, ignore_index=True).drop_duplicates("sample_key", ignore_index=True)


def load_samples(folder: Path) -> "Dataset":
    """The samples of a dataset's folder, memory-mapped, in canonical order."""
    from datasets import load_from_disk

    if not (folder / "samples").is_dir():
        raise AerieError(f"{folder}: no samples there; prepare_dataset has not finished. Run snakemake.")
    return load_from_disk(str(folder / "samples"))
