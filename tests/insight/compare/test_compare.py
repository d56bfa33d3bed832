"""Comparisons: budgets, pairing, equal terms, and runs in processes that end well."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import DAPO, GRPO, PPO, explain
from proximo.cli import main
from proximo.config import toml
from proximo.insight.compare import (
    Budget,
    ComparisonFolder,
    ComparisonPlan,
    ComparisonResult,
    RunFailure,
    RunJob,
    fair_line,
    make_plan,
    run_jobs,
)
from proximo.insight.compare import comparison_folder as place_module
from proximo.insight.compare import workers as crew
from proximo.insight.compare.fairness import checks, first_difference
from proximo.insight.compare.measured import MEASURES, MeasuredRun
from proximo.insight.compare.page.verdicts import verdict_lines
from proximo.insight.compare.page.writing import html, markdown, sections
from proximo.insight.compare.paired import answer_difference, seed_difference
from proximo.insight.compare.runs import gathered
from proximo.insight.compare.worker import train_one
from proximo.insight.folder import RunFolder
from proximo.insight.report.run_details import gather
from proximo.losses import Clip, KeepAll, SequenceMean
from proximo.losses.intervals import T95
from proximo.models import tiny_model, tiny_tokenizer
from proximo.processes.forkserver import Starter
from proximo.recipes.presets import FIVE, ablated, with_algorithm
from proximo.rl import run as training_run
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.train import train
from proximo.runs.files import METRICS
from proximo.runs.session import open_session
from proximo.runs.signals import Stopped
from proximo.samplers.sampler import SamplingOptions
from proximo.system.machine import Machine
from proximo.tasks import File
from proximo.tasks.arithmetic import Arithmetic

SMALL = RunConfig(
    task=Arithmetic(operations=("+",), digits=2, held_out=12),
    device="cpu",
    sampling=SamplingOptions(max_tokens=8),
    training=TrainingOptions(
        groups=4, group_size=4, minibatches=2, learning_rate=1e-4, warmup_steps=0, refill_rounds=9
    ),
    evaluation=EvaluationOptions(problems=12, every=1),
)
FLAGS = ["--updates", "4", "--seeds", "2"]
MACHINE = Machine(1, True)


pytestmark = pytest.mark.usefixtures("ordinary_precision")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


# The budget in tokens


def tokens_after(folder: Path) -> list[int]:
    """After each step."""
    total = [0]
    for row in rows(folder):
        if "sampled_tokens" in row:
            total.append(total[-1] + row["sampled_tokens"])
    return total[1:]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow("trains and resumes runs")
def test_a_run_ends_with_the_step_that_reaches_its_tokens(policy, tmp_path):
    small = replace(SMALL, model=policy, training=replace(SMALL.training, groups=2, group_size=2))
    train_one(replace(small, steps=3), tmp_path / "whole", MACHINE)
    after = tokens_after(tmp_path / "whole")
    assert len(after) == 3
    # As many tokens as the second step ends with: none is left for a third.
    limited = replace(small, steps=99, max_generated_tokens=after[1])
    train_one(limited, tmp_path / "limited", MACHINE)
    assert tokens_after(tmp_path / "limited") == after[:2]
    last = rows(tmp_path / "limited")[-1]
    assert last.pop("step") == 2
    assert all(name.startswith("held_out/") for name in last)
    result = json.loads((tmp_path / "limited" / "result.json").read_text())
    assert result["generated_tokens"] == after[1]
    assert result["checkpoint"] == "step-000002"

    # One token more, and there is a third step: that of the run which had it from the start.
    raised = replace(limited, max_generated_tokens=after[1] + 1)
    with pytest.raises(
        ValueError, match=r"max_generated_tokens was \d+, now \d+  \(`allow_change=\['max_generated_tokens'\]`\)"
    ):
        train_one(raised, tmp_path / "limited", MACHINE)
    resume(raised, tmp_path / "limited")
    assert (tmp_path / "limited" / METRICS).read_bytes() == (tmp_path / "whole" / METRICS).read_bytes()
    # Below where it stands it cannot end any more.
    with pytest.raises(
        ValueError, match=f"max_generated_tokens is {after[1]}, but {after[1]} tokens were sampled before"
    ):
        resume(limited, tmp_path / "limited")


@pytest.mark.slow("trains and resumes a run")
def test_a_damaged_row_does_not_keep_a_run_from_going_on(policy, tmp_path):
    small = replace(SMALL, model=policy, training=replace(SMALL.training, groups=2, group_size=2))
    limited = replace(small, steps=99, max_generated_tokens=40)
    train_one(limited, tmp_path, MACHINE)
    after = tokens_after(tmp_path)
    assert len(after) > 1
    before, found = (tmp_path / METRICS).read_bytes(), len(after)
    first = next(line for line in before.splitlines() if b"sampled_tokens" in line)
    (tmp_path / METRICS).write_bytes(before.replace(first, b"?" * len(first)))
    more = replace(limited, max_generated_tokens=after[-1] + 1)
    with pytest.raises(ValueError, match="rows are altered"):
        resume(more, tmp_path)
    resume(more, tmp_path, accept_lost=True)
    kept = [line for line in (tmp_path / METRICS).read_bytes().splitlines() if b"sampled_tokens" in line]
    assert len(kept) == found  # one is damaged, and there is one more


def resume(config: RunConfig, folder: Path, *, accept_lost: bool = False) -> None:
    with open_session(folder, toml.dumps(config), allowed=["max_generated_tokens"], accept_lost=accept_lost) as attempt:
        train(training_run.Run(config, folder, ProgressLines()), attempt)


@pytest.mark.slow("trains a run")
def test_the_command_line_knows_the_budget(policy, tmp_path, capsys):
    flags = [
        "--model",
        policy,
        "--task.type",
        "Arithmetic",
        "--training.groups",
        "4",
        "--evaluation.problems",
        "8",
        "--max-generated-tokens",
        "100",
    ]
    assert main(["train", *flags, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "max_generated_tokens = 100" in printed
    assert "ends sooner once 100 tokens are sampled" in " ".join(printed.replace("\n#", " ").split())
    assert main(["train", *flags, "--run", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == len(tokens_after(tmp_path / "run")) < 150
    assert result["generated_tokens"] >= 100
    assert main(["train", *flags, "--run", str(tmp_path / "run")]) == 0
    assert "for more: --max-generated-tokens N with --allow-change max_generated_tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--max-generated-tokens", "0"])
    assert "max_generated_tokens is 0: give a number of tokens, or None" in " ".join(capsys.readouterr().err.split())


# The plan


def test_budgets_become_steps():
    configs = [("one", SMALL), ("other", replace(SMALL, training=replace(SMALL.training, minibatches=4)))]
    plan = make_plan(configs, 2, Budget("updates", 12))
    assert [each.config.steps for each in plan.contenders] == [6, 3]  # 2 and 4 updates a step
    # 16 completions a step of a token at least: 10 steps have sampled 160 tokens, whatever happens.
    plan = make_plan(configs, 2, Budget("tokens", 150))
    assert [(each.config.steps, each.config.max_generated_tokens) for each in plan.contenders] == [(10, 150)] * 2
    # None is given: 40 steps of two updates are not 40 of four, so there is none; the tokens of both are one.
    with pytest.raises(ValueError, match="no budget in common: give one, `tokens=N` or `updates=N`"):
        make_plan(configs, 2)
    assert (
        make_plan([(name, replace(config, max_generated_tokens=99)) for name, config in configs], 2).budget.amount == 99
    )
    assert make_plan([("a", SMALL), ("b", SMALL)], 2).budget == Budget("updates", 80)


def test_evaluations_on_the_way_are_added_and_not_taken():
    rare = replace(SMALL, evaluation=EvaluationOptions(problems=12))
    plan = make_plan([("a", rare), ("b", SMALL)], 1, Budget("updates", 100))
    assert [each.config.evaluation.every for each in plan.contenders] == [5, 1]


def test_how_often_is_evaluated_by_hand():
    """16 completions a step of 8 tokens at most: N tokens are N/128 steps at least and N/16 at most."""
    config = replace(SMALL, evaluation=EvaluationOptions(problems=12))

    def every(budget: Budget, longest: int = 8) -> int | None:
        limited = replace(config, sampling=SamplingOptions(max_tokens=longest))
        return make_plan([("a", limited), ("b", limited)], 1, budget).contenders[0].config.evaluation.every

    assert every(Budget("tokens", 128_000)) == 100  # 1,000 steps or more: ten evaluations or more
    assert every(Budget("tokens", 128_001)) == 101
    assert every(Budget("tokens", 64_000), longest=512) == 5  # 8 steps or 4,000: never each of them
    assert every(Budget("tokens", 320)) == 5  # 20 steps at most
    assert every(Budget("tokens", 304)) == 1  # 19
    assert every(Budget("updates", 20)) == 1  # ten steps of two updates
    assert every(Budget("updates", 38)) == 2  # 19
    assert every(Budget("updates", 40)) == 5  # 20
    assert every(Budget("updates", 2000)) == 100


def test_names_are_fit_for_folders_and_different():
    plan = make_plan([("GRPO", SMALL), ("grpo", SMALL), ("../<b>|x", SMALL), ("∑", SMALL)], 1)
    assert [each.name for each in plan.contenders] == ["grpo", "grpo-2", "b-x", "config"]
    assert [job.name for job in make_plan([("a", SMALL), ("b", SMALL)], 2).jobs()] == [
        "a-seed-0", "b-seed-0", "a-seed-1", "b-seed-1"
    ]  # fmt: skip


def test_five_is_half_the_demo():
    plan = make_plan(list(FIVE.configs.items()), FIVE.seeds)
    assert [each.name for each in plan.contenders] == ["ppo", "grpo", "dapo", "gspo", "sapo"]
    assert (len(plan.seeds), plan.budget.kind) == (3, "tokens")
    # A step of the demo is 256 completions of three tokens or a little more; it has 150.
    assert 75 * 256 * 3 < plan.budget.amount < 75 * 256 * 3.5
    ours = [replace(each.config, algorithm=GRPO, value=None) for each in plan.contenders]
    assert ours.count(ours[0]) == 5


REFUSED = [
    ([], "needs something to compare"),
    (["grpo"], "grpo is an algorithm: --algorithms grpo OTHER"),
    (["arithmetic"], "two at least"),
    (["arithmetic", "nothing"], "no preset is called 'nothing'"),
    (["arithmetic", "smollm-arithmetic"], "compare on one task"),
    (["arithmetic", "pipeline-demo"], "a chain of runs"),
    (["five", "arithmetic"], "five is a whole comparison"),
    (["five", "--algorithms", "grpo,gspo"], "five is a whole comparison"),
    (["five", "--ablate", "dapo"], "five is a whole comparison"),
    (["--ablate", "dpo"], "--ablate dpo: no algorithm is called so"),
    (["--ablate", "dapo", "--algorithms", "grpo,gspo"], "--ablate dapo and --algorithms grpo gspo: give one of them"),
    (["five", "--seeds", "0"], "--seeds 0: give at least 1"),
    (["five", "--seeds", "many"], "--seeds many: give a whole number"),
    (["five", "--tokens", "0"], "--tokens 0: give at least 1"),
    (["five", "--tokens", "255"], "one step of ppo samples 256 completions"),
    (["five", "--updates", "3"], "ppo makes 4 updates a step, so give a multiple"),
    (["five", "--updates", "10"], "ppo makes 4 updates a step, so give a multiple"),
    (["five", "--tokens", "9999", "--updates", "8"], "give one of them"),
    (["--algorithms", "grpo,gropo"], "--algorithms gropo: no algorithm is called so, the nearest is 'grpo'"),
    (["--algorithms", "grpo,rloo"], "no budget in common"),  # one update a step is its definition
    (["--algorithms", "grpo,gspo", "--task.type", "Arithmetic", "--model", "nowhere/at-all"], "nowhere/at-all"),
    (["five", "--steps", "3"], "--steps: a comparison's runs end with its budget, give --updates N or --tokens N"),
    (
        ["--algorithms", "grpo,gspo", "--tokens", "9999", "--max-generated-tokens=9"],
        "--max-generated-tokens: a comparison's runs",
    ),
    (["five", "--device", "cuda"], "no GPU here"),
    (["five", "--device", "cuda", "--dry-run"], "no GPU here"),
    (["five", "--device", "cuda", "--jobs", "2"], "no GPU here"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(each)[:40] for each, _ in REFUSED])
def test_bad_input_is_one_line_and_nothing_is_started(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(crew, "_start", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        main(["compare", *arguments, "--run", "here"])
    said = capsys.readouterr()
    assert refused.value.code == 2
    assert message in said.err
    assert len([line for line in said.err.splitlines() if not line.startswith(("unusual:", "the demo:"))]) == 1, (
        said.err
    )
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_evaluations_of_different_size_are_refused():
    other = replace(SMALL, evaluation=EvaluationOptions(problems=6))
    with pytest.raises(ValueError, match="evaluation.problems is 12 for a, 6 for b: give all the same"):
        make_plan([("a", SMALL), ("b", other)], 1)


def test_a_dry_run_says_what_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--algorithms", "grpo,sapo", "--seeds", "2", "--tokens", "5000", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == [
        "run", "grpo-seed-0", "sapo-seed-0", "grpo-seed-1", "sapo-seed-1", "4"
    ]  # fmt: skip
    assert "at most 20" in printed  # 256 completions a step: 5,000 tokens are reached in 20
    assert "4 runs of 5,000 generated tokens each, 1 at a time; nothing was started" in printed
    assert list(tmp_path.iterdir()) == []


def test_an_ablation_leaves_out_one_choice_at_a_time(capsys):
    """DAPO's four, by hand: the overlong penalty, dynamic sampling, clip-higher and the token loss."""
    less = ablated(DAPO)
    assert less == {
        "shape": replace(DAPO, shape=None),
        "keep": replace(DAPO, keep=KeepAll()),
        "gate": replace(DAPO, gate=Clip(0.2, 0.2)),
        "weights": replace(DAPO, weights=SequenceMean()),
    }
    assert main(["compare", "--ablate", "dapo", "--seeds", "1", "--updates", "4", "--dry-run"]) == 0
    runs = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert runs == ["dapo-seed-0", *(f"without-{stage}-seed-0" for stage in less)]


