# snakemake plan · status · gc · verify: targets without outputs, which do their work each time they are asked for.


localrules:
    plan,
    status,
    gc,
    verify,


rule plan:
    params:
        plan=PLAN.pack(),
        snakefile=workflow.main_snakefile,
    shell:
        "show_plan.py --plan {params.plan} --snakefile {params.snakefile:q}"


rule status:
    params:
        plan=PLAN.pack(),
    shell:
        "show_status.py --plan {params.plan}"


rule gc:
    params:
        plan=PLAN.pack(),
        action=config["gc"],
    shell:
        "collect_garbage.py --plan {params.plan} --action {params.action}"


rule verify:
    params:
        plan=PLAN.pack(),
    shell:
        "verify_store.py --plan {params.plan}"
