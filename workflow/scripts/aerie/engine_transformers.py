"""Extraction by transformers: for targets that vLLM cannot capture, and the reference it is checked against.

Hooks read the input of each wanted decoder layer, and for id n the output of the last one (transformers' own
`hidden_states[-1]` comes after the final norm). The output head is not run.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import AerieError
from .extraction import Failure, Job, Outcome, SampleSet
from .hidden_states import HiddenStateStore, encode
from .progress import Progress, loading

if TYPE_CHECKING:
    import torch

_BATCH_TOKENS = 4_096


def extract(job: Job, samples: SampleSet, store: HiddenStateStore) -> Outcome:
    """Writes the states of all samples into the store and accounts for each; see engine_vllm.extract."""
    samples = samples.longest_first()
    samples.check(job.max_tokens)
    outcome = Outcome()
    if not len(samples):
        return outcome
    unknown = sorted(set(job.engine_options) - {"batch_tokens", "max_model_len"})
    if unknown:
        raise AerieError(f"engine_options {', '.join(unknown)}: the transformers engine knows batch_tokens and max_model_len only.")

    import torch

    from .shard_writer import Captured, ShardWriter

    with loading("extract"):
        decoder, device = _load(job)
    writer = ShardWriter(store, job.capture(), job.target.hidden_size, int(samples.tokens[0]), job.shard_bytes)
    progress = Progress("extract", int(samples.tokens.sum()), "tokens")
    cause = "its states never arrived; this is a bug in Aerie"
    writer.start_clock()
    try:
        for batch in _batches(samples, int(job.engine_options.get("batch_tokens", _BATCH_TOKENS))):
            ids = [samples.ids_of(i) for i in batch]
            try:
                states = forward(decoder, ids, job.layer_ids, device)
            except AerieError:
                raise
            except Exception as error:  # noqa: BLE001 - goes into the account
                for i in batch:
                    writer.fail(Failure.of(samples.keys[i], error))
                states = []
            for i, token_ids, wide in zip(batch, ids, states, strict=False):  # no states after a failure
                slot = writer.reserve(len(token_ids))
                stored, scales = encode(wide, job.stored_dtype)
                slot.states.copy_(stored)
                if scales is not None and slot.scales is not None:
                    slot.scales.copy_(scales)
                slot.finite.copy_(torch.isfinite(wide).all(dim=2).all(dim=0))
                writer.add(Captured(samples.keys[i], token_ids, slot))
            outcome.add(*writer.report())
            progress.update(int(samples.tokens[batch].sum()), written=len(outcome.written))
            stopped = outcome.why_stop()
            if stopped:
                cause = stopped
                break
    finally:
        writer.close()
    outcome.add(*writer.report())
    outcome.close(samples.keys, cause)
    progress.done(written=len(outcome.written), failed=len(outcome.failed))
    return outcome


def forward(decoder: Any, sequences: "list[np.ndarray]", layer_ids: tuple[int, ...], device: "torch.device") -> "list[torch.Tensor]":
    """States [tokens, layers, hidden] of each sequence, in the model's dtype, from one padded batch.

    decoder: the inner model, with `.layers`; layer_ids ascending.
    """
    import torch

    lengths = [len(ids) for ids in sequences]
    input_ids = torch.zeros((len(sequences), max(lengths)), dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        mask[row, : len(ids)] = 1
    positions = torch.arange(max(lengths)).expand_as(input_ids)
    caught: dict[int, torch.Tensor] = {}

    def catch_input(layer_id: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[layer_id] = args[0] if args else kwargs["hidden_states"]

        return hook

    def catch_output(layer_id: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            caught[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = decoder.layers
    handles = [
        layers[-1].register_forward_hook(catch_output(layer_id))
        if layer_id == len(layers)
        else layers[layer_id].register_forward_pre_hook(catch_input(layer_id), with_kwargs=True)
        for layer_id in layer_ids
    ]
    try:
        with torch.inference_mode():
            # Padding comes last, so causal attention keeps it out of what is read below.
            decoder(input_ids=input_ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [torch.stack([caught[layer_id][row, :length].to(device) for layer_id in layer_ids], dim=1) for row, length in enumerate(lengths)]


def _load(job: Job) -> "tuple[Any, torch.device]":
    """The target's decoder, and the device that takes its input."""
    import torch
    from transformers import AutoModelForCausalLM

    wanted = job.device if job.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise AerieError("device cuda: torch sees no GPU here. Use device: cpu, or an environment and a machine with a GPU.")
    model = AutoModelForCausalLM.from_pretrained(
        job.target.folder,
        dtype=getattr(torch, job.compute_dtype),
        device_map="auto" if wanted == "cuda" and job.tensor_parallel > 1 else {"": wanted},
        trust_remote_code=job.target.trust_remote_code,
    ).eval()
    decoder = model.get_decoder()
    if len(getattr(decoder, "layers", ())) != job.target.num_layers:
        raise AerieError(
            f"target {job.target.name}: {type(decoder).__name__} has no list of {job.target.num_layers} decoder layers. "
            "Set the target's engine to vllm."
        )
    return decoder, decoder.get_input_embeddings().weight.device


def _batches(samples: SampleSet, batch_tokens: int) -> Iterator[list[int]]:
    """Positions in batches of at most `batch_tokens` padded tokens (or one sample); samples are sorted, longest first."""
    start = 0
    while start < len(samples):
        size = max(1, batch_tokens // int(samples.tokens[start]))
        yield list(range(start, min(start + size, len(samples))))
        start += size
