"""The report: what every run came to, read from the results' folders and drawn as one page that needs no network.

The same results give the same bytes: no dates, no random ids.
"""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from .pages import render
from .plots import ENGINE_NAMES, Plot, plots
from .run_results import LEAST_PROMPTS, MISSING, Manifest, RunResults, cannot_be, decimal, figures_of, percent, ratio, shares, whole

_SHARED = ("regenerate_responses", "prepare_dataset", "extract_hidden_states")
_ORDER = (*_SHARED, "map_vocabulary", "train_draft", "evaluate_draft")

# --- tables -----------------------------------------------------------------------------------------------------------

# What decides first: a phone shows the beginning of a row.
SUMMARY_HEADER = (
    "run",
    "accept. length",
    "95 %",
    "speed-up",
    "tok/s without",
    "tok/s with",
    "by position",
    "simulated",
    "coverage",
    "samples",
    "tokens",
    "target",
)

SUMMARY_LEGEND = (
    "accept. length, simulated: tokens a step of the target (1: the draft is no help), served, with its 95 % confidence "
    f"(of {LEAST_PROMPTS} prompts or more: fewer are too few for one), and in "
    "training's validation; by position: share of steps that accepted the draft up to its 1st, 2nd, … token; coverage: share of the "
    "train split's supervised tokens that the draft's vocabulary has"
)


@dataclass(frozen=True)
class Table:
    """A table for the page: texts, of which the columns from first_number on are numbers."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str
    first_number: int = 2


def summary_rows(runs: Iterable[RunResults]) -> list[tuple[str, ...]]:
    """One row of texts a run, under SUMMARY_HEADER."""
    rows: list[tuple[str, ...]] = []
    for one in runs:
        speeds = one.acceptance.get("tokens_per_second") or {}
        rows.append(
            (
                one.run,
                decimal(one.acceptance.get("acceptance_length"), 3),
                _bounds(one.acceptance),
                ratio(one.acceptance.get("speed_up"), _allowed(one, "draft")),
                whole(speeds.get("baseline")),
                whole(speeds.get("draft")),
                shares(one.acceptance.get("accepted_per_position")),
                decimal(one.validation.get("acceptance_length"), 3),
                percent(one.coverage.get("coverage")),
                whole(one.stats.get("samples")),
                whole(one.stats.get("tokens")),
                one.target,
            )
        )
    return rows


def _allowed(one: RunResults, engine: str) -> float | None:
    """The acceptance length that an engine's speed-ups cannot be above."""
    greedy = [row for row in one.acceptance.get("acceptance") or [] if row["engine"] == engine and row["temperature"] == 0]
    return greedy[0]["acceptance_length"] if greedy else None


def _bounds(found: dict[str, Any]) -> str:
    """The confidence of an acceptance length, or why there is none."""
    bounds = (found.get("confidence") or {}).get("acceptance_length")
    if bounds:
        return "–".join(decimal(bound, 3) for bound in bounds)
    return f"< {LEAST_PROMPTS} prompts" if "acceptance_length" in found else MISSING


def summary_text(runs: Sequence[RunResults]) -> str:
    """The summary as an aligned table for a terminal, with what its columns mean and what it says about speed below."""
    return "\n".join([*aligned([SUMMARY_HEADER, *summary_rows(runs)]), SUMMARY_LEGEND, *verdicts(runs), *doubts(runs)]) + "\n"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of texts for a terminal; its first row is the header."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def verdicts(runs: Iterable[RunResults]) -> list[str]:
    """One sentence a run about what speculation did to the speed, said plainly where it lost, and where that was not measured."""
    found = []
    for one in runs:
        speeds, speed_up = one.acceptance.get("tokens_per_second"), one.acceptance.get("speed_up")
        if not speeds or not speed_up:
            continue
        where = (
            f"{whole(speeds['draft'])} against {whole(speeds['baseline'])} tokens/s at {one.acceptance.get('batch_size', '?')} requests "
            f"at once on {(one.acceptance.get('device') or {}).get('draft', 'an unnamed device')}"
        )
        allowed = _allowed(one, "draft")
        if cannot_be(speed_up, allowed):
            text = f"{one.run}: how fast serving with the draft is, was not measured: {where} (x {ratio(speed_up, allowed)}) cannot be."
        elif speed_up < 1:
            text = f"{one.run}: serving with the draft was SLOWER than without, {where} (x {speed_up:.2f})."
        else:
            text = f"{one.run}: serving with the draft was {speed_up:.2f} times as fast as without, {where}."
        others = [row for row in one.acceptance.get("speed") or [] if row["engine"] == "draft"]
        if len(others) > 1:
            text += (
                " By requests at once: " + ", ".join(f"{row['batch_size']}: x {ratio(row['speed_up'], allowed)}" for row in others) + "."
            )
        found.append(text)
    return found


