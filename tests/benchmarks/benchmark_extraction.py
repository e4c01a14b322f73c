#!/usr/bin/env python
r"""How much slower is capturing hidden states than the prefill that computes them? On a CPU or a GPU, in one process tree.

    python tests/benchmarks/benchmark_extraction.py --shape llama-8b --out FOLDER
    python tests/benchmarks/benchmark_extraction.py --target MODEL_FOLDER --out FOLDER --dtype float32 \
        --stored-dtype float32 --lengths 20 400 --prompts 200 --with transformers             (real weights; a CPU)

Variants, each an engine in a process of its own that is loaded once; repeats alternate between them:

    base          vLLM alone: LLM.generate, one token each, as vLLM sets itself up (eager, no prefix caching); on a CPU in
                  one process, as Aerie has it, since a process of its own leaves a core without work
    aerie         this repository's extraction: engine_vllm, capture_connector, shard_writer; fsync is in the time
    example       vLLM's ExampleHiddenStatesConnector, until every file is whole and on disk (needs a GPU)
    server        the same behind vLLM's server, asked by `speculators generate-offline-data` (--with server; needs a GPU)
    transformers  this repository's transformers engine, at the best of several batch sizes, on every tenth prompt
                  (--with transformers: once, when the others have ended)

The prompts are random tokens, longest first, the same for all. Writes results.json after every
repeat, a log for each variant, and prints a table.

Time: the engines import together and load one after the other. A repeat is not begun when it would end after
--max-seconds, and what has not answered by then is ended; with 330 (the default) all is over within six minutes.
"""

import argparse
import atexit
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent / "workflow" / "scripts"), str(_TESTS)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled when it is first used
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from worker import Answer, Worker  # noqa: E402

_COMMON = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {  # Llama-3.1-8B
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
    "mla-moe-16b": {  # DeepSeek-V2-Lite
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "vocab_size": 102400,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
}
_WARM_UP = 16  # prompts, the longest: kernels are compiled and memory is taken
_TOUCHED = 40 * 2**30
_BATCH_TOKENS = (1, 4096, 16384, 65536)  # of transformers; 1: sample by sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=SHAPES, help="a model of this shape, its weights made up")
    model.add_argument("--target", type=Path, help="a model's folder, with weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and logs")
    parser.add_argument("--disk", type=Path, help="folder to write states below (default: a temporary one; /dev/shm for memory)")
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--lengths", type=int, nargs=2, default=[200, 2048], metavar=("MIN", "MAX"), help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-seconds", type=float, default=330)
    parser.add_argument("--stored-dtype", default="bfloat16")
    parser.add_argument("--dtype", default="bfloat16", help="of the computation")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each engine")
    parser.add_argument("--with", dest="extra", action="append", default=[], choices=["server", "transformers"])
    parser.add_argument("--without", action="append", default=[], choices=["example"])
    args = parser.parse_args()
    Benchmark(args).run()


