import re
import sys
from pathlib import Path

from snakemake.utils import validate

SCRIPTS = f"{workflow.basedir}/workflow/scripts"
sys.path.insert(0, SCRIPTS)

from aerie.cli import put_on_path
from aerie.configuration import Plan
from aerie.devices import has_driver
from aerie.errors import AerieError
from aerie.sources import Source
from aerie.targets import PATTERNS

# Rules call the commands by name; they run with Snakemake's interpreter, whether or not its environment is activated.
put_on_path(Path(sys.executable).parent, Path(SCRIPTS))


def get_versions():
    """{stage: VERSION}, read from the text of each stage's command; importing it would import vLLM."""
    versions = {}
    for path in sorted(Path(SCRIPTS).glob("*.py")):
        found = re.search(r"^VERSION = (\d+)", path.read_text(), re.MULTILINE)
        if found:
            versions[path.stem] = int(found[1])
    return versions


validate(config, schema="../schemas/config.schema.yaml")
try:
    PLAN = Plan(config, get_versions(), has_driver())
except AerieError as error:
    raise WorkflowError(str(error))
ENVIRONMENT = f"{workflow.basedir}/envs/{'cuda' if PLAN.has_gpu else 'cpu'}.yaml"


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


def get_final_files():
    """The report, every run's results, and every recipe: a missing intermediate file alone makes Snakemake do nothing."""
    recipes = [recipe_file(stage, name) for stage, name in PLAN.recipes]
    drafts = [f"results/drafts/{run}/manifest.json" for run in PLAN.runs]
    evaluations = [f"results/evaluations/{run}/acceptance.json" for run in PLAN.runs]
    return [
        "results/report.html",
        "results/summary.txt",
        *drafts,
        *evaluations,
        *recipes,
    ]


def get_engine_threads(wildcards):
    """All cores for an engine on the CPU; on GPUs a few for each, so that parts run side by side."""
    return (
        max(1, min(8, workflow.cores // 2))
        if PLAN.gpus(wildcards.target)
        else workflow.cores
    )


def print_summary():
    """Shows the runs' key figures at the end of a run."""
    if Path("results/summary.txt").exists():
        print(Path("results/summary.txt").read_text())


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


def get_sources(wildcards):
    """The files that a dataset is prepared from: its sources, or the answers regenerated for them."""
    return get_source_files(PLAN.sources(wildcards.target, wildcards.dataset))


def get_extraction_gpus(wildcards, input):
    """GPUs for a part: none where the store lacks nothing. Evaluated when the input exists."""
    gpus = PLAN.gpus(wildcards.target)
    missing = Path(input.missing)
    if gpus and missing.exists():
        from pyarrow.parquet import read_metadata

        return gpus if read_metadata(missing).num_rows else 0
    return gpus


def get_run_file(pattern):
    """Input function: a file that depends on the run's target, dataset and capture."""

    def found(wildcards):
        run = PLAN.runs[wildcards.run]
        return pattern.format(**run._asdict(), capture=PLAN.capture(run))

    return found


def get_training_threads(wildcards):
    return (
        max(1, min(8, workflow.cores // 2))
        if PLAN.training_gpus(PLAN.runs[wildcards.run])
        else workflow.cores
    )


def get_evaluation_threads(wildcards):
    return get_engine_threads(PLAN.runs[wildcards.run])


def get_report_inputs(wildcards):
    """Every manifest that the report reads."""
    files = []
    for run in PLAN.runs.values():
        states = f"results/hidden_states/{run.target}/{run.dataset}/{PLAN.capture(run)}"
        files += [
            f"results/datasets/{run.target}/{run.dataset}/manifest.json",
            f"{states}/manifest.json",
        ]
        files += [
            f"results/{stage}/{run.run}/manifest.json"
            for stage in ("vocab_maps", "drafts", "evaluations")
        ]
        if PLAN.regenerates(run.dataset):
            files.append(
                f"results/regenerated/{run.target}/{run.dataset}/manifest.json"
            )
    return sorted(set(files))
