"""Checks of what the drafts and datasets ask of the target."""

from pathlib import Path

import numpy as np

from . import vocabulary
from .drafts import check_first_draft
from .errors import AerieError
from .preflight import Finding, Subject

# Of a draft's decoder: those of its target, by which its weights' shapes go.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def layer_ids(subject: Subject) -> Finding:
    """Whether each draft's aux layer ids exist in the target."""
    target = subject.target
    found, wrong = [], []
    for ids in subject.settings["aux_layer_ids"]:
        try:
            found.append(target.aux_layer_ids(ids))
        except AerieError as error:
            places = [place for place, own in subject.layer_ids.items() if own == ids]
            wrong.append(": ".join(filter(None, [" and ".join(places), str(error)])))
    if wrong:
        return Finding("failed", "; ".join(wrong))  # which says what to do
    return Finding("ok", f"{' and '.join(map(str, found))} of {target.num_layers} layers, and the last one's output")


def draft_geometry(subject: Subject) -> Finding:
    """Whether a draft of the target's width, heads and rotary embedding can be built, and split over the GPUs."""
    from .draft_model import DraftShape, decoder_config

    text, parallel = subject.target.text_config, subject.tensor_parallel
    config = decoder_config(text, DraftShape(layers=1, aux_layer_ids=tuple(range(3))))
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    wrong = []
    if config.head_dim % 2:
        wrong.append(f"head_dim {config.head_dim} is odd, and a rotary embedding turns pairs")
    own_kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    if int(text.num_attention_heads) % own_kv_heads:
        wrong.append(f"the target's {text.num_attention_heads} attention heads do not divide among {own_kv_heads} key-value heads")
    if not config.intermediate_size or config.intermediate_size < 1:
        wrong.append(f"intermediate_size is {config.intermediate_size}")
    for owner, count in (("the target", int(text.num_attention_heads)), ("the draft", heads)):
        if count % parallel:
            wrong.append(f"{owner}'s {count} attention heads do not divide among {parallel} GPUs")
    if kv_heads % parallel and parallel % kv_heads:
        wrong.append(f"the draft's {kv_heads} key-value heads do not divide among {parallel} GPUs")
    if wrong:
        return Finding(
            "failed", "; ".join(wrong), "Check num_attention_heads and head_dim in config.json, and the target's tensor_parallel"
        )
    return Finding(
        "ok",
        f"hidden size {config.hidden_size}, {heads} heads of {config.head_dim}, {kv_heads} key-value heads, "
        f"intermediate size {config.intermediate_size}, rotary embedding {config.rope_parameters['rope_type']}",
    )


def first_drafts(subject: Subject) -> Finding:
    """Whether a draft for this target can start from those that the configuration names."""
    from .draft_model import DraftShape, decoder_config

    target, said = subject.target, []
    for first in subject.settings["first_drafts"]:
        path, ids = first["path"], target.aux_layer_ids(first["aux_layer_ids"])
        found = check_first_draft(Path(path), first["layers"], ids)["transformer_layer_config"]
        wanted = decoder_config(target.text_config, DraftShape(first["layers"], tuple(ids))).to_dict()
        differ = [f"{name} {found.get(name)}, not {wanted[name]}" for name in _SIZES if found.get(name) != wanted[name]]
        if differ:
            return Finding(
                "failed",
                f"{path}/config.json: that draft has {', '.join(differ)} as a draft for this target has",
                "It was trained for another target: take one that was trained for this, or leave out init_from",
            )
        said.append(path)
    return Finding("ok", f"{', '.join(said)}: of this shape" if said else "no draft starts from one that was made elsewhere")


