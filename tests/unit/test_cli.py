"""Errors: never empty, on the terminal and in the log, with a failing exit code."""

import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from aerie.errors import AerieError, describe, describe_exit
from checkout import SCRIPTS

COMMAND = textwrap.dedent(
    """
    import os, signal, subprocess, sys, threading, time
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

    def clean_up(args):
        print("waiting", flush=True)
        try:
            time.sleep(60)
        finally:
            time.sleep(2)
            print("cleaned up", flush=True)

    def fail_unwritably(args):
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("\\udcff")

    def hear_of_slurm(args):
        print("srun: error: node-2: task 0: Out Of Memory", file=sys.stderr, flush=True)
        print("more than the last lines of the log\\n" * 20, flush=True)
        raise RuntimeError("engine died")

    def talk(args):
        for number in range(3000):
            cli.say(f"line {number}")
        raise AerieError("at the end")

    if __name__ == "__main__":
        made = cli.parser(None)
        made.add_argument("what")
        cli.run(lambda args: globals()[args.what](args), made)
    """
)


def command(tmp_path, what):
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    return [sys.executable, script, what, "--log", tmp_path / "x.log"]


def run(tmp_path, what):
    return subprocess.run(command(tmp_path, what), capture_output=True, text=True)


def start_waiting(tmp_path, what):
    """The command in a process group of its own, once it waits."""
    process = subprocess.Popen(command(tmp_path, what), stderr=subprocess.PIPE, text=True, start_new_session=True)
    log = tmp_path / "x.log"
    while not log.exists() or "waiting" not in log.read_text():
        time.sleep(0.02)
    return process


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
    process = start_waiting(tmp_path, "wait")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == (1 if number == signal.SIGTERM else -9)
    assert ("ended by SIGTERM" in said) == (number == signal.SIGTERM)
    end = time.monotonic() + 10
    while Path(f"/proc/{child}/status").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_told_twice_to_end_it_still_cleans_up(tmp_path):
    """As Slurm does: every process of the job gets the signal, and the one that watches hands it on."""
    process = start_waiting(tmp_path, "clean_up")
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 1 and "ended by SIGTERM" in said
    assert "cleaned up" in (tmp_path / "x.log").read_text()


def test_what_cannot_be_written_is_reported_all_the_same(tmp_path):
    """A message that is no valid text, and a thread that would keep the process alive."""
    done = run(tmp_path, "fail_unwritably")
    assert done.returncode == 1 and r"ValueError: \udcff" in done.stderr


def test_what_slurm_says_reaches_the_terminal(tmp_path):
    assert "also found: srun: error: node-2: task 0: Out Of Memory" in run(tmp_path, "hear_of_slurm").stderr


def test_a_terminal_that_has_gone_stops_nothing(tmp_path):
    process = subprocess.Popen(command(tmp_path, "talk"), stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=20) == 1
    log = (tmp_path / "x.log").read_text()
    assert "line 2999" in log and "at the end" in log


@pytest.mark.parametrize(("code", "words"), [(-9, "signal 9 (SIGKILL"), (137, "signal 9"), (1, "exit code 1"), (255, "exit code 255")])
def test_how_a_process_ended(code, words):
    assert words in describe_exit(code)


@pytest.mark.parametrize("error", [KeyError(), Exception(""), Exception("  "), AerieError(), SystemExit(3)])
def test_a_description_is_never_empty(error):
    assert type(error).__name__ in describe(error)


class Asks(http.server.BaseHTTPRequestHandler):
    """A package index that wants to know who asks."""

    def do_GET(self):
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="index"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_an_index_that_asks_for_a_password_is_an_error(tmp_path):
    """pip would ask on the log, and read the answer from a terminal that shows nothing."""
    settings = {"package": "no-such-package==1", "sha256": "0" * 64, "sdist": False, "member": "x"}
    recipe = {"stage": "fetch_package_file", "version": 1, "settings": settings, "runtime": {}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    index = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Asks)
    threading.Thread(target=index.serve_forever, daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_INDEX_URL": f"http://127.0.0.1:{index.server_port}/simple", "PIP_CONFIG_FILE": os.devnull}
    line = [sys.executable, SCRIPTS / "fetch_package_file.py", "--recipe", tmp_path / "recipe.json"]
    line += ["--output", tmp_path / "out", "--log", tmp_path / "x.log"]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
        index.shutdown()
    assert process.stderr is not None and "no-such-package==1" in process.stderr.read()
