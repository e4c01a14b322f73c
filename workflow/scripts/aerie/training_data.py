"""Training batches: samples and their hidden states from the store, packed as speculators' model wants them.

How state and token pair up (speculators' convention). With g[t] the aux states at position t, x[t] the token, y[t] the last
layer's output and l[t] the loss mask, row t of a sample is (g[t], x[t+1], y[t+1], l[t+1]): from the states at t and the token
that followed, the draft predicts the token after that, x[t+2], whose distribution the target has in y[t+1]. At step k of
training-time test, row t is fed x[t+1+k] and predicts x[t+2+k].
"""

import argparse
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import BaseDataset, create_empty_sample
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

from .draft_attention import BLOCK
from .errors import AerieError

if TYPE_CHECKING:
    from datasets import Dataset

Batch = dict[str, Any]
_SORTED_STEPS = 50  # whose packs are shared out together
_COMPUTED = ("hidden_states", "verifier_last_hidden_states", "input_ids", "position_ids")  # what the GPU gets of a batch


class States(Protocol):
    """What is read of a hidden-states index (aerie.hidden_states.StatesIndex)."""

    @property
    def layer_ids(self) -> Sequence[int]: ...

    def __contains__(self, sample_key: str, /) -> bool: ...

    def states(self, sample_key: str, /) -> torch.Tensor: ...

    def token_ids(self, sample_key: str, /) -> Any: ...


class ShardTransfer(HiddenStatesTransfer):
    """Speculators' way to ask for hidden states, answered from Aerie's shards; nothing is written per sample.

    columns: which layers of a shard's tensor are handed out, and in which order.
    """

    def __init__(self, states: States, sample_keys: Sequence[str], columns: Sequence[int]) -> None:
        self.states = states
        self.sample_keys = list(sample_keys)
        self.columns: list[int] | slice = list(columns)
        if self.columns == list(range(columns[0], columns[0] + len(columns))):
            self.columns = slice(columns[0], columns[0] + len(columns))  # not a copy

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """hidden_states [tokens, layers, hidden] in the stored dtype and token_ids int64 [tokens]; None if there are none."""
        key = self.sample_keys[file_idx]
        if key not in self.states:
            return None
        tokens = torch.as_tensor(self.states.token_ids(key)).long()
        return {"hidden_states": self.states.states(key)[:, self.columns], "token_ids": tokens}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        raise AerieError("Aerie extracts hidden states before training; nothing is generated during it")


