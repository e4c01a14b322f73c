"""What the progress lines say, on a clock that the test moves."""

import pytest

from aerie import progress


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def lines(capfd):
    return capfd.readouterr().err.splitlines()


def test_time_left_is_that_of_the_work_behind_the_first_update(clock, capfd):
    """60 s for a step that compiles, then one a second: with 11 of 105 done, 94 s are left."""
    shown = progress.Progress("train", 105, "steps")
    clock.now = 60.0
    shown.update(1)
    assert lines(capfd) == ["train: 1/105 steps, 0.0 steps/s, 1 min 00 s taken"]
    for _ in range(10):
        clock.now += 1
        shown.update(1, loss="2.5")
    assert lines(capfd) == ["train: 11/105 steps, 0.2 steps/s, 1 min 34 s left, loss 2.5"]


def test_work_of_an_earlier_attempt_counts_as_done_alone(clock, capfd):
    shown = progress.Progress("regenerate", 1000, "prompts", start=600)
    for clock.now in (1.0, 11.0):
        shown.update(100)
    assert lines(capfd) == ["regenerate: 800/1,000 prompts, 18.2 prompts/s, 20 s left"]
    clock.now = 20.0
    shown.update(200)
    shown.done(failed=1)
    assert lines(capfd)[-1] == "regenerate: 1,000/1,000 prompts, 20.0 prompts/s, 20 s taken, failed 1"
