localrules:
    find_missing_states,
    index_hidden_states,


STATES = "results/hidden_states/{target}/{dataset}/{capture}"


rule find_missing_states:
    input:
        recipe=get_recipe("extract_hidden_states", "{target}/{dataset}/{capture}"),
        target="results/targets/{target}/fingerprint.json",
        dataset="results/datasets/{target}/{dataset}/manifest.json",
    output:
        f"{STATES}/missing.parquet",
    log:
        "results/logs/find_missing_states/{target}/{dataset}/{capture}.log",
    benchmark:
        "results/benchmarks/find_missing_states/{target}/{dataset}/{capture}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=2000,
    params:
        store=config["store"],
    shell:
        "find_missing_states.py --recipe {input.recipe} --target {input.target}"
        " --dataset results/datasets/{wildcards.target}/{wildcards.dataset} --store {params.store:q} --output {output} --log {log}"


rule extract_hidden_states:
    input:
        recipe=get_recipe("extract_hidden_states", "{target}/{dataset}/{capture}"),
        target="results/targets/{target}/fingerprint.json",
        preflight=ancient("results/preflight/{target}.json"),  # a gate: what it found changes no result
        dataset="results/datasets/{target}/{dataset}/manifest.json",
        missing=f"{STATES}/missing.parquet",
    output:
        f"{STATES}/part-{{part}}-of-{{parts}}.parquet",
    log:
        "results/logs/extract_hidden_states/{target}/{dataset}/{capture}/part-{part}-of-{parts}.log",
    benchmark:
        "results/benchmarks/extract_hidden_states/{target}/{dataset}/{capture}/part-{part}-of-{parts}.tsv"
    conda:
        ENVIRONMENT
    threads: get_engine_threads
    resources:
        **over_nodes(get_extraction_nodes),
        mem_mb=get_engine_memory,
        gpu=get_extraction_gpus,
    params:
        store=config["store"],
    shell:
        "extract_hidden_states.py --recipe {input.recipe} --target {input.target}"
        " --dataset results/datasets/{wildcards.target}/{wildcards.dataset} --missing {input.missing}"
        " --part {wildcards.part} --parts {wildcards.parts} --gpus {resources.gpu} --store {params.store:q} --output {output} --log {log}"


rule index_hidden_states:
    input:
        recipe=get_recipe("extract_hidden_states", "{target}/{dataset}/{capture}"),
        target="results/targets/{target}/fingerprint.json",
        dataset="results/datasets/{target}/{dataset}/manifest.json",
        parts=expand(
            f"{STATES}/part-{{part}}-of-{{parts}}.parquet",
            part=range(PLAN.parts()),
            parts=PLAN.parts(),
            allow_missing=True,
        ),
    output:
        index=f"{STATES}/index.parquet",
        manifest=f"{STATES}/manifest.json",
    log:
        "results/logs/index_hidden_states/{target}/{dataset}/{capture}.log",
    benchmark:
        "results/benchmarks/index_hidden_states/{target}/{dataset}/{capture}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    params:
        store=config["store"],
    shell:
        "index_hidden_states.py --recipe {input.recipe} --target {input.target}"
        " --dataset results/datasets/{wildcards.target}/{wildcards.dataset} --store {params.store:q}"
        " --output $(dirname {output.index}) --log {log}"
