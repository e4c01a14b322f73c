"""The twin: the target's own configuration shrunk to a few small layers, with random weights, through the real capture.

The same kinds of layers, attention, rotary embedding and routing; the same engine, connector and store as extraction.
What it stores is compared with transformers' own forward in float32, and where transformers lacks the architecture
(always, besides) the last state, through the engine's own norm and head, must give the engine's own logits.
"""

import copy
import inspect
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import AerieError, describe
from .extraction import Job, Outcome, SampleSet
from .hidden_states import HiddenStateStore, read_shard
from .targets import Target, one_tensor

if TYPE_CHECKING:
    import torch

LAYERS = 4
_VOCAB = 512
_PROMPTS = (1, 7, 33, 150, 300)  # tokens
_WINDOW = 64  # of sliding attention and of llama_4_scaling: shorter than the longer prompts, so that it acts
# Options that change what an engine computes; the others are about size and speed, and the twin has its own.
_KEPT_OPTIONS = ("attention_backend", "attention_config", "block_size", "compilation_config", "kernel_config", "moe_backend")
_CACHE_BYTES = 256 * 2**20
# Relative error of a token's state: at most the first for half of all tokens, the second for nine in ten. In bfloat16 a
# mixture of experts routes some tokens otherwise.
_LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (6e-2, 5e-1)}


@dataclass
class TwinReport:
    """What came of a twin. errors: {layer id: (median, nine in ten)} of the tokens' relative errors against `reference`.

    problems: what is wrong, in words; notes: what was left out and why. consistency: relative error of the engine's
    logits against those made from the last state. other_output: how the target's output is not what training takes it for.
    """

    tokens: int = 0
    layers: int = 0
    hidden_size: int = 0
    dtype: str = "float32"
    reference: str = ""
    errors: dict[int, tuple[float, float]] = field(default_factory=dict)
    consistency: float | None = None
    problems: list[str] = field(default_factory=list)
    other_output: str = ""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        said = [f"{self.layers} layers of {self.hidden_size} in {self.dtype}, {self.tokens} tokens"]
        if self.errors:
            said.append(f"states within {max(tail for _, tail in self.errors.values()):.1e} of transformers' {self.reference}")
        if self.consistency is not None:
            said.append(f"last state gives the engine's logits within {self.consistency:.1e}")
        return "; ".join([*self.problems, *filter(None, [self.other_output]), *said, *self.notes])


