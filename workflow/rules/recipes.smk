localrules:
    write_recipe,


rule write_recipe:
    input:
        force_replaced_recipe,
    output:
        update("results/.recipes/{stage}/{name}/{digest}.json"),  # not deleted first: another run may be reading it
    log:
        "results/logs/write_recipe/{stage}/{name}/{digest}.log",
    benchmark:
        "results/benchmarks/write_recipe/{stage}/{name}/{digest}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=200,
    params:
        text=get_recipe_text,
    shell:
        "write_recipe.py --text {params.text:q} --output {output} --log {log}"
