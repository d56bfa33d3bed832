"""Deadlines of templates: one thread for all of them, and nothing that strikes later."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from proximo.models.tokens import deadlines
from proximo.models.tokens.deadlines import AGAIN, _Deadline, within


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


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_that_is_forked_inside_a_deadline_has_it_too():
    """And no other's: those of other threads ended with them."""
    child = -1
    try:
        with within(9.0, ValueError), within(0.5, Late):
            child = os.fork()
            if child == 0:
                signal.alarm(5)  # so that none is left behind
                while True:
                    pass
    except Late:
        if child == 0:
            os._exit(7)
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow("waits for errors that are raised again")
def test_an_error_that_is_swallowed_is_raised_again():
    """In a template that looks up what is not there, Jinja may swallow it."""
    arrived = []

    def swallow() -> None:
        while len(arrived) < 3:
            try:
                spin()
            except Late:
                arrived.append(time.monotonic())
        spin()

    with pytest.raises(Late), within(0.05, Late):
        swallow()
    assert len(arrived) == 3


@pytest.mark.slow("waits for deadlines in each other")
def test_a_deadline_ends_a_block_whose_inner_ones_take_its_error():

    class Later(Exception):
        pass

    def inner() -> None:
        while True:
            with suppress(Late), within(0.03, Late):
                spin()

    with pytest.raises(Later), within(0.1, Later):
        inner()


@pytest.mark.slow("waits longer than an error is raised again")
def test_nothing_is_raised_behind_a_block_whose_end_was_struck(monkeypatch):
    """As where the error arrives before the end is noted."""

    def struck(self: _Deadline) -> None:
        raise Late

    def block() -> None:
        with within(0.02, Late):
            spin()

    monkeypatch.setattr(_Deadline, "end", struck)
    with pytest.raises(Late):
        block()
    end = time.monotonic() + 3 * AGAIN
    while time.monotonic() < end:
        pass


def test_what_something_makes_of_the_error_is_the_error_again():
    """Jinja looks for the line of a template, and there is none at some instructions."""

    def mistaking() -> None:
        try:
            spin()
        except Late:
            raise TypeError("'<=' not supported between instances of 'int' and 'NoneType'") from None

    with pytest.raises(Late), within(0.05, Late):
        mistaking()
    with pytest.raises(KeyError), within(10.0, Late):
        raise KeyError("before the time is over")


def test_a_thread_that_cannot_be_started_leaves_no_deadline_behind(monkeypatch):
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(deadlines, "_watch", deadlines._Watch())
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start"), within(0.02, Late):
            pass
    with pytest.raises(Late), within(0.05, Late):
        spin()
