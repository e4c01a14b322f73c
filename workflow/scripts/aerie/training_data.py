"""Training batches: samples and their hidden states from the store, packed as speculators' model wants them.

How state and token pair up (speculators' convention). With g[t] the aux states at position t, x[t] the token, y[t] the last
layer's output and l[t] the loss mask, row t of a sample is (g[t], x[t+1], y[t+1], l[t+1]): from the states at t and the token
that followed, the draft predicts the token after that, x[t+2], whose distribution the target has in y[t+1]. At step k of
training-time test, row t is fed x[t+1+k] and predicts x[t+2+k].
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from torch.utils.data import DataLoader

from .errors import AerieError

if TYPE_CHECKING:
    from datasets import Dataset

Batch = dict[str, Any]


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
        self.columns = list(columns)

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


class DraftSamples(BaseDataset):
    """Samples with their states as speculators' batches want them, shifted; rows are dicts of tensors.

    Each: hidden_states [rows, aux layers * hidden], input_ids [rows], verifier_last_hidden_states [rows, hidden],
    loss_mask bool [rows], position_ids [rows], lengths [1]; rows = tokens - 1, tokens at most `max_length`.
    transfer: hands out the aux layers, ascending, and then the last layer's output.
    """

    def __init__(self, samples: "Dataset", transfer: HiddenStatesTransfer, max_length: int, ttt_steps: int, dtype: torch.dtype) -> None:
        self.samples = samples.with_format("numpy")
        self.transfer = transfer
        self.ttt_steps = ttt_steps
        super().__init__(max_length, dtype)

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
            raise AerieError(
                f"sample {key}: hidden states that are not finite at {len(rows)} of {len(states)} positions, the first at "
                f"{rows[0]}. Extract this capture again (compute_dtype float32 or bfloat16)."
            )
        mask = torch.as_tensor(np.asarray(sample["loss_mask"])).bool().clone()
        # At step k, targets are taken k rows further on, in a packed batch from the next sample; a sample's first
        # rows are therefore never targets of a later step. (A chat's first tokens are its template's anyway.)
        mask[: self.ttt_steps] = False
        end = self.max_len
        return {
            "hidden_states": states[:end, :-1].flatten(1),
            "input_ids": ids[:end],
            "verifier_last_hidden_states": states[:end, -1],
            "loss_mask": mask[:end],
        }

    def __getitem__(self, index: int) -> Batch:
        shifted: Batch = shift_batch(cast(Batch, super().__getitem__(int(index))))
        return shifted


def token_counts(samples: "Dataset") -> np.ndarray:
    """Length of each sample in tokens, int64 [samples]."""
    import pyarrow.compute as pc

    column = samples.with_format("arrow").select_columns("input_ids")[:]["input_ids"]
    return np.asarray(pc.list_value_length(column), dtype=np.int64)


class PackedCollate:
    """Packs samples into one row of exactly their tokens, where speculators pads to the full size.

    On a GPU the padding keeps compiled shapes the same; on a CPU it is only work.
    """

    def __init__(self, hidden_size: int, aux_layers: int, dtype: torch.dtype, pad_to: int | None) -> None:
        self.hidden_size, self.aux_layers, self.dtype, self.pad_to = hidden_size, aux_layers, dtype, pad_to

    def __call__(self, samples: Sequence[Batch]) -> Batch:
        size = self.pad_to or sum(int(sample["lengths"]) for sample in samples)
        batch: Batch = CollateFn(size, self.hidden_size, self.aux_layers, self.dtype)(samples)
        return batch


def batches(
    samples: DraftSamples, hidden_size: int, aux_layers: int, batch_tokens: int, seed: int, pad: bool, workers: int = 0
) -> DataLoader:
    """Packed batches of up to `batch_tokens` rows, the order set by seed and epoch (`batch_sampler.set_epoch`)."""
    sampler = MultipackDistributedBatchSamplerV2(batch_tokens, samples.approx_lengths, num_replicas=1, rank=0, seed=seed)
    return DataLoader(
        samples,
        batch_sampler=sampler,
        num_workers=workers,
        pin_memory=torch.cuda.is_available() and workers > 0,
        collate_fn=PackedCollate(hidden_size, aux_layers, samples.hidden_states_dtype, batch_tokens if pad else None),
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
    )


def batch_counts(loader: DataLoader, epochs: int) -> list[int]:
    """Number of batches in each epoch; packing differs a little from one to the next."""
    counts = []
    for epoch in range(epochs):
        order_of(loader).set_epoch(epoch)
        counts.append(len(order_of(loader)))
    return counts


def order_of(loader: DataLoader) -> MultipackDistributedBatchSamplerV2:
    """The sampler that decides what is packed together and in which order."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, MultipackDistributedBatchSamplerV2)
    return sampler


def model_inputs(batch: Batch, device: torch.device) -> Batch:
    """A batch as speculators' model takes it: tensors on the device, and the packed samples' lengths for CPU attention."""
    inputs: Batch = {name: value.to(device, non_blocking=True) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    if device.type == "cpu":
        inputs["document_lengths"] = torch.unique_consecutive(batch["document_ids"][0], return_counts=True)[1].tolist()
    return inputs


def rows_of(batch: Batch) -> int:
    """Rows of a batch that are not padding."""
    return int((batch["document_ids"] >= 0).sum())