def test_an_ablation_says_what_cannot_be_left_out(capsys):
    assert {stage for stage, value in ablated(PPO).items() if value is None} == {"advantage", "extra"}
    assert main(["compare", "--ablate", "ppo", "--seeds", "1", "--updates", "4", "--dry-run"]) == 0
    assert "not left out, since other choices of ppo need it: advantage, extra" in capsys.readouterr().err


# Differences


def test_quantiles_are_students():
    """97.5 % of the t distribution lies below, by Simpson's rule over its density."""
    for freedom in (1, 2, 3, 10, 30):
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
        end, parts = T95[freedom - 1], 20_000
        heights = [scale * (1 + (end * i / parts) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(parts + 1)]
        area = end / parts / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
        assert 0.5 + area == pytest.approx(0.975, abs=2e-5), freedom
    assert list(T95) == sorted(T95, reverse=True)


def test_differences_by_seed_by_hand():
    # 0.3, 0.1 and 0.2: mean 0.2, deviation 0.1, over √3, times 4.303.
    found = seed_difference("b", "length", {0: 1.3, 1: 2.1, 2: 3.2, 9: 7.0}, {0: 1.0, 1: 2.0, 2: 3.0, 8: 5.0})
    assert found.difference == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.2 - 4.303 * 0.1 / math.sqrt(3), 0.2 + 4.303 * 0.1 / math.sqrt(3)))
    assert found.mean == pytest.approx(2.2)
    assert found.verdict == "within noise"
    alone = seed_difference("b", "length", {0: 1.5}, {0: 1.0})
    assert (alone.difference, alone.interval, alone.verdict) == (0.5, None, None)
    assert seed_difference("b", "length", {0: 1.5, 1: 2.0}, {0: 1.5, 1: 2.0}).verdict == "the same"


