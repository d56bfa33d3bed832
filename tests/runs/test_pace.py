"""The time that is left of a run, from a clock set by hand."""

import pytest

from proximo.runs.pace import Pace, duration


def test_what_is_left_follows_from_the_steps_so_far():
    now = [100.0]
    pace = Pace(lambda: now[0])
    pace.start(10)
    shown = []
    for step, seconds in enumerate((30.0, 2.0, 6.0), 1):  # the first compiles; an evaluation lies before the third
        now[0] += seconds
        shown.append(pace.left(step))
    assert shown == ["4 min left", "16 s left", "28 s left"]
    assert pace.left(10) == ""


def test_a_resumed_run_counts_its_own_steps_alone():
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.start(100)
    for step in (91, 92, 93):
        now[0] += 3.0
        left = pace.left(step)
    assert left == "21 s left"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.42, "0.42 s"), (89.0, "89 s"), (90.0, "2 min"), (5399.0, "90 min"), (9000.0, "2.5 h")]
)
def test_durations(seconds: float, shown: str):
    assert duration(seconds) == shown
