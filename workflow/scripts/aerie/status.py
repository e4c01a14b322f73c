"""What has been done of each run, and what is going on: `snakemake status`. Reads manifests, locks and logs alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .configuration import FOLDERS, Plan, Run
from .store import RecipeName, Use, check_layout, is_at_work, root_folder, size_text, uses_of

STAGES = {
    "regenerate_responses": "answers",
    "prepare_dataset": "dataset",
    "extract_hidden_states": "hidden states",
    "map_vocabulary": "vocabulary",
    "train_draft": "draft",
    "evaluate_draft": "evaluation",
}
_TAIL_BYTES = 20_000

Figures = dict[str, Any]


def _shares(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


_KEY_FIGURES: dict[str, Callable[[Figures], str]] = {
    "regenerate_responses": lambda found: f"{found['kept']:,} of {found['prompts']:,} kept",
    "prepare_dataset": lambda found: f"{found['samples']:,} samples, {found['tokens']:,} tokens",
    "extract_hidden_states": lambda found: f"{found['samples']:,} samples, {size_text(found['bytes'])}",
    "map_vocabulary": lambda found: f"{found['draft_vocab_size']:,} tokens, {found['coverage']:.1%}",
    "train_draft": lambda found: f"accuracy {_shares(found['validation']['accuracy'])}",
    "evaluate_draft": lambda found: f"acceptance length {found['acceptance_length']:.2f}, x {found['speed_up']:.2f}",
}


class Status:
    """results: the folder of all results."""

    def __init__(self, plan: Plan, results: Path = Path("results")) -> None:
        self.plan, self.results = plan, results
        self.store = Path(plan.config["store"])
        check_layout(self.store)
        self._uses = uses_of(root_folder(self.store))
        self._cells: dict[tuple[str, str], str] = {}  # runs share stages

    def table(self) -> list[list[str]]:
        """A header, and a row a run: its name, and what is to be said of each stage."""
        return [["run", *STAGES.values()], *(self._row(run) for run in self.plan.runs.values())]

    def _row(self, run: Run) -> list[str]:
        names = dict(self.plan.steps(run))
        return [run.run, *(self.cell(stage, names[stage]) if stage in names else "–" for stage in STAGES)]

    def cell(self, stage: str, name: str) -> str:
        """What goes on in a stage, or its key figures, or why there are none."""
        if (stage, name) not in self._cells:
            self._cells[stage, name] = self._cell(stage, name)
        return self._cells[stage, name]

    def _cell(self, stage: str, name: str) -> str:
        recipe = json.loads(self.plan.recipes[stage, name])
        use = self._uses.get(RecipeName(stage, name, self.plan.recipe_digest(stage, name)), Use())
        if is_at_work(self.store, use):
            return f"running{self._progress(stage, name)}"
        manifest = self._manifest(stage, name)
        if manifest and (manifest["settings"], manifest["version"]) == (recipe["settings"], recipe["version"]):
            return _KEY_FIGURES[stage](manifest["figures"])
        if any((self.store / f"{path}.partial").exists() for path in use.paths):
            return "unfinished"
        return "made with other settings" if manifest else "to do"

    def _manifest(self, stage: str, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.results / FOLDERS[stage] / name / "manifest.json").read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _progress(self, stage: str, name: str) -> str:
        """The last line of progress in the stage's logs; of several parts, each one's."""
        logs = self.results / "logs" / stage
        found = []
        for path in [logs / f"{name}.log", *sorted((logs / name).glob("part-*.log"))]:
            if path.is_file():
                with open(path, "rb") as file:
                    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    lines = re.findall(r"^\w+: ([\d,]+/[\d,]+ \w+.*)$", file.read().decode("utf-8", "replace"), re.MULTILINE)
                found += [f", {lines[-1]}"] if lines else []
        return "".join(found)
