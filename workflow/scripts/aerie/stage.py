"""How a stage runs: its recipe, its key, the object store that keeps what was computed, and the manifest.

A stage's key is the digest of its name, VERSION, the settings that can change its bytes and the content digests of its
inputs. `<store>/<stage>/<key>/` holds a finished object: manifest.json beside output/. What is being made lives in
`<key>.partial/`: work/ (what a later attempt can use), output/ and attempts/ (the log of each attempt).
"""

import calendar
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import cli
from .errors import AerieError
from .files import locked, sync_file, sync_folder, write_atomically
from .keys import digest_of, draft_digest, file_sha256
from .provenance import provenance
from .store import Use, open_store, record_use

_ATTEMPT = "%Y%m%dT%H%M%S.log"


@dataclass(frozen=True)
class Recipe:
    """A stage's resolved settings, as Snakemake hands them over (results/.recipes/{stage}/{name}/{digest}.json).

    `settings` can change the bytes of the output and are part of its key; `runtime` (device, batch sizes, …) is not.
    """

    stage: str
    version: int
    settings: dict[str, Any]
    runtime: dict[str, Any]
    path: Path = field(default=Path(), compare=False)

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        return cls(**json.loads(path.read_text()), path=path)

    def key(self, inputs: dict[str, str]) -> str:
        """The key of what this recipe makes of inputs with these content digests."""
        return digest_of({"stage": self.stage, "version": self.version, "settings": self.settings, "inputs": inputs})


def write_recipe(path: Path, text: str) -> None:
    """Writes a recipe, and that it is the last one written of its stage and name. Others stay: a run may be reading them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    write_atomically(path.parent / "last", path.stem)


def last_recipe(folder: Path) -> Path | None:
    """The recipe of a stage and name (results/.recipes/{stage}/{name}) that was written last, by any configuration."""
    try:
        return folder / f"{(folder / 'last').read_text()}.json"
    except (FileNotFoundError, NotADirectoryError):
        return None


@dataclass(frozen=True)
class StageResult:
    """What a computation has to say about its output.

    digest: content digest; None means that of all output files. figures: numbers for the manifest and the report.
    """

    digest: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest (of a folder or the file itself); AerieError where it is missing or not a manifest."""
    if path.is_dir():
        path = path / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise AerieError(f"{path}: there is no manifest; the stage that makes it has not finished. Run snakemake.") from None
    except ValueError as error:
        raise AerieError(f"{path}: this is no manifest ({error}). Delete it and run snakemake again.") from error
    return manifest


def input_digests(manifests: Mapping[str, Path], init_from: Path | None) -> dict[str, str]:
    """{name: content digest} of a stage's inputs, from their manifests and from the draft that it starts from, if there is one."""
    digests = {name: str(read_manifest(path)["digest"]) for name, path in manifests.items()}
    return digests | ({"init_from": draft_digest(init_from)} if init_from else {})


def is_in_store(recipe: Path, inputs: dict[str, str], store: Path) -> bool:
    """Whether what a recipe makes of these inputs is in the store, so that `run_stage` would only copy it."""
    read = Recipe.read(recipe)
    return (store / read.stage / read.key(inputs) / "manifest.json").exists()