def shrink(config: dict[str, Any], values: Any) -> dict[str, Any]:
    """config.json of a target → that of its twin. values: the language model's configuration as transformers reads it.

    Kept: kinds of layers, head size, rotary embedding, ratios of heads, routing. Shrunk: counts and widths. Quantisation
    is dropped: the twin's weights are plain.
    """
    twin = copy.deepcopy(config)
    text = twin.get("text_config", twin)

    def get(name: str) -> Any:
        return text[name] if name in text else getattr(values, name, None)

    def cut(name: str, limit: int) -> None:
        if isinstance(get(name), int) and not isinstance(get(name), bool):
            text[name] = min(get(name), limit)

    for part in (twin, text):
        part.pop("quantization_config", None)
        part.pop("compression_config", None)
        for name in ("dtype", "torch_dtype"):
            part.pop(name, None)
        part["dtype"] = "float32"
        for name, value in list(part.items()):
            if name.endswith(("_token_id", "_token_index")) and value is not None:
                part[name] = [one % _VOCAB for one in value] if isinstance(value, list) else value % _VOCAB
    heads, kv_heads = int(get("num_attention_heads")), int(get("num_key_value_heads") or get("num_attention_heads"))
    head_dim = int(getattr(values, "head_dim", None) or values.hidden_size // heads)
    text["num_attention_heads"] = 4
    if get("num_key_value_heads") is not None:
        text["num_key_value_heads"] = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    if get("kv_lora_rank"):  # latent attention: kernels take the full-sized latent only
        text["num_key_value_heads"] = 4
        cut("q_lora_rank", 64)
        text["hidden_size"] = 256
    else:
        if "head_dim" in text or values.hidden_size != heads * head_dim:
            text["head_dim"] = head_dim
        text["hidden_size"] = 4 * head_dim
    text["vocab_size"] = _VOCAB
    for name, limit in (
        ("intermediate_size", 256), ("moe_intermediate_size", 64), ("shared_expert_intermediate_size", 64),
        ("num_experts", 8), ("num_local_experts", 8), ("n_routed_experts", 8), ("num_experts_per_tok", 2),
        ("experts_per_token", 2), ("n_group", 2), ("topk_group", 1), ("num_nextn_predict_layers", 0), ("sliding_window", _WINDOW),
    ):  # fmt: skip
        cut(name, limit)
    _shrink_layers(text, get)
    if isinstance(text.get("llama_4_scaling"), dict):
        text["llama_4_scaling"]["original_max_position_embeddings"] = _WINDOW
    return twin


def _shrink_layers(text: dict[str, Any], get: Any) -> None:
    """Fewer layers, of which each kind of the target's is still there."""
    count = min(LAYERS, int(get("num_hidden_layers")))
    text["num_hidden_layers"] = count
    if isinstance(get("first_k_dense_replace"), int):
        text["first_k_dense_replace"] = min(get("first_k_dense_replace"), 1)
    if isinstance(get("max_window_layers"), int):
        text["max_window_layers"] = min(get("max_window_layers"), count // 2)
    for name in ("mlp_only_layers", "no_rope_layers_indices"):
        if isinstance(get(name), list):
            text[name] = [layer for layer in get(name) if layer < count]
    for name in ("layer_types", "moe_layer_freq", "no_rope_layers", "mlp_layer_types", "layers_block_type"):
        kinds = get(name)
        if isinstance(kinds, list):
            first = list(kinds[:count])
            different = list(dict.fromkeys(kinds))
            text[name] = first if set(first) == set(different) else (different * count)[:count]


def run_twin(target: Target, engine: str, engine_options: dict[str, Any], device: str, folder: Path) -> TwinReport:
    """Builds the twin of a target in `folder`, captures its states, compares. What goes wrong on the way is raised."""
    raw = json.loads((target.folder / "config.json").read_text())
    overrides = engine_options.get("hf_overrides")
    if isinstance(overrides, dict):
        raw |= overrides
    config = shrink(raw, target.text_config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for code in target.folder.glob("*.py"):
        shutil.copy(code, folder / code.name)
    twin = Target(f"twin of {target.name}", "twin", {"path": str(folder)}, target.trust_remote_code)
    return run_made_twin(twin, config, _embedding_name(target), engine, engine_options, device)


def run_made_twin(
    twin: Target, config: dict[str, Any], embedding: str | None, engine: str, engine_options: dict[str, Any], device: str
) -> TwinReport:
    """The same for a twin whose config.json is written. embedding: name of the embedding among the target's own tensors."""
    report = TwinReport(layers=twin.num_layers, hidden_size=twin.hidden_size)
    text = config.get("text_config", config)
    model = None
    try:
        model = build_reference(text, config, twin)
    except Exception as error:  # noqa: BLE001 - then there is no reference, which is said
        report.notes.append(f"transformers could not build it: {describe(error).splitlines()[0]}")
    options: dict[str, Any] = {name: engine_options[name] for name in _KEPT_OPTIONS if name in engine_options}
    lacking = "transformers lacks this architecture"
    if model is not None and engine == "vllm" and (routing := _other_routing(text, model)):
        lacking, model = f"no reference: transformers' {type(model).__name__} {routing}", None
    if model is not None:
        save_as_target(model, twin.folder, embedding if "text_config" in config else None)
        report.reference = type(model).__name__
    elif engine == "vllm":
        options["load_format"] = "dummy"
        report.notes.append(f"{lacking}; shapes, finiteness and the engine's own logits were checked")
    else:
        raise AerieError("transformers cannot build this architecture. Set the target's engine to vllm.")
    report.dtype = "float32" if device == "cpu" else "bfloat16"
    count = twin.num_layers
    layer_ids = tuple(sorted({1, count // 2, count - 1, count} - {0}))
    longest = min(max(_PROMPTS), twin.max_positions or max(_PROMPTS))
    generator = np.random.default_rng(0)
    samples = SampleSet.of([generator.integers(1, _VOCAB, min(length, longest)).tolist() for length in _PROMPTS])
    if engine == "vllm":
        options |= {"kv_cache_memory_bytes": _CACHE_BYTES, "max_logprobs": _VOCAB, "max_num_seqs": 8}
    job = Job(twin, layer_ids, "float32", report.dtype, engine, device, 1, options)
    store = HiddenStateStore(twin.folder / "store", job.capture_key)
    if engine == "vllm":
        outcome = _through_vllm(job, samples, store, report, randomise=model is None)
    else:
        from .engine_transformers import extract

        outcome = extract(job, samples, store)
    outcome.raise_failures()
    states = _stored(store, outcome)
    missing = set(samples.keys) - set(states)
    if missing:
        report.problems.append(f"{len(missing)} of {len(samples)} prompts have no states")
    for place, key in enumerate(samples.keys):
        wanted = (int(samples.tokens[place]), len(layer_ids), twin.hidden_size)
        if key in states and tuple(states[key].shape) != wanted:
            report.problems.append(f"states of a prompt have the shape {list(states[key].shape)}; expected {list(wanted)}")
    report.tokens = int(samples.tokens.sum())
    if not report.problems and model is not None:
        plain = _reference_states(model, samples, layer_ids)
        reach = _reach(text, model)
        _compare(report, samples, layer_ids, states, plain, reach)
        _check_head(report, twin, model, samples, plain)
    if report.consistency is not None and report.consistency > _LIMITS[report.dtype][0]:
        report.problems.append(f"the last state, through norm and head, is {report.consistency:.1%} off the engine's own logits")
    return report


def build_reference(text: dict[str, Any], config: dict[str, Any], twin: Target) -> Any:
    """transformers' model with random weights in float32 for a language model's configuration; None where it has no such class."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = [*(text.get("architectures") or []), *(config.get("architectures") or [] if text is config else [])]
    names.append(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(twin.text_config.model_type), ""))
    cls = next((found for name in names if name and (found := getattr(transformers, name, None)) is not None), None)
    if cls is None:
        return None
    settings = {name: value for name, value in text.items() if name not in ("architectures", "auto_map", "model_type")}
    model = cls(cls.config_class.from_dict(settings)).to(torch.float32).eval()
    randomise(dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name.endswith("_bias")})
    return model


def randomise(tensors: "dict[str, torch.Tensor]") -> None:
    """Fills tensors so that every layer, norm and expert leaves its mark on the states; the same names get the same values."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and tensor.dim() == 1:
                noise = 1 + 0.1 * noise
            elif tensor.dim() == 1:  # biases, sinks
                noise = 0.05 * noise
            elif "embed" not in name:  # unit-variance inputs give outputs of about unit variance
                noise = noise * tensor.shape[-1] ** -0.5
            tensor.copy_(noise)


def save_as_target(model: Any, folder: Path, embedding: str | None) -> None:
    """Saves the weights under the names that the target's own have (a wrapper's language model has a prefix); config.json stays."""
    from safetensors.torch import load_file, save_file

    config = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    prefix = (embedding or "model.embed_tokens.weight").removesuffix("embed_tokens.weight")
    if prefix != "model.":
        path = folder / "model.safetensors"
        head = prefix.removesuffix("model.") + "lm_head."
        renamed = {name.replace("model.", prefix, 1).replace("lm_head.", head, 1): tensor for name, tensor in load_file(path).items()}
        save_file(renamed, path, metadata={"format": "pt"})


def _embedding_name(target: Target) -> str:
    """Of the target's own tensors; the common name of a wrapper where there are no weights yet."""
    from .checks_weights import tensor_files

    usual = "language_model.model.embed_tokens.weight"
    try:
        return one_tensor(tensor_files(target.folder), r"(^|\.)embed_tokens\.weight$") or usual
    except AerieError:  # no weights yet
        return usual


def _through_vllm(job: Job, samples: SampleSet, store: HiddenStateStore, report: TwinReport, randomise: bool) -> Outcome:
    """Extraction as the stage does it, and the engine's own logits beside."""
    from . import engine_vllm

    outcome = Outcome()
    samples = samples.longest_first()
    llm = engine_vllm.load(job, int(samples.tokens[0]), store)
    try:
        if randomise:
            llm.apply_model(_randomise_engine)
        engine_vllm.run(llm, samples, outcome)
        if not outcome.failed:
            try:
                report.consistency = _consistency(llm, samples, _stored(store, outcome))
            except Exception as error:  # noqa: BLE001 - models keep norm and head under many names
                report.notes.append(f"the engine's logits could not be compared ({describe(error).splitlines()[0]})")
    finally:
        engine_vllm.shut_down(llm)
    return outcome


def _randomise_engine(model: Any) -> None:
    randomise(dict(model.named_parameters()))


def _consistency(llm: Any, samples: SampleSet, states: "dict[str, torch.Tensor]") -> float:
    """Relative error between the engine's log-probabilities after each prompt and those of the stored last state."""
    import torch
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=_VOCAB)
    prompts: list[Any] = [{"prompt_token_ids": samples.ids_of(i).tolist()} for i in range(len(samples))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    own = torch.zeros(len(prompts), _VOCAB)
    for row, output in enumerate(outputs):
        for token, entry in output.outputs[0].logprobs[0].items():
            if token < _VOCAB:
                own[row, token] = entry.logprob
    last = torch.stack([states[key][-1, -1] for key in samples.keys])

    def logits(model: Any) -> torch.Tensor:
        inner = model.get_language_model() if hasattr(model, "get_language_model") else getattr(model, "language_model", model)
        holder = getattr(inner, "model", inner)
        weight = next(model.parameters())
        with torch.inference_mode():
            normed = holder.norm(last.to(weight.device, weight.dtype))
            return model.compute_logits(normed).float().cpu()[:, :_VOCAB]

    made = torch.log_softmax(llm.apply_model(logits)[0], dim=-1)
    return float((made - own).norm() / own.norm())


def _stored(store: HiddenStateStore, outcome: Outcome) -> "dict[str, torch.Tensor]":
    """{sample key: states [tokens, layers, hidden]} of what was written."""
    from safetensors import safe_open

    found = {}
    for name in sorted(set(outcome.written.values())):
        shard = read_shard(store.folder / name)
        with safe_open(shard.path, framework="pt") as file:
            everything = file.get_tensor("hidden_states")
        for place, key in enumerate(shard.keys):
            if key in outcome.written:
                found[key] = everything[int(shard.offsets[place]) : int(shard.offsets[place + 1])]
    return found


def _reference_states(model: Any, samples: SampleSet, layer_ids: tuple[int, ...]) -> "dict[str, torch.Tensor]":
    import torch

    from .engine_transformers import forward

    decoder = model.get_decoder()
    sequences = [samples.ids_of(i) for i in range(len(samples))]
    # One at a time: nothing depends on padding.
    return {key: forward(decoder, [ids], layer_ids, torch.device("cpu"))[0] for key, ids in zip(samples.keys, sequences, strict=True)}


def _other_routing(text: dict[str, Any], model: Any) -> str:
    """How the reference chooses experts where the configuration says otherwise: transformers' DeepSeek-V3 knows one way only."""
    method = text.get("topk_method", "noaux_tc")
    if method != "noaux_tc" and any(name.endswith("e_score_correction_bias") for name, _ in model.named_buffers()):
        return f"routes by noaux_tc, the configuration says topk_method {json.dumps(method)}"
    return ""


def _reach(text: dict[str, Any], model: Any) -> int | None:
    """Positions up to which the reference computes the same: transformers' DeepSeek classes know no llama_4_scaling."""
    if text.get("llama_4_scaling") and "llama_4_scaling" not in inspect.getsource(sys.modules[type(model).__module__]):
        return _WINDOW
    return None


def _check_head(report: TwinReport, twin: Target, model: Any, samples: SampleSet, plain: "dict[str, torch.Tensor]") -> None:
    """Whether the distribution that training teaches, from the last state, is the reference's own: heads scale, cap and norm in many ways."""
    import torch

    from .validation import TargetHead

    with torch.no_grad():
        own = torch.cat([model(torch.as_tensor(samples.ids_of(i)).long()[None]).logits[0] for i in range(len(samples))]).log_softmax(-1)
    try:
        taught = TargetHead.of(twin).log_probabilities(torch.cat([plain[key][:, -1] for key in samples.keys]))
        error = float((taught - own).norm() / own.norm())
    except Exception as failure:  # noqa: BLE001 - another kind of norm or head has other names
        report.other_output = f"training cannot compute the target's output from the last state ({describe(failure).splitlines()[0]})"
        return
    if not error <= _LIMITS["float32"][1]:
        report.other_output = f"the target's output is not its head over an RMS norm of the last state, as training has it: {error:.1%} off in log-probabilities"


def _compare(
    report: TwinReport,
    samples: SampleSet,
    layer_ids: tuple[int, ...],
    states: "dict[str, torch.Tensor]",
    plain: "dict[str, torch.Tensor]",
    reach: int | None,
) -> None:
    """Fills errors and problems; tokens beyond `reach` must differ instead."""
    import torch

    def errors_of(rows: slice) -> torch.Tensor:
        pairs = [(states[key][rows], plain[key][rows]) for key in samples.keys]
        return torch.cat([(got - wanted).norm(dim=-1) / wanted.norm(dim=-1) for got, wanted in pairs])

    near = errors_of(slice(reach))
    half, most = _LIMITS[report.dtype]
    for place, layer in enumerate(layer_ids):
        median, tail = (float(value) for value in torch.quantile(near[:, place], torch.tensor([0.5, 0.9])))
        report.errors[layer] = median, tail
        if not (median <= half and tail <= most):
            report.problems.append(
                f"states at layer id {layer} are off transformers' by {median:.1%} (median) and {tail:.1%} (nine tokens in ten)"
            )
    if reach is not None:
        beyond = float(errors_of(slice(reach, None))[:, -1].median())
        report.notes.append(f"llama_4_scaling acts from position {reach} on ({beyond:.1%} off transformers, which lacks it)")
        if not beyond > half:
            report.problems.append(f"llama_4_scaling has no effect from position {reach} on")
