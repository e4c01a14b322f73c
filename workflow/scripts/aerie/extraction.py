"""What the two extraction engines share: the job, its samples, and the account of what became of each of them."""

import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import cli
from .engine_choice import choose_engine
from .errors import AerieError, ProcessFailed, describe
from .hidden_states import VERSION, Capture, HiddenStateStore, capture_key, row_bytes
from .keys import sample_key
from .provenance import provenance
from .samples import load_samples
from .stage import Recipe
from .store import free_bytes, size_text
from .targets import Target

SHARD_BYTES = 256 * 2**20
_HOPELESS = 100  # failed samples, and none with states: the rest will fail as well


@dataclass(frozen=True)
class Job:
    """How states are extracted.

    layer_ids: vLLM's numbering: k < n is the input of decoder layer k, n the last layer's output before the final norm.
    engine_options: passed to vLLM's LLM(), or for transformers {"batch_tokens": padded tokens of a batch}.
    max_failed: share of a dataset's samples that may be without states because theirs are not finite.
    """

    target: Target
    layer_ids: tuple[int, ...]
    stored_dtype: str
    compute_dtype: str
    engine: str
    device: str = "auto"
    tensor_parallel: int = 1
    engine_options: dict[str, Any] = field(default_factory=dict)
    value_options: dict[str, Any] = field(default_factory=dict)
    shard_bytes: int = SHARD_BYTES
    nodes: int = 1
    max_failed: float = 0.0

    def __post_init__(self) -> None:
        layers = self.target.num_layers
        ids = sorted(set(self.layer_ids))
        if not ids or ids[0] < 0 or ids[-1] > layers:
            raise AerieError(f"layer_ids {list(self.layer_ids)}: expected ids from 0 to {layers}, the layers of target {self.target.name}")
        object.__setattr__(self, "layer_ids", tuple(ids))

    @classmethod
    def of(cls, recipe: Recipe, target: Target) -> "Job":
        """The job that a recipe of the stage extract_hidden_states asks for: the draft's aux layers and the last one."""
        if recipe.version != VERSION:
            raise AerieError(f"the recipe is for version {recipe.version} of {recipe.stage}, this is version {VERSION}: run snakemake")
        settings, runtime = recipe.settings, recipe.runtime
        options = runtime["engine_options"]
        engine, _ = choose_engine(target, settings["engine"])
        if engine == "transformers":  # the other options are for vLLM, which still answers and evaluates
            options = {name: value for name, value in options.items() if name in ("batch_tokens", "max_model_len")}
        return cls(
            target=target,
            layer_ids=(*target.aux_layer_ids(settings["aux_layer_ids"]), target.num_layers),
            stored_dtype=settings["stored_dtype"],
            compute_dtype=settings["compute_dtype"],
            engine=engine,
            value_options=settings["value_options"],
            device=runtime.get("device", "auto"),
            tensor_parallel=runtime.get("tensor_parallel", 1),
            engine_options=options,
            shard_bytes=runtime.get("shard_bytes", SHARD_BYTES),
            nodes=runtime.get("nodes", 1),
            max_failed=runtime.get("max_failed", 0.0),
        )

    @property
    def capture_key(self) -> str:
        return capture_key(self.target.digest, self.layer_ids, self.stored_dtype, self.compute_dtype, self.engine, self.value_options)

    @property
    def max_tokens(self) -> int:
        """The longest sample that the target takes."""
        limits = [self.target.max_positions, self.engine_options.get("max_model_len")]
        return min((int(limit) for limit in limits if limit), default=2**31)

    @property
    def row_bytes(self) -> int:
        """Bytes that a token's states take."""
        return row_bytes(len(self.layer_ids), self.target.hidden_size, self.stored_dtype)

    def check_disk(self, samples: int, tokens: int, store: Path) -> None:
        """AerieError where the states of so many samples and tokens will not fit on the store's file system."""
        needed, free = tokens * self.row_bytes, free_bytes(store)
        if needed > free:
            raise AerieError(
                f"the hidden states of {samples:,} samples take {size_text(needed)}, {store} has {size_text(free)} free. "
                "Make room (`snakemake gc`), set another store, fewer max_samples, or stored_dtype float8."
            )

    def given_up(self, store: HiddenStateStore, lacking: Collection[str], samples: int) -> dict[str, str]:
        """Of the samples that the store lacks, those that are not tried again, and why each failed; `samples`: of the dataset.

        All that failed before, if so many may; else none.
        """
        failed = store.failed()
        found = sorted(failed & set(lacking)) if failed else []
        return {key: store.why_failed(key) for key in found} if len(found) <= self.max_failed * samples else {}

    def capture(self) -> Capture:
        origin = provenance()
        return Capture(
            key=self.capture_key,
            layer_ids=self.layer_ids,
            stored_dtype=self.stored_dtype,
            compute_dtype=self.compute_dtype,
            engine=self.engine,
            versions=origin.pop("versions"),
            engine_options=self.engine_options | {"tensor_parallel": self.tensor_parallel},
            provenance=origin,
        )


