#!/usr/bin/env python
"""Two GPUs: tensor parallel, two parts at once, leases, and training in two ranks. Needs a host with two GPUs.

    python tests/benchmarks/two_gpus.py extraction --out FOLDER --disk /dev/shm     (about 7 minutes on two H200s)
    python tests/benchmarks/two_gpus.py training --out FOLDER --disk /dev/shm       (about 8 minutes)

Extraction: a Llama of 8 B random weights, 800 samples of 200 to 2,048 tokens. One part on one GPU; then, started together,
two parts of a GPU each and one part with tensor parallel 2, which has to wait for them; then one that is granted too few.
Training: a draft of Llama-3.1-8B's width on real text. One GPU, two, and two with a rank killed on the way and resumed.

Writes EXTRACTION.json or TRAINING.json with what was measured, and each workflow's terminal output; exit code 1 if a
bar was missed.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent / "workflow" / "scripts"), str(_TESTS), str(_TESTS / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_STATES = "results/hidden_states/big/rows/default_bfloat16"
_SAMPLES, _SHORTEST, _LONGEST = 800, 200, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["extraction", "training"])
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--disk", type=Path, help="folder to work below, with room for 120 GB (default: a temporary one)")
    parser.add_argument("--shape", default="llama-8b", choices=["llama-8b", "tiny"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="aerie-two-gpus-", dir=args.disk))
    figures: dict[str, Any] = {"command": sys.argv}
    try:
        {"extraction": extraction, "training": training}[args.what](root, args, figures)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        (args.out / f"{args.what.upper()}.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1), flush=True)
    sys.exit(not all(figures["bars"].values()))


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


# --- Extraction -------------------------------------------------------------------------------------------------------


def extraction(root: Path, args: argparse.Namespace, figures: dict[str, Any]) -> None:
    from aerie.hidden_states import read_shard
    from aerie.store import size_text

    model = root / "model"
    maker = multiprocessing.get_context("spawn").Process(target=make_model, args=(model, args.shape))
    maker.start()
    maker.join()
    rows = make_rows(root / "rows.jsonl")
    say(f"target and {_SAMPLES} samples are there, {size_text(sum(path.stat().st_size for path in model.iterdir()))}")
    alone = Workflow(root / "alone", model, rows, parts=1, tensor_parallel=1, out=args.out)
    alone.finish(gpus=2)
    say("one part on one GPU is done")
    both = [
        Workflow(root / "parts", model, rows, parts=2, tensor_parallel=1, out=args.out),
        Workflow(root / "tensor", model, rows, parts=1, tensor_parallel=2, out=args.out),
    ]
    for workflow in both:
        workflow.take_over(alone)  # what was found out about the target
    with Watch() as watch, ThreadPoolExecutor() as pool:
        list(pool.map(lambda workflow: workflow.finish(gpus=2), both))
    say("two parts and tensor parallel 2 are done")
    parts, tensor = both
    one, two, tp = alone.rate(), parts.rate(), tensor.rate()
    differs, written = difference(alone, tensor), [key for path in tensor.shards() for key in read_shard(path).keys]
    refused = tensor.refusal(gpus=1)
    figures |= {
        "tokens_per_second": {"one part": one, "two parts": two, "tensor parallel 2": tp},
        "devices": {workflow.folder.name: workflow.devices() for workflow in (alone, *both)},
        "looks_that_saw": watch.looks,
        "shared": watch.shared[:5],
        "difference_of_states": differs,
        "samples_in_shards": len(written),
        "refusal": refused,
    }
    held = [set(found) for found in parts.devices()]
    figures["bars"] = {
        "two parts are 1.9 times one": two >= 1.9 * one,
        "two parts have disjoint devices": len(held) == 2 and not held[0] & held[1],
        "no two jobs share a GPU": bool(watch.looks) and not watch.shared,
        "tensor parallel 2 is as near to float32 as one GPU": all(two <= 1.1 * one for one, two in zip(*differs["errors"], strict=True)),
        "one rank writes, each sample once": len(written) == len(set(written)) == differs["samples"] == _SAMPLES,
        "too few GPUs are refused before the load": "needs 2 GPUs and was granted 1" in refused["text"] and not refused["loaded"],
    }


def make_model(folder: Path, shape: str) -> None:
    """A Llama with random weights in bfloat16, in four files; run in a process of its own, which gives the GPU back."""
    import torch
    from benchmark_extraction import SHAPES, write_model
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from tiny_targets import make_tiny_tokenizer

    write_model(folder, SHAPES[shape], "bfloat16")
    make_tiny_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.set_default_dtype(torch.float32)
    weights = dict(model.state_dict())
    files = {f"model-{number + 1:05d}-of-00004.safetensors": sorted(weights)[number::4] for number in range(4)}

    def write(name: str) -> None:
        save_file({key: weights[key].cpu().contiguous() for key in files[name]}, folder / name, {"format": "pt"})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, files))
    total = sum(value.numel() * value.element_size() for value in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": {key: name for name, keys in files.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_rows(path: Path) -> Path:
    """Tokenised samples, the second half of each supervised."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for length in rng.integers(_SHORTEST, _LONGEST + 1, _SAMPLES).tolist():
            ids = rng.integers(10, 250, length).tolist()
            mask = [0] * (length // 2) + [1] * (length - length // 2)
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return path


class Workflow:
    """The workflow up to the hidden states in a folder of its own, with a store of its own."""

    def __init__(self, folder: Path, model: Path, rows: Path, parts: int, tensor_parallel: int, out: Path) -> None:
        import yaml

        self.folder, self.model, self.parts, self.out = folder, model, parts, out
        (folder / "config").mkdir(parents=True)
        (folder / "config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\na\tbig\trows\teagle3\n")
        target = {"path": str(model), "tensor_parallel": tensor_parallel, "engine_options": {"gpu_memory_utilization": 0.6}}
        config = {
            "runs": "config/runs.tsv",
            "targets": {"big": target},
            "datasets": {"rows": {"sources": [str(rows)], "max_length": _LONGEST, "regenerate": None}},
            "drafts": {"eagle3": {"stored_dtype": "bfloat16", "vocab_size": 256}},
            "extraction": {"parts": parts},
            "evaluation": {"prompts": {"rows": str(rows)}},
        }
        (folder / "config/config.yaml").write_text(yaml.safe_dump(config))

    def take_over(self, other: "Workflow") -> None:
        """The results for the target and the dataset, which are not what is measured."""
        for name in ("results/targets", "results/preflight", "results/datasets", "results/.recipes"):
            shutil.copytree(other.folder / name, self.folder / name)
        for name in ("prepare_dataset", "file_hashes"):
            shutil.copytree(other.folder / "results/.store" / name, self.folder / "results/.store" / name)

    def snakemake(self, gpus: int) -> "subprocess.CompletedProcess[str]":
        snakemake = str(Path(sys.executable).parent / "snakemake")
        command = [snakemake, f"{_STATES}/manifest.json", "-s", str(_TESTS.parent / "Snakefile"), "-d", str(self.folder)]
        command += ["--cores", "all", "--resources", f"gpu={gpus}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (self.out / f"{self.folder.name}.txt").write_text(done.stdout)
        logs = sorted((self.folder / "results/logs").rglob("*.log"))
        (self.out / f"{self.folder.name}-logs.txt").write_text("".join(f"==== {path}\n{path.read_text()[-30000:]}\n" for path in logs))
        return done

    def finish(self, gpus: int) -> None:
        done = self.snakemake(gpus)
        assert not done.returncode, f"{self.folder.name}: {done.stdout[-5000:]}"
        self.text = done.stdout[done.stdout.index("rule extract_hidden_states") :]  # the preflight extracts too

    def shards(self) -> list[Path]:
        return sorted((self.folder / "results/.store/hidden_states").glob("*/*.safetensors"))

    def rate(self) -> float:
        """tokens/s of all parts together: their tokens by the slowest part's time, from first prompt to last fsync."""
        line = re.compile(r"^extract: (\d+)/\1 tokens ([\d.]+) tokens/s", re.MULTILINE)
        found = [(int(tokens), float(rate)) for tokens, rate in line.findall(self.text.replace(",", ""))]
        assert len(found) == self.parts, self.text[-3000:]
        return sum(tokens for tokens, _ in found) / max(tokens / rate for tokens, rate in found)

    def devices(self) -> list[list[str]]:
        """The GPUs that each part held."""
        return [held.split(", ") for held in re.findall(r"^GPUs (.*) of this host are leased", self.text, re.MULTILINE)]

    def refusal(self, gpus: int) -> dict[str, Any]:
        """What is said when the same job, its states gone, is granted too few GPUs."""
        shutil.rmtree(self.folder / "results/.store/hidden_states")
        shutil.rmtree(self.folder / "results/hidden_states")
        began = time.monotonic()
        done = self.snakemake(gpus)
        said = re.findall(r"^.*GPUs and was granted.*$", done.stdout, re.MULTILINE)
        loaded = "are leased" in done.stdout
        return {
            "code": done.returncode,
            "text": said[0] if said else done.stdout[-2000:],
            "loaded": loaded,
            "seconds": round(time.monotonic() - began, 1),
        }


class Watch:
    """Looks twice a second which jobs hold the lock file of which GPU, and which have memory on it (as far as nvidia-smi says)."""

    def __enter__(self) -> "Watch":
        self.looks: dict[str, int] = {}
        self.shared: list[str] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.5):
            jobs: dict[str, set[str]] = {}
            for what, pid in [*locks_held(), *memory_held()]:
                jobs.setdefault(what, set()).add(job_of(pid))
            for what, names in jobs.items():
                self.looks[what] = self.looks.get(what, 0) + 1
                if len(names - {"?"}) > 1:
                    self.shared.append(f"{what}: {sorted(names)}")


def locks_held() -> Iterator[tuple[str, int]]:
    """(lock, process that holds it) of every GPU's lock file, from the kernel."""
    from aerie.devices import LOCKS

    names = {str(path.stat().st_ino): path.name for path in LOCKS.glob("*")} if LOCKS.exists() else {}
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()  # 1: FLOCK ADVISORY WRITE pid major:minor:inode start end
        inode = words[5].rpartition(":")[2] if words[1] == "FLOCK" else ""
        if inode in names:
            yield f"lock {names[inode]}", int(words[4])


def memory_held() -> Iterator[tuple[str, int]]:
    """(GPU, process) of every process with memory on a GPU."""
    asked = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    for line in subprocess.run(asked, capture_output=True, text=True).stdout.splitlines():
        uuid, pid = line.split(", ")
        yield f"memory {uuid}", int(pid)


def job_of(pid: int) -> str:
    """The output that the extraction job makes to which a process belongs."""
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            folder = Path(f"/proc/{pid}/cwd").readlink()
        except OSError:
            return "?"
        if any(word.endswith("extract_hidden_states.py") for word in words[:3]) and "--output" in words:
            return f"extract {folder} {words[words.index('--output') + 1]}"
        pid = parent
    return "?"


def difference(one: Workflow, other: Workflow) -> dict[str, Any]:
    """How far both are from transformers' float32 states, by layer, over some samples; and how many samples both have."""
    import pandas as pd

    from aerie.hidden_states import StatesIndex

    keys = pd.read_parquet(one.folder / _STATES / "index.parquet")["sample_key"].tolist()
    other_index = StatesIndex(other.folder / _STATES, other.folder / "results/.store")
    out = other.out / "errors.json"
    measure = multiprocessing.get_context("spawn").Process(
        target=measure_errors, args=(keys[::40], [one.folder, other.folder], one.model, out)
    )
    measure.start()
    measure.join()
    return {"samples": sum(key in other_index for key in keys), "compared": len(keys[::40]), "errors": json.loads(out.read_text())}


def measure_errors(keys: list[str], folders: list[Path], model: Path, out: Path) -> None:
    """Of each folder's states, by layer: the norm of the error relative to the states' norm, over all samples. Needs 40 GB."""
    import torch
    from transformers import AutoModelForCausalLM

    from aerie.engine_transformers import forward
    from aerie.hidden_states import StatesIndex

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval().get_decoder()
    indexes = [StatesIndex(folder / _STATES, folder / "results/.store") for folder in folders]
    layer_ids = tuple(indexes[0].layer_ids)
    squares, norms = torch.zeros(len(indexes), len(layer_ids)), torch.zeros(len(layer_ids))
    with torch.no_grad():
        for key in keys:
            right = forward(decoder, [np.asarray(indexes[0].token_ids(key))], layer_ids, device)[0].float().cpu()
            norms += right.square().sum((0, 2))
            for place, index in enumerate(indexes):
                squares[place] += (index.states(key).float() - right).square().sum((0, 2))
    out.write_text(json.dumps((squares / norms).sqrt().tolist()))


# --- Training ---------------------------------------------------------------------------------------------------------


def training(root: Path, args: argparse.Namespace, figures: dict[str, Any]) -> None:
    import torch
    from benchmark_training import SHAPES, make_problem

    # Epochs long enough that rates are steady.
    job = SHAPES[args.shape] | {"gpu": torch.cuda.is_available(), "root": str(root), "packs": 64, "epochs": 3}
    figures["problem"] = make_problem(job)
    say(f"states are there: {figures['problem']}")
    one = Training(root, "one", job, ranks=1)
    one.finish()
    say(f"one GPU: {one.rate():,.0f} tokens/s")
    two = Training(root, "two", job, ranks=2)
    two.finish()
    say(f"two GPUs: {two.rate():,.0f} tokens/s")
    killed = Training(root, "killed", job, ranks=2)
    figures["killed"] = killed.kill_a_rank()
    say(f"a rank was killed: {figures['killed']}")
    killed.finish()
    losses = {each.name: each.losses() for each in (one, two, killed)}
    relative = [abs(a - b) / a for a, b in zip(losses["one"], losses["two"], strict=True)]
    figures |= {
        "tokens_per_second": {each.name: each.rate() for each in (one, two)},
        "waiting_for_data": {each.name: json.loads((each.work / "figures.json").read_text())["waiting_for_data"] for each in (one, two)},
        "losses": losses,
        "largest_relative_difference_of_losses": max(relative),
        "validation": {each.name: each.validations() for each in (one, two, killed)},
        "weights": {"one, two": one.difference(two), "two, killed and resumed": two.difference(killed)},
        "resumed_at": killed.resumed_at,
    }
    figures["bars"] = {
        "two GPUs are 1.8 times one": two.rate() >= 1.8 * one.rate(),
        "the loss curves are equal": max(relative) <= 0.01,
        "it ends within a minute of the kill": figures["killed"]["seconds"] <= 60,
        "it names the rank": "rank 1 of 2" in figures["killed"]["error"],
        "the resumed curve is the unbroken one": losses["killed"] == losses["two"],
    }


class Training:
    """A training in a process of its own, with two packs a step whatever the number of ranks."""

    def __init__(self, root: Path, name: str, job: dict[str, Any], ranks: int) -> None:
        self.root, self.name, self.job, self.ranks = root, name, job, ranks
        self.work, self.out = root / name / "work", root / name / "out"
        self.work.mkdir(parents=True)
        self.times: list[tuple[float, dict[str, Any]]] = []
        self.resumed_at: int | None = None

    def _start(self) -> Any:
        said, saying = multiprocessing.get_context("spawn").Pipe(duplex=False)
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        arguments = (self.root, self.job, self.ranks, self.work, self.out, saying)
        process = multiprocessing.get_context("spawn").Process(target=train_here, args=arguments)
        process.start()
        saying.close()
        return process, said

    def _follow(self, process: Any, until: Any = None) -> None:
        """Notes when each line of metrics.jsonl is written, until the process ends or `until()`."""
        path, seen = self.work / "metrics.jsonl", 0
        while process.is_alive() and not (until and until()):
            time.sleep(0.02)
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines[seen:]:
                self.times.append((time.monotonic(), json.loads(line)))
            seen = max(seen, len(lines))

    def finish(self) -> None:
        process, said = self._start()
        self._follow(process)
        process.join()
        answer = said.recv() if said.poll() else None
        assert process.exitcode == 0 and answer == "done", (self.name, process.exitcode, answer)

    def kill_a_rank(self) -> dict[str, Any]:
        """kill -9 of rank 1 some steps after the first checkpoint; what then happens."""
        process, said = self._start()
        self._follow(process, lambda: len(self._lines("train")) >= 5 and any((self.work / "checkpoints").glob("*.json")))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(ranks[1], signal.SIGKILL)
        began = time.monotonic()
        process.join(120)
        seconds = time.monotonic() - began
        error = said.recv() if said.poll() else "nothing said"
        left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
        newest = max(int(path.stem.split("-")[1]) for path in (self.work / "checkpoints").glob("*.json"))
        self.resumed_at = newest
        return {"seconds": round(seconds, 1), "error": error, "ranks_left": left, "checkpoint": newest}

    def _lines(self, split: str) -> list[dict[str, Any]]:
        path = self.work / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["split"] == split]

    def rate(self) -> float:
        """tokens/s between lines of the same epoch but the first, whose shapes are compiled."""
        tokens, seconds = 0, 0.0
        for (began, first), (ended, second) in zip(self.times, self.times[1:], strict=False):
            if first["split"] == second["split"] == "train" and 1 < first["epoch"] == second["epoch"]:
                tokens, seconds = tokens + second["tokens"] - first["tokens"], seconds + ended - began
        return tokens / seconds if seconds else math.nan

    def losses(self) -> list[float]:
        return [line["loss"] for line in self._lines("train")]

    def validations(self) -> list[dict[str, float]]:
        return [{name: line[name] for name in ("loss", "acceptance_length")} for line in self._lines("validation")]

    def difference(self, other: "Training") -> float:
        """Largest difference between exported weights, relative to the largest weight of their tensor."""
        from safetensors.torch import load_file

        mine, theirs = (load_file(each.out / "model.safetensors") for each in (self, other))
        floats = [name for name, value in mine.items() if value.is_floating_point()]
        return max(float((mine[name].float() - theirs[name].float()).abs().max() / mine[name].float().abs().max()) for name in floats)


