"""Extraction by vLLM: prefill only, through its own forward, with our connector taking the states.

The engine runs in this process (tensor-parallel workers are its children): what goes wrong there is raised here.
"""

import os
import time
import traceback
from typing import TYPE_CHECKING, Any

from . import nodes
from .errors import AerieError, describe
from .extraction import Failure, Job, Outcome, SampleSet
from .hidden_states import HiddenStateStore
from .progress import Progress, loading
from .vllm_options import common_options, rope_by_length, served_length

if TYPE_CHECKING:
    from vllm import LLM

# vLLM leaves the states out of every step in which a request comes near max_model_len (one draft token, and one token
# that an asynchronous scheduler may run ahead).
_SPARE_TOKENS = 8
_STEPS_AHEAD = 3  # of which one runs and one is scheduled
_ACCOUNT_SECONDS = 2.0
# What the capture rests on; a user's engine_options may not change it.
_FIXED = (
    "model", "dtype", "speculative_config", "kv_transfer_config", "worker_extension_cls", "enable_prefix_caching",
    "data_parallel_size",
)  # fmt: skip


def extract(job: Job, samples: SampleSet, store: HiddenStateStore) -> Outcome:
    """Writes the states of all samples into the store and accounts for each.

    AerieError before the model is loaded where a sample or an option cannot work.
    """
    samples = samples.longest_first()
    samples.check(job.max_tokens)
    outcome = Outcome()
    if not len(samples):
        return outcome
    with loading("extract"):
        llm = load(job, int(samples.tokens[0]), store)
    try:
        run(llm, samples, outcome)
    finally:
        shut_down(llm)
    return outcome


def load(job: Job, longest: int, store: HiddenStateStore) -> "LLM":
    """A vLLM engine that captures; longest: of the samples, in tokens."""
    check_options(job.engine_options)
    # Room beyond the model's own limit is only for the token that vLLM generates and we ignore.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    # A step that waits for the disk is not stuck; vLLM gives up after five minutes, sooner than some file servers come back.
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1200")
    runtime = {
        "device": job.device,
        "tensor_parallel": job.tensor_parallel,
        "nodes": job.nodes,
        "engine_options": job.engine_options,
    }
    options = common_options(job.target, runtime) | {"max_model_len": _max_model_len(job, longest), "skip_tokenizer_init": True}
    capture = vars(job.capture()) | {"layer_ids": list(job.layer_ids)}
    fixed: dict[str, Any] = dict(
        dtype=job.compute_dtype,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(job.layer_ids)}},
        },
        kv_transfer_config={
            "kv_connector": "CaptureConnector",
            "kv_connector_module_path": "aerie.capture_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "store": str(store.root.absolute()),
                "capture": capture,
                "max_tokens": longest,
                "shard_bytes": job.shard_bytes,
            },
        },
        worker_extension_cls="aerie.capture_connector.CaptureWorker",
        enable_prefix_caching=False,  # a cached prefix has no states
        enforce_eager=True,  # prefills gain nothing from graphs, and compiling takes minutes
        disable_log_stats=True,
    )
    llm = nodes.load(options | fixed)
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < longest:
        raise AerieError(  # vLLM would wait for ever
            f"engine_options.max_num_batched_tokens {scheduler.max_num_batched_tokens}: this target's prompts are not split here, "
            f"and the longest sample has {longest} tokens. Raise it or leave it out."
        )
    return llm


def check_options(engine_options: dict[str, Any]) -> None:
    """AerieError for an option that extraction sets itself."""
    taken = sorted(set(engine_options) & set(_FIXED))
    if taken:
        raise AerieError(f"engine_options {', '.join(taken)}: extraction sets these itself. Take them out of the target's engine_options.")
    if engine_options.get("pipeline_parallel_size", 1) != 1:
        raise AerieError(
            "engine_options pipeline_parallel_size: vLLM's pipeline stages do not hand on the hidden states that earlier stages captured. "
            "Use the target's tensor_parallel, over several nodes if need be."
        )