def answers(*seeds: Sequence[float]) -> dict[int, dict[str, float]]:
    return {seed: {f"p{place}": float(right) for place, right in enumerate(each)} for seed, each in enumerate(seeds)}


def test_differences_by_problem_by_hand():
    # One seed, four problems: two won, one lost. Spread with a win and a loss added: of 1, 1, 0, −1, 1, −1.
    found = answer_difference("b", "held_out", answers([1, 1, 0, 0]), answers([0, 0, 0, 1]))
    values = [1, 1, 0, -1, 1, -1]
    spread = math.sqrt(sum((value - 1 / 6) ** 2 for value in values) / 5)
    half = 3.182 * spread / 2
    assert found.difference == 0.25
    assert found.interval == pytest.approx((0.25 - half, 0.25 + half))
    assert (found.wins, found.losses, found.mean) == (2, 1, 0.5)
    assert found.verdict == "within noise"


def test_seeds_and_problems_are_added_in_quadrature():
    # Problem by problem the same difference for both seeds; and then seeds that differ as well.
    first = answers([0] * 20, [0] * 20)
    even = answer_difference("b", "held_out", answers([1] * 10 + [0] * 10, [1] * 10 + [0] * 10), first)
    uneven = answer_difference("b", "held_out", answers([1] * 20, [0] * 20), first)
    assert even.difference == uneven.difference == 0.5
    assert even.interval is not None
    assert even.interval[1] - 0.5 == pytest.approx(2.093 * spread_of([1] * 10 + [0] * 10) / math.sqrt(20))
    assert even.verdict == "higher"
    seeds = 12.706 * math.sqrt(0.5) / math.sqrt(2)
    problems = 2.093 * spread_of([0.5] * 20) / math.sqrt(20)
    assert uneven.interval is not None
    assert uneven.interval[1] - 0.5 == pytest.approx(math.hypot(seeds, problems))
    assert uneven.verdict == "within noise"


