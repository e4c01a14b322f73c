"""How long `snakemake preflight` takes and how much memory it needs on models known by their configuration alone.

`python tests/benchmarks/benchmark_preflight.py [FAMILY …]` prints a line for each family of tests/families.py: the whole
command's seconds, Snakemake included, and the preflight job's greatest memory. The weights are not there, only an index of
their true shape; all static checks and the twin are run.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "workflow/scripts")]

from families import CONFIGS, make_family  # noqa: E402
from tiny_workflow import TinyWorkflow  # noqa: E402

LARGE = ("kimi-k2.5", "deepseek-v3", "mistral-large-3")


def main(families: list[str]) -> None:
    print(f"{'family':16}{'seconds':>9}{'GB':>7}")
    for name in families or list(CONFIGS):
        with tempfile.TemporaryDirectory() as folder:
            workflow = TinyWorkflow(Path(folder))
            make_family(workflow.folder / "target", name)
            target = workflow.config["targets"]["tiny"]
            target |= {"device": "cuda", "tensor_parallel": 8 if name in LARGE else 1, "dtype": "bfloat16"}
            target["trust_remote_code"] = name == "kimi-k2.5"
            workflow.config["datasets"]["talk"]["regenerate"] = None
            workflow.write()
            started = time.monotonic()
            result = workflow.run("preflight")
            seconds = time.monotonic() - started
            assert result.code == 0, result.text
            header, values = (workflow.folder / "results/benchmarks/preflight_target/tiny.tsv").read_text().splitlines()
            peak = float(dict(zip(header.split("\t"), values.split("\t"), strict=True))["max_rss"]) * 2**20 / 1e9
            print(f"{name:16}{seconds:9.1f}{peak:7.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
