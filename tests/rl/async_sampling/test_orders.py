"""Which steps are sampled ahead, with which weights; the thread that does it, and how it is stopped."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from proximo.algorithms import GRPO
from proximo.losses import SamplerPolicy, TokenTruncated
from proximo.rl.async_sampling.one_step_ahead import OneStepAhead, SamplingThread
from proximo.rl.monitor import STALE_STEPS, StalenessCheck
from proximo.runs.records import Collected, DataCursor, Pending
from proximo.samplers.sampler import Snapshot

CPU = torch.device("cpu")
SOON = 60.0
"""Seconds that nothing here needs; a bound, not a measure."""


def weights(version: int = 0, value: float = 0.0) -> Snapshot:
    """Of a policy with one weight."""
    return Snapshot(version, [torch.full((1,), value)])


def found(step: int, cursor: DataCursor) -> Collected:
    """The rollouts of a step: none, and the cursor one further."""
    return Collected((), (), DataCursor(cursor.next_problem + 1), rounds=step, sampled_tokens=0)


class Calls:
    """A sampler that notes step, cursor and weights of each call."""

    def __init__(self, at: Callable[[int], None] = lambda step: None) -> None:
        self.at, self.seen = at, list[tuple[int, int, int, float]]()

    def __call__(self, cursor: DataCursor, step: int, weights: Snapshot) -> Collected:
        self.at(step)
        self.seen.append((step, cursor.next_problem, weights.version, weights.weights[0].item()))
        return found(step, cursor)


def trained(
    ahead: OneStepAhead, first: int, steps: int, cursor: DataCursor | None = None
) -> tuple[list[int], DataCursor]:
    """Go through some steps, each of which changes the weights; the version that sampled each, and the last cursor."""
    versions, cursor = [], cursor or DataCursor()
    for step in range(first, steps):
        versions.append(ahead.start_step(weights(2 * step, step / 10), cursor, step))
        collected = ahead.collected()
        assert collected.rounds == step
        cursor = collected.cursor
    return versions, cursor


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_a_step_is_sampled_with_the_weights_of_some_steps_ago(staleness: int):
    calls = Calls()
    ahead = OneStepAhead(calls, CPU, staleness=staleness, steps=4)
    versions, cursor = trained(ahead, 0, 4)
    older = [max(step - staleness, 0) for step in range(4)]
    assert versions == [2 * step for step in older]
    # In order, each once, from the cursor that the one before left; nothing beyond the last step.
    assert calls.seen == [(step, step, 2 * old, pytest.approx(old / 10)) for step, old in enumerate(older)]
    assert cursor.next_problem == 4
    assert ahead.active == ()
    ahead.close()


def test_active_steps_are_bounded_and_stay_until_they_are_collected():
    go = threading.Event()

    def at(step: int) -> None:
        assert go.wait(SOON)

    ahead = OneStepAhead(Calls(at), CPU, staleness=2, steps=9)
    ahead.start_step(weights(), DataCursor(), 0)
    assert [order.step for order in ahead.active] == [0, 1, 2]
    assert {order.state for order in ahead.active[1:]} == {"waiting"}
    assert ahead.pending().ahead == ()
    go.set()
    ahead.collected()
    assert [order.step for order in ahead.active] == [1, 2]
    ahead.active[-1].result.result(SOON)
    assert [order.state for order in ahead.active] == ["graded", "graded"]
    ahead.start_step(weights(2), DataCursor(1), 1)
    assert [order.step for order in ahead.active] == [1, 2, 3]
    ahead.close()


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_resume_asks_again_only_for_what_is_not_graded(known: int):
    whole = Calls()
    ahead = OneStepAhead(whole, CPU, staleness=2, steps=7)
    _, cursor = trained(ahead, 0, 3)
    ahead.active[-1].result.result(SOON)
    graded, kept = ahead.pending().ahead, ahead.pending().older_weights
    assert (len(graded), [each.version for each in kept]) == (2, [2, 4])
    trained(ahead, 3, 7, cursor)
    ahead.close()
    calls = Calls()
    resumed = OneStepAhead(calls, CPU, staleness=2, steps=7)
    resumed.restore(Pending(ahead=graded[:known], older_weights=kept))
    versions, last = trained(resumed, 3, 7, cursor)
    resumed.close()
    assert versions == [2, 4, 6, 8]
    assert last.next_problem == 7
    assert calls.seen == whole.seen[3 + known :]


def test_other_work_comes_before_steps_that_wait():
    begun, go, done = threading.Event(), threading.Event(), list[object]()

    def at(step: int) -> None:
        begun.set()
        assert go.wait(SOON)
        done.append(step)

    ahead = OneStepAhead(Calls(at), CPU, staleness=2, steps=9)
    ahead.start_step(weights(), DataCursor(), 0)
    assert begun.wait(SOON)
    threading.Timer(0.05, go.set).start()
    ahead.now(lambda: done.append("evaluation"))
    assert done[:2] == [0, "evaluation"]
    ahead.collected()
    ahead.close()


def test_what_a_step_raises_comes_with_that_step():
    def at(step: int) -> None:
        if step == 1:
            raise ValueError("the grader is broken")

    ahead = OneStepAhead(Calls(at), CPU, staleness=2, steps=9)
    trained(ahead, 0, 1)
    ahead.start_step(weights(), DataCursor(1), 1)
    with pytest.raises(ValueError, match="the grader is broken"):
        ahead.collected()
    assert ahead.pending().ahead == ()
    ahead.close()


# The thread


def test_a_job_that_runs_out_of_memory_is_done_again_while_the_caller_waits():
    worker, tries, waits = SamplingThread("test", CPU), list[bool](), list[bool]()

    def work() -> str:
        tries.append(True)
        waits.append(worker._caller_waits)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    future = worker.submit(work)
    assert worker.wait(future) == "done"
    assert (len(tries), waits[1], worker.repeated) == (2, True, 1)
    with pytest.raises(torch.OutOfMemoryError, match="always"):
        worker.wait(worker.submit(always_out_of_memory))
    worker.close()


def always_out_of_memory() -> None:
    raise torch.OutOfMemoryError("always")


def test_out_of_memory_is_told_once():
    ahead = OneStepAhead(Calls(), CPU, staleness=1, steps=9)
    assert ahead.take_notices() == []
    with pytest.raises(torch.OutOfMemoryError):
        ahead.now(always_out_of_memory)
    [notice] = ahead.take_notices()
    assert notice.kind == "out_of_memory"
    assert "was done again alone, with the same result" in notice.message
    assert ahead.take_notices() == []
    ahead.close()


def test_closing_ends_a_job_in_the_middle_and_drops_the_others():
    worker, begun = SamplingThread("test", CPU), threading.Event()

    def endless() -> None:
        begun.set()
        while True:
            pass

    running, waiting = worker.submit(endless), worker.submit(endless)
    assert begun.wait(SOON)
    worker.close()
    assert worker._thread is not None
    assert not worker._thread.is_alive()
    assert not running.done()
    assert not waiting.running()


def test_closing_ends_a_job_that_waits_for_memory():
    worker, failed = SamplingThread("test", CPU), threading.Event()

    def work() -> None:
        failed.set()
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker.submit(work)
    assert failed.wait(SOON)
    worker.close()
    assert worker._thread is not None
    assert not worker._thread.is_alive()
    assert worker.repeated == 0


def test_closing_ends_a_thread_that_waits():
    worker = SamplingThread("test", CPU)
    worker.close()  # never started
    worker = SamplingThread("test", CPU)
    assert worker.wait(worker.submit(lambda: 3)) == 3
    worker.close()
    assert worker._thread is not None
    assert not worker._thread.is_alive()


# The warning

ROW = {"mismatch_kl": 0.02, "mismatch_ess": 0.8}


def test_older_weights_without_a_correction_are_reported_once_with_the_gap():
    watch = StalenessCheck(2, GRPO)
    first = {"mismatch_kl": 9.0, "mismatch_ess": 0.1}  # of the policy's own weights: does not count
    told = [watch.update(row) for row in [{"reward": 1.0}, first, *[ROW] * (STALE_STEPS + 3)]]
    assert told.count(None) == len(told) - 1
    [warning] = filter(None, told)
    assert told.index(warning) == STALE_STEPS + 1
    assert "ahead.staleness is 2" in warning
    assert "0.02 nats a token" in warning
    assert "80% of the tokens" in warning


def test_a_correction_is_not_reported():
    for algorithm, staleness in (
        (replace(GRPO, correct=TokenTruncated()), 1),
        (replace(GRPO, anchor=SamplerPolicy()), 1),
        (GRPO, 0),
    ):
        watch = StalenessCheck(staleness, algorithm)
        assert [watch.update(ROW) for _ in range(9)] == [None] * 9
