"""What the studies under experiments/ count: by hand, without a run."""

import json
import re

import pytest
import torch

from proximo_lab.experiments.charts import COLOURS, line_chart
from proximo_lab.experiments.moe_measures import other_experts
from proximo_lab.experiments.moe_report import Record, common_steps, summary, table, write
from proximo_lab.experiments.moe_stability import ARMS
from tests import ROOT


def test_experts_are_compared_as_sets_layer_by_layer():
    old = torch.tensor([[[0, 3], [1, 2]], [[4, 5], [6, 7]]])
    new = torch.tensor([[[3, 0], [1, 4]], [[2, 3], [7, 6]]])
    assert other_experts(old, new).tolist() == [[0.0, 0.5], [1.0, 0.0]]


def record(arm: str, outcomes: list[float], **measures: list[float]) -> Record:
    steps = [
        {"step": step, "outcome": outcome} | {name: values[step] for name, values in measures.items()}
        for step, outcome in enumerate(outcomes)
    ]
    return Record(arm, 0, steps, before=0.3, held_out=outcomes[-1])


STEADY = record("steady", [0.5] * 30, blocked=[0.1] * 30, experts_first=[0.02] * 12 + [0.5] * 18)
FALLEN = record("fallen", [0.5] * 12 + [0.0] * 18, experts_first=[0.04] * 12 + [0.0] * 18)


def test_a_collapse_begins_where_the_outcome_stays_low():
    assert STEADY.collapse is None
    assert FALLEN.collapse == 12
    # A dip that is made good again is none.
    assert record("dip", [0.5] * 10 + [0.0] * 5 + [0.5] * 15).collapse is None


def test_means_are_taken_over_the_steps_before_any_arm_collapses():
    assert common_steps([STEADY, FALLEN]) == {0: 12}
    steady, fallen = summary([STEADY, FALLEN])
    assert steady["steps_counted"] == fallen["steps_counted"] == 12
    assert (steady["experts_first"], fallen["experts_first"]) == pytest.approx((0.02, 0.04))
    assert (steady["steps_with_gradient"], fallen["steps_with_gradient"]) == (30, 0)
    assert "| fallen | 0% | 0.000 | 1 of 1 | 12 of 30 | 4.0% |" in table([STEADY, FALLEN])


def test_results_are_files_that_anything_reads(tmp_path):
    write([STEADY, FALLEN], tmp_path, "moe", {"steps": 30})
    found = json.loads((tmp_path / "moe.json").read_text(), parse_constant=pytest.fail)
    assert [run["collapse_step"] for run in found["runs"]] == [None, 12]
    assert found["runs"][1]["blocked"] is None
    assert len((tmp_path / "moe.csv").read_text().splitlines()) == 61
    drawn = (tmp_path / "moe-outcome.svg").read_text()
    assert drawn.startswith("<svg")
    assert "Task score of the step's rollouts, seeds: 1<" in drawn


def test_more_lines_than_colours_are_still_told_apart(tmp_path):
    line_chart(tmp_path / "many.svg", "Many", {f"arm {n}": [0.0, float(n)] for n in range(len(COLOURS) + 3)})
    lines = re.findall(r'<polyline points="[^"]*" (.*)/>', (tmp_path / "many.svg").read_text())
    assert len(lines) == len(set(lines)) == len(COLOURS) + 3


def test_the_study_of_experts_has_the_arms_and_the_warm_up_of_its_commands():
    source = (ROOT / "lab" / "proximo_lab" / "experiments" / "moe_stability.py").read_text()
    [steps] = re.findall(r'"--warm-steps", type=int, default=(\d+)', source)
    page = (ROOT / "docs" / "studies" / "moe.md").read_text()
    assert "python -m proximo_lab.experiments.moe_stability" in page
    assert "--warm-steps" not in page
    assert f"warm-started by {steps} steps of fine-tuning" in page
    # Two tables for each of two learning rates; the last three arms control for the size of a step.
    assert {page.count(f"\n| {arm} |") for arm in ARMS} == {4}
