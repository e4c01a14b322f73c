from snakemake.utils import min_version

min_version("9.0")


# Given with --configfile, or by another workflow, a configuration stands for itself: the demo's is not mixed into it.
if not workflow.config_settings.configfiles and set(config) <= set(
    workflow.config_settings.config
):

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/recipes.smk"
include: "workflow/rules/targets.smk"
include: "workflow/rules/datasets.smk"
include: "workflow/rules/hidden_states.smk"
include: "workflow/rules/drafts.smk"
include: "workflow/rules/evaluations.smk"
include: "workflow/rules/store.smk"


rule all:
    default_target: True
    input:
        get_final_files(),


rule preflight:
    input:
        get_preflights(),


rule compatibility:
    input:
        "results/compatibility.tsv",


onstart:
    prepare_run()


onsuccess:
    print_summary()


onerror:
    report_finished_runs()