def test_the_added_win_and_loss_are_of_the_outcomes_size():
    """Outcomes ten times as large have an interval ten times as wide: the verdict is about no unit."""
    # Four problems: +10, +10, 0 and −4; spread with ±10 added.
    found = answer_difference("b", "held_out", answers([10, 30, 5, 0]), answers([0, 20, 5, 4]))
    half = 3.182 * spread_of([10, 10, 0, -4], largest=10) / 2
    assert found.difference == 4
    assert found.interval == pytest.approx((4 - half, 4 + half))
    tenth = answer_difference("b", "held_out", answers([1, 3, 0.5, 0]), answers([0, 2, 0.5, 0.4]))
    assert tenth.interval == pytest.approx((0.4 - half / 10, 0.4 + half / 10))
    # Of two seeds it is the largest of an answer, not of a problem's mean: right and wrong stay ±1.
    split = answer_difference("b", "held_out", answers([1, 0], [0, 0]), answers([0, 0], [0, 0]))
    problems, seeds = 12.706 * spread_of([0.5, 0]) / math.sqrt(2), 12.706 * math.sqrt(0.125) / math.sqrt(2)
    assert split.interval == pytest.approx((0.25 - math.hypot(problems, seeds), 0.25 + math.hypot(problems, seeds)))


def spread_of(values: Sequence[float], largest: float = 1.0) -> float:
    """With a win and a loss added."""
    added = [*values, largest, -largest]
    mean = sum(added) / len(added)
    return math.sqrt(sum((value - mean) ** 2 for value in added) / (len(added) - 1))


def test_few_problems_do_not_look_certain():
    """Four wins and no loss happen by chance once in eight times: no verdict. All of twenty do not."""
    twenty = answers([0] * 20)
    assert answer_difference("b", "held_out", answers([1] * 4 + [0] * 16), twenty).verdict == "within noise"
    assert answer_difference("b", "held_out", answers([1] * 20), twenty).verdict == "higher"
    assert answer_difference("b", "held_out", twenty, answers([1] * 20)).verdict == "lower"


def test_only_what_both_have_answered_counts():
    ours = {0: {"p": 1.0, "only-ours": 1.0}, 7: {"p": 1.0}}
    found = answer_difference("b", "held_out", ours, {0: {"p": 0.0, "only-theirs": 1.0}})
    assert (found.difference, found.by_seed, found.wins) == (1.0, {0: 1.0}, 1)


# Whole comparisons


def configs(*names: str) -> list[tuple[str, RunConfig]]:
    cards = [card for name in names if (card := explain.card(name)) is not None]
    return [(card.name, with_algorithm(SMALL, card.value)) for card in cards]


def trained(plan: ComparisonPlan, place: ComparisonFolder) -> None:
    """In this process."""
    place.settle(plan, {each.name: MACHINE for each in plan.contenders}, ["proximo", "compare"])
    for job in plan.jobs():
        train_one(job.config, place.run(job), MACHINE)


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[ComparisonPlan, ComparisonFolder]:
    """GRPO, its twin and DAPO, two seeds, two steps each."""
    torch.set_default_dtype(torch.float32)
    plan = make_plan(configs("grpo", "grpo", "dapo"), 2, Budget("updates", 4))
    place = ComparisonFolder(tmp_path_factory.mktemp("compared") / "here")
    trained(plan, place)
    return plan, place


def read(plan: ComparisonPlan, place: ComparisonFolder) -> dict[str, list[MeasuredRun]]:
    found: dict[str, list[MeasuredRun]] = {}
    for job in plan.jobs():
        found.setdefault(job.contender, []).append(MeasuredRun(job, gather(RunFolder(place.run(job)))))
    return found


@pytest.fixture(scope="module")
def runs(compared) -> dict[str, list[MeasuredRun]]:
    return read(*compared)


@pytest.fixture(scope="module")
def result(compared) -> ComparisonResult:
    plan, place = compared
    return gathered(plan, place, [], "proximo compare these")


def completions(run: MeasuredRun, step: int) -> Counter:
    found = RunFolder(run.details.run.path).step(step)
    tokens = [tuple(row.tolist()) for row in found.batch.tokens.split(found.batch.lengths.tolist())]
    return Counter(zip(found.problem, tokens, strict=True))


