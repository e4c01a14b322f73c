#!/usr/bin/env python
"""What the installed vLLM can do with every architecture that it registers: a table (TSV) and a page (HTML).

Class, EAGLE-3 interface, where the decoder layers are, how they are called, how tokens are embedded; and the verdict of a
twin (random weights, compared with transformers) of those that have the interface and a class in transformers.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from aerie import cli, vllm_classes
from aerie.configuration import engine_versions
from aerie.devices import has_driver, lease
from aerie.errors import describe, describe_exit, die_with_parent
from aerie.targets import Target
from aerie.vllm_options import device_type

_TWIN_SECONDS = 180
_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>What vLLM can do with which architecture</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #ddd; padding: 4px 8px; text-align: left; vertical-align: top; max-width: 32em; overflow-wrap: anywhere; }}
th {{ position: sticky; top: 0; background: #fff; }}
</style>
<h1>What vLLM can do with which architecture</h1>
<p>{summary}</p>
{table}
"""


def main(args: argparse.Namespace) -> None:
    with lease(int(has_driver() and args.gpus > 0), args.gpus):  # before anything looks for GPUs
        known = list(map(vllm_classes.inspect_class, vllm_classes.architectures()))
        cli.say(f"compatibility: {len(known)} architectures, {sum(one.eagle3 for one in known)} with the EAGLE-3 interface")
        rows = []
        for found in known:
            twin = ""
            if found.eagle3 and cheap_config(found.architecture) is not None:
                twin = twin_verdict(found.architecture)
                cli.say(f"compatibility: twin of {found.architecture}: {twin}")
            rows.append(asdict(found) | {"twin": twin})
    table = pd.DataFrame(rows).rename(columns={"eagle3": "eagle3_interface", "path": "decoder_layers", "embedding": "embedding_method"})
    args.output.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(args.output, sep="\t", index=False)
    installed = ", ".join(f"{name} {version}" for name, version in engine_versions().items())
    summary = f"{len(known)} architectures, {sum(one.eagle3 for one in known)} with the EAGLE-3 interface; {installed}."
    args.page.write_text(_PAGE.format(summary=summary, table=table.fillna("").to_html(index=False, border=0, escape=True)))


def cheap_config(architecture: str) -> dict[str, Any] | None:
    """The configuration that transformers gives to an architecture by default; None where it has no such class or default."""
    import transformers

    cls = getattr(transformers, architecture, None)
    if cls is None or getattr(cls, "config_class", None) is None:
        return None
    try:
        config: dict[str, Any] = cls.config_class().to_dict()
    except Exception:  # noqa: BLE001 - some want arguments
        return None
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    return config | {"architectures": [architecture]} if all(config.get(name) for name in needed) else None


def twin_verdict(architecture: str) -> str:
    """What a twin of an architecture's default configuration came to; in a child process, which may die of it."""
    context = multiprocessing.get_context("fork")  # what is imported is imported
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run_twin, args=(architecture, theirs))
    child.start()
    theirs.close()
    try:
        verdict = str(ours.recv()) if ours.poll(_TWIN_SECONDS) else f"failed: no answer within {_TWIN_SECONDS} s"
    except EOFError:
        child.join()
        verdict = f"failed: its process {describe_exit(child.exitcode or 0)}"
    child.kill()
    child.join()
    return verdict


def _run_twin(architecture: str, answer: multiprocessing.connection.Connection) -> None:
    from aerie.twin import run_twin

    die_with_parent()
    try:
        with tempfile.TemporaryDirectory(prefix="aerie-twin-") as folder:
            target = Path(folder) / "target"
            target.mkdir()
            (target / "config.json").write_text(json.dumps(cheap_config(architecture), default=str))
            vllm_classes.keep_loaded(architecture)
            report = run_twin(
                Target(architecture, "d", {"path": str(target)}, False), "vllm", {}, device_type("auto"), Path(folder) / "twin"
            )
        answer.send(f"{'failed' if report.problems or report.other_output else 'ok'}: {report}")
    except BaseException as error:  # noqa: BLE001 - the verdict
        answer.send("failed: " + describe(error).replace("\n", " "))


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the table, tab-separated")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs granted to this job; the twins take one")
    parser.add_argument("--page", type=Path, required=True, help="the same as a page")
    cli.run(main, parser)
