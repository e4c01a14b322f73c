"""Trainings that are killed, on one device and on several: they go on to the very draft of an unbroken one, or say why not."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aerie.checkpoints
from aerie.checkpoints import Checkpoints
from aerie.errors import AerieError
from aerie.samples import Sample, load_samples, write_samples
from aerie.train_run import train
from training_problem import RUNTIME, SETTINGS, make_problem

KILLS = 5
PAIRED: dict[str, Any] = {
    "optimizer": "adamw", "batch_tokens": 64, "max_length": 64, "packs_per_step": 2, "on_bad_sample": "skip",
    "epochs": 3, "learning_rate": 0.001, "validations_per_epoch": 1,
}  # fmt: skip
# Checkpoints at most steps, and validations within epochs.
TRAINING = {**SETTINGS["training"], "epochs": 4, "validations_per_epoch": 2}


@pytest.fixture(scope="module")
def problem(tmp_path_factory) -> SimpleNamespace:
    return make_problem(tmp_path_factory.mktemp("problem"))


def run_training(problem, folder: Path, samples=None, ranks: int = 1, **training):
    torch.set_num_threads(1)
    for name in ("work", "out"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    settings = {**SETTINGS, "training": {**TRAINING, **training}}
    runtime = {**RUNTIME, "ranks": ranks}
    chosen = problem.samples if samples is None else samples
    return train(problem.target, chosen, problem.states, problem.vocab_map, settings, runtime, folder / "work", folder / "out")


def weights(folder: Path) -> bytes:
    return (folder / "out/model.safetensors").read_bytes()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(problem, folder: Path, prepare) -> None:
    """Trains in a process forked from this one, which `prepare` has made kill itself somewhere."""
    child = os.fork()
    if child == 0:
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            prepare()
            run_training(problem, folder)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_at_step(step: int):
    """Dies in the middle of a step: the optimizer has moved, the schedule has not."""

    def prepare() -> None:
        plain = torch.optim.AdamW.step
        made = [0]

        def counted(self, *arguments, **options):
            result = plain(self, *arguments, **options)
            made[0] += 1
            if made[0] == step:
                die()
            return result

        torch.optim.AdamW.step = counted  # type: ignore[method-assign]

    return prepare


def kill_while_saving(number: int, where: str):
    """Dies while the checkpoint of this number is being written: in the middle of the file, or before its marker."""

    def prepare() -> None:
        made = [0]
        plain_save, plain_marker = torch.save, aerie.checkpoints.write_atomically

        def half_a_file(state, file):
            made[0] += 1
            plain_save(state, file)
            if made[0] == number and where == "file":
                file.truncate(file.tell() // 2)
                file.flush()
                die()

        def no_marker(path, text):
            if made[0] == number and where == "marker":
                die()
            plain_marker(path, text)

        torch.save = half_a_file
        aerie.checkpoints.write_atomically = no_marker

    return prepare


@pytest.fixture(scope="module")
def unbroken(problem, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("unbroken")
    figures, digest = run_training(problem, folder)
    return SimpleNamespace(folder=folder, figures=figures, digest=digest, metrics=(folder / "work/metrics.jsonl").read_text())


def same_as(unbroken, folder: Path, figures: dict, digest: str) -> None:
    """Weights and metrics are the same, to the last bit."""
    assert digest == unbroken.digest and weights(folder) == weights(unbroken.folder)
    assert (folder / "work/metrics.jsonl").read_text() == unbroken.metrics
    for name in ("validation", "best_step", "steps", "tokens"):
        assert figures[name] == unbroken.figures[name]


def test_a_killed_training_goes_on_exactly(problem, unbroken, tmp_path: Path):
    """kill -9 at five steps drawn by lot, in the middle of each, then twice while a checkpoint is being written."""
    lots = random.Random(os.environ.get("AERIE_TEST_SEED", "7"))
    for _ in range(KILLS):
        killed(problem, tmp_path, kill_at_step(lots.randint(2, 5)))
    killed(problem, tmp_path, kill_while_saving(lots.randint(1, 2), "file"))
    assert list((tmp_path / "work/checkpoints").glob("*.tmp"))
    killed(problem, tmp_path, kill_while_saving(1, "marker"))
    step = int(max((tmp_path / "work/checkpoints").glob("*.json")).stem.removeprefix("step-"))
    assert 0 < step < unbroken.figures["steps"]
    same_as(unbroken, tmp_path, *run_training(problem, tmp_path))


def test_a_truncated_checkpoint_falls_back_to_the_one_before(problem, unbroken, tmp_path: Path, capsys):
    killed(problem, tmp_path, kill_at_step(12))
    *_, before, newest = sorted((tmp_path / "work/checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    result = run_training(problem, tmp_path)
    assert f"resumed at step {int(before.stem.removeprefix('step-'))} of" in capsys.readouterr().err
    same_as(unbroken, tmp_path, *result)


def test_a_training_that_only_has_to_export(problem, unbroken, tmp_path: Path):
    shutil.copytree(unbroken.folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "out")
    same_as(unbroken, tmp_path, *run_training(problem, tmp_path))


def test_a_checkpoint_of_another_draft_is_refused(problem, unbroken, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "work/checkpoints")
    state = Checkpoints(unbroken.folder / "work/checkpoints").newest()
    assert state is not None
    state["trained"]["layers.1.mlp.up_proj.weight"] = torch.zeros(1)
    checkpoints.save(3, state)
    with pytest.raises(AerieError, match=r"is of another draft \(\['layers\.1\.mlp"):
        run_training(problem, tmp_path)


@pytest.fixture(scope="module")
def five_samples(problem, tmp_path_factory):
    """Five for training, one of them without a supervised token, and two for validation."""
    train_rows = [row for row in problem.samples if row["split"] == "train"][:5]
    rows = train_rows + [row for row in problem.samples if row["split"] == "validation"][:2]
    masks = [[0] * len(row["input_ids"]) if number == 2 else row["loss_mask"] for number, row in enumerate(rows)]
    folder = tmp_path_factory.mktemp("five")
    write_samples((Sample(row["input_ids"], mask, "s", row["split"]) for row, mask in zip(rows, masks, strict=True)), folder / "samples")
    return load_samples(folder)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_give_the_draft_of_one(problem, five_samples, tmp_path: Path, optimizer: str):
    """Of four packs of one sample, two a step: each rank takes one of them, or one rank both in turn."""
    settings = PAIRED | {"optimizer": optimizer}
    one, _ = run_training(problem, tmp_path / "one", five_samples, **settings)
    two, _ = run_training(problem, tmp_path / "two", five_samples, ranks=2, **settings)
    assert (one["devices"], two["devices"]) == (1, 2)
    for name in ("steps", "tokens", "best_step", "samples_left_out"):
        assert one[name] == two[name], name
    assert one["samples_left_out"] == 1 and one["steps"] == 3 * 2
    same_figures(two["validation"], one["validation"])
    first, second = (load_file(tmp_path / name / "out/model.safetensors") for name in ("one", "two"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=1e-5)
    lines = [[json.loads(line) for line in (tmp_path / name / "work/metrics.jsonl").read_text().splitlines()] for name in ("one", "two")]
    for ours, theirs in zip(*lines, strict=True):
        same_figures(theirs, ours)


def same_figures(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-4)), name


@pytest.mark.long
def test_a_training_that_one_device_began_two_can_end(problem, five_samples, tmp_path: Path):
    one, _ = run_training(problem, tmp_path / "one", five_samples, **PAIRED)
    shutil.copytree(tmp_path / "one", tmp_path / "begun")
    for path in sorted((tmp_path / "begun/work/checkpoints").glob("step-*"))[2:]:
        path.unlink()
    shutil.rmtree(tmp_path / "begun/out")
    mixed, _ = run_training(problem, tmp_path / "begun", five_samples, ranks=2, **PAIRED)
    same_figures(mixed["validation"], one["validation"])


RANKS = """
import os, signal, sys
from pathlib import Path

