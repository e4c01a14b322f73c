localrules:
    fetch_package_file,


rule fetch_package_file:
    input:
        recipe=get_recipe("fetch_package_file", "{download}"),
    output:
        "results/downloads/{download}/{file}",
    log:
        "results/logs/fetch_package_file/{download}/{file}.log",
    benchmark:
        "results/benchmarks/fetch_package_file/{download}/{file}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
    shell:
        "fetch_package_file.py --recipe {input.recipe} --output {output:q} --log {log:q}"


rule convert_target:
    input:
        recipe=get_recipe("convert_target", "{target}"),
        gguf=lambda wildcards: config["targets"][wildcards.target]["gguf"],
    output:
        model=directory("results/targets/{target}/model"),
        manifest="results/targets/{target}/manifest.json",
    log:
        "results/logs/convert_target/{target}.log",
    benchmark:
        "results/benchmarks/convert_target/{target}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    params:
        store=config["store"],
    shell:
        "convert_target.py --recipe {input.recipe} --gguf {input.gguf:q} --store {params.store:q}"
        " --output results/targets/{wildcards.target} --log {log}"


rule fingerprint_target:
    input:
        recipe=get_recipe("fingerprint_target", "{target}"),
        files=get_target_files,
    output:
        "results/targets/{target}/fingerprint.json",
    log:
        "results/logs/fingerprint_target/{target}.log",
    benchmark:
        "results/benchmarks/fingerprint_target/{target}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
    params:
        store=config["store"],
    shell:
        "fingerprint_target.py --recipe {input.recipe} --store {params.store:q} --output {output} --log {log}"


rule preflight_target:
    input:
        force_narrow_preflight,
        recipe=get_recipe("preflight_target", "{target}"),
        target="results/targets/{target}/fingerprint.json",
        sources=ancient(get_target_sources),  # their size and roles; the stages that use them look at every row
        prompts=ancient(get_early_prompts),  # so that downloads are there to be looked at
    output:
        findings="results/preflight/{target}.json",
        table=report(
            "results/preflight/{target}.txt",
            caption="../report/preflight.rst",
            category="Targets",
            labels={"target": "{target}"},
        ),
    log:
        "results/logs/preflight_target/{target}.log",
    benchmark:
        "results/benchmarks/preflight_target/{target}.tsv"
    conda:
        ENVIRONMENT
    resources:
        **over_nodes(get_engine_nodes),
        mem_mb=get_engine_memory,
        gpu=get_engine_gpus,
    params:
        store=config["store"],
        # Snakemake records no function of threads: a pilot takes the findings for all samples.
        max_samples=lambda wildcards, threads: json.dumps(config["max_samples"]),
        vocab_sizes=get_vocab_sizes,
        layer_ids=get_layer_ids,
        evaluation=get_early_evaluation,
        unprepared=get_unprepared,
    shell:
        "preflight_target.py --recipe {input.recipe} --target {input.target} --store {params.store:q}"
        " --max-samples {params.max_samples} --vocab-sizes {params.vocab_sizes:q}"
        " --layer-ids {params.layer_ids:q} --evaluation {params.evaluation:q} --unprepared {params.unprepared:q}"
        " --gpus {resources.gpu} --output {output.findings} --log {log}"


rule tabulate_compatibility:
    output:
        table="results/compatibility.tsv",
        page="results/compatibility.html",
    log:
        "results/logs/tabulate_compatibility.log",
    benchmark:
        "results/benchmarks/tabulate_compatibility.tsv"
    conda:
        ENVIRONMENT
    threads: workflow.cores
    resources:
        mem_mb=8000,
        gpu=int(PLAN.has_gpu),
    params:
        versions=get_engine_versions(),  # another engine, another table
    shell:
        "tabulate_compatibility.py --gpus {resources.gpu} --page {output.page} --output {output.table} --log {log}"
