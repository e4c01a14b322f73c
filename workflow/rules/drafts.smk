def get_run_file(pattern):
    """Input function: a file that depends on the run's target, dataset and capture."""

    def found(wildcards):
        run = PLAN.runs[wildcards.run]
        return pattern.format(**run._asdict(), capture=PLAN.capture(run))

    return found


def get_training_threads(wildcards):
    return max(1, min(8, workflow.cores // 2)) if PLAN.training_gpus(PLAN.runs[wildcards.run]) else workflow.cores


rule map_vocabulary:
    input:
        recipe=get_recipe("map_vocabulary", "{run}"),
        target=get_run_file("results/targets/{target}/fingerprint.json"),
        dataset=get_run_file("results/datasets/{target}/{dataset}/manifest.json"),
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
    shell:
        "python {SCRIPTS}/map_vocabulary.py --recipe {input.recipe} --target {input.target} --dataset $(dirname {input.dataset})"
        " --store {STORE:q} --output results/vocab_maps/{wildcards.run} --log {log}"


rule train_draft:
    input:
        recipe=get_recipe("train_draft", "{run}"),
        target=get_run_file("results/targets/{target}/fingerprint.json"),
        dataset=get_run_file("results/datasets/{target}/{dataset}/manifest.json"),
        states=get_run_file("results/hidden_states/{target}/{dataset}/{capture}/manifest.json"),
        vocab_map="results/vocab_maps/{run}/manifest.json",
    output:
        config="results/drafts/{run}/config.json",
        weights="results/drafts/{run}/model.safetensors",
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
        mem_mb=16000,
        gpu=lambda wildcards: PLAN.training_gpus(PLAN.runs[wildcards.run]),
    shell:
        "python {SCRIPTS}/train_draft.py --recipe {input.recipe} --target {input.target} --dataset $(dirname {input.dataset})"
        " --hidden-states $(dirname {input.states}) --vocab-map $(dirname {input.vocab_map}) --gpus {resources.gpu}"
        " --store {STORE:q} --output results/drafts/{wildcards.run} --log {log}"
