"""What every command line shares: arguments, where its output goes, and how it reports what killed it."""

import argparse
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from .errors import (
    AerieError,
    ProcessFailed,
    Terminated,
    dead_children,
    describe,
    describe_exit,
    die_with_parent,
    log_tail,
    logged_errors,
)

_terminal: TextIO | None = None


def terminal() -> TextIO:
    """The stream a person watches; not the log, to which `run` sends everything else."""
    return _terminal or sys.stderr


def speak_to(descriptor: int) -> None:
    """From now on what a person is told goes to this file descriptor: to the terminal, or a process's way to its parent's."""
    global _terminal
    _terminal = os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace")


def tell(text: str, end: str = "\n") -> None:
    """Text for the person who watches; who has gone away since stops nothing."""
    with suppress(OSError):
        print(text, end=end, file=terminal(), flush=True)


def say(line: str) -> None:
    """One line for the person who watches, and for the log."""
    tell(line)
    if terminal() is not sys.stderr:
        print(line, file=sys.stderr, flush=True)


def put_on_path(*folders: Path) -> None:
    """Makes the programs in these folders the first that are found by name, here and in child processes."""
    os.environ["PATH"] = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every command has: --log, the file that gets all output."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--log", type=Path, help="file that gets all output; progress and errors also reach the terminal")
    return made


def stage_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser for a stage's command: --recipe, --store, --output and --log."""
    made = parser(description)
    made.add_argument("--recipe", type=Path, required=True, help="the stage's settings, results/.recipes/…/….json")
    made.add_argument("--store", type=Path, required=True, help="the object store")
    made.add_argument("--output", type=Path, required=True, help="folder that gets the stage's files")
    return made


def engine_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser for a stage that may use GPUs: also --target and --gpus, the number that Snakemake granted."""
    made = stage_parser(description)
    made.add_argument("--target", type=Path, required=True, help="the target's fingerprint.json")
    made.add_argument("--gpus", type=int, default=0, help="GPUs granted to this job")
    return made


def run(main: Callable[[argparse.Namespace], None], made: argparse.ArgumentParser) -> NoReturn:
    """Parses the arguments, runs `main` in a child process and exits: 0, or not 0 after a report that is never empty.

    The file descriptors 1 and 2 go to the log, so that C++ code and child processes are logged too. The child is there
    so that somebody is left to report when a signal ends it (a crash in C++ code, no memory); it never outlives us.
    """
    args = made.parse_args()
    command = Path(sys.argv[0]).stem
    if args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
        args.log.unlink(missing_ok=True)  # an earlier attempt's log may be kept under another name
        speak_to(os.dup(2))
        log = os.open(args.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        print("$", " ".join(sys.argv), flush=True)
    _watch_over_child(command, args.log)
    faulthandler.enable()
    # So that `finally` blocks run and the report is printed when Snakemake or a scheduler ends the job.
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        main(args)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        try:
            _report(error, command, args.log)
        except BaseException:  # noqa: BLE001 - two failures are no reason to stay
            traceback.print_exc()
        finally:
            # Threads of a broken engine must not keep a failed job alive.
            os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    sys.stdout.flush()
    sys.exit(0)


def _watch_over_child(command: str, log: Path | None) -> None:
    """Returns in a new child process; here, waits for it, says so if a signal ended it, and exits as it did."""
    sys.stdout.flush()
    sys.stderr.flush()
    ourselves = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent()
        if os.getppid() != ourselves:  # it died before that call
            os._exit(1)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the child by itself
    signal.signal(signal.SIGTERM, lambda signum, frame: os.kill(child, signum))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        _say_why(f"{command} {describe_exit(code)}", logged_errors(log), log, tail=True)
        code = 128 - code
    os._exit(code)


def _raise_terminated(signum: int, frame: object) -> NoReturn:
    # Slurm tells every process of a job, and our parent tells us again: that must not end the cleaning up. (Nor is the signal
    # ignored, which child processes would inherit.)
    signal.signal(signum, lambda *_: None)
    raise Terminated(f"ended by {signal.Signals(signum).name}; finished work is kept, the same command goes on")


def _report(error: BaseException, command: str, log: Path | None) -> None:
    sys.stdout.flush()
    # A user's mistake needs no more than its message; for the rest, also what others said before they died.
    plain = isinstance(error, AerieError | Terminated | KeyboardInterrupt) and not (isinstance(error, ProcessFailed) or error.__cause__)
    others = [] if plain else [*logged_errors(log), *dead_children()]
    _say_why(f"{command} failed: {describe(error)}", others, log, tail=not plain)
    if log:
        traceback.print_exception(error)
        sys.stderr.flush()
    elif not plain:
        traceback.print_exception(error, file=terminal())


def _say_why(what: str, others: list[str], log: Path | None, tail: bool) -> None:
    """On the terminal: what died, what else the log and the child processes have to say, the log's end and its path."""
    tell(f"\n{what}")
    # Where many died of one thing, the first ones tell which.
    for other in [other for other in others if other.splitlines()[-1] not in what][:4]:
        tell("also found: " + other.replace("\n", "\n  "))
    if log and tail:
        tell("\n".join([f"last lines of its log {log}:", *log_tail(log)]))
    elif log:
        tell(f"log: {log}")
