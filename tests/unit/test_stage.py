"""The object store: what is computed once, what survives a kill, what a reader never sees."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from aerie.errors import AerieError
from aerie.keys import canonical_json, digest_of, sample_key
from aerie.stage import Recipe, StageResult, read_manifest, run_stage
from aerie.store import open_store

RECIPE = Recipe("square", 1, {"number": 12}, {"workers": 1})


def square(calls):
    def compute(work, out):
        calls.append(1)
        (out / "result.txt").write_text("144")
        (out / "more").mkdir()
        (out / "more" / "list.txt").write_text("1 2 3")
        return StageResult(figures={"root": 12})

    return compute


def test_keys_are_known_values():
    assert canonical_json({"b": 1, "a": [True, None, "ü"]}) == '{"a":[true,null,"ü"],"b":1}'
    assert digest_of({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()
    assert sample_key([1, 258]) == hashlib.sha256(bytes([1, 0, 0, 0, 2, 1, 0, 0])).hexdigest()[:32]


def test_computes_once_and_restores(tmp_path):
    calls: list[int] = []
    first = run_stage(RECIPE, 1, {"input": "d1"}, tmp_path / "a", tmp_path / "store", square(calls))
    again = run_stage(RECIPE, 1, {"input": "d1"}, tmp_path / "b", tmp_path / "store", square(calls))
    assert calls == [1]
    assert first == again == read_manifest(tmp_path / "b")
    assert (tmp_path / "b" / "result.txt").read_text() == "144"
    assert (tmp_path / "b" / "more" / "list.txt").read_text() == "1 2 3"
    assert first["files"]["result.txt"] == {"sha256": hashlib.sha256(b"144").hexdigest(), "bytes": 3}
    assert {"stage", "key", "settings", "inputs", "files", "versions", "seconds", "digest", "figures"} <= set(first)
    # the copy is no hard link: Snakemake touches what it declares
    assert (tmp_path / "b" / "result.txt").stat().st_nlink == 1


@pytest.mark.parametrize(
    ("recipe", "inputs"),
    [(RECIPE, {"input": "d2"}), (Recipe("square", 1, {"number": 13}, {}), {"input": "d1"})],
)
def test_another_input_or_setting_is_another_key(tmp_path, recipe, inputs):
    calls: list[int] = []
    run_stage(RECIPE, 1, {"input": "d1"}, tmp_path / "a", tmp_path / "store", square(calls))
    run_stage(recipe, 1, inputs, tmp_path / "a", tmp_path / "store", square(calls))
    assert len(calls) == 2


def test_runtime_is_in_no_key(tmp_path):
    calls: list[int] = []
    run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", square(calls))
    run_stage(Recipe("square", 1, {"number": 12}, {"workers": 8}), 1, {}, tmp_path / "a", tmp_path / "store", square(calls))
    assert calls == [1]


def test_a_failed_attempt_keeps_its_work_and_its_log(tmp_path):
    log = tmp_path / "declared.log"
    log.write_text("what happened")

    def fail(work, out):
        (work / "batch-0").write_text("done")
        (out / "half").write_text("x")
        raise ValueError("disk on fire")

    with pytest.raises(ValueError, match="disk on fire"):
        run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", fail, log)
    log.unlink()  # as Snakemake does before the next attempt
    [partial] = (tmp_path / "store" / "square").glob("*.partial")
    assert [path.read_text() for path in (partial / "attempts").iterdir()] == ["what happened"]

    def go_on(work, out):
        assert (work / "batch-0").read_text() == "done"
        assert not (out / "half").exists()
        (out / "result.txt").write_text("144")
        return StageResult()

    assert set(run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", go_on)["files"]) == {"result.txt"}


def test_the_time_of_earlier_attempts_counts(tmp_path):
    """Two attempts, of which the first ran from noon on for 1,000 seconds; its log lies on another file system than the store."""
    open_store(tmp_path / "store")
    attempts = tmp_path / "store/square" / f"{RECIPE.key({})}.partial/attempts"
    attempts.mkdir(parents=True)
    (attempts / "20250101T120000.log").write_text("killed")
    noon = datetime(2025, 1, 1, 12, tzinfo=UTC).timestamp()
    os.utime(attempts / "20250101T120000.log", (noon + 1000,) * 2)
    manifest = run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", square([]))
    assert manifest["started"] == "2025-01-01T12:00:00Z" and 1000 <= manifest["seconds"] < 1010


def test_a_log_that_cannot_be_copied_hides_no_error(tmp_path, monkeypatch):
    log = tmp_path / "declared.log"
    log.write_text("what happened")

    def full(*_):
        raise OSError(28, "No space left on device")

    def fail(work, out):
        raise ValueError("disk on fire")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ValueError, match="disk on fire"):
        run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", fail, log)


def test_a_kill_after_the_manifest_loses_nothing(tmp_path, monkeypatch):
    """The last steps of an attempt (removing its work, renaming it) are all that a later attempt has to do."""
    calls: list[int] = []
    monkeypatch.setattr("aerie.stage.sync_folder", lambda path: 1 / 0 if path.name == "square" else None)
    monkeypatch.setattr(Path, "replace", lambda self, other: 1 / 0 if self.suffix == ".partial" else Path.rename(self, other))
    with pytest.raises(ZeroDivisionError):
        run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", square(calls))
    monkeypatch.undo()
    run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", square(calls))
    assert calls == [1] and (tmp_path / "a" / "result.txt").read_text() == "144"


def test_a_recipe_of_another_version_is_refused(tmp_path):
    with pytest.raises(AerieError, match="version 1 of square, this is version 2"):
        run_stage(RECIPE, 2, {}, tmp_path / "a", tmp_path / "store", square([]))


def test_a_damaged_object_is_named(tmp_path):
    run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", square([]))
    [damaged] = (tmp_path / "store").rglob("result.txt")
    damaged.write_text("1")
    with pytest.raises(AerieError, match=r"result\.txt.*damaged: 1 bytes instead of 3"):
        run_stage(RECIPE, 1, {}, tmp_path / "a", tmp_path / "store", square([]))


COMPUTE = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from aerie.stage import Recipe, StageResult, run_stage

    folder = Path(sys.argv[1])

    def compute(work, out):
        with open(folder / "calls", "a") as file:
            file.write("x")
        time.sleep(float(sys.argv[3]))
        (out / "result.txt").write_text("144")
        return StageResult()

    if __name__ == "__main__":
        run_stage(Recipe("square", 1, {}, {}), 1, {}, folder / sys.argv[2], folder / "store", compute)
    """
)


