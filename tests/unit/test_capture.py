"""Extraction against transformers' own forward, through both engines; the commands, killed and resumed.

float32 throughout: in bfloat16 a mixture of experts may route single tokens otherwise, and nothing could be told.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

import extract_hidden_states
import find_missing_states
import index_hidden_states
from aerie.errors import AerieError
from aerie.extraction import Failure, Job, Outcome, SampleSet
from aerie.hidden_states import HiddenStateStore, StatesIndex
from aerie.samples import Sample, write_samples
from aerie.targets import Target, fingerprint
from tiny_targets import MAX_POSITIONS, NUM_LAYERS, make_tiny_deepseek_v3, make_tiny_llama

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
LAYER_IDS = (2, 4, 5, NUM_LAYERS)
MAKERS = {"llama": make_tiny_llama, "deepseek_v3": make_tiny_deepseek_v3}


def sequences():
    """Lengths 1 to the model's limit, a shared prefix, and a prompt that comes twice."""
    rng = np.random.default_rng(0)
    made = [rng.integers(4, 280, length) for length in (1, 5, 17, 64, 130, 300, MAX_POSITIONS)]
    return [*made, np.concatenate([made[3][:40], rng.integers(4, 280, 11)]), made[2].copy()]


@pytest.fixture(scope="session")
def targets(tmp_path_factory):
    """{name: Target} of the tiny targets; each folder also holds its fingerprint, fingerprint.json beside it."""
    root = tmp_path_factory.mktemp("targets")
    found = {}
    for name, make in MAKERS.items():
        make(root / name)
        made = fingerprint(name, {"path": str(root / name)}, False, root / "hashes")
        (root / f"{name}.json").write_text(json.dumps(made))
        found[name] = Target.read(root / f"{name}.json")
    return found


def job_of(target, engine, **changes):
    options = {"batch_tokens": 700} if engine == "transformers" else {"max_num_seqs": 8}
    if engine == "vllm" and target.name == "llama":
        options["max_num_batched_tokens"] = 128  # longer prompts are computed in several steps
    settings: dict[str, Any] = {"stored_dtype": "float32", "compute_dtype": "float32", "engine_options": options, "shard_bytes": 200_000}
    return Job(target=target, layer_ids=LAYER_IDS, engine=engine, **settings | changes)


