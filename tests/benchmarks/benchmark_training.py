#!/usr/bin/env python
"""How much faster is training here than `speculators train`, and does it learn the same? On a CPU or a GPU.

    python tests/benchmarks/benchmark_training.py --shape demo --out FOLDER         (CPU: about 4 minutes on two cores)
    python tests/benchmarks/benchmark_training.py --shape llama-8b --out FOLDER     (one H200: below 5 minutes)

The same draft, optimizer (Muon), vocabulary, samples and hidden states. Variants, each a process of its own:

    speculators   `speculators train`, a safetensors file for each sample
    aerie         this repository's trainer, its shards

A repeat is a seed: both train a new draft from it, one after the other, the first one changing from repeat to repeat.
tokens/s: of the steps of each epoch after its first few, until the GPU has done them. After each epoch the same code
validates both drafts. States are those of a real forward over real text (the sources of Python's library, a word an id)
of a model of the target's width with few layers and random weights, its head scaled so that there is something to learn.

Writes results.json after every repeat and a log for each variant, and prints a table. A repeat is not begun when it
would end after --max-seconds, and what has not answered by then is ended.
"""

import argparse
import gc
import itertools
import json
import os
import re
import resource
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent / "workflow" / "scripts"), str(_TESTS)]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])  # for speculators' loading workers
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from worker import Answer, Worker  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {  # Llama-3.1-8B, its width
        "config": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0, "num_hidden_layers": 8},
        "draft_vocab": 32000, "batch_tokens": 8192, "lengths": (200, 2048), "packs": 30, "epochs": 3, "repeats": 3,
        "dtype": "bfloat16", "workers": 8,
    },
    "demo": {  # SmolLM2-135M
        "config": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
                   "head_dim": 64, "vocab_size": 49152, "rope_theta": 100000.0, "num_hidden_layers": 8},
        "draft_vocab": 8192, "batch_tokens": 2048, "lengths": (64, 256), "packs": 8, "epochs": 2, "repeats": 2,
        "dtype": "float32", "workers": 0,
    },
    "tiny": {
        "config": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
                   "head_dim": 32, "vocab_size": 2048, "rope_theta": 10000.0, "num_hidden_layers": 8},
        "draft_vocab": 512, "batch_tokens": 512, "lengths": (32, 128), "packs": 8, "epochs": 2, "repeats": 2,
        "dtype": "float32", "workers": 0,
    },
}  # fmt: skip
TTT_STEPS, LEARNING_RATE = 3, 1e-3  # of training-time test
LAYER_IDS = (2, 4, 5, 8)  # the aux layers of a target of eight, and its last one's output
_PROMPT_SHARE = (0.1, 0.5)  # of a sample, not supervised
_WARM_UP = 6  # steps of each epoch that are not timed: the loaders have to get ahead
_VALIDATION_PACKS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and logs")
    parser.add_argument("--disk", type=Path, help="folder to write states below (default: a temporary one; /dev/shm for memory)")
    for name in ("packs", "epochs", "repeats", "workers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--max-seconds", type=float, default=285)
    args = parser.parse_args()
    Benchmark(args).run()