def _max_model_len(job: Job, longest: int) -> int:
    """As served_length; AerieError where that has no room to spare, and more would change the states."""
    needed, (kind, original) = longest + _SPARE_TOKENS, rope_by_length(job.target)
    if kind and job.max_tokens <= original < needed:
        raise AerieError(
            f"engine_options.max_model_len {job.max_tokens:,}: the longest sample has {longest:,} tokens, extraction needs {_SPARE_TOKENS} "
            f"more, and with more than {original:,} this target's rotary embedding ({kind}) is another. "
            f"Set the dataset's max_length to {job.max_tokens - _SPARE_TOKENS:,} or less."
        )
    return max(needed, served_length(job.target, needed, job.max_tokens))


def run(llm: "LLM", samples: SampleSet, outcome: Outcome) -> None:
    """Feeds the samples, a few steps ahead; stops soon after there is a reason to (Outcome.why_stop).

    Were all handed over at once, or in batches, the device would stand still meanwhile.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    ahead = _STEPS_AHEAD * engine.vllm_config.scheduler_config.max_num_batched_tokens
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    progress = Progress("extract", int(samples.tokens.sum()), "tokens")
    cause, trace = "vLLM finished this prompt and its states never arrived; this is a bug in Aerie or in this version of vLLM", ""
    position, in_flight, reported = 0, 0, time.monotonic()
    try:
        llm.collective_rpc("aerie_start")
        while position < len(samples) or engine.has_unfinished_requests():
            while position < len(samples) and in_flight < ahead:
                llm.enqueue([{"prompt_token_ids": samples.ids_of(position).tolist()}], params, use_tqdm=False)
                in_flight += int(samples.tokens[position])
                position += 1
            done = sum(len(output.prompt_token_ids or ()) for output in nodes.step(llm) if output.finished)
            in_flight -= done
            progress.update(done, written=len(outcome.written))
            if time.monotonic() - reported < _ACCOUNT_SECONDS:
                continue
            _account(llm, outcome, flush=False)
            reported = time.monotonic()
            stopped = outcome.why_stop()
            if stopped:
                cause = stopped
                break
    except AerieError:
        raise
    except Exception as error:  # noqa: BLE001 - goes into the account
        cause, trace = f"the engine failed: {describe(error)}", traceback.format_exc()
    # After a failed step one of several workers may wait for another for ever; what there is is written when they are shut down.
    if not trace or engine.vllm_config.parallel_config.world_size == 1:
        try:
            _account(llm, outcome, flush=True)
        except Exception as error:  # noqa: BLE001 - goes into the account
            if not trace:  # else the engine is broken, and that it does not answer says no more
                cause, trace = f"the engine failed: {describe(error)}", traceback.format_exc()
    outcome.close(samples.keys, cause, trace)
    waited = f"{outcome.seconds.get('waiting', 0):.1f} s"
    progress.done(written=len(outcome.written), failed=len(outcome.failed), waited_for_disk=waited)


def _account(llm: "LLM", outcome: Outcome, flush: bool) -> None:
    """Adds what the writing worker reports; with `flush`, after everything it holds is on disk."""
    from vllm import envs

    answers = llm.collective_rpc("aerie_report", timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, args=(flush,))
    reports = [report for report in answers if report is not None]
    if len(reports) != 1:
        raise AerieError(f"{len(reports)} workers wrote hidden states; expected one, of tensor-parallel rank 0")
    outcome.add(reports[0]["written"], [Failure(**failure) for failure in reports[0]["failures"]])
    outcome.seconds = reports[0]["seconds"]


def shut_down(llm: "LLM") -> None:
    """Ends workers and threads, so that the process can end or load another target."""
    from vllm.distributed import cleanup_dist_env_and_memory

    nodes.shut_down(llm)
    cleanup_dist_env_and_memory()
