"""The pipeline: the whole chain with minimal settings, the world's data by hand, and what the report says of it."""

import copy
import io
import json
import shutil
import statistics
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from proximo.cli import main
from proximo.config import toml
from proximo.data import DataFile
from proximo.models import load_model
from proximo.models.packing.attention import attention
from proximo.models.shipped import resolve
from proximo.recipes.pipeline import (
    DemonstrationOptions,
    HeldOutOptions,
    Measured,
    PipelineConfig,
    PipelineResult,
    PolicyResult,
    PreferenceOptions,
    RankingOptions,
    ReinforcementOptions,
    RewardCurve,
    RewardModelOptions,
    report,
)
from proximo.recipes.pipeline.measure import Measuring
from proximo.recipes.pipeline.report import sentence
from proximo.recipes.pipeline.result import Fooled
from proximo.recipes.pipeline.stages import _Done
from proximo.recipes.pipeline.world import Ranked, agreement, carelessly_sorted, rankings, true_reward
from proximo.recipes.presets import PIPELINE_DEMO
from proximo.rl.config import RunConfig, TrainingOptions, ValueOptions
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.fitting import FitOptions
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from proximo.tasks import Sorting
from proximo.types import Completion, Grade, Problem, Request
from tests.rows import read_rows

TRAINING = TrainingOptions(groups=2, group_size=3, minibatches=1, learning_rate=1e-3)
SMALL = PipelineConfig(
    sft=FitOptions(epochs=2.0, batch=32, learning_rate=5e-3),
    reward_model=RewardModelOptions(PIPELINE_DEMO.reward_model.loss, FitOptions(batch=8, learning_rate=1e-3)),
    ppo=ReinforcementOptions(PIPELINE_DEMO.ppo.algorithm, TRAINING, steps=2, value=ValueOptions()),
    grpo=ReinforcementOptions(PIPELINE_DEMO.grpo.algorithm, TRAINING, steps=2),
    dpo=PreferenceOptions(PIPELINE_DEMO.dpo.loss, FitOptions(batch=8, learning_rate=1e-3)),
    task=Sorting(length=3, alphabet="abcdef", held_out=8),
    demonstrations=DemonstrationOptions(count=500, spread=2.0),
    rankings=RankingOptions(prompts=60, samples=3),
    sampling=replace(PIPELINE_DEMO.sampling, max_tokens=5),
    held_out=HeldOutOptions(problems=6, samples=2),
    seed=3,
)
NAMES = ["sft", "ppo", "grpo", "grpo-without-kl", "dpo"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A pipeline by the command line: its folder, and what was printed."""
    place = tmp_path_factory.mktemp("pipeline")
    (place / "pipeline.toml").write_text(toml.dumps(SMALL))
    printed = io.StringIO()
    with redirect_stdout(printed):
        arguments = [str(place / "pipeline.toml"), "--run", str(place / "run"), "--json", "--seed", "4"]
        assert main(["train", "pipeline-demo", *arguments]) == 0
    return place / "run", json.loads(printed.getvalue())


@pytest.mark.slow("trains every stage of a pipeline")
def test_every_stage_leaves_its_folder_and_reads_the_one_before(ran):
    folder, _ = ran
    config = toml.loads((folder / "config.toml").read_text(), PipelineConfig)
    assert config == replace(SMALL, seed=4)
    assert len(read_rows(folder / "demonstrations.jsonl")) == 500
    sft = toml.loads((folder / "sft" / "config.toml").read_text(), SftConfig)
    judge = toml.loads((folder / "reward-model" / "config.toml").read_text(), RewardModelConfig)
    preferred = toml.loads((folder / "dpo" / "config.toml").read_text(), DpoConfig)
    assert isinstance(sft.data, DataFile)
    assert sft.data.path == str(folder / "demonstrations.jsonl")
    assert judge.data.path == preferred.data.path == str(folder / "rankings.jsonl")
    assert judge.model == preferred.model == str(folder / "sft")
    for name in NAMES[1:4]:
        run = toml.loads((folder / name / "config.toml").read_text(), RunConfig)
        assert (run.model, run.rewards.task) == (str(folder / "sft"), 0.0)
        assert [each.path for each in run.rewards.models] == [str(folder / "reward-model")]
        assert (run.algorithm.kl is None) == (name != "grpo")
    for name in NAMES:
        load_model(resolve(str(folder / name)))


@pytest.mark.slow("trains every stage of a pipeline")
def test_results_are_what_the_folders_say(ran):
    folder, printed = ran
    results = json.loads((folder / "results.json").read_text())
    assert results == printed
    assert [policy["name"] for policy in results["policies"]] == NAMES
    assert results["ranked"]["rankings"] == len(read_rows(folder / "rankings.jsonl")) > 0
    held_out = [row for row in read_rows(folder / "reward-model" / "metrics.jsonl") if "held_out/accuracy" in row]
    assert results["reward_model"]["accuracy"] in [row["held_out/accuracy"] for row in held_out]
    for policy in results["policies"][1:4]:
        steps = [row for row in read_rows(folder / policy["name"] / "metrics.jsonl") if "sampled_tokens" in row]
        assert policy["generated_tokens"] == sum(row["sampled_tokens"] for row in steps)
        assert policy["curve"]["learned"] == [row["rewards/reward_model"] for row in steps]
        assert policy["curve"]["true"] == [row["outcome"] for row in steps]
    # The same seed samples the same first step, whatever the algorithm.
    assert len({(p["curve"]["learned"][0], p["curve"]["true"][0]) for p in results["policies"][1:4]}) == 1
    assert results["policies"][4]["curve"] is None
    assert results["policies"][4]["generated_tokens"] == 0
    text = (folder / "report.md").read_text()
    assert all(f"\n| {name} " in text for name in NAMES)
    assert all(f"\n- {name}: learned " in text for name in NAMES[1:])


@pytest.mark.slow("trains every stage of a pipeline")
def test_the_fine_tuned_model_is_no_distance_from_itself(ran):
    _, results = ran
    measured = {policy["name"]: policy["measured"] for policy in results["policies"]}
    assert (measured["sft"]["kl"], measured["sft"]["kl_half_width"]) == (0.0, 0.0)
    assert all(measured[name]["kl"] != 0 for name in NAMES[1:])
    for each in measured.values():
        assert 0 <= each["true"] <= 1
        assert 0 <= each["fooled_share"] <= 1
        assert each["sorted_share"] <= each["true"]  # a sorted string is worth 1, the others 0 or more


@pytest.mark.slow("trains every stage of a pipeline")
def test_a_used_folder_is_refused(ran, capsys):
    folder, _ = ran
    with pytest.raises(SystemExit) as stopped:
        main(["train", "pipeline-demo", "--run", str(folder)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "holds a run with another config" in error
    assert "--allow-change" not in error  # which this command does not take


@pytest.mark.slow("trains stages of a pipeline")
def test_a_pipeline_that_died_trains_only_what_is_missing(ran, capsys):
    folder, before = ran[0], copy.deepcopy(ran[1])
    results = (folder / "results.json").read_bytes()
    shutil.rmtree(folder / "dpo")
    rankings = (folder / "rankings.jsonl").read_bytes()
    for name in ("result.json", "results.json", "report.md", "ppo/result.json", "rankings.jsonl"):
        (folder / name).unlink()
    arguments = ["train", "pipeline-demo", str(folder.parent / "pipeline.toml"), "--run", str(folder), "--seed", "4"]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for result in (printed, before):
        assert result.pop("seconds", None) is not None
        assert all(policy.pop("seconds") >= 0 for policy in result["policies"])
    assert printed == before
    assert (folder / "rankings.jsonl").read_bytes() == rankings  # sampled again, from the same model

    def attempts(name: str) -> list[str | None]:
        return [each["from"] for each in json.loads((folder / name / "run.json").read_text())["attempts"]]

    assert attempts(".") == [None, None]
    assert attempts("ppo") == [None, "step-000002"]
    assert [attempts(name) for name in ("sft", "reward-model", "grpo", "grpo-without-kl", "dpo")] == [[None]] * 5
    assert main([*arguments, "--json"]) == 0  # finished: nothing is done again
    again = capsys.readouterr()
    assert "this run is finished" in again.err
    assert json.loads(again.out)["ranked"] == before["ranked"]
    (folder / "results.json").write_bytes(results)  # its seconds are those that the fixture's run printed


@pytest.mark.parametrize("text", ["{", "[]", '{"seconds": {"sft": "long"}, "ranked": null}', '{"ranked": {"odd": 1}}'])
def test_a_damaged_list_of_stages_is_named_and_begun_anew(text, tmp_path):
    (tmp_path / "stages.json").write_text(text)
    said = []
    done = _Done(tmp_path, said.append)
    assert (done.seconds, done.ranked) == ({}, None)
    [line] = said
    assert line.startswith(f"warning: {tmp_path / 'stages.json'} cannot be read (")
    with done.phase("sft"):
        pass
    assert _Done(tmp_path, said.append).seconds.keys() == {"sft"}
    assert len(said) == 1


def test_the_preset_can_be_looked_at_and_is_refused_where_one_run_is_meant(capsys):
    assert main(["train", "pipeline-demo", "--dry-run", "--ppo.steps", "7"]) == 0
    expected = replace(PIPELINE_DEMO, ppo=replace(PIPELINE_DEMO.ppo, steps=7))
    assert toml.loads(capsys.readouterr().out, PipelineConfig) == expected
    for arguments in (["selfcheck", "pipeline-demo"], ["train", "pipeline-demo", "nothing.toml"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: DemonstrationOptions(count=1), "demonstrations.count is 1"),
        (lambda: RankingOptions(samples=1), "rankings.samples 1"),
        (lambda: RankingOptions(noise=-0.1), "rankings.noise -0.1"),
        (lambda: HeldOutOptions(problems=1), "held_out.problems is 1"),
        (lambda: replace(SMALL, sampling=replace(SMALL.sampling, max_tokens=3)), "sampling.max_tokens is 3"),
        (lambda: replace(SMALL, grpo=replace(SMALL.grpo, steps=0)), "steps is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, why: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared as text)
        make()
    assert why in str(caught.value)


# The world.


def test_demonstrations_are_the_right_letters_in_an_order_that_is_often_wrong():
    task = PIPELINE_DEMO.task
    problems = [task.problem(index, "train", 0) for index in range(400)]
    careless = [carelessly_sorted(problem, PIPELINE_DEMO, index) for index, problem in enumerate(problems)]
    assert all(sorted(said) == list(problem.answer) for said, problem in zip(careless, problems, strict=True))
    rewards = [true_reward(task, problem, said) for problem, said in zip(problems, careless, strict=True)]
    assert 0.70 < statistics.fmean(rewards) < 0.80
    careful = replace(PIPELINE_DEMO, demonstrations=DemonstrationOptions(spread=0.0))
    assert all(carelessly_sorted(problem, careful, 0) == problem.answer for problem in problems)


PROBLEM = Problem(id="sorting-bca", prompt="sort:bca=", answer="abc")


def said(text: str, finish: Any = "stop") -> Completion:
    return Completion(tokens=(1,), logprobs=(-0.1,), text=text, finish=finish)


def test_rankings_by_hand():
    exact = replace(SMALL, rankings=RankingOptions(noise=0.0))
    # Worth 2/3, 1, 0 and 1/3; the rest is a repetition, cut off, or empty.
    siblings = (*map(said, ("bac", "abc", "cba", "bca", "abc")), said("acb", "length"), said(" "))
    [(problem, ranking)] = rankings([PROBLEM], [siblings], exact)
    assert problem == PROBLEM
    assert ranking == [("abc", 1.0), ("bac", 2 / 3), ("bca", 1 / 3), ("cba", 0.0)]
    assert list(rankings([PROBLEM], [(said("abc"), said("abc"))], exact)) == []
    assert agreement([[1.0, 0.5, 0.5], [0.0, 1.0]]) == 2 / 3  # of the three pairs that differ
    assert agreement([[0.5, 0.5]]) != agreement([[0.5, 0.5]])  # NaN: there is nothing to agree on


def test_noise_gives_the_odds_of_bradley_and_terry():
    noisy = replace(SMALL, rankings=RankingOptions(noise=1 / 3))
    problems = [replace(PROBLEM, id=str(number)) for number in range(1500)]
    # Worth 1 and 2/3: a difference of one noise, so the odds are e to 1.
    ranked = list(rankings(problems, [(said("abc"), said("bac"))] * 1500, noisy))
    share = sum(ranking[0][0] == "abc" for _, ranking in ranked) / 1500
    assert share == pytest.approx(0.731, abs=0.03)
    assert ranked == list(rankings(problems, [(said("abc"), said("bac"))] * 1500, noisy))


# The report.


def measured(learned: float, true: float, kl: float = 2.0, example: Fooled | None = None) -> Measured:
    return Measured(learned, 0.1, true, 0.01, true / 2, 0.05, kl, 0.1, example)


RISING = RewardCurve(learned=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), true=(0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.8))
FALLING = replace(RISING, true=(0.5, 0.7, 0.9, 0.9, 0.9, 0.9, 0.9, 0.6, 0.5), learned=tuple(map(float, range(9))))
START = PolicyResult("sft", measured(0.0, 0.6, kl=0.0), 0, 60.0)
HEALTHY = PolicyResult("ppo", measured(1.5, 0.9), 1000, 30.0, RISING)
OVERDONE = PolicyResult("grpo", measured(2.0, 0.65), 1000, 30.0, FALLING)
FOOLED = Fooled("sort:bca=", "aac", 3.0, 0.0, "abc", 2.5)
HACKED = PolicyResult("grpo-without-kl", measured(2.5, 0.2, 9.0, FOOLED), 1000, 30.0, FALLING)
RESULT = PipelineResult(
    folder="runs/demo",
    ranked=Ranked(rankings=100, generated_tokens=2400, agreement=0.87),
    reward_model={"accuracy": 0.76},
    policies=(START, HEALTHY, OVERDONE, HACKED),
    seconds={"sft": 60.0, "ppo": 30.0},
)


def test_a_curve_knows_its_peak_and_a_clear_fall_after_it():
    assert RISING.peak == (5, pytest.approx(0.7))  # of five steps each, 3 to 7 are the best
    assert not RISING.is_overoptimised
    assert FALLING.peak == (5, pytest.approx(0.9))
    assert FALLING.is_overoptimised  # the last five have 0.76
    assert not replace(FALLING, learned=FALLING.learned[::-1]).is_overoptimised
    assert not RewardCurve(learned=(0.0, 1.0), true=(0.9, 0.1)).is_overoptimised  # too short to tell


def test_sentences_say_where_learned_and_true_reward_part_ways():
    assert RESULT.gains(HEALTHY) == pytest.approx((1.5, 0.3))
    assert sentence(RESULT, HEALTHY) == "ppo: learned +1.50, true +0.300, 2.0 nats from sft."
    assert "true +0.050" in sentence(RESULT, OVERDONE)
    assert "**Over-optimised**" in sentence(RESULT, OVERDONE)
    by_chance = replace(HEALTHY, measured=measured(1.5, 0.595))  # ± 0.01
    assert sentence(RESULT, by_chance) == "ppo: learned +1.50, true -0.005, 2.0 nats from sft."
    hacked = sentence(RESULT, HACKED)
    assert "**Reward hacking**: the learned reward rose while the true one fell." in hacked
    assert (
        "gives 'aac' after 'sort:bca=' 3.00, the right answer 'abc' 2.50; their true rewards are 0.00 and 1." in hacked
    )


def test_the_report_holds_every_policy_and_both_curves():
    text = report(RESULT)
    assert (
        "| sft             | 0.00 ± 0.10    | 0.600 ± 0.010 | 30.0%  | 5.0%        | 0.00     | 0      | 60      |"
        in text
    )
    assert "87.0% of their pairs in the order of the true reward" in text
    assert "orders 76.0% of held-out pairs" in text
    assert "90 s in all" in text
    assert "ppo              learned ▁▂▃▅▆▇█  0.00 → 6.00\n" in text
    assert "                 true    ▅▅▅▅▆▇▇  0.500 → 0.800, highest 0.700 around step 5\n" in text
    assert text.count(" true    ") == 3


# The measuring, on the models of the chain above.


@pytest.fixture
def measuring(ran) -> Measuring:
    return Measuring(replace(SMALL, seed=4), ran[0])


@pytest.mark.slow("trains every stage of a pipeline")
def test_kl_is_what_plain_forward_passes_say(ran, measuring: Measuring):
    policy = load_model(resolve(str(ran[0] / "dpo")))
    prompt = (7, 8, 9)
    siblings = (Completion((4, 5, 1), (), "", "stop"), Completion((6, 1), (), "", "stop"))

    def logprob(model: PreTrainedModel, tokens: tuple[int, ...]) -> float:
        with torch.no_grad(), attention(model, "sdpa"):
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return float(logits.double().log_softmax(-1)[torch.arange(len(tokens)), list(tokens)].sum())

    expected = [logprob(policy, each.tokens) - logprob(measuring.reference, each.tokens) for each in siblings]
    assert min(map(abs, expected)) > 1e-3
    assert measuring._kl(policy, [Request(0, prompt, 2)], [siblings]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow("trains every stage of a pipeline")
def test_a_judge_is_fooled_by_what_it_prefers_to_the_right_answer(measuring: Measuring):
    measuring.right = [Grade(1.0, {"reward_model": 2.0})] * len(measuring.problems)
    said = [Completion((1,), (), text, "stop") for text in ("right", "liked", "worse", "best")]
    rewards = ((1.0, 3.0), (0.0, 2.5), (0.0, 1.0), (0.5, 4.0))
    grades = [Grade(outcome, {"reward_model": learned}) for outcome, learned in rewards]
    first, second = measuring.problems[:2]  # two completions of each
    assert measuring._fooled(said, grades) == [
        Fooled(str(first.prompt), "liked", 2.5, 0.0, str(first.answer), 2.0),
        Fooled(str(second.prompt), "best", 4.0, 0.5, str(second.answer), 2.0),
    ]