class Benchmark:
    """The parent: makes the states, starts the variants, says who trains when, and keeps the account."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        args.out.mkdir(parents=True, exist_ok=True)
        chosen = {name: value for name, value in vars(args).items() if name in SHAPES["demo"] and value is not None}
        self.gpu = Path("/proc/driver/nvidia/version").exists()
        self.job = SHAPES[args.shape] | chosen | {"gpu": self.gpu}
        self.job["root"] = tempfile.mkdtemp(prefix="aerie-benchmark-", dir=args.disk)
        self.results: dict[str, Any] = {
            "command": sys.argv,
            "setting": self.job | {"machine_cores": os.cpu_count()},
            "variants": {name: {"repeats": []} for name in VARIANTS},
        }

    @property
    def left(self) -> float:
        """Seconds until everything has to be over."""
        return float(self.args.max_seconds - (time.monotonic() - self.began))

    def run(self) -> None:
        workers: dict[str, Worker] = {}
        try:
            workers = {name: Worker(start, name, self.job, self.args.out / f"{name}.log") for name in VARIANTS}  # they import meanwhile
            self.results["setting"] |= make_problem(self.job)
            say(f"states are there after {time.monotonic() - self.began:.0f} s")
            self._repeat(workers)
        finally:
            for worker in workers.values():
                worker.end()
            shutil.rmtree(self.job["root"], ignore_errors=True)
            self.results["seconds"] = round(time.monotonic() - self.began, 1)
            self._save()
            print(table(self.results), flush=True)

    def _repeat(self, workers: dict[str, Worker]) -> None:
        longest = 0.0
        for seed in range(self.job["repeats"]):
            if seed and self.left < 1.1 * longest:
                say(f"stopped after {seed} repeats: a further one would end after --max-seconds")
                break
            began = time.monotonic()
            for name in sorted(workers, reverse=seed % 2 == 0):
                answer = workers[name].ask(seed, self.left)
                if "error" in answer:
                    say(f"{name}: failed, see {self.args.out / name}.log\n{answer['error']}")
                    self.results["variants"][name]["error"] = answer["error"]
                    workers.pop(name).end()
                    continue
                self.results["setting"] |= answer.pop("environment")
                self.results["variants"][name]["repeats"].append(answer)
                say(
                    f"{name}, seed {seed}: {answer['tokens'] / answer['seconds']:,.0f} tokens/s, validation loss {answer['losses'][-1]:.4f}"
                )
                self._save()
            if seed:
                longest = max(longest, time.monotonic() - began)

    def _save(self) -> None:
        (self.args.out / "results.json").write_text(json.dumps(self.results, indent=1, default=str) + "\n")


def start(name: str, job: dict[str, Any]) -> Answer:
    """In the child: imports; then trains with each seed that it is given."""
    import speculators.train.cli  # noqa: F401

    import aerie.train_run  # noqa: F401

    return lambda seed: VARIANTS[name](job, seed) | {"environment": environment(job)}


# --- The problem ------------------------------------------------------------------------------------------------------


def make_problem(job: dict[str, Any]) -> dict[str, Any]:
    """Writes target, samples, states (in both forms) and vocabulary map below job["root"]; returns what is to be recorded."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaModel

    from aerie import vocabulary
    from aerie.engine_transformers import forward
    from aerie.hidden_states import Capture, HiddenStateStore, StoredSample
    from aerie.samples import Sample, load_samples, write_samples
    from tiny_targets import make_tiny_tokenizer

    root, config, rng = Path(job["root"]), job["config"], np.random.default_rng(0)
    device, dtype = torch.device("cuda" if job["gpu"] else "cpu"), getattr(torch, job["dtype"])
    text = words(int((job["packs"] + _VALIDATION_PACKS) * job["batch_tokens"]), config["vocab_size"])
    shortest, longest = job["lengths"]
    samples: list[Sample] = []
    start = 0
    while start < len(text):
        length = min(int(rng.integers(shortest, longest + 1)), len(text) - start)
        prompt = max(4, int(length * rng.uniform(*_PROMPT_SHARE)))
        split = "train" if start < job["packs"] * job["batch_tokens"] else "validation"
        if length > prompt + 4:
            samples.append(Sample(text[start : start + length], [0] * prompt + [1] * (length - prompt), "text", split))
        start += length

    common = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    common |= {"torch_dtype": job["dtype"], "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu"}
    folder = root / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(common | config))
    make_tiny_tokenizer().save_pretrained(folder)  # speculators wants one, though no text is read
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model = LlamaModel(LlamaConfig(**{**common, **config})).eval()
        size = (config["vocab_size"], config["hidden_size"])
        head = torch.randn(size) * (3 / config["hidden_size"] ** 0.5)
        model.embed_tokens.weight.data.normal_()
    torch.set_default_dtype(torch.float32)
    weights = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight, "lm_head.weight": head}
    save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})

    (root / "dataset").mkdir()
    write_samples(samples, root / "dataset/samples")
    dataset = load_samples(root / "dataset")
    order = [*np.flatnonzero(np.asarray(dataset["split"]) == "train"), *np.flatnonzero(np.asarray(dataset["split"]) == "validation")]
    rows = [dataset[int(index)] for index in order]
    (root / "files/hidden_states").mkdir(parents=True)
    store = HiddenStateStore(root / "store", "c")
    capture = Capture("c", LAYER_IDS, job["dtype"], job["dtype"], "transformers", {}, {})

    def write(number: int, group: list[dict[str, Any]], states: list[torch.Tensor]) -> None:
        """A file for each sample, and a shard for all of a group."""
        stored = []
        for offset, (row, one) in enumerate(zip(group, states, strict=True)):
            ids = np.asarray(row["input_ids"], dtype=np.int32)
            tensors = {"hidden_states": one, "token_ids": torch.from_numpy(ids).long()}
            save_file(tensors, root / f"files/hidden_states/hs_{number + offset}.safetensors")
            stored.append(StoredSample(row["sample_key"], ids, one, None))
        store.write_shard(capture, stored, 1.0)

    with ThreadPoolExecutor(8) as pool, torch.no_grad():
        jobs = []
        for number in range(0, len(rows), 16):
            group = rows[number : number + 16]
            states = [forward(model, [np.asarray(row["input_ids"])], LAYER_IDS, device)[0].cpu().contiguous() for row in group]
            jobs.append(pool.submit(write, number, group, states))
        for one in jobs:
            one.result()
    del model, head, weights
    if job["gpu"]:
        torch.cuda.empty_cache()
    (root / "states").mkdir()
    store.known().to_parquet(root / "states/index.parquet")
    manifest = {"digest": "h", "capture_key": "c", "layer_ids": list(LAYER_IDS), "settings": {"stored_dtype": job["dtype"]}}
    (root / "states/manifest.json").write_text(json.dumps(manifest))

    columns = {"input_ids": [row["input_ids"] for row in rows], "loss_mask": [row["loss_mask"] for row in rows]}
    columns["seq_len"] = [len(ids) for ids in columns["input_ids"]]
    data = Dataset.from_dict(columns)
    data.set_format("torch")
    data.save_to_disk(root / "files/data")
    train = [row for row in rows if row["split"] == "train"]
    counts = vocabulary.count_supervised([(row["input_ids"], row["loss_mask"], "text") for row in train], config["vocab_size"])["text"]
    chosen = vocabulary.choose_tokens(counts, job["draft_vocab"], [], range(config["vocab_size"]))
    vocab_map = vocabulary.map_of(chosen, config["vocab_size"])
    (root / "map").mkdir()
    vocabulary.save_map(vocab_map, root / "map")
    tokens = sum(len(row["input_ids"]) for row in train)
    supervised = sum(sum(row["loss_mask"]) for row in train)
    job["train_ratio"] = (len(train) + 0.5) / len(rows)
    (root / "job.json").write_text(json.dumps({"train_ratio": job["train_ratio"]}))
    return {"train_samples": len(train), "train_tokens": tokens, "supervised_share": round(supervised / tokens, 4),
            "coverage": round(float(counts[vocab_map.t2d].sum() / counts.sum()), 4)}  # fmt: skip


