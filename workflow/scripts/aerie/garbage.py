"""What in the store no registered configuration references, and how it is removed: `snakemake gc`.

References are what the recipes of registered configurations used last, and what the present configuration's results
name. Nothing younger than a day goes, nor what a living process holds a lock on. Of a shard of hidden states that is
mostly unreferenced, the referenced samples are packed into a new one.
"""

import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .configuration import FOLDERS, Plan
from .errors import AerieError
from .files import is_locked
from .hidden_states import Capture, DamagedShard, HiddenStateStore, Shard, StoredSample, read_shard
from .progress import duration
from .samples import sample_lengths
from .store import RecipeName, Root, Use, folder_bytes, is_at_work, object_folders, root_folder, roots, size_text, uses_of

DAY = 86_400.0
_SHARD_BYTES = 256 * 2**20
_SHOWN = 50


@dataclass
class References:
    """paths: objects and answers, relative to the store. samples: by capture key; None where all of them are to be kept."""

    paths: set[str] = field(default_factory=set)
    samples: dict[str, set[str] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Garbage:
    """An unreferenced folder or file. seconds: since it was last written or used; young: too young to be deleted."""

    path: Path
    bytes: int
    seconds: float

    @property
    def young(self) -> bool:
        return self.seconds < DAY


@dataclass(frozen=True)
class Remainder:
    """A shard that is mostly unreferenced: `kept` are the positions of the samples that are not."""

    shard: Shard
    kept: list[int]
    bytes: int  # of those that go
    seconds: float

    @property
    def young(self) -> bool:
        return self.seconds < DAY


@dataclass
class Findings:
    roots: list[Root]
    garbage: list[Garbage]
    remainders: list[Remainder]
    damaged: list[str]


def references(store: Path, plan: Plan, found: Sequence[Root], results: Path = Path("results")) -> References:
    """What registered configurations and the present one use."""
    present = uses_of(root_folder(store))
    uses = [use for root in found for use in root.used().values()]
    uses += [present[name] for name in plan.recipe_names() if name in present]
    uses += [use for step in plan.recipes for use in _use_of_result(step, results)]
    made = References()
    for use in uses:
        made.paths |= {*use.paths, *use.captures.values()}
        for capture, dataset in use.captures.items():
            known = made.samples.setdefault(capture, set())
            try:
                keys = set(sample_lengths(store / dataset / "output")["sample_key"])
            except AerieError:  # the dataset is gone from the store, so nobody knows which samples are meant
                made.samples[capture] = None
            else:
                made.samples[capture] = None if known is None else known | keys
    return made


def _use_of_result(step: tuple[str, str], results: Path) -> Iterator[Use]:
    stage, name = step
    path = results / FOLDERS.get(stage, "none") / name / "manifest.json"
    if path.exists():
        manifest = json.loads(path.read_text())
        if stage != "extract_hidden_states":
            yield Use((f"{stage}/{manifest['key']}",))
            return
        dataset = results / FOLDERS["prepare_dataset"] / Path(name).parent / "manifest.json"
        if dataset.exists():
            yield Use(captures={manifest["capture_key"]: f"prepare_dataset/{json.loads(dataset.read_text())['key']}"})


def find(store: Path, plan: Plan) -> Findings:
    """All that is unreferenced."""
    known = roots(store)
    kept = references(store, plan, known)
    now = time.time()
    garbage = [*_objects(store, kept, now), *_answers(store, kept, now)]
    findings = Findings(known, garbage, [], [])
    for folder in sorted((store / "hidden_states").glob("*/")):
        wanted = kept.samples.get(folder.name, set())
        if wanted is not None:
            _shards(folder, wanted, now, findings)
        if folder.name not in kept.samples:
            garbage += [Garbage(path, path.stat().st_size, now - path.stat().st_mtime) for path in sorted(_notes(folder))]
    for path in sorted((store / "damaged").rglob("*")):
        if path.is_file():
            garbage.append(Garbage(path, path.stat().st_size, now - path.stat().st_mtime))
    return findings


def _objects(store: Path, kept: References, now: float) -> Iterator[Garbage]:
    for folder in object_folders(store):
        name = folder.name.removesuffix(".partial")
        if f"{folder.parent.name}/{name}" in kept.paths or is_locked(folder.with_name(f"{name}.lock")):
            continue
        manifest = folder / "manifest.json"
        with suppress(FileNotFoundError):  # another process has just finished or removed it
            touched = manifest.stat().st_mtime if manifest.exists() else _newest(folder)
            yield Garbage(folder, folder_bytes(folder), DAY if folder.suffix == ".deleted" else now - touched)


def _answers(store: Path, kept: References, now: float) -> Iterator[Garbage]:
    for folder in sorted((store / "answers").glob("*/")):
        if f"answers/{folder.name}" not in kept.paths and not is_locked(folder / "lock"):
            yield Garbage(folder, folder_bytes(folder), now - _newest(folder))


def _newest(folder: Path) -> float:
    return max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])


