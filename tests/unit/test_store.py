"""The store as a whole: its layout's version, its roots, what gc finds and removes, what verify finds and sets aside."""

import fcntl
import json
import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aerie import garbage, verification
from aerie import hidden_states as hs
from aerie.errors import AerieError
from aerie.files import replacing, write_atomically
from aerie.keys import sample_key
from aerie.samples import Sample, write_samples
from aerie.stage import Recipe, StageResult, run_stage
from aerie.store import (
    LAYOUT,
    RecipeName,
    Use,
    check_layout,
    keep_open_to_group,
    open_store,
    record_use,
    register,
    root_folder,
    roots,
)

STORE = Path("results/.store")
NO_PLAN: Any = SimpleNamespace(recipes={}, recipe_names=lambda: [])
LAYERS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test has a working directory of its own, as a workflow has."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def make(stage, name, number, inputs=None, store=STORE, private=False):
    """Runs a stage that writes a number, privately as safetensors does; returns its recipe's name and its object's folder."""
    digest = f"{number:016x}"
    path = Path(f"results/.recipes/{stage}/{name}/{digest}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"stage": stage, "version": 1, "settings": {"number": number}, "runtime": {}}))

    def compute(work, out):
        (out / "number.txt").write_text(str(number))
        if private:
            (out / "number.txt").chmod(0o600)
        return StageResult()

    manifest = run_stage(Recipe.read(path), 1, inputs or {}, Path("results/out"), store, compute)
    return RecipeName(stage, name, digest), store / stage / manifest["key"]


def age(*paths, seconds=2 * garbage.DAY):
    """Makes files and everything below them look old."""
    then = time.time() - seconds
    for path in paths:
        for one in [path, *path.rglob("*")]:
            os.utime(one, (then, then))


def found(store=STORE, plan=NO_PLAN):
    return garbage.find(store, plan)


def test_two_may_write_one_file_at_a_time_and_a_full_disk_leaves_nothing(folder):
    """Two containers' processes may have the same number, as two threads have."""

    def write(text):
        for _ in range(200):
            write_atomically(folder / "layout.json", text)

    texts = ["a" * 5000, "b" * 9000]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, texts))
    assert [path.name for path in folder.iterdir()] == ["layout.json"] and (folder / "layout.json").read_text() in texts
    with pytest.raises(OSError, match="No space"), replacing(folder / "layout.json") as temporary:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")
    assert [path.name for path in folder.iterdir()] == ["layout.json"] and (folder / "layout.json").read_text() in texts


# --- layout -----------------------------------------------------------------------------------------------------------


def test_a_new_store_has_the_layout_of_this_version():
    make("square", "a", 1)
    assert json.loads((STORE / "layout.json").read_text()) == {"layout": LAYOUT}
    check_layout(STORE)


