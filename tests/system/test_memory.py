"""Limits of memory."""

import resource
import threading
import time

import pytest

from proximo.system.memory import limit_memory, within_memory


def data_limit() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_DATA)


def test_a_limit_holds_for_a_while():
    before = data_limit()
    with within_memory(1 << 28):
        assert data_limit() != before
        with pytest.raises(MemoryError):
            bytearray(1 << 29)
    assert data_limit() == before


def test_a_limit_is_lifted_after_an_error():
    before = data_limit()
    with pytest.raises(KeyError), within_memory(1 << 28):
        raise KeyError
    assert data_limit() == before


def test_two_threads_do_not_leave_a_limit_behind():
    """The one that ended last put back what the other had set: the process kept that limit for good."""
    before, inside = data_limit(), threading.Event()

    def first() -> None:
        with within_memory(1 << 28):
            inside.set()
            time.sleep(0.2)

    def second() -> None:
        inside.wait()
        with within_memory(1 << 28):
            time.sleep(0.3)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert data_limit() == before


def test_the_limit_is_beyond_what_is_held():
    before = data_limit()
    try:
        limit_memory(1 << 30)
        assert len(bytearray(1 << 27)) == 1 << 27
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
