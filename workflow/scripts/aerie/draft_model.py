"""The EAGLE-3 draft: speculators' model, built for a target without loading it, and its export for vLLM.

The draft's embeddings and output head are the target's own, frozen; only the projection of the aux states, the decoder
layers and the norms are trained. Aux states are concatenated in ascending order of layer id, as vLLM hands them over.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES, resolve_draft_intermediate_size
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from .errors import AerieError
from .vocabulary import VocabMap, draft_map

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .targets import Target


# As speculators and vLLM name them; all three true is EAGLE 3.1, speculators' default for Llama-style drafts.
NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}


@dataclass(frozen=True)
class DraftShape:
    """What the user chooses of a draft.

    layers: decoder layers. aux_layer_ids: layer ids whose states it reads. sliding_window: tokens that a position attends to,
    itself included; None: all before it.
    """

    layers: int
    aux_layer_ids: tuple[int, ...]
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise AerieError(f"layers is {self.layers}: a draft needs at least one")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise AerieError(f"sliding_window is {self.sliding_window}: expected at least 1 token, or null for full attention")
        if not self.aux_layer_ids or len(set(self.aux_layer_ids)) != len(self.aux_layer_ids):
            raise AerieError(f"aux_layer_ids are {list(self.aux_layer_ids)}: expected one or more different layer ids")
        object.__setattr__(self, "aux_layer_ids", tuple(sorted(self.aux_layer_ids)))

    @classmethod
    def from_recipe(cls, settings: Mapping[str, Any]) -> "DraftShape":
        """AerieError where a key is not known."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise AerieError(f"draft: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**{**settings, "aux_layer_ids": tuple(settings["aux_layer_ids"])})


def decoder_config(target: "PretrainedConfig", shape: DraftShape) -> LlamaConfig:
    """The draft's decoder: Llama layers with the target's width, heads and rotary embedding.

    target: the configuration of the target's language model.
    """
    heads, kv_heads = target.num_attention_heads, target.num_key_value_heads or target.num_attention_heads
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // heads
    if target.hidden_size % heads and target.hidden_size % head_dim == 0:  # heads of a wider inner dimension
        heads = target.hidden_size // head_dim
    if heads % kv_heads:
        kv_heads = heads
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=resolve_draft_intermediate_size(target),
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings,
        initializer_range=target.initializer_range,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=rotary_parameters(target),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    # vLLM takes the decoder's configuration as the draft's. Older versions read the model's flags only from here, and
    # every version the number of aux states.
    config.norm_before_fc = NORMS["norm_before_fc"]
    config.norm_output = NORMS["norm_output"]
    config.num_aux_hidden_states = len(shape.aux_layer_ids)
    if shape.sliding_window is not None:
        config.layer_types = ["sliding_attention"] * shape.layers
        config.sliding_window = shape.sliding_window
    return config


def sliding_window(decoder: "PretrainedConfig") -> int | None:
    """The window of a draft's attention in tokens, itself included, from its decoder's configuration; None: full attention."""
    sliding = "sliding_attention" in (getattr(decoder, "layer_types", None) or [])
    return int(decoder.sliding_window) if sliding else None


def rotary_parameters(target: "PretrainedConfig") -> dict[str, Any]:
    """The target's rotary embedding in a form in which transformers (training) and every vLLM (serving) agree."""
    found = copy.deepcopy(getattr(target, "rope_parameters", None)) or {}
    if "rope_theta" not in found:  # one entry a kind of layer; a draft has one
        found = dict(found.get("full_attention") or found.get("sliding_attention") or {})
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", 10000.0)
    # `type` is a legacy alias. DeepSeek's mscale pair is read by some versions only; without it both sides use the same
    # magnitude, and the draft learns with it. Partial and multi-axis rotation are the target's affair: text positions only.
    for name in ("type", "mscale", "mscale_all_dim", "partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        found.pop(name, None)
    if found["rope_type"] not in ("default", "linear", "dynamic", "yarn", "longrope", "llama3"):
        found = {"rope_type": "default", "rope_theta": found["rope_theta"]}
    return found


def build_draft(target: "Target", shape: DraftShape, vocab_map: VocabMap, ttt_steps: int, attention: str) -> Eagle3DraftModel:
    """A new draft in float32 on the CPU; its weights depend on torch's random state, set a seed before.

    attention: transformers' name of the attention ("sdpa", or speculators' "simple_flex_attention").
    """
    text_config = target.text_config
    if max(shape.aux_layer_ids) > target.num_layers or min(shape.aux_layer_ids) < 0:
        raise AerieError(f"aux_layer_ids {list(shape.aux_layer_ids)}: target {target.name} has layer ids 0 to {target.num_layers}")
    decoder = decoder_config(text_config, shape)
    decoder._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=vocab_map.size,
        **NORMS,
        eagle_aux_hidden_state_layer_ids=list(shape.aux_layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=target.location.get("hub_id") or str(target.folder),
                architectures=list(target.config.architectures or []),
            ),
        ),
    )
    model = Eagle3DraftModel(config)
    model.load_vocab_mappings(torch.from_numpy(vocab_map.t2d), torch.from_numpy(vocab_map.d2t))
    _load_target_weights(model, target.head_weights(), text_config, vocab_map)
    return model.float()