def states_in(store):
    """{sample key: (token ids, states)} of all that a store holds, read with the safetensors library alone."""
    found = {}
    for path in sorted(store.folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = file.get_tensor("offsets").tolist()
            for i, key in enumerate(json.loads(file.metadata()["sample_keys"])):
                assert key not in found
                rows = slice(offsets[i], offsets[i + 1])
                found[key] = file.get_slice("token_ids")[rows], file.get_slice("hidden_states")[rows]
    return found


def reference_model(target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()


def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize("name", MAKERS)
def test_states_are_those_of_a_plain_forward(targets, tmp_path, name, engine):
    if engine == "vllm":
        from aerie.engine_vllm import extract
    else:
        from aerie.engine_transformers import extract

    target, prompts = targets[name], sequences()
    job, samples = job_of(target, engine), SampleSet.of(prompts)
    store = HiddenStateStore(tmp_path, job.capture_key)
    outcome = extract(job, samples, store)
    assert not outcome.failed and set(outcome.written) == set(samples.keys)
    stored = states_in(store)
    assert set(stored) == set(samples.keys) and len(set(outcome.written.values())) > 1

    model = reference_model(target)
    head = target.head_weights()
    for key, prompt in zip(samples.keys, prompts, strict=True):
        with torch.no_grad():
            plain = model(torch.tensor(prompt)[None], output_hidden_states=True)
        ids, states = stored[key]
        assert ids.tolist() == prompt.tolist() and states.shape == (len(prompt), len(LAYER_IDS), target.hidden_size)
        for place, layer in enumerate(LAYER_IDS[:-1]):
            assert error(states[:, place], plain.hidden_states[layer][0]) < 1e-5
            # One layer off, either way, is far off.
            assert min(error(states[:, place], plain.hidden_states[layer + step][0]) for step in (-1, 1)) > 0.05
        last = states[:, -1]
        assert error(last, plain.hidden_states[-1][0]) > 0.05  # that one comes after the norm
        normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + target.text_config.rms_norm_eps) * head["norm"]
        assert error(normed, plain.hidden_states[-1][0]) < 1e-5
        assert error(normed @ head["lm_head"].T, plain.logits[0]) < 1e-5


def test_shards_record_the_time_of_the_first_step_too(targets, tmp_path, monkeypatch):
    """Plans go by it, and a small dataset is one step."""
    from aerie import engine_vllm

    plain, took = engine_vllm.run, []

    def timed(*arguments):
        began = time.monotonic()
        plain(*arguments)
        took.append(time.monotonic() - began)

    monkeypatch.setattr(engine_vllm, "run", timed)
    job = job_of(targets["llama"], "vllm", engine_options={"max_num_seqs": 64, "max_num_batched_tokens": 32768}, shard_bytes=2**28)
    samples = SampleSet.of([np.random.default_rng(i).integers(4, 280, 400).tolist() for i in range(60)])
    store = HiddenStateStore(tmp_path, job.capture_key)
    assert not engine_vllm.extract(job, samples, store).failed
    recorded = store.known()["seconds"].sum()
    assert 0.5 * took[0] <= recorded <= took[0]


def test_too_long_samples_are_refused_before_the_load(targets, tmp_path, monkeypatch):
    from aerie import engine_vllm

    monkeypatch.setattr(engine_vllm, "load", lambda *_: pytest.fail("loaded"))
    samples = SampleSet.of([[5] * 3, [5] * (MAX_POSITIONS + 1)])
    with pytest.raises(AerieError, match=samples.keys[1]):
        engine_vllm.extract(job_of(targets["llama"], "vllm"), samples, HiddenStateStore(tmp_path, "k"))
    with pytest.raises(AerieError, match="layer_ids"):
        job_of(targets["llama"], "vllm").__class__(targets["llama"], (2, 9), "float32", "float32", "vllm")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"enable_prefix_caching": True},
        {"no_such_option": 1},
        {"tensor_parallel_size": 2},
        {"trust_remote_code": True},
    ],
)
def test_wrong_options_are_refused_before_the_load(targets, tmp_path, options):
    from aerie.engine_vllm import extract

    with pytest.raises(AerieError, match=next(iter(options))):
        extract(job_of(targets["llama"], "vllm", engine_options=options), SampleSet.of([[5, 6]]), HiddenStateStore(tmp_path, "k"))


@pytest.mark.long
@pytest.mark.engines
def test_prompts_whose_states_vllm_skips_are_failures(targets, tmp_path, monkeypatch):
    """Without spare tokens vLLM leaves out every step that holds a prompt of the full length, and says nothing."""
    from aerie import engine_vllm

    monkeypatch.setattr(engine_vllm, "_SPARE_TOKENS", 0)
    job = job_of(targets["llama"], "vllm", engine_options={"max_num_batched_tokens": 1024})
    samples = SampleSet.of([[7] * 40, [8] * 30, [9] * 5])
    store = HiddenStateStore(tmp_path, job.capture_key)
    outcome = engine_vllm.extract(job, samples, store)
    assert samples.keys[0] in outcome.failed and "max_model_len" in outcome.failed[samples.keys[0]].cause
    assert set(outcome.failed) | set(outcome.written) == set(samples.keys)
    assert set(states_in(store)) == set(outcome.written)


