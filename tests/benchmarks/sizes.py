"""How the workflow's own work grows: `python tests/benchmarks/sizes.py` prints seconds; each should stay below 10.

Everything is fabricated, nothing is computed: 200 runs over 20 extractions of 8 parts, an index of a million samples,
a store of 10,000 objects.
"""

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "workflow/scripts")]

from tiny_workflow import Result, TinyWorkflow  # noqa: E402


def timed(what: str, workflow: TinyWorkflow, *arguments: str) -> Result:
    started, before = time.monotonic(), os.times()
    result = workflow.run(*arguments)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{what}: {time.monotonic() - started:.1f} s, of these {cpu:.1f} s on the CPU", flush=True)
    assert result.code == 0, result.text
    return result


def many_runs(folder: Path) -> TinyWorkflow:
    """200 runs: 20 datasets, each with 10 drafts; 8 parts."""
    workflow = TinyWorkflow(folder)
    (folder / "target").mkdir()
    workflow.config["datasets"] = {f"d{n}": {"sources": ["talk.jsonl"], "max_length": 100 + n} for n in range(20)}
    rates = [0.001 * (n + 1) for n in range(10)]
    workflow.config["drafts"] = {f"e{n}": {"training": {"learning_rate": rate}} for n, rate in enumerate(rates)}
    workflow.config["extraction"] = {"parts": 8}
    rows = [f"r{d}-{e}\ttiny\td{d}\te{e}\n" for d in range(20) for e in range(10)]
    (folder / "config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\n" + "".join(rows))
    workflow.write()
    return workflow


def pretend_finished(workflow: TinyWorkflow, samples: int) -> None:
    """Makes every file that a dry run names, in its order; tables of samples have so many rows."""
    (workflow.folder / "target").mkdir()
    keys = [f"{n:032x}" for n in range(samples)]
    table = pd.DataFrame({"sample_key": keys, "shard": "0" * 32 + ".safetensors", "sample": np.arange(samples), "tokens": 500})
    for line in re.findall(r"^    output: (.*)$", workflow.run("-n").text, re.MULTILINE):
        for name in line.split(", "):
            path = workflow.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name == "samples":
                path.mkdir()
            elif path.suffix == ".parquet":
                table.to_parquet(path, index=False)
            else:
                path.write_text(json.dumps({"key": "none", "capture_key": "none"} if path.name == "manifest.json" else {}))
    # As the jobs would have ended: recipes first, then stage by stage.
    order = [".recipes", "results/targets", "preflight", "regenerated", "datasets", "missing.parquet", "/part-"]
    order += ["hidden_states", "vocab_maps", "drafts", "evaluations"]
    now = time.time() - 1000
    for path in workflow.folder.glob("*.jsonl"):
        os.utime(path, (now - 1, now - 1))
    for path in sorted((workflow.folder / "results").rglob("*")):
        rank = next((i for i, word in enumerate(order) if word in str(path.relative_to(workflow.folder))), len(order))
        os.utime(path, (now + rank, now + rank))


def many_objects(workflow: TinyWorkflow, count: int) -> None:
    """Finished objects of 1 kB, which nothing references."""
    for number in range(count):
        folder = workflow.folder / "results/.store/train_draft" / f"{number:064x}"
        (folder / "output").mkdir(parents=True)
        (folder / "output/model.safetensors").write_bytes(bytes(1000))
        (folder / "manifest.json").write_text(json.dumps({"key": folder.name, "files": {}, "settings": {}}))
    (workflow.folder / "results/.store/layout.json").write_text('{"layout": 1}')


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workflow = many_runs(Path(folder))
        result = timed("dry run of 200 runs over 20 extractions of 8 parts", workflow, "-n")
        assert result.rules["train_draft"] == 200 and result.rules["extract_hidden_states"] == 160
    with tempfile.TemporaryDirectory() as folder:
        workflow = TinyWorkflow(Path(folder))
        pretend_finished(workflow, 1_000_000)
        assert not timed("run with nothing to do, a million samples", workflow).rules
        many_objects(workflow, 10_000)
        result = timed("gc over 10,000 objects", workflow, "gc")
        assert "train_draft: 10,000 of" in result.text


if __name__ == "__main__":
    main()
