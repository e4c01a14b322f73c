rule map_vocabulary:
    input:
        recipe=get_recipe("map_vocabulary", "{run}"),
        target=get_run_file("results/targets/{target}/fingerprint.json"),
        dataset=get_run_file("results/datasets/{target}/{dataset}/manifest.json"),
        init_from=get_init_from,
    output:
        d2t="results/vocab_maps/{run}/d2t.npy",
        t2d="results/vocab_maps/{run}/t2d.npy",
        coverage="results/vocab_maps/{run}/coverage.json",
        manifest="results/vocab_maps/{run}/manifest.json",
    log:
        "results/logs/map_vocabulary/{run}.log",
    benchmark:
        "results/benchmarks/map_vocabulary/{run}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=2000,
    params:
        store=config["store"],
        init_from=get_init_from_option,
    shell:
        "map_vocabulary.py --recipe {input.recipe} --target {input.target} --dataset $(dirname {input.dataset})"
        " {params.init_from} --store {params.store:q} --output results/vocab_maps/{wildcards.run} --log {log}"


rule train_draft:
    input:
        recipe=get_recipe("train_draft", "{run}"),
        target=get_run_file("results/targets/{target}/fingerprint.json"),
        dataset=get_run_file("results/datasets/{target}/{dataset}/manifest.json"),
        hidden_states=get_run_file(
            "results/hidden_states/{target}/{dataset}/{capture}/manifest.json"
        ),
        vocab_map="results/vocab_maps/{run}/manifest.json",
        init_from=get_init_from,
    output:
        config="results/drafts/{run}/config.json",
        weights="results/drafts/{run}/model.safetensors",
        card="results/drafts/{run}/README.md",
        metrics="results/drafts/{run}/metrics.jsonl",
        manifest="results/drafts/{run}/manifest.json",
    log:
        "results/logs/train_draft/{run}.log",
    benchmark:
        "results/benchmarks/train_draft/{run}.tsv"
    conda:
        ENVIRONMENT
    threads: get_training_threads
    resources:
        mem_mb=get_training_memory,
        gpu=get_training_gpus,
    params:
        store=config["store"],
        init_from=get_init_from_option,
    shell:
        "train_draft.py --recipe {input.recipe} --target {input.target} --dataset $(dirname {input.dataset})"
        " --hidden-states $(dirname {input.hidden_states}) --vocab-map $(dirname {input.vocab_map}) --gpus {resources.gpu}"
        " {params.init_from} --store {params.store:q} --output results/drafts/{wildcards.run} --log {log}"
