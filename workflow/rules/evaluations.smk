localrules:
    build_report,
    check_acceptance,


rule evaluate_draft:
    input:
        recipe=get_recipe("evaluate_draft", "{run}"),
        target=get_run_file("results/targets/{target}/fingerprint.json"),
        draft=get_draft_files,
        prompts=get_prompt_files,
    output:
        acceptance=report(
            "results/evaluations/{run}/acceptance.json",
            caption="../report/acceptance.rst",
            category="Evaluations",
            labels={"run": "{run}"},
        ),
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
        **over_nodes(get_engine_nodes),
        mem_mb=get_engine_memory,
        gpu=get_engine_gpus,
    params:
        store=config["store"],
    shell:
        'evaluate_draft.py --recipe {input.recipe} --target {input.target} --draft "$(dirname {input.draft[0]:q})"'
        " --gpus {resources.gpu} --store {params.store:q} --output results/evaluations/{wildcards.run} --log {log}"


rule check_acceptance:
    input:
        recipe=get_recipe("check_acceptance", "{run}"),
        acceptance="results/evaluations/{run}/acceptance.json",
        report="results/report.html",  # first, so that it is there to see why
    output:
        touch("results/evaluations/{run}/accepted"),
    log:
        "results/logs/check_acceptance/{run}.log",
    benchmark:
        "results/benchmarks/check_acceptance/{run}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=200,
    shell:
        "check_acceptance.py --recipe {input.recipe} --acceptance {input.acceptance} --log {log}"


rule build_report:
    input:
        recipe=get_recipe("build_report", "report"),
        manifests=get_report_inputs,
    output:
        report=report(
            "results/report.html",
            caption="../report/report.rst",
            category="All runs",
            labels={"what": "report"},
        ),
        summary=report(
            "results/summary.txt",
            caption="../report/summary.rst",
            category="All runs",
            labels={"what": "summary"},
        ),
    log:
        "results/logs/build_report.log",
    benchmark:
        "results/benchmarks/build_report.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
    shell:
        "build_report.py --recipe {input.recipe} --results results --summary {output.summary} --output {output.report}"
        " --log {log}"
