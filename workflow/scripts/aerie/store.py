"""The object store as a whole: the version of its layout, who uses it, and the objects in it.

    <store>/layout.json                                       {"layout": 1}
    <store>/<stage>/<key>/                                    a finished object: manifest.json, output/
    <store>/<stage>/<key>.partial/, <key>.lock                one that is being made
    <store>/hidden_states/<capture key>/                      shards
    <store>/answers/<answers key>/                            regenerated answers, a file a batch
    <store>/baselines/, <store>/file_hashes/                  small, always kept
    <store>/damaged/                                          what `snakemake verify` set aside
    <store>/roots/<root>/configurations/<id>.json             a configuration that used the store
    <store>/roots/<root>/uses/<stage>/<name>/<recipe>.json    what a recipe's job last made of or took from the store

A root is a working directory. What a registered configuration's recipes use is referenced; `snakemake gc` may have the rest.
"""

import json
import os
import platform
import shlex
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .errors import AerieError
from .files import is_locked, write_atomically
from .keys import digest_of

LAYOUT = 1  # raised when an older Aerie could misread the store, or this one an older store
NOT_OBJECTS = ("answers", "baselines", "damaged", "file_hashes", "hidden_states", "roots")
STAGES = ("convert_target", "regenerate_responses", "prepare_dataset", "map_vocabulary", "train_draft", "evaluate_draft")


def check_layout(store: Path) -> None:
    """AerieError where the store has another layout than this Aerie's, or is a folder of something else. Writes nothing."""
    path = store / "layout.json"
    try:
        found = json.loads(path.read_text())["layout"]
    except FileNotFoundError:
        # Before the first release there was no such file, and the layout was that of version 1.
        names = {entry.name for entry in store.iterdir()} if store.is_dir() else set()
        foreign = sorted(name for name in names - {*NOT_OBJECTS, *STAGES, "layout.json"} if not name.startswith("."))
        if foreign:
            raise AerieError(
                f"store {store}: a folder that is no store of Aerie's ({foreign[0]} is in it). Set `store` to a new folder."
            ) from None
        return
    except (ValueError, KeyError, TypeError) as error:
        raise AerieError(f'{path}: cannot be read ({error}); expected {{"layout": {LAYOUT}}}. Restore it from a backup.') from error
    if found != LAYOUT:
        older = isinstance(found, int) and found < LAYOUT
        remedy = "Set `store` to a new folder" if older else "Update Aerie, or set `store` to a new folder"
        raise AerieError(f"store {store}: its layout is version {found}, this Aerie reads and writes version {LAYOUT}. {remedy}.")


def open_store(store: Path) -> None:
    """Makes the store, or checks that it is one of this layout."""
    check_layout(store)
    if not (store / "layout.json").exists():
        store.mkdir(parents=True, exist_ok=True)
        write_atomically(store / "layout.json", json.dumps({"layout": LAYOUT}) + "\n")


def keep_open_to_group(store: Path) -> None:
    """Where the store's folder may be written to by its group, so may what this process and its children make from now on."""
    if store.exists() and store.stat().st_mode & stat.S_IWGRP:
        os.umask(os.umask(0o022) & ~stat.S_IRWXG)


class RecipeName(NamedTuple):
    """Which recipe a file results/.recipes/{stage}/{name}/{digest}.json is."""

    stage: str
    name: str
    digest: str

    @classmethod
    def of(cls, path: Path) -> "RecipeName | None":
        """None for a file that lies elsewhere (a command run by hand)."""
        parts = path.parts
        if ".recipes" not in parts[:-3]:
            return None
        stage, *name = parts[parts.index(".recipes") + 1 : -1]
        return cls(stage, "/".join(name), path.stem)


@dataclass(frozen=True)
class Use:
    """What a recipe's job makes of or takes from the store.

    paths: folders relative to the store. captures: {capture key: folder of the dataset's object, relative to the store};
    the capture's states of that dataset's samples are used.
    """

    paths: tuple[str, ...] = ()
    captures: dict[str, str] = field(default_factory=dict)


def is_at_work(store: Path, use: Use) -> bool:
    """Whether a job that has this use is running."""
    locks = [store / f"{path}.lock" for path in use.paths]
    locks += [lock for capture in use.captures for lock in (store / "hidden_states" / capture / ".locks").glob("*")]
    return any(map(is_locked, locks))