def _notes(folder: Path) -> Iterator[Path]:
    """What lies beside a capture's shards: the logs of attempts, and why samples failed."""
    for name in ("attempts", "failed"):
        yield from (folder / name).glob("*")


def _shards(folder: Path, wanted: set[str], now: float, findings: Findings) -> None:
    """Sorts the shards of a capture: nothing referenced, little referenced, or kept."""
    seen: set[str] = set()  # a sample that two shards hold is needed once
    for path in sorted(folder.glob("*.safetensors")):
        try:
            shard = read_shard(path)
            stat = path.stat()
        except (DamagedShard, FileNotFoundError) as error:
            findings.damaged.append(str(error))
            continue
        positions = [i for i, key in enumerate(shard.keys) if key in wanted and key not in seen]
        seen |= {shard.keys[i] for i in positions}
        tokens = sum(int(shard.offsets[i + 1] - shard.offsets[i]) for i in positions)
        if not positions:
            findings.garbage.append(Garbage(path, stat.st_size, now - stat.st_mtime))
        elif 2 * tokens < shard.tokens:
            lost = round(stat.st_size * (1 - tokens / shard.tokens))
            findings.remainders.append(Remainder(shard, positions, lost, now - stat.st_mtime))


def delete(store: Path, findings: Findings, results: Path = Path("results")) -> int:
    """Removes what was found and is a day old or older, and this folder's old recipes; returns the bytes freed.

    Not the shards of a capture that a job has taken up since they were listed.
    """
    before, freed = _captures(findings.roots), 0
    taken_up = {capture for capture, _ in _captures(roots(store)) - before}
    for one in findings.garbage:
        if not one.young and one.path.parent.name not in taken_up and _remove(one.path):
            freed += one.bytes
    by_capture: dict[str, list[Remainder]] = {}
    for remainder in findings.remainders:
        if not remainder.young and remainder.shard.capture_key not in taken_up:
            by_capture.setdefault(remainder.shard.capture_key, []).append(remainder)
    for key, remainders in by_capture.items():
        compact(HiddenStateStore(store, key), remainders)
        freed += sum(remainder.bytes for remainder in remainders)
    for root in findings.roots:
        _forget_uses(root)
        if root.folder.name == root_folder(store).name:
            _forget_recipes(root, store, results)
    return freed


def _captures(found: Sequence[Root]) -> set[tuple[str, str]]:
    """(capture key, dataset) of all that is used."""
    return {pair for root in found for use in root.used().values() for pair in use.captures.items()}