def words(count: int, vocabulary: int) -> list[int]:
    """Ids of the first `count` words, marks and gaps of Python's library: the more frequent, the smaller; 10 and more."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            found += re.findall(r"\w+|[^\w\s]|\s+", path.read_text(errors="replace"))
        if len(found) >= count:
            break
    rank = {word: 10 + place % (vocabulary - 10) for place, (word, _) in enumerate(Counter(found).most_common())}
    return [rank[word] for word in itertools.islice(itertools.cycle(found), count)]


# --- The variants -----------------------------------------------------------------------------------------------------


class Clock:
    """Times the steps of each epoch but the first few, until the device has done them."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.seconds, self.tokens, self.waited, self.steps = 0.0, 0, 0.0, 0
        self._began: float | None = None

    def step(self, number: int, steps: int, tokens: int) -> None:
        """After step `number` (from 1) of an epoch of `steps`, which had so many tokens."""
        if self._began is not None:
            self.tokens += tokens
            self.steps += 1
        if number == min(_WARM_UP, steps // 2):
            self._began = self._now()
            self._waited_before = self.waited
        elif number == steps and self._began is not None:
            self.seconds += self._now() - self._began
            self._began = None

    def waiting(self, seconds: float) -> None:
        if self._began is not None:
            self.waited += seconds

    def _now(self) -> float:
        if self.gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, loader: Any) -> Iterator[Any]:
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waiting(time.perf_counter() - began)
            yield batch

    def figures(self) -> dict[str, Any]:
        import torch

        peak = torch.cuda.max_memory_allocated() if self.gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = {"tokens": self.tokens, "seconds": self.seconds, "steps": self.steps}
        return found | {"waiting_for_data": round(self.waited / self.seconds, 4), "peak_memory_bytes": peak}


