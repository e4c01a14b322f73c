import os
import re
import sys
from pathlib import Path

from snakemake.utils import validate

SCRIPTS = f"{workflow.basedir}/workflow/scripts"
sys.path.insert(0, SCRIPTS)
# The commands run with the interpreter that runs Snakemake, whether or not its environment is activated.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

from aerie.configuration import Plan
from aerie.errors import AerieError


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
    PLAN = Plan(config, get_versions(), has_gpu=Path("/proc/driver/nvidia/version").exists())
except AerieError as error:
    raise WorkflowError(str(error))
STORE = config["store"]
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
    return ["results/report.html", "results/summary.txt", *drafts, *evaluations, *recipes]


def get_engine_threads(wildcards):
    """All cores for an engine on the CPU; on GPUs a few for each, so that parts run side by side."""
    return max(1, min(8, workflow.cores // 2)) if PLAN.gpus(wildcards.target) else workflow.cores


def print_summary():
    """Shows the runs' key figures at the end of a run."""
    if Path("results/summary.txt").exists():
        print(Path("results/summary.txt").read_text())


localrules:
    write_recipe,


rule write_recipe:
    output:
        "results/.recipes/{stage}/{name}/{digest}.json",
    log:
        "results/logs/write_recipe/{stage}/{name}/{digest}.log",
    benchmark:
        "results/benchmarks/write_recipe/{stage}/{name}/{digest}.tsv"
    params:
        text=get_recipe_text,
    conda:
        ENVIRONMENT
    resources:
        mem_mb=200,
    shell:
        "python {SCRIPTS}/write_recipe.py --text {params.text:q} --output {output} --log {log}"