class Benchmark:
    """The parent: starts the variants, says who runs when, and keeps the account."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        args.out.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="aerie-benchmark-", dir=args.disk))
        self.gpu = Path("/proc/driver/nvidia/version").exists()
        self.names = ["base", "aerie", *(["example"] if self.gpu and "example" not in args.without else [])]
        self.names += ["server"] if "server" in args.extra else []
        folder = args.target or write_model(self.scratch / "model", SHAPES[args.shape], args.dtype)
        self.job = {
            "folder": str(folder),
            "made_up": args.target is None,
            "disk": str(self.scratch),
            "gpu": self.gpu,
            "dtype": args.dtype,
            "stored_dtype": args.stored_dtype,
            "tensor_parallel": args.tensor_parallel,
            "prompts": args.prompts,
            "lengths": args.lengths,
            "share": round(0.88 / len(self.names), 3),  # of the GPU's memory
        }
        self.results: dict[str, Any] = {
            "command": sys.argv,
            "setting": self.job | {"machine_cores": os.cpu_count()},
            "variants": {name: {"repeats": []} for name in dict.fromkeys([*self.names, *args.extra])},
        }
        self._fit_disk()
        self.workers: dict[str, Worker] = {}

    @property
    def left(self) -> float:
        """Seconds until everything has to be over."""
        return self.args.max_seconds - (time.monotonic() - self.began)

    def run(self) -> None:
        try:
            self._load()
            self._repeat()
            self._end_workers()
            if "transformers" in self.args.extra:
                self.workers["transformers"] = self._start("transformers")
                if self._ask("transformers", "load"):
                    self._run("transformers")
        finally:
            self._end_workers()
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.results["seconds"] = round(time.monotonic() - self.began, 1)
            self._save()
            print(table(self.results), flush=True)

    def _load(self) -> None:
        self.workers = {name: self._start(name) for name in self.names}
        if self.gpu:  # a virtual machine may be given its memory as it first uses it: not while we measure
            threading.Thread(target=touch_memory, daemon=True).start()
        for name in list(self.workers):  # one at a time: each looks at how much memory is free
            self._ask(name, "load")
        self.results["disk"] = measure_disk(self.scratch, 2**32 if self.gpu else 2**28)
        say(f"{self.scratch} takes {self.results['disk']['bytes_per_second'] / 1e9:.2f} GB/s")

    def _start(self, name: str) -> Worker:
        return Worker(start, name, self.job, self.args.out / f"{name}.log")

    def _end_workers(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers = {}

    def _fit_disk(self) -> None:
        """Takes fewer prompts where the states of all would not fit."""
        config = json.loads((Path(self.job["folder"]) / "config.json").read_text())
        token = 4 * config.get("text_config", config)["hidden_size"] * (4 if self.args.stored_dtype == "float32" else 2)
        fitting = int(0.8 * shutil.disk_usage(self.scratch).free / (token * sum(self.args.lengths) / 2))
        if fitting < self.args.prompts:
            say(f"{self.scratch} has room for the states of {fitting} prompts: that many are taken")
            self.job["prompts"] = fitting

    def _repeat(self) -> None:
        longest_turn = 0.0
        for number in range(self.args.repeats if self.workers else 0):
            if number and self.left < 1.1 * longest_turn:
                say(f"stopped after {number} repeats: a further one would end after --max-seconds")
                self.results["stopped_after"] = number
                break
            began = time.monotonic()
            for name in list(self.workers):
                self._run(name)
            longest_turn = max(longest_turn, time.monotonic() - began)

    def _run(self, name: str) -> None:
        found = self._ask(name, "run")
        if found:
            self.results["variants"][name]["repeats"].append(found)
            say(f"{name}: {found['tokens'] / found['seconds']:,.0f} tokens/s, {found.get('bytes', 0) / 1e9:.2f} GB")
        self._save()

    def _ask(self, name: str, what: str) -> dict[str, Any] | None:
        """The worker's answer; None where it failed, after which it is left out."""
        began = time.monotonic()
        answer = self.workers[name].ask(what, self.left)
        if "error" in answer:
            say(f"{name}: failed to {what}, see {self.args.out / name}.log\n{answer['error']}")
            self.results["variants"][name]["error"] = answer["error"]
            self.workers.pop(name).end()
            return None
        if what == "load":
            self.results["variants"][name]["load_seconds"] = round(time.monotonic() - began, 1)
            self.results["setting"] |= answer
            say(f"{name}: loaded in {time.monotonic() - began:.0f} s")
        return answer

    def _save(self) -> None:
        (self.args.out / "results.json").write_text(json.dumps(self.results, indent=1, default=str) + "\n")


def start(name: str, job: dict[str, Any]) -> Answer:
    """In the child: imports; then does as it is told, "load" or "run"."""
    prompts = make_prompts(job)
    prepare_imports(name, job["gpu"])
    run: Callable[[list[list[int]]], dict[str, Any]] | None = None

    def answer(what: str) -> dict[str, Any]:
        nonlocal run
        if what == "load":
            run = VARIANTS[name](job)
            run(prompts[:_WARM_UP])
            return environment(job)
        assert run is not None
        return run(prompts)

    return answer


