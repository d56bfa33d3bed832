"""Process supervision: rewards of single steps, at their tokens, in a run and in its stored steps."""

import json
from dataclasses import replace

import pytest
import torch

from proximo import presets
from proximo.algorithms import GSPO_TOKEN
from proximo.insight.lens.crediting import advantages_under
from proximo.insight.lens.lens import policy_loss
from proximo.insight.lens.steps import read_step
from proximo.losses.pieces.advantages import GroupNormalized
from proximo.losses.pieces.credit import ProcessNormalized
from proximo.rl.assemble import step_rewards
from proximo.rl.config import EvaluationOptions, TrainingOptions
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.rollout_json import _read_rollout, _rollout
from proximo.tasks import Chain
from proximo.types import Completion, Grade, Problem, Rollout, Turn
from tests.runs.test_resume import Quiet


def rollout(tokens: int, *steps: tuple[int, float]) -> Rollout:
    return Rollout(Completion(tuple(range(tokens)), (0.0,) * tokens, "", "stop"), Grade(1.0, steps=steps))


def test_a_step_is_rewarded_at_the_token_that_ends_it():
    """Tokens of two characters: a step of three characters ends in the second token, one of four too."""
    rollouts = [rollout(4, (3, 1.0), (4, 0.0), (7, 0.5)), rollout(2), rollout(1, (9, 1.0))]
    found = step_rewards((3, 4), rollouts, lambda tokens: ["ab"] * len(tokens))
    assert found is not None
    assert found.nan_to_num(nan=-1.0).tolist() == [[-1, 1.0, -1, 0.5], [-1] * 4, [1.0, -1, -1, -1]]
    assert step_rewards((1, 2), [rollout(2)], lambda tokens: ["ab"] * len(tokens)) is None


def test_steps_of_an_episode_are_found_in_its_last_reply():
    turns = (Turn("assistant", "abab", 2), Turn("user", "ab", 3), Turn("assistant", "abab", 5))
    several = Rollout(
        Completion(tuple(range(5)), (0.0,) * 5, "abab", "stop", turns=turns), Grade(1.0, steps=((2, 1.0), (4, 0.5)))
    )
    found = step_rewards((1, 5), [several], lambda tokens: ["ab"] * len(tokens))
    assert found is not None
    assert found.nan_to_num(nan=-1.0).tolist() == [[-1, -1, -1, 1.0, 0.5]]


def test_steps_of_a_chain_are_graded_one_by_one():
    problem = Problem("chain-a3b4c9", "a3b4c9=", "6")
    texts = ["3 b4=7 c9=6", "3 b4=6 c9=6", "3 b4=7", "3 b4=7 c9=6 d1=7"]
    grades = Chain().grade([problem] * 4, [Completion((1,), (0.0,), text, "stop") for text in texts])
    assert [grade.steps for grade in grades] == [
        ((1, 1.0), (6, 1.0), (11, 1.0)),
        ((1, 1.0), (6, 0.0), (11, 1.0)),
        ((1, 1.0), (6, 1.0)),
        ((1, 1.0), (6, 1.0), (11, 1.0), (16, 0.0)),
    ]


def test_steps_survive_a_resume():
    before = rollout(2, (1, 0.5), (2, 1.0))
    stored = json.loads(json.dumps(_rollout(before.completion, before.grade)))
    assert _read_rollout(stored).grade == before.grade


@pytest.mark.slow("trains a run")
@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.parametrize(
    "algorithm", [presets.CHAIN_PROCESS.algorithm, replace(GSPO_TOKEN, advantage=ProcessNormalized())]
)
def test_a_run_with_process_supervision(tmp_path, algorithm):
    """GSPO-token too: where advantages differ by token, it is another algorithm than GSPO."""
    config = replace(
        presets.CHAIN_PROCESS,
        algorithm=algorithm,
        task=Chain(steps=(2, 4), held_out=4),
        training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-4, warmup_steps=0),
        evaluation=EvaluationOptions(problems=0),
        device="cpu",
        steps=1,
    )
    train(Run(config, tmp_path / "run", Quiet()))
    [row] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["gradient_norm"] > 0
    assert {"sources/steps-02/accuracy", "sources/steps-04/accuracy"} <= set(row)
    step = read_step(tmp_path / "run" / "rollouts" / "step-000001.parquet", 1)
    assert policy_loss(step, config.algorithm, config) == pytest.approx(row["policy_loss"], abs=1e-6)
    # From a run of another advantage, a replay computes the run's own from the stored rewards of the steps.
    other = replace(config, algorithm=replace(config.algorithm, advantage=GroupNormalized()))
    again, _ = advantages_under(step, replace(config.algorithm, advantage=ProcessNormalized()), other)
    torch.testing.assert_close(again, step.batch.advantages)
    assert len(again.unique()) > 4