@pytest.mark.long
@pytest.mark.engines
def test_a_failed_write_in_vllm_is_accounted_for(targets, tmp_path, monkeypatch):
    from aerie.engine_vllm import extract

    real, calls = HiddenStateStore.write_shard, []

    def failing(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(HiddenStateStore, "write_shard", failing)
    job, samples = job_of(targets["llama"], "vllm"), SampleSet.of(sequences())
    outcome = extract(job, samples, HiddenStateStore(tmp_path, job.capture_key))
    assert outcome.failed and outcome.written and set(outcome.failed) | set(outcome.written) == set(samples.keys)
    with pytest.raises(AerieError, match="No space left"):
        outcome.raise_failures()


class Workplace:
    """A dataset and its hidden states, worked on through the commands."""

    def __init__(self, root, target, samples, engine="transformers", **runtime):
        self.root, self.target, self.store_root = root, target, root / "store"
        self.states = root / "states"
        self.store_root.mkdir(exist_ok=True)
        self.recipe: dict[str, Any] = {
            "stage": "extract_hidden_states",
            "version": 1,
            "settings": {
                "aux_layer_ids": None,
                "stored_dtype": "float32",
                "compute_dtype": "float32",
                "engine": engine,
                "value_options": {},
            },
            "runtime": {"device": "cpu", "gpus": 0, "engine_options": {}, "shard_bytes": 100_000, **runtime},
        }
        self.set_runtime()
        (root / "dataset").mkdir()
        write_samples(samples, root / "dataset" / "samples")
        (root / "dataset" / "manifest.json").write_text(json.dumps({"key": "dataset", "digest": "dataset"}))
        layers = (*target.aux_layer_ids(None), target.num_layers)
        self.store = HiddenStateStore(self.store_root, Job(target, layers, "float32", "float32", engine).capture_key)

    def set_runtime(self, **changes):
        self.recipe["runtime"] |= changes
        (self.root / "recipe.json").write_text(json.dumps(self.recipe))

    def arguments(self, output, *others):
        common = [
            *("--recipe", self.root / "recipe.json", "--target", Path(self.target.folder).with_suffix(".json")),
            *("--dataset", self.root / "dataset", "--store", self.store_root, "--output", output),
        ]
        return [str(argument) for argument in (*common, *others)]

    def find(self):
        table = self.states / "missing.parquet"
        find_missing_states.main(find_missing_states.build_parser().parse_args(self.arguments(table)))
        return pd.read_parquet(table)

    def part(self, part=0, parts=1):
        output = self.states / f"part-{part}-of-{parts}.parquet"
        return self.arguments(output, "--missing", self.states / "missing.parquet", "--part", part, "--parts", parts)

    def extract(self, part=0, parts=1):
        extract_hidden_states.main(extract_hidden_states.build_parser().parse_args(self.part(part, parts)))

    def start(self, part=0, parts=1, **options):
        """The same in a process of its own."""
        command = [sys.executable, str(SCRIPTS / "extract_hidden_states.py"), *self.part(part, parts)]
        return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **options)

    def index(self):
        index_hidden_states.main(index_hidden_states.build_parser().parse_args(self.arguments(self.states)))
        return StatesIndex(self.states, self.store_root)


def make_samples(count, tokens, seed=0):
    rng = np.random.default_rng(seed)
    return [Sample(rng.integers(4, 280, tokens).tolist(), [0] + [1] * (tokens - 1), "test") for _ in range(count)]


def check_killed_and_resumed(place, samples, kills):
    """Kills the part as soon as it has written something new, `kills` times; then it is run to the end."""
    keys = {sample.key for sample in samples}
    assert set(place.find()["sample_key"]) == keys
    kept = 0
    for _ in range(kills):
        shards = len(place.store.shards())
        process = place.start(stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(place.store.folder.glob("*.safetensors"))) <= shards:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed: give it more samples"
        found = place.store.known()
        assert kept < len(found) < len(keys)
        kept = len(found)
    assert place.start().wait() == 0
    stored = states_in(place.store)  # asserts that each is there once
    assert set(stored) == keys
    index = place.index()
    assert sorted(index.keys()) == sorted(keys)
    for sample in samples[::20]:
        assert index.token_ids(sample.key).tolist() == sample.input_ids
        assert torch.equal(index.states(sample.key), stored[sample.key][1])
    manifest = json.loads((place.states / "manifest.json").read_text())
    assert manifest["figures"]["samples"] == len(keys)
    assert manifest["figures"]["tokens"] == sum(len(sample.input_ids) for sample in samples)
    assert manifest["figures"]["tokens_per_second"] > 0


def test_killed_and_resumed(targets, tmp_path):
    samples = make_samples(700, 100)
    place = Workplace(tmp_path, targets["llama"], samples, engine_options={"batch_tokens": 400})
    check_killed_and_resumed(place, samples, kills=1)


@pytest.mark.long
def test_killed_and_resumed_vllm(targets, tmp_path):
    samples = make_samples(500, 100)
    place = Workplace(tmp_path, targets["llama"], samples, engine="vllm", engine_options={"max_num_seqs": 16})
    check_killed_and_resumed(place, samples, kills=1)


