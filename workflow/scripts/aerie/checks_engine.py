"""Checks of the engine: whether the installed vLLM (or transformers) can run the target and hand out its states."""

import re
import tempfile
from pathlib import Path
from typing import Any

from . import vllm_classes
from .devices import has_driver
from .errors import describe
from .preflight import Finding, Subject
from .targets import where_to_get
from .vllm_options import check_names, device_type

_FILE_NAME = re.compile(r"[\w-]+\.(?:json|jinja|py|model|tiktoken|txt)\b")
_TO_TRANSFORMERS = "Set the target's engine to transformers, or install a vLLM that has it"


def engine_options(subject: Subject) -> Finding:
    """Whether vLLM has the options that the target sets, and extraction does not set them itself."""
    options = subject.options
    if subject.settings["engine"] == "transformers":
        options = {name: value for name, value in options.items() if name not in ("batch_tokens", "max_model_len")}
    check_names(options)
    if subject.settings["engine"] == "vllm":
        from .engine_vllm import check_options

        check_options(options)
    return Finding("ok", ", ".join(f"{name}: {value}" for name, value in sorted(subject.options.items())) or "none set")


def architecture(subject: Subject) -> Finding:
    """Whether vLLM and transformers know the target's architecture, and by which class."""
    name = subject.architecture
    known = _known_to_transformers(subject)
    if subject.settings["engine"] == "transformers":
        if not known:
            return Finding("failed", f"{name} is not known to the installed transformers", "Set the target's engine to vllm")
        if name not in vllm_classes.architectures():
            return Finding("warning", f"{name}: transformers extracts, but vLLM does not know it and cannot serve the draft")
        return Finding("ok", f"{name}: transformers has {known}")
    if name not in vllm_classes.architectures():
        return Finding("failed", f"{name} is not known to the installed vLLM", _TO_TRANSFORMERS)
    found = _inspected(subject)
    if found.problem:
        return Finding("failed", f"vLLM's class for {name} cannot be imported: {found.problem}", _TO_TRANSFORMERS)
    path = f", decoder layers at {found.path}" if found.path else ""
    return Finding("ok", f"{name}: vLLM's {found.name}{path}; transformers has {known or 'no such class'}")


def eagle3_interface(subject: Subject) -> Finding:
    """Whether vLLM's class has the interface by which hidden states are handed out and drafts served."""
    name = subject.architecture
    if name not in vllm_classes.architectures() or not _inspected(subject).eagle3:
        found = f"vLLM's {name} has no EAGLE-3 interface"
        if subject.settings["engine"] == "transformers":
            return Finding("warning", f"{found}: transformers extracts, but the draft cannot be served and evaluated with it")
        return Finding("failed", found, _TO_TRANSFORMERS)
    return Finding("ok", f"{_inspected(subject).name.rpartition('.')[2]} has it")


def decoder_layer(subject: Subject) -> Finding:
    """Whether the model calls its decoder layers as their forward wants it; the capture uses the model's own call."""
    if subject.settings["engine"] == "transformers":
        return Finding("ok", "transformers' own, read by hooks")
    found = _inspected(subject)
    if found.signature is None:
        return Finding("ok", f"{found.decoder or 'its class'} could not be read from vLLM's source; the twin runs it")
    if found.fits is False:
        return Finding(
            "failed",
            f"{found.decoder}.forward takes {found.signature} and is called with {found.call}: they do not fit",
            "Install the vLLM of the lock (make env), or one whose model file is whole",
        )
    call = f", called with {found.call}" if found.call else "; its call could not be read, the twin makes it"
    return Finding("ok", f"{found.decoder}.forward takes {found.signature}{call}")


def embedding_method(subject: Subject) -> Finding:
    """Whether vLLM's class embeds token ids by the method that this vLLM calls."""
    if subject.settings["engine"] == "transformers":
        return Finding("ok", "transformers' own")
    wanted, found = vllm_classes.expected_embedding(), _inspected(subject).embedding
    if found != wanted:
        has = f"has {found} instead" if found else "has no such method"
        return Finding(
            "failed",
            f"this vLLM calls {wanted}; {_inspected(subject).name} {has}",
            "The class was written for another version of vLLM: install that version, or update the class",
        )
    return Finding("ok", f"{wanted} of {_inspected(subject).name.rpartition('.')[2]}")


