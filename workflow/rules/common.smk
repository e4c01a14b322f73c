import json
import os
import re
import shlex
import sys
from pathlib import Path

from snakemake.utils import update_config, validate

SCRIPTS = f"{workflow.basedir}/workflow/scripts"
sys.path.insert(0, SCRIPTS)

from aerie.cli import put_on_path
from aerie.config_schema import check_config
from aerie.configuration import (
    FOLDERS,
    Plan,
    engine_versions,
    read_versions,
    typed_values,
)
from aerie.devices import has_driver
from aerie.drafts import draft_files
from aerie.errors import AerieError
from aerie.files import end_future
from aerie.preflight import covers
from aerie.sources import Source
from aerie.stage import input_digests, is_in_store, last_recipe
from aerie.store import command_words, keep_open_to_group, register
from aerie.targets import PATTERNS

# Rules call the commands by name; they run with Snakemake's interpreter, whether or not its environment is activated.
put_on_path(Path(sys.executable).parent, Path(SCRIPTS), Path(workflow.basedir) / "envs")


update_config(config, typed_values(workflow.config_settings.config))
# The configuration's files, and what the command line set beside them.
FILES = [
    os.path.relpath(file)
    for file in workflow.config_settings.configfiles or workflow.configfiles
]
GIVEN = dict(workflow.config_settings.config)
UTILITIES = {"plan", "status", "gc", "verify"}
UNFINISHED_REPORT = Path("results/report-unfinished.html")
try:
    SCHEMA = Path(workflow.basedir) / "workflow/schemas/config.schema.yaml"
    check_config(config, SCHEMA, list(map(Path, FILES)), GIVEN)
    validate(config, schema=str(SCHEMA))  # sets the defaults
    PLAN = Plan(
        config,
        read_versions(Path(SCRIPTS)),
        has_driver(),
        list(map(Path, FILES)),
        GIVEN,
    )
    # What does not fit together is refused here, not amid a traceback.
    assert PLAN.recipes
    # By the words of the command line: Snakemake does not say yet what is asked for.
    if not (UTILITIES - {"plan"}) & set(sys.argv):
        PLAN.check_paths()
        PLAN.check_given()
except AerieError as error:
    raise WorkflowError(str(error))
keep_open_to_group(Path(config["store"]))
# By what the targets ask for: a cluster's login node has no GPU.
PLATFORM = "cuda" if any(map(PLAN.gpus, config["targets"])) else "cpu"
ENVIRONMENT = f"{workflow.basedir}/envs/{PLATFORM}.yaml"


wildcard_constraints:
    target="[^/]+",
    dataset="[^/]+",
    capture="[^/]+",
    run="[^/]+",
    stage="[^/]+",
    digest="[0-9a-f]{16}",


def get_recipe(stage, name):
    """Input function: the recipe file of a stage; `name` may hold wildcards."""
    return lambda wildcards: recipe_file(stage, name.format(**wildcards))


def recipe_file(stage, name):
    return f"results/.recipes/{stage}/{name}/{PLAN.recipe_digest(stage, name)}.json"


def get_recipe_text(wildcards):
    """The text of a recipe of the present configuration."""
    return PLAN.recipes[wildcards.stage, wildcards.name]


def force_replaced_recipe(wildcards):
    """No input. Where another recipe was written since, this one is written again, and so its stage's results are made again.

    Snakemake's records say so too, but they may be lost. Its own --forcerun would make a target of the recipe.
    """
    recipe = Path(recipe_file(wildcards.stage, wildcards.name))
    if last_recipe(recipe.parent) not in (None, recipe):
        workflow.dag.forcefiles.add(str(recipe))
    return []


def get_final_files():
    """The report, every run's results, and every recipe: a missing intermediate file alone makes Snakemake do nothing."""
    recipes = [recipe_file(stage, name) for stage, name in PLAN.recipes]
    drafts = [
        f"results/drafts/{run.run}/manifest.json"
        for run in PLAN.runs.values()
        if PLAN.trains(run)
    ]
    evaluations = [f"results/evaluations/{run}/acceptance.json" for run in PLAN.runs]
    if config["evaluation"]["min_acceptance_length"] is not None:
        evaluations += [f"results/evaluations/{run}/accepted" for run in PLAN.runs]
    return [
        "results/report.html",
        "results/summary.txt",
        *drafts,
        *evaluations,
        *recipes,
    ]


def told_with_place(key, values):
    """{where the key of a draft is set: its value}, as JSON."""
    return json.dumps(
        {
            f"{PLAN.place('drafts', draft, key)}: drafts.{draft}.{key}": value
            for draft, value in values.items()
        }
    )


def get_vocab_sizes(wildcards, threads):
    """Of the target's drafts. Snakemake records no function of threads: a line may move."""
    return told_with_place("vocab_size", PLAN.vocab_sizes(wildcards.target))