def test_mixed_parts_do_everything_once(targets, tmp_path):
    samples = make_samples(60, 20)
    place = Workplace(tmp_path, targets["llama"], samples)
    place.find()
    whole = place.start(0, 1)
    place.extract(1, 2)
    place.extract(0, 2)
    assert whole.wait() == 0
    assert set(states_in(place.store)) == {sample.key for sample in samples}
    assert len(place.index()) == 60

    # What the store has is not extracted again, and then the target is not even looked at.
    weights = Path(targets["llama"].folder) / "model.safetensors"
    hidden = weights.rename(weights.with_suffix(".away"))
    try:
        assert place.find().empty
        place.extract()
    finally:
        hidden.rename(weights)

    # A damaged shard costs its own samples only.
    damaged = max(place.store.folder.glob("*.safetensors"))
    lost = set(place.store.known().query("shard == @damaged.name")["sample_key"])
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert set(place.find()["sample_key"]) == lost
    place.extract()
    damaged.unlink()
    assert len(place.index()) == 60


def test_a_failing_target_names_its_samples(targets, tmp_path):
    """Weights with an infinity: the command fails, says which samples, at which layers, and keeps nothing of them."""
    make_tiny_llama(tmp_path / "broken")
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.layers.4.mlp.down_proj.weight"][0, 0] = float("inf")
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    made = fingerprint("broken", {"path": str(tmp_path / "broken")}, False, tmp_path / "hashes")
    (tmp_path / "broken.json").write_text(json.dumps(made))
    samples = make_samples(3, 10)
    place = Workplace(tmp_path, Target.read(tmp_path / "broken.json"), samples)
    place.find()
    with pytest.raises(AerieError, match=r"3 of 3 samples(.|\n)*3 × its states at layer ids \[5, 8\]") as report:
        place.extract()
    assert all(sample.key in str(report.value) for sample in samples)
    assert place.store.known().empty and not (place.states / "part-0-of-1.parquet").exists()


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_few_samples_without_finite_states_may_be_left_out(tmp_path, monkeypatch, engine):
    """They are named and not tried each time; those computed in the same batch have their right states."""
    from safetensors.torch import load_file, save_file

    poison = 299  # a token that no other sample has
    samples = make_samples(40, 50)
    for i in (5, 25):
        ids = samples[i].input_ids
        samples[i] = Sample([*ids[:30], poison, *ids[31:]], [0] + [1] * (len(ids) - 1), "test")
    bad = sorted([samples[5].key, samples[25].key])

    make_tiny_llama(tmp_path / "tiny")
    weights = tmp_path / "tiny" / "model.safetensors"
    values = load_file(weights)
    values["model.embed_tokens.weight"][poison] = float("inf")
    save_file(values, weights, {"format": "pt"})
    (tmp_path / "tiny.json").write_text(json.dumps(fingerprint("tiny", {"path": str(tmp_path / "tiny")}, False, tmp_path / "hashes")))
    target = Target.read(tmp_path / "tiny.json")

    reused = {"max_num_seqs": 2, "num_gpu_blocks_override": 8} if engine == "vllm" else {}  # the cache's blocks, by other samples
    place = Workplace(tmp_path, target, samples, engine, max_failed=0.04, engine_options=reused)
    assert len(place.find()) == 40
    with pytest.raises(AerieError, match=r"2 of 40 samples have no hidden states(.|\n)*raise extraction.max_failed") as report:
        place.extract()
    assert all(key in str(report.value) for key in bad)
    assert sorted(place.store.failed()) == bad and len(place.store.known()) == 38

    # Nobody opens the target for them again once so many may fail.
    place.set_runtime(max_failed=0.05)
    with monkeypatch.context() as patched:
        patched.setattr(extract_hidden_states, "extract", None)
        assert place.find().empty
        place.extract()
    index = place.index()
    keys = index.keys()
    assert index.failed == set(bad) and sorted(keys) == sorted(sample.key for sample in samples if sample.key not in bad)
    manifest = json.loads((place.states / "manifest.json").read_text())
    assert manifest["figures"]["failed"] == 2 and "infinities" in manifest["failed"][bad[0]]
    model, layers = reference_model(target), target.aux_layer_ids(None)
    for key in keys:
        with torch.no_grad():
            plain = model(torch.as_tensor(index.token_ids(key)).long()[None], output_hidden_states=True)
        assert all(error(index.states(key)[:, at], plain.hidden_states[layer][0]) < 1e-5 for at, layer in enumerate(layers))

    place.set_runtime(max_failed=0.04)
    assert sorted(place.find()["sample_key"]) == bad
    with pytest.raises(AerieError, match=f"2 of 40 samples have no hidden states, and extraction.max_failed is 0.04 of them: {bad[0]}"):
        place.index()


