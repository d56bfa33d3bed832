"""Phases are measured on the thread that is watched, and are nothing elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

import pytest

from proximo.system.phases import is_watched, phase, watched
from proximo.system.timeline import Lanes


class Names:
    """Watch that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.heard.append(name)
        try:
            yield
        finally:
            self.heard.append(f"/{name}")


def test_without_a_watch_a_phase_is_nothing():
    assert not is_watched()
    with phase("decoding"):
        assert not is_watched()


def test_phases_lie_in_each_other_and_end_with_an_error():
    names = Names()

    def fail() -> None:
        with phase("rollout"), phase("decoding"):
            assert is_watched()
            raise KeyError

    with watched(names), pytest.raises(KeyError):
        fail()
    assert names.heard == ["rollout", "decoding", "/decoding", "/rollout"]
    assert not is_watched()


def test_intervals_of_the_time_line_are_phases():
    names, lanes = Names(), Lanes()
    with watched(names), lanes.during("learner", "evaluate"), phase("decoding"):
        pass
    assert names.heard == ["evaluate", "decoding", "/decoding", "/evaluate"]


def test_a_thread_with_the_same_context_is_not_watched():
    names, seen = Names(), []

    def work() -> None:
        with phase("grading"):
            seen.append(is_watched())

    with watched(names):
        thread = threading.Thread(target=copy_context().run, args=(work,))
        thread.start()
        thread.join()
    assert seen == [False]
    assert names.heard == []
