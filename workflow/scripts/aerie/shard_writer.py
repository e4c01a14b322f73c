"""Packs captured samples into shards and writes them in threads, with bounded memory and a full account."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from .errors import AerieError
from .extraction import Failure
from .hidden_states import Capture, HiddenStateStore, StoredSample, row_bytes, torch_dtype

_THREADS = 4  # hashing and writing: about 1 GB/s each on a current core
_PINNED_SHARDS = 8  # beside a GPU, which fills one in a fifth of a second


class Slot(NamedTuple):
    """Room for one sample in the memory of the shard being filled, to be copied into.

    states [tokens, layers, hidden] in the stored dtype; scales [tokens, layers] float32 where that is float8; finite
    [layers] bool: which layers hold only finite numbers.
    """

    states: torch.Tensor
    scales: torch.Tensor | None
    finite: torch.Tensor


class Captured(NamedTuple):
    """A sample on its way to the disk; its slot may still be filled by an asynchronous copy until `wait()` returns."""

    key: str
    token_ids: np.ndarray
    slot: Slot
    wait: Callable[[], object] = lambda: None


class _Buffer:
    """The memory of one shard. Allocated once and used again: pinning memory takes longer than filling it."""

    def __init__(self, rows: int, layers: int, hidden_size: int, stored_dtype: str, pinned: bool) -> None:
        self.states = torch.empty((rows, layers, hidden_size), dtype=torch_dtype(stored_dtype), pin_memory=pinned)
        self.scales = torch.empty((rows, layers), pin_memory=pinned) if stored_dtype == "float8" else None
        self.finite = torch.empty((rows, layers), dtype=torch.bool, pin_memory=pinned)
        self.used = 0

    def slot(self, tokens: int) -> Slot:
        first, self.used = self.used, self.used + tokens
        scales = None if self.scales is None else self.scales[first : self.used]
        return Slot(self.states[first : self.used], scales, self.finite[first])


def _started_threads() -> ThreadPoolExecutor:
    """All threads now: where one could not be started later, nobody would write its shard, and `reserve` would wait for ever."""
    pool, together = ThreadPoolExecutor(_THREADS, thread_name_prefix="aerie-shard"), threading.Barrier(_THREADS + 1)
    try:
        for _ in range(_THREADS):
            pool.submit(together.wait)
        together.wait()
    except BaseException:
        together.abort()
        raise
    return pool


class ShardWriter:
    """Takes samples in any order; writes a shard whenever `shard_bytes` are together, and the rest on `flush`.

    longest: tokens of the longest sample. pinned: in memory that a GPU copies to by itself.
    The states in memory take two shards, or _PINNED_SHARDS where pinned (at least two, each large enough for the longest
    sample): one is filled while the others are written, and `reserve` waits for one to be free. A sample that could not
    be written is a Failure in the report, with cause and traceback; nothing is only logged.
    """

    def __init__(
        self, store: HiddenStateStore, capture: Capture, hidden_size: int, longest: int, shard_bytes: int, pinned: bool = False
    ) -> None:
        self._store, self._capture = store, capture
        layers = len(capture.layer_ids)
        row = row_bytes(layers, hidden_size, capture.stored_dtype)
        self._shard_rows = max(1, shard_bytes // row)
        rows = max(self._shard_rows, longest)
        buffers = max(2, _PINNED_SHARDS * self._shard_rows // rows) if pinned else 2
        self._free = [_Buffer(rows, layers, hidden_size, capture.stored_dtype, pinned) for _ in range(buffers)]
        self._buffer: _Buffer | None = None
        self._fill: list[Captured] = []
        self._pool = _started_threads()
        self._room = threading.Condition()
        self._futures: list[Future[None]] = []
        self._written: dict[str, str] = {}
        self._failures: list[Failure] = []
        self._clock: float | None = None
        # Seconds that the engine waited for a free shard's memory, and that all threads spent on writing.
        self.seconds = {"waiting": 0.0, "writing": 0.0}

    def start_clock(self) -> None:
        """Extraction begins now; the shards record the time from here."""
        self._clock = time.monotonic()

    def reserve(self, tokens: int) -> Slot:
        """Room for a sample of so many tokens; waits until an earlier shard is on disk where there is none.

        A slot that is not handed to `add` is lost until its shard is written.
        """
        if self._buffer is not None and self._buffer.used + tokens > len(self._buffer.states):
            self._submit()
        if self._buffer is None:
            began = time.monotonic()
            with self._room:
                self._room.wait_for(lambda: bool(self._free))
                self._buffer = self._free.pop()
            self._buffer.used = 0
            self.seconds["waiting"] += time.monotonic() - began
        if tokens > len(self._buffer.states):
            raise AerieError(f"a sample of {tokens:,} tokens, and the longest was to have {len(self._buffer.states):,}; a bug in Aerie")
        return self._buffer.slot(tokens)

    def add(self, sample: Captured) -> None:
        """Takes a sample whose slot was reserved."""
        self._fill.append(sample)
        if self._buffer is not None and self._buffer.used >= self._shard_rows:
            self._submit()

    def fail(self, failure: Failure) -> None:
        """Records a sample that was not captured."""
        with self._room:
            self._failures.append(failure)

    def flush(self) -> None:
        """Returns when everything taken so far is on disk or in the list of failures."""
        self._submit()
        for future in self._futures:
            future.result()
        self._futures.clear()

    def report(self) -> tuple[dict[str, str], list[Failure]]:
        """What was written (key: shard) and what failed since the last report."""
        with self._room:
            taken = self._written, self._failures
            self._written, self._failures = {}, []
        return taken

    def close(self) -> None:
        """Flushes and ends the threads."""
        self.flush()
        self._pool.shutdown()

    def _submit(self) -> None:
        """Hands the shard being filled to the threads."""
        buffer, batch = self._buffer, self._fill
        if buffer is None:
            return
        self._buffer, self._fill = None, []
        now = time.monotonic()
        began, self._clock = self._clock or now, now
        self._futures = [future for future in self._futures if not future.done()]
        self._futures.append(self._pool.submit(self._write, buffer, batch, now - began))

    def _write(self, buffer: _Buffer, batch: list[Captured], seconds: float) -> None:
        written: dict[str, str] = {}
        failures: list[Failure] = []
        began = time.monotonic()
        try:
            ready = []
            for sample in batch:
                sample.wait()
                if bool(sample.slot.finite.all()):
                    ready.append(StoredSample(sample.key, sample.token_ids, sample.slot.states, sample.slot.scales))
                else:
                    failures.append(Failure(sample.key, self._not_finite(sample.slot.finite), its_own=True))
            if ready:
                name = self._store.write_shard(self._capture, ready, seconds).name
                written = {sample.key: name for sample in ready}
        except BaseException as error:  # noqa: BLE001 - goes into the account, sample by sample
            counted = {failure.key for failure in failures}
            failures += [Failure.of(sample.key, error) for sample in batch if sample.key not in counted]
        with self._room:
            self._written |= written
            self._failures += failures
            self.seconds["writing"] += time.monotonic() - began
            self._free.append(buffer)
            self._room.notify_all()

    def _not_finite(self, finite: torch.Tensor) -> str:
        layers = [layer for layer, good in zip(self._capture.layer_ids, finite.tolist(), strict=True) if not good]
        dtype = self._capture.compute_dtype
        wider = "" if dtype == "float32" else "set the target's dtype to float32, or "
        where = f"its states at layer ids {layers} hold infinities or NaN ({self._capture.engine}, dtype {dtype})"
        return f"{where}: {wider}check the target's weights"
