"""Samples on disk: one token sequence with its loss mask a row, in results/datasets/{target}/{dataset}/samples."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from .errors import AerieError
from .keys import sample_key

if TYPE_CHECKING:
    from datasets import Dataset


class Sample(NamedTuple):
    """input_ids and loss_mask [tokens]; 1 in the mask is a supervised token. Two samples are equal if both are."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    source: str
    split: str = "train"

    @property
    def key(self) -> str:
        """Key of the token ids: what hidden states are stored under."""
        return sample_key(self.input_ids)

    @property
    def order(self) -> str:
        """Hash of ids and mask: the canonical order of samples, and their identity."""
        return hashlib.sha256(self.key.encode() + bytes(self.loss_mask)).hexdigest()


def samples_digest(samples: Iterable[tuple[str, str]]) -> str:
    """Content digest of a set of samples, given as pairs (order, split); the set's own order does not matter."""
    found = hashlib.sha256()
    for order, split in sorted(samples):
        found.update(f"{order} {split}\n".encode())
    return found.hexdigest()


def write_samples(samples: Iterable[Sample], folder: Path) -> str:
    """Saves samples as a datasets folder: sample_key, split, source, input_ids (int32), loss_mask (uint8).

    Memory does not grow with their tokens. Returns their digest.
    """
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value
    from datasets.table import MemoryMappedTable

    features = Features(
        {
            "sample_key": Value("string"),
            "split": Value("string"),
            "source": Value("string"),
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("uint8")),
        }
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    table = folder.with_name(folder.name + ".arrow")
    left = iter(samples)
    written: list[tuple[str, str]] = []
    with pa.OSFile(str(table), "wb") as file, pa.ipc.new_stream(file, features.arrow_schema) as writer:
        while batch := list(islice(left, 1000)):
            written += [(sample.order, sample.split) for sample in batch]
            columns = [
                [sample.key for sample in batch],
                [sample.split for sample in batch],
                [sample.source for sample in batch],
                [np.asarray(sample.input_ids, dtype=np.int32) for sample in batch],
                [np.asarray(sample.loss_mask, dtype=np.uint8) for sample in batch],
            ]
            arrays = [pa.array(values, field.type) for values, field in zip(columns, features.arrow_schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=features.arrow_schema))
    digest = samples_digest(written)
    # By its content, since `datasets` would else name it after the file and the hour.
    Dataset(MemoryMappedTable.from_file(str(table)), fingerprint=digest[:16]).save_to_disk(folder)
    table.unlink()
    return digest


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
