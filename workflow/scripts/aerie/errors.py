"""The exceptions for bad input and bad state, and the one way to tell a person what died: here, in a child, or in its log."""

import ctypes
import gc
import json
import multiprocessing.process
import re
import signal
import subprocess
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LOG_BYTES = 400_000  # of a log's end that are searched for tracebacks
_LOG_LINES = 15
_LINE_WIDTH = 240
# "(Worker_TP1 pid=7) ERROR 11-29 20:04:12 [multiproc_executor.py:1063] " before each line of what vLLM logs.
_PREFIX = re.compile(r"^(?:\((?P<process>[^()]*pid=\d+)\) ?)?(?:(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ \[[^\]]+\] ?)?")
_OF_SLURM = ("srun: error:", "slurmstepd: error:")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$')


class AerieError(Exception):
    """Something the user can mend: the message says what was found, what was expected and what to do."""


class ProcessFailed(AerieError):
    """Something else died (a child process, an engine) and said why in the log: its last lines are shown with this."""


class Terminated(BaseException):
    """The job was told to end (SIGTERM). No `except Exception` takes it for a fault of the row or the layer at hand."""


def shown(value: Any, longest: int) -> str:
    """A value of a setting as JSON, cut behind so many characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= longest else f"{text[:longest]}…"


def describe(error: BaseException) -> str:
    """One paragraph for a person: type, message (the repr when it is empty), where it was raised, and its causes.

    Never empty, whatever the exception's own text is.
    """
    lines = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = type(current).__name__
        text = str(current).strip() or f"(no message; {current!r})"
        if isinstance(current, AerieError | Terminated) and str(current).strip():
            lines.append(text)
        else:
            frames = traceback.extract_tb(current.__traceback__)
            place = f"\n  raised in {frames[-1].filename}:{frames[-1].lineno}, {frames[-1].name}" if frames else ""
            lines.append(f"{kind}: {text}{place}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\ncaused by ".join(lines)


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code: negative, or 128 and more as shells report it, means a signal."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with exit code {code}"
    if number == signal.SIGKILL:
        name += "; the kernel sends it where memory runs out"
    return f"was killed by signal {number} ({name})"


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends, however that ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def dead_children() -> list[str]:
    """How each child process of this one ended that did not end well; those that were told to end come only if no other did.

    Whoever started them, as long as something (an engine, the traceback's frames) still holds them.
    """
    ended: list[tuple[str, int]] = []
    for child in gc.get_objects():
        try:
            kind = type(child)  # isinstance would ask objects for their class, and some of them answer with a warning
            if issubclass(kind, multiprocessing.process.BaseProcess):
                if child.exitcode:
                    ended.append((f"{child.name} (pid {child.pid})", child.exitcode))
            elif issubclass(kind, subprocess.Popen) and child.poll():
                command = child.args if isinstance(child.args, str) else subprocess.list2cmdline(child.args)  # type: ignore[arg-type]
                ended.append((f"{command[:80]} (pid {child.pid})", child.returncode))
        except (AssertionError, ReferenceError, ValueError):  # of another process, or closed
            continue
    told = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 1)
    worst = [one for one in ended if one[1] not in told] or ended
    return [f"child process {name} {describe_exit(code)}" for name, code in sorted(set(worst))]


def log_tail(log: Path) -> list[str]:
    """The last lines of a log, each cut to a terminal's width or two."""
    return [f"  | {line[:_LINE_WIDTH]}" for line in _end_of(log).splitlines()[-_LOG_LINES:]]


def logged_errors(log: Path | None) -> list[str]:
    """What Slurm's programs reported in the end of a log, and every different traceback there, in order: the cause comes
    before its consequences."""
    lines: dict[str, list[str]] = {}
    for line in _end_of(log).splitlines():
        prefix = _PREFIX.match(line)
        assert prefix is not None  # every part of it may be missing
        if prefix["level"] in ("DEBUG", "INFO", "WARNING"):  # what it met and went on from
            continue
        lines.setdefault(prefix["process"] or "", []).append(line[prefix.end() :])
    slurm = [line for said in lines.values() for line in said if line.startswith(_OF_SLURM)]
    return list(dict.fromkeys([*slurm, *(found for process, said in lines.items() for found in _tracebacks(process, said))]))


def _tracebacks(process: str, lines: Iterable[str]) -> Iterable[str]:
    """process: as vLLM names it, "" for the job's own."""
    place: str | None = None  # None: not within a traceback
    for line in lines:
        if line.startswith("Traceback (most recent call last):"):
            place = ""
        elif place is not None:
            frame = _FRAME.match(line)
            if frame:
                place = f"{frame['file']}:{frame['line']}, {frame['function']}"
            elif line and not line.startswith(" "):
                error, _, message = line.partition(":")
                raised = f"{error}: {message.strip() or '(no message)'}\n  raised in {place or 'unknown'}"
                yield f"{raised} ({process})" if process else raised
                place = None


def _end_of(log: Path | None) -> str:
    if log is None or not log.exists():  # somebody has deleted it
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read().decode("utf-8", "replace")
