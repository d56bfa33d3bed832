"""The time line of a step: what the page is sent, and what it draws."""

import json

import pytest

from proximo.insight.folder import RunFolder
from proximo.insight.page.timeline import gantt, timeline
from tests.insight.page.browser import append, write_run

ROW = {
    "step": 3,
    "began": 1000.0,
    "seconds": 10.0,
    "intervals": [
        ["engine-10", "sample", 0.0, 6.0, {"tokens": 40, "version": 2}],
        ["engine-2", "sample", -1.0, 4.0, {"tokens": 30}],
        ["learner", "rollout", 0.0, 6.0, {}],
        ["learner", "update", 6.0, 9.0, {}],
        ["rank 1", "update", 6.0, 9.0, {}],
    ],
    "in_flight": 3,
    "graded": 1,
    "versions": {"2": 1, "10": 2},
    "staleness": {"1": 4},
}


def test_lanes_are_in_order_and_the_learner_waits_while_engines_sample():
    found = gantt(ROW)
    assert [lane["name"] for lane in found["lanes"]] == ["learner", "rank 1", "engine-2", "engine-10"]
    assert [bar[:3] for bar in found["lanes"][0]["bars"]] == [["wait", 0.0, 6.0], ["update", 6.0, 9.0]]
    assert [lane["idle"] for lane in found["lanes"]] == [7.0, 7.0, 6.0, 4.0]
    assert found["queue"] == {"in_flight": 3, "graded": 1}
    assert list(found["versions"].items()) == [("2", 1), ("10", 2)]


def test_a_learner_that_samples_itself_does_not_wait():
    [lane] = gantt(ROW | {"intervals": [["learner", "rollout", 0.0, 6.0, {}]]})["lanes"]
    assert (lane["bars"][0][0], lane["idle"]) == ("rollout", 4.0)


def test_a_step_is_looked_up_and_the_last_row_of_it_counts(tmp_path):
    run = write_run(tmp_path / "a")
    assert timeline(RunFolder(run), {}) == {"steps": []}
    append(run, "timeline", ROW, ROW | {"step": 4}, ROW | {"seconds": 20.0}, {"step": "x"}, {"step": 9})
    found = timeline(RunFolder(run), {"step": "3"})
    assert (found["step"], found["steps"], found["seconds"]) == (3, [3, 4], 20.0)
    assert timeline(RunFolder(run), {})["step"] == 4
    with pytest.raises(LookupError, match="no time line of step 7: there are those of 3 to 4"):
        timeline(RunFolder(run), {"step": "7"})
    json.dumps(found, allow_nan=False)


def test_the_page_draws_it_and_goes_through_steps(tmp_path, window):
    rows = [{"step": step, "outcome": 0.5, "sampled_tokens": 9} for step in (3, 4)]
    run = write_run(tmp_path / "a", rows, timings=[{"step": step, "rollout": 6.0, "tokens": 9} for step in (3, 4)])
    append(run, "timeline", ROW, ROW | {"step": 4, "intervals": ROW["intervals"][2:4]})
    page = window.page
    page.goto(window.serve(tmp_path).address(run="a", tab="performance"))
    heading = "() => document.querySelector('.timeline:not([hidden]) h3')?.textContent"
    assert "step 4" in window.until(heading)
    bars = "() => document.querySelectorAll('.timeline .scroll > svg rect:not(.lane)').length"
    assert page.evaluate(bars) == 2
    page.click(".timeline button[title='the step before']")
    assert window.until(f"() => ({heading})().includes('step 3')")
    assert page.evaluate(bars) == 5
    assert "Versions in flight: 2 (1), 10 (2)." in page.text_content(".timeline")
    assert "tokens 40" in page.evaluate("() => [...document.querySelectorAll('.timeline title')].at(-1).textContent")
    page.keyboard.press("1")
    assert window.until("() => !document.querySelector('.timeline:not([hidden])')")


def test_of_several_runs_it_says_whose_it_is(tmp_path, window):
    for name in ("a", "b"):
        rows = [{"step": 3, "outcome": 0.5, "sampled_tokens": 9}]
        run = write_run(tmp_path / name, rows, timings=[{"step": 3, "rollout": 6.0, "tokens": 9}])
        append(run, "timeline", ROW)
    window.page.goto(window.serve(tmp_path).address(run="a", tab="performance") + "&run=b")
    heading = "() => document.querySelector('.timeline:not([hidden]) h3')?.textContent"
    assert "Time line of step 3 · a" in window.until(heading)
    window.page.click("aside input[type=checkbox] >> nth=1")
    assert window.until(f"() => !({heading})().includes(' · ')")