@pytest.mark.slow("trains several runs")
def test_the_first_rollout_is_the_same_for_all_algorithms(runs, result, tmp_path):
    plan, place = (
        make_plan(configs("ppo", "gspo", "sapo", "rloo"), 1, Budget("tokens", 16)),
        ComparisonFolder(tmp_path),
    )
    trained(plan, place)
    others = read(plan, place)
    for seed in (0, 1):
        wanted = completions(runs["grpo"][seed], 1)
        assert wanted.total() == 16
        assert completions(runs["grpo-2"][seed], 1) == wanted
        # Dynamic sampling: the first round is that rollout, and other prompts fill up for what it drops.
        found = completions(runs["dapo"][seed], 1)
        assert wanted < found
        assert "dropped" in RunFolder(runs["dapo"][seed].details.run.path).step(1).state
    for name, (run,) in others.items():
        assert run.details.steps_done == 1
        assert completions(run, 1) == completions(runs["grpo"][0], 1), name
    assert completions(runs["grpo"][0], 1) != completions(runs["grpo"][1], 1)
    assert result.fair, result.checks
    (check,) = [each for each in result.checks if each.what == "first rollout"]
    assert check.detail == "32 completions equal, token by token"


@pytest.mark.slow("trains several runs")
def test_identical_configs_differ_by_exactly_zero_in_every_row(result):
    twins = [each for each in result.differences if each.contender == "grpo-2"]
    assert [each.measure for each in twins] == ["held_out", "outcome", "entropy", "length", "held_back", "idle"]
    for each in twins:
        assert each.difference == 0
        assert list(each.by_seed.values()) == [0, 0]
        assert each.interval == (0, 0)
        assert each.verdict == "the same"
    assert (twins[0].wins, twins[0].losses) == (0, 0)
    (twin,) = [each for each in result.contenders if each.name == "grpo-2"]
    assert twin.diverges == {0: None, 1: None}
    # And others do differ.
    assert any(each.difference for each in result.differences if each.contender == "dapo")


@pytest.mark.slow("trains several runs")
def test_ways_part_where_the_completions_do(runs, copied):
    for seed in (0, 1):
        ours, first = runs["dapo"][seed], runs["grpo"][seed]
        step = first_difference(ours, first)
        assert step is not None
        assert completions(first, step - 1) <= completions(ours, step - 1)
        assert not completions(first, step) <= completions(ours, step)
    twin, dapo = runs["grpo-2"][0], runs["dapo"][0]
    assert first_difference(runs["grpo"][0], twin) is None
    # Without rollouts nothing can be told; what one did alone is another way.
    spoilt = read(*copied)["grpo"][0]
    assert first_difference(spoilt, dapo) == 2
    spoilt.details.run.step_file(2).unlink()
    assert first_difference(spoilt, dapo) is None
    assert first_difference(dapo, spoilt) is None
    shorter = MeasuredRun(spoilt.job, replace(spoilt.details, metrics=spoilt.details.metrics[:2]))
    assert shorter.details.steps_done == 1
    assert first_difference(shorter, twin) == first_difference(twin, shorter) == 2


@pytest.mark.slow("trains several runs")
def test_the_numbers_are_those_of_the_runs(runs, result):
    run = runs["dapo"][1]
    held_out = [row for row in rows(run.details.run.path) if "held_out/outcome" in row]
    (curve,) = [
        each for each in result.curves if (each.contender, each.measure, each.axis) == ("dapo", "held_out", "steps")
    ]
    assert curve.seeds[1] == [(x, row["held_out/outcome"]) for x, row in zip((0, 1, 2), held_out, strict=True)]
    assert curve.mean[-1][1] == pytest.approx((runs["dapo"][0].after + run.after) / 2)
    assert not curve.band  # of two seeds
    (tokens,) = [
        each for each in result.curves if (each.contender, each.measure, each.axis) == ("dapo", "length", "tokens")
    ]
    trained = [row for row in rows(run.details.run.path) if "length" in row]
    assert tokens.seeds[1] == list(
        zip(tokens_after(run.details.run.path), (row["length"] for row in trained), strict=True)
    )
    # Entropy is of everything that was sampled: by hand from the tokens of a step.
    batch = RunFolder(run.details.run.path).step(1).batch
    assert run.surprise(1) == pytest.approx(-float(batch.rollout_logprobs[batch.mask].mean()), rel=1e-5)
    (standing,) = [each for each in result.contenders if each.name == "dapo"]
    assert standing.updates == {0: 4, 1: 4}
    assert standing.tokens[1] == tokens_after(run.details.run.path)[-1]


@pytest.mark.slow("trains several runs")
def test_waste_and_memory_are_told_apart(result):
    named = {each.name: each for each in result.contenders}
    assert named["dapo"].waste["dropped"] > 0 == named["grpo"].waste["dropped"]
    assert named["grpo"].waste["dead_rows"] > 0 == named["dapo"].waste["dead_rows"]
    assert named["dapo"].waste["rounds"] > 1 == named["grpo"].waste["rounds"]
    assert [model.role for model in named["grpo"].models] == ["policy", "reference"]
    assert [model.role for model in named["dapo"].models] == ["policy"]
    policy, reference = named["grpo"].models
    assert policy.bytes == 4 * reference.bytes == 16 * policy.parameters  # weight, gradient and two moments
    assert {"rollout", "assemble", "update"} <= named["grpo"].phases.keys()


@pytest.mark.slow("trains several runs")
def test_only_settings_that_differ_are_listed(result):
    assert result.settings["algorithm.gate.high"] == {"grpo": 0.2, "grpo-2": 0.2, "dapo": 0.28}
    assert result.settings["algorithm.kl.coefficient"] == {"grpo": 0.04, "grpo-2": 0.04, "dapo": None}
    assert not [field for field in result.settings if not field.startswith("algorithm.")]


