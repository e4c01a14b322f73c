"""The preflight: every check of a target, in order, and their findings. The checks themselves are in checks_*.py."""

import copy
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .configuration import smallest
from .errors import AerieError, describe
from .sources import Source
from .targets import Target

Verdict = Literal["ok", "warning", "failed"]


class Finding(NamedTuple):
    """What a check has to say. found: what was seen; remedy: what to do about it ("" where all is well)."""

    verdict: Verdict
    found: str
    remedy: str = ""


class Row(NamedTuple):
    """A line of the preflight's table."""

    check: str
    verdict: Verdict
    found: str
    remedy: str


@dataclass(frozen=True)
class Subject:
    """What is examined. settings, runtime: of the recipe; granted: GPUs that Snakemake granted; store: the object store;
    vocab_sizes, layer_ids: {file, line and key: vocab_size or aux_layer_ids} of the drafts; evaluation: prompts (files by name),
    max_prompts and max_new_tokens, empty where nothing is to be evaluated; unprepared: datasets of which no sample is made."""

    target: Target
    settings: dict[str, Any]
    runtime: dict[str, Any]
    granted: int
    store: Path
    vocab_sizes: Mapping[str, int] = field(default_factory=dict)
    layer_ids: Mapping[str, list[int] | None] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    unprepared: Sequence[str] = ()

    @cached_property
    def raw(self) -> dict[str, Any]:
        """config.json as it is on disk."""
        return read_json(self.target.folder / "config.json")

    @property
    def raw_text(self) -> dict[str, Any]:
        """The language model's part of config.json."""
        text: dict[str, Any] = self.raw.get("text_config", self.raw)
        return text

    @property
    def architecture(self) -> str:
        return str((self.raw.get("architectures") or ["none"])[0])

    @cached_property
    def tokenizer(self) -> Any:
        return self.target.tokenizer()

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.runtime.get("engine_options") or {})

    @property
    def tensor_parallel(self) -> int:
        return int(self.runtime.get("tensor_parallel") or 1)

    @property
    def nodes(self) -> int:
        return int(self.runtime.get("nodes") or 1)

    @property
    def needs_gpus(self) -> bool:
        return bool(self.runtime.get("device") == "cuda")

    def sources(self, dataset: dict[str, Any]) -> list[Path]:
        """The files of a dataset's sources that are there."""
        return [path for item in dataset["sources"] for path in Source.of(item).files() if path.is_file()]


Check = Callable[[Subject], Finding]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; AerieError with file and line where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise AerieError(f"{path}:{error.lineno}: not valid JSON ({error.msg}). Download the file again.") from error
    except UnicodeDecodeError as error:
        raise AerieError(f"{path}: not a text file ({error}). Download the file again.") from error
    if not isinstance(found, dict):
        raise AerieError(f"{path}: found a JSON {type(found).__name__}, expected an object. Download the file again.")
    return found


def limited(settings: dict[str, Any], most: int | None) -> dict[str, Any]:
    """A preflight's settings with no dataset of more than `most` samples, where that is set."""
    found = copy.deepcopy(settings)
    for dataset in [*found["datasets"], *(capture["dataset"] for capture in found["captures"])]:
        dataset["max_samples"] = smallest(dataset["max_samples"], most)
    return found


def covers(findings: Path, most: int | None) -> bool:
    """Whether these findings, if there are any, were made for at least as many samples: else the disk is to be looked at again."""
    try:
        examined = json.loads(findings.read_text()).get("max_samples")
    except FileNotFoundError:
        return True
    return examined is None or (most is not None and most <= examined)


def checks() -> list[Check]:
    """All checks, in order: cheap ones first, and each after those that it rests on."""
    from . import checks_draft, checks_engine, checks_machine, checks_model, checks_tokenizer, checks_weights

    return [
        checks_machine.versions,
        checks_model.remote_code,
        checks_model.code_files,
        checks_model.configuration,
        checks_machine.device,
        checks_machine.gpus,
        checks_machine.nodes,
        checks_engine.engine_options,
        checks_engine.architecture,
        checks_engine.eagle3_interface,
        checks_engine.decoder_layer,
        checks_engine.embedding_method,
        checks_engine.quantisation,
        checks_draft.layer_ids,
        checks_draft.draft_geometry,
        checks_draft.first_drafts,
        checks_draft.lengths,
        checks_draft.rotary_embedding,
        checks_tokenizer.vocabulary,
        checks_tokenizer.round_trip,
        checks_tokenizer.end_of_turn,
        checks_draft.draft_vocabulary,
        checks_tokenizer.chat_template,
        checks_tokenizer.roles,
        checks_tokenizer.template_options,
        checks_tokenizer.evaluation_prompts,
        checks_engine.serving_files,
        checks_weights.weight_index,
        checks_weights.weight_files,
        checks_weights.head_weights,
        checks_weights.weight_values,
        checks_machine.memory,
        checks_machine.disk,
        checks_engine.twin,
    ]


# Where one of these fails, a later check has nothing to look at, or nothing to look with.
_STOP = ("versions", "remote_code", "code_files", "configuration")
# The twin is built from what these have found sound.
_BEFORE_TWIN = ("device", "gpus", "nodes", "engine_options", "architecture", "eagle3_interface")


def examine(subject: Subject, chosen: Sequence[Check] | None = None) -> Iterator[Row]:
    """Runs the checks; one that raises has failed with the cause as its finding."""
    failed: list[str] = []
    for check in checks() if chosen is None else chosen:
        name = check.__name__
        if name == "twin" and (before := [one for one in failed if one in _BEFORE_TWIN]):
            finding = Finding("failed", f"not run, since these failed: {', '.join(map(readable, before))}", "Mend these first")
        else:
            try:
                finding = check(subject)
            except Exception as error:  # noqa: BLE001 - the cause is what the check found
                finding = Finding("failed", describe(error))
        if finding.verdict == "failed":
            failed.append(name)
        yield Row(readable(name), *finding)
        if failed and failed[-1] in _STOP:
            return


def readable(name: str) -> str:
    """A check's name as the table has it."""
    return name.replace("_", " ").replace("eagle3", "EAGLE-3")


def table(rows: Sequence[Row], width: int = 140) -> str:
    """The findings for a person: check, verdict, found, and below it what to do."""
    names = max(len(row.check) for row in rows)
    indent = " " * (names + 11)
    lines = []
    for row in rows:
        text = row.found + (f"\n-> {row.remedy}" if row.remedy else "")
        wrapped = [part for line in text.splitlines() for part in textwrap.wrap(line, width - len(indent), break_long_words=False) or [""]]
        lines.append(f"{row.check:{names}}  {row.verdict:7}  {wrapped[0]}")
        lines += [indent + line for line in wrapped[1:]]
    return "\n".join(lines) + "\n"
