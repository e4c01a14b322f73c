"""Errors: never empty, on the terminal and in the log, with a failing exit code."""

import subprocess
import sys
import textwrap

import pytest

from aerie.errors import AerieError, describe

COMMAND = textwrap.dedent(
    """
    import os, sys
    from aerie import cli
    from aerie.errors import AerieError

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


@pytest.mark.parametrize("error", [KeyError(), Exception(""), Exception("  "), AerieError(), SystemExit(3)])
def test_a_description_is_never_empty(error):
    assert type(error).__name__ in describe(error)