def get_layer_ids(wildcards, threads):
    """Of the target's drafts, as above."""
    return told_with_place("aux_layer_ids", PLAN.layer_ids(wildcards.target))


def get_early_evaluation(wildcards, threads):
    """As above: another evaluation changes no other check, and looks at its prompts itself."""
    return json.dumps(PLAN.early_evaluation())


def get_unprepared(wildcards, threads):
    """As above: a draft made elsewhere asks for no other check."""
    return json.dumps(PLAN.unprepared(wildcards.target))


def get_early_prompts(wildcards):
    """The files of the evaluation's prompt sets, but for those that a stage makes which waits for the preflight."""
    return [
        path
        for path in PLAN.early_evaluation()["prompts"].values()
        if not PLAN.is_made_late(path)
    ]


def force_narrow_preflight(wildcards):
    """No input. A target that was examined for fewer samples than are asked for now is examined again: they may not fit the disk."""
    findings = f"results/preflight/{wildcards.target}.json"
    if not covers(Path(findings), config["max_samples"]):
        workflow.dag.forcefiles.add(findings)
    return []


def get_preflights():
    """The findings about every run's target, with their recipes."""
    targets = sorted({run.target for run in PLAN.runs.values()})
    recipes = [recipe_file("preflight_target", target) for target in targets]
    return [*(f"results/preflight/{target}.json" for target in targets), *recipes]


