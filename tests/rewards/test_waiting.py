"""Rewards that wait do so together; those that compute, draw or remember are asked one after the other."""

import asyncio
import math
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from proximo.processes.pool import Threads
from proximo.rewards import GivenFunction, PythonFunction
from proximo.rewards.scoring import begin_scores, scores_of
from proximo.types import Completion, Problem
from tests import ROOT

FILE = ROOT / "tests/rewards/waiting_rewards.py"


def begun(reward, texts: Sequence[str], folder: Path | None = None) -> list[list[float | None]]:
    """The scores of groups of two, which are begun together."""
    problems = [Problem(text, text, None, {} if folder is None else {"folder": str(folder)}) for text in texts]
    said = [Completion((1,), (-0.1,), text, "stop") for text in texts]
    waiting = [begin_scores(reward, [p] * 2, [each] * 2) for p, each in zip(problems, said, strict=True)]
    return [scores() for scores in waiting]


def test_calls_that_wait_run_at_once_from_the_third_on(tmp_path: Path, grading):
    reward = PythonFunction(f"{FILE}:meet")
    assert begun(reward, ["alone"], tmp_path) == [[0.0, 0.0]]
    assert begun(reward, ["alone"], tmp_path) == [[0.0, 0.0]]
    assert begun(reward, ["a", "b"], tmp_path) == [[1.0, 1.0], [1.0, 1.0]]  # each waits for the other
    assert grading.failures.take() == []


def test_a_function_that_computes_keeps_one_process(grading):
    reward = PythonFunction(f"{FILE}:busy")
    first = begun(reward, ["0"])[0][0]
    assert begun(reward, "123") == [[first, first]] * 3


def test_at_once_limits_the_processes(grading):
    reward = PythonFunction(f"{FILE}:idle", at_once=1)
    first = begun(reward, ["0"])[0][0]
    assert begun(reward, "12") == [[first, first]] * 2
    with pytest.raises(ValueError, match="reward.at_once is 0"):
        PythonFunction(f"{FILE}:idle", at_once=0)


def test_memory_limits_the_processes_too(grading):
    """A worker uses some 15 MB, so there is no room for two of them."""
    reward = PythonFunction(f"{FILE}:idle", memory_mb=64)
    first = begun(reward, ["0"])[0][0]
    grading.workers(reward._job)._workers[0].memory = 33 * 2**20
    assert begun(reward, "12") == [[first, first]] * 2


def test_a_worker_keeps_its_event_loop_between_calls(grading):
    """A client that a function opens once belongs to one loop."""
    reward = PythonFunction(f"{FILE}:keeps_its_loop")
    [[first, _]] = begun(reward, ["0"])
    assert begun(reward, ["1"]) == [[first, first]]


def test_async_functions_of_this_process_wait_together(grading):
    arrived: list[str] = []

    async def third(completions, **_):
        arrived.append(completions[0])
        while len(arrived) < 3:
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    assert begun(GivenFunction.of(third), "abc") == [[1.0, 1.0]] * 3


def test_other_functions_of_this_process_are_called_in_order_on_the_callers_thread(grading):
    called: list[tuple[str, threading.Thread]] = []

    def drawing(completions, **_):
        called.append((completions[0], threading.current_thread()))
        return [random.random()] * len(completions)

    random.seed(3)
    found = begun(GivenFunction.of(drawing), "abc")
    random.seed(3)
    assert found == [[each, each] for each in (random.random(), random.random(), random.random())]
    assert called == [(text, threading.current_thread()) for text in "abc"]


def test_failures_are_counted_in_the_order_of_the_groups(grading):
    released = threading.Event()

    async def failing(completions, **_):
        if completions[0] == "b":
            released.set()
            raise KeyError("b")
        while not released.is_set():
            await asyncio.sleep(0.001)
        raise LookupError("a")

    found = begun(GivenFunction.of(failing, siblings=True), "ab")
    assert all(score is not None and math.isnan(score) for scores in found for score in scores)
    assert [each.kind for each in grading.failures.take()] == ["LookupError", "KeyError"]


def test_what_a_thread_raises_is_raised_where_it_is_waited_for():
    threads = Threads(2)
    waiting = threads.begin(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        waiting()
    assert threads.begin(lambda: 7)() == 7
    threads.close()


def test_without_a_run_scores_are_there_as_well():
    problems = [Problem("0", "0", None), Problem("1", "1", None)]
    said = [Completion((1,), (-0.1,), "x", "stop")] * 2
    scores = scores_of(PythonFunction(f"{FILE}:idle", at_once=1), problems, said)
    assert scores[0] == scores[1]
