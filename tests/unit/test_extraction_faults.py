"""Kills and broken disks: nothing that was finished is lost, nothing is there twice, and each fault is an error or mended."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from test_capture import (
    Workplace,
    error,
    job_of,
    make_samples,
    reference_model,
    states_in,
    targets,  # noqa: F401 - a fixture
)

import extract_hidden_states
from aerie.errors import AerieError
from aerie.extraction import SampleSet

KILLER = """
import os, signal, sys
from pathlib import Path
from aerie import cli, hidden_states
import extract_hidden_states as command

spot, left = sys.argv[1], int(sys.argv[2])
sys.argv[1:] = sys.argv[3:]

def dying(real):
    def call(*args, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call

if spot == "write":  # in the midst of a shard
    hidden_states._bytes_of = dying(hidden_states._bytes_of)
elif spot == "fsync":  # of the file, or of the folder after the rename
    os.fsync = dying(os.fsync)
elif spot == "rename":
    Path.replace = dying(Path.replace)
cli.run(command.main, command.build_parser())
"""
# When the process is killed: some time after its first shard, or at the so-manieth write, fsync or rename.
KILLS = [("later", 0)] * 18 + [("write", 60)] * 4 + [("fsync", 5), ("fsync", 6)] * 2 + [("rename", 3)] * 4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thirty_kills(targets, tmp_path):  # noqa: F811
    samples = make_samples(2000, 50)
    keys = {sample.key for sample in samples}
    place = Workplace(tmp_path, targets["llama"], samples, engine_options={"batch_tokens": 400}, shard_bytes=500_000)
    assert set(place.find()["sample_key"]) == keys
    script = tmp_path / "killer.py"
    script.write_text(KILLER)
    dice, after_first = random.Random(0), 0
    kept: set[pathlib.Path] = set()
    kills = KILLS.copy()
    dice.shuffle(kills)
    for spot, count in kills:
        command = [sys.executable, str(script), spot, str(count), *place.part()]
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        if spot == "later":
            while process.poll() is None and set(place.store.folder.glob("*.safetensors")) <= kept:
                time.sleep(0.005)
            time.sleep(dice.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
        # Injected, the worker dies and its parent says so; else the parent dies, and the kernel ends the worker.
        killed = -signal.SIGKILL if spot == "later" else 128 + signal.SIGKILL
        assert process.wait() == killed, "it ended before it could be killed: give it more samples"
        with place.store.locked(range(256)):  # held by the worker to its end
            pass
        shards = set(place.store.folder.glob("*.safetensors"))
        assert kept <= shards and len(place.store.shards()) == len(shards)  # each whole
        assert set(states_in(place.store)) < keys  # and no sample twice
        after_first += len(shards) > len(kept)
        kept = shards
    assert after_first >= 20
    assert place.start().wait() == 0
    stored = states_in(place.store)
    assert set(stored) == keys and kept < set(place.store.folder.glob("*.safetensors"))
    assert len(place.index()) == 2000
    model, layers = reference_model(targets["llama"]), place.store.shards()[0].layers
    for sample in samples[::50]:
        ids, states = stored[sample.key]
        assert ids.tolist() == sample.input_ids and states.shape[1] == layers
        plain = model(ids[None].long(), output_hidden_states=True)
        for at, layer in enumerate(targets["llama"].aux_layer_ids(None)):
            assert error(states[:, at], plain.hidden_states[layer][0]) < 1e-5
    for path in place.store.folder.glob(".*.tmp"):
        os.utime(path, (0, 0))
    place.store.remove_stale()
    assert not list(place.store.folder.glob(".*.tmp"))


@pytest.fixture
def disk(tmp_path):
    """A file system of 64 MB for the store of a Workplace in tmp_path."""
    folder = tmp_path / "store"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "aerie-test", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no permission to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


@pytest.mark.long
def test_a_full_disk(targets, tmp_path, disk):  # noqa: F811
    samples = make_samples(2000, 50)  # 103 MB
    place = Workplace(tmp_path, targets["llama"], samples, shard_bytes=4_000_000)
    for command in (place.find, place.extract):  # seen before the load
        with pytest.raises(AerieError, match=r"free(.|\n)*(M|m)ake room"):
            command()
    assert place.store.known().empty

    # It may also fill up meanwhile.
    job = job_of(targets["llama"], "transformers", shard_bytes=4_000_000)
    assert job.capture_key == place.store.key
    outcome = extract_hidden_states.extract(job, SampleSet.of([sample.input_ids for sample in samples]), place.store)
    with pytest.raises(AerieError, match="No space left on device"):
        outcome.raise_failures()
    kept = states_in(place.store)
    assert 500 < len(kept) < 1300 and set(kept) == set(outcome.written)
    assert len(outcome.written) + len(outcome.failed) == 2000 and not list(place.store.folder.glob(".*.tmp"))

    remount(disk, "size=256m")
    before = set(place.store.folder.glob("*.safetensors"))
    place.extract()
    assert before < set(place.store.folder.glob("*.safetensors"))
    assert set(states_in(place.store)) == {sample.key for sample in samples} and len(place.index()) == 2000


@pytest.mark.long
def test_a_read_only_disk(targets, tmp_path, disk):  # noqa: F811
    place = Workplace(tmp_path, targets["llama"], make_samples(5, 20))
    assert len(place.find()) == 5
    remount(disk, "ro")
    with pytest.raises(AerieError, match=r"cannot be written(.|\n)*Read-only file system"):
        place.extract()
    remount(disk, "rw")
    place.extract()
    assert len(states_in(place.store)) == 5


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "zero-filled": lambda data: bytes(len(data)),
    "bit-flipped header": lambda data: flip(data, 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.long
def test_a_damaged_shard_costs_its_own_samples(targets, tmp_path, damage):  # noqa: F811
    samples = make_samples(60, 20)
    place = Workplace(tmp_path, targets["llama"], samples)
    place.find()
    place.extract()
    shards = sorted(place.store.folder.glob("*.safetensors"))
    assert len(shards) > 3
    others = {path: path.stat().st_mtime_ns for path in shards[1:]}
    lost = set(place.store.known().query("shard == @shards[0].name")["sample_key"])
    shards[0].write_bytes(DAMAGES[damage](shards[0].read_bytes()))
    assert set(place.find()["sample_key"]) == lost
    place.extract()
    assert {path: path.stat().st_mtime_ns for path in shards[1:]} == others
    shards[0].unlink()
    assert set(states_in(place.store)) == {sample.key for sample in samples}