def get_engine_threads(wildcards):
    """All cores for an engine on the CPU; on GPUs a few for each, so that parts run side by side."""
    return (
        max(1, min(8, workflow.cores // 2))
        if PLAN.gpus(wildcards.target)
        else workflow.cores
    )


def get_target(wildcards):
    run = wildcards.get("run")
    return PLAN.runs[run].target if run else wildcards.target


def get_engine_memory(wildcards):
    """MB of a host's memory for an engine: 16 GB, for each of its GPUs' worker processes where there are several."""
    target = get_target(wildcards)
    return 16000 * max(1, PLAN.gpus(target) // PLAN.nodes(target))


def get_engine_gpus(wildcards):
    """GPUs for an engine, over all its nodes."""
    return PLAN.gpus(get_target(wildcards))


def get_engine_nodes(wildcards, input):
    return PLAN.nodes(get_target(wildcards))


def over_nodes(get_nodes):
    """Resources of an engine that may take several nodes of a Slurm job, whose number the function gives.

    With several, `mpi` has the Slurm plugin start the command on the first node without srun, of which it would ask all GPUs
    on one node; it then wants `tasks`, one a node, and takes them for `tasks_per_gpu` unless there is one.
    """

    def where_several(value):
        def get(wildcards, input):
            nodes = get_nodes(wildcards, input)
            return value(nodes) if nodes > 1 else None

        return get

    return {
        "nodes": get_nodes,
        "tasks": where_several(lambda nodes: nodes),
        "tasks_per_gpu": where_several(lambda nodes: 0),
        "mpi": where_several(lambda nodes: "srun"),
    }


def is_utility():
    """Whether only plan, status, gc or verify is asked for."""
    targets = workflow.dag_settings.targets
    return bool(targets) and set(targets) <= UTILITIES


def prepare_run():
    """Notes in the store that this configuration uses it, before the first job does; sets files of the future to now."""
    if UTILITIES & set(workflow.dag_settings.targets):
        PLAN.hand_over()
    if not is_utility():
        try:
            register(Path(config["store"]), FILES, GIVEN, PLAN.recipe_names())
        except AerieError as error:
            raise WorkflowError(str(error))
        end_future(Path("results"), Path(config["store"]))


def makes_report():
    """Whether the report is among the results of this run, not only an earlier one's."""
    dag = workflow.dag
    return any(
        job.rule.name == "build_report"
        for job in dag.bfs(dag.dependencies, *dag.targetjobs)
    )


def print_summary():
    """Shows the runs' key figures."""
    if makes_report():
        UNFINISHED_REPORT.unlink(missing_ok=True)
        print(Path("results/summary.txt").read_text())


def report_finished_runs():
    """After a failure: a report of the runs that are finished all the same. Snakemake makes the whole one only of all of them."""
    from aerie.files import write_atomically
    from aerie.report import page, summary_text
    from aerie.run_results import collect
    from aerie.status import Status

    if not makes_report() or len(PLAN.runs) < 2:
        return
    try:
        status = Status(PLAN)
    except AerieError:  # a store that cannot be read has failed the run, and been told
        return
    runs = [
        collect(Path("results"), *run)
        for run in PLAN.runs.values()
        if status.cell("evaluate_draft", run).digest
    ]
    if 0 < len(runs) < len(PLAN.runs):
        write_atomically(UNFINISHED_REPORT, page(runs))
        print(
            f"{len(runs)} of {len(PLAN.runs)} runs are finished, see {UNFINISHED_REPORT}"
        )
        print(summary_text(runs))


def get_target_files(wildcards):
    """The files that decide a target's fingerprint; those of a hub id are found when the job runs."""
    target = config["targets"][wildcards.target]
    if "gguf" in target:
        return f"results/targets/{wildcards.target}/manifest.json"
    if "path" in target:
        found = {
            path for pattern in PATTERNS for path in Path(target["path"]).glob(pattern)
        }
        return sorted(map(str, found))
    return []


def get_source_files(sources):
    """The files behind a dataset's sources; none for those on the hub."""
    return sorted({str(file) for item in sources for file in Source.of(item).files()})


def get_target_sources(wildcards):
    """The sources of every dataset that is prepared for a target."""
    datasets = {
        run.dataset for run in PLAN.runs.values() if run.target == wildcards.target
    }
    return get_source_files(
        source
        for dataset in datasets
        for source in config["datasets"][dataset]["sources"]
    )


def get_engine_versions():
    """The installed packages that decide what runs, and how."""
    return [f"{name} {version}" for name, version in sorted(engine_versions().items())]


def get_sources(wildcards):
    """The files that a dataset is prepared from: its sources, or the answers regenerated for them."""
    return get_source_files(PLAN.sources(wildcards.target, wildcards.dataset))


def is_nothing_missing(input):
    """Whether a part of an extraction has nothing to do. Evaluated when the input exists."""
    from pyarrow.parquet import read_metadata

    missing = Path(input.missing)
    return missing.exists() and not read_metadata(missing).num_rows


def get_extraction_gpus(wildcards, input):
    """GPUs for a part: none where the store lacks nothing."""
    gpus = PLAN.gpus(wildcards.target)
    return 0 if gpus and is_nothing_missing(input) else gpus


def get_extraction_nodes(wildcards, input):
    nodes = PLAN.nodes(wildcards.target)
    return 1 if nodes > 1 and is_nothing_missing(input) else nodes


def get_run_file(pattern):
    """Input function: a file that depends on the run's target, dataset and capture."""

    def found(wildcards):
        run = PLAN.runs[wildcards.run]
        return pattern.format(**run._asdict(), capture=PLAN.capture(run))

    return found


def get_init_from(wildcards):
    """The files of the draft that a run's draft starts from, if it does."""
    folder = PLAN.init_from(PLAN.runs[wildcards.run])
    return [folder / "config.json", folder / "model.safetensors"] if folder else []


def get_init_from_option(wildcards):
    """The same as an option of the commands."""
    folder = PLAN.init_from(PLAN.runs[wildcards.run])
    return f"--init-from {shlex.quote(str(folder))}" if folder else ""


def get_training_gpus(wildcards, input):
    """GPUs for a training: none where the store has its draft. Evaluated when the inputs exist."""
    gpus = PLAN.training_gpus(PLAN.runs[wildcards.run])
    names = ("target", "dataset", "hidden_states", "vocab_map")
    manifests = {name: Path(input[name]) for name in names}
    files = [Path(input.recipe), *manifests.values(), *map(Path, input.init_from)]
    if not gpus or not all(file.exists() for file in files):
        return gpus
    digests = input_digests(manifests, PLAN.init_from(PLAN.runs[wildcards.run]))
    return (
        0 if is_in_store(Path(input.recipe), digests, Path(config["store"])) else gpus
    )


def get_training_memory(wildcards):
    """MB of the host's memory for a training: each GPU's process holds about 15 packs, half a GB each at a hidden size of 7,168."""
    return 16000 * max(1, PLAN.training_gpus(PLAN.runs[wildcards.run]))


def get_training_threads(wildcards):
    return (
        max(1, min(8, workflow.cores // 2))
        if PLAN.training_gpus(PLAN.runs[wildcards.run])
        else workflow.cores
    )


def get_evaluation_threads(wildcards):
    return get_engine_threads(PLAN.runs[wildcards.run])


def get_draft_files(wildcards):
    """The draft that a run evaluates: the one trained here, or the files of one made elsewhere."""
    run = PLAN.runs[wildcards.run]
    if PLAN.trains(run):
        return [f"results/drafts/{run.run}/manifest.json"]
    folder = Path(PLAN.draft(run)["path"])
    return list(map(str, draft_files(folder)))


def get_prompt_files(wildcards):
    """The files behind the prompt sets of a run's evaluation."""
    paths = PLAN.prompts(PLAN.runs[wildcards.run]).items()
    return [
        f"{path}/manifest.json" if name == "validation" else path
        for name, path in paths
    ]


def get_report_inputs(wildcards):
    """Every manifest that the report reads."""
    files = set()
    for run in PLAN.runs.values():
        for stage, name in PLAN.steps(run):
            if stage in FOLDERS and stage != "convert_target":
                files.add(f"results/{FOLDERS[stage]}/{name}/manifest.json")
    return sorted(files)
