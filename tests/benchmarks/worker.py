"""A variant of a benchmark in a process of its own, so that none has another's memory, threads or imports."""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Answer = Callable[[Any], dict[str, Any]]


class Worker:
    """The process, seen from the parent. start(name, job) runs in it and returns what answers each question asked."""

    def __init__(self, start: Callable[[str, dict[str, Any]], Answer], name: str, job: dict[str, Any], log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(start, name, job, str(log), theirs))
        self.process.start()
        theirs.close()

    def ask(self, question: Any, timeout: float) -> dict[str, Any]:
        """The answer, or {"error": why there is none}."""
        try:
            self.pipe.send(question)
            if not self.pipe.poll(max(timeout, 0)):
                return {"error": "no answer before --max-seconds"}
            answer: dict[str, Any] = self.pipe.recv()
            return answer
        except (EOFError, OSError):
            self.process.join(5)
            return {"error": f"the process ended with code {self.process.exitcode}"}

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(15)
        for stop in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                stop()
                self.process.join(5)


def _serve(start: Callable[[str, dict[str, Any]], Answer], name: str, job: dict[str, Any], log: str, pipe: Connection) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        answer = start(name, job)
        while (question := pipe.recv()) is not None:
            pipe.send(answer(question))
    except EOFError:
        return
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"})
        raise