def start(folder, output, seconds):
    return subprocess.Popen([sys.executable, "-c", COMPUTE, str(folder), output, str(seconds)], start_new_session=True)


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_two_processes_compute_once(tmp_path):
    jobs = [start(tmp_path, "a", 1), start(tmp_path, "b", 1)]
    assert [job.wait(30) for job in jobs] == [0, 0]
    assert (tmp_path / "calls").read_text() == "x"
    assert (tmp_path / "a" / "manifest.json").read_text() == (tmp_path / "b" / "manifest.json").read_text()


def test_after_a_kill_the_next_attempt_takes_over(tmp_path):
    job = start(tmp_path, "a", 60)
    wait_for((tmp_path / "calls").exists)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    assert start(tmp_path, "a", 0).wait(30) == 0
    assert (tmp_path / "a" / "result.txt").read_text() == "144"
    assert not list((tmp_path / "store" / "square").glob("*.partial"))


def test_manifest_errors_say_what_to_do(tmp_path):
    with pytest.raises(AerieError, match="no manifest"):
        read_manifest(tmp_path)
    Path(tmp_path / "manifest.json").write_text("{")
    with pytest.raises(AerieError, match="Delete it"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"stage": "x"}))
    assert read_manifest(tmp_path) == {"stage": "x"}
