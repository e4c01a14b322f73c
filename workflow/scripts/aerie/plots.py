"""The report's drawings: SVG with real text. The same results give the same bytes: no dates, no random ids."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .run_results import LEAST_PROMPTS, RunResults, percent, shares, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENGINE_NAMES = {"baseline": "without a draft", "ngram": "n-gram", "draft": "with the draft"}
_STYLES = {"baseline": "s--", "ngram": "^:", "draft": "o-"}
_WIDTH = 5.0  # inches: at a phone's width, text of this size can still be read


@dataclass(frozen=True)
class Plot:
    """A drawing for the page; alt says what it shows to who cannot see it."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str


def plots(runs: Sequence[RunResults]) -> list[Plot]:
    """Every plot that there is something to draw for."""
    drawn = (_loss, _accuracy, _acceptance, _draft_tokens, _categories, _contexts, _speed, _lengths, _coverage)
    return [found for plot in drawn if (found := plot(runs))]


def _colour(number: int) -> str:
    return f"C{number % 10}"


def _loss(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if any("loss" in line and "step" in line for line in one.metrics)]

    def draw(axes: "Axes") -> None:
        for number, one in enumerate(drawn):
            for split, style in (("train", {"linewidth": 1.0, "alpha": 0.6}), ("validation", {"marker": "o", "markersize": 5})):
                points = [(line["step"], line["loss"]) for line in one.metrics if line.get("split") == split and "loss" in line]
                if points:
                    axes.plot(*zip(*points, strict=True), color=_colour(number), label=f"{one.run}, {split}", **style)
        axes.set(xlabel="optimizer step", ylabel="loss")
        axes.set_ylim(bottom=0)

    last = [f"{one.run}: validation loss {one.validation['loss']:.3f} at the end" for one in drawn if "loss" in one.validation]
    alt = "Training and validation loss over the optimizer's steps. " + _sentences(last)
    return _plot("loss", "Loss", "Lines are training, dots the validation split after each epoch.", alt, draw, drawn)


def _accuracy(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if any(line.get("accuracy") for line in one.metrics)]

    def draw(axes: "Axes") -> None:
        for number, one in enumerate(drawn):
            lines = [(line["step"], line["accuracy"]) for line in one.metrics if line.get("split") == "validation" and line.get("accuracy")]
            for position, values in enumerate(zip(*(found for _, found in lines), strict=True)):
                label = one.run if position == 0 else None
                axes.plot([step for step, _ in lines], values, "o-", color=_colour(number), alpha=0.75**position, label=label, markersize=4)
        axes.set(xlabel="optimizer step", ylabel="validation accuracy")
        axes.set_ylim(0, 1)

    said = [f"{one.run}: {shares(one.validation.get('accuracy'))} at the end" for one in drawn]
    alt = "Validation accuracy by draft position over the optimizer's steps. " + _sentences(said)
    caption = "The uppermost line of a run is the first draft position; each lower one asks for all positions up to its own."
    return _plot("accuracy", "Accuracy", caption, alt, draw, drawn)


def _acceptance(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if one.acceptance.get("accepted_per_position") or one.simulated]

    def draw(axes: "Axes") -> None:
        longest = 1
        for number, one in enumerate(drawn):
            served, simulated = one.acceptance.get("accepted_per_position") or [], one.simulated
            longest = max(longest, len(served), len(simulated))
            if served:
                bounds = (one.acceptance.get("confidence") or {}).get("accepted_per_position") or [[value, value] for value in served]
                pairs = list(zip(served, bounds, strict=True))
                error = [[max(0, value - low) for value, (low, _) in pairs], [max(0, high - value) for value, (_, high) in pairs]]
                places = range(1, len(served) + 1)
                axes.errorbar(places, served, error, fmt="o-", color=_colour(number), label=f"{one.run}, served", capsize=3)
            if simulated:
                axes.plot(range(1, len(simulated) + 1), simulated, "s:", color=_colour(number), label=f"{one.run}, simulated")
        axes.set(xlabel="draft position", ylabel="accepted, all up to here")
        axes.set_xticks(range(1, longest + 1))
        axes.set_ylim(0, 1)

    said = [f"{one.run}: served {shares(one.acceptance.get('accepted_per_position'))}, simulated {shares(one.simulated)}" for one in drawn]
    alt = "Share of steps whose draft tokens were accepted up to each position, served and simulated. " + _sentences(said)
    caption = (
        "Served: vLLM on the evaluation's first prompt set, with 95 % confidence where it has "
        f"{LEAST_PROMPTS} prompts or more. Simulated: by the trainer on held-out samples of the "
        "dataset. Where both use like texts they should agree; a large gap means that serving and training disagree."
    )
    return _plot("acceptance", "Acceptance by position", caption, alt, draw, drawn)


