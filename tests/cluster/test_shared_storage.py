"""What NFS asks of locks beyond what a local file system does. No NFS is needed: its rule stands in flock(2)."""

import errno
import fcntl
import os
import time

import pytest

from aerie.files import is_locked, locked
from aerie.garbage import alone
from aerie.hidden_states import HiddenStateStore
from aerie.regeneration import AnswerStore


@pytest.fixture(autouse=True)
def as_on_nfs(monkeypatch):
    """flock(2): "to place an exclusive lock, fd must be open for writing" over NFS, for a shared one, for reading; else EBADF."""
    real = fcntl.flock

    def flock(file, operation):
        access = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        forbidden = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}
        if forbidden.get(operation & ~fcntl.LOCK_NB) == access:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_locks_of_objects_answers_and_deletion(tmp_path):
    with locked(tmp_path / "object.lock", "train_draft"):
        assert is_locked(tmp_path / "object.lock")
    assert not is_locked(tmp_path / "object.lock")
    with AnswerStore(tmp_path / "answers").locked(), alone(tmp_path):
        assert is_locked(tmp_path / "answers/lock") and is_locked(tmp_path / "gc.lock")


def test_locks_of_hidden_states(tmp_path):
    store = HiddenStateStore(tmp_path, "capture")
    with store.locked([3, 1]):
        assert is_locked(store.folder / ".locks/03") and not is_locked(store.folder / ".locks/02")
    left, held = store.folder / ".left.tmp", store.folder / ".held.tmp"
    for path in (left, held):
        path.write_bytes(b"half a shard")
        os.utime(path, (time.time() - 3600,) * 2)
    with open(held, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.remove_stale()
    assert not left.exists() and held.exists()