def _load_target_weights(
    model: Eagle3DraftModel, weights: dict[str, torch.Tensor], text_config: "PretrainedConfig", vocab_map: VocabMap
) -> None:
    """What `model.load_verifier_weights()` does, which would read the target again and refuse remote code."""
    head = weights["lm_head"][torch.from_numpy(vocab_map.target_ids)]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(weights["embed_tokens"])
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        # Scaled logits are those of a scaled norm. The draft begins with about the target's sharpness.
        scale, model.verifier_soft_cap = logit_scale(text_config)
        model.verifier_norm.weight.copy_(norm_gain(weights["norm"], text_config) * scale)
        model.norm.weight.mul_(scale)
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        frozen.weight.requires_grad_(False)


def norm_gain(weight: torch.Tensor, text_config: "PretrainedConfig") -> torch.Tensor:
    """The factors by which the target's final norm scales, float32 [hidden]; Gemma's convention stores them minus 1."""
    gemma = str(text_config.model_type).lower() in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES
    return weight.float() + 1 if gemma else weight.float()


def logit_scale(text_config: "PretrainedConfig") -> tuple[float, float | None]:
    """(scale, cap) of the target's logits: cap * tanh(scale * head(norm(x)) / cap), or without a cap scale * head(norm(x)).

    As the configurations of Cohere, Granite, MiniCPM and Gemma name them, and vLLM's classes read them.
    """
    values = {name: getattr(text_config, name, None) for name in ("logit_scale", "logits_scaling", "output_multiplier", "dim_model_base")}
    scale = float(values["logit_scale"] or 1) * float(values["output_multiplier"] or 1) / float(values["logits_scaling"] or 1)
    if values["dim_model_base"]:
        scale *= values["dim_model_base"] / text_config.hidden_size
    cap = getattr(text_config, "final_logit_softcapping", None)
    return scale, float(cap) if cap else None


def export_draft(model: Eagle3DraftModel, dtype: torch.dtype, folder: Path) -> None:
    """Writes config.json and model.safetensors as vLLM and speculators load them, floats in `dtype`."""
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if broken:
        raise AerieError(f"the trained draft has values that are not finite in {', '.join(broken)}; lower the learning rate")
    model.save_pretrained(folder, state_dict=state)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")  # transformers writes that of the float32 model in memory
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def start_from(model: Eagle3DraftModel, folder: Path) -> None:
    """Gives a new draft the trained weights of an exported one. AerieError unless both have the same map, shape and layers."""
    old_map = draft_map(folder)
    t2d = np.ones(len(old_map.t2d), dtype=bool) if model.t2d is None else model.t2d.cpu().numpy()
    if not np.array_equal(old_map.t2d, t2d):
        raise AerieError(
            f"{folder}: its vocabulary ({old_map.size} of {len(old_map.t2d)} ids) is not this draft's ({int(t2d.sum())} of {len(t2d)}); "
            "a draft keeps the vocabulary of the one that it starts from. Run snakemake, which makes the map from it."
        )
    old, new = json.loads((folder / "config.json").read_text()), model.config.to_dict()
    names = ("eagle_aux_hidden_state_layer_ids", *NORMS)
    differ = [f"{name} {old.get(name)}, not {new.get(name)}" for name in names if old.get(name) != new.get(name)]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        wanted = {name: value for name, value in model.named_parameters() if value.requires_grad}
        differ += [
            f"{name} {shapes.get(name)}, not {tuple(value.shape)}" for name, value in wanted.items() if shapes.get(name) != value.shape
        ]
        extra = sorted(name for name in shapes.keys() - model.state_dict().keys() if name.startswith("layers."))
        differ += [f"also {name}" for name in extra[:1]]
        if differ:
            raise AerieError(
                f"{folder}: this draft cannot start from it; it has {'; '.join(differ)}. Set layers and aux_layer_ids to its own."
            )
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(file.get_tensor(name))


def aux_columns(layer_ids: Sequence[int], shape: DraftShape, num_layers: int) -> tuple[list[int], int]:
    """Where a capture's tensor [tokens, layers, hidden] has the aux states, and where the last layer's output.

    layer_ids: those of the capture, in the tensor's order. AerieError where the capture lacks one.
    """
    missing = [layer for layer in (*shape.aux_layer_ids, num_layers) if layer not in layer_ids]
    if missing:
        raise AerieError(
            f"the hidden states hold layers {list(layer_ids)}; the draft needs {list(shape.aux_layer_ids)} and the last "
            f"layer's output, {num_layers}: {missing} not captured. Extract with these layer ids."
        )
    return [list(layer_ids).index(layer) for layer in shape.aux_layer_ids], list(layer_ids).index(num_layers)