class Root(NamedTuple):
    """A working directory that used the store. configurations: as `register` wrote them, by file; uses: by recipe."""

    folder: Path
    configurations: dict[Path, dict[str, Any]]
    uses: dict[RecipeName, Use]

    def named(self) -> set[RecipeName]:
        """The recipes that a registered configuration has."""
        return {RecipeName(*name) for configuration in self.configurations.values() for name in configuration["recipes"]}

    def used(self) -> dict[RecipeName, Use]:
        """The uses that a registered configuration has; all, while a job is at work, which may have been edited away since."""
        store, names = self.folder.parents[1], self.named()
        busy = any(is_at_work(store, use) for name, use in self.uses.items() if name not in names)
        return {name: use for name, use in self.uses.items() if busy or name in names}


def root_folder(store: Path) -> Path:
    """The folder of the present working directory among the store's roots.

    It goes by the path from the store where the store lies inside, so that both can be moved together.
    """
    here, store = Path.cwd(), Path(os.path.realpath(store))
    name = os.path.relpath(here, store) if store.is_relative_to(here) else str(here)
    return store / "roots" / digest_of(name)[:16]


def register(store: Path, files: Sequence[str], overrides: Mapping[str, Any], recipes: Sequence[RecipeName]) -> Path:
    """Notes in the store that a configuration uses it: once for each set of files and overrides (--config), as it is now."""
    open_store(store)
    overrides = {name: value for name, value in overrides.items() if name != "gc"}
    identity = {"folder": str(Path.cwd()), "host": platform.node(), "files": list(files), "overrides": overrides}
    path = root_folder(store) / "configurations" / f"{digest_of(identity)[:16]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = identity | {"used": _now(), "recipes": sorted(recipes)}
    write_atomically(path, json.dumps(found, indent=1) + "\n")
    return path


def record_use(store: Path, recipe: Path, use: Use) -> None:
    """Notes what a recipe's job uses, before it does; what the same recipe used before is no longer referenced by it."""
    name = RecipeName.of(recipe)
    if name is None:
        return
    path = root_folder(store) / "uses" / name.stage / name.name / f"{name.digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(vars(use) | {"used": _now()}) + "\n")


def roots(store: Path) -> list[Root]:
    """Every root; AerieError for a file that cannot be read, since what it references could be lost."""
    found = []
    for folder in sorted((store / "roots").glob("*/")):
        found.append(Root(folder, configurations_of(folder), uses_of(folder)))
    return found


def configurations_of(root: Path) -> dict[Path, dict[str, Any]]:
    """The configurations of a root, as `register` wrote them, by file."""
    return {path: _read(path) for path in sorted((root / "configurations").glob("*.json"))}


def command_words(files: Sequence[str], overrides: Mapping[str, Any]) -> str:
    """A configuration as the words of a command line: --configfile and --config."""
    values = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in sorted(overrides.items()) if name != "gc"]
    words = ["--configfile", *files, *(["--config"] if values else []), *(f"{name}={value}" for name, value in values)]
    return shlex.join(words)


def uses_of(root: Path) -> dict[RecipeName, Use]:
    """What the jobs of a root use, by recipe."""
    found = {}
    for path in sorted((root / "uses").rglob("*.json")):
        stage, *name = path.relative_to(root / "uses").parts[:-1]
        use = _read(path)
        found[RecipeName(stage, "/".join(name), path.stem)] = Use(tuple(use["paths"]), use["captures"])
    return found


def object_folders(store: Path) -> Iterator[Path]:
    """The folder of every object, finished (<key>) or not (<key>.partial)."""
    for stage in sorted(path for path in store.glob("*/") if path.name not in NOT_OBJECTS):
        yield from sorted(path for path in stage.iterdir() if path.is_dir())


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - a million files
            except FileNotFoundError:
                continue
    return total


def free_bytes(store: Path) -> int:
    """Free bytes of the file system on which the store is, or will be."""
    folder = Path(os.path.realpath(store))
    while not folder.exists():
        folder = folder.parent
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def size_text(size: float) -> str:
    """Bytes for a person: "1.2 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} PB"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise AerieError(f"{path}: cannot be read ({error}). Delete it if what its working directory computed may go.") from error
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
