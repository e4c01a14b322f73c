# snakemake plan · status · gc · verify: targets without outputs, which do their work each time they are asked for.


localrules:
    plan,
    status,
    gc,
    verify,


rule plan:
    log:
        "results/logs/plan.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    params:
        snakefile=workflow.main_snakefile,
    shell:
        "show_plan.py --snakefile {params.snakefile:q} | tee {log}"


rule status:
    log:
        "results/logs/status.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
    params:
        words=command_words(FILES, GIVEN),
    shell:
        "show_status.py --words={params.words:q} | tee {log}"


rule gc:
    log:
        "results/logs/gc.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    params:
        action=config["gc"],
    shell:
        "collect_garbage.py --action {params.action} | tee {log}"


rule verify:
    log:
        "results/logs/verify.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    shell:
        "verify_store.py | tee {log}"
