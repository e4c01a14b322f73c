"""One vLLM engine over several nodes of a Slurm job, by vLLM's own multiprocessing.

The engine and the first node's workers belong to the process that loads it. On each other node this module runs as a step
of the job: it takes the engine's arguments from its input and starts that node's workers, which end with the input. Where
they end before, the engine is told: it would wait for their part of a sum for ever.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cli
from .devices import lease
from .errors import AerieError, describe_exit
from .vllm_options import device_type, prepare_process

if TYPE_CHECKING:
    from vllm import LLM, PoolingRequestOutput, RequestOutput

_SCRIPTS = Path(__file__).resolve().parents[1]
_OF_ONE_HOST = ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP")
_SECONDS_TO_END = 60
_SECONDS_TO_RAISE_AGAIN = 1
_SECONDS_TO_FOLLOW = 10  # within which a node's step ends after its workers


def load(arguments: dict[str, Any]) -> "LLM":
    """vllm.LLM(**arguments), see vllm_options.common_options; where `nnodes` is more than 1, with the other nodes' workers.

    Call it in the main thread. AerieError before anything is loaded where the job has too few nodes.
    """
    nodes = int(arguments.get("nnodes", 1))
    if nodes > 1:
        check_job(nodes)
    from vllm import LLM

    if nodes == 1:
        return LLM(**arguments)
    from vllm.utils.network_utils import get_ip, get_open_port

    arguments = arguments | {"master_addr": get_ip(), "master_port": get_open_port()}
    others = _OtherNodes()
    try:
        with others.named():
            others.start(arguments)
            llm = LLM(**arguments)
            others.loaded = True
            if others.failure:
                raise others.failure
    except BaseException:
        others.end()
        raise
    llm.other_nodes = others
    return llm


def step(llm: "LLM") -> "list[RequestOutput | PoolingRequestOutput]":
    """A step of an engine that `load` gave; where it fails with the workers of another node, that is what is raised."""
    others: _OtherNodes | None = getattr(llm, "other_nodes", None)
    with others.named() if others else nullcontext():
        return llm.llm_engine.step()


def shut_down(llm: "LLM") -> None:
    """Ends the workers of an engine that `load` gave, on all its nodes."""
    others: _OtherNodes | None = getattr(llm, "other_nodes", None)
    if others:
        others.ending = True
    llm.llm_engine.engine_core.shutdown()
    if others:
        others.end()


def check_job(nodes: int) -> None:
    """AerieError unless this process belongs to a Slurm job with so many nodes."""
    remedy = "Run snakemake with --profile profiles/slurm, or set nodes: 1 in the target."
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise AerieError(f"the target takes {nodes} nodes of a Slurm job, and this is no Slurm job (SLURM_JOB_ID is not set). {remedy}")
    done = subprocess.run(["squeue", "--noheader", f"--jobs={job}", "--format=%D"], capture_output=True, text=True, check=False)
    found = done.stdout.strip()
    if done.returncode:
        raise AerieError(f"squeue does not say how many nodes Slurm job {job} has: {done.stderr.strip() or describe_exit(done.returncode)}")
    if not found.isdigit():  # none for a job that has ended, several for a heterogeneous one
        raise AerieError(f"squeue says of the nodes of Slurm job {job} {found!r}; expected one number. {remedy}")
    if int(found) < nodes:
        raise AerieError(f"the target takes {nodes} nodes, Slurm job {job} has {found}. {remedy}")


class _OtherNodes:
    """The job steps in which an engine's other nodes have their workers."""

    def __init__(self) -> None:
        self.loaded = False
        self.ending = False  # once true, a step may end
        self.failure: ChildProcessError | None = None  # that one ended before
        self._steps: list[subprocess.Popen[str]] = []

    def start(self, arguments: dict[str, Any]) -> None:
        """Starts the workers of the nodes but the first, for an engine with these arguments."""
        signal.signal(signal.SIGUSR1, self._fail)
        nodes = int(arguments["nnodes"])
        gpus = arguments["tensor_parallel_size"] // nodes if device_type("auto") == "cuda" else 0
        environment = {name: value for name, value in os.environ.items() if name not in _OF_ONE_HOST}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_SCRIPTS), os.environ.get("PYTHONPATH"))))
        for node in range(1, nodes):
            # This process is on the job's first node, since the Slurm plugin starts it in the batch step.
            srun = ["srun", "--overlap", "--cpu-bind=none", "--nodes=1", "--ntasks=1", f"--relative={node}"]
            command = [*srun, *([f"--gpus={gpus}"] if gpus else []), sys.executable, "-m", __name__]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)
            self._steps.append(process)
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already, which _watch sees
                process.stdin.write(json.dumps({"arguments": arguments | {"node_rank": node}, "gpus": gpus}) + "\n")
                process.stdin.flush()  # and left open: its end is the workers' end

    def end(self) -> None:
        """Ends the steps, and waits for them."""
        self.ending = True
        for step in self._steps:
            assert step.stdin is not None
            with suppress(BrokenPipeError):
                step.stdin.close()
        for step in self._steps:
            try:
                step.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                step.kill()

    @contextmanager
    def named(self) -> Iterator[None]:
        """A failure in it is the end of a step where there is one, whatever vLLM made of that or its workers met first."""
        try:
            yield
        except AerieError:
            raise
        except Exception as error:
            if self.failure is None:
                time.sleep(_SECONDS_TO_FOLLOW)  # which _fail interrupts
            if self.failure in (None, error):
                raise
            raise self.failure from error

    def _watch(self, step: "subprocess.Popen[str]") -> None:
        step.wait()
        while not self.ending:
            # Wherever the main thread waits for the workers, this interrupts it.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            if self.loaded:
                break
            # While vLLM loads, it catches what is raised in its probing of packages and devices, and goes on.
            time.sleep(_SECONDS_TO_RAISE_AGAIN)

    def _fail(self, signum: int, frame: object) -> None:
        if self.ending or (self.loaded and self.failure):
            return
        for worker in multiprocessing.active_children():  # so that vLLM knows that its executor is broken
            worker.kill()
        ended = [f"on node {node} {describe_exit(step.returncode)}" for node, step in enumerate(self._steps, 1) if step.poll() is not None]
        self.failure = self.failure or ChildProcessError(f"the engine's job step {', '.join(ended)}; what it said is in the log")
        raise self.failure


def _work() -> None:
    """What another node runs: the workers of an engine whose arguments are the first line of the input, until the input ends."""
    order = json.loads(sys.stdin.readline())
    ending = threading.Event()
    threading.Thread(target=_end_with_input, args=(ending,), daemon=True).start()
    arguments = order["arguments"]
    with lease(order["gpus"], order["gpus"]):
        prepare_process()
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        if "kv_transfer_config" in arguments:
            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        # The same defaults as vllm.LLM has on the first node.
        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)  # returns when one has ended
    ending.wait(5)  # the engine's end ends the workers, too
    cli.say(f"the engine's workers on node {arguments['node_rank']} have ended")
    sys.exit(1)


def _end_with_input(ending: threading.Event) -> None:
    sys.stdin.read()
    ending.set()
    # The workers notice; what they hold is of no use to anyone.
    os._exit(0)


if __name__ == "__main__":
    _work()
