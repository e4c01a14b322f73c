"""Training on several devices: one process, a rank, for each; they agree by torch.distributed (NCCL, on CPUs gloo)."""

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

from . import cli
from .errors import AerieError, ProcessFailed, describe, describe_exit, die_with_parent
from .files import write_atomically

# After so long without an answer a rank takes the others for lost; a rank that ends is noticed at once. A checkpoint, which
# one writes while the others wait, may take a quarter of an hour on a slow file server.
_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Ranks:
    """Which of how many ranks this process is; a single one needs no process group."""

    rank: int = 0
    count: int = 1

    def sum(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor by its sum over all ranks."""
        if self.count > 1:
            dist.all_reduce(tensor)

    def spread(self, tensor: torch.Tensor, owner: int) -> Callable[[], object]:
        """Begins to give every rank the owner's tensor; it is there after a call of what is returned."""
        if self.count == 1:
            return lambda: None
        work: dist.Work = dist.broadcast(tensor, owner, async_op=True)
        return work.wait


ALONE = Ranks()


class GradientSum:
    """Sums the gradients of all ranks, of some parameters while the backward pass still computes others'.

    All ranks have to send in one order, so a gradient waits for those that are to be sent before it. A rank without a
    gradient adds zeros.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], ranks: Ranks) -> None:
        self._parameters = list(parameters)[::-1] if ranks.count > 1 else []  # about the order in which backward makes them
        self._ready: set[torch.nn.Parameter] | None = None
        self._works: list[dist.Work] = []
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._is_there)

    def last_backward(self) -> None:
        """The backward pass that comes next is the step's last one: what it makes is final."""
        self._ready = set()

    def _is_there(self, parameter: torch.nn.Parameter) -> None:
        if self._ready is not None:
            self._ready.add(parameter)
            while len(self._works) < len(self._parameters) and self._parameters[len(self._works)] in self._ready:
                self._send()

    def _send(self) -> None:
        parameter = self._parameters[len(self._works)]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self) -> None:
        """Each gradient is the sum over all ranks."""
        while len(self._works) < len(self._parameters):
            self._send()
        for work in self._works:
            work.wait()
        self._works, self._ready = [], None


def run_in_ranks(count: int, device: torch.device, function: Callable[..., None], arguments: Sequence[Any], work: Path) -> None:
    """Runs function(ranks, device, *arguments) in `count` processes; AerieError or ProcessFailed, with the cause, if one fails.

    work: an existing folder of this host. What they say to a person reaches the terminal. They end with this process.
    """
    work = work.resolve()
    for left in work.glob("rank-*"):
        left.unlink()
    rendezvous = work / f"rank-meeting-{os.getpid()}"
    said, saying = torch.multiprocessing.get_context("spawn").Pipe(duplex=False)
    relay = threading.Thread(target=_relay, args=[said], daemon=True)
    context = start_processes(
        _rank,
        (os.getpid(), count, device, function, tuple(arguments), rendezvous, work, saying),
        nprocs=count,
        join=False,
        start_method="spawn",
    )
    saying.close()
    relay.start()
    try:
        while not context.join():
            pass
    except Exception as error:  # torch's, or what it met when it read how a rank had failed
        relay.join(5)
        raise _cause([process.exitcode or 0 for process in context.processes], context.pids(), work, error) from error
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    relay.join(5)
    rendezvous.unlink(missing_ok=True)


def _rank(
    rank: int,
    parent: int,
    count: int,
    device: torch.device,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    rendezvous: Path,
    work: Path,
    saying: Connection,
) -> None:
    die_with_parent()
    if os.getppid() != parent:  # it died while this process was starting
        os._exit(1)
    cli.speak_to(os.dup(saying.fileno()))
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
        if device.type == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=count, timeout=_TIMEOUT)
        function(Ranks(rank, count), device, *arguments)
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()  # into the log, whatever comes next
        failure = {"plain": isinstance(error, AerieError), "text": describe(error), "time": time.time()}
        with suppress(OSError):  # a full disk may be what it died of; torch passes that on, too
            write_atomically(work / f"rank-{rank}.json", json.dumps(failure))
        raise


def _relay(said: Connection) -> None:
    """Passes on what the ranks say until the last of them has ended."""
    with os.fdopen(os.dup(said.fileno())) as lines:
        for line in lines:
            cli.tell(line, end="")


def _cause(exit_codes: Sequence[int], pids: Sequence[int], work: Path, error: Exception) -> AerieError:
    """What the first rank that failed died of: the others then fail because it is gone. error: what torch says of the first that
    it saw end."""
    killed = [rank for rank, code in enumerate(exit_codes) if code < 0 and code != -signal.SIGTERM]
    if isinstance(error, ProcessExitedException) and exit_codes[error.error_index] == -signal.SIGTERM:
        killed.append(error.error_index)  # the others are ended with this signal by torch
    if killed:
        rank = killed[0]
        return ProcessFailed(f"training rank {rank} of {len(exit_codes)} (process {pids[rank]}) {describe_exit(exit_codes[rank])}")
    failures = [(rank, json.loads(path.read_text())) for rank in range(len(exit_codes)) if (path := work / f"rank-{rank}.json").exists()]
    if not failures:
        return ProcessFailed(f"the training ranks ended with exit codes {list(exit_codes)}: {describe(error)}")
    rank, first = min(failures, key=lambda failure: failure[1]["time"])
    if first["plain"]:
        return AerieError(first["text"])
    return ProcessFailed(f"training rank {rank} of {len(exit_codes)}: {first['text']}")
