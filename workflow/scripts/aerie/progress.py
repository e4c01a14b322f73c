"""Progress of long work, as lines that stay readable when several jobs print at once."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import cli


class Progress:
    """Prints "what: done/total unit, rate, time left" to the terminal and the log, at most every `every` seconds.

    Work found finished from an earlier attempt is given as `start`; it counts as done but not towards the rate. Nor, for the
    time left, does the first update: its time is also that of compiling, and of filling the engine.
    """

    def __init__(self, what: str, total: int, unit: str, start: int = 0, every: float = 10.0) -> None:
        self.what, self.total, self.unit, self.every = what, total, unit, every
        self.count = self.first = start
        self.started = time.monotonic()
        self.printed = self.started
        self.steady: tuple[int, float] | None = None  # count and time at the first update

    def update(self, amount: int, **extra: Any) -> None:
        """Adds `amount` units; `extra` values (loss=…, written=…) are shown behind."""
        self.count += amount
        now = time.monotonic()
        self.steady = self.steady or (self.count, now)
        if now - self.printed >= self.every:
            self.printed = now
            self._print(now, extra)

    def done(self, **extra: Any) -> None:
        """Prints the last line, whatever the interval."""
        self._print(time.monotonic(), extra)

    def _print(self, now: float, extra: dict[str, Any]) -> None:
        seconds = max(now - self.started, 1e-9)
        rate = (self.count - self.first) / seconds
        parts = [f"{self.what}: {self.count:,}/{self.total:,} {self.unit}", f"{rate:,.1f} {self.unit}/s"]
        count, since = self.steady or (self.count, now)
        if count < self.count < self.total:
            parts.append(f"{duration((self.total - self.count) * (now - since) / (self.count - count))} left")
        else:
            parts.append(f"{duration(seconds)} taken")
        parts += [f"{name} {value}" for name, value in extra.items()]
        cli.say(", ".join(parts))


@contextmanager
def passed_on(what: str, log: Path | None) -> Iterator[None]:
    """Meanwhile, what child processes say of `what` in the log reaches the terminal too.

    They write there alone, since they may outlive us and the terminal. log: None where their output is on the terminal anyway.
    """
    if log is None:
        yield
        return
    over = threading.Event()
    with open(log, encoding="utf-8", errors="replace") as lines:
        lines.seek(0, os.SEEK_END)

        def follow() -> None:
            last = False
            while not last:
                last = over.wait(1)
                for line in iter(lines.readline, ""):
                    if line.startswith(f"{what}: "):
                        cli.tell(line, end="")

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Says that an engine is being loaded, which takes minutes for a large target, and how long it took."""
    cli.say(f"{what}: the engine loads")
    started = time.monotonic()
    yield
    cli.say(f"{what}: the engine is loaded, {duration(time.monotonic() - started)} taken")


def duration(seconds: float) -> str:
    """Seconds for a person: "1 h 05 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