def _remove(path: Path) -> bool:
    """Removes a file or an object; not one that a job has taken up since it was listed."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return True
    doomed = path if path.suffix == ".deleted" else path.with_name(f"{path.name}.deleted")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return False
    manifest = doomed / "manifest.json"
    if manifest.exists() and time.time() - manifest.stat().st_mtime < DAY and path != doomed:
        doomed.rename(path)
        return False
    shutil.rmtree(doomed)
    return True


def compact(store: HiddenStateStore, remainders: Sequence[Remainder]) -> list[Path]:
    """Packs what is referenced into new shards, of samples with the same capture and versions, then removes the old ones."""
    from safetensors import safe_open

    groups: dict[str, list[Remainder]] = {}
    for remainder in remainders:
        with safe_open(remainder.shard.path, framework="pt") as file:
            groups.setdefault(file.metadata()["capture"], []).append(remainder)
    written = []
    for text, group in groups.items():
        header: dict[str, Any] = json.loads(text)
        header.pop("version")
        capture = Capture(**header | {"layer_ids": tuple(header["layer_ids"])})
        packed: list[StoredSample] = []
        seconds, size = 0.0, 0
        for remainder in group:
            samples = _samples(remainder)
            tokens = sum(len(sample.token_ids) for sample in samples)
            packed += samples
            seconds += remainder.shard.seconds * tokens / remainder.shard.tokens
            size += sum(sample.states.nbytes for sample in samples)
            if size >= _SHARD_BYTES or remainder is group[-1]:
                written.append(store.write_shard(capture, packed, seconds))
                packed, seconds, size = [], 0.0, 0
    for remainder in remainders:
        if remainder.shard.path not in written:
            remainder.shard.path.unlink(missing_ok=True)
    return written


def _samples(remainder: Remainder) -> list[StoredSample]:
    from safetensors import safe_open

    shard = remainder.shard
    shard.check()
    found = []
    with safe_open(shard.path, framework="pt") as file:
        for i in remainder.kept:
            rows = slice(int(shard.offsets[i]), int(shard.offsets[i + 1]))
            scales = file.get_slice("scales")[rows] if shard.stored_dtype == "float8" else None
            ids = file.get_slice("token_ids")[rows].numpy()
            found.append(StoredSample(shard.keys[i], ids, file.get_slice("hidden_states")[rows], scales))
    return found


def _forget_uses(root: Root) -> None:
    """Removes notes of uses that no configuration names any more and that are older than a day."""
    for stage, name, digest in set(root.uses) - set(root.used()):
        path = root.folder / "uses" / stage / name / f"{digest}.json"
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= DAY:
                path.unlink()


def _forget_recipes(root: Root, store: Path, results: Path) -> None:
    """Removes recipes that no configuration names any more and that are older than a day; none while a job is at work."""
    if any(is_at_work(store, use) for use in root.uses.values()):
        return
    named = root.named()
    for path in (results / ".recipes").rglob("*.json"):
        if RecipeName.of(path) not in named and time.time() - path.stat().st_mtime >= DAY:
            path.unlink()


@contextmanager
def alone(store: Path) -> Iterator[None]:
    """One deletion at a time; AerieError where another is going on."""
    with open(store / "gc.lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AerieError(f"store {store}: another `snakemake gc` is deleting. Try again when it is done.") from None
        yield


def lines(store: Path, findings: Findings) -> Iterator[str]:
    """What was found, for a person."""
    yield f"store {store}: configurations that use it"
    for root in findings.roots:
        for path, config in root.configurations.items():
            overrides = "".join(f" {name}={value}" for name, value in config["overrides"].items())
            named = f"{config['host']}:{config['folder']} {' '.join(config['files'])}{overrides}"
            yield f"  {named}, last run {config['used']} ({path.relative_to(store)})"
    yield "To let go of what one of them references, delete its file."
    yield "no configuration references:"
    groups: dict[str, list[Garbage]] = {}
    for garbage in findings.garbage:
        groups.setdefault(str(garbage.path.parent.relative_to(store)), []).append(garbage)
    for parent, group in sorted(groups.items()):
        yield f"  {parent}: {len(group):,} of {size_text(sum(one.bytes for one in group))}"
        for one in sorted(group, key=lambda one: -one.bytes)[:_SHOWN]:
            yield f"    {one.path.name}  {size_text(one.bytes)}  {_age(one)}"
        if len(group) > _SHOWN:
            yield f"    and {len(group) - _SHOWN:,} smaller ones"
    for remainder in findings.remainders:
        path = remainder.shard.path.relative_to(store)
        part = f"{len(remainder.shard.keys) - len(remainder.kept):,} of {len(remainder.shard.keys):,} samples"
        yield f"  {path}: {part}  {size_text(remainder.bytes)}  {_age(remainder)}; the others are packed anew"
    for text in findings.damaged:
        yield f"  damaged, `snakemake verify` sets it aside: {text}"
    everything: list[Garbage | Remainder] = [*findings.garbage, *findings.remainders]
    if not everything:
        yield "  nothing"
    old = sum(one.bytes for one in everything if not one.young)
    young = sum(one.bytes for one in everything if one.young)
    yield f"{size_text(old)} may go, {size_text(young)} are younger than a day and stay"


def _age(one: Garbage | Remainder) -> str:
    return f"{duration(max(0.0, one.seconds))} old{', stays: younger than a day' if one.young else ''}"
