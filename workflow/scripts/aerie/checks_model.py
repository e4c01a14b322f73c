"""Checks of the target's configuration files."""

from collections.abc import Mapping
from typing import Any

from .preflight import Finding, Subject, read_json


def remote_code(subject: Subject) -> Finding:
    """Whether code in the target's folder is needed that the configuration does not allow to run."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    folder = subject.target.folder
    needed, there = [], []
    if "AutoConfig" in _auto_map(subject.raw):
        there.append("config.json")
        if subject.raw.get("model_type") not in CONFIG_MAPPING_NAMES:
            needed.append(f"config.json (model_type {subject.raw.get('model_type')!r})")
    path = folder / "tokenizer_config.json"
    stored = read_json(path) if path.exists() else {}
    if "AutoTokenizer" in _auto_map(stored):
        there.append("tokenizer_config.json")
        if not _has_tokenizer(stored.get("tokenizer_class")):
            needed.append(f"tokenizer_config.json (tokenizer_class {stored.get('tokenizer_class')!r})")
    if needed and not subject.target.trust_remote_code:
        return Finding(
            "failed",
            f"{' and '.join(needed)} need code from the target's folder, which the configuration does not allow",
            "Read that code, then set the target's trust_remote_code: true",
        )
    if not there:
        return Finding("ok", "no code in the target's folder is asked for")
    use = "allowed" if subject.target.trust_remote_code else "not needed, since transformers has its own"
    return Finding("ok", f"{' and '.join(there)} name code in the target's folder: {use}")


def _auto_map(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    return stored.get("auto_map") or {}


def _has_tokenizer(name: Any) -> bool:
    import transformers

    return name in ("PreTrainedTokenizerFast", "TokenizersBackend") or hasattr(transformers, str(name))


def configuration(subject: Subject) -> Finding:
    """Whether config.json can be read, and what the language model's part of it says."""
    target = subject.target
    text = target.text_config
    missing = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads") if not getattr(text, name, None)]
    if missing:
        return Finding("failed", f"config.json has no {', no '.join(missing)}", "Take config.json from the model's own repository")
    written = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if name in subject.raw_text]
    wrong = [name for name in written if int(subject.raw_text[name]) != int(getattr(text, name))]
    if wrong:
        return Finding(
            "failed",
            f"transformers reads {', '.join(f'{name} {getattr(text, name)} where config.json has {subject.raw_text[name]}' for name in wrong)}",
            "Check model_type, and the code that its auto_map names",
        )
    where = "text_config of config.json" if "text_config" in subject.raw else "config.json"
    limit = target.max_positions
    return Finding(
        "ok",
        f"{where} ({text.model_type}): {target.num_layers} layers, hidden size {target.hidden_size}, vocabulary {target.vocab_size:,}, "
        f"{f'{limit:,}' if limit else 'any number of'} positions",
    )
