"""The pipeline: the whole chain with minimal settings, the world's data by hand, and what the report says of it."""

import io
import json
import statistics
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from proximo import toml
from proximo.cli import main
from proximo.models import load_model
from proximo.models.shipped import resolve
from proximo.presets import PIPELINE_DEMO
from proximo.tasks import Sorting
from proximo.training.config import RunConfig, TrainingOptions, ValueOptions
from proximo.training.dpo import DpoConfig
from proximo.training.fitting import FitOptions
from proximo.training.pipeline import (
    Curve,
    DemonstrationOptions,
    HeldOutOptions,
    Measured,
    PipelineConfig,
    Policy,
    PreferenceOptions,
    RankingOptions,
    ReinforcementOptions,
    Result,
    RewardModelOptions,
    pipeline,
    report,
)
from proximo.training.pipeline.report import sentence
from proximo.training.pipeline.world import Ranked, _rankings, carelessly_sorted, true_reward
from proximo.training.reward_model import RewardModelConfig
from proximo.training.sft import SftConfig
from proximo.types import Completion, Problem

TRAINING = TrainingOptions(groups=2, group_size=3, minibatches=1, learning_rate=1e-3)
SMALL = PipelineConfig(
    sft=FitOptions(epochs=2.0, batch=32, learning_rate=5e-3),
    reward_model=RewardModelOptions(PIPELINE_DEMO.reward_model.loss, FitOptions(batch=8, learning_rate=1e-3)),
    ppo=ReinforcementOptions(PIPELINE_DEMO.ppo.algorithm, TRAINING, steps=2, value=ValueOptions()),
    grpo=ReinforcementOptions(PIPELINE_DEMO.grpo.algorithm, TRAINING, steps=2),
    dpo=PreferenceOptions(PIPELINE_DEMO.dpo.loss, FitOptions(batch=8, learning_rate=1e-3)),
    task=Sorting(length=3, alphabet="abcdef", held_out=8),
    demonstrations=DemonstrationOptions(count=500, spread=2.0),
    rankings=RankingOptions(prompts=24, samples=3),
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


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_stage_leaves_its_folder_and_reads_the_one_before(ran):
    folder, _ = ran
    config = toml.loads((folder / "config.toml").read_text(), PipelineConfig)
    assert config == replace(SMALL, seed=4)
    assert len(rows(folder / "demonstrations.jsonl")) == 500
    sft = toml.loads((folder / "sft" / "config.toml").read_text(), SftConfig)
    judge = toml.loads((folder / "reward-model" / "config.toml").read_text(), RewardModelConfig)
    preferred = toml.loads((folder / "dpo" / "config.toml").read_text(), DpoConfig)
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


def test_results_are_what_the_folders_say(ran):
    folder, printed = ran
    results = json.loads((folder / "results.json").read_text())
    assert results == printed
    assert [policy["name"] for policy in results["policies"]] == NAMES
    assert results["ranked"]["rankings"] == len(rows(folder / "rankings.jsonl")) > 0
    held_out = [row for row in rows(folder / "reward-model" / "metrics.jsonl") if "held_out/accuracy" in row]
    assert results["reward_model"]["accuracy"] in [row["held_out/accuracy"] for row in held_out]
    for policy in results["policies"][1:4]:
        steps = [row for row in rows(folder / policy["name"] / "metrics.jsonl") if "sampled_tokens" in row]
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


def test_the_fine_tuned_model_is_no_distance_from_itself(ran):
    _, results = ran
    measured = {policy["name"]: policy["measured"] for policy in results["policies"]}
    assert (measured["sft"]["kl"], measured["sft"]["kl_half_width"]) == (0.0, 0.0)
    assert all(measured[name]["kl"] != 0 for name in NAMES[1:])
    for each in measured.values():
        assert 0 <= each["true"] <= 1
        assert 0 <= each["fooled_share"] <= 1
        assert each["sorted_share"] <= each["true"]  # a sorted string is worth 1, the others 0 or more


def test_a_used_folder_is_refused(ran, capsys):
    folder, _ = ran
    with pytest.raises(SystemExit) as stopped:
        main(["train", "pipeline-demo", "--run", str(folder)])
    assert stopped.value.code == 2
    assert "there is a run in this folder already" in capsys.readouterr().err


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
        (lambda: pipeline(SMALL, Path(__file__).parents[1] / "no" / "such", print) and None, "never"),
    ][:-1],
)
def test_settings_that_mean_nothing_are_refused(make: Any, why: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared as text)
        make()
    assert why in str(caught.value)
