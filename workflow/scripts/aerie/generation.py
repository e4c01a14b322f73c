"""Text generation by vLLM: the one place where regeneration and evaluation start an engine and read its counters."""

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from . import nodes
from .errors import AerieError
from .progress import Progress
from .vllm_options import common_options, device_type
from .worker_end import end_when_useless

if TYPE_CHECKING:
    from .targets import Target


end_when_useless()  # vLLM's workers import this module for Reseeding


@dataclass(frozen=True)
class Answer:
    """What the target generated: token ids (the end token included, where there is one), their text without special
    tokens, and why it ended: "stop" (an end token) or "length" (cut off)."""

    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class SpeculationCounters:
    """vLLM's counters of speculative decoding since the engine's start.

    drafts: verified drafts, one for each request and step; draft_tokens: tokens they held; accepted_tokens: how many of
    these were accepted; accepted_per_position: of the accepted ones, how many at each draft position.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    def since(self, earlier: "SpeculationCounters") -> "SpeculationCounters":
        """What was counted after `earlier`."""
        return SpeculationCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - before for now, before in zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)),
        )


@dataclass(frozen=True)
class ServedAnswer:
    """An answer with what serving it took.

    first_token_seconds: from the request to its first token; seconds_per_token: between the tokens after it, on average.
    accepted: tokens accepted of each verified draft, in order, counted as vLLM does: also where the answer ended before them.
    steps: of the target after the prompt's own, counted where many have no draft; None elsewhere.
    """

    token_ids: list[int]
    finish_reason: str
    first_token_seconds: float
    seconds_per_token: float
    accepted: list[int]
    steps: int | None = None


class Reseeding:
    """Mixed into vLLM's workers (`worker_extension_cls`), so that sampling can start from a given seed.

    vLLM's own seed for each request fails on CPU ("CPU Generator does not use offset") and slows large batches on GPU.
    """

    def reseed(self, seed: int) -> None:
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        _mend_cpu_sampling()


def _mend_cpu_sampling() -> None:
    """vLLM's CPU kernel that gives each drafted token its request's temperature writes into a copy, and only whole numbers: drafts
    were judged by whatever the memory held (0.27 to 0.32)."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":
        return
    from vllm.v1.sample import rejection_sampler

    def expand(values: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        """values [requests], each repeated for its request's tokens, which end at `ends` [requests] of all `count`."""
        values = values.masked_fill(values == replace_from, replace_to)
        return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)).long(), output_size=count)

    rejection_sampler.expand_batch_to_tokens = expand


class Engine:
    """A vLLM engine that answers prompts given as token ids."""

    def __init__(self, llm: Any, end_tokens: Sequence[int], counts_accepted: bool = False, skips_drafts: bool = False) -> None:
        """counts_accepted: what is accepted is counted in the answers as they come, since this vLLM does not say it by request.
        skips_drafts: it has steps without a draft, of which vLLM says nothing: steps are counted as their tokens come."""
        self._llm = llm
        self._end_tokens = list(end_tokens)
        self._counts_accepted, self._skips_drafts = counts_accepted, skips_drafts
        self._numbers = itertools.count()

    def converse(
        self,
        prompts: Mapping[int, Sequence[int]],
        reply: Callable[[int, Answer], Sequence[int] | None],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> None:
        """Holds conversations: `reply` is given a conversation's number and the answer, and gives its next prompt, or None
        at its end. No conversation waits for the turns of another. Greedy at temperature 0; with a seed, the same call
        gives the same answers."""
        from vllm import SamplingParams

        if seed is not None:
            self._llm.collective_rpc("reseed", args=(seed,))
        # Stop tokens are given, and the model's own sampling defaults (top_k, …) are not used: the settings decide alone.
        sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_new_tokens, stop_token_ids=self._end_tokens)
        engine, numbers = self._llm.llm_engine, {}
        asked = dict(prompts)
        while asked or engine.has_unfinished_requests():
            for number, ids in asked.items():
                [request] = self._llm.enqueue([{"prompt_token_ids": list(ids)}], sampling, use_tqdm=False)
                numbers[request.partition("-")[0]] = number  # what vLLM adds to a request's name is not in its output
            asked = {}
            for output in nodes.step(self._llm):
                if output.finished:
                    number = numbers.pop(output.request_id)
                    following = reply(number, _answer_of(output, number))
                    if following is not None:
                        asked[number] = following
        if numbers:
            raise AerieError(f"vLLM ended without an answer to {len(numbers)} of its prompts")

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        batch_size: int,
        temperature: float = 0.0,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> list[ServedAnswer]:
        """Answers in the order of the prompts, never more than batch_size of them in flight. progress: counts the answers.

        Needs an engine with statistics on (disable_log_stats=False). Tokens only: no text is made of them.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if temperature:
            self._llm.collective_rpc("reseed", args=(seed,))
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=max_new_tokens,
            stop_token_ids=self._end_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self._counts_accepted or self._skips_drafts else RequestOutputKind.FINAL_ONLY,
        )
        engine = self._llm.llm_engine
        waiting = iter(enumerate(prompts))
        in_flight: dict[str, int] = {}
        came: dict[str, list[list[int]]] = {}  # the tokens of each step
        found: dict[int, ServedAnswer] = {}
        counts = StepCounts() if self._counts_accepted else None

        def send(count: int) -> None:
            for number, ids in itertools.islice(waiting, count):
                name = f"served-{next(self._numbers)}"
                in_flight[name] = number
                engine.add_request(name, {"prompt_token_ids": list(ids)}, sampling)

        send(batch_size)
        while engine.has_unfinished_requests():
            outputs = nodes.step(self._llm)
            for output in outputs:
                came.setdefault(output.request_id, []).append(list(output.outputs[0].token_ids))
            finished = [output for output in outputs if output.finished]
            accepted = counts.step(outputs) if counts else {}
            for output in finished:
                number = in_flight.pop(output.request_id)
                answer = _served(output, number, came.pop(output.request_id), accepted.get(output.request_id), self._skips_drafts)
                found[number] = answer
            send(len(finished))
            if progress and finished:
                progress.update(len(finished))
        if in_flight:
            raise AerieError(f"vLLM ended without an answer to {len(in_flight)} of its prompts")
        return [found[number] for number in range(len(prompts))]

    def counters(self) -> SpeculationCounters:
        """vLLM's counters now; AerieError for an engine that does not speculate or was started without statistics."""
        return read_counters(self._llm.get_metrics())

    def close(self) -> None:
        """Ends the engine's processes, so that its memory can be used by others."""
        nodes.shut_down(self._llm)