@HiddenStatesBackend.register("aerie")
class ShardBackend(HiddenStatesBackend):
    """Lets `speculators train --hidden-states-backend aerie` read a hidden-states folder as well."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--aerie-hidden-states", help="folder with index.parquet, results/hidden_states/…")
        parser.add_argument("--aerie-store", help="the object store")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Aerie launches no server."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ShardTransfer:
        """A transfer over all layers of the capture, for the rows of `data_path` in their order."""
        from datasets import load_from_disk

        from .hidden_states import StatesIndex

        states = StatesIndex(Path(args.aerie_hidden_states), Path(args.aerie_store))
        return ShardTransfer(states, load_from_disk(data_path)["sample_key"], range(len(states.layer_ids)))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        raise AerieError("Aerie extracts hidden states with its own engine, not through a vLLM server")


class BadSample(AerieError):
    """A sample that nothing can be learnt from; the message names it."""


class DraftSamples(BaseDataset):
    """Samples with their states as speculators' batches want them, shifted; rows are dicts of tensors.

    Each: hidden_states [rows, aux layers * hidden], input_ids [rows], verifier_last_hidden_states [rows, hidden],
    loss_mask bool [rows], position_ids [rows], lengths [1]; rows = tokens - 1, tokens at most `max_length`. With skip_bad,
    a sample whose states are not finite is a BadSample instead of raising it.
    transfer: hands out the aux layers, ascending, and then the last layer's output.
    """

    def __init__(
        self,
        samples: "Dataset",
        transfer: HiddenStatesTransfer,
        max_length: int,
        ttt_steps: int,
        dtype: torch.dtype,
        skip_bad: bool = False,
    ) -> None:
        self.samples = samples.with_format("numpy")
        self.transfer = transfer
        self.ttt_steps = ttt_steps
        self.skip_bad = skip_bad
        super().__init__(max_length, dtype)
        self.supervised = supervised_counts(samples, max_length, ttt_steps)

    def __len__(self) -> int:
        return len(self.samples)

    def _compute_approx_lengths(self) -> list[int]:
        return (token_counts(self.samples).clip(max=self.max_len) - 1).clip(min=0).tolist()

    def _get_raw_data(self, index: int) -> Batch:
        sample = self.samples[index]
        key, ids = sample["sample_key"], torch.as_tensor(np.asarray(sample["input_ids"])).long()
        found = self.transfer.get_cached(index)
        if found is None:
            raise AerieError(f"sample {key}: no hidden states in this capture. Run snakemake, which extracts what is missing.")
        states = found["hidden_states"]
        if len(states) != len(ids) or not torch.equal(found["token_ids"], ids):
            raise AerieError(
                f"sample {key}: its hidden states are those of other tokens ({len(states)} positions, the sample has {len(ids)}). "
                "Delete the capture's folder in results/hidden_states and run snakemake again."
            )
        smallest, largest = torch.aminmax(states.float() if states.dtype.itemsize == 1 else states)
        if not (torch.isfinite(smallest) and torch.isfinite(largest)):
            rows = torch.nonzero(~torch.isfinite(states.float()).flatten(1).all(1)).flatten().tolist()
            raise BadSample(
                f"sample {key}: hidden states that are not finite at {len(rows)} of {len(states)} positions, the first at "
                f"{rows[0]}. Extract this capture again (the target's dtype float32 or bfloat16), or set training.on_bad_sample: skip."
            )
        mask = torch.as_tensor(np.asarray(sample["loss_mask"])).bool().clone()
        mask[: self.ttt_steps] = False
        end = self.max_len
        return {
            "hidden_states": states[:end, :-1].flatten(1),
            "input_ids": ids[:end],
            "verifier_last_hidden_states": states[:end, -1],
            "loss_mask": mask[:end],
        }

    def __getitem__(self, index: int) -> Any:
        try:
            shifted: Batch = shift_batch(cast(Batch, super().__getitem__(int(index))))
        except BadSample as bad:
            if self.skip_bad:
                return bad
            raise
        return shifted


def token_counts(samples: "Dataset") -> np.ndarray:
    """Length of each sample in tokens, int64 [samples]."""
    import pyarrow.compute as pc

    column = samples.with_format("arrow").select_columns("input_ids")[:]["input_ids"]
    return np.asarray(pc.list_value_length(column), dtype=np.int64)


def supervised_counts(samples: "Dataset", max_length: int, ttt_steps: int) -> np.ndarray:
    """Supervised tokens of each sample that training judges, int64 [samples].

    Those after max_length are cut off. At step k, targets are taken k rows further on, in a packed batch from the next
    sample; a sample's first ttt_steps tokens are therefore never targets. (A chat's first tokens are its template's anyway.)
    """
    counts = []
    for batch in samples.with_format("arrow").select_columns("loss_mask").iter(1000):
        column = batch["loss_mask"].combine_chunks()
        mask = column.flatten().to_numpy(zero_copy_only=False)
        lengths = np.diff(column.offsets.to_numpy())
        place = np.arange(len(mask)) - np.repeat(lengths.cumsum() - lengths, lengths)
        judged = np.concatenate([[0], np.cumsum((mask != 0) & (place >= ttt_steps) & (place < max_length))])
        counts.append(np.diff(judged[np.concatenate([[0], lengths.cumsum()])]))
    return np.concatenate(counts).astype(np.int64) if counts else np.empty(0, dtype=np.int64)


class PackOrder:
    """Which samples are packed together, and which packs make a step: by seed and epoch alone, not by who computes them.

    A step has packs_per_step packs of up to `batch_tokens` rows (an epoch's last one perhaps fewer), and rank r of n takes
    its packs r, r + n, … Iterating gives this rank's packs from the step on that `start` named.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        supervised: np.ndarray,
        batch_tokens: int,
        packs_per_step: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.lengths, self.supervised = np.asarray(lengths), supervised
        self.packs_per_step, self.rank, self.ranks = packs_per_step, rank, ranks
        self._sampler = MultipackDistributedBatchSamplerV2(batch_tokens, lengths, num_replicas=1, rank=0, seed=seed)
        self._first_step = 0
        self.start(0)

    def start(self, epoch: int, step: int = 0) -> None:
        """The next iteration is of this epoch, from this step on."""
        self._sampler.set_epoch(epoch)
        self._packs = self._alike([pack.tolist() for pack in self._sampler])
        self._first_step = step

    def _alike(self, packs: list[list[int]]) -> list[list[int]]:
        """The packs in an order in which those of a step have about as many supervised tokens, by which the work on them differs.

        At the end of a step its ranks wait for each other. As transformers' group_by_length has it, the packs of so many
        steps are sorted; the steps then keep the random order of each one's first pack.
        """
        counts, size = [int(self.supervised[pack].sum()) for pack in packs], self.packs_per_step
        whole = len(packs) - len(packs) % size
        order: list[int] = []
        for first in range(0, whole, _SORTED_STEPS * size):
            places = sorted(range(first, min(first + _SORTED_STEPS * size, whole)), key=counts.__getitem__)
            order += chain.from_iterable(sorted((places[i : i + size] for i in range(0, len(places), size)), key=min))
        return [packs[place] for place in order] + packs[whole:]

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return -(-len(self._packs) // self.packs_per_step)

    def shares(self, step: int) -> list[float]:
        """Of each pack of a step that is this rank's: its share of all the step's supervised tokens."""
        counts = [int(self.supervised[pack].sum()) for pack in self._step(step)]
        return [count / max(1, sum(counts)) for count in counts[self.rank :: self.ranks]]

    def rows(self, step: int) -> int:
        """Rows of a step, all ranks' together."""
        return sum(int(self.lengths[pack].sum()) for pack in self._step(step))

    def _step(self, step: int) -> list[list[int]]:
        return self._packs[step * self.packs_per_step : (step + 1) * self.packs_per_step]

    def _own(self, step: int) -> list[list[int]]:
        return self._step(step)[self.rank :: self.ranks]

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._first_step, self.steps):
            yield from self._own(step)

    def __len__(self) -> int:
        return sum(len(self._own(step)) for step in range(self._first_step, self.steps))


class PackLoader:
    """An order's packs as batches, read and packed by threads ahead of the training.

    A batch is as speculators' CollateFn makes it: tensors [1, rows, …], document_ids int64 [1, rows] with -1 for padding; and
    `bad`, the messages of samples left out. pad_to: its rows; on a GPU that keeps compiled shapes the same, on a CPU
    padding is only work. Reading is copying out of memory maps, in which Python's lock is not held. threads: 0 does the work
    where a batch is asked for. For a CUDA device batches lie in pinned memory, from which it copies beside its work.
    """

    def __init__(
        self,
        samples: DraftSamples,
        order: PackOrder,
        hidden_size: int,
        aux_layers: int,
        pad_to: int | None = None,
        threads: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.samples, self.order, self.pad_to, self.threads = samples, order, pad_to, threads
        self._device = device if device is not None and device.type == "cuda" else None
        self._empty: Batch = create_empty_sample(hidden_size, aux_layers, samples.hidden_states_dtype)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        if not self.threads:
            yield from map(self._batch, self.order)
            return
        pool = ThreadPoolExecutor(self.threads, "packing", self._start)
        try:
            ahead: deque[Future[Batch]] = deque()
            for pack in self.order:
                ahead.append(pool.submit(self._batch, pack))
                if len(ahead) > self.threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _start(self) -> None:
        if self._device:
            torch.cuda.set_device(self._device)  # else pinned memory would be made known to the first

    def _batch(self, pack: list[int]) -> Batch:
        read = [self.samples[index] for index in pack]
        good = [sample for sample in read if not isinstance(sample, BadSample)] or [self._empty]
        lengths = torch.cat([sample["lengths"] for sample in good])
        size = self.pad_to or max(1, int(lengths.sum()))
        documents = torch.arange(len(good)).repeat_interleave(lengths)
        batch: Batch = {name: self._packed([sample[name] for sample in good], size) for name in self._empty if name != "lengths"}
        batch["document_ids"] = torch.nn.functional.pad(documents, (0, size - len(documents)), value=-1)[None]
        return batch | {"bad": [str(sample) for sample in read if isinstance(sample, BadSample)]}

    def _packed(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        dtype = self.samples.hidden_states_dtype if parts[0].is_floating_point() else parts[0].dtype
        packed = torch.empty((size, *parts[0].shape[1:]), dtype=dtype, pin_memory=self._device is not None)
        start = 0
        for part in parts:
            packed[start : start + len(part)] = part
            start += len(part)
        packed[start:] = 0
        return packed[None]


def padded_size(batch_tokens: int) -> int:
    """Rows of a batch on a GPU: whole blocks of flex attention."""
    return -(-batch_tokens // BLOCK) * BLOCK


def step_counts(order: PackOrder, epochs: int) -> list[int]:
    """Number of steps in each epoch; packing differs a little from one to the next."""
    counts = []
    for epoch in range(epochs):
        order.start(epoch)
        counts.append(order.steps)
    return counts


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches with their states on the device; on a GPU the next one is copied while the last is computed."""
    if device.type == "cpu":
        yield from batches
        return
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    upcoming: tuple[Batch, Any] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = batch | {name: batch[name].to(device, non_blocking=True) for name in _COMPUTED}
            arrived, upcoming = upcoming, (copied, stream.record_event())
        if arrived:
            yield _received(*arrived, current)
    if upcoming:
        yield _received(*upcoming, current)


def _received(batch: Batch, copied: Any, stream: Any) -> Batch:
    stream.wait_event(copied)
    for name in _COMPUTED:
        batch[name].record_stream(stream)  # its memory is not to be given to the next copy before it has been read
    return batch


def rows_of(batch: Batch) -> int:
    """Rows of a batch that are not padding."""
    return int((batch["document_ids"] >= 0).sum())