def train_here(root: Path, job: dict[str, Any], ranks: int, work: Path, out: Path, saying: Any) -> None:
    """The child: the whole training, as the stage's command starts it; says "done" or what went wrong."""
    from benchmark_training import LAYER_IDS, LEARNING_RATE, TTT_STEPS

    from aerie.errors import AerieError
    from aerie.hidden_states import StatesIndex
    from aerie.samples import load_samples
    from aerie.targets import Target
    from aerie.train_run import train
    from aerie.vocabulary import load_map

    with open(work.parent / "log.txt", "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target = Target("benchmark", "0" * 64, {"path": str(root / "target")}, False)
    chosen = {"epochs": job["epochs"], "learning_rate": LEARNING_RATE, "ttt_steps": TTT_STEPS, "batch_tokens": job["batch_tokens"]}
    chosen |= {"packs_per_step": 2, "max_length": job["batch_tokens"], "compute_dtype": job["dtype"]}
    settings = {"layers": 1, "aux_layer_ids": list(LAYER_IDS[:-1]), "training": chosen}
    runtime = {"device": "cuda" if job["gpu"] else "cpu", "ranks": ranks, "threads": job["workers"], "checkpoint_seconds": 1e9}
    states = StatesIndex(root / "states", root / "store")
    try:
        train(target, load_samples(root / "dataset"), states, load_map(root / "map", target.vocab_size), settings, runtime, work, out)
    except AerieError as error:
        saying.send(str(error))
        sys.exit(1)
    saying.send("done")


if __name__ == "__main__":
    main()
