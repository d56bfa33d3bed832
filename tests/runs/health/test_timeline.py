"""What a row of timeline.jsonl says of a step, computed by hand, and the rules on a whole run."""

from typing import Any

import pytest

from proximo.runs.health import findings
from proximo.runs.health.timeline import bars, loads, with_loads


def row(step: int, *intervals: list[Any], **more: Any) -> dict[str, Any]:
    return {"step": step, "seconds": 10.0, "intervals": list(intervals), **more}


def sampled(lane: str, start: float, end: float, tokens: int) -> list[Any]:
    return [lane, "sample", start, end, {"tokens": tokens}]


TWO_ENGINES = row(
    7,
    ["learner", "push", 0.0, 1.0, {}],
    ["learner", "rollout", 1.0, 6.0, {}],
    ["learner", "grade", 5.0, 6.0, {}],  # inside the rollout
    ["learner", "update", 6.0, 10.0, {}],
    *(["engine-0", "push", 0.0, 0.5, {}], ["engine-0", "probe", 0.5, 1.0, {}], sampled("engine-0", 1.0, 6.0, 500)),
    *(["engine-1", "push", 0.0, 0.5, {}], sampled("engine-1", -3.0, 4.5, 90)),
    staleness={"0": 3, "2": 1},
)


def test_who_is_idle_and_who_is_slow():
    found = loads(TWO_ENGINES)
    assert found["learner_idle"] == 0.5
    # engine-0: 1 + 5 s of 10; engine-1: from the beginning of the row to 4.5 s, with the push inside.
    assert found["engines_idle"] == pytest.approx(1 - (0.6 + 0.45) / 2)
    assert found["push_share"] == pytest.approx(0.1)
    assert (found["pace"], found["slowest"], found["slowest_is_rank"]) == (pytest.approx(0.2), 1, 0)
    assert found["is_stale"] == 1.0


def test_a_process_that_samples_itself_is_not_idle():
    assert loads(row(1, ["learner", "rollout", 0.0, 9.0, {}], staleness={"0": 4})) == {}
    assert loads(row(1, staleness={"9" * 5000: 1}))["is_stale"] == 1, "more digits than Python reads"


def test_ranks_are_compared_by_the_seconds_that_they_sample():
    found = loads(row(1, *([f"rank {rank}", "sample", 0.0, end, {}] for rank, end in enumerate((2.0, 2.0, 8.0)))))
    assert (found["pace"], found["slowest"], found["slowest_is_rank"]) == (0.25, 2, 1)
    assert "learner_idle" not in found


def test_what_is_damaged_is_skipped():
    wrong = [
        None,
        ["a"],
        ["a", 1, 0.0, 1.0, {}],
        ["a", "b", "c", 1.0, {}],
        ["a", "b", 4.0, 3.0, {}],
        ["a", "b", 11, 12, {}],
    ]
    assert list(bars(row(1, *wrong))) == []
    assert loads({"step": 1, "intervals": [["learner", "rollout", 0.0, 1.0, {}]]}) == {}
    assert [bar.numbers for bar in bars(row(1, ["a", "b", 0.0, 99.0, {"n": "x", "m": 2}]))] == [{"m": 2.0}]


def test_a_run_whose_learner_waits_is_found_and_resumed_steps_count_once():
    metrics = [{"step": step, "sampled_tokens": 9, "outcome": 0.5} for step in range(1, 16)]
    waiting = [["learner", "rollout", 0.0, 8.0, {}], sampled("engine-0", 0.0, 8.0, 9)]
    busy = [["learner", "rollout", 0.0, 4.0, {}], sampled("engine-0", 0.0, 8.0, 9)]
    [found] = findings(with_loads(metrics, [row(step, *waiting) for step in range(1, 16)]))
    assert (found.rule, found.step) == ("idle-learner", 10)
    again = [row(step, *intervals) for intervals in (waiting, busy) for step in range(1, 16)]
    assert findings(with_loads(metrics, again)) == []


def test_the_gap_counts_only_with_older_weights():
    metrics = [
        {"step": step, "sampled_tokens": 9, "outcome": 0.5, "correction": 1.0, "mismatch_ess": 0.9}
        | {"mismatch_kl": 1e-4 if step < 25 else 2e-2}
        for step in range(50)
    ]
    stale = with_loads(metrics, [row(step, staleness={"1": 4}) for step in range(50)])
    assert [each.rule for each in findings(stale)] == ["growing-gap"]
    assert findings(with_loads(metrics, [row(step, staleness={"0": 4}) for step in range(50)])) == []
