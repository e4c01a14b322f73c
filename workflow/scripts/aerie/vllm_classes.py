"""What the installed vLLM knows of an architecture, read from its classes and their source: no instance, no weights, no GPU.

vLLM imports a model's module when it is asked for (seconds for the first one). What a class builds is found in the text
of its `__init__`: which attribute holds the language model, which the decoder layers, of which class these are, and
how the model's `forward` calls them.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

# Where a class keeps its language model, outermost first, and where a language model keeps its decoder layers.
_INNER = ("language_model", "model", "transformer", "backbone", "gpt_neox", "decoder", "thinker", "llm", "text_model")
_LAYERS = ("layers", "h", "blocks")
_EMBEDDINGS = ("embed_input_ids", "get_input_embeddings")
_MAX_DEPTH = 5


@dataclass(frozen=True)
class ModelClass:
    """One architecture. A field that could not be read from the source is None.

    path: attributes from the class to its decoder layers ("language_model.model.layers"). signature: the decoder layer's
    forward; call: how the model calls it; fits: whether that call suits the signature. embedding: the method that embeds
    token ids ("" where there is none). problem: why the class could not be imported ("" if it could).
    """

    architecture: str
    name: str = ""
    problem: str = ""
    eagle3: bool = False
    embedding: str = ""
    path: str | None = None
    decoder: str | None = None
    signature: str | None = None
    call: str | None = None
    fits: bool | None = None


def architectures() -> list[str]:
    """Every architecture that the installed vLLM registers."""
    from vllm import ModelRegistry

    return sorted(ModelRegistry.get_supported_archs())


def expected_embedding() -> str:
    """The method by which this vLLM embeds token ids."""
    from vllm.model_executor.models.interfaces_base import VllmModel

    return next(name for name in _EMBEDDINGS if hasattr(VllmModel, name))


def load_class(architecture: str) -> type:
    """vLLM's class for an architecture; whatever its import raises, and KeyError for one that is not registered."""
    from vllm import ModelRegistry

    found: type = ModelRegistry.models[architecture].load_model_cls()
    return found


def keep_loaded(architecture: str) -> None:
    """Has vLLM look at the class here; it would start another interpreter for that, which takes ten seconds."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, load_class(architecture))


def inspect_class(architecture: str, text_architecture: str | None = None) -> ModelClass:
    """Reads the architecture's class; text_architecture: of a wrapper's language model, where its configuration names one."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    try:
        outer = load_class(architecture)
    except Exception as error:  # noqa: BLE001 - models need packages that may be missing
        return ModelClass(architecture, problem=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else repr(error)}")
    found: dict[str, Any] = {
        "name": f"{outer.__module__}.{outer.__name__}",
        "eagle3": bool(supports_eagle3(outer)),
        "embedding": next((name for name in (expected_embedding(), *_EMBEDDINGS) if callable(getattr(outer, name, None))), ""),
    }
    holder, decoder, path = _find_decoder(outer, text_architecture)
    if any(base.__module__.startswith("vllm.model_executor.models.transformers") for base in outer.__mro__):
        found |= {"path": "model.layers", "decoder": "transformers' own"}  # vLLM runs transformers' class with its own attention
    elif holder and decoder:
        signature = inspect.signature(_unwrapped(decoder.forward))  # type: ignore[attr-defined]
        call = _call_of_layer(holder)
        found |= {
            "path": path,
            "decoder": decoder.__name__,
            "signature": f"({', '.join(list(signature.parameters)[1:])})",
            "call": None if call is None else f"({ast.unparse(call).partition('(')[2]}",
            "fits": None if call is None else _fits(call, signature),
        }
    return ModelClass(architecture, **found)


def _find_decoder(outer: type, text_architecture: str | None) -> tuple[type | None, type | None, str]:
    """The class that holds the decoder layers, their class, and the path to them."""
    current, overrides, path = outer, {}, []  # type: ignore[var-annotated]
    for _ in range(_MAX_DEPTH):
        built = _Reader(current, overrides).children()
        layers = next((name for name in _LAYERS if built.get(name)), None)
        if layers:
            return current, built[layers].classes[0], ".".join([*path, layers])
        inner = next((name for name in _INNER if name in built), None)
        if inner is None:
            break
        path.append(inner)
        child = built[inner]
        if child.registered:
            wanted = child.architecture or text_architecture
            if wanted is None:
                break
            try:
                current, overrides = load_class(wanted), {}
            except Exception:  # noqa: BLE001 - as above
                break
        elif child.classes:
            current, overrides = child.classes[0], child.keywords
        else:
            break
    return None, None, ".".join(path)


class _Child:
    """What an attribute may be built from. keywords: classes handed to its constructor by name."""

    def __init__(self) -> None:
        self.classes: list[type] = []
        self.keywords: dict[str, type] = {}
        self.registered = False  # built by vLLM from another architecture's name
        self.architecture: str | None = None

    def __bool__(self) -> bool:
        return bool(self.classes)