@pytest.mark.parametrize(("version", "remedy"), [(LAYOUT - 1, "new folder"), (LAYOUT + 1, "Update Aerie")])
def test_another_layout_is_refused_and_left_as_it_is(version, remedy):
    STORE.mkdir(parents=True)
    (STORE / "layout.json").write_text(json.dumps({"layout": version}))
    with pytest.raises(AerieError, match=f"version {version}, this Aerie reads and writes version {LAYOUT}. .*{remedy}"):
        make("square", "a", 1)
    assert [path.name for path in STORE.iterdir()] == ["layout.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"lay'])
def test_an_unreadable_layout_is_refused(text):
    STORE.mkdir(parents=True)
    (STORE / "layout.json").write_text(text)
    with pytest.raises(AerieError, match=r"layout\.json: cannot be read"):
        open_store(STORE)


def test_a_folder_of_something_else_is_no_store(folder):
    (folder / "photos").mkdir()
    with pytest.raises(AerieError, match="photos"):
        open_store(folder)
    assert not (folder / "layout.json").exists()


def test_a_store_from_before_layouts_had_versions_is_taken_up():
    (STORE / "hidden_states").mkdir(parents=True)
    open_store(STORE)
    assert (STORE / "layout.json").exists()


@pytest.mark.parametrize(("mode", "shared"), [(0o2775, True), (0o755, False)])
def test_what_is_made_in_a_store_of_a_group_is_the_groups(mode, shared):
    STORE.mkdir(parents=True)
    STORE.chmod(mode)
    umask = os.umask(0o027)
    try:
        keep_open_to_group(STORE)
        make("square", "a", 1, private=True)
        make_states("float32")
    finally:
        os.umask(umask)
    paths = list(STORE.rglob("*"))
    assert {path.suffix for path in paths} >= {".txt", ".json", ".safetensors"}
    assert {bool(path.stat().st_mode & stat.S_IWGRP) for path in paths} == {shared}
    assert all(path.stat().st_mode & stat.S_IRGRP for path in paths)


# --- roots and garbage ------------------------------------------------------------------------------------------------


def test_what_no_registered_configuration_references_is_garbage():
    old, old_object = make("square", "a", 1)
    register(STORE, ["config.yaml"], {}, [old])
    new, new_object = make("square", "a", 2)
    assert [one.path for one in found().garbage] == [new_object]
    register(STORE, ["config.yaml"], {"gc": "delete"}, [new])  # the same configuration, edited
    assert [one.path for one in found().garbage] == [old_object]
    register(STORE, ["config.yaml"], {"max_samples": 10}, [old])  # another one
    assert not found().garbage


def test_an_input_that_changed_lets_the_old_object_go():
    name, first = make("square", "a", 1, {"data": "d1"})
    register(STORE, ["config.yaml"], {}, [name])
    make("square", "a", 1, {"data": "d2"})
    assert [one.path for one in found().garbage] == [first]


def test_the_present_configuration_counts_before_it_is_registered():
    name, _ = make("square", "a", 1)
    assert not found(plan=SimpleNamespace(recipes={}, recipe_names=lambda: [name])).garbage


def test_nothing_younger_than_a_day_is_deleted():
    _, old = make("square", "a", 1)
    _, young = make("square", "b", 2)
    _, used = make("square", "c", 3)
    age(old, used)
    make("square", "c", 3)  # restored: as good as new
    findings = found()
    assert {one.path: one.young for one in findings.garbage} == {old: False, young: True, used: True}
    text = "\n".join(garbage.lines(STORE, findings))
    assert old.name in text and "younger than a day" in text
    assert garbage.delete(STORE, findings) == sum(one.bytes for one in findings.garbage if one.path == old) > 0
    assert not old.exists() and young.exists() and used.exists()


def test_a_clock_set_back_makes_nothing_old():
    _, future = make("square", "a", 1)
    age(future, seconds=-7200)
    assert all(one.young for one in found().garbage)


def test_what_a_job_takes_up_after_the_listing_stays():
    _, old = make("square", "a", 1)
    age(old)
    findings = found()
    make("square", "a", 1)
    assert garbage.delete(STORE, findings) == 0 and (old / "manifest.json").exists()


def test_unfinished_work_stays_while_its_lock_is_held_or_it_is_referenced():
    open_store(STORE)
    key = "0" * 64
    partial = STORE / "square" / f"{key}.partial"
    partial.mkdir(parents=True)
    age(partial)
    with open(STORE / "square" / f"{key}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not found().garbage
    assert [one.path for one in found().garbage] == [partial]
    name = RecipeName("square", "a", "1" * 16)
    register(STORE, ["config.yaml"], {}, [name])
    record_use(STORE, Path("results/.recipes/square/a") / f"{name.digest}.json", Use((f"square/{key}",)))
    assert not found().garbage


def test_what_a_job_at_work_uses_stays_when_its_configuration_is_edited_meanwhile():
    data, data_object = make("data", "d", 1)
    training, training_object = make("square", "a", 2)
    register(STORE, ["config.yaml"], {}, [RecipeName("square", "a", "3" * 16)])
    age(data_object, training_object)
    assert len(found().garbage) == 2
    with open(training_object.with_name(f"{training_object.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not found().garbage
    assert {data, training} == set(roots(STORE)[0].uses)


def test_recipes_that_no_configuration_names_go_when_they_are_a_day_old():
    made = {number: make("square", "a", number)[0] for number in (1, 2, 3)}
    recipes = {number: Path("results/.recipes/square/a") / f"{name.digest}.json" for number, name in made.items()}
    register(STORE, ["config.yaml"], {}, [made[1]])
    age(recipes[1], recipes[2])
    with open(STORE / "square" / "x.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        record_use(STORE, Path("results/.recipes/square/b/0.json"), Use(("square/x",)))
        garbage.delete(STORE, found())
        assert all(recipe.exists() for recipe in recipes.values())
    garbage.delete(STORE, found())
    assert [number for number, recipe in recipes.items() if recipe.exists()] == [1, 3]


def test_the_roots_of_a_store_move_with_the_folder_around_it(folder, monkeypatch):
    name, _ = make("square", "a", 1)
    register(STORE, ["config.yaml"], {}, [name])
    folder.rename(folder.with_name("there"))
    monkeypatch.chdir(folder.with_name("there"))
    assert list(roots(STORE)[0].uses) == [name] and root_folder(STORE) == STORE.resolve() / "roots" / roots(STORE)[0].folder.name


def test_a_shared_store_tells_working_directories_apart(folder, tmp_path, monkeypatch):
    store = tmp_path / "shared"
    name, first = make("square", "a", 1, store=store)
    register(store, ["config.yaml"], {}, [name])
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    other, second = make("square", "a", 2, store=store)
    register(store, ["config.yaml"], {}, [other])
    assert len(roots(store)) == 2 and not found(store).garbage
    shutil.rmtree(next(root.folder for root in roots(store) if name in root.uses))  # let go of
    assert [one.path for one in found(store).garbage] == [first] and second.exists()


def test_a_root_that_cannot_be_read_stops_gc():
    name, _ = make("square", "a", 1)
    register(STORE, ["config.yaml"], {}, [name]).write_text("{")
    with pytest.raises(AerieError, match="cannot be read"):
        found()


# --- hidden states ----------------------------------------------------------------------------------------------------


def make_states(dtype, lengths=(5, 9, 30, 7), seed=0):
    """A shard of samples of these lengths, with random states; returns store, samples and the shard's path."""
    key = hs.capture_key("target", LAYERS, dtype, "float32", "vllm")
    capture = hs.Capture(key, LAYERS, dtype, "float32", "vllm", {"vllm": "0"}, {}, {"host": "h"})
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        ids = torch.randint(0, 300, (length,), generator=generator).numpy().astype(np.int32)
        states, scales = hs.encode(torch.randn(length, len(LAYERS), 8, generator=generator), dtype)
        samples.append(hs.StoredSample(sample_key(ids), ids, states, scales))
    store = hs.HiddenStateStore(STORE, key)
    return store, samples, store.write_shard(capture, samples, 10.0)


def use_samples(store, samples):
    """A registered configuration whose dataset has these samples."""
    out = STORE / "prepare_dataset" / "d" / "output"
    out.mkdir(parents=True)
    write_samples([Sample(one.token_ids.tolist(), [1] * len(one.token_ids), "x") for one in samples], out / "samples")
    (out.parent / "manifest.json").write_text("{}")
    name = RecipeName("extract_hidden_states", "t/d/c", "1" * 16)
    recipe = Path("results/.recipes/extract_hidden_states/t/d/c") / f"{name.digest}.json"
    record_use(STORE, recipe, Use(captures={store.key: "prepare_dataset/d"}))
    register(STORE, ["config.yaml"], {}, [name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_a_shard_mostly_unreferenced_is_packed_anew(dtype):
    store, samples, path = make_states(dtype)
    use_samples(store, [samples[1], samples[3]])  # 16 of 51 tokens
    index_folder = Path("results/index")
    index_folder.mkdir()
    hs.write_table(store.known(), index_folder / "index.parquet")
    manifest = {"capture_key": store.key, "layer_ids": LAYERS, "digest": "d", "settings": {"stored_dtype": dtype}}
    (index_folder / "manifest.json").write_text(json.dumps(manifest))
    index = hs.StatesIndex(index_folder, STORE)
    findings = found()
    assert [(one.shard.path, one.kept, one.young) for one in findings.remainders] == [(path, [1, 3], True)]
    assert garbage.delete(STORE, findings) == 0 and path.exists()
    age(path)
    size = path.stat().st_size
    assert garbage.delete(STORE, found()) == pytest.approx(size * 35 / 51, abs=1)
    assert not path.exists()
    [shard] = store.shards()
    assert shard.keys == [samples[1].key, samples[3].key] and shard.seconds == pytest.approx(10 * 16 / 51)
    for sample in (samples[1], samples[3]):  # an index from before finds the states where they are now
        assert torch.equal(index.states(sample.key), hs.decode(sample.states, sample.scales))
    assert not found().remainders and not found().garbage


def test_shards_go_whole_or_stay():
    store, samples, kept = make_states("float32")
    _, _, unused = make_states("float32", seed=1)
    use_samples(store, samples[1:])  # 46 of 51 tokens
    age(kept, unused)
    findings = found()
    assert [one.path for one in findings.garbage] == [unused] and not findings.remainders
    shutil.rmtree(STORE / "prepare_dataset")  # nobody knows the samples any more: all are kept
    assert not found().garbage


def test_notes_of_failed_samples_go_with_their_capture():
    store, samples, _ = make_states("float32")
    use_samples(store, samples)
    unused = hs.HiddenStateStore(STORE, "f" * 64)
    for one in (store, unused):
        one.note_failed({"0" * 32: "its states hold NaN"})
    [garbage] = found().garbage
    assert garbage.path == unused.folder / "failed" / f"{'0' * 32}.txt"


def test_states_that_a_job_takes_up_after_the_listing_stay():
    store, samples, used = make_states("float32")
    _, others, also = make_states("float32", seed=1)
    age(used, also)
    findings = found()
    assert {one.path for one in findings.garbage} == {used, also}
    use_samples(store, [*samples, others[0]])
    assert garbage.delete(STORE, findings) == 0 and used.exists() and also.exists()
    age(used, also)
    garbage.delete(STORE, found())  # the next one packs anew what is left
    assert len(store.known()) == 5 and used.exists() and not also.exists()


# --- verify -----------------------------------------------------------------------------------------------------------


def test_no_damage_is_found_where_there_is_none():
    make("square", "a", 1)
    make_states("float8")
    assert verification.verify(STORE) == (2, [])


def flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def test_damage_is_found_set_aside_and_made_again():
    _, good = make("square", "a", 1)
    _, bad = make("square", "b", 2)
    store, _, shard = make_states("bfloat16")
    flip(bad / "output/number.txt", 0)
    flip(shard, -1)
    count, damages = verification.verify(STORE)
    assert count == 3 and {damage.path for damage in damages} == {bad.relative_to(STORE), shard.relative_to(STORE)}
    assert all("another sha256" in damage.problem for damage in damages)
    aside = verification.set_aside(STORE, damages)
    assert not bad.exists() and not shard.exists() and good.exists() and (aside / shard.relative_to(STORE)).exists()
    assert store.known().empty
    make("square", "b", 2)
    assert verification.verify(STORE) == (2, [])


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files"), MemoryError("none left")])
@pytest.mark.parametrize("module", [hs, verification])
def test_what_could_not_be_looked_at_is_not_set_aside(monkeypatch, module, error):
    make("square", "a", 1)
    make_states("float32")

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(module, "open" if module is hs else "file_sha256", fail, raising=False)
    with pytest.raises(AerieError, match="nothing was set aside.*\n?.*" + str(error.args[-1])):
        verification.verify(STORE)


def test_what_goes_while_it_is_verified_is_no_damage(monkeypatch):
    _, _, path = make_states("float32")
    checks = list(verification._checks(STORE))
    path.unlink()
    monkeypatch.setattr(verification, "_checks", lambda store: checks)
    assert verification.verify(STORE) == (1, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_values_that_are_not_finite_are_damage(dtype):
    store, samples, path = make_states(dtype)
    path.unlink()
    samples[2].states.view(torch.uint8).view(-1)[-4:] = torch.tensor([0, 0, 0x80, 0x7F], dtype=torch.uint8)  # infinity; NaN in float8
    capture = hs.Capture(store.key, LAYERS, dtype, "float32", "vllm", {}, {})
    store.write_shard(capture, samples, 1.0)
    [damage] = verification.verify(STORE)[1]
    assert "hold infinities or NaN" in damage.problem


def test_the_next_run_looks_for_states_that_were_set_aside():
    store, _, path = make_states("float32")
    results = Path("results/hidden_states/t/d/c")
    results.mkdir(parents=True)
    (results / "manifest.json").write_text(json.dumps({"capture_key": store.key}))
    recipe = Path("results/.recipes/extract_hidden_states/t/d/c/0123.json")
    recipe.parent.mkdir(parents=True)
    recipe.write_text("{}")
    plan: Any = SimpleNamespace(recipes={("extract_hidden_states", "t/d/c"): "", ("train_draft", "a"): ""})
    damage = verification.Damage(path.relative_to(STORE), "x")
    assert verification.forget_recipes([damage], plan) == ["t/d/c"] and not recipe.exists()
