#!/usr/bin/env python
"""Checks a target before anything is loaded: architecture, engine, layer ids, vocabulary, chat template, weights."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aerie import cli
from aerie.chat import Conversation, render
from aerie.engine_choice import choose_engine
from aerie.errors import AerieError, describe
from aerie.stage import Recipe, versions, write_atomically
from aerie.targets import Target, head_names, weight_map

VERSION = 1

_SPACED = "def f(x):\n    return  x  # two  spaces\n\n\ttab, ünïcödé, 12345"


class Check(NamedTuple):
    """One finding. verdict: ok, warning or failed; found: what was seen; remedy: what to do about it."""

    check: str
    verdict: str
    found: str
    remedy: str = ""


def main(args: argparse.Namespace) -> None:
    recipe, target = Recipe.read(args.recipe), Target.read(args.target)
    engine, why = choose_engine(target, recipe.settings["engine"])
    checks = [Check("engine", "ok", f"{engine}: {why}"), *examine(target, recipe.settings | {"engine": engine})]
    for check in checks:
        cli.say(f"  {check.verdict:8} {check.check}: {check.found}{'. ' + check.remedy if check.remedy else ''}")
    failed = [check for check in checks if check.verdict == "failed"]
    if failed:
        raise AerieError(
            f"target {target.name}: {len(failed)} of {len(checks)} checks failed: {', '.join(check.check for check in failed)}"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    found = {"target": target.name, "fingerprint": target.digest, "versions": versions(), "checks": [check._asdict() for check in checks]}
    write_atomically(args.output, json.dumps(found, indent=1, sort_keys=True) + "\n")


def examine(target: Target, settings: dict[str, Any]) -> Iterator[Check]:
    """Runs every check; one that raises is a failed check with the cause as its finding."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("architecture", lambda: architecture(target, settings["engine"])),
        ("layer ids", lambda: layer_ids(target, settings["aux_layer_ids"])),
        ("vocabulary", lambda: vocabulary(target)),
        ("tokenizer", lambda: round_trip(target)),
        ("chat template", lambda: chat_template(target)),
        ("weights", lambda: weights(target)),
    ]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - the cause is what the check found
            yield Check(name, "failed", describe(error))


def architecture(target: Target, engine: str) -> Check:
    """Whether the installed engine knows the target's class and can capture its hidden states."""
    name = (target.config.architectures or ["none"])[0]
    if engine == "transformers":
        return Check("architecture", "ok", f"{name}, captured with transformers")
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    if name not in ModelRegistry.get_supported_archs():
        return Check("architecture", "failed", f"{name} is not known to the installed vLLM", "Set the target's engine to transformers")
    model = ModelRegistry._try_load_model_cls(name)
    if model is None or not supports_eagle3(model):
        return Check("architecture", "failed", f"vLLM's {name} has no EAGLE-3 interface", "Set the target's engine to transformers")
    return Check("architecture", "ok", f"{name}, served by vLLM's {model.__module__}.{model.__name__}, EAGLE-3 interface")


def layer_ids(target: Target, requested: list[list[int] | None]) -> Check:
    """Whether each draft's aux layer ids exist in the target."""
    found = [target.aux_layer_ids(ids) for ids in requested]
    return Check("layer ids", "ok", f"{' and '.join(map(str, found))} of {target.num_layers} layers")


def vocabulary(target: Target) -> Check:
    """Whether the tokenizer's ids fit the output head."""
    known, rows = len(target.tokenizer()), target.vocab_size
    if known > rows:
        return Check(
            "vocabulary", "failed", f"the tokenizer has {known} ids, the config's vocabulary {rows}", "Take both from the same model"
        )
    return Check("vocabulary", "ok", f"{known} tokenizer ids, {rows} rows in the head")


def round_trip(target: Target) -> Check:
    """Whether text survives the tokenizer, white space included."""
    tokenizer = target.tokenizer()
    back = tokenizer.decode(tokenizer(_SPACED, add_special_tokens=False)["input_ids"], clean_up_tokenization_spaces=False)
    if back != _SPACED:
        return Check("tokenizer", "failed", f"{_SPACED!r} came back as {back!r}", "Check tokenizer.json and tokenizer_class")
    return Check("tokenizer", "ok", "text and white space survive a round trip")


def chat_template(target: Target) -> Check:
    """Whether the chat template renders a conversation, and whether a longer one begins with the shorter one."""
    tokenizer = target.tokenizer()
    if not tokenizer.chat_template:
        return Check("chat template", "failed", "the tokenizer has none", "Add chat_template.jinja to the target's folder")
    turns = [{"role": role, "content": f"turn {number}"} for number, role in enumerate(["user", "assistant"] * 2)]
    rows = render(Conversation("preflight", 1, turns), tokenizer, target.end_tokens(tokenizer))
    if not rows or not all(any(row.loss_mask) for row in rows):
        found = "the rendering of a conversation with the answer does not begin with its prompt, so no answer can be told apart"
        return Check("chat template", "failed", found, "Check the chat template and the tokenizer's end of turn")
    return Check("chat template", "ok", f"renders, {'one row a conversation' if len(rows) == 1 else 'rewrites history: one row a turn'}")


def weights(target: Target) -> Check:
    """Whether the tensors that a draft shares with its target can be found."""
    where = weight_map(target.folder)
    names = head_names(where, target.text_config, target.folder)
    missing = sorted({file for file in where.values() if not (target.folder / file).is_file()})
    if missing:
        return Check(
            "weights", "failed", f"the index names {len(missing)} files that are not there, {missing[0]} first", "Download them again"
        )
    return Check("weights", "ok", ", ".join(f"{part}: {name}" for part, name in names.items()))


if __name__ == "__main__":
    parser = cli.stage_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    cli.run(main, parser)
