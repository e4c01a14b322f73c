"""What has been done of each run, and what is going on: `snakemake status`. Reads manifests, locks and logs alone."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .configuration import FOLDERS, Plan, Run
from .run_results import ratio
from .sources import Source, sources_digest
from .stage import last_recipe
from .store import RecipeName, Use, check_layout, command_words, configurations_of, is_at_work, root_folder, size_text, uses_of

STAGES = {
    "regenerate_responses": "answers",
    "prepare_dataset": "dataset",
    "extract_hidden_states": "hidden states",
    "map_vocabulary": "vocabulary",
    "train_draft": "draft",
    "evaluate_draft": "evaluation",
}
# The inputs that other stages make, by their names in a manifest.
_MAKERS = {
    "prepare_dataset": {"sources": "regenerate_responses"},
    "extract_hidden_states": {"dataset": "prepare_dataset"},
    "map_vocabulary": {"dataset": "prepare_dataset"},
    "train_draft": {"dataset": "prepare_dataset", "hidden_states": "extract_hidden_states", "vocab_map": "map_vocabulary"},
    "evaluate_draft": {"draft": "train_draft"},
}
_OTHER, _EARLIER = "made with other settings", "of an earlier run"
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
    "evaluate_draft": lambda found: (
        f"acceptance length {found['acceptance_length']:.2f}, x {ratio(found['speed_up'], found['acceptance_length'])}"
    ),
}


class Cell(NamedTuple):
    """What is to be said of a stage. digest: of its result, if that is the present configuration's, else ""."""

    text: str
    digest: str = ""


class Status:
    """results: the folder of all results."""

    def __init__(self, plan: Plan, results: Path = Path("results")) -> None:
        self.plan, self.results = plan, results
        self.store = Path(plan.config["store"])
        check_layout(self.store)
        self._uses = uses_of(root_folder(self.store))
        self._cells: dict[tuple[str, str], Cell] = {}  # runs share stages

    def table(self) -> list[list[str]]:
        """A header, and a row a run: its name, and what is to be said of each stage."""
        return [["run", *STAGES.values()], *(self._row(run) for run in self.plan.runs.values())]

    def notes(self, words: str) -> Iterator[str]:
        """How to see as what it is what was made with other settings. words: the present configuration's on the command line."""
        steps = [(step, run) for run in self.plan.runs.values() for step in self.plan.steps(run) if step[0] in STAGES]
        other = [step for step, run in steps if self.cell(step[0], run).text == _OTHER]
        if not other:
            return
        last = {step: last_recipe(self.results / ".recipes" / "/".join(step)) for step in other}
        made = {(*step, path.stem) for step, path in last.items() if path and path.stem != self.plan.recipe_digest(*step)}
        configurations = configurations_of(root_folder(self.store)).values()
        commands = {command_words(one["files"], one["overrides"]) for one in configurations if made & set(map(tuple, one["recipes"]))}
        yield f"{_OTHER}: `snakemake plan` says which{'; their own status:' if commands - {words} else ''}"
        yield from (f"  snakemake status --cores 1 {command}" for command in sorted(commands - {words}))

    def _row(self, run: Run) -> list[str]:
        stages = dict(self.plan.steps(run))
        return [run.run, *(self.cell(stage, run).text if stage in stages else "–" for stage in STAGES)]

    def cell(self, stage: str, run: Run) -> Cell:
        """What goes on in a stage of a run, or its key figures, or why there are none."""
        name = dict(self.plan.steps(run))[stage]
        if (stage, name) not in self._cells:
            self._cells[stage, name] = self._cell(stage, name, run)
        return self._cells[stage, name]

    def _cell(self, stage: str, name: str, run: Run) -> Cell:
        recipe = json.loads(self.plan.recipes[stage, name])
        use = self._uses.get(RecipeName(stage, name, self.plan.recipe_digest(stage, name)), Use())
        if is_at_work(self.store, use):
            return Cell(f"running{self._progress(stage, name)}")
        manifest = self._manifest(stage, name)
        same = manifest and (manifest["settings"], manifest["version"]) == (recipe["settings"], recipe["version"])
        outdated = self._outdated(stage, manifest["inputs"], run) if same else _OTHER
        if not outdated:
            return Cell(_KEY_FIGURES[stage](manifest["figures"]), manifest["digest"])
        if any((self.store / f"{path}.partial").exists() for path in use.paths):
            return Cell("unfinished")
        return Cell(outdated if manifest else "to do")

    def _outdated(self, stage: str, inputs: dict[str, str], run: Run) -> str:
        """What a result with the present settings is nevertheless, as its inputs are not the present ones; "" where they are."""
        makers = {name: maker for name, maker in _MAKERS.get(stage, {}).items() if maker in dict(self.plan.steps(run))}
        made = {name: self.cell(maker, run) for name, maker in makers.items()}
        if any(cell.text == _OTHER for cell in made.values()):
            return _OTHER
        digests = {name: cell.digest for name, cell in made.items()}
        if digests.get("sources"):
            sources = map(Source.of, self.plan.sources(run.target, run.dataset))
            digests["sources"] = sources_digest(list(sources), lambda answers: made["sources"].digest)
        if not digests.items() <= inputs.items():
            return _EARLIER
        made_at = (self.results / FOLDERS[stage] / dict(self.plan.steps(run))[stage] / "manifest.json").stat().st_mtime
        return _EARLIER if any(file.exists() and file.stat().st_mtime > made_at for file in self._given(stage, run)) else ""

    def _given(self, stage: str, run: Run) -> list[Path]:
        """The files that a stage reads and no stage makes; as Snakemake does, they are judged by their time."""
        if stage == "evaluate_draft":
            return [Path(path) for path in self.plan.prompts(run).values() if Path(path).is_file()]
        if stage == "regenerate_responses" or (stage == "prepare_dataset" and not self.plan.regenerates(run.dataset)):
            return [file for item in self.plan.config["datasets"][run.dataset]["sources"] for file in Source.of(item).files()]
        return []

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
