"""What there is of a run in the results' folders, and how its figures are written for a person."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MISSING = "–"
# Of fewer prompts the bootstrap's bounds are too narrow by far: two that agree would leave no doubt.
LEAST_PROMPTS = 10

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
        return dict(figures_of(self.manifests.get("train_draft")).get("validation") or {})

    @property
    def simulated(self) -> list[float]:
        """Acceptance by position as the trainer simulates it, unconditional; empty where nothing was trained."""
        return list(self.validation.get("accepted_per_position") or [])


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
    made_elsewhere = (read["evaluate_draft"].get("runtime") or {}).get("draft")
    if made_elsewhere:  # what else lies there is of another time
        read |= {"prepare_dataset": {}, "map_vocabulary": {}, "train_draft": {}}
    states = _json_files(results / "hidden_states" / target / dataset, "*/manifest.json")
    used = (read["train_draft"].get("inputs") or {}).get("hidden_states")
    # A dataset can have several captures; the draft's manifest says which one it was trained on.
    read["extract_hidden_states"] = next((one for one in states if one.get("digest") == used), {})
    optional = set(folders) - {"evaluate_draft"} if made_elsewhere else {"regenerate_responses"}
    return RunResults(
        run,
        target,
        dataset,
        draft,
        manifests={stage: manifest for stage, manifest in read.items() if manifest},
        metrics=[] if made_elsewhere else _json_lines(results / "drafts" / run / "metrics.jsonl"),
        stats={} if made_elsewhere else _json(results / "datasets" / target / dataset / "stats.json"),
        coverage={} if made_elsewhere else _json(results / "vocab_maps" / run / "coverage.json"),
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


def figures_of(manifest: Manifest | None) -> dict[str, Any]:
    return (manifest or {}).get("figures") or {}


def cannot_be(speed_up: float | None, acceptance_length: float | None) -> bool:
    """Whether a speed-up is above the acceptance length: a step takes at least as long as one of a single token."""
    return speed_up is not None and acceptance_length is not None and speed_up > acceptance_length


def ratio(speed_up: float | None, acceptance_length: float | None) -> str:
    """A speed-up, with a mark if it cannot be."""
    return decimal(speed_up, 2) + (" (!)" if cannot_be(speed_up, acceptance_length) else "")


def whole(value: Any) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def decimal(value: Any, digits: int) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(value: Any) -> str:
    return MISSING if value is None else f"{100 * value:.2f} %"


def shares(values: Any) -> str:
    return " ".join(f"{value:.3f}" for value in values) if values else MISSING
