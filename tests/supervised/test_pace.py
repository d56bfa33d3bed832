"""Pace of a stage, by a clock that is told the time."""

from proximo.supervised.pace import RowPace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rows_in_a_second_and_the_time_that_is_left():
    clock = Clock()
    pace = RowPace(clock)
    clock.now += 4
    pace.stepped(8)
    assert pace.line(left=30) == "2 rows/s, 2 min left"
    clock.now += 2
    pace.stepped(9)
    # The speed is that since the last line, the rest by all steps so far: 6 seconds for two.
    assert pace.line(left=10) == "4.5 rows/s, 30 s left"
    clock.now += 1
    pace.stepped(1)
    assert pace.line(left=0) == "1 rows/s"


def test_lines_are_due_every_ten_steps_at_the_end_and_where_steps_are_slow():
    clock = Clock()
    pace = RowPace(clock)
    assert [step for step in range(1, 24) if pace.is_due(step, 23)] == [10, 20, 23]
    clock.now += 31
    assert pace.is_due(1, 23)
    pace.stepped(1)
    pace.line(22)
    assert not pace.is_due(2, 23)