from aerie import cli
from aerie.errors import AerieError
from aerie.samples import load_samples
from aerie.hidden_states import StatesIndex
from aerie.targets import Target
from aerie.train_run import train
from aerie.training import DraftTrainer
from aerie.vocabulary import load_map
from training_problem import RUNTIME, SETTINGS

plain = DraftTrainer._step


def step(self, batches, shares):
    if self.ranks.rank == 1 and self.step == 2:
        {what}
    plain(self, batches, shares)


DraftTrainer._step = step


def main(args):
    root = Path({root!r})
    target = Target.read(root / "fingerprint.json")
    states = StatesIndex(root / "states", root / "store")
    settings = {{**SETTINGS, "training": {{**SETTINGS["training"], "packs_per_step": 2}}}}
    work = Path({work!r})
    train(target, load_samples(root / "dataset"), states, load_map(root / "map", 320), settings, {{**RUNTIME, "ranks": 2}}, work, work)


if __name__ == "__main__":
    cli.run(main, cli.parser(""))
"""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"training rank 1 of 2 \(process \d+\) was killed by signal 9 \(SIGKILL; the kernel"),
        pytest.param("raise AerieError('sample 12 is bad')", r"^ranks failed: sample 12 is bad$", marks=pytest.mark.long),
        pytest.param(  # as where the disk is full: what it died of cannot be noted
            "import shutil; shutil.rmtree(self.checkpoints.folder.parent); raise AerieError('no room: make some')",
            r"no room: make some",
            marks=pytest.mark.long,
        ),
        pytest.param("raise KeyError()", r"training rank 1 of 2: KeyError: \(no message; KeyError\(\)\)", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_ends_the_job_with_the_cause(problem, tmp_path: Path, what, expected):
    (tmp_path / "ranks.py").write_text(RANKS.format(what=what, root=str(problem.root), work=str(tmp_path)))
    started = time.monotonic()
    command = [sys.executable, str(tmp_path / "ranks.py"), "--log", str(tmp_path / "log")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert time.monotonic() - started < 90  # half of it to start
    assert done.returncode == 1
    assert re.search(expected, done.stderr, re.MULTILINE), done.stderr


def test_a_rank_that_is_told_to_end_is_named(problem, tmp_path: Path):
    """By somebody else: torch ends the others with the same signal, and they say that a connection is gone."""
    (tmp_path / "ranks.py").write_text(
        RANKS.format(what="os.kill(os.getpid(), signal.SIGTERM); signal.pause()", root=str(problem.root), work=str(tmp_path))
    )
    command = [sys.executable, str(tmp_path / "ranks.py"), "--log", str(tmp_path / "log")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert re.search(r"training rank 1 of 2 \(process \d+\) was killed by signal 15", done.stderr), done.stderr


def descendants(parent: int) -> list[int]:
    """Living processes that this one started, and those that they did."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found += [int(stat.parent.name), *descendants(int(stat.parent.name))]
    return found


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_that_are_only_starting_do_not_outlive_their_parent(problem, tmp_path: Path, ending):
    (tmp_path / "ranks.py").write_text(RANKS.format(what="pass", root=str(problem.root), work=str(tmp_path)))
    command = [sys.executable, str(tmp_path / "ranks.py"), "--log", str(tmp_path / "log")]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    ranks: list[int] = []
    while len(ranks) < 2:
        assert process.poll() is None
        time.sleep(0.02)
        [trainer, *others] = descendants(process.pid) or [0]
        ranks = [pid for pid in others if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(trainer, ending)
    process.wait(60)
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < end, "a rank lives on"
        time.sleep(0.1)
    assert not list(tmp_path.glob("checkpoints/*.pt")) and not (tmp_path / "metrics.jsonl").exists()