class Ours:
    """What this repository trains with, put together as aerie.train_run does."""

    def __init__(self, job: dict[str, Any], seed: int) -> None:
        import torch

        from aerie.checkpoints import seed_everything
        from aerie.draft_attention import attention_for
        from aerie.draft_model import DraftShape, build_draft
        from aerie.gpu_speed import fuse_modules
        from aerie.hidden_states import StatesIndex
        from aerie.ranks import ALONE
        from aerie.samples import load_samples
        from aerie.targets import Target
        from aerie.train_run import select_split
        from aerie.training import TrainingSettings
        from aerie.training_data import DraftSamples, PackLoader, PackOrder, ShardTransfer
        from aerie.validation import TargetHead, Validation
        from aerie.vocabulary import load_map

        root = Path(job["root"])
        self.device = torch.device("cuda", 0) if job["gpu"] else torch.device("cpu")
        self.settings = TrainingSettings(
            epochs=job["epochs"], learning_rate=LEARNING_RATE, ttt_steps=TTT_STEPS, batch_tokens=job["batch_tokens"],
            max_length=job["batch_tokens"], seed=seed, compute_dtype=job["dtype"],
        )  # fmt: skip
        target = Target("benchmark", "0" * 64, {"path": str(root / "target")}, False)
        samples, states = load_samples(root / "dataset"), StatesIndex(root / "states", root / "store")

        def loader_of(split: str, threads: int) -> Any:
            chosen = select_split(samples, split, self.settings)
            transfer = ShardTransfer(states, chosen["sample_key"], range(len(LAYER_IDS)))
            rows = DraftSamples(chosen, transfer, self.settings.max_length, TTT_STEPS, self.settings.dtype(self.device))
            order = PackOrder(rows.approx_lengths, rows.supervised, self.settings.batch_tokens, 1, seed)
            pad_to = job["batch_tokens"] if job["gpu"] else None
            return PackLoader(rows, order, target.hidden_size, len(LAYER_IDS) - 1, pad_to, threads, self.device)

        self.train_loader, validation_loader = loader_of("train", job["workers"]), loader_of("validation", 0)
        seed_everything(seed)
        vocab_map = load_map(root / "map", target.vocab_size)
        self.model = build_draft(target, DraftShape(1, LAYER_IDS[:-1]), vocab_map, TTT_STEPS, attention_for(self.device)).to(self.device)
        fuse_modules(self.model, self.device)
        weights = target.head_weights()
        head = TargetHead(weights["norm"].float(), 1e-5, weights["lm_head"])
        self.validate = Validation(validation_loader, head, self.device, self.settings, ALONE)


