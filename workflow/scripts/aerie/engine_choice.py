"""Which engine captures a target whose `engine` is auto: vLLM where its class has the EAGLE-3 interface, else transformers.

Read from vLLM's source, since every command that asks for a capture's key needs the answer, and importing vLLM takes ten
seconds. The preflight says what was chosen, and asks the class itself whether it has the interface.
"""

import ast
import importlib.util
import json
from pathlib import Path

from .targets import Target

_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_INTERFACE = "SupportsEagle3"
_MODELS = "vllm.model_executor.models"


def choose_engine(target: Target, wanted: str = "auto") -> tuple[str, str]:
    """(engine, why): "vllm" or "transformers"; `wanted` itself where it is not auto."""
    if wanted != "auto":
        return wanted, "as the target's engine says"
    stored = json.loads((target.folder / "config.json").read_text())
    architecture = str((stored.get("architectures") or ["none"])[0])
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return "transformers", "vLLM is not installed"
    packages = Path(next(iter(vllm.submodule_search_locations))).parent
    place = _registered(packages).get(architecture)
    if place is None:
        return "transformers", f"the installed vLLM does not know {architecture}"
    if _has_interface(packages, *place):
        return "vllm", f"vLLM's {place[1]} has the EAGLE-3 interface"
    return "transformers", f"vLLM's {place[1]} has no EAGLE-3 interface"


def _registered(packages: Path) -> dict[str, tuple[str, str]]:
    """{architecture: (module, class)} of vLLM's registry."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.parse(_file(packages, f"{_MODELS}.registry").read_text()).body:
        names = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and set(names) & set(_TABLES):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module, name = (str(part.value) for part in value.elts[:2] if isinstance(part, ast.Constant))
                    found[str(key.value)] = module if module.startswith("vllm.") else f"{_MODELS}.{module}", name
    return found


def _file(packages: Path, module: str) -> Path:
    path = packages / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


def _has_interface(packages: Path, module: str, name: str) -> bool:
    """Whether a class, or one that it inherits from, names the interface among its bases."""
    if name == _INTERFACE:
        return True
    path = _file(packages, module)
    if not module.startswith("vllm.") or not path.exists():
        return False
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]  # Base[T]
            return any(_has_interface(packages, module, base.id) for base in bases if isinstance(base, ast.Name))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)
            if found:
                return _has_interface(packages, _source(node, module, path.name == "__init__.py"), found)
    return False


def _source(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The full name of the module that `from … import` in `module` reads."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])
