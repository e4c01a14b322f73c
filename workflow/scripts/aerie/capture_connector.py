"""vLLM's side of extraction: a KV connector that takes hidden states out of the cache and writes shards.

vLLM's method `extract_hidden_states` leaves the states of every scheduled token in a cache of their own, paged like
the KV cache. Its stock connector collects them one engine step after a request has finished, a step that an offline
run never takes. This one collects them in the very step that computes a prompt's last token, before vLLM can reuse the
blocks: nothing is left over when `generate` returns, and no blocks are held back.

The worker of tensor-parallel rank 0 writes; `CaptureWorker` adds the methods by which the engine asks for the account.
Written against vLLM 0.26 (CUDA) and 0.32 (CPU).
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from .errors import AerieError
from .extraction import Failure
from .hidden_states import Capture, HiddenStateStore, encode
from .keys import sample_key
from .shard_writer import Captured, ShardWriter
from .worker_end import end_when_useless

end_when_useless()  # vLLM's workers import this module before they load the target

_CHUNK_BYTES = 64 * 2**20  # of states gathered on the device at a time: bounds what long samples take there


@dataclass(frozen=True)
class Prompt:
    """A prompt whose last token is computed in this step, and the blocks of the states' cache that hold it."""

    request: str
    token_ids: np.ndarray
    blocks: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, once a step. requests: all of which this step computes prompt tokens."""

    requests: list[str] = field(default_factory=list)
    finished: list[Prompt] = field(default_factory=list)


class CaptureConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector; kv_connector_extra_config: {store, capture (as a dict), max_tokens of a prompt, shard_bytes}."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group = _states_group(kv_cache_config)
        self._block_size = int(kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._capture = Capture(**options["capture"] | {"layer_ids": tuple(options["capture"]["layer_ids"])})
        self._store = HiddenStateStore(Path(options["store"]), self._capture.key)
        self._max_tokens, self._shard_bytes = int(options["max_tokens"]), int(options["shard_bytes"])
        # The scheduler's side: prompts not yet computed to the end, and their blocks.
        self._pending: dict[str, Prompt] = {}
        # The worker's side.
        self._writer: ShardWriter | None = None
        self._cache: torch.Tensor | None = None
        self._layer = ""
        self._layer_ran = False
        self._lost: set[str] = set()
        self._taking = 0.0  # seconds of the engine's own thread
        self._side_stream: torch.cuda.Stream | None = None

    # ---- scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return None

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Follows each prompt's blocks and names the prompts that this step completes."""
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            ids = np.asarray(new.prompt_token_ids, dtype=np.int32)
            self._pending[new.req_id] = Prompt(new.req_id, ids, list(new.block_ids[self._group]))
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for request, blocks, done in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            prompt = self._pending.get(request)
            if prompt is None:  # complete: the token it generates is of no interest
                continue
            added = list(blocks[self._group]) if blocks is not None else []
            # A prompt that was pushed out starts again in other blocks.
            known = [] if request in cached.resumed_req_ids else prompt.blocks
            self._pending[request] = Prompt(request, prompt.token_ids, known + added)
            computed[request] = done
        meta = StepMetadata()
        for request, done in computed.items():
            meta.requests.append(request)
            prompt = self._pending[request]
            if done + scheduler_output.num_scheduled_tokens[request] >= len(prompt.token_ids):
                meta.finished.append(self._pending.pop(request))
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._pending.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, [])

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """All states of a token together; the layout's name depends on vLLM's version."""
        return ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Finds the cache of the states and views it as [blocks, block size, layers, hidden]."""
        (self._layer,) = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        cache = kv_caches[self._layer]
        # vLLM 0.26 has [blocks, block size, layers, hidden], 0.32 [blocks, layers, block size, hidden].
        wanted = self._block_size, len(self._capture.layer_ids)
        if cache.dim() == 4 and tuple(cache.shape[1:3]) == wanted[::-1]:
            cache = cache.transpose(1, 2)
        if cache.dim() != 4 or tuple(cache.shape[1:3]) != wanted or wanted[0] == wanted[1]:
            raise AerieError(
                f"vLLM's cache of hidden states has shape {tuple(kv_caches[self._layer].shape)}; expected blocks of {wanted[0]} tokens "
                f"with {wanted[1]} layers (and the two numbers to differ). Set another engine_options.block_size; "
                "if that does not help, this vLLM is not supported."
            )
        self._cache = cache
        if get_tensor_model_parallel_rank() == 0:
            self._writer = ShardWriter(self._store, self._capture, cache.shape[3], self._max_tokens, self._shard_bytes, cache.is_cuda)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """vLLM calls this when a layer has written its cache."""
        if layer_name == self._layer:
            self._layer_ran = True

    def wait_for_save(self) -> None:
        """Called at the end of a step: takes the states of the prompts that it completed."""
        ran, self._layer_ran = self._layer_ran, False
        if self._writer is None or not self.has_connector_metadata():
            return
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        if not ran:
            # vLLM leaves the states out of a whole step if one request comes within a token of max_model_len; the
            # blocks then hold what an earlier request left there.
            self._lost.update(meta.requests)
        began = time.monotonic()
        for prompt in meta.finished:
            key = sample_key(prompt.token_ids)
            if prompt.request in self._lost:
                self._lost.discard(prompt.request)
                self._writer.fail(Failure(key, "vLLM did not store the hidden states of this prompt; raise max_model_len by 8 or more"))
                continue
            try:
                self._take(key, prompt)
            except Exception as error:  # noqa: BLE001 - goes into the account
                self._writer.fail(Failure.of(key, error))
        self._taking += time.monotonic() - began

    def _take(self, key: str, prompt: Prompt) -> None:
        """Copies a prompt's states to the host, asynchronously from a GPU, and hands them to the writer."""
        assert self._writer is not None and self._cache is not None
        cache, tokens = self._cache, len(prompt.token_ids)
        blocks = torch.tensor(prompt.blocks[: -(-tokens // self._block_size)], dtype=torch.long)
        if len(blocks) * self._block_size < tokens:
            raise AerieError(f"{len(blocks)} blocks of {self._block_size} tokens cannot hold a prompt of {tokens}")
        layers, hidden_size = cache.shape[2:]
        slot = self._writer.reserve(tokens)
        try:
            if cache.is_cuda:
                blocks = blocks.pin_memory().to(cache.device, non_blocking=True)
            step = max(1, _CHUNK_BYTES // (self._block_size * layers * hidden_size * cache.element_size()))
            finite = torch.ones(layers, dtype=torch.bool, device=cache.device)
            for start in range(0, len(blocks), step):
                first = start * self._block_size
                chunk = cache[blocks[start : start + step]].reshape(-1, layers, hidden_size)[: tokens - first]
                finite &= torch.isfinite(chunk).all(dim=2).all(dim=0)
                states, scales = encode(chunk, self._capture.stored_dtype)
                self._copy(slot.states[first : first + len(states)], states)
                if scales is not None and slot.scales is not None:
                    self._copy(slot.scales[first : first + len(scales)], scales)
            self._copy(slot.finite, finite)
            self._writer.add(Captured(key, prompt.token_ids, slot, self._copy_done()))
        except BaseException:
            if self._side_stream is not None:
                self._side_stream.synchronize()  # the slot's memory will be used again
            raise

    def _copy(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copies to the host; from a GPU on a stream of its own, beside the next step's forward."""
        if not device.is_cuda:
            host.copy_(device)
            return
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(device.device)
        self._side_stream.wait_stream(torch.cuda.current_stream(device.device))
        with torch.cuda.stream(self._side_stream):
            host.copy_(device, non_blocking=True)
        device.record_stream(self._side_stream)

    def _copy_done(self) -> Any:
        """A function that waits for the copies issued so far."""
        if self._side_stream is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self._side_stream)
        return event.synchronize

    def start(self) -> None:
        """Prompts are handed over from now on: what vLLM calls of a connector comes after the first step's work."""
        if self._writer is not None:
            self._writer.start_clock()

    def report(self, flush: bool) -> dict[str, Any] | None:
        """{written, failures} since the last report, {seconds} in all; None on the ranks that write nothing.

        flush: first wait until every state taken is on disk or has failed.
        """
        if self._writer is None:
            return None
        if flush:
            self._writer.flush()
        written, failures = self._writer.report()
        seconds = self._writer.seconds | {"taking": self._taking}
        return {"written": written, "failures": [vars(failure) for failure in failures], "seconds": seconds}

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()


class CaptureWorker:
    """Methods that vLLM adds to its workers (worker_extension_cls)."""

    def aerie_start(self) -> None:
        """See CaptureConnector.start."""
        _connector().start()

    def aerie_report(self, flush: bool) -> dict[str, Any] | None:
        """The account of this worker's connector, see CaptureConnector.report."""
        return _connector().report(flush)


def _connector() -> CaptureConnector:
    """This worker's."""
    connector = get_kv_transfer_group()
    assert isinstance(connector, CaptureConnector)
    return connector


def _states_group(kv_cache_config: Any) -> int:
    """Index of the KV cache group that holds the states."""
    groups = kv_cache_config.kv_cache_groups
    found = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not found and len(groups) == 1:
        return 0
    if len(found) != 1:
        raise AerieError(
            f"vLLM put the hidden states into {len(found)} of {len(groups)} cache groups; expected one. This vLLM is not supported."
        )
    return found[0]