def run_aerie(job: dict[str, Any], seed: int) -> dict[str, Any]:
    import torch

    from aerie.training import DraftTrainer

    start_anew(job)
    if job["gpu"]:
        torch.set_num_threads(1)
    ours, clock = Ours(job, seed), Clock(job["gpu"])
    found: dict[str, Any] = {"losses": [], "acceptance_lengths": []}

    def validate(model: Any) -> dict[str, Any]:
        figures = ours.validate(model)
        found["losses"].append(figures["loss"])
        found["acceptance_lengths"].append(figures["acceptance_length"])
        return figures

    class Timed(DraftTrainer):
        def _step(self, batches: Any, shares: list[float]) -> None:
            before = self.waited
            super()._step(batches, shares)
            clock.waiting(self.waited - before)
            clock.step(self.epoch_step + 1, self.epoch_steps[self.epoch], self.order.rows(self.epoch_step))

        def save(self) -> float:
            return 0.0

    reset_peak(job)
    with tempfile.TemporaryDirectory() as work:
        trainer = Timed(ours.model, ours.settings, ours.train_loader, validate, Path(work), ours.device, 1e9)
        trainer.run()
    return found | clock.figures()


def run_speculators(job: dict[str, Any], seed: int) -> dict[str, Any]:
    """`speculators train` up to its training loop, whose epochs are then timed and validated."""
    import torch
    from speculators.train import trainer as library
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    start_anew(job)
    root, clock = Path(job["root"]), Clock(job["gpu"])
    ratio = json.loads((root / "job.json").read_text())["train_ratio"]
    found: dict[str, Any] = {"losses": [], "acceptance_lengths": []}
    if not job["gpu"]:  # it trains on a CPU if its device is one
        library.get_local_rank = lambda: torch.device("cpu")
        torch.accelerator.synchronize = lambda *arguments: None

    class Loader:
        def __init__(self, loader: Any) -> None:
            self.loader, self.batch_sampler = loader, loader.batch_sampler

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Iterator[Any]:
            return clock.timed(self.loader)

    def run_training(trainer: Any) -> None:
        ours = Ours(job, seed)
        sampler = trainer.train_loader.batch_sampler
        trainer.train_loader = Loader(trainer.train_loader)
        reset_peak(job)
        for epoch in range(job["epochs"]):
            sampler.set_epoch(epoch)
            sizes, number = [int((sampler.lengths[pack] - 1).sum()) for pack in sampler], itertools.count(1)

            def count(sizes: list[int] = sizes, number: Iterator[int] = number) -> None:
                step = next(number)
                clock.step(step, len(sizes), sizes[step - 1])

            trainer.train_epoch(epoch, step_callback=count)
            trained = {name: value.detach() for name, value in trainer.model.named_parameters() if value.requires_grad}
            ours.model.load_state_dict(trained, strict=False)
            figures = ours.validate(ours.model)
            found["losses"].append(figures["loss"])
            found["acceptance_lengths"].append(figures["acceptance_length"])
        found.update(clock.figures())
        if not seed:
            found["difference_of_gradients"] = difference_of_gradients(trainer, ours)

    library.Trainer.run_training = run_training
    values = {
        "speculator-type": "eagle3", "verifier-name-or-path": root / "target", "data-path": root / "files/data",
        "hidden-states-path": root / "files/hidden_states", "on-missing": "raise", "save-path": root / f"saved-{seed}",
        "log-dir": root / "logs", "draft-vocab-size": job["draft_vocab"], "d2t-path": root / "map/d2t.npy",
        "t2d-path": root / "map/t2d.npy", "total-seq-len": job["batch_tokens"], "train-data-ratio": ratio,
        "hidden-states-dtype": job["dtype"], "num-workers": job["workers"], "ttt-steps": TTT_STEPS, "loss-fn": "kl_div",
        "loss-implementation": "eager", "optimizer": "muon", "lr": LEARNING_RATE, "muon-lr": LEARNING_RATE,
        "epochs": job["epochs"], "log-freq": 10, "num-layers": 1, "seed": seed,
        "draft-attn-impl": "simple_flex_attention" if job["gpu"] else "sdpa",
    }  # fmt: skip
    arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    arguments += ["--target-layer-ids", *map(str, LAYER_IDS[:-1]), "--full-attention-indices", "0"]
    train(TrainConfig.resolve([*arguments, "--norm-before-fc", "--norm-output", "--no-resume-from-checkpoint"]))
    return found


