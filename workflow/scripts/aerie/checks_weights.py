"""Checks of the weight files: their index, their headers, the tensors that a draft shares, and a part of their values."""

import json
import re
from pathlib import Path
from typing import Any

from .errors import AerieError
from .preflight import Finding, Subject, read_json
from .targets import head_names

_INDEX = "model.safetensors.index.json"
_READ_BYTES = 256 * 2**20  # of values: a second or two
_AGAIN = "Download these files again"


def read_index(subject: Subject) -> dict[str, Any] | None:
    """The index of a sharded model; None where there is none."""
    path = subject.target.folder / _INDEX
    return read_json(path) if path.exists() else None


def weight_index(subject: Subject) -> Finding:
    """Whether the index (or the single file) names the weights of every layer."""
    index = read_index(subject)
    if index is not None and not isinstance(index.get("weight_map"), dict):
        return Finding("failed", f"{_INDEX} has no weight_map", _AGAIN)
    where = tensor_files(subject.target.folder)
    layers = {int(found[1]) for name in where if "vision" not in name and (found := re.search(r"\blayers\.(\d+)\.", name))}
    missing = sorted(set(range(subject.target.num_layers)) - layers)
    if missing:
        return Finding(
            "failed",
            f"no weights of layers {_some(missing)} among {len(where):,} tensors; config.json says {subject.target.num_layers} layers",
            "Take config.json and weights from the same model",
        )
    extra = len(layers) - subject.target.num_layers
    more = f", and {extra} beyond (next-token prediction)" if extra else ""
    return Finding("ok", f"{len(where):,} tensors in {len(set(where.values()))} files, all {subject.target.num_layers} layers{more}")


def weight_files(subject: Subject) -> Finding:
    """Whether the files that the index names are there, whole, and hold what it says."""
    folder, where = subject.target.folder, tensor_files(subject.target.folder)
    files = sorted(set(where.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if len(missing) == len(files):
        return Finding("warning", f"none of the {len(files)} weight files is there yet: only their index was looked at", "Download them")
    if missing:
        return Finding("failed", f"the index names {len(missing)} files that are not there, {missing[0]} first", "Download them again")
    there: dict[str, set[str]] = {}
    for file in files:
        header, expected = read_header(folder / file)
        size = (folder / file).stat().st_size
        if size != expected:
            return Finding("failed", f"{file} is cut short or damaged: {size:,} bytes, its header promises {expected:,}", _AGAIN)
        there[file] = set(header)
    absent = [name for name, file in where.items() if name not in there[file]]
    if absent:
        return Finding("failed", f"{where[absent[0]]} does not hold {absent[0]}, as the index says (one of {len(absent)})", _AGAIN)
    return Finding("ok", f"{len(files)} files, each as long as its header promises")


def head_weights(subject: Subject) -> Finding:
    """Whether embedding, final norm and output head, which a draft shares with its target, are there and of the right shape."""
    target, where = subject.target, tensor_files(subject.target.folder)
    names = head_names(where, target.text_config, target.folder)
    wanted = {
        "embed_tokens": [target.vocab_size, target.hidden_size],
        "norm": [target.hidden_size],
        "lm_head": [target.vocab_size, target.hidden_size],
    }
    for part, name in names.items():
        path = target.folder / where[name]
        if path.is_file():
            entry = read_header(path)[0].get(name, {})
            shape, dtype = entry.get("shape"), entry.get("dtype")
            if dtype not in ("F32", "BF16", "F16"):
                return Finding(
                    "failed", f"{name} is quantised ({dtype}), and a draft copies it", "Take a model whose head is not quantised"
                )
            if shape != wanted[part]:
                return Finding(
                    "failed",
                    f"{name} is {shape}, config.json says {wanted[part]}",
                    "Take config.json and weights from the same model",
                )
    tied = " (tied: the embedding)" if names["lm_head"] == names["embed_tokens"] else ""
    return Finding("ok", ", ".join(f"{name} in {where[name]}" for name in dict.fromkeys(names.values())) + tied)


def weight_values(subject: Subject) -> Finding:
    """Whether the weights hold infinities or NaN: all of a small target, of a large one the norms, the head and a part."""
    import torch
    from safetensors import safe_open

    folder, where = subject.target.folder, tensor_files(subject.target.folder)
    there = [name for name in where if (folder / where[name]).is_file()]
    if not there:
        return Finding("ok", "no weights here yet to look at")
    read, whole = 0, True
    # Norms first: they are small, and a fault anywhere above shows in none of them.
    for name in sorted(there, key=lambda one: ("norm" not in one, "embed" not in one and "lm_head" not in one, one)):
        with safe_open(folder / where[name], framework="pt") as file:
            part = file.get_slice(name)
            shape = part.get_shape()
            if not shape or part.get_dtype() not in ("F32", "F16", "BF16", "F64"):
                continue
            row = 4 * int(torch.Size(shape[1:]).numel())
            rows = min(shape[0], max(1, (_READ_BYTES - read) // max(row, 1)))
            values = part[:rows]
        read, whole = read + values.nbytes, whole and rows == shape[0]
        if not torch.isfinite(values).all():
            at = torch.nonzero(~torch.isfinite(values))[0].tolist()
            return Finding("failed", f"{name} in {where[name]} holds {values[tuple(at)].item()} at {at}", _AGAIN)
        if read >= _READ_BYTES:
            whole = False
            break
    return Finding("ok", f"{read / 1e6:,.0f} MB read{'' if whole else ' (norms, embedding, head and a part of the rest)'}: all finite")


def tensor_files(folder: Path) -> dict[str, str]:
    """{tensor: file}, like targets.weight_map, for files that the safetensors library would refuse, too."""
    if (folder / _INDEX).exists():
        return dict(read_json(folder / _INDEX)["weight_map"])
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise AerieError(f"{folder}: neither *.safetensors files nor {_INDEX}; Aerie reads weights in safetensors only. Convert the model.")
    return {name: path.name for path in paths for name in read_header(path)[0]}


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header by tensor, and the bytes that the file should have; AerieError where it is damaged."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if not 2 <= length <= size - 8:
            raise AerieError(f"{path}: its header should have {length:,} bytes, the file has {size:,}: cut short or damaged. {_AGAIN}.")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise AerieError(f"{path}: its header is damaged ({error}). {_AGAIN}.") from error
    header.pop("__metadata__", None)
    return header, 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f", … ({len(numbers)} in all)" if len(numbers) > 5 else "")
