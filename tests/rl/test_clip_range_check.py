"""The remark on a band that is too narrow for a run's lengths: said once, in numbers, and only where it applies."""

import json
import math

import pytest

from proximo.algorithms import DAPO, GRPO, GSPO, GSPO_PRODUCT, GSPO_TOKEN, SAPO
from proximo.rewards.grading import Grading
from proximo.rl.config import RunConfig
from proximo.rl.monitor import BAND_STEPS, ClipRangeCheck, Monitor
from proximo.rl.progress import ProgressLines
from proximo.runs.health.watch import HealthMonitor
from proximo.runs.log import RunLog

SHORT = {"blocked": 0.69, "length": 3.01, "ratio_spread": 0.007}
"""As the demo of two-digit sums has it with GSPO."""


def said(algorithm, rows) -> list[str]:
    watch = ClipRangeCheck(algorithm)
    return [line for row in rows if (line := watch.update(row)) is not None]


@pytest.mark.parametrize("algorithm", [GSPO, GSPO_TOKEN])
def test_a_band_for_long_completions_is_told_of_short_ones_once(algorithm):
    (line,) = said(algorithm, [SHORT] * 40)
    assert "−0.0003 / +0.0004 blocked 69% of the tokens in the first 5 steps" in line
    assert "with 3.01 tokens its standard deviation is 0.007" in line
    # Four times 0.007 is 80 times the mean of the two edges: 0.024 and 0.032, to one digit.
    assert "algorithm.gate.low = 0.02 and algorithm.gate.high = 0.03, about 4 times that, would fit" in line
    assert said(algorithm, [SHORT] * (BAND_STEPS - 1)) == []


def test_steps_without_updates_do_not_count():
    empty = [{"length": 3.0}, {"blocked": math.nan, "length": 3.0, "ratio_spread": 0.1}, {"blocked": None}]
    assert said(GSPO, [SHORT] * 4 + empty) == []
    assert len(said(GSPO, [*empty, *[SHORT] * 4, *empty, SHORT])) == 1


@pytest.mark.parametrize(
    ("algorithm", "row"),
    [
        (GSPO, {**SHORT, "blocked": 0.15, "length": 4000.0, "ratio_spread": 5e-4}),  # as the paper has it
        (GSPO, {**SHORT, "ratio_spread": 2e-4}),  # blocked, but not because the band is narrow
        (GRPO, SHORT),
        (DAPO, SHORT),
        (SAPO, SHORT),
        (GSPO_PRODUCT, SHORT),
    ],
)
def test_where_it_does_not_apply_nothing_is_said(algorithm, row):
    assert said(algorithm, [row] * 40) == []


def test_a_run_that_blocks_later_was_not_too_narrow_from_the_start():
    assert said(GSPO, [{**SHORT, "blocked": 0.1}] * BAND_STEPS + [SHORT] * 40) == []


def test_a_run_prints_the_remark_and_stores_it(tmp_path, capsys):
    monitor = Monitor(RunConfig(algorithm=GSPO), RunLog(tmp_path), ProgressLines(), Grading())
    monitor.health = HealthMonitor([])
    for step in range(1, 9):
        monitor.metrics(step, SHORT)
    [event] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["step"], event["kind"]) == (BAND_STEPS, "narrow_band")
    assert event["message"].startswith("the clip range −0.0003 / +0.0004 blocked 69% of the tokens")
    assert f"warning at step {BAND_STEPS}: the clip range −0.0003 / +0.0004" in capsys.readouterr().err