def doubts(runs: Iterable[RunResults]) -> list[str]:
    """One sentence where speed-ups, marked (!) in the tables, are above what the acceptance allows."""
    marked = [
        f"{one.run} ({ENGINE_NAMES[row['engine']]}, {row['batch_size']} at once): x {row['speed_up']:.2f}"
        for one in runs
        for row in one.acceptance.get("speed") or []
        if cannot_be(row["speed_up"], _allowed(one, row["engine"]))
    ]
    if not marked:
        return []
    return [
        f"(!) A speed-up cannot be above the acceptance length, as it is here: {'; '.join(marked)}. The machine was busy with something "
        "else while it was timed, most likely without a draft. The store (results/.store by default) keeps that timing: to measure again, "
        "delete `baselines` and `evaluate_draft` in it and give `snakemake --forcerun evaluate_draft`."
    ]


def tables(runs: Sequence[RunResults]) -> list[Table]:
    """Every table below the plots that has a row."""
    found = [_acceptance(runs), _speed(runs), _differences(runs), _datasets(runs), _rejections(runs), _stages(runs)]
    return [table for table in found if table.rows]


def _acceptance(runs: Sequence[RunResults]) -> Table:
    rows = []
    for one in runs:
        for row in one.acceptance.get("acceptance") or []:
            same = row.get("identical_outputs")
            rows.append(
                (
                    one.run,
                    ENGINE_NAMES[row["engine"]],
                    row["prompt_set"],
                    f"{row['temperature']:g}",
                    whole(row["prompts"]),
                    decimal(row["acceptance_length"], 3),
                    _bounds(row),
                    shares(row["accepted_per_position"]),
                    f"{same['same']} of {same['same'] + same['different']}" if same else MISSING,
                )
            )
    header = ("run", "engine", "prompts", "temperature", "number", "accept. length", "95 %", "by position", "identical answers")
    caption = (
        "By position: the share of all steps that accepted the draft's tokens up to the first, second, … one. "
        "Identical: greedy answers that are, token by token, those without a draft."
    )
    return Table("acceptance-table", "Acceptance in detail", header, rows, caption, 3)


def _speed(runs: Sequence[RunResults]) -> Table:
    rows = []
    for one in runs:
        for row in one.acceptance.get("speed") or []:
            first, rest = row["time_to_first_token_ms"], row["time_per_output_token_ms"]
            rows.append(
                (
                    one.run,
                    ENGINE_NAMES[row["engine"]],
                    whole(row["batch_size"]),
                    decimal(row["tokens_per_second"], 1),
                    ratio(row["speed_up"], _allowed(one, row["engine"])),
                    decimal(first["median"], 1),
                    decimal(first["p90"], 1),
                    decimal(rest["median"], 1),
                    decimal(rest["p90"], 1),
                )
            )
    header = ("run", "engine", "requests at once", "tokens/s", "speed-up", "first token, ms", "p90", "each further token, ms", "p90")
    caption = "The first prompt set, greedy. Times are medians over requests, and their 90th percentiles."
    return Table("speed-table", "Speed in detail", header, rows, caption)


def _differences(runs: Sequence[RunResults]) -> Table:
    rows = []
    for one in runs:
        for row in one.acceptance.get("differences") or []:
            tokens = (json.dumps(row[name], ensure_ascii=False) for name in ("baseline_token_there", "draft_token_there"))
            rows.append((one.run, row["prompt_set"], whole(row["line"]), whole(row["first_difference"]), *tokens))
    caption = (
        "Where greedy answers with and without the draft part: the token's place in the answer, and both tokens. The first of each run."
    )
    header = ("run", "prompts", "line", "token", "without the draft", "with it")
    return Table("differences", "Answers that differ", header, rows, caption)


def _datasets(runs: Sequence[RunResults]) -> Table:
    found = {}
    for one in runs:
        tokens, supervised = one.stats.get("tokens"), one.stats.get("supervised_tokens")
        if tokens:
            found[f"{one.target}/{one.dataset}"] = (
                whole(one.stats.get("samples")),
                whole(((one.stats.get("splits") or {}).get("validation") or {}).get("samples")),
                whole(tokens),
                percent(supervised / tokens if supervised is not None else None),
                whole((one.stats.get("lengths") or {}).get("longest")),
            )
    header = ("dataset", "samples", "of them validation", "tokens", "supervised", "longest")
    rows = [(name, *texts) for name, texts in sorted(found.items())]
    return Table("datasets", "Datasets", header, rows, "Supervised: the share of the tokens that the draft learns to say.", 1)


