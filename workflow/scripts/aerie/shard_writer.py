"""Packs captured samples into shards and writes them in threads, with bounded memory and a full account."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from .extraction import Failure
from .hidden_states import Capture, HiddenStateStore, StoredSample

_THREADS = 4  # hashing and writing: about 1 GB/s each on a current core


class Captured(NamedTuple):
    """A sample's states on their way to the disk.

    states, scales: as `hidden_states.encode` gives them, on the CPU; `finite` [layers] bool says which layers hold only
    finite numbers. All three may still be filled by an asynchronous copy until `wait()` returns.
    reserved: bytes taken with `ShardWriter.reserve`.
    """

    key: str
    token_ids: np.ndarray
    states: torch.Tensor
    scales: torch.Tensor | None
    finite: torch.Tensor
    wait: Callable[[], object]
    reserved: int


class ShardWriter:
    """Takes samples in any order; writes a shard whenever `shard_bytes` are together, and the rest on `flush`.

    The states in memory stay below four shards (or one sample, if that is larger): `reserve` waits. A sample that could
    not be written is a Failure in the report, with cause and traceback; nothing is only logged.
    """

    def __init__(self, store: HiddenStateStore, capture: Capture, shard_bytes: int) -> None:
        self._store, self._capture = store, capture
        self._shard_bytes, self._max_bytes = shard_bytes, 4 * shard_bytes
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="aerie-shard")
        self._room = threading.Condition()
        self._in_memory = 0
        self._fill: list[Captured] = []
        self._futures: list[Future[None]] = []
        self._written: dict[str, str] = {}
        self._failures: list[Failure] = []
        self._clock: float | None = None

    def start_clock(self) -> None:
        """Extraction begins now, unless it has begun; the shards record the time from here."""
        if self._clock is None:
            self._clock = time.monotonic()

    def reserve(self, size: int) -> int:
        """Takes `size` bytes of memory, waiting until earlier shards are on disk; returns `size`."""
        with self._room:
            full = lambda: self._in_memory > 0 and self._in_memory + size > self._max_bytes  # noqa: E731
            if full():
                self._submit()  # else nobody would free what is waiting to be packed
            self._room.wait_for(lambda: not full())
            self._in_memory += size
        return size

    def release(self, size: int) -> None:
        """Gives reserved bytes back."""
        with self._room:
            self._in_memory -= size
            self._room.notify_all()

    def add(self, sample: Captured) -> None:
        """Takes a sample, whose memory was reserved."""
        self._fill.append(sample)
        if sum(one.reserved for one in self._fill) >= self._shard_bytes:
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
        if not self._fill:
            return
        batch, self._fill = self._fill, []
        now = time.monotonic()
        began, self._clock = self._clock or now, now
        self._futures = [future for future in self._futures if not future.done()]
        self._futures.append(self._pool.submit(self._write, batch, now - began))

    def _write(self, batch: list[Captured], seconds: float) -> None:
        written: dict[str, str] = {}
        failures: list[Failure] = []
        try:
            ready = []
            for sample in batch:
                sample.wait()
                if bool(sample.finite.all()):
                    ready.append(StoredSample(sample.key, sample.token_ids, sample.states, sample.scales))
                else:
                    failures.append(Failure(sample.key, self._not_finite(sample.finite)))
            if ready:
                name = self._store.write_shard(self._capture, ready, seconds).name
                written = {sample.key: name for sample in ready}
        except BaseException as error:  # noqa: BLE001 - goes into the account, sample by sample
            counted = {failure.key for failure in failures}
            failures += [Failure.of(sample.key, error) for sample in batch if sample.key not in counted]
        with self._room:
            self._written |= written
            self._failures += failures
            self._in_memory -= sum(sample.reserved for sample in batch)
            self._room.notify_all()

    def _not_finite(self, finite: torch.Tensor) -> str:
        layers = [layer for layer, good in zip(self._capture.layer_ids, finite.tolist(), strict=True) if not good]
        return (
            f"its states at layer ids {layers} hold infinities or NaN "
            f"({self._capture.engine}, compute dtype {self._capture.compute_dtype}): try compute_dtype float32, "
            "or check the target's weights"
        )
