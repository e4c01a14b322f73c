"""GPUs of this host, taken all or none: Snakemake counts GPUs, it does not say which.

A lease is an exclusive lock on one file a GPU, named by the GPU's UUID, so jobs of several users and workflows on one
host never share a device. A preset CUDA_VISIBLE_DEVICES (a scheduler's, a user's) is the pool that is leased from.
"""

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import cli
from .errors import AerieError, describe_exit

LOCKS = Path("/tmp/aerie-gpus")  # not TMPDIR, which differs between jobs and users that must meet here
_SECONDS_TO_ANSWER = 60
_DRIVER = "No GPU can be used as long as that is so: see dmesg, and mend the driver or restart the host."
_REMEDY = "Lower the target's tensor_parallel or the draft's training.gpus, or take a host that has so many."


def has_driver() -> bool:
    """Whether this host has an NVIDIA driver; asks nothing but the file system."""
    return Path("/proc/driver/nvidia/version").exists()


@contextmanager
def lease(needed: int, granted: int, locks: Path = LOCKS, nodes: int = 1) -> Iterator[list[str]]:
    """Holds `needed` GPUs and sets CUDA_VISIBLE_DEVICES to them; waits while they are taken. Call it before importing torch.

    granted: what Snakemake granted, which may silently be fewer than the rule asked for. nodes: that share `needed` evenly;
    this host's share is held. AerieError where too few were granted, or this host has too few.
    """
    if granted < needed:
        raise AerieError(f"this job needs {needed} GPUs and was granted {granted}: run snakemake with --resources gpu={needed} or more")
    if needed == 0:
        yield []
        return
    needed //= nodes
    pool = gpu_uuids()
    preset = os.environ.get("CUDA_VISIBLE_DEVICES")
    if preset is not None:
        pool = _named(preset, pool)
    if len(pool) < needed:
        source = f"CUDA_VISIBLE_DEVICES={preset}" if preset is not None else "nvidia-smi"
        here = " on each of its nodes" if nodes > 1 else ""
        raise AerieError(f"this job needs {needed} GPUs{here}, this host offers {len(pool)} ({source}). {_REMEDY}")
    held = _take(pool, needed, locks)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(held)
    cli.say(f"GPUs {', '.join(held)} of this host are leased")
    try:
        yield list(held)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def gpu_uuids() -> dict[str, str]:
    """{index: UUID} of this host's GPUs; empty where there is no driver."""
    return {index: uuid for index, uuid in nvidia_smi("index", "uuid")}


def nvidia_smi(*fields: str) -> list[list[str]]:
    """These properties of each of this host's GPUs; none where there is no driver. AerieError, with what nvidia-smi says, where it fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return []
    try:
        out, err = process.communicate(timeout=_SECONDS_TO_ANSWER)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: what waits for a lost GPU cannot die
        raise AerieError(f"nvidia-smi does not answer within {_SECONDS_TO_ANSWER} s. {_DRIVER}") from None
    if process.returncode:
        said = " ".join((out + err).split()) or "it said nothing"
        raise AerieError(f"nvidia-smi {describe_exit(process.returncode)}: {said}. {_DRIVER}")
    return [row for line in out.splitlines() if len(row := line.split(", ")) == len(fields)]


def _named(preset: str, host: dict[str, str]) -> dict[str, str]:
    """{name: UUID} of the devices that a CUDA_VISIBLE_DEVICES names; as for CUDA, none from the first that is no device (-1).

    host: {index: UUID} of all, as far as it is known. A UUID may be cut short. A MIG device has a name of its own.
    """
    pool: dict[str, str] = {}
    for name in filter(None, map(str.strip, preset.split(","))):
        if not (name in host or name.startswith(("GPU-", "MIG-")) or (name.isdigit() and not host)):
            break
        meant = [uuid for uuid in host.values() if uuid.startswith(name)]
        uuid = host.get(name) or (meant[0] if len(meant) == 1 else name)
        if uuid not in pool.values():
            pool[name] = uuid
    return pool


def _take(pool: dict[str, str], needed: int, locks: Path) -> dict[str, int]:
    """Locks `needed` of the pool, or waits holding none; {name: descriptor}, inherited by child processes."""
    locks.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # another user's folder, which that user has opened to all
        locks.chmod(0o777)
    waiting = False
    while True:
        held: dict[str, int] = {}
        for name, uuid in pool.items():
            if len(held) == needed:
                break
            descriptor = os.open(locks / uuid.replace("/", "_"), os.O_RDWR | os.O_CREAT, 0o666)
            with suppress(PermissionError):
                os.fchmod(descriptor, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            os.set_inheritable(descriptor, True)
            held[name] = descriptor
        if len(held) == needed:
            return held
        for descriptor in held.values():
            os.close(descriptor)
        if not waiting:
            waiting = True
            cli.say(f"waiting for {needed} free GPUs of {len(pool)} (locks in {locks})")
        time.sleep(1)