def prepare_imports(name: str, gpu: bool) -> None:
    """The slow part of starting, done by all variants at once."""
    if name == "aerie" or not gpu:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    if name == "transformers":
        import transformers  # noqa: F401
    else:
        import vllm
        from vllm.model_executor.models import llama  # noqa: F401

        _ = vllm.LLM, vllm.SamplingParams
    if torch.cuda.is_available() and name in ("aerie", "transformers"):
        torch.zeros(1, device="cuda")


def environment(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from aerie.provenance import versions

    device = torch.cuda.get_device_name() if job["gpu"] else "CPU"
    return {"device": device, "versions": versions()}


def write_model(folder: Path, config: dict[str, Any], dtype: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | config | {"torch_dtype": dtype}, indent=1))
    return folder


def make_prompts(job: dict[str, Any]) -> list[list[int]]:
    """Token ids of the prompts, longest first; the same ones every time."""
    config = json.loads((Path(job["folder"]) / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    rng = np.random.default_rng(0)
    lengths = sorted(rng.integers(job["lengths"][0], job["lengths"][1] + 1, job["prompts"]).tolist(), reverse=True)
    return [rng.integers(10, vocabulary, length).tolist() for length in lengths]


def make_job(job: dict[str, Any]) -> Any:
    """The extraction job of this repository, which also gives the layer ids to the others."""
    from aerie.extraction import Job
    from aerie.targets import Target

    target = Target("benchmark", "0" * 64, {"path": job["folder"]}, False)
    layer_ids = (*target.aux_layer_ids(None), target.num_layers)
    shape = {"tensor_parallel": job["tensor_parallel"], "engine_options": engine_options(job)}
    return Job(target, layer_ids, job["stored_dtype"], job["dtype"], "vllm", **shape)


def engine_options(job: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"load_format": "dummy"} if job["made_up"] else {}
    if job["gpu"]:
        options["gpu_memory_utilization"] = job["share"]
    return options


def vllm_options(job: dict[str, Any]) -> dict[str, Any]:
    """What `engine_vllm` gives to vLLM, without the capture, and on a GPU with vLLM's own processes."""
    from aerie.vllm_options import common_options

    mine = make_job(job)
    options = common_options(mine.target, {"tensor_parallel": mine.tensor_parallel, "engine_options": engine_options(job)})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if job["gpu"] else "0"
    fixed = {"dtype": job["dtype"], "enable_prefix_caching": False, "enforce_eager": True, "disable_log_stats": True}
    return options | fixed | {"max_model_len": job["lengths"][1] + 8, "skip_tokenizer_init": True}


def prepare_base(job: dict[str, Any], **capture: Any) -> Callable[[list[list[int]]], dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(**vllm_options(job) | capture)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(prompts: list[list[int]]) -> dict[str, Any]:
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        began = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(map(len, prompts))
        assert sum(len(output.prompt_token_ids) for output in outputs) == tokens
        found: dict[str, Any] = {"tokens": tokens, "seconds": seconds}
        if capture:
            paths = [Path(output.kv_transfer_params["hidden_states_path"]) for output in outputs]
            found |= await_files(paths, began)
        return found

    return run


def example_capture(job: dict[str, Any], name: str) -> dict[str, Any]:
    """vLLM's own capture, into a folder of this name."""
    folder = Path(job["disk"]) / name
    folder.mkdir()
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(make_job(job).layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


def prepare_example(job: dict[str, Any]) -> Callable[[list[list[int]]], dict[str, Any]]:
    return prepare_base(job, **example_capture(job, "example"))


def prepare_server(job: dict[str, Any]) -> Callable[[list[list[int]]], dict[str, Any]]:
    from datasets import Dataset
    from speculators.cli.generate_offline_data import generate_offline_data

    from tiny_targets import make_tiny_tokenizer

    folder, port = Path(job["disk"]) / "served", free_port()
    shutil.copytree(job["folder"], folder)
    make_tiny_tokenizer().save_pretrained(folder)  # the server wants one, though no text is read
    options = vllm_options(job) | {"model": str(folder), "skip_tokenizer_init": False} | example_capture(job, "server")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    server = subprocess.Popen([*command, *command_line(options)])
    atexit.register(end, server)
    while not answers(f"http://127.0.0.1:{port}/health"):
        assert server.poll() is None, f"the server ended with code {server.returncode}"
        time.sleep(0.5)

    def run(prompts: list[list[int]]) -> dict[str, Any]:
        rows, states = Path(job["disk"]) / "rows", Path(job["disk"]) / "moved"
        Dataset.from_dict({"input_ids": prompts}).with_format("torch").save_to_disk(rows)
        began = time.perf_counter()
        generate_offline_data(endpoint=f"http://127.0.0.1:{port}/v1", preprocessed_data=str(rows), output=str(states))
        paths = [states / f"hs_{number}.safetensors" for number in range(len(prompts))]
        assert all(path.exists() for path in paths)
        return {"tokens": sum(map(len, prompts))} | await_files(paths, began)

    return run


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()


def command_line(options: dict[str, Any]) -> Iterator[str]:
    """What vllm.LLM takes, as arguments of vLLM's server."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def await_files(paths: list[Path], began: float) -> dict[str, Any]:
    """Waits until the files of states are whole and on disk, and removes them. began: as time.perf_counter has it."""
    with ThreadPoolExecutor(8) as pool:
        size = sum(pool.map(wait_for_file, paths))
        without_fsync = time.perf_counter() - began
        list(pool.map(sync, paths))
    found = {"seconds": time.perf_counter() - began, "seconds_without_fsync": without_fsync, "bytes": size}
    for path in paths:
        for one in (path, Path(f"{path}.lock")):
            one.unlink(missing_ok=True)
    return found


def wait_for_file(path: Path, seconds: float = 60) -> int:
    """Bytes of a safetensors file, once it is as long as its header promises and its writer has let go of its lock."""
    import fcntl

    lock = Path(f"{path}.lock")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if lock.exists():
                with lock.open() as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                end = 8 + length + max(int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__")
                if os.fstat(file.fileno()).st_size == end:
                    return end
        except (OSError, ValueError):
            pass
        time.sleep(0.005)
    raise TimeoutError(f"{path}: not written within {seconds:.0f} s of the end of generate")


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def prepare_aerie(job: dict[str, Any]) -> Callable[[list[list[int]]], dict[str, Any]]:
    from aerie import engine_vllm
    from aerie.extraction import Outcome, SampleSet
    from aerie.hidden_states import HiddenStateStore

    mine = make_job(job)
    store = HiddenStateStore(Path(job["disk"]) / "store", mine.capture_key)
    llm = engine_vllm.load(mine, job["lengths"][1], store)
    before: dict[str, float] = {}

    def run(prompts: list[list[int]]) -> dict[str, Any]:
        samples, outcome = SampleSet.of(prompts), Outcome()
        began = time.perf_counter()
        engine_vllm.run(llm, samples, outcome)
        seconds = time.perf_counter() - began
        outcome.raise_failures()
        assert set(outcome.written) == set(samples.keys)
        shards = list(store.folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in shards)
        shutil.rmtree(store.folder)
        spent = {name: round(value - before.get(name, 0.0), 3) for name, value in outcome.seconds.items()}
        before.update(outcome.seconds)
        return {"tokens": int(samples.tokens.sum()), "seconds": seconds, "bytes": size, "shards": len(shards), "spent": spent}

    return run


def prepare_transformers(job: dict[str, Any]) -> Callable[[list[list[int]]], dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    from aerie.engine_transformers import forward

    mine = make_job(job)
    device = torch.device("cuda" if job["gpu"] else "cpu")
    dtype = getattr(torch, job["dtype"])
    if job["made_up"]:
        torch.set_default_dtype(dtype)
        with device:
            model = AutoModelForCausalLM.from_config(mine.target.config)
        torch.set_default_dtype(torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype).to(device)
    decoder = model.eval().get_decoder()

    def one(prompts: list[list[int]], batch_tokens: int) -> float:
        began = time.perf_counter()
        start = 0
        while start < len(prompts):
            size = max(1, batch_tokens // len(prompts[start]))
            batch = [np.asarray(ids) for ids in prompts[start : start + size]]
            for states in forward(decoder, batch, mine.layer_ids, device):
                states.cpu()
            start += size
        return time.perf_counter() - began

    def run(prompts: list[list[int]]) -> dict[str, Any]:
        chosen = prompts[::10]
        by_batch = {tokens: one(chosen, tokens) for tokens in _BATCH_TOKENS}
        return {"tokens": sum(map(len, chosen)), "seconds": min(by_batch.values()), "seconds_by_batch_tokens": by_batch}

    return run


VARIANTS: dict[str, Callable[..., Callable[[list[list[int]]], dict[str, Any]]]] = {
    "base": prepare_base,
    "aerie": prepare_aerie,
    "example": prepare_example,
    "server": prepare_server,
    "transformers": prepare_transformers,
}


def measure_disk(folder: Path, size: int) -> dict[str, float]:
    """What the file system takes, written as shards are: four threads, a file of 256 MB each at a time, each with fsync."""
    block = np.random.default_rng(0).bytes(2**24)
    part = min(size // 4, 2**28)

    def write(number: int) -> None:
        path = folder / f"disk-{number}"
        with path.open("wb") as file:
            for _ in range(part // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(size // part)))
    return {"bytes": size, "bytes_per_second": size / (time.perf_counter() - began)}


def touch_memory() -> None:
    """Uses memory once and lets it go."""
    pages = np.empty(_TOUCHED, dtype=np.uint8)
    for start in range(0, len(pages), 2**30):
        pages[start : start + 2**30 : 4096] = 1


def table(results: dict[str, Any]) -> str:
    """tokens/s of each repeat, the median and its ratio to the base of the same repeat, and where the time went."""
    variants = results["variants"]
    speeds = {name: [one["tokens"] / one["seconds"] for one in found["repeats"]] for name, found in variants.items()}
    lines = [f"{'variant':14}{'tokens/s of each repeat':32}{'median':>10}{'ratio':>8}{'GB':>8}{'GB/s':>7}"]
    for name, found in variants.items():
        if not found["repeats"]:
            lines.append(f"{name:14}{found.get('error', 'not run')}")
            continue
        ratios = [mine / base for mine, base in zip(speeds[name], speeds["base"], strict=False)]
        found["median_tokens_per_second"] = statistics.median(speeds[name])
        if ratios:
            found["ratio"] = statistics.median(ratios)
        last = found["repeats"][-1]
        size = last.get("bytes", 0)
        shown = " ".join(f"{speed:,.0f}" for speed in speeds[name])
        ratio = f"{found['ratio']:.3f}" if ratios else ""
        lines.append(
            f"{name:14}{shown:32}{found['median_tokens_per_second']:>10,.0f}{ratio:>8}{size / 1e9:>8.2f}{size / 1e9 / last['seconds']:>7.2f}"
        )
    for name, found in variants.items():
        if found["repeats"] and "seconds_without_fsync" in found["repeats"][-1]:
            quick = statistics.median(one["tokens"] / one["seconds_without_fsync"] for one in found["repeats"])
            lines.append(f"{name} without fsync: {quick:,.0f} tokens/s")
        if found["repeats"] and "spent" in found["repeats"][-1]:
            last = found["repeats"][-1]
            spent = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in last["spent"].items())
            lines.append(f"{name}, of {last['seconds']:.2f} s: {spent} (writing: threads beside the engine)")
    if "disk" in results:
        lines.append(f"the disk alone: {results['disk']['bytes_per_second'] / 1e9:.2f} GB/s")
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