def draft_vocabulary(subject: Subject) -> Finding:
    """Whether each draft's vocab_size has room for the tokens that every draft must have, and is no more than the target has."""
    sizes: list[int] = subject.settings["vocab_sizes"]
    tokenizer, target = subject.tokenizer, subject.target
    rows = target.vocab_size
    # The data may add special tokens, of which this knows nothing: those that answers have.
    least = len(vocabulary.pinned_tokens(tokenizer, target.end_tokens(tokenizer), np.zeros(rows, dtype=np.int64)))
    most = len({token for token in tokenizer.get_vocab().values() if token < rows})
    wrong = [size for size in sizes if not least <= size <= most]
    if wrong:
        places = {size: [place for place, own in subject.vocab_sizes.items() if own == size] or ["a vocab_size"] for size in wrong}
        said = "; ".join(f"{' and '.join(places[size])} is {size:,}" for size in wrong)
        return Finding(
            "failed",
            f"{said}. Expected {least:,} to {most:,}: every draft has the target's {least:,} special, end-of-turn and single-byte tokens, "
            f"and the tokenizer has {most:,} in all",
            "Set vocab_size there to a number between these, or to null for the whole vocabulary. The default is 32,000; a token that "
            "the draft's vocabulary lacks, the draft can never propose",
        )
    return Finding(
        "ok",
        f"{', '.join(f'{size:,}' for size in sizes)}; at least {least:,}, at most {most:,}"
        if sizes
        else "no draft chooses its vocabulary by vocab_size",
    )


def lengths(subject: Subject) -> Finding:
    """Whether samples and answers fit into the positions that the target takes."""
    limit, served = subject.target.max_positions, subject.options.get("max_model_len")
    longest = {dataset["name"]: int(dataset["max_length"]) for dataset in subject.settings.get("datasets", [])}
    for name, length in longest.items():
        for what, most in (("the target's positions", limit), ("engine_options.max_model_len", served)):
            if most and length > int(most):
                return Finding(
                    "failed", f"max_length of dataset {name} is {length:,}, {what} {int(most):,}", "Lower the dataset's max_length"
                )
    if limit and served and int(served) > limit:
        return Finding(
            "failed",
            f"engine_options.max_model_len is {int(served):,}, the target has {limit:,} positions",
            "Lower max_model_len: beyond its positions a target's states mean nothing",
        )
    cut = [
        f"dataset {dataset['name']}: regenerate.max_new_tokens is {dataset['max_new_tokens']:,}, max_length {dataset['max_length']:,}"
        for dataset in subject.settings.get("datasets", [])
        if (dataset["max_new_tokens"] or 0) >= dataset["max_length"]
    ]
    if cut:
        return Finding(
            "warning",
            f"{'; '.join(cut)}: an answer of so many tokens has no room beside its prompt; it is generated, and then cut at max_length",
            "Raise max_length, or lower regenerate.max_new_tokens",
        )
    said = ", ".join(f"{name} {length:,}" for name, length in longest.items()) or "no dataset"
    return Finding("ok", f"{said} of {int(served or limit or 0):,} positions" if served or limit else f"{said}; the target sets no limit")


def rotary_embedding(subject: Subject) -> Finding:
    """Whether the rotary embedding's scaling reaches as far as the positions do."""
    text = subject.target.text_config
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = dict(next(iter(rope.values()))) if rope and all(isinstance(value, dict) for value in rope.values()) else rope
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor, original, limit = rope.get("factor"), rope.get("original_max_position_embeddings"), subject.target.max_positions
    if kind == "yarn" and factor and original and limit and factor * original < limit:
        return Finding(
            "warning",
            f"yarn scales {original:,} positions by {factor:g}, to {int(factor * original):,}; max_position_embeddings is {limit:,}",
            "Check config.json: states beyond the scaled positions mean little",
        )
    if kind not in ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "su", "mrope", "proportional"):
        return Finding(
            "warning", f"rope type {kind!r} is new to Aerie", "The draft will use a plain rotary embedding; see the twin's finding"
        )
    scaled = f" by {factor:g}" if factor else ""
    also = ", llama_4_scaling" if subject.raw_text.get("llama_4_scaling") or rope.get("llama_4_scaling_beta") else ""
    return Finding("ok", f"{kind}{scaled}{also}")
