"""The report: what every run came to, read from the results' folders and drawn as one page that needs no network.

The same results give the same bytes: no dates, no random ids.
"""

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATES = Path(__file__).parents[2] / "report"
MISSING = "–"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class RunResults:
    """What is there of a run; a part that is missing is empty, and named in `missing`.

    manifests: by stage, in the order of the workflow. metrics: the lines of metrics.jsonl. stats, coverage and
    acceptance: the JSON files of the dataset, the vocabulary map and the evaluation.
    """

    run: str
    target: str
    dataset: str
    draft: str
    manifests: dict[str, Manifest] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    coverage: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def validation(self) -> dict[str, Any]:
        """The draft's last validation: accuracy (by position, unconditional), loss, …"""
        return dict(_figures(self.manifests.get("train_draft")).get("validation") or {})


def collect(results: Path, run: str, target: str, dataset: str, draft: str) -> RunResults:
    """Reads one run's part of the results' folder."""
    folders = {
        "regenerate_responses": results / "regenerated" / target / dataset,
        "prepare_dataset": results / "datasets" / target / dataset,
        "extract_hidden_states": None,
        "map_vocabulary": results / "vocab_maps" / run,
        "train_draft": results / "drafts" / run,
        "evaluate_draft": results / "evaluations" / run,
    }
    read = {stage: _json(folder / "manifest.json") if folder else {} for stage, folder in folders.items()}
    states = _json_files(results / "hidden_states" / target / dataset, "*/manifest.json")
    used = (read["train_draft"].get("inputs") or {}).get("hidden_states")
    # A dataset can have several captures; the draft's manifest says which one it was trained on.
    read["extract_hidden_states"] = next((one for one in states if one.get("digest") == used), {})
    optional = {"regenerate_responses"}
    return RunResults(
        run,
        target,
        dataset,
        draft,
        manifests={stage: manifest for stage, manifest in read.items() if manifest},
        metrics=_json_lines(results / "drafts" / run / "metrics.jsonl"),
        stats=_json(results / "datasets" / target / dataset / "stats.json"),
        coverage=_json(results / "vocab_maps" / run / "coverage.json"),
        acceptance=_json(results / "evaluations" / run / "acceptance.json"),
        missing=tuple(stage for stage, manifest in read.items() if not manifest and stage not in optional),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json_files(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [_json(path) for path in sorted(folder.glob(pattern))]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # a line cut off by a kill
            continue
    return found


def _figures(manifest: Manifest | None) -> dict[str, Any]:
    return (manifest or {}).get("figures") or {}


# --- tables -----------------------------------------------------------------------------------------------------------

SUMMARY_HEADER = (
    "run",
    "target",
    "samples",
    "tokens",
    "coverage",
    "validation",
    "accept. length",
    "by position",
    "tok/s without",
    "tok/s with",
    "speed-up",
)


def summary_rows(runs: Iterable[RunResults]) -> list[tuple[str, ...]]:
    """One row of texts a run, under SUMMARY_HEADER."""
    rows: list[tuple[str, ...]] = []
    for one in runs:
        speeds = one.acceptance.get("tokens_per_second") or {}
        rows.append(
            (
                one.run,
                one.target,
                _whole(one.stats.get("samples")),
                _whole(one.stats.get("tokens")),
                _percent(one.coverage.get("coverage")),
                _shares(one.validation.get("accuracy")),
                _decimal(one.acceptance.get("acceptance_length"), 3),
                _shares(one.acceptance.get("accepted_per_position")),
                _whole(speeds.get("baseline")),
                _whole(speeds.get("draft")),
                _decimal(one.acceptance.get("speed_up"), 2),
            )
        )
    return rows


def summary_text(runs: Sequence[RunResults]) -> str:
    """The summary as an aligned table for a terminal, with what it says about speed below."""
    return "\n".join([*aligned([SUMMARY_HEADER, *summary_rows(runs)]), *verdicts(runs)]) + "\n"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of texts for a terminal; its first row is the header."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def verdicts(runs: Iterable[RunResults]) -> list[str]:
    """One sentence a run about what speculation did to the speed, said plainly where it lost."""
    found = []
    for one in runs:
        speeds, speed_up = one.acceptance.get("tokens_per_second"), one.acceptance.get("speed_up")
        if not speeds or not speed_up:
            continue
        where = (
            f"{_whole(speeds['draft'])} against {_whole(speeds['baseline'])} tokens/s at {one.acceptance.get('batch_size', '?')} requests "
            f"at once on {(one.acceptance.get('device') or {}).get('draft', 'an unnamed device')}"
        )
        if speed_up < 1:
            found.append(f"{one.run}: serving with the draft was SLOWER than without, {where} (x {speed_up:.2f}).")
        else:
            found.append(f"{one.run}: serving with the draft was {speed_up:.2f} times as fast as without, {where}.")
    return found


STAGE_HEADER = ("stage", "of", "seconds", "tokens/s", "bytes", "key", "version")


def stage_rows(runs: Iterable[RunResults]) -> list[tuple[str, ...]]:
    """One row a computed object (runs share them), in the order of the workflow, with its cost when first computed."""
    found: dict[tuple[int, str, str], tuple[str, ...]] = {}
    order = ("regenerate_responses", "prepare_dataset", "extract_hidden_states", "map_vocabulary", "train_draft", "evaluate_draft")
    for one in runs:
        for stage, manifest in one.manifests.items():
            shared = stage in ("regenerate_responses", "prepare_dataset", "extract_hidden_states")
            name = f"{one.target}/{one.dataset}" if shared else one.run
            figures = _figures(manifest)
            speed = figures.get("tokens_per_second")
            size = figures.get("bytes") or sum(entry.get("bytes", 0) for entry in (manifest.get("files") or {}).values())
            key = str(manifest.get("key", ""))
            found[order.index(stage), name, key] = (
                stage,
                name,
                _decimal(figures.get("seconds") if stage == "extract_hidden_states" else manifest.get("seconds"), 1),
                _whole(speed.get("draft") if isinstance(speed, dict) else speed),
                _whole(size),
                key[:12] or MISSING,
                str(manifest.get("version", MISSING)),
            )
    return [found[place] for place in sorted(found)]


def software(runs: Iterable[RunResults]) -> list[tuple[str, str]]:
    """(versions, stages that ran with them), each combination once."""
    found: dict[str, set[str]] = {}
    for one in runs:
        for stage, manifest in one.manifests.items():
            versions = ", ".join(f"{name} {version}" for name, version in sorted((manifest.get("versions") or {}).items()))
            if versions:
                found.setdefault(versions, set()).add(stage)
    return [(versions, ", ".join(sorted(stages))) for versions, stages in sorted(found.items())]


def rejections(runs: Iterable[RunResults]) -> list[tuple[str, str, str]]:
    """(target/dataset, reason, rows) of what the datasets left out."""
    found = {}
    for one in runs:
        name = f"{one.target}/{one.dataset}"
        for reason, count in sorted((_figures(one.manifests.get("regenerate_responses")).get("dropped") or {}).items()):
            found[name, f"regeneration: {reason}"] = (name, f"regeneration: {reason}", _whole(count))
        for reason, count in sorted((one.stats.get("rejected") or {}).items()):
            found[name, reason] = (name, reason, _whole(count))
    return [found[place] for place in sorted(found)]


def _whole(value: Any) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def _decimal(value: Any, digits: int) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def _percent(value: Any) -> str:
    return MISSING if value is None else f"{100 * value:.2f} %"


def _shares(values: Any) -> str:
    return " ".join(f"{value:.3f}" for value in values) if values else MISSING


# --- plots ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plot:
    """A drawing for the page: SVG with real text, or "" where there is nothing to draw; alt says what it shows."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str


def plots(runs: Sequence[RunResults]) -> list[Plot]:
    """Loss, acceptance by position, sample lengths and vocabulary coverage."""
    return [_loss(runs), _acceptance(runs), _lengths(runs), _coverage(runs)]


def _loss(runs: Sequence[RunResults]) -> Plot:
    drawn = [one for one in runs if any("loss" in line and "step" in line for line in one.metrics)]

    def draw(axes: "Axes") -> None:
        for number, one in enumerate(drawn):
            for split, style in (("train", {"linewidth": 1.0, "alpha": 0.6}), ("validation", {"marker": "o", "markersize": 5})):
                points = [(line["step"], line["loss"]) for line in one.metrics if line.get("split") == split and "loss" in line]
                if points:
                    axes.plot(*zip(*points, strict=True), color=f"C{number % 10}", label=f"{one.run}, {split}", **style)
        axes.set(xlabel="optimizer step", ylabel="loss")
        axes.set_ylim(bottom=0)

    last = [f"{one.run}: validation loss {one.validation['loss']:.3f} at the end" for one in drawn if "loss" in one.validation]
    alt = "Training and validation loss over the optimizer's steps. " + _sentences(last)
    caption = "Lines are training, dots the validation split after each epoch."
    return Plot("loss", "Loss", caption, alt, _svg("loss", draw) if drawn else "")


def _acceptance(runs: Sequence[RunResults]) -> Plot:
    drawn = [one for one in runs if one.acceptance.get("accepted_per_position") or one.validation.get("accuracy")]

    def draw(axes: "Axes") -> None:
        longest = 1
        for number, one in enumerate(drawn):
            served, validated = one.acceptance.get("accepted_per_position") or [], one.validation.get("accuracy") or []
            longest = max(longest, len(served), len(validated))
            for values, style, what in ((served, "o-", "served"), (validated, "s:", "validation")):
                if values:
                    axes.plot(range(1, len(values) + 1), values, style, color=f"C{number % 10}", label=f"{one.run}, {what}")
        axes.set(xlabel="draft position", ylabel="accepted, all positions up to here")
        axes.set_xticks(range(1, longest + 1))
        axes.set_ylim(0, 1)

    said = [f"{one.run}: served {_shares(one.acceptance.get('accepted_per_position'))}" for one in drawn]
    alt = "Share of drafts accepted up to each position, served and on the validation split. " + _sentences(said)
    caption = (
        "Served: vLLM on the evaluation's prompts. Validation: the trainer's own count on held-out samples of the dataset. "
        "Where both use like texts they should agree; a large gap means that serving and training disagree."
    )
    return Plot("acceptance", "Acceptance by position", caption, alt, _svg("acceptance", draw) if drawn else "")


def _lengths(runs: Sequence[RunResults]) -> Plot:
    drawn = {f"{one.target}/{one.dataset}": one.stats for one in runs if (one.stats.get("lengths") or {}).get("counts")}

    def draw(axes: "Axes") -> None:
        for number, (name, stats) in enumerate(sorted(drawn.items())):
            lengths = stats["lengths"]
            axes.stairs(lengths["counts"], lengths["edges"], color=f"C{number % 10}", label=name, fill=len(drawn) == 1)
        axes.set(xlabel="tokens in a sample", ylabel="samples")
        axes.set_xlim(left=0)

    said = []
    for name, stats in sorted(drawn.items()):
        said.append(f"{name}: {_whole(stats.get('samples'))} samples, {_whole(stats.get('tokens'))} tokens")
    alt = "Histogram of sample lengths in tokens. " + _sentences(said)
    return Plot("lengths", "Sample lengths", "Samples as trained on, after truncation.", alt, _svg("lengths", draw) if drawn else "")


def _coverage(runs: Sequence[RunResults]) -> Plot:
    drawn = [one for one in runs if one.coverage.get("coverage") is not None]

    def draw(axes: "Axes") -> None:
        places = range(len(drawn))
        shares = [100 * one.coverage["coverage"] for one in drawn]
        axes.barh(places, shares, color=[f"C{number % 10}" for number in places], height=0.6)
        for place, share in zip(places, shares, strict=True):
            axes.text(share - 1, place, f"{share:.2f} %", color="white", ha="right", va="center")
        axes.set_yticks(places, [f"{one.run}\n{_whole(one.coverage.get('draft_vocab_size'))} tokens" for one in drawn])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("supervised tokens that the draft's vocabulary holds, %")

    said = [f"{one.run}: {_percent(one.coverage['coverage'])}" for one in drawn]
    alt = "Share of supervised training tokens inside the draft's vocabulary. " + _sentences(said)
    caption = "A token outside the draft's vocabulary can never be proposed: acceptance cannot pass this share."
    height = 1.2 + 0.6 * len(drawn)
    return Plot("coverage", "Vocabulary coverage", caption, alt, _svg("coverage", draw, height) if drawn else "")


def _sentences(parts: Sequence[str]) -> str:
    return "".join(f"{part}. " for part in parts).strip()


def _svg(name: str, draw: Callable[["Axes"], None], height: float = 3.6) -> str:
    """Draws into an SVG element that scales with the page: text stays text, ids are the plot's own, nothing is dated."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 11}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=9, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[0-9.]+pt"', "", text, count=2)
    # Several drawings share a page: each one's ids get its name.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(runs: Sequence[RunResults]) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("report.html.j2")
    drawn = plots(runs)
    return template.render(
        summary_header=SUMMARY_HEADER,
        summary=summary_rows(runs),
        verdicts=verdicts(runs),
        slower=any((one.acceptance.get("speed_up") or 1) < 1 for one in runs),
        missing=[(one.run, ", ".join(one.missing)) for one in runs if one.missing],
        evaluations=[(one.run, one.acceptance) for one in runs if one.acceptance],
        notes=next((one.acceptance["notes"] for one in runs if one.acceptance.get("notes")), []),
        plots=[(plot, Markup(_labelled(plot))) for plot in drawn],
        stage_header=STAGE_HEADER,
        stages=stage_rows(runs),
        rejections=rejections(runs),
        software=software(runs),
    )


def _labelled(plot: Plot) -> str:
    """The SVG with its alternative text, for readers that cannot see it."""
    return plot.svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(plot.alt)}" ', 1)