@dataclass(frozen=True)
class SampleSet:
    """Samples to extract; their ids are read when they are needed, since a dataset may not fit in memory.

    keys[i] has tokens[i] tokens, ids_of(i) is its ids [tokens] int32.
    """

    keys: list[str]
    tokens: np.ndarray
    ids_of: Callable[[int], np.ndarray]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "SampleSet":
        """Samples from token ids in memory."""
        arrays = [np.asarray(ids, dtype=np.int32) for ids in sequences]
        return cls([sample_key(ids) for ids in arrays], np.array([len(ids) for ids in arrays], dtype=np.int64), lambda i: arrays[i])

    @classmethod
    def of_dataset(cls, folder: Path) -> "SampleSet":
        """All rows of a dataset's folder; rows that differ in their loss mask alone have the same key."""
        import pyarrow.compute as pc

        rows = load_samples(folder)
        tokens = pc.list_value_length(rows.data.table.column("input_ids")).to_numpy().astype(np.int64)
        arrays = rows.select_columns(["input_ids"]).with_format("numpy")
        return cls(rows.data.table.column("sample_key").to_pylist(), tokens, lambda i: arrays[int(i)]["input_ids"])

    def __len__(self) -> int:
        return len(self.keys)

    def chosen(self, keys: set[str]) -> "SampleSet":
        """The samples with these keys, in the same order."""
        places = [i for i, key in enumerate(self.keys) if key in keys]
        return SampleSet([self.keys[i] for i in places], self.tokens[places], lambda i: self.ids_of(places[i]))

    def longest_first(self) -> "SampleSet":
        """Sorted, one sample a key: what does not fit in memory fails at once, and batches of a kind pad little."""
        _, unique = np.unique(np.array(self.keys, dtype=object).astype(str), return_index=True)
        order = unique[np.lexsort((unique, -self.tokens[unique]))]
        return SampleSet([self.keys[i] for i in order], self.tokens[order], lambda i: self.ids_of(int(order[i])))

    def check(self, max_tokens: int) -> None:
        """AerieError, by name, where a sample is empty or longer than the target takes."""
        wrong = np.flatnonzero((self.tokens < 1) | (self.tokens > max_tokens))
        if len(wrong):
            names = [f"{self.keys[i]} ({self.tokens[i]:,} tokens)" for i in wrong[:10]]
            more = f" and {len(wrong) - 10:,} more" if len(wrong) > 10 else ""
            raise AerieError(
                f"{len(wrong):,} of {len(self):,} samples do not fit the target, which takes 1 to {max_tokens:,} tokens: "
                f"{', '.join(names)}{more}. Lower the dataset's max_length (or raise engine_options.max_model_len)."
            )


@dataclass(frozen=True)
class Failure:
    """Why a sample has no states.

    trace: the traceback, where there was an exception. its_own: the sample itself has none; the others go on without it.
    """

    key: str
    cause: str
    trace: str = ""
    its_own: bool = False

    @classmethod
    def of(cls, key: str, error: BaseException) -> "Failure":
        return cls(key, describe(error), "".join(traceback.format_exception(error)))


@dataclass
class Outcome:
    """The account: every sample asked for is in `written` (key: shard's file name) or in `failed`.

    seconds: where the time went, as far as the engine says: "taking" states in the engine's own thread, of that "waiting"
    for the disk, and "writing" in other threads, all together.
    """

    written: dict[str, str] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, written: dict[str, str], failures: Sequence[Failure]) -> None:
        self.written |= written
        self.failed |= {failure.key: failure for failure in failures if failure.key not in self.failed}

    def why_stop(self) -> str | None:
        """Why the rest need not be tried: something failed that is not of one sample alone, or nothing else than failures came."""
        broken = next((failure for failure in self.failed.values() if failure.trace), None)
        if broken:
            return f"not tried: extraction stopped after another sample failed ({broken.cause.splitlines()[0]})"
        if len(self.failed) >= _HOPELESS and not self.written:
            first = next(iter(self.failed.values())).cause.splitlines()[0]
            return f"not tried: extraction stopped after {len(self.failed):,} samples had failed, and none had not (first: {first})"
        return None

    def close(self, asked: Sequence[str], cause: str, trace: str = "") -> "Outcome":
        """Accounts for the rest: whatever was asked for and is in neither list failed by `cause`."""
        for key in asked:
            if key not in self.written and key not in self.failed:
                self.failed[key] = Failure(key, cause, trace)
        return self

    def raise_failures(self, tolerated: float = 0) -> None:
        """AerieError that lists the causes, most frequent first, with the samples of each.

        Only a warning where at most `tolerated` samples failed, each of its own.
        """
        if not self.failed:
            return
        causes: dict[str, list[Failure]] = {}
        for failure in self.failed.values():
            causes.setdefault(failure.cause, []).append(failure)
        lines = [f"{len(self.failed):,} of {len(self.failed) + len(self.written):,} samples have no hidden states; the others are kept:"]
        for cause, failures in sorted(causes.items(), key=lambda item: -len(item[1]))[:10]:
            shown = ", ".join(failure.key for failure in failures[:5]) + (", …" if len(failures) > 5 else "")
            lines.append(f"{len(failures):,} × {cause}\n  samples {shown}")
            print(failures[0].trace or cause, flush=True)  # to the log
        text, their_own = "\n".join(lines), all(failure.its_own for failure in self.failed.values())
        if their_own and len(self.failed) <= tolerated:
            cli.say(f"warning: {text}\nThey are left out (extraction.max_failed).")
        elif their_own:
            raise AerieError(f"{text}\nTo go on without them, raise extraction.max_failed, the share of the dataset that may fail.")
        else:
            raise (ProcessFailed if any(failure.trace for failure in self.failed.values()) else AerieError)(text)
