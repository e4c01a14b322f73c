"""Reading the whole store again: `snakemake verify`. What is damaged is set aside and made anew when it is next needed."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from .configuration import FOLDERS, Plan
from .errors import AerieError, describe
from .files import is_damage, sync_folder
from .hidden_states import REMEDY, DamagedShard, read_shard
from .keys import file_sha256
from .progress import Progress
from .stage import read_manifest
from .store import folder_bytes, object_folders

_THREADS = 4  # hashing: about 1 GB/s each on a current core


class Damage(NamedTuple):
    """path: the object's folder or the file, relative to the store; problem: what is wrong with it."""

    path: Path
    problem: str


def verify(store: Path) -> tuple[int, list[Damage]]:
    """Reads every object, shard and answer. Returns how many there are, and the damaged ones.

    AerieError for one that could not be looked at, which says nothing of the file.
    """
    checks = list(_checks(store))
    sizes = [_bytes(path) for path, _ in checks]
    progress = Progress("verify", sum(sizes), "bytes")

    def check(item: tuple[Path, Callable[[Path], None]]) -> str:
        path, examine = item
        try:
            examine(path)
        except Exception as error:  # whatever cannot be read is damaged
            cause = error.__cause__ or error
            if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and not is_damage(cause)):
                raise AerieError(f"{path}: could not be read, and nothing was set aside. Mend that: {describe(cause)}") from error
            return describe(error).replace(f" {REMEDY}", "") if path.exists() else ""  # gone meanwhile: finished, or collected as garbage
        return ""

    damages = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for (path, _), size, problem in zip(checks, sizes, pool.map(check, checks), strict=True):
            progress.update(size)
            if problem:
                damages.append(Damage(path.relative_to(store), problem))
    return len(checks), damages


def _bytes(path: Path) -> int:
    """Of a file, or of all below a folder; 0 where it has gone meanwhile."""
    try:
        return folder_bytes(path) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return 0


def _checks(store: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Everything with its check. Unfinished objects are not looked at: their stage does, when it goes on."""
    for folder in object_folders(store):
        if folder.suffix not in (".partial", ".deleted"):
            yield folder, check_object
    for path in sorted((store / "hidden_states").glob("*/*.safetensors")):
        yield path, check_shard
    for path in sorted((store / "answers").glob("*/*.parquet")):
        yield path, lambda path: pq.read_table(path).validate(full=True)
    for path in sorted((store / "baselines").glob("*.json")):
        yield path, lambda path: json.loads(path.read_text())


def check_object(folder: Path) -> None:
    """AerieError where a finished object is not as its manifest says."""
    manifest = read_manifest(folder)
    if manifest["key"] != folder.name:
        raise AerieError(f"{folder}: its manifest has the key {manifest['key']}")
    for name, entry in manifest["files"].items():
        path = folder / "output" / name
        if not path.is_file():
            raise AerieError(f"{path}: missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise AerieError(f"{path}: {size} bytes instead of {entry['bytes']}")
        if file_sha256(path) != entry["sha256"]:
            raise AerieError(f"{path}: its bytes have another sha256 than its manifest says")


def check_shard(path: Path) -> None:
    """DamagedShard where a shard cannot be trusted."""
    shard = read_shard(path)
    if shard.capture_key != path.parent.name:
        raise DamagedShard(f"{path}: it belongs to capture {shard.capture_key}")
    shard.check()


def set_aside(store: Path, damages: list[Damage]) -> Path:
    """Moves what is damaged to a folder of its own below <store>/damaged/, which is returned."""
    aside = store / "damaged" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for damage in damages:
        target = aside / damage.path
        target.parent.mkdir(parents=True, exist_ok=True)
        (store / damage.path).rename(target)
        sync_folder((store / damage.path).parent)
    return aside


def forget_recipes(damages: list[Damage], plan: Plan, results: Path = Path("results")) -> list[str]:
    """Removes the recipes of the extractions whose shards are damaged, so that the next run looks for missing states.

    Returns the names of those extractions.
    """
    captures = {damage.path.parts[1] for damage in damages if damage.path.parts[0] == "hidden_states"}
    found = []
    for stage, name in plan.recipes:
        manifest = results / FOLDERS.get(stage, "none") / name / "manifest.json"
        if stage == "extract_hidden_states" and manifest.exists() and read_manifest(manifest)["capture_key"] in captures:
            found.append(name)
            for recipe in (results / ".recipes" / stage / name).glob("*.json"):
                recipe.unlink()
    return found