def _answer_of(output: Any, number: int) -> Answer:
    made = _finished(output, number)
    return Answer(list(made.token_ids), made.text, made.finish_reason)


def _finished(output: Any, number: int) -> Any:
    """The one sequence of a request's output; AerieError where vLLM ended it otherwise than a model does."""
    made = output.outputs[0]
    if made.finish_reason not in ("stop", "length"):
        raise AerieError(f"vLLM ended prompt {number} with {made.finish_reason!r}, expected 'stop' or 'length'")
    return made


def _served(output: Any, number: int, came: list[list[int]], accepted: list[int] | None, skips_drafts: bool) -> ServedAnswer:
    """came: tokens by step; accepted: by draft, where vLLM does not count it by request."""
    made, times = _finished(output, number), output.metrics
    counted = getattr(made, "spec_decode_metrics", None)
    token_ids = [token for step in came for token in step]
    return ServedAnswer(
        token_ids=token_ids,
        finish_reason=made.finish_reason,
        first_token_seconds=times.first_token_latency,
        seconds_per_token=(times.last_token_ts - times.first_token_ts) / max(1, len(token_ids) - 1),
        accepted=list(counted.per_step_accepted) if counted else accepted or [],
        steps=max(0, sum(map(bool, came)) - 1) if skips_drafts else None,  # the first tokens come from the prompt alone
    )


class StepCounts:
    """Accepted tokens by request, from the tokens that come at each step of the engine and vLLM's counters.

    A step gives one token more than it accepts; only the one that ends an answer shows fewer, those up to the end. So what
    the counters have beyond all that was seen was accepted in the steps that ended answers just now.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, list[int]] = {}  # of each request in flight, by draft
        self._seen = Counter(_accepted_by_position())

    def step(self, outputs: Sequence[Any]) -> dict[str, list[int]]:
        """Takes one step's outputs, each with its new tokens; returns {request: tokens accepted of each draft} of those that ended."""
        ending = []  # the last steps of those that ended
        for output in outputs:
            tokens = len(output.outputs[0].token_ids)
            if output.request_id not in self._accepted:
                self._accepted[output.request_id] = []  # the first tokens come from the prompt alone
            elif tokens:
                steps = self._accepted[output.request_id]
                steps.append(tokens - 1)
                self._seen.update(range(tokens - 1))
                if output.finished:
                    ending.append(steps)
        if ending:
            now = _accepted_by_position()
            cut = [now[position] - self._seen[position] for position in range(len(now))]
            ending.sort(key=lambda steps: steps[-1])
            for steps, accepted in zip(ending, with_cut([steps[-1] for steps in ending], cut), strict=True):
                steps[-1] = accepted
            self._seen = Counter(now)
        return {output.request_id: self._accepted.pop(output.request_id) for output in outputs if output.finished}


def with_cut(shown: Sequence[int], cut: Sequence[int]) -> list[int]:
    """Accepted tokens of steps that show `shown` of them (ascending) and whose ends were cut: `cut` tokens at each position.

    Which step a token was cut from is known only where one answer ended in a step; else any way that adds up is as good.
    """
    reached = [sum(count > position for count in shown) + more for position, more in enumerate(cut)]
    return [sum(len(shown) - number <= count for count in reached) for number in range(len(shown))]


