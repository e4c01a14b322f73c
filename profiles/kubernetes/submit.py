#!/usr/bin/env python
"""Makes a Kubernetes Job of a Snakemake job script, creates it by kubectl and prints its name; --show prints the Job instead.

    submit.py [--show] JOBSCRIPT

The script's line "# properties = {…}" names the rule, its threads and its resources.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


def make_job(script: Path, folder: Path) -> dict[str, Any]:
    """job.yaml with what the script's properties say; it runs in `folder`."""
    found = re.search(r"^# properties = (\{.*\})$", script.read_text(), re.MULTILINE)
    if not found:
        sys.exit(f"{script}: there is no line '# properties = {{…}}'; expected a job script of Snakemake's")
    properties = json.loads(found[1])
    resources = properties["resources"]
    job: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("job.yaml").read_text())
    rule = re.sub("[^a-z0-9]+", "-", properties.get("rule", "group").lower())
    job["metadata"]["generateName"] += f"{rule}-"
    container = job["spec"]["template"]["spec"]["containers"][0]
    # The script itself lies in a folder that Snakemake clears at its end.
    container |= {"command": ["/bin/bash", "-c", script.read_text()], "workingDir": str(folder)}
    needs = {"cpu": str(properties["threads"]), "memory": f"{resources['mem_mb']}M"}
    limits = {"memory": needs["memory"]}
    if resources.get("gpu"):  # Kubernetes wants GPUs as limits
        limits["nvidia.com/gpu"] = str(resources["gpu"])
    container["resources"] = {"requests": needs, "limits": limits}
    return job


def main() -> None:
    *options, script = sys.argv[1:]
    job = json.dumps(make_job(Path(script), Path(os.getcwd())), indent=1)  # noqa: PTH109 - as the shell has it, links and all
    if options == ["--show"]:
        print(job)
        return
    command = ["kubectl", "create", "-f", "-", "-o", "jsonpath={.metadata.name}"]
    done = subprocess.run(command, input=job, text=True, stdout=subprocess.PIPE)
    print(done.stdout)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