def _draft_tokens(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if len(one.acceptance.get("by_draft_tokens") or []) > 1]

    def draw(axes: "Axes") -> None:
        most = 1
        for number, one in enumerate(drawn):
            found = one.acceptance["by_draft_tokens"]
            most = max(most, len(found))
            counts = [row["num_draft_tokens"] for row in found]
            axes.plot(counts, [row["acceptance_length"] for row in found], "o-", color=_colour(number), label=one.run)
        axes.set(xlabel="draft tokens a step", ylabel="acceptance length")
        axes.set_xticks(range(1, most + 1))
        axes.set_ylim(bottom=1)

    said = [f"{one.run}: {shares([row['acceptance_length'] for row in one.acceptance['by_draft_tokens']])}" for one in drawn]
    alt = "Acceptance length with one, two, … draft tokens a step. " + _sentences(said)
    caption = "Where the line flattens, more draft tokens cost more than they bring. Estimated from the one run with the most."
    return _plot("draft-tokens", "How many draft tokens", caption, alt, draw, drawn)


def _categories(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if one.acceptance.get("by_category")]
    names = list(dict.fromkeys(_category(row) for one in drawn for row in one.acceptance["by_category"]))

    def draw(axes: "Axes") -> None:
        for number, one in enumerate(drawn):
            for row in one.acceptance["by_category"]:
                place = names.index(_category(row)) + 0.6 * (number + 0.5) / len(drawn) - 0.3
                low, high = (row["confidence"] or {}).get("acceptance_length") or [row["acceptance_length"]] * 2
                first = row is one.acceptance["by_category"][0]
                axes.plot([low, high], [place, place], color=_colour(number), alpha=0.5)
                axes.plot(row["acceptance_length"], place, "o", color=_colour(number), label=one.run if first else None)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=1)
        axes.set_xlabel("acceptance length")

    said = []
    for one in drawn:
        rows = sorted(one.acceptance["by_category"], key=lambda row: row["acceptance_length"])
        said.append(
            f"{one.run}: weakest {_category(rows[0])} {rows[0]['acceptance_length']:.2f}, "
            f"strongest {_category(rows[-1])} {rows[-1]['acceptance_length']:.2f}"
        )
    alt = "Acceptance length by category of the prompts. " + _sentences(said)
    caption = (
        f"Bars are 95 % confidence by bootstrap over prompts; fewer than {LEAST_PROMPTS} are too few for one. Train on more of what is at "
        "the left."
    )
    height = 1.4 + 0.32 * max(len(names), len(names) * len(drawn) / 2)
    return _plot("categories", "Acceptance by category", caption, alt, draw, drawn, height)


def _category(row: dict[str, Any]) -> str:
    return str(row["category"])


def _contexts(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if len(one.acceptance.get("by_context") or []) > 1]
    classes = sorted({(row["from"], row["below"]) for one in drawn for row in one.acceptance["by_context"]})

    def draw(axes: "Axes") -> None:
        for number, one in enumerate(drawn):
            found = one.acceptance["by_context"]
            places = [classes.index((row["from"], row["below"])) for row in found]
            axes.plot(places, [row["acceptance_length"] for row in found], "o-", color=_colour(number), label=one.run)
        axes.set_xticks(range(len(classes)), [f"{low}–{below - 1}" for low, below in classes])
        axes.set(xlabel="tokens before the draft", ylabel="acceptance length")
        axes.set_ylim(bottom=1)

    said = [f"{one.run}: {shares([row['acceptance_length'] for row in one.acceptance['by_context']])}" for one in drawn]
    alt = "Acceptance length by the length of the context. " + _sentences(said)
    return _plot("contexts", "Acceptance by context", "Over all prompt sets, greedy.", alt, draw, drawn)


