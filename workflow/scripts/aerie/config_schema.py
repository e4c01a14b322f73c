"""The configuration against its schema: every fault with its place, what was found and expected, and the nearest known key."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from .errors import AerieError, shown

Rule = Mapping[str, Any]
Keys = tuple[str | int, ...]  # the way to a value: keys, and places in lists

_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "keys with values",
    "null": "null",
}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
    "minProperties": "at least {} key",
}
_LONGEST = 80  # characters shown of a value


def check_config(config: Rule, schema: Path, files: Sequence[Path], given: Rule) -> None:
    """AerieError naming everything in the configuration that its schema does not allow.

    files: those that it was read from, the later ones before the earlier; given: what `--config` set, which comes before them.
    """
    rules = yaml.safe_load(schema.read_text(encoding="utf-8"))
    lines = [line for file in files for line in _twice(file)]
    faults = [fault for error in Draft202012Validator(rules).iter_errors(config) for fault in _faults(error, rules)]
    lines += [f"{place_of(keys, files, given)}: {'.'.join(map(str, keys)) or 'the whole'}: {text}" for keys, text in faults]
    if lines:
        told = "".join(f"\n  {line}" for line in dict.fromkeys(lines))
        raise AerieError(f"The configuration cannot be used (config/README.md explains every key):{told}")


def _twice(file: Path) -> Iterator[str]:
    """The keys that a file gives twice in one place; YAML takes the last."""
    waiting: list[tuple[Keys, yaml.Node | None]] = [((), _parsed(file))]
    while waiting:
        above, node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += [((*above, number), value) for number, value in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for name, value in node.value:
                line, keys = name.start_mark.line + 1, (*above, str(name.value))
                if name.value in lines and name.value != "<<":  # all that is merged counts
                    way = ".".join(map(str, keys))
                    yield f"{file}:{line}: {way}: given a second time, after line {lines[name.value]}; expected once. Delete one of them"
                lines.setdefault(name.value, line)
                waiting.append((keys, value))


def _faults(error: ValidationError, rules: Rule) -> Iterator[tuple[Keys, str]]:
    """(keys, what is wrong) of a schema's error."""
    keys, rule, found = tuple(error.absolute_path), error.schema, error.instance
    if error.validator == "oneOf" and not isinstance(found, dict):  # its type is told
        return
    if error.validator == "additionalProperties":
        for name in found:
            if name not in rule["properties"]:
                yield (*keys, name), f"unknown key; {_remedy(str(name), list(rule['properties']), rules)}"
    elif error.validator == "required":
        for name in rule["required"]:
            if name not in found:
                yield (*keys, name), f"missing; expected {_expected(rule['properties'][name])}"
    elif error.validator == "oneOf":
        names = [each["required"][0] for each in rule["oneOf"]]
        beside = rule["dependentRequired"]
        choices = [" with ".join([name, " and ".join(beside[name])]) if name in beside else name for name in names]
        there = " and ".join(name for name in names if name in found) or "none"
        yield keys, f"found {there}; expected exactly one of {'; '.join(choices)}"
    elif error.validator == "dependentRequired":
        for name, others in rule["dependentRequired"].items():
            for other in others:
                if name in found and other not in found:
                    yield (*keys, other), f"missing beside {name}; expected {_expected(rule['properties'][other])}"
    elif "propertyNames" in error.absolute_schema_path:
        yield (*keys, found), f"not a name for this; expected {_expected(rule)}"
    else:
        yield keys, f"found {shown(found, _LONGEST)}; expected {_expected(rule)}{_hint(found, rule)}"


def _expected(rule: Rule) -> str:
    """What a rule of the schema allows, in words: its description, or its type and bounds."""
    if "description" in rule:
        return str(rule["description"])
    if "enum" in rule:
        return f"one of {', '.join(map(str, rule['enum']))}"
    types = rule.get("type", [])
    types = [types] if isinstance(types, str) else types
    words = [_TYPES[name] for name in types if name != "null"]
    bounds = [text.format(rule[name]) for name, text in _BOUNDS.items() if name in rule]
    return ", ".join([" or ".join(words), *bounds]) + (", or null" if "null" in types else "")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The one of the known names that is like this one; "" where none is."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else ""


def _remedy(name: str, known: list[str], rules: Rule) -> str:
    """The known key that was meant: one of this section like it, else one of this name elsewhere, else one of these."""
    if near := did_you_mean(name, known):
        return near
    elsewhere = sorted({".".join(way) for way in _ways(rules, rules) if way[-1] == name})
    return f"it belongs to {' or '.join(elsewhere)}" if elsewhere else f"expected one of {', '.join(known)}"


def _ways(rule: Rule, rules: Rule, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to every key of the schema; a user's own name in it is NAME."""
    for name, below in rule.get("properties", {}).items():
        yield (*above, name)
        yield from _ways(below, rules, (*above, name))
    if isinstance(rule.get("additionalProperties"), dict):
        yield from _ways(rule["additionalProperties"], rules, (*above, "NAME"))
    for same in ("items", "then"):
        if same in rule:
            yield from _ways(rule[same], rules, above)
    if "$ref" in rule:
        yield from _ways(rules["$defs"][rule["$ref"].rpartition("/")[2]], rules, above)


def _hint(found: Any, rule: Rule) -> str:
    if not isinstance(found, str):
        return ""
    if near := did_you_mean(found, [str(one) for one in rule.get("enum", [])]):
        return f"; {near}"
    if {"number", "integer"} & {*rule.get("type", [])} or rule.get("type") in ("number", "integer"):
        try:
            return f". This is text: write {float(found):g} without quotes, and 1.0e-3, not 1e-3, since YAML takes that for text"
        except ValueError:
            pass
    return ""


def place_of(keys: Keys, files: Sequence[Path], given: Rule) -> str:
    """The file and line, or `--config`, that a value comes from; of one that is missing, where the section is that lacks it."""
    for way in (keys[:length] for length in range(len(keys), 0, -1)):
        value: Any = given
        try:
            for key in way:
                value = value[key]
            return "--config"
        except (KeyError, IndexError, TypeError):
            pass
        for file in reversed(files):
            line = line_of(file, way)
            if line:
                return f"{file}:{line}"
    return ", ".join(map(str, files)) or "--config"


def _parsed(file: Path) -> yaml.Node | None:
    """The nodes of a file of YAML or JSON; None where it cannot be read: only places are lost."""
    try:
        return _nodes(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


@cache
def _nodes(text: str) -> yaml.Node | None:
    """Kept, since a place is asked for each draft of a target."""
    node: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
    return node


def line_of(file: Path, keys: Keys) -> int | None:
    """The line of a key in a file of YAML or JSON; None where it does not hold it."""
    node = _parsed(file)
    line = None
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pairs = [(name, value) for name, value in node.value if name.value == str(key)]
            if not pairs:
                return None
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        else:
            return None
    return line