def test_failures_of_earlier_attempts_count():
    """Of 40 samples 2 may fail: one did before, so one more may, and not two."""
    outcome = Outcome(written={"d": "shard"}, failed={key: Failure(key, "not finite", its_own=True) for key in "ab"})
    outcome.raise_failures(0.05 * 40)
    with pytest.raises(AerieError, match="2 of 3 samples have no hidden states"):
        outcome.raise_failures(0.05 * 40 - 1)
    outcome.add({}, [Failure("c", "the engine failed", "Traceback")])
    with pytest.raises(AerieError, match="1 × the engine failed"):
        outcome.raise_failures(0.5 * 40)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_a_target_without_finite_states_is_given_up(targets, tmp_path, monkeypatch, engine):
    """Not after a week of forwards; a few such samples among good ones do not stop the rest."""
    from aerie import engine_transformers, engine_vllm, extraction, shard_writer

    monkeypatch.setattr(engine_vllm, "_ACCOUNT_SECONDS", 0.0)
    monkeypatch.setattr(extraction, "_HOPELESS", 5)
    extract = engine_vllm.extract if engine == "vllm" else engine_transformers.extract
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 128} if engine == "vllm" else {"batch_tokens": 100}
    samples = SampleSet.of([one.input_ids for one in make_samples(60, 100)])
    job = job_of(targets["llama"], engine, engine_options=options, shard_bytes=100_000)
    real, bad = shard_writer.ShardWriter.add, 60

    def add(self, sample):
        nonlocal bad
        bad -= 1
        if bad >= 0:
            sample.slot.finite[0] = False
        real(self, sample)

    monkeypatch.setattr(shard_writer.ShardWriter, "add", add)
    outcome = extract(job, samples, HiddenStateStore(tmp_path / "bad", job.capture_key))
    causes = [failure.cause for failure in outcome.failed.values()]
    assert not outcome.written and len(causes) == 60
    assert 5 <= sum(cause.startswith("its states at layer ids [2] hold infinities") for cause in causes) < 40
    assert any("none had not (first: its states at layer ids [2] hold infinities" in cause for cause in causes)
    bad = 4
    outcome = extract(job, samples, HiddenStateStore(tmp_path / "good", job.capture_key))
    assert len(outcome.failed) == 4 and len(outcome.written) == 56


def test_a_sample_longer_than_the_target_is_refused(targets, tmp_path):
    samples = [*make_samples(2, 10), *make_samples(1, MAX_POSITIONS + 1)]
    place = Workplace(tmp_path, targets["llama"], samples)
    with pytest.raises(AerieError, match=samples[2].key):
        place.find()


# What the command of the next tests runs: the real one, with a fault in its connector. vLLM's workers run this file again.
FAULTY = """
import os, signal, time
from pathlib import Path

import extract_hidden_states
from aerie import cli
from aerie.capture_connector import CaptureConnector, get_tensor_model_parallel_rank

class Silent(Exception):
    pass

def fail(self, *args, **kwargs):
    if get_tensor_model_parallel_rank() == RANK:
        Path(STAMP).write_text(str(time.time()))
        if DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Silent()

CaptureConnector.METHOD = fail
if __name__ == "__main__":
    cli.run(extract_hidden_states.main, extract_hidden_states.build_parser())
"""
FAULTS = {  # method of the connector, rank, whether it is killed, tensor parallel
    "take": ("_take", 0, False, 1),
    "start": ("register_kv_caches", 0, False, 1),
    "step": ("start_load_kv", 0, False, 1),
    "killed": ("start_load_kv", 0, True, 1),
    "worker": ("start_load_kv", 1, False, 2),
    "worker-start": ("register_kv_caches", 1, False, 2),
    "worker-first": ("start_load_kv", 0, False, 2),
    "worker-killed": ("start_load_kv", 1, True, 2),
}


