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
        plan=PLAN.pack(),
        snakefile=workflow.main_snakefile,
    shell:
        "show_plan.py --plan {params.plan} --snakefile {params.snakefile:q} | tee {log}"


rule status:
    log:
        "results/logs/status.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
    params:
        plan=PLAN.pack(),
        words=command_words(FILES, GIVEN),
    shell:
        "show_status.py --plan {params.plan} --words={params.words:q} | tee {log}"


rule gc:
    log:
        "results/logs/gc.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    params:
        plan=PLAN.pack(),
        action=config["gc"],
    shell:
        "collect_garbage.py --plan {params.plan} --action {params.action} | tee {log}"


rule verify:
    log:
        "results/logs/verify.log",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    params:
        plan=PLAN.pack(),
    shell:
        "verify_store.py --plan {params.plan} | tee {log}"