def test_what_is_no_longer_the_named_algorithm_is_said(tmp_path):
    wider = replace(SMALL, algorithm=replace(GRPO, gate=Clip(0.2, 0.5)), steps=1)
    found = gathered(
        make_plan([("grpo", replace(SMALL, steps=1)), ("wider", wider)], 1), ComparisonFolder(tmp_path), [], "again"
    )
    assert found.contenders[0].deviations == []
    assert "gate.high is 0.5, not 0.2" in found.contenders[1].deviations[0]
    assert found.contenders[1].unfinished == {0: "it ended early"}
    assert not found.fair
    assert not found.differences
    assert "wider seed 0 is not finished" in markdown(found, sections(found))
    assert fair_line(found) == "Nothing to compare: no run is finished."


@pytest.fixture
def copied(compared, tmp_path) -> tuple[ComparisonPlan, ComparisonFolder]:
    """To be spoilt."""
    plan, place = compared
    shutil.copytree(place.folder, tmp_path / "copy")
    return replace(plan, contenders=plan.contenders[:2]), ComparisonFolder(tmp_path / "copy")


def unequal(plan: ComparisonPlan, place: ComparisonFolder) -> list[str]:
    return [check.what for check in checks(plan, read(plan, place)) if not check.equal]


@pytest.mark.slow("trains several runs")
def test_what_is_not_equal_is_named(copied):
    plan, place = copied
    job = next(job for job in plan.jobs() if job.name == "grpo-2-seed-1")
    assert unequal(plan, place) == []
    file = place.run(job) / "run.json"
    record = json.loads(file.read_text())
    # Where the command was given is no matter; another model is, and versions that it went on with.
    file.write_text(json.dumps(record | {"argv": ["elsewhere"]}))
    assert unequal(plan, place) == []
    attempts = [*record["attempts"], record["attempts"][0] | {"torch": "1.0"}]
    file.write_text(json.dumps(record | {"fingerprints": {"model": "0" * 64}, "attempts": attempts}))
    assert unequal(plan, place) == ["model and data", "machine and versions"]
    file.write_text(json.dumps(record))
    other = next(job for job in plan.jobs() if job.name == "grpo-2-seed-0")
    shutil.copy(RunFolder(place.run(other)).step_file(1), RunFolder(place.run(job)).step_file(1))
    assert unequal(plan, place) == ["first rollout"]
    (place.run(job) / "metrics.jsonl").write_text("")
    assert unequal(plan, place) == ["first rollout", "budget"]


@pytest.mark.slow("trains several runs")
def test_tokens_that_are_far_apart_are_not_an_equal_budget(copied):
    plan, place = copied
    runs = read(plan, place)
    (ours, *_), (theirs, *_) = runs.values()

    def budget(amount: int, first: int, second: int) -> tuple[bool, str]:
        spent = [
            MeasuredRun(run.job, replace(run.details, result={**run.result, "generated_tokens": tokens}))
            for run, tokens in ((ours, first), (theirs, second))
        ]
        limited = replace(plan, seeds=(0,), budget=Budget("tokens", amount))
        (found,) = [each for each in checks(limited, {"a": spent[:1], "b": spent[1:]}) if each.what == "budget"]
        return found.equal, found.detail

    assert budget(1000, 1000, 1050) == (True, "1,000 generated tokens, and 5.0% more at most to finish a step")
    assert budget(1000, 1051, 1000) == (
        False,
        "of 1,000 generated tokens grpo-2 seed 0 sampled 1,000 and grpo seed 0 1,051 to finish a step: "
        "give a larger budget of tokens, or smaller steps",
    )
    assert budget(1000, 1400, 1400)[0]  # both as much too many
    assert budget(1000, 999, 1000) == (False, "grpo seed 0 sampled 999")


@pytest.mark.slow("trains several runs")
def test_metrics_of_a_users_own_are_compared_too(copied):
    plan, place = copied
    for job in plan.jobs():
        path, number = place.run(job) / METRICS, [each.name for each in plan.contenders].index(job.contender)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"user/digits": float(number)}) + "\n" for row in rows))
    result = gathered(plan, place, [], "again")
    mine = [each for each in result.differences if each.measure == "user/digits"]
    assert [each.difference for each in mine] == [1.0]
    assert {each.axis for each in result.curves if each.measure == "user/digits"} == {"steps", "tokens"}
    assert "| digits, mean over the run |" in markdown(result, sections(result))


@pytest.mark.slow("trains several runs")
def test_a_damaged_row_is_passed_over(copied):
    plan, place = copied
    job = next(plan.jobs())
    whole = read(plan, place)["grpo"][0]
    lines = (place.run(job) / METRICS).read_text().splitlines()
    (spoilt,) = [number for number, line in enumerate(lines) if '"step": 1,' in line and "sampled_tokens" in line]
    lines[spoilt] = lines[spoilt][:40]
    (place.run(job) / METRICS).write_text("\n".join(lines) + "\n")
    run = read(plan, place)["grpo"][0]
    assert [point.steps for point in whole.held_out()] == [0, 1, 2]
    assert [point.steps for point in run.held_out()] == [0, 2]
    assert [(point.steps, point.value) for point in run.curve(MEASURES[0])] == [
        (point.steps, point.value) for point in whole.curve(MEASURES[0])[1:]
    ]
    found = gathered(plan, place, [], "again")
    assert markdown(found, sections(found))