def _speed(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if one.acceptance.get("speed")]
    sizes = sorted({row["batch_size"] for one in drawn for row in one.acceptance["speed"]})
    lines: dict[str, tuple[str, str, list[tuple[int, float]]]] = {}  # label: colour, style, points
    for number, one in enumerate(drawn):
        for row in one.acceptance["speed"]:
            # Without a draft, and by n-gram, all runs of a target are the same.
            label = f"{one.run if row['engine'] == 'draft' else one.target}, {ENGINE_NAMES[row['engine']]}"
            style = _STYLES[row["engine"]]
            _, _, points = lines.setdefault(label, (_colour(number), style, []))
            if row["batch_size"] not in dict(points):
                points.append((row["batch_size"], row["tokens_per_second"]))

    def draw(axes: "Axes") -> None:
        if len(sizes) == 1:
            for place, (colour, style, points) in enumerate(lines.values()):
                solid = 1.0 if style == _STYLES["draft"] else 0.5
                axes.barh(place, points[0][1], color=colour, alpha=solid, height=0.6)
                axes.text(points[0][1], place, f" {whole(points[0][1])}", va="center")
            axes.set_yticks(range(len(lines)), [label.replace(", ", "\n") for label in lines])
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.set_xlabel(f"tokens/s, {sizes[0]} requests at once")
        else:
            for label, (colour, style, points) in lines.items():
                axes.plot([sizes.index(size) for size, _ in points], [speed for _, speed in points], style, color=colour, label=label)
            axes.set_xticks(range(len(sizes)), list(map(str, sizes)))
            axes.set_yscale("log")
            axes.set(xlabel="requests at once", ylabel="tokens/s")

    said = [f"{label}: " + ", ".join(f"{whole(speed)} at {size}" for size, speed in points) for label, (_, _, points) in lines.items()]
    alt = "Tokens a second by the number of requests at once. " + _sentences(said)
    height = 1.2 + 0.55 * len(lines) if len(sizes) == 1 else None
    return _plot("speed", "Speed", "All tokens of all answers, by the time that they took.", alt, draw, drawn, height)


def _lengths(runs: Sequence[RunResults]) -> Plot | None:
    drawn = {f"{one.target}/{one.dataset}": one.stats for one in runs if (one.stats.get("lengths") or {}).get("counts")}

    def draw(axes: "Axes") -> None:
        for number, (name, stats) in enumerate(sorted(drawn.items())):
            lengths = stats["lengths"]
            axes.stairs(lengths["counts"], lengths["edges"], color=_colour(number), label=name, fill=len(drawn) == 1)
        axes.set(xlabel="tokens in a sample", ylabel="samples")
        axes.set_xlim(left=0)

    said = []
    for name, stats in sorted(drawn.items()):
        said.append(f"{name}: {whole(stats.get('samples'))} samples, {whole(stats.get('tokens'))} tokens")
    alt = "Histogram of sample lengths in tokens. " + _sentences(said)
    return _plot("lengths", "Sample lengths", "Samples as trained on, after truncation.", alt, draw, drawn)


def _coverage(runs: Sequence[RunResults]) -> Plot | None:
    drawn = [one for one in runs if one.coverage.get("coverage") is not None]

    def draw(axes: "Axes") -> None:
        places = range(len(drawn))
        found = [100 * one.coverage["coverage"] for one in drawn]
        axes.barh(places, found, color=[_colour(number) for number in places], height=0.6)
        for place, share in zip(places, found, strict=True):
            axes.text(share - 1, place, f"{share:.2f} %", color="white", ha="right", va="center")
        axes.set_yticks(places, [f"{one.run}\n{whole(one.coverage.get('draft_vocab_size'))} tokens" for one in drawn])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("supervised tokens in the draft's vocabulary, %")

    said = [f"{one.run}: {percent(one.coverage['coverage'])}" for one in drawn]
    alt = "Share of supervised training tokens inside the draft's vocabulary. " + _sentences(said)
    caption = "A token outside the draft's vocabulary can never be proposed: acceptance cannot pass this share."
    return _plot("coverage", "Vocabulary coverage", caption, alt, draw, drawn, 1.2 + 0.6 * len(drawn))


def _sentences(parts: Sequence[str]) -> str:
    return "".join(f"{part}. " for part in parts).strip()


def _plot(
    name: str, title: str, caption: str, alt: str, draw: Callable[["Axes"], None], drawn: Any, height: float | None = None
) -> Plot | None:
    """The plot, or None where there is nothing to draw."""
    return Plot(name, title, caption, alt, _svg(name, draw, height or 3.2)) if drawn else None


def _svg(name: str, draw: Callable[["Axes"], None], height: float) -> str:
    """Draws into an SVG element that scales with the page: text stays text, ids are the plot's own, nothing is dated."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 11}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_axisbelow(True)
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            rows = (len(labels) + 1) // 2
            figure.set_figheight(height + 0.22 * rows)
            figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[0-9.]+pt"', "", text, count=2)
    # Several drawings share a page: each one's ids get its name.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