def run_stage(
    recipe: Recipe,
    version: int,
    inputs: dict[str, str],
    output: Path,
    store: Path,
    compute: Callable[[Path, Path], StageResult],
    log: Path | None = None,
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """Fills `output` from the store, or computes, stores and then copies. Returns the manifest.

    inputs: content digest of each input, by name. compute(work, out): writes the output files into `out`; `work` is
    what earlier attempts with the same key left. Only one process computes a key; others wait for it and take the result.
    also: other folders of the store, relative to it, that the computation keeps what it can reuse in.
    """
    if recipe.version != version:
        raise AerieError(f"the recipe is for version {recipe.version} of {recipe.stage}, this is version {version}: run snakemake")
    open_store(store)
    key = recipe.key(inputs)
    finished = store / recipe.stage / key
    record_use(store, recipe.path, Use((f"{recipe.stage}/{key}", *also)))
    if not _touch(finished / "manifest.json"):
        partial = finished.with_name(key + ".partial")
        with locked(store / recipe.stage / f"{key}.lock", recipe.stage):
            if not (finished / "manifest.json").exists():
                if not (partial / "manifest.json").exists():  # else only the last steps are missing
                    _compute(recipe, key, inputs, partial, compute, log)
                for name in ("work", "attempts"):
                    shutil.rmtree(partial / name, ignore_errors=True)
                partial.replace(finished)
                sync_folder(finished.parent)
                (store / recipe.stage / f"{key}.lock").unlink(missing_ok=True)
    else:
        cli.say(f"{recipe.stage}: found in the store ({key[:12]}), nothing computed")
    manifest = read_manifest(finished)
    _restore(finished, output, manifest)
    return manifest


def _compute(
    recipe: Recipe, key: str, inputs: dict[str, str], partial: Path, compute: Callable[[Path, Path], StageResult], log: Path | None
) -> None:
    work, out = partial / "work", partial / "output"
    shutil.rmtree(out, ignore_errors=True)
    for folder in (work, out, partial / "attempts"):
        folder.mkdir(parents=True, exist_ok=True)
    started, clock = time.time(), time.monotonic()
    earlier = _attempts(partial / "attempts")
    with kept_log(log, partial / "attempts" / time.strftime(_ATTEMPT, time.gmtime(started))):
        result = compute(work, out)
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    files = {str(p.relative_to(out)): {"sha256": file_sha256(p), "bytes": p.stat().st_size} for p in paths}
    manifest = {
        "stage": recipe.stage,
        "version": recipe.version,
        "key": key,
        "digest": result.digest or digest_of({name: entry["sha256"] for name, entry in files.items()}),
        "settings": recipe.settings,
        "runtime": recipe.runtime,
        "inputs": inputs,
        "files": files,
        "figures": result.figures,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(min([started, *(start for start, _ in earlier)]))),
        "seconds": round(time.monotonic() - clock + sum(seconds for _, seconds in earlier), 3),
    } | provenance()
    usual = out.stat().st_mode & 0o666
    for path in paths:
        path.chmod(usual)  # safetensors makes files that only their owner may read
        sync_file(path)
    write_atomically(partial / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _attempts(folder: Path) -> list[tuple[float, float]]:
    """(start, seconds) of each earlier attempt, from its log's name and the time at which it was last written to."""
    found = []
    for path in folder.glob("*.log"):
        with suppress(ValueError):
            start = calendar.timegm(time.strptime(path.name, _ATTEMPT))
            found.append((float(start), max(0.0, path.stat().st_mtime - start)))
    return found


def _touch(manifest: Path) -> bool:
    """Whether a manifest is there. It becomes young, and so no `snakemake gc` takes the object while it is copied."""
    try:
        os.utime(manifest)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's
        return manifest.exists()
    return True


def _restore(finished: Path, output: Path, manifest: dict[str, Any]) -> None:
    """Copies an object's files and then its manifest (by reflink where the file system can; never by hard link,
    since Snakemake touches its outputs and would touch the store's file with them)."""
    output.mkdir(parents=True, exist_ok=True)
    for name in sorted(manifest["files"]):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
    for top in sorted({Path(name).parts[0] for name in manifest["files"]}):
        target = output / top
        if target.is_dir():
            shutil.rmtree(target)
        done = subprocess.run(
            ["cp", "-r", "--reflink=auto", "--no-preserve=mode", "--", finished / "output" / top, target], capture_output=True, text=True
        )
        if done.returncode:
            raise AerieError(f"{finished / 'output' / top}: could not be copied to {target}: {done.stderr.strip()}")
    for name, entry in manifest["files"].items():
        size = (output / name).stat().st_size
        if size != entry["bytes"]:
            raise AerieError(
                f"{finished / 'output' / name}: the store's file is damaged: {size} bytes instead of {entry['bytes']}. "
                f"Delete {finished} and run snakemake again."
            )
    write_atomically(output / "manifest.json", (finished / "manifest.json").read_text())


@contextmanager
def kept_log(log: Path | None, copy: Path) -> Iterator[None]:
    """Keeps this attempt's log beside the partial work: Snakemake deletes the declared one before the next attempt."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    linked = False
    if log is not None and log.exists():
        try:
            os.link(log, copy)
            linked = True
        except OSError:  # another file system: copied below instead
            pass
    try:
        yield
    finally:
        if log is not None and log.exists() and not linked:
            with suppress(OSError):  # a full disk: what filled it is the error to tell
                shutil.copyfile(log, copy)