def test_a_folder_whose_comparison_died_while_it_was_written_is_still_its_own(tmp_path, monkeypatch):
    plan = make_plan([("a", SMALL), ("b", SMALL)], 1)
    machines = {"a": MACHINE, "b": MACHINE}
    whole, writing = [], place_module.write_file

    def dies(path: Path, data: bytes) -> None:
        if len(whole) == parts:
            raise KeyboardInterrupt
        whole.append(path.name)
        writing(path, data)

    for parts in range(3):
        monkeypatch.setattr(place_module, "write_file", dies)
        whole.clear()
        place = ComparisonFolder(tmp_path / str(parts))
        with pytest.raises(KeyboardInterrupt):
            place.settle(plan, machines, [])
        monkeypatch.setattr(place_module, "write_file", writing)
        place.check(plan)
        assert place.settle(plan, machines, []) == machines
        place.check(plan)
        with pytest.raises(ValueError, match="another comparison: a: training.groups was 4, now 2"):
            place.check(
                make_plan([(name, replace(SMALL, training=replace(SMALL.training, groups=2))) for name in "ab"], 1)
            )


def test_fields_that_are_allowed_to_change_may_differ_from_the_first_attempts(tmp_path):
    plan, fewer = (make_plan([("a", config), ("b", SMALL)], 1) for config in (SMALL, replace(SMALL, device="cuda")))
    ComparisonFolder(tmp_path).settle(plan, {"a": MACHINE, "b": MACHINE}, [])
    with pytest.raises(ValueError, match=r"a: device was 'cpu', now 'cuda'.*, or allow .*allow_change"):
        ComparisonFolder(tmp_path, allowed=["training"]).check(fewer)
    ComparisonFolder(tmp_path, allowed=["device"]).check(fewer)
    with pytest.raises(ValueError, match=r"`allow_change=\['devices'\]`: the config has no such field"):
        ComparisonFolder(tmp_path, allowed=["devices"]).check(fewer)


@pytest.mark.slow("trains several runs")
def test_two_seeds_cannot_decide_and_three_can(result):
    assert all("two seeds cannot decide, give --seeds 3" in line for line in verdict_lines(result))
    assert "(two seeds cannot decide)" in markdown(result, sections(result))
    more = [replace(each, by_seed={0: 0.0, 1: 0.0, 2: 0.0}) for each in result.differences]
    assert not any("seeds" in line for line in verdict_lines(replace(result, differences=more)))


@pytest.mark.slow("trains several runs")
def test_one_that_is_missing_is_left_out_and_said(copied):
    plan, place = copied
    job = next(job for job in plan.jobs() if job.name == "grpo-2-seed-1")
    (place.run(job) / "result.json").unlink()
    found = gathered(plan, place, [RunFailure(job, "killed by signal 9")], "again")
    assert not found.fair
    assert found.contenders[1].unfinished == {1: "killed by signal 9"}
    assert found.differences[0].by_seed == {0: 0.0}
    text = markdown(found, sections(found))
    assert "grpo-2 against grpo: no difference at all, every held-out answer is as good with this one seed" in text
    assert "Not a fair comparison. Not equal: seeds (grpo-2 has no seed 1)." in text


@pytest.mark.slow("trains several runs")
def test_reports_hold_markup_down(result):
    hostile = "<script>alert(1)</script>|`x`\x1b[31m"
    spoilt = replace(result, model=hostile, command=hostile, settings={hostile: {"grpo": hostile}})
    for text in (markdown(spoilt, sections(spoilt)), html(spoilt, sections(spoilt))):
        assert "<script" not in re.sub(r"```text\n.*?\n```", "", text, flags=re.DOTALL)
        assert "\x1b" not in text.replace("\\x1b", "")
    assert "src=" not in html(spoilt, sections(spoilt))
    assert "http" not in html(spoilt, sections(spoilt)).replace("http-equiv", "")


@pytest.mark.slow("trains several runs")
def test_the_command_reports_what_is_finished_and_trains_it_no_more(copied, monkeypatch, capsys):
    plan, place = copied
    one = place.config("grpo")
    twin = one.with_name("grpo-2.toml")
    monkeypatch.setattr(crew, "_start", lambda *_: pytest.fail("started"))
    # Given as files, whose names are those of the contenders; their folder has three, so this is another comparison.
    command = ["compare", str(one), str(twin), *FLAGS, "--run", str(place.folder)]
    with pytest.raises(SystemExit) as refused:
        main(command)
    assert refused.value.code == 2
    assert "holds another comparison: it is of grpo, grpo-2, dapo, not of grpo, grpo-2" in capsys.readouterr().err
    (place.folder / "plan.json").unlink()
    with pytest.raises(SystemExit):
        main(command)
    assert "holds something else than a comparison" in capsys.readouterr().err
    place.settle(plan, {each.name: MACHINE for each in plan.contenders}, ["proximo", "compare"])
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((place.folder / "compare.json").read_text())
    assert said["fair"] is True
    assert {each["difference"] for each in said["differences"]} == {0}
    assert said["command"] == f"proximo {' '.join(command)}"
    page, text = ((place.folder / name).read_text() for name in ("compare.html", "compare.md"))
    for words in ("grpo-2 against grpo: no difference at all", "32 completions equal, token by token", said["command"]):
        assert words in page
        assert words in text
    assert page.count("<svg") == 13  # six measures along two axes, and the differences
    assert page.count("<polyline") >= 12
    # More seeds can be added; everything else is another comparison.
    for change, message in (
        (["--updates", "4", "--seeds", "1"], "it has 2 seeds, from 0 on; more can be added, not fewer"),
        (["--updates", "6", "--seeds", "2"], "grpo: steps was 2, now 3"),
        ([*FLAGS, "--training.learning-rate", "1e-3"], "training.learning_rate was 0.0001, now 0.001"),
    ):
        with pytest.raises(SystemExit):
            main(["compare", str(one), str(twin), *change, "--run", str(place.folder)])
        assert message in capsys.readouterr().err
    with pytest.raises(pytest.fail.Exception, match="started"):
        main(["compare", str(one), str(twin), "--updates", "4", "--seeds", "3", "--run", str(place.folder)])


