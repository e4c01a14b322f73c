localrules:
    build_report,


def get_evaluation_threads(wildcards):
    return get_engine_threads(PLAN.runs[wildcards.run])


rule evaluate_draft:
    input:
        recipe=get_recipe("evaluate_draft", "{run}"),
        target=get_run_file("results/targets/{target}/fingerprint.json"),
        draft="results/drafts/{run}/manifest.json",
        prompts=config["evaluation"]["prompts"],
    output:
        acceptance="results/evaluations/{run}/acceptance.json",
        per_prompt="results/evaluations/{run}/per_prompt.parquet",
        manifest="results/evaluations/{run}/manifest.json",
    log:
        "results/logs/evaluate_draft/{run}.log",
    benchmark:
        "results/benchmarks/evaluate_draft/{run}.tsv"
    conda:
        ENVIRONMENT
    threads: get_evaluation_threads
    resources:
        mem_mb=8000,
        gpu=lambda wildcards: PLAN.gpus(PLAN.runs[wildcards.run].target),
    shell:
        "python {SCRIPTS}/evaluate_draft.py --recipe {input.recipe} --target {input.target} --draft $(dirname {input.draft})"
        " --prompts {input.prompts:q} --gpus {resources.gpu} --store {STORE:q} --output results/evaluations/{wildcards.run} --log {log}"


def get_report_inputs(wildcards):
    """Every manifest that the report reads."""
    files = []
    for run in PLAN.runs.values():
        states = f"results/hidden_states/{run.target}/{run.dataset}/{PLAN.capture(run)}"
        files += [f"results/datasets/{run.target}/{run.dataset}/manifest.json", f"{states}/manifest.json"]
        files += [f"results/{stage}/{run.run}/manifest.json" for stage in ("vocab_maps", "drafts", "evaluations")]
        if PLAN.regenerates(run.dataset):
            files.append(f"results/regenerated/{run.target}/{run.dataset}/manifest.json")
    return sorted(set(files))


rule build_report:
    input:
        recipe=get_recipe("build_report", "report"),
        manifests=get_report_inputs,
    output:
        report="results/report.html",
        summary="results/summary.txt",
    log:
        "results/logs/build_report.log",
    benchmark:
        "results/benchmarks/build_report.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
    shell:
        "python {SCRIPTS}/build_report.py --recipe {input.recipe} --results results --summary {output.summary} --output {output.report}"
        " --log {log}"