def quantisation(subject: Subject) -> Finding:
    """Whether vLLM can read the target's quantised weights on its device."""
    stored: dict[str, Any] = subject.raw.get("quantization_config") or subject.raw_text.get("quantization_config") or {}
    method = subject.options.get("quantization") or stored.get("quant_method")
    if not method:
        return Finding("ok", "none")
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
    from vllm.platforms import current_platform

    if method not in QUANTIZATION_METHODS:
        return Finding(
            "failed", f"quantisation {method!r} is not known to the installed vLLM", "Take a copy of the target that it can read"
        )
    if subject.settings["engine"] == "transformers":
        return Finding("ok", f"{method}, read by transformers")
    if subject.needs_gpus and not has_driver():
        return Finding("ok", f"{method}; whether the GPU can compute it is looked at where there is one")
    supported = list(getattr(current_platform, "supported_quantization", []) or [])
    if supported and method not in supported:
        return Finding(
            "failed", f"vLLM does not compute {method} on {device_type('auto')}", "Take a copy of the target that is not quantised"
        )
    if device_type("auto") == "cuda":
        wanted, capability = get_quantization_config(method).get_min_capability(), current_platform.get_device_capability()
        if capability is not None and capability.to_int() < wanted:
            return Finding(
                "failed",
                f"{method} needs a GPU of compute capability {wanted / 10}, this one has {capability.to_int() / 10}",
                "Take another GPU or another copy of the target",
            )
    return Finding("ok", str(method))


def serving_files(subject: Subject) -> Finding:
    """Whether vLLM finds what it reads beside the weights where it answers prompts: extraction and the twin feed token ids, for
    which it wants no tokenizer and no wrapper's processors."""
    from .generation import read_files

    if subject.architecture not in vllm_classes.architectures():
        return Finding("ok", f"not looked at: vLLM does not know {subject.architecture}")
    vllm_classes.keep_loaded(subject.architecture)
    elsewhere = subject.needs_gpus and not has_driver()
    runtime = subject.runtime | ({"device": "auto"} if elsewhere else {})
    try:
        read_files(subject.target, runtime, subject.settings["dtype"])
    except Exception as error:  # noqa: BLE001 - it is what the check found
        folder, said = subject.target.folder, describe(error)
        missing = [name for name in dict.fromkeys(_FILE_NAME.findall(str(error))) if not (folder / name).exists()]
        if not missing and elsewhere and not isinstance(error, OSError):
            return Finding("warning", f"vLLM without a GPU cannot read the target's files: {said}", "Look at them where the GPUs are")
        if missing:
            said = f"{', '.join(missing)} not found in {folder}, and vLLM reads it before it answers any prompt\n{said}"
        return Finding("failed", said, where_to_get(subject.target, missing))
    return Finding("ok", "vLLM reads the configuration, the tokenizer and what else it wants beside the weights")


def twin(subject: Subject) -> Finding:
    """Whether a small twin of the target, run through the capture, gives the states that transformers computes."""
    from .twin import run_twin

    gpu = device_type("auto") == "cuda" and subject.needs_gpus
    if subject.settings["engine"] == "vllm":
        vllm_classes.keep_loaded(subject.architecture)
    with tempfile.TemporaryDirectory(prefix="aerie-twin-") as folder:
        report = run_twin(subject.target, subject.settings["engine"], subject.options, "cuda" if gpu else "cpu", Path(folder))
    if report.problems:
        return Finding(
            "failed",
            str(report),
            "Do not extract with this engine: its states are wrong. Take out engine_options.compilation_config if it is set; install "
            "the versions of the lock; or set the target's engine to transformers",
        )
    if report.other_output and subject.settings["captures"]:
        return Finding(
            "failed",
            str(report),
            "Do not train a draft for this target: it would be taught another distribution than the target's. A draft that was made "
            "elsewhere (drafts.NAME.path) can be evaluated",
        )
    return Finding("ok", str(report))


def _inspected(subject: Subject) -> vllm_classes.ModelClass:
    names = subject.raw_text.get("architectures") or [None]
    return vllm_classes.inspect_class(subject.architecture, names[0] if "text_config" in subject.raw else None)


def _known_to_transformers(subject: Subject) -> str:
    """transformers' class for the target's language model ("" where it has none)."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name in (*(subject.raw_text.get("architectures") or []), subject.architecture):
        if hasattr(transformers, name):
            return str(name)
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(subject.target.text_config.model_type), ""))
