"""A million samples of Kimi-K2.5 without their hidden states: `python tests/benchmarks/million_samples.py --disk FOLDER` prints
the seconds and the memory of everything that grows with samples and shards. Takes about 12 GB below FOLDER and 20 minutes.

The dataset is real (random ids and masks, Aerie's own files), and so are the shards' headers, offsets and token ids, as
extraction would lay them out; the states behind them are holes in the files. Everything that is timed is Aerie's own command
or function. Memory is what a process has of its own: mapped pages of files, which the system takes back, are not in it.
--cold drops the machine's file caches (root) before each command that looks into the store. --mean-tokens 117 makes
conversations so short that the shards are 25,000.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "workflow/scripts")]

from aerie.extraction import Job  # noqa: E402
from aerie.hidden_states import HiddenStateStore, StatesIndex, shard_header  # noqa: E402
from aerie.samples import Sample, write_samples  # noqa: E402
from aerie.stage import Recipe  # noqa: E402
from aerie.store import open_store  # noqa: E402
from aerie.targets import Target, fingerprint  # noqa: E402
from checkout import SCRIPTS  # noqa: E402
from families import make_family  # noqa: E402
from tiny_workflow import TinyWorkflow  # noqa: E402

SHORTEST, LONGEST = 50, 4096  # tokens of a sample
PARTS = (1, 4, 16)
EPOCHS = 3
DATASET = Path("results/datasets/kimi/talk")


def own_memory(process: psutil.Process) -> int:
    """Bytes of a process and its children that are not mapped from files."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            found = one.memory_info()
            total += found.rss - found.shared
        except psutil.NoSuchProcess:
            continue
    return total


@contextmanager
def measured(what: str, process: psutil.Process | None = None) -> Iterator[None]:
    """Prints the seconds of what happens inside, and the most memory that the process (this one) had meanwhile."""
    process, ended, most = process or psutil.Process(), threading.Event(), 0

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.02):
            try:
                most = max(most, own_memory(process))
            except psutil.NoSuchProcess:
                return

    watcher = threading.Thread(target=watch)
    began, cpu = time.monotonic(), sum(os.times()[:4])
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    seconds, cpu = time.monotonic() - began, sum(os.times()[:4]) - cpu
    print(f"{what}: {seconds:.1f} s, of these {cpu:.1f} s on the CPU, {most / 1e9:.2f} GB", flush=True)