class _Reader:
    """Reads the `__init__` of a class and of its bases. overrides: classes that stand for its parameters."""

    def __init__(self, cls: type, overrides: dict[str, type]) -> None:
        self.cls, self.overrides = cls, dict(overrides)

    def children(self) -> dict[str, _Child]:
        """{attribute: what it is built from}, a subclass's own first."""
        found: dict[str, _Child] = {}
        for base in self.cls.__mro__:
            function = _unwrapped(base.__dict__.get("__init__"))
            tree = _source(function)
            if tree is None:
                continue
            scope = self._scope(function, tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
                    self._keep_keywords(node, scope, self.overrides)
                if not isinstance(node, ast.Assign | ast.AnnAssign):
                    continue
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                            child = found.setdefault(one.attr, _Child())
                            if not child.classes and not child.registered:
                                self._read(node.value, scope, child, 0)
            if not any(isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" for node in ast.walk(tree)):
                break  # the bases' own are not run
        return found

    def _scope(self, function: Any, tree: ast.AST) -> dict[str, Any]:
        """Names that an expression in the function may use: its module's, its parameters' classes, its inner functions."""
        scope = dict(function.__globals__)
        scope |= {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)}
        for name, parameter in inspect.signature(function).parameters.items():
            scope[name] = self.overrides.get(name, parameter.default)
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        scope |= {
            node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name) and node.targets[0].id not in scope
        }
        scope |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"}
        return scope

    def _keep_keywords(self, call: ast.Call, scope: dict[str, Any], kept: dict[str, type]) -> None:
        for keyword in call.keywords:
            value = self._resolve(keyword.value, scope)
            if keyword.arg and _is_module(value):
                kept.setdefault(keyword.arg, value)

    def _resolve(self, node: ast.AST, scope: dict[str, Any]) -> Any:
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.cls if ast.unparse(node.value) == "self" else self._resolve(node.value, scope)
            return getattr(owner, node.attr, None)
        return None

    def _read(self, node: ast.AST | None, scope: dict[str, Any], child: _Child, depth: int) -> None:
        """Adds the classes that the expression builds; follows functions of this class, inner ones and variables."""
        if node is None or depth > 8:
            return
        if isinstance(node, ast.Call):
            if ast.unparse(node.func).endswith("init_vllm_registered_model"):
                names = next((keyword.value for keyword in node.keywords if keyword.arg == "architectures"), None)
                child.registered = True
                if isinstance(names, ast.List) and names.elts and isinstance(names.elts[0], ast.Constant):
                    child.architecture = str(names.elts[0].value)
                return
            self._keep_keywords(node, scope, child.keywords)
            before = len(child.classes)
            self._read(node.func, scope, child, depth + 1)
            if len(child.classes) == before:  # a helper such as make_layers: what it is given builds
                for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    self._read(argument, scope, child, depth + 1)
        elif isinstance(node, ast.Name | ast.Attribute):
            value = self._resolve(node, scope)
            if _is_module(value):
                child.classes.append(value)
            elif isinstance(value, dict):
                child.classes += [one for one in value.values() if _is_module(one)]
            elif isinstance(value, ast.FunctionDef):
                self._read_returned(value, scope, child, depth)
            elif isinstance(value, ast.AST):
                self._read(value, scope, child, depth + 1)
            elif inspect.isfunction(value) and isinstance(node, ast.Attribute):  # a method such as _init_model
                inner = _source(value)
                if inner is not None:
                    self._read_returned(inner, self._scope(value, inner), child, depth)
        elif isinstance(node, ast.Lambda):
            self._read(node.body, scope, child, depth + 1)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            self._read(node.elt, scope, child, depth + 1)
        elif isinstance(node, ast.List | ast.Tuple):
            for one in node.elts:
                self._read(one, scope, child, depth + 1)
        elif isinstance(node, ast.IfExp):
            self._read(node.body, scope, child, depth + 1)
            self._read(node.orelse, scope, child, depth + 1)
        elif isinstance(node, ast.Subscript):
            self._read(node.value, scope, child, depth + 1)

    def _read_returned(self, function: ast.FunctionDef, scope: dict[str, Any], child: _Child, depth: int) -> None:
        for node in ast.walk(function):
            if isinstance(node, ast.Return):
                self._read(node.value, scope, child, depth + 1)


def _is_module(value: Any) -> bool:
    """Whether it is a class of modules that a model is made of (not one of torch's, and not a stand-in for a missing layer)."""
    from torch import nn

    return (
        isinstance(value, type)
        and issubclass(value, nn.Module)
        and not value.__module__.startswith("torch.")
        and value.__name__ not in ("PPMissingLayer", "StageMissingLayer")
    )


def _unwrapped(function: Any) -> Any:
    """The function under decorators; vLLM's support_torch_compile keeps a class's own __init__ in a closure."""
    function = inspect.unwrap(function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "old_init" in names:
        return _unwrapped(function.__closure__[names.index("old_init")].cell_contents)
    return function


def _source(function: Any) -> ast.FunctionDef | None:
    """The parsed source of a function; None for one that has none, such as those written in C."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    return parsed if isinstance(parsed, ast.FunctionDef) else None


def _call_of_layer(holder: type) -> ast.Call | None:
    """The call of a decoder layer in the holder's forward: of a variable that runs over its layers, or of `self.layers[i]`."""
    tree = _source(_unwrapped(getattr(holder, "forward", None)))
    if tree is None:
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        source, target = (node.iter, node.target) if isinstance(node, ast.For) else (None, None)
        if isinstance(node, ast.Assign):
            source, target = node.value, node.targets[0]
        if source is not None and target is not None and any(f"self.{name}" in ast.unparse(source) for name in _LAYERS):
            names |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return next((call for call in calls if call.func.id in names), None)  # type: ignore[attr-defined]


def _fits(call: ast.Call, signature: inspect.Signature) -> bool:
    """Whether the arguments of the call, as far as they are written out, suit the signature."""
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    all_written = len(positional) == len(call.args) and len(named) == len(call.keywords)
    try:
        (signature.bind if all_written else signature.bind_partial)(None, *positional, **named)
    except TypeError:
        return False
    return True
