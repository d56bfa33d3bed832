"""Intervals on lanes, by a clock that a test sets."""

from types import SimpleNamespace

import pytest

from proximo.system import timeline as recorded
from proximo.system.timeline import Interval, Lanes


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(recorded, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_what_several_do_at_once_is_one_interval(clock):
    lanes = Lanes()
    one, other = lanes.during("engine-0", "sample", version=3), lanes.during("engine-0", "sample")
    one.__enter__()
    clock.now = 1.0
    other.__enter__()
    lanes.count("engine-0", "sample", tokens=5)
    clock.now = 2.0
    one.__exit__(None, None, None)
    lanes.count("engine-0", "sample", tokens=2)
    clock.now = 4.0
    other.__exit__(None, None, None)
    assert lanes.take() == [Interval("engine-0", "sample", 0.0, 4.0, {"version": 3, "tokens": 7})]
    assert lanes.take() == []


def test_an_open_interval_is_cut_where_it_is_taken(clock):
    lanes = Lanes()
    with lanes.during("sampler", "sample", step=1):
        clock.now = 2.0
        lanes.count("sampler", "sample", tokens=5)
        assert lanes.take() == [Interval("sampler", "sample", 0.0, 2.0, {"step": 1, "tokens": 5})]
        clock.now = 5.0
    lanes.add(Interval("rank 1", "update", 1.0, 3.0))
    assert lanes.take() == [
        Interval("sampler", "sample", 2.0, 5.0, {"step": 1}),
        Interval("rank 1", "update", 1.0, 3.0),
    ]


def test_a_failure_ends_an_interval(clock):
    lanes = Lanes()

    def fail() -> None:
        with lanes.during("learner", "update"):
            clock.now = 1.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert lanes.take() == [Interval("learner", "update", 0.0, 1.0)]