def _rejections(runs: Iterable[RunResults]) -> Table:
    found = {}
    for one in runs:
        name = f"{one.target}/{one.dataset}"
        for reason, count in sorted((figures_of(one.manifests.get("regenerate_responses")).get("dropped") or {}).items()):
            found[name, f"regeneration: {reason}"] = (name, f"regeneration: {reason}", whole(count))
        for reason, count in sorted((one.stats.get("rejected") or {}).items()):
            found[name, reason] = (name, reason, whole(count))
    rows = [found[place] for place in sorted(found)]
    caption = "Each row, its reason and what was found are in results/datasets/…/rejects.jsonl and results/regenerated/…/rejects.jsonl."
    return Table("rejections", "Left out of the datasets", ("dataset", "reason", "rows"), rows, caption)


def computed(runs: Iterable[RunResults]) -> list[tuple[str, str, Manifest]]:
    """(stage, of what, manifest) of every computed object, once, in the order of the workflow; runs share some."""
    found = {}
    for one in runs:
        for stage, manifest in one.manifests.items():
            name = f"{one.target}/{one.dataset}" if stage in _SHARED else one.run
            found[_ORDER.index(stage), name, str(manifest.get("key", ""))] = (stage, name, manifest)
    return [found[place] for place in sorted(found)]


def _stages(runs: Sequence[RunResults]) -> Table:
    rows = []
    for stage, name, manifest in computed(runs):
        figures = figures_of(manifest)
        speed = figures.get("tokens_per_second")
        seconds = figures.get("seconds") if stage == "extract_hidden_states" else manifest.get("seconds")
        gpus = (manifest.get("runtime") or {}).get("gpus")
        rows.append(
            (
                stage,
                name,
                decimal(seconds, 1),
                decimal(gpus * seconds / 3600, 2) if gpus and seconds is not None else MISSING,
                whole(speed.get("draft") if isinstance(speed, dict) else speed),
                whole(figures.get("bytes") or sum(entry.get("bytes", 0) for entry in (manifest.get("files") or {}).values())),
                str(manifest.get("key", ""))[:12] or MISSING,
                str(manifest.get("version", MISSING)),
            )
        )
    caption = "Seconds, GPU-hours and speeds are those of the first computation; a result found in the store cost nothing again."
    return Table("stages", "Stages", ("stage", "of", "seconds", "GPU-hours", "tokens/s", "bytes", "key", "version"), rows, caption)


def provenance(runs: Iterable[RunResults]) -> list[tuple[str, str]]:
    """(stage and what it is of, settings and where they were computed) of every computed object."""
    found = []
    for stage, name, manifest in computed(runs):
        git = manifest.get("git") or {}
        commit = f"{git['commit'][:12]}{', with changes' if git.get('dirty') else ''}" if git.get("commit") else "no git checkout"
        if "started" in manifest:
            gpus = ", ".join(manifest.get("gpus") or []) or "none"
            where = {"computed": f"{manifest['started']} on {manifest['host']}", "GPUs": gpus, "code": commit}
        else:  # an index of hidden states
            where = {"computed": "in parts; each shard's header has its host, GPUs and git commit"}
        made = where | {
            "versions": ", ".join(f"{package} {version}" for package, version in sorted((manifest.get("versions") or {}).items())),
            "settings": json.dumps(manifest.get("settings") or {}, indent=1, sort_keys=True, ensure_ascii=False),
            "runtime": json.dumps(manifest.get("runtime") or {}, indent=1, sort_keys=True, ensure_ascii=False),
            "inputs": json.dumps(manifest.get("inputs") or {}, indent=1, sort_keys=True),
        }
        found.append((f"{stage} of {name}", "\n".join(f"{what}: {text}" for what, text in made.items())))
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def page(runs: Sequence[RunResults]) -> str:
    """The whole page."""
    return render(
        "report.html.j2",
        summary=Table("runs", "Runs", SUMMARY_HEADER, summary_rows(runs), "", first_number=1),
        verdicts=verdicts(runs),
        doubts=doubts(runs),
        slower=any((one.acceptance.get("speed_up") or 1) < 1 for one in runs),
        missing=[(one.run, ", ".join(one.missing)) for one in runs if one.missing],
        plots=[(plot, Markup(_labelled(plot))) for plot in plots(runs)],
        tables=tables(runs),
        samples=[(one.run, one.acceptance["samples"]) for one in runs if one.acceptance.get("samples")],
        notes=next((one.acceptance["notes"] for one in runs if one.acceptance.get("notes")), []),
        provenance=provenance(runs),
    )


def _labelled(plot: Plot) -> str:
    """The SVG with its alternative text, for readers that cannot see it."""
    return plot.svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(plot.alt)}" ', 1)