@pytest.mark.parametrize("fault", [name if name == "take" else pytest.param(name, marks=pytest.mark.long) for name in FAULTS])
def test_whatever_dies_is_named(targets, tmp_path, fault):
    """Exceptions without a message and a SIGKILL: type and place on the terminal, exit code not 0, within 30 s."""
    method, rank, kill, parallel = FAULTS[fault]
    script, stamp = tmp_path / "faulty.py", tmp_path / "stamp"
    values = {"METHOD": method, "RANK": str(rank), "STAMP": repr(str(stamp)), "DEADLY": str(kill)}
    text = FAULTY
    for name, value in values.items():
        text = text.replace(name, value)
    script.write_text(text)
    place = Workplace(tmp_path, targets["llama"], make_samples(6, 20), engine="vllm", tensor_parallel=parallel)
    place.find()
    command = [sys.executable, str(script), *place.part(), "--log", str(tmp_path / "faulty.log")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if parallel == 2 else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert time.time() - float(stamp.read_text()) < 30
    assert done.returncode != 0
    if kill:
        assert "was killed by signal 9 (SIGKILL" in done.stderr
    else:
        assert "Silent" in done.stderr
        line = 1 + script.read_text().splitlines().index("        raise Silent()")
        assert f"faulty.py:{line}, fail" in done.stderr
    assert "last lines of its log" in done.stderr and str(tmp_path / "faulty.log") in done.stderr


FAULTY_SERVING = """
from pathlib import Path

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.worker.cpu_worker import CPUWorker

from aerie import cli, generation
from aerie.targets import Target

class Silent(Exception):
    pass

execute = CPUWorker.execute_model

def fail(self, *args, **kwargs):
    if get_tensor_model_parallel_rank() == 1:
        raise Silent()
    return execute(self, *args, **kwargs)

CPUWorker.execute_model = fail

def main(args):
    runtime = {"device": "cpu", "tensor_parallel": 2}
    engine = generation.start(Target.read(args.target), runtime, end_tokens=[3], max_length=60, dtype="float32")
    engine.converse({0: [5, 6, 7]}, lambda number, answer: None, 8)

if __name__ == "__main__":
    made = cli.parser(None)
    made.add_argument("--target", type=Path)
    cli.run(main, made)
"""


@pytest.mark.long
def test_what_a_serving_worker_dies_of_is_named(targets, tmp_path):
    """Its main module imports aerie.generation first, as evaluate_draft's does: vLLM then configures its loggers in the worker."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_SERVING)
    target = Path(targets["llama"].folder).with_suffix(".json")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    command = [sys.executable, str(script), "--target", str(target), "--log", str(tmp_path / "log")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 1 and "Silent" in done.stderr


SLOW = """
import time

import extract_hidden_states
from aerie import cli
from aerie.capture_connector import CaptureConnector

take = CaptureConnector._take

def slowly(self, *args):
    time.sleep(0.3)
    take(self, *args)

CaptureConnector._take = slowly
if __name__ == "__main__":
    cli.run(extract_hidden_states.main, extract_hidden_states.build_parser())
"""


@pytest.mark.long
@pytest.mark.parametrize("parallel", [1, 2])
def test_told_to_end_it_says_so_and_writes_what_it_has(targets, tmp_path, parallel):
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    place = Workplace(tmp_path, targets["llama"], make_samples(400, 20), engine="vllm", tensor_parallel=parallel, shard_bytes=100_000)
    place.find()
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if parallel == 2 else {})
    with open(tmp_path / "said", "w") as said:
        command = [sys.executable, str(script), *place.part()]
        process = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)
    while process.poll() is None and not list(place.store.folder.glob("*.safetensors")):
        time.sleep(0.02)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGTERM)  # as Slurm does; we then hear of it twice
    assert process.wait(60) == 1
    told = (tmp_path / "said").read_text()
    assert "failed: ended by SIGTERM; finished work is kept" in told and "workers wrote" not in told
    assert len(place.store.shards()) > 1 and len(place.store.known()) < 400