def difference_of_gradients(trainer: Any, ours: Ours) -> float:
    """Of a pack's gradient, all parameters together: the norm of the difference between both, relative to speculators'."""
    import torch

    from aerie.supervised_loss import supervised_loss

    batch = next(iter(ours.validate.loader))
    dtype = ours.settings.dtype(ours.device)
    gradients = []
    for model in (trainer.model, ours.model):
        model.zero_grad()
        model.train()
        with torch.autocast(ours.device.type, dtype=dtype, enabled=dtype != torch.float32):
            if model is ours.model:
                judged = supervised_loss(model, batch, TTT_STEPS, 1.0)
                assert judged is not None
                loss = judged.loss
            else:
                inputs = {name: value.to(ours.device) for name, value in batch.items() if isinstance(value, torch.Tensor)}
                _, loss, _ = model(**inputs, **trainer.config.train_call_kwargs)
        loss.backward()
        gradients.append({name: value.grad.float() for name, value in model.named_parameters() if value.grad is not None})
    theirs, own = gradients
    difference = sum(float((own[name] - value).square().sum()) for name, value in theirs.items()) ** 0.5
    return float(difference / sum(float(value.square().sum()) for value in theirs.values()) ** 0.5)


VARIANTS: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {"speculators": run_speculators, "aerie": run_aerie}


def start_anew(job: dict[str, Any]) -> None:
    """As a process does: else the code compiled for the repeats before is tried first, in each call."""
    if job["gpu"]:
        import torch

        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def reset_peak(job: dict[str, Any]) -> None:
    if job["gpu"]:
        import torch

        torch.cuda.reset_peak_memory_stats()


def environment(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from aerie.provenance import versions

    device = torch.cuda.get_device_name() if job["gpu"] else "CPU"
    return {"device": device, "threads": torch.get_num_threads(), "versions": versions()}


def table(results: dict[str, Any]) -> str:
    """tokens/s of each repeat, the ratios, and the validation losses of both, seed by seed and epoch by epoch."""
    variants, lines = results["variants"], []
    for name, found in variants.items():
        if not found["repeats"]:
            lines.append(f"{name:12} {found.get('error', 'not run')}")
            continue
        speeds = [one["tokens"] / one["seconds"] for one in found["repeats"]]
        found["median_tokens_per_second"] = statistics.median(speeds)
        last = found["repeats"][-1]
        lines.append(
            f"{name:12} tokens/s {' '.join(f'{speed:,.0f}' for speed in speeds)}, median {statistics.median(speeds):,.0f}; waiting for data "
            f"{last['waiting_for_data']:.1%}; peak memory {last['peak_memory_bytes'] / 1e9:.1f} GB"
        )
    pairs = list(zip(variants["speculators"]["repeats"], variants["aerie"]["repeats"], strict=False))
    if pairs:
        ratios = [(own["tokens"] / own["seconds"]) / (base["tokens"] / base["seconds"]) for base, own in pairs]
        results["ratio"] = statistics.median(ratios)
        lines.append(f"ratio of each repeat {' '.join(f'{ratio:.2f}' for ratio in ratios)}, median {results['ratio']:.2f}")
    for seed, (base, own) in enumerate(pairs):
        shown = ", ".join(f"{theirs:.4f} | {ours:.4f}" for theirs, ours in zip(base["losses"], own["losses"], strict=True))
        lines.append(f"validation loss after each epoch, seed {seed}, speculators | aerie: {shown}")
        if "difference_of_gradients" in base:
            lines.append(f"gradients of the same pack and weights differ by {base['difference_of_gradients']:.1e}")
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
