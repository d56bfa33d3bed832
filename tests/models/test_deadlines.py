"""Deadlines of templates: one thread for all of them, and nothing that strikes later."""

import os
import threading
import time

import pytest

from proximo.models.tokens.deadlines import within


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "proximo-deadlines"]


class Late(Exception):
    pass


def spin() -> None:
    while True:
        pass


def test_many_deadlines_share_a_thread():
    for _ in range(500):
        with within(10.0, Late):
            pass
    assert len(watchers()) == 1


def test_a_deadline_that_comes_before_those_that_are_waited_for():
    with within(60.0, Late), pytest.raises(Late), within(0.05, Late):
        spin()


def test_each_thread_has_its_own():
    late = []

    def wait() -> None:
        try:
            with within(0.05, Late):
                spin()
        except Late:
            late.append(threading.get_ident())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(late) == sorted(thread.ident or 0 for thread in threads)


def test_what_ended_in_time_is_not_struck_later():
    with within(0.05, Late):
        pass
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_watches_for_itself():
    with within(10.0, Late):
        pass
    child = os.fork()
    if child == 0:
        try:
            with within(0.05, Late):
                while True:
                    pass
        except Late:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
