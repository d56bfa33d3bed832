"""The plan of a cluster: lengths, engines, the best split, its page and its refusals."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from proximo.algorithms import GRPO
from proximo.cli.commands.plan import run as plan_command
from proximo.planning.cards import card
from proximo.planning.ranks import RankCount
from proximo.planning.shapes import read_shape
from proximo.rl.config import RunConfig, SamplingOptions, TrainingOptions
from proximo_lab.cluster_plan.cli import _remarks
from proximo_lab.cluster_plan.hardware import Engine, smallest_engine
from proximo_lab.cluster_plan.lengths import Recorded, Tailed
from proximo_lab.cluster_plan.pictures import cluster_page
from proximo_lab.cluster_plan.search import Cluster, ClusterPlan, Point, plan_cluster
from proximo_lab.cluster_plan.timings import PREDICTED, Timings

CONFIG = RunConfig(
    model="0.6B",
    algorithm=replace(GRPO, kl=None),
    sampling=SamplingOptions(max_tokens=2048),
    training=TrainingOptions(groups=16, group_size=4, minibatches=1),
)
CLUSTER = Cluster(card("H100"), gpus=6)


@pytest.fixture(scope="module")
def plan() -> ClusterPlan:
    return plan_cluster(CONFIG, CLUSTER, Tailed(500, 2048), prompt_tokens=100, staleness=(0, 1))


def test_lengths_have_their_mean_after_the_cut():
    drawn = Tailed(500, 2048, 1.2).draw(20_000, 4, seed=1)
    assert drawn.mean() == pytest.approx(500, rel=0.02)
    assert drawn.max() == 2048
    assert np.unique(Tailed(700, 2048, 0.0).draw(5, 2, seed=0)).tolist() == [700]
    assert np.unique(Tailed(2048, 2048, 0.0).draw(5, 2, seed=0)).tolist() == [2048]
    few, many = (Tailed(500, 2048).draw(groups, 4, seed=3) for groups in (5, 50))
    assert (few == many[:5]).all()


def test_recorded_groups_stay_together():
    drawn = Recorded("runs/a", ((1, 2), (100, 200, 300))).draw(200, 4, seed=0)
    assert {frozenset(row) <= {1, 2} or frozenset(row) <= {100, 200, 300} for row in drawn.tolist()} == {True}


def test_an_engine_has_the_fewest_gpus_that_hold_the_model():
    assert smallest_engine(read_shape("0.6B"), 2, card("RTX4090")).gpus == 1
    assert smallest_engine(read_shape("14B"), 2, card("A100-40")).gpus == 2
    engine = Engine(read_shape("0.6B"), 2, card("H100"), 1)
    assert engine.slots(1000, engine.room + 1) == 0
    engine = Engine(read_shape("14B"), 2, card("H100"), 1)
    one, two = engine.engines(1, 8), replace(engine, gpus=2).engines(1, 8)
    assert two.per_token == pytest.approx(one.per_token / 2)
    assert two.base < one.base


def test_the_best_split_is_the_quickest_that_was_tried(plan):
    for staleness in (0, 1):
        tried = [each for each in plan.points if each.staleness == staleness]
        assert plan.best(staleness).seconds == min(each.seconds for each in tried)
        assert sorted(each.ranks.number for each in tried) == [1, 2, 3, 4, 5]
        assert all(each.ranks.number + each.sampling == 6 for each in tried)
    assert plan.best(1).seconds < plan.best(0).seconds
    assert plan.best(1).outcome.oldest == 1
    assert 0 < plan.best(1).used <= 1


def test_a_runs_own_timings_scale_the_seconds(plan):
    slower = plan_cluster(
        CONFIG, CLUSTER, Tailed(500, 2048), prompt_tokens=100, staleness=(0,), timings=Timings(2.0, 2.0, "twice")
    )
    push = plan.best(0).outcome.pushing
    assert slower.best(0).seconds - push == pytest.approx(2 * (plan.best(0).seconds - push))
    assert PREDICTED.remark == plan.timings.remark


def test_the_page_has_a_picture_of_each_and_no_script(plan):
    page = cluster_page(plan)
    for title in ("Seconds a step", "Staleness", "The length tail", "Learner and requests in flight"):
        assert f'aria-label="{title}"' in page
    assert "<script" not in page
    assert page.count('class="bar"') >= 4


def test_the_command_prints_a_table_or_json(capsys, tmp_path):
    flags = ["--model", "0.6B", "--gpu", "H100", "--gpus", "4", "--training.groups", "8", "--mean-tokens", "100"]
    flags += ["--staleness", "1", "--training.group-size", "4"]
    assert plan_command([*flags, "--report", str(tmp_path / "plan.html")]) == 0
    shown = capsys.readouterr().out
    assert "4 H100" in shown
    assert "trained tokens by age" in shown
    assert "GiB of a learner rank" in shown
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert plan_command([*flags, "--switch", "between", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["1"]["token_ages"] == {"1": 1.0}


def _taking(point: Point, seconds: float) -> Point:
    ends = [end * seconds / point.seconds for end in point.outcome.ends]
    return replace(point, outcome=replace(point.outcome, ends=ends))


def test_the_least_stale_split_near_the_fastest_is_shown_with_its_flags(plan):
    fresh, stale = plan.best(0), plan.best(1)
    near, far = (_taking(fresh, share * stale.seconds) for share in (1.04, 1.06))
    assert replace(plan, points=(near, stale)).preferred is near
    assert replace(plan, points=(far, stale)).preferred is stale
    split = replace(stale, ranks=RankCount(5, 5), engines=3, engine_gpus=1)
    flags = "--ranks 5 --sampler.type Fleet --sampler.engines 3 --ahead.staleness 1"
    assert split.flags("between") == flags
    assert split.flags("in_flight") == f"{flags} --ahead.switch in_flight"
    sharded = replace(split, ranks=RankCount(16, 8), engine_gpus=2, staleness=0)
    assert sharded.flags("in_flight") == (
        "--ranks 16 --ranks.shard 8 --sampler.type Fleet --sampler.engines 3 --sampler.tensor-parallel 2"
    )
    assert any(line == f"to run it so: proximo train … {plan.preferred.flags('in_flight')}" for line in _remarks(plan))


def test_ranks_beyond_the_groups_of_an_update_are_not_planned_and_engines_hold_the_longest_request(capsys):
    flags = ["--gpus", "64", "--staleness", "4", "--training.groups", "16", "--training.minibatches", "1", "--json"]
    assert plan_command(["--model", "0.6B", "--gpu", "H100", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["learners"] for each in found["points"]} == {8, 16}
    shape = read_shape("8B")
    assert smallest_engine(shape, 2, card("A100-40")).gpus == 1
    assert smallest_engine(shape, 2, card("A100-40"), longest=200_000).gpus == 2


def test_gpus_that_are_left_over_are_not_used(capsys):
    flags = ["--gpus", "20", "--engine-gpus", "8", "--staleness", "0", "--mean-tokens", "100"]
    assert plan_command(["--model", "0.6B", "--gpu", "H100", *flags]) == 0
    said = capsys.readouterr().out
    learners, engines, used, left = re.findall(
        r"(\d+) learner ranks and (\d+) engines of 8.* (\d+)% of .* (\d+) GPUs", said
    )[0]
    assert int(learners) + 8 * int(engines) + int(left) == 20
    assert int(left) > 0
    assert int(used) <= 100 * (20 - int(left)) / 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "1"], "gpus is 1: give at least 2"),
        (["--gpus", "many"], "--gpus many: give a whole number"),
        (["--sigma", "1"], "--sigma is for a plan of many GPUs: give --gpus too"),
        (["--gpus", "4", "--sigma", "2"], "--sigma 2 is the tail of lengths around their mean: give --mean-tokens too"),
        (["--gpus", "4", "--sigma", "50", "--mean-tokens", "100"], "sigma is 50: give 0 to 5"),
        (["--gpus", "4", "--sigma", "nan", "--mean-tokens", "100"], "sigma is nan: give 0 to 5"),
        (["--gpus", "32", "--network", "0"], "network is 0: give bytes per second, above 0"),
        (["--gpus", "32", "--network", "nan"], "network is nan: give bytes per second, above 0"),
        (["--gpus", "4", "--switch", "never"], "--switch never: give one of in_flight, between, aggregate"),
        (["--gpus", "4", "--timed-on", "H200"], "--timed-on says where a run was timed: give --from-run too"),
        (["--gpus", "4", "--staleness", "-1"], "staleness is -1: give 0 or more"),
        (["--gpus", "4", "--staleness", "1,500"], "staleness is 500: give at most 64 steps"),
        (["--gpus", "4", "--from-run", "nowhere"], "nowhere is no run"),
        (["--gpus", "2", "--model", "14B"], "gpus is 2: with one engine of 1 the other 1 cannot hold the learner"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        plan_command(["--model", "0.6B", "--gpu", "H100", *flags][2 if "--model" in flags else 0 :])
    assert message in capsys.readouterr().err