class Million:
    """The workflow in a folder, of samples of mean_tokens on average. cold: drop the caches before each command."""

    def __init__(self, folder: Path, samples: int, mean_tokens: int, cold: bool) -> None:
        self.workflow, self.samples, self.mean_tokens, self.cold = TinyWorkflow(folder), samples, mean_tokens, cold
        os.chdir(folder)
        make_family(folder / "kimi", "kimi-k2.5")
        self.workflow.config["targets"] = {"kimi": {"path": "kimi", "device": "cuda", "tensor_parallel": 8}}
        self.workflow.config["datasets"]["talk"] = {"sources": ["talk.jsonl"], "max_length": LONGEST}
        self.workflow.config["drafts"] = {"eagle3": {"vocab_size": 32000, "stored_dtype": "bfloat16"}}
        Path("config/runs.tsv").write_text("run\ttarget\tdataset\tdraft\na\tkimi\ttalk\teagle3\n")
        self.set_parts(1)
        self.store = Path("results/.store")
        open_store(self.store)
        for (stage, name), text in self.plan.recipes.items():
            path = self.recipe(stage, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.kept = self.store / "prepare_dataset/none"
        self.fingerprint = Path("results/targets/kimi/fingerprint.json")
        self.fingerprint.parent.mkdir(parents=True, exist_ok=True)
        self.fingerprint.write_text(json.dumps(fingerprint("kimi", {"path": "kimi"}, False, self.store / "file_hashes")))
        self.capture = f"kimi/talk/{self.plan.capture(self.plan.runs['a'])}"
        self.states = Path("results/hidden_states") / self.capture
        self.job = Job.of(Recipe.read(self.recipe("extract_hidden_states", self.capture)), Target.read(self.fingerprint))

    def set_parts(self, parts: int) -> None:
        self.workflow.config["extraction"] = {"parts": parts}
        self.workflow.write()
        self.plan = self.workflow.resolved()

    def recipe(self, stage: str, name: str) -> Path:
        return Path(f"results/.recipes/{stage}/{name}/{self.plan.recipe_digest(stage, name)}.json")

    def run(self, what: str, command: str, *arguments: object, refused: bool = False) -> None:
        """Runs one of Aerie's commands, or snakemake, and prints what it took. refused: it ends saying that the disk is too small."""
        if self.cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        program = [str(SCRIPTS / command)] if command.endswith(".py") else ["-m", "snakemake"]
        with open("output.txt", "w") as output:
            process = psutil.Popen([sys.executable, *program, *map(str, arguments)], stdout=output, stderr=subprocess.STDOUT)
            with measured(what, process):
                code = process.wait()
        text = Path("output.txt").read_text()
        assert "Make room" in text if refused else code == 0, text
        if said := [line for line in text.splitlines() if line.strip()]:
            print("   ", said[-1][:150], flush=True)

    def stage(self, what: str, command: str, stage: str, name: str, *arguments: object, refused: bool = False) -> None:
        """Runs a stage's command."""
        recipe = self.recipe(stage, name)
        self.run(
            what,
            command,
            "--recipe",
            recipe,
            "--store",
            self.store,
            "--target",
            self.fingerprint,
            "--dataset",
            DATASET,
            *arguments,
            refused=refused,
        )

    def make_dataset(self) -> None:
        """The dataset and, in the store, shards without states."""
        DATASET.mkdir(parents=True)
        shards = Shards(self.job, self.store)
        digest = write_samples(shards.through(self.make_samples()), DATASET / "samples")
        manifest = {"key": "none", "digest": digest, "figures": {}}
        for name, text in {"manifest.json": json.dumps(manifest), "stats.json": "{}", "rejects.jsonl": "", "audit.html": ""}.items():
            (DATASET / name).write_text(text)
        self.kept.mkdir(parents=True)
        (self.kept / "output").symlink_to(DATASET.absolute())  # which samples are referenced
        print(f"{self.samples:,} samples, {shards.tokens:,} tokens, {shards.count:,} shards, {shards.bytes / 1e12:.1f} TB of states")

    def make_samples(self) -> Iterator[Sample]:
        """Random ids, the frequent ones low; longest first, as they are extracted. Half of each is supervised."""
        random = np.random.default_rng(0)
        vocabulary = self.job.target.vocab_size
        lengths = random.gamma(1.5, (self.mean_tokens - SHORTEST) / 1.5, self.samples).astype(int) + SHORTEST
        for number, length in enumerate(np.sort(lengths.clip(max=LONGEST))[::-1]):
            ids = (vocabulary * random.random(length) ** 20).astype(np.int32)
            mask = np.zeros(length, dtype=np.uint8)
            mask[length // 2 :] = 1
            yield Sample(ids, mask, "talk.jsonl", "train" if number % 20 else "validation")  # type: ignore[arg-type]

    def lookups(self) -> None:
        """The stages between dataset and training; the target is not loaded, since the store lacks nothing."""
        missing = self.states / "missing.parquet"
        listed = "extract_hidden_states", self.capture
        folder = HiddenStateStore(self.store, self.job.capture_key).folder
        folder.rename("aside")
        self.stage("find_missing_states, nothing in the store", "find_missing_states.py", *listed, "--output", missing, refused=True)
        Path("aside").rename(folder)
        for which in ("first", "second"):
            none = self.states / "none-missing.parquet"
            self.stage(f"find_missing_states, all in the store, {which} lookup", "find_missing_states.py", *listed, "--output", none)
        for parts in PARTS:  # of a table in which all were missing, as if written meanwhile
            numbers = ["--part", 0, "--parts", parts, "--missing", missing, "--output", self.states / f"part-0-of-{parts}.parquet"]
            self.stage(f"extract_hidden_states, accounts of part 0 of {parts}", "extract_hidden_states.py", *listed, *numbers)
        none.rename(missing)
        self.stage("index_hidden_states", "index_hidden_states.py", *listed, "--output", self.states)
        self.stage("map_vocabulary", "map_vocabulary.py", "map_vocabulary", "a", "--output", "results/vocab_maps/a")

    def plans(self) -> None:
        """Snakemake, for each number of parts, and the commands that look at a store."""
        snakefile = ["-s", SCRIPTS.parents[1] / "Snakefile", "--cores", "1"]
        for parts in PARTS:
            self.set_parts(parts)
            self.run(f"snakemake -n, {parts} parts", "snakemake", *snakefile, "-n")
        for command in ("plan", "gc"):
            self.run(f"snakemake {command}", "snakemake", *snakefile, command)

    def training(self) -> None:
        """The trainer's own preparations, in a process of their own."""
        subprocess.run([sys.executable, __file__, "--trainer", self.states, self.store], check=True)


class Shards:
    """Packs samples as aerie.shard_writer does, into files with everything but the states."""

    def __init__(self, job: Job, store: Path) -> None:
        self.capture, self.hidden_size = job.capture(), job.target.hidden_size
        self.folder = HiddenStateStore(store, job.capture_key).folder
        self.folder.mkdir(parents=True)
        self.row_bytes, self.rows = job.row_bytes, job.shard_bytes // job.row_bytes
        self.batch: list[Sample] = []
        self.count = self.tokens = self.bytes = 0

    def through(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """The same samples, which have been written."""
        used = 0
        for sample in samples:
            if self.batch and used + len(sample.input_ids) > self.rows:
                self.write()
                used = 0
            self.batch.append(sample)
            used += len(sample.input_ids)
            yield sample
        self.write()

    def write(self) -> None:
        lengths = [len(sample.input_ids) for sample in self.batch]
        header = shard_header(self.capture, [sample.key for sample in self.batch], sum(lengths), self.hidden_size, seconds=0.2)
        end = len(header) + 8 * (len(lengths) + 1) + sum(lengths) * self.row_bytes
        with open(self.folder / f"{self.batch[0].order[:32]}.safetensors", "wb") as file:
            file.write(header)
            file.write(np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tobytes())
            for sample in self.batch:
                file.write(np.asarray(sample.input_ids, dtype="<i4").tobytes())
            file.truncate(end)
        self.batch, self.count, self.tokens, self.bytes = [], self.count + 1, self.tokens + sum(lengths), self.bytes + end


def trainer_order(states: Path, store: Path) -> None:
    """What the trainer does with a million samples before its first step; see aerie.train_run."""
    import torch

    from aerie.samples import load_samples
    from aerie.train_run import select_split
    from aerie.training import TrainingSettings
    from aerie.training_data import DraftSamples, PackOrder, ShardTransfer, step_counts

    training = TrainingSettings(max_length=LONGEST, batch_tokens=8192)
    with measured("trainer: index of the states"):
        index = StatesIndex(states, store)
    with measured("trainer: samples of the train split, their lengths and supervised tokens"):
        chosen = select_split(load_samples(DATASET), "train", training)
        transfer = ShardTransfer(index, chosen["sample_key"], range(len(index.layer_ids)))
        rows = DraftSamples(chosen, transfer, training.max_length, training.ttt_steps, torch.float32)
    with measured(f"trainer: packs of {EPOCHS} epochs"):
        order = PackOrder(rows.approx_lengths, rows.supervised, training.batch_tokens, 8, 0)
        steps = step_counts(order, EPOCHS)
    looked_at = [key for pack in list(order)[:100] for key in (transfer.sample_keys[i] for i in pack)]
    with measured(f"trainer: headers and ids of {len(looked_at):,} samples in {EPOCHS} epochs' order"):
        for key in looked_at:
            index.token_ids(key)
    print(f"    {len(rows):,} samples, steps of 8 packs an epoch: {steps}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, help="folder to work below (default: a temporary one)")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--mean-tokens", type=int, default=1000, help="of a sample")
    parser.add_argument("--cold", action="store_true", help="drop the machine's file caches before each command")
    parser.add_argument("--trainer", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        trainer_order(*args.trainer)
        return
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        million = Million(Path(folder), args.samples, args.mean_tokens, args.cold)
        million.make_dataset()
        million.lookups()
        million.plans()
        million.training()


if __name__ == "__main__":
    main()
