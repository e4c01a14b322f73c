"""What the next run would do and why, before it does anything: `snakemake plan`.

Snakemake's own dry run says which jobs are due. Whether such a job computes, or finds its result in the store, goes by
its key, made here as the stage's command makes it, as far as the digests of its inputs are known by now.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from .configuration import FOLDERS, Plan, Run
from .drafts import draft_files, files_digest
from .errors import AerieError, shown
from .extraction import Job
from .hidden_states import HiddenStateStore, among
from .keys import digest_of, draft_digest, file_sha256
from .progress import duration
from .samples import sample_lengths
from .sources import Source, sources_digest
from .stage import Recipe, last_recipe
from .store import check_layout, free_bytes, size_text
from .targets import PATTERNS, Target, fingerprint_digest, known_hash, locate, target_files

Step = tuple[str, str]  # stage and name, as recipes are named
Manifest = dict[str, Any]

# Rules that serve a stage without a recipe of their own.
_STAGE_OF = {"find_missing_states": "extract_hidden_states", "index_hidden_states": "extract_hidden_states"}
# Settings that decide how much a stage has to do.
_SIZES = ("max_prompts", "max_new_tokens", "temperatures", "batch_sizes")
_NAMES = {
    "fetch_package_file": "{download}",
    "convert_target": "{target}",
    "fingerprint_target": "{target}",
    "preflight_target": "{target}",
    "regenerate_responses": "{target}/{dataset}",
    "prepare_dataset": "{target}/{dataset}",
    "extract_hidden_states": "{target}/{dataset}/{capture}",
    "build_report": "report",
}
_MOST_BYTES_HASHED = 2**28  # a second; larger files leave a plan "unknown until"
_MANIFESTS_LOOKED_AT = 50
_LONGEST_VALUE = 60  # characters of a setting that a line shows
_INPUT = "an input is made anew"


class Until(NamedTuple):
    """A digest that is not known until a stage has run."""

    stage: str


class Forecast(NamedTuple):
    """What a stage would do: "nothing", "restore" (from the store), "run", or "unknown" (until another has run)."""

    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Extraction:
    """The states of one capture of a dataset, and what the store lacks of them. rate: measured tokens/s, or None.

    failed: keys of the dataset's samples that are left out.
    """

    failed: frozenset[str]
    samples: int
    tokens: int
    missing_samples: int
    missing_tokens: int
    missing_bytes: int
    rate: float | None


def dry_run(snakefile: Path, plan: Plan) -> dict[Step, list[str]]:
    """The jobs that Snakemake would run for the default target, as {step: its reasons}. AerieError where it cannot plan."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(plan.config))
        command = [sys.executable, "-m", "snakemake", "-n", "-s", str(snakefile), "-d", ".", "--cores", "all", "--configfile", str(config)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AerieError(f"snakemake cannot plan this run:\n{(done.stderr + done.stdout).strip()[-3000:]}")
    return parse_dry_run(done.stdout + done.stderr, plan)


def parse_dry_run(text: str, plan: Plan) -> dict[Step, list[str]]:
    """The steps that a dry run's text names, with the reasons that Snakemake gives."""
    found: dict[Step, list[str]] = {}
    for block in re.split(r"^(?:local)?rule ", text, flags=re.MULTILINE)[1:]:
        stage = block.split(":", 1)[0]
        fields = dict(re.findall(r"^    (\w+): (.*)$", block, re.MULTILINE))
        stage = _STAGE_OF.get(stage, stage)
        if stage in plan.versions:
            wildcards = dict(pair.split("=", 1) for pair in fields.get("wildcards", "").split(", ") if "=" in pair)
            name = _NAMES.get(stage, "{run}").format(**wildcards)
            found.setdefault((stage, name), []).append(fields.get("reason", ""))
    return found


def _unknown(digests: Iterable[str | Until]) -> Until | None:
    """The first that is not known yet."""
    return next((one for one in digests if isinstance(one, Until)), None)


class Planner:
    """jobs: what Snakemake would run, see `dry_run`. results: the folder of all results."""

    def __init__(self, plan: Plan, jobs: dict[Step, list[str]], results: Path = Path("results")) -> None:
        self.plan, self.jobs, self.results = plan, jobs, results
        self.store = Path(plan.config["store"])
        check_layout(self.store)
        self._forecasts: dict[Step, Forecast] = {}
        self._digests: dict[Step, str | Until] = {}
        self._extractions: dict[Step, Extraction | None] = {}
        self._tables: dict[Path, pd.DataFrame] = {}
        self._made: dict[str, list[Manifest]] = {}  # by stage: what there is to measure by
        self._runs = {step: run for run in plan.runs.values() for step in plan.steps(run)}

    def forecast(self, step: Step) -> Forecast:
        """What a stage would do, and why."""
        if step not in self._forecasts:
            self._forecasts[step] = self._forecast(step)
        return self._forecasts[step]

    def _forecast(self, step: Step) -> Forecast:
        if step not in self.jobs:
            return Forecast("nothing")
        stage, _ = step
        if stage not in FOLDERS:  # not kept in the store, and cheap
            return Forecast("run", self._why(step))
        if stage == "extract_hidden_states":
            extraction = self.extraction(step)
            if extraction is None:
                return Forecast("unknown", self._until(self._unknown_input(step), step))
            verdict = "run" if extraction.missing_samples else "restore"
            return Forecast(verdict, self._why(step))
        key = self.key(step)
        if isinstance(key, Until):
            return Forecast("unknown", self._until(key, step))
        finished = self.store / stage / key
        if (finished / "manifest.json").exists():
            return Forecast("restore", self._why(step))
        begun = "goes on from an unfinished attempt" if finished.with_name(key + ".partial").exists() else ""
        return Forecast("run", "; ".join(filter(None, [self._why(step), begun])))

    def key(self, step: Step) -> str | Until:
        """The key of a stage that the store keeps."""
        inputs = self.inputs(step)
        unknown = self._unknown_input(step)
        return unknown if unknown else self.recipe(step).key({name: value for name, value in inputs.items() if isinstance(value, str)})

    def inputs(self, step: Step) -> dict[str, str | Until]:
        """The content digest of each input of a stage, by name, as its command has them."""
        stage, name = step
        run = self._runs[step]
        if stage == "convert_target":
            return {"gguf": self._file(Path(self.plan.config["targets"][name]["gguf"]))}
        inputs = {"target": self.digest(("fingerprint_target", run.target))}
        pair = f"{run.target}/{run.dataset}"
        if stage == "regenerate_responses":
            return inputs | {"prompts": self._sources(self.plan.config["datasets"][run.dataset]["sources"], pair)}
        if stage == "prepare_dataset":
            return inputs | {"sources": self._sources(self.plan.sources(*pair.split("/")), pair)}
        if stage == "evaluate_draft":
            return inputs | {"draft": self._draft(run), "prompts": self._prompts(run)}
        inputs["dataset"] = self.digest(("prepare_dataset", pair))
        first = self.plan.init_from(run)
        if first and stage in ("map_vocabulary", "train_draft"):
            inputs["init_from"] = self._first_draft(first)
        if stage == "train_draft":
            inputs["hidden_states"] = self.digest(("extract_hidden_states", f"{pair}/{self.plan.capture(run)}"))
            inputs["vocab_map"] = self.digest(("map_vocabulary", name))
        return inputs

    def digest(self, step: Step) -> str | Until:
        """The content digest of what a stage makes, where that is known before it runs."""
        if step not in self._digests:
            self._digests[step] = self._digest(step)
        return self._digests[step]

    def _digest(self, step: Step) -> str | Until:
        stage, name = step
        if stage == "fingerprint_target":
            return self._fingerprint(name)
        if step not in self.jobs:
            manifest = self.manifest(step)
            return str(manifest["digest"]) if manifest else Until(stage)
        if stage == "extract_hidden_states":
            job, folder, extraction = self._job(step), self._dataset(step), self.extraction(step)
            if not job or not folder or not extraction:
                return self._unknown_input(step) or Until(stage)
            keys = sorted(set(self._lengths(folder)["sample_key"]) - extraction.failed)
            return digest_of({"capture_key": job.capture_key, "sample_keys": keys})
        key = self.key(step)
        if isinstance(key, Until):
            return key
        stored = _json(self.store / stage / key / "manifest.json")
        return str(stored["digest"]) if stored else Until(stage)

    def _fingerprint(self, name: str) -> str | Until:
        step = ("fingerprint_target", name)
        if step not in self.jobs:
            known = _json(self.results / "targets" / name / "fingerprint.json")
            return str(known["digest"]) if known else Until(step[0])
        target = self.plan.config["targets"][name]
        if "gguf" in target:
            convert = ("convert_target", name)
            key = self.key(convert)
            stored = _json(self.store / convert[0] / key / "manifest.json") if isinstance(key, str) else {}
            files = {Path(file).name: entry["sha256"] for file, entry in stored.get("files", {}).items() if Path(file).match("model/*")}
            chosen = {file: sha256 for file, sha256 in files.items() if any(Path(file).match(pattern) for pattern in PATTERNS)}
            return fingerprint_digest(chosen) if chosen else key if isinstance(key, Until) else Until(convert[0])
        if "path" not in target:
            return Until(step[0])
        hashes = {path.name: self._file(path, step[0]) for path in target_files(Path(target["path"]))}
        known_ones: dict[str, str] = {file: value for file, value in hashes.items() if isinstance(value, str)}
        return fingerprint_digest(known_ones) if hashes and len(known_ones) == len(hashes) else Until(step[0])

    def _draft(self, run: Run) -> str | Until:
        """Digest of the draft that a run evaluates."""
        if self.plan.trains(run):
            return self.digest(("train_draft", run.run))
        folder = Path(self.plan.draft(run)["path"])
        hashes = {path: self._file(path, "evaluate_draft") for path in draft_files(folder)}
        return _unknown(hashes.values()) or files_digest(folder, lambda path: str(hashes[path]))

    def _prompts(self, run: Run) -> str | Until:
        """Digest of a run's prompt sets, in their order; one of them may be its dataset."""
        found = []
        for name, path in self.plan.prompts(run).items():
            own = name == "validation"
            digest = self.digest(("prepare_dataset", f"{run.target}/{run.dataset}")) if own else self._file(Path(path))
            if isinstance(digest, Until):
                return digest
            found.append([name, digest])
        return digest_of(found)

    def _sources(self, items: Sequence[Any], pair: str) -> str | Until:
        """Digest of a dataset's sources; one that is made by a stage has that stage's digest."""
        sources = [Source.of(item) for item in items]
        answers = Path(f"results/{FOLDERS['regenerate_responses']}/{pair}/responses.parquet")
        try:
            files = [file for source in sources for file in source.files()]
        except AerieError:  # a folder that a download fills
            return Until("fetch_package_file")
        found = {file: self.digest(("regenerate_responses", pair)) if file == answers else self._file(file) for file in files}
        return _unknown(found.values()) or sources_digest(sources, lambda file: str(found[file]))

    def _first_draft(self, folder: Path) -> str | Until:
        """Digest of a draft that another starts from: a run's of this plan, or one that is there."""
        made_by = folder.name if folder.parent == self.results / FOLDERS["train_draft"] else ""
        if made_by in self.plan.runs:
            return self.digest(("train_draft", made_by))
        if not (folder / "config.json").exists():
            return Until("map_vocabulary")
        weights = self._file(folder / "model.safetensors", "map_vocabulary")
        return weights if isinstance(weights, Until) else draft_digest(folder, weights)

    def _file(self, path: Path, reader: str = "") -> str | Until:
        """sha256 of a file, if it is there and cheap to have; else unknown until `reader` (by default the stage that makes it)."""
        downloads = [name for name in self.plan.config["downloads"] if path.is_relative_to(f"results/downloads/{name}")]
        if any(("fetch_package_file", name) in self.jobs for name in downloads) or not path.exists():
            return Until(reader or "fetch_package_file")
        known = known_hash(path, self.store / "file_hashes")
        if known is None and path.stat().st_size > _MOST_BYTES_HASHED:
            return Until(reader or f"{path} is hashed and the stage that reads it")
        return known or file_sha256(path)

    def _unknown_input(self, step: Step) -> Until | None:
        return _unknown(self.inputs(step).values())

    def _until(self, unknown: Until | None, step: Step) -> str:
        first = f"until {unknown.stage if unknown else 'fingerprint_target'} has run"
        return "; ".join([first, *(why for why in [self._why(step)] if why != _INPUT)])

    # --- hidden states ------------------------------------------------------------------------------------------------

    def extraction(self, step: Step) -> Extraction | None:
        """What the store lacks of a capture; None while the dataset or the target is unknown."""
        if step not in self._extractions:
            job, folder = self._job(step), self._dataset(step)
            self._extractions[step] = self._count(step, job, folder) if job and folder else None
        return self._extractions[step]

    def _count(self, step: Step, job: Job, folder: Path) -> Extraction:
        samples = self._lengths(folder)
        store = HiddenStateStore(self.store, job.capture_key)
        known = store.known()
        lacking = samples[~among(samples["sample_key"], set(known["sample_key"].to_list()))]
        failed = frozenset(job.given_up(store, lacking["sample_key"], len(samples)))
        missing = lacking[~among(lacking["sample_key"], failed)]
        seconds = float(known["seconds"].sum())
        rate = int(known["tokens"].sum()) / seconds if seconds else self._rate(step)
        tokens = int(missing["tokens"].sum())
        return Extraction(failed, len(samples), int(samples["tokens"].sum()), len(missing), tokens, tokens * job.row_bytes, rate)

    def _job(self, step: Step) -> Job | None:
        run = self._runs[step]
        digest = self.digest(("fingerprint_target", run.target))
        if isinstance(digest, Until):
            return None
        settings = self.recipe(("fingerprint_target", run.target)).settings
        os.environ["HF_HUB_OFFLINE"] = "1"  # a plan downloads nothing
        try:
            locate(settings["location"])
        except AerieError:
            return None
        return Job.of(self.recipe(step), Target(run.target, digest, settings["location"], settings["trust_remote_code"]))

    def _dataset(self, step: Step) -> Path | None:
        """The folder of the samples that a run will have: in results/, or in the store where they will be restored from."""
        run = self._runs[step]
        dataset = ("prepare_dataset", f"{run.target}/{run.dataset}")
        if dataset not in self.jobs:
            folder = self.results / "datasets" / dataset[1]
        else:
            key = self.key(dataset)
            folder = self.store / "prepare_dataset" / key / "output" if isinstance(key, str) else Path("none")
        return folder if (folder / "samples").is_dir() else None

    def _lengths(self, folder: Path) -> pd.DataFrame:
        if folder not in self._tables:
            self._tables[folder] = sample_lengths(folder)
        return self._tables[folder]

    # --- why ----------------------------------------------------------------------------------------------------------

    def _why(self, step: Step) -> str:
        """The settings that changed since this was last made; else the inputs that did; else Snakemake's own words."""
        last = self.manifest(step) or self._last_recipe(step)
        if not last:
            return "not made yet"
        recipe = self.recipe(step)
        changes = []
        if last["version"] != recipe.version:
            changes.append(f"VERSION {last['version']} → {recipe.version}")
        changes += differences(last["settings"], recipe.settings)
        changes += differences(last["runtime"], recipe.runtime)
        before = last.get("inputs", {})
        inputs = self.inputs(step) if step[0] in FOLDERS else {}
        changes += [f"{name} changed" for name, now in inputs.items() if isinstance(now, str) and before.get(name, now) != now]
        return "; ".join(changes or sorted({_plain(reason) for reason in self.jobs[step]}))

    def recipe(self, step: Step) -> Recipe:
        return Recipe(**json.loads(self.plan.recipes[step]))

    def _last_recipe(self, step: Step) -> Manifest:
        """The recipe that the last run wrote."""
        path = last_recipe(self.results / ".recipes" / "/".join(step))
        return _json(path) if path else {}

    def manifest(self, step: Step) -> Manifest:
        """The manifest of what a stage last made; empty where there is none."""
        stage, name = step
        return _json(self.results / FOLDERS[stage] / name / "manifest.json") if stage in FOLDERS else {}

    # --- how long -----------------------------------------------------------------------------------------------------

    def seconds(self, step: Step) -> float | None:
        """Seconds that a stage will take, from what was measured; None where nothing comparable was."""
        if step[0] == "extract_hidden_states":
            extraction = self.extraction(step)
            if extraction:
                return extraction.missing_tokens / extraction.rate if extraction.rate else None
            made = self.manifest(step)
            return made["figures"]["seconds"] if made and self._computes_alike(made, step) else None
        if step[0] == "train_draft":
            last, tokens = next(self._measured(step), None), self._dataset_figures(step).get("tokens")
            if not last or not tokens:
                return None
            starting = max(0.0, last["seconds"] - last["figures"]["seconds"])
            return starting + self.recipe(step).settings["training"]["epochs"] * tokens / last["figures"]["tokens_per_second"]
        settings = self.recipe(step).settings
        alike = (one for one in self._measured(step) if all(one["settings"].get(name) == settings.get(name) for name in _SIZES))
        last = next(alike, None)
        if last is None:
            return None
        if step[0] != "regenerate_responses":
            return float(last["seconds"])
        asked = last["figures"].get("asked")  # how many it will ask, only the same prompts tell
        same = last["inputs"]["prompts"] == self.inputs(step)["prompts"]
        return last["seconds"] * last["figures"]["prompts"] / asked if asked and same else None

    def _rate(self, step: Step) -> float | None:
        return next((float(found) for one in self._measured(step) if (found := one["figures"].get("tokens_per_second"))), None)

    def _computes_alike(self, manifest: Manifest, step: Step) -> bool:
        """Whether a stage was made with the dtype that it will compute in: another's speed is another."""
        return _dtype(manifest["settings"]) == _dtype(self.recipe(step).settings)

    def _measured(self, step: Step) -> Iterator[Manifest]:
        """Manifests of the same stage, target and dtype: this very result's first, then the other runs', then the store's newest."""
        target = self.digest(("fingerprint_target", self._runs[step].target))
        if step[0] not in self._made:
            paths = sorted(self.store.glob(f"{step[0]}/*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            stored = [_json(path) for path in paths[:_MANIFESTS_LOOKED_AT]]
            self._made[step[0]] = [*(self.manifest(other) for other in self._runs if other[0] == step[0]), *stored]
        for manifest in [self.manifest(step), *self._made[step[0]]]:
            same_target = manifest and (step[0] == "convert_target" or manifest["inputs"].get("target") == target)
            if same_target and self._computes_alike(manifest, step):
                yield manifest

    def _dataset_figures(self, step: Step) -> dict[str, Any]:
        """Counts of a run's dataset: as it will be where that is known, else as it was."""
        run = self._runs[step]
        dataset = ("prepare_dataset", f"{run.target}/{run.dataset}")
        key = self.key(dataset) if dataset in self.jobs else None
        stored = _json(self.store / dataset[0] / key / "manifest.json") if isinstance(key, str) else {}
        return dict((stored or self.manifest(dataset)).get("figures", {}))

    # --- the text -----------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """The plan for a person: run by run, then the sums."""
        for run in self.plan.runs.values():
            yield from self._run_lines(run)
        yield from self._sum_lines()

    def _run_lines(self, run: Run) -> Iterator[str]:
        head = f"run {run.run}: target {run.target}, dataset {run.dataset}, draft {run.draft}"
        forecasts = [(step, self.forecast(step)) for step in self.plan.steps(run)]
        if all(forecast.verdict == "nothing" for _, forecast in forecasts):
            yield f"{head}: nothing to do"
        else:
            yield head
            for (stage, name), (verdict, why) in forecasts:
                if stage == "fetch_package_file":  # a run has several
                    why = ": ".join(filter(None, [name, why]))
                yield f"  {stage:22} {verdict:8} {why}".rstrip()
        step = ("extract_hidden_states", f"{run.target}/{run.dataset}/{self.plan.capture(run)}")
        if not self.plan.trains(run):
            return
        extraction = self.extraction(step)
        if extraction:
            lacks = (
                f"the store lacks the states of {extraction.missing_samples:,} ({extraction.missing_tokens:,} tokens, "
                f"{size_text(extraction.missing_bytes)})"
                if extraction.missing_samples
                else "the store has all their states"
            )
            without = f"; {len(extraction.failed):,} failed and are left out" if extraction.failed else ""
            yield f"  {extraction.samples:,} samples, {extraction.tokens:,} tokens; {lacks}{without}"
            if extraction.missing_samples and step not in self.jobs:
                yield "  their states are gone from the store; `snakemake --forcerun find_missing_states` extracts them again"
        else:
            last = self._dataset_figures(step)
            known = f"; last time {last['samples']:,} samples, {last['tokens']:,} tokens" if last else ""
            yield f"  samples and missing states: unknown until prepare_dataset has run{known}"

    def _sum_lines(self) -> Iterator[str]:
        steps = [step for step in dict.fromkeys(step for run in self.plan.runs.values() for step in self.plan.steps(run))]
        verdicts = {step: self.forecast(step).verdict for step in steps}
        counts = {verdict: list(verdicts.values()).count(verdict) for verdict in ("run", "restore", "unknown", "nothing")}
        yield f"{len(steps)} stages of {len(self.plan.runs)} runs: " + ", ".join(
            f"{count} {name}" for name, count in counts.items() if count
        )
        extractions = {step: self.extraction(step) for step in steps if step[0] == "extract_hidden_states" and step in self.jobs}
        needed, free = sum(found.missing_bytes for found in extractions.values() if found), free_bytes(self.store)
        to_write = size_text(needed)
        if None in extractions.values():
            to_write = f"{to_write}, and what is not known yet" if needed else "not known yet"
        yield f"hidden states to write: {to_write}; free on the disk of {self.store}: {size_text(free)}"
        if needed > free:
            yield f"WARNING: the disk is {size_text(needed - free)} short; the extraction will refuse to begin"
        for words, wanted in (("to run", "run"), ("more where unknown stages have to run", "unknown")):
            timed = {step: self.seconds(step) for step in steps if verdicts[step] == wanted and step[0] in FOLDERS}
            if timed:
                known = [seconds for seconds in timed.values() if seconds is not None]
                untimed = [step for step, seconds in timed.items() if seconds is None]
                unsized = {stage for stage, name in untimed if stage == "train_draft" and next(self._measured((stage, name)), None)}
                unmeasured = {stage for stage, _ in untimed} - unsized
                measured = f"{'at least ' if untimed else ''}{duration(sum(known))}, one job after the other, at measured rates"
                if any(stage == "extract_hidden_states" and seconds is not None for (stage, _), seconds in timed.items()):
                    measured += " (extraction without the target's loading)"
                parts = [measured if known else "not known"]
                parts += [f"no measured rate yet for {', '.join(sorted(unmeasured))}"] if unmeasured else []
                parts += [f"how much data is not known yet for {', '.join(unsized)}"] if unsized else []
                yield f"time {words}: {'; '.join(parts)}"


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two settings, as "name.of.setting old → new"; long values are cut."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted({*before, *now})
        parts = [differences(before.get(name), now.get(name), f"{path}.{name}" if path else name) for name in names]
        return [line for part in parts for line in part]
    if before == now:
        return []
    if isinstance(before, list) and isinstance(now, list) and any(isinstance(one, dict) for one in [*before, *now]):
        if len(before) != len(now):
            return [f"{path} {len(before)} → {len(now)} entries"]
        return [line for number, pair in enumerate(zip(before, now, strict=True)) for line in differences(*pair, f"{path}[{number}]")]
    return [f"{path} {shown(before, _LONGEST_VALUE)} → {shown(now, _LONGEST_VALUE)}"]


def _dtype(settings: dict[str, Any]) -> Any:
    """What a stage's settings say that it computes in; None where they say nothing."""
    return settings.get("dtype") or settings.get("compute_dtype") or settings.get("training", {}).get("compute_dtype")


def _plain(reason: str) -> str:
    """Snakemake's reason without the recipes, which are told as settings."""
    reason = reason.replace("Forced execution", "made for fewer samples")  # of the preflight
    kept = [part for part in reason.split("; ") if not part.startswith(("Set of input files", "Input files updated by another job"))]
    return re.sub(r"results/\.recipes/\S+(, )?", "", "; ".join(kept)).strip(" :,;") or _INPUT


def _json(path: Path) -> Manifest:
    """A JSON object; empty where the file is missing or half made by a run that is going on."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