# Processes


def waiting_job(place: ComparisonFolder, *names: str) -> list[RunJob]:
    for folder in ("runs", "logs"):
        (place.folder / folder).mkdir(parents=True, exist_ok=True)
    task = File("sums.jsonl", chat_template_kwargs={"enable_thinking": False})  # which cannot be hashed
    return [RunJob(name, replace(SMALL, task=task)) for name in names]


def script(monkeypatch, code: str) -> None:
    """In the place of a run: the code, with the job's name as its argument."""

    def start(
        job: RunJob, place: ComparisonFolder, machine: Machine, accept_lost: bool, _: Starter
    ) -> subprocess.Popen:
        with place.log(job).open("ab") as log:
            command = [sys.executable, "-S", "-c", code, job.contender, str(place.folder)]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(crew, "_start", start)
    monkeypatch.setattr(crew, "LOOK_SECONDS", 0.02)


FAILS = """
import os, sys
print("error: no room", flush=True)
if sys.argv[1] == "c":
    os.kill(os.getpid(), 9)
sys.exit(sys.argv[1] == "a")
"""


def test_one_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    script(monkeypatch, FAILS)
    place, most, log = ComparisonFolder(tmp_path), 0, []
    jobs = waiting_job(place, "a", "b", "c", "d")

    def started(job: RunJob) -> None:
        nonlocal most
        log.append(job.contender)
        most = max(most, len(log) - len(ended))

    ended: dict[str, RunFailure | None] = {}
    failures = run_jobs(
        jobs, place, dict.fromkeys("abcd", MACHINE), 2,
        started=started, ended=lambda job, failure: ended.update({job.contender: failure}),
    )  # fmt: skip
    assert log == ["a", "b", "c", "d"]
    assert most == 2
    assert {name: failure is None for name, failure in ended.items()} == {"a": False, "b": True, "c": False, "d": True}
    said = {failure.job.contender: failure.message for failure in failures}
    assert said["a"] == f"exit status 1: no room (see {place.log(jobs[0])})"
    assert said["c"].startswith("killed by signal 9: no room")


SAVES = """
import signal, sys, time, pathlib
def save(*_):
    pathlib.Path(sys.argv[2], sys.argv[1] + ".saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[2], sys.argv[1] + ".ready").touch()
time.sleep(60)
"""


@pytest.mark.usefixtures("signals_are_heard")
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_every_process_save_and_end(asked, tmp_path, monkeypatch):
    script(monkeypatch, SAVES)
    place = ComparisonFolder(tmp_path)
    jobs = waiting_job(place, "a", "b", "c")
    sent = threading.Event()

    def waiting(running: Sequence[RunJob]) -> None:
        if not sent.is_set() and len(list(tmp_path.glob("*.ready"))) == 2:
            sent.set()
            os.kill(os.getpid(), asked)

    nothing = dict.fromkeys("abc", MACHINE)
    with pytest.raises(Stopped) as stopped:
        run_jobs(jobs, place, nothing, 2, started=lambda _: None, ended=lambda *_: None, waiting=waiting)
    assert stopped.value.code == 128 + asked
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["a.saved", "b.saved"]  # c was never begun


def test_after_a_time_no_job_is_started_and_the_running_save_and_end(tmp_path, monkeypatch):
    script(monkeypatch, SAVES)
    place, clock = ComparisonFolder(tmp_path), 0.0
    jobs = waiting_job(place, "a", "b", "c")
    monkeypatch.setattr(crew.time, "monotonic", lambda: clock)

    def waiting(running: Sequence[RunJob]) -> None:
        nonlocal clock
        if len(list(tmp_path.glob("*.ready"))) == 2:
            clock = 100.0 if clock < 100 else 100.0 + crew.GRACE

    began: list[RunJob] = []
    failures = run_jobs(
        jobs, place, dict.fromkeys("abc", MACHINE), 2,
        started=began.append, ended=lambda *_: pytest.fail("ended by itself"), waiting=waiting, until=100.0,
    )  # fmt: skip
    assert failures == []
    assert began == jobs[:2]
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["a.saved", "b.saved"]


@pytest.mark.slow("trains several runs")
def test_a_run_in_a_process_of_its_own_is_the_run_of_this_one(copied, capsys):
    """The command trains what is missing: one of four runs, from scratch, to the same bytes."""
    plan, place = copied
    place.settle(plan, {each.name: MACHINE for each in plan.contenders}, ["proximo", "compare"])
    job = next(job for job in plan.jobs() if job.name == "grpo-2-seed-1")
    before = (place.run(job) / METRICS).read_bytes()
    shutil.rmtree(place.run(job))
    command = ["compare", str(place.config("grpo")), str(place.config("grpo-2")), *FLAGS, "--run", str(place.folder)]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "grpo-2 seed 1: started" in said.err
    assert "(1 of 1 done)" in said.err
    assert "grpo-2 against grpo: no difference at all" in said.out
    assert (place.run(job) / METRICS).read_bytes() == before
    record = json.loads((place.run(job) / "run.json").read_text())
    assert record["machine"] == MACHINE.to_dict()
    assert record["argv"][:2] == ["proximo", "train"]
    assert "step 2/2" in place.log(job).read_text()
