"""Checks of the target's configuration files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .preflight import Finding, Subject, read_json
from .targets import where_to_get


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


def code_files(subject: Subject) -> Finding:
    """Whether the files of code that are run are in the target's folder: those that auto_map names, and what they import of it."""
    folder = subject.target.folder
    if not subject.target.trust_remote_code:
        return Finding("ok", "no code of the target's folder is run")
    classes = ["AutoConfig", "AutoTokenizer"]
    if subject.settings["engine"] == "transformers":
        classes.append("AutoModelForCausalLM")
    wanted: dict[str, str] = {}  # file: what asks for it
    for name in ("config.json", "tokenizer_config.json"):
        stored = _auto_map(read_json(folder / name)) if (folder / name).exists() else {}
        for of in classes:
            references = stored.get(of) or []
            for reference in [references] if isinstance(references, str) else references:
                if reference and "--" not in reference:  # else it is in another repository
                    wanted.setdefault(f"{reference.split('.')[0]}.py", f"{of} in the auto_map of {name}")
    files = list(wanted)
    for file in files:  # grows: what is imported may import more
        for imported in _relative_imports(folder / file):
            if imported not in wanted:
                wanted[imported] = file
                files.append(imported)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        said = "; ".join(f"{wanted[file]} asks for {file}" for file in missing)
        return Finding("failed", f"{said}, not found in {folder}", where_to_get(subject.target, missing))
    return Finding("ok", ", ".join(files) or "no file of code is asked for")


def _relative_imports(path: Path) -> list[str]:
    """Files of the same folder that a file of code imports."""
    from transformers.dynamic_module_utils import get_relative_imports

    return [f"{name.split('.')[0]}.py" for name in get_relative_imports(path)] if path.is_file() else []


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
