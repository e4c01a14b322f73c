"""Files that survive a crash, and locks that end with their holder."""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import cli


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds an exclusive lock; children inherit its descriptor, so it lasts until the last of them is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            cli.say(f"{what}: another process is computing this; waiting for {path}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The holder before us may have removed the file: then our lock is on nothing, and we take a new one.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
    os.set_inheritable(descriptor, True)
    try:
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock that this file stands for."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_damage(error: OSError) -> bool:
    """Whether an error in reading a file says that it is damaged or gone. Where it is another's that we may not read, or too many
    files are open, or a server does not answer, the file may be whole."""
    return error.errno in (None, errno.EIO, errno.ENOENT)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`: a reader, or a crash, sees the old file or the whole new one."""
    # Not the process's number: on another host, or in another container, another one has the same.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Writes text, see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def end_future(folder: Path, apart: Path) -> None:
    """Sets files of the future, which a clock set back leaves behind, to now: Snakemake refuses what is made from them.

    apart: a folder below that is left as it is.
    """
    now, apart = time.time(), apart.resolve()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if (Path(parent) / name).resolve() != apart]
        for path in (Path(parent) / name for name in names):
            with suppress(FileNotFoundError):  # another run is at work here
                if path.lstat().st_mtime > now:
                    os.utime(path, (now, now), follow_symlinks=False)


def sync_file(path: Path) -> None:
    """fsync of a file written earlier."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """fsync of a folder, so that a rename in it lasts."""
    sync_file(path)
