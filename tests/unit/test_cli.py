"""Errors: never empty, on the terminal and in the log, with a failing exit code."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from aerie.errors import AerieError, describe, describe_exit

COMMAND = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    from aerie import cli
    from aerie.errors import AerieError, ProcessFailed

    class Silent(Exception):
        pass

    def fail_silently(args):
        os.write(1, b"from the engine's C++ code\\n")
        try:
            raise Silent()
        except Silent as error:
            raise RuntimeError("engine died") from error

    def fail_clearly(args):
        raise AerieError("config.yaml:3: found a, expected b: write b")

    def be_killed(args):
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_a_child(args):
        child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
        child.wait()
        raise ProcessFailed("the engine died")

    def hear_of_a_worker(args):
        lines = ["Traceback (most recent call last):", '  File "/x/worker.py", line 12, in step', "    raise Silent()", "worker.Silent"]
        for line in lines:
            print(f"(Worker_TP1 pid=77) ERROR 11-29 20:04:12 [multiproc_executor.py:1063] {line}", file=sys.stderr)
        print("(Worker_TP0 pid=76) WARNING 11-29 20:04:12 [base.py:380] Traceback (most recent call last):", file=sys.stderr)
        print("(Worker_TP0 pid=76) WARNING 11-29 20:04:12 [base.py:380] ValueError: harmless", file=sys.stderr)
        sys.stderr.flush()
        raise RuntimeError("Worker failed with error ''")

    def wait(args):
        print("waiting", flush=True)
        time.sleep(60)

    if __name__ == "__main__":
        made = cli.parser(None)
        made.add_argument("what")
        cli.run(lambda args: globals()[args.what](args), made)
    """
)


def run(tmp_path, what):
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    return subprocess.run([sys.executable, script, what, "--log", tmp_path / "x.log"], capture_output=True, text=True)


def test_an_empty_exception_is_named_with_its_place(tmp_path):
    done = run(tmp_path, "fail_silently")
    assert done.returncode == 1
    assert "RuntimeError: engine died" in done.stderr
    assert "caused by Silent: (no message; Silent())" in done.stderr
    assert "command.py" in done.stderr and "fail_silently" in done.stderr
    log = (tmp_path / "x.log").read_text()
    assert "from the engine's C++ code" in log and "Traceback" in log and "Silent" in log
    assert "from the engine's C++ code" in done.stderr  # the log's last lines reach the terminal
    assert str(tmp_path / "x.log") in done.stderr


def test_a_user_error_is_short(tmp_path):
    done = run(tmp_path, "fail_clearly")
    assert done.returncode == 1
    assert "command failed: config.yaml:3: found a, expected b: write b" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "x.log").read_text()


def test_a_killed_command_is_reported(tmp_path):
    done = run(tmp_path, "be_killed")
    assert done.returncode == 128 + 9
    assert "command was killed by signal 9 (SIGKILL; the kernel sends it where memory runs out)" in done.stderr
    assert str(tmp_path / "x.log") in done.stderr


def test_a_killed_child_is_reported(tmp_path):
    done = run(tmp_path, "lose_a_child")
    assert done.returncode == 1 and "command failed: the engine died" in done.stderr
    assert "child process" in done.stderr and "was killed by signal 11 (SIGSEGV)" in done.stderr


def test_a_workers_traceback_is_found_in_the_log(tmp_path):
    done = run(tmp_path, "hear_of_a_worker")
    assert "worker.Silent: (no message)" in done.stderr
    assert "raised in /x/worker.py:12, step (Worker_TP1 pid=77)" in done.stderr
    assert "also found: ValueError" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path, number):
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    log = tmp_path / "x.log"
    process = subprocess.Popen([sys.executable, script, "wait", "--log", log], stderr=subprocess.PIPE, text=True)
    while not log.exists() or "waiting" not in log.read_text():
        time.sleep(0.02)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == (1 if number == signal.SIGTERM else -9)
    assert ("ended by SIGTERM" in said) == (number == signal.SIGTERM)
    end = time.monotonic() + 10
    while Path(f"/proc/{child}/status").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("code", "words"), [(-9, "signal 9 (SIGKILL"), (137, "signal 9"), (1, "exit code 1"), (255, "exit code 255")])
def test_how_a_process_ended(code, words):
    assert words in describe_exit(code)


@pytest.mark.parametrize("error", [KeyError(), Exception(""), Exception("  "), AerieError(), SystemExit(3)])
def test_a_description_is_never_empty(error):
    assert type(error).__name__ in describe(error)
