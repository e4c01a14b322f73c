rule regenerate_responses:
    input:
        recipe=get_recipe("regenerate_responses", "{target}/{dataset}"),
        target="results/targets/{target}/fingerprint.json",
        preflight=ancient("results/preflight/{target}.json"),  # a gate: what it found changes no result
        prompts=lambda wildcards: get_source_files(
            config["datasets"][wildcards.dataset]["sources"]
        ),
    output:
        responses="results/regenerated/{target}/{dataset}/responses.parquet",
        rejects="results/regenerated/{target}/{dataset}/rejects.jsonl",
        manifest="results/regenerated/{target}/{dataset}/manifest.json",
    log:
        "results/logs/regenerate_responses/{target}/{dataset}.log",
    benchmark:
        "results/benchmarks/regenerate_responses/{target}/{dataset}.tsv"
    conda:
        ENVIRONMENT
    threads: get_engine_threads
    resources:
        **over_nodes(get_engine_nodes),
        mem_mb=get_engine_memory,
        gpu=get_engine_gpus,
    params:
        store=config["store"],
    shell:
        "regenerate_responses.py --recipe {input.recipe} --target {input.target}"
        " --gpus {resources.gpu} --store {params.store:q} --output results/regenerated/{wildcards.target}/{wildcards.dataset} --log {log}"


rule prepare_dataset:
    input:
        recipe=get_recipe("prepare_dataset", "{target}/{dataset}"),
        target="results/targets/{target}/fingerprint.json",
        sources=get_sources,
    output:
        samples=directory("results/datasets/{target}/{dataset}/samples"),
        stats="results/datasets/{target}/{dataset}/stats.json",
        rejects="results/datasets/{target}/{dataset}/rejects.jsonl",
        audit=report(
            "results/datasets/{target}/{dataset}/audit.html",
            caption="../report/audit.rst",
            category="Datasets",
            labels={"target": "{target}", "dataset": "{dataset}"},
        ),
        manifest="results/datasets/{target}/{dataset}/manifest.json",
    log:
        "results/logs/prepare_dataset/{target}/{dataset}.log",
    benchmark:
        "results/benchmarks/prepare_dataset/{target}/{dataset}.tsv"
    conda:
        ENVIRONMENT
    threads: 8
    resources:
        mem_mb=lambda wildcards, threads: 3000 + 1000 * threads,
    params:
        store=config["store"],
    shell:
        "prepare_dataset.py --recipe {input.recipe} --target {input.target} --workers {threads}"
        " --store {params.store:q} --output results/datasets/{wildcards.target}/{wildcards.dataset} --log {log}"