def _accepted_by_position() -> dict[int, int]:
    """vLLM's counter of accepted tokens by draft position, read without the rest of its metrics (which takes milliseconds)."""
    from prometheus_client import REGISTRY

    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    found: dict[int, int] = {}
    for metric in REGISTRY.restricted_registry([name]).collect():
        for sample in metric.samples:
            if sample.name == name:
                position = int(sample.labels["position"])
                found[position] = found.get(position, 0) + int(sample.value)
    return found


def read_counters(metrics: Sequence[Any]) -> SpeculationCounters:
    """The counters among vLLM's metrics, summed over engines."""
    sums = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    positions: list[int] = []
    found = set()
    for metric in metrics:
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in sums:
            sums[name] += int(metric.value)
            found.add(name)
        elif name == "num_accepted_tokens_per_pos":
            values = [int(value) for value in metric.values]
            positions = [a + b for a, b in zip(positions, values, strict=True)] if positions else values
            found.add(name)
    missing = sorted({*sums, "num_accepted_tokens_per_pos"} - found)
    if missing:
        raise AerieError(f"vLLM's metrics have no spec_decode_{', spec_decode_'.join(missing)}: is speculation on in this engine?")
    return SpeculationCounters(sums["num_drafts"], sums["num_draft_tokens"], sums["num_accepted_tokens"], tuple(positions))


def start(
    target: "Target",
    runtime: dict[str, Any],
    *,
    end_tokens: Sequence[int],
    max_length: int,
    dtype: str = "auto",
    seed: int = 0,
    speculation: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """Starts vLLM for the target and returns the engine.

    runtime: a recipe's device ("auto", "cpu" or "cuda"), tensor_parallel, nodes and engine_options. max_length: tokens of
    prompt and answer together. speculation: vLLM's speculative_config. options: further arguments of vllm.LLM; the user's
    engine_options come last and win.
    """
    arguments = common_options(target, runtime)
    arguments = {
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_length,
        "worker_extension_cls": f"{Reseeding.__module__}.{Reseeding.__name__}",
        **options,
        **arguments,
    }
    counts_accepted = skips_drafts = False
    if speculation:
        # The counters exist only with statistics on.
        arguments |= {"speculative_config": speculation, "disable_log_stats": False}
        counts_accepted, skips_drafts = not _counts_by_request(), speculation["method"] == "ngram"
        if not counts_accepted:
            arguments["per_request_spec_decode_metrics"] = "detailed"
    return Engine(nodes.load(arguments), end_tokens, counts_accepted, skips_drafts)


def read_files(target: "Target", runtime: dict[str, Any], dtype: str) -> None:
    """Has vLLM read what `start` has it read of a target before the weights: configuration, tokenizer, processors of a wrapper.

    Raises what vLLM raises. Quantisation is left out, since it is refused where there is no GPU.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.tokenizers import cached_tokenizer_from_config

    arguments = {"dtype": dtype, "hf_overrides": _unquantised, **common_options(target, runtime)}
    arguments.pop("quantization", None)
    config = EngineArgs(**arguments).create_model_config()
    cached_tokenizer_from_config(config)
    if hasattr(type(config), "supports_multimodal_inputs"):
        shows_images = config.supports_multimodal_inputs
    else:  # older releases
        shows_images = MULTIMODAL_REGISTRY.supports_multimodal_inputs(config)
    if shows_images:
        MULTIMODAL_REGISTRY.create_processor(config)


def _unquantised(config: Any) -> Any:
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
        vars(part).pop("compression_config", None)
    return config


def _counts_by_request() -> bool:
    """Whether this vLLM says of each request what was accepted of its drafts."""
    from vllm.engine.arg_utils import EngineArgs

    return "per_request_spec_decode_metrics" in {field.name for field in fields(EngineArgs)}


def device_name(tensor_parallel: int) -> str:
    """What speeds were measured on: "2 x NVIDIA H200", or the CPU's model, the cores this process may use and its threads."""
    if device_type("auto") == "cuda":
        from vllm.platforms import current_platform

        return f"{tensor_parallel} x {current_platform.get_device_name()}"
    model = "CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()  # of the job, as Snakemake grants them
    return f"{threads} thread{'s' * (threads > 1)} on {cores} cores, {model}"


def length_limit(target: "Target", runtime: dict[str, Any]) -> int:
    """The most tokens of prompt and answer together: the model's positions, or engine_options' max_model_len if smaller."""
    limits = [target.max_positions, (runtime.get("engine_options") or {}).get("max_model_len")]
    return min((int(limit) for limit in limits if limit), default=2**31 - 1)
