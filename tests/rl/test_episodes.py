"""Runs of several turns: trained as a plain padded model would be, seen by the lens, and resumed to the same bytes."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm
from proximo.config import toml
from proximo.environments.kinds import MultiTurn
from proximo.environments.rollout import EpisodeBatch
from proximo.insight.lens.lens import policy_loss
from proximo.insight.lens.steps import read_step
from proximo.learner.named_tensors import read_tensors
from proximo.losses.pieces.advantages import GroupNormalized
from proximo.losses.pieces.credit import Gae, ReturnToGo, assign
from proximo.losses.records import Feedback
from proximo.models import load_model
from proximo.models.shipped import resolve
from proximo.models.values import TrunkHead
from proximo.rl.assemble import at_their_turns, to_batch
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.options import CheckpointOptions
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Completion, Grade, Group, Problem, Rollout, Turn
from tests.rl.test_reference import dapo, grpo, gspo, sapo
from tests.run_processes import Command
from tests.runs.test_resume import Quiet, assert_same, numbers

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")

FIVE = {"ppo": PPO, "grpo": GRPO, "dapo": DAPO, "gspo": GSPO, "sapo": SAPO}
REFERENCES = {"grpo": grpo, "dapo": dapo, "gspo": gspo, "sapo": sapo}


def config(algorithm: Algorithm, **changes: Any) -> RunConfig:
    small = RunConfig(
        algorithm=algorithm,
        task=Arithmetic(digits=1, held_out=4),
        device="cpu",
        environment=MultiTurn("tests.environments.worlds:Parity", max_turn_tokens=3),
        sampling=SamplingOptions(max_tokens=24),
        training=TrainingOptions(groups=2, group_size=4, minibatches=1, learning_rate=1e-3, warmup_steps=0),
        value=ValueOptions(TrunkHead()) if algorithm is PPO else None,
        evaluation=EvaluationOptions(problems=0),
        checkpoints=CheckpointOptions(every=1),
        steps=2,
    )
    return replace(small, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_shipped_model):
    """A finished run of each algorithm, made when it is first asked for."""
    root = tmp_path_factory.mktemp("episodes")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            train(Run(config(FIVE[name]), root / name, Quiet()))
        return root / name

    return folder


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "sampler_gap" in row]


@pytest.mark.slow("trains runs")
@pytest.mark.parametrize("name", FIVE)
def test_the_lens_gives_the_logged_loss(name, runs):
    for row in metrics(runs(name)):
        step = read_step(runs(name) / f"rollouts/step-{row['step']:06d}.parquet", row["step"])
        found = policy_loss(step, FIVE[name], config(FIVE[name]))
        assert found == pytest.approx(row["policy_loss"], abs=1e-6)
        assert row["sampler_gap"] < 1e-5
        assert bool((~step.batch.sampled).any())


def padded_logprobs(model, rows: list[dict]) -> list[torch.Tensor]:
    """Log-probs of each row's sampled tokens, by transformers' own attention over padded rows."""
    whole = [row["prompt_tokens"] + row["tokens"] for row in rows]
    width = max(map(len, whole))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in whole])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in whole])
    scores = torch.log_softmax(model(input_ids=tokens, attention_mask=mask).logits.double(), dim=-1)
    found = []
    for number, row in enumerate(rows):
        start = len(row["prompt_tokens"])
        places = [place for place, sampled in enumerate(row["sampled"]) if sampled]
        found.append(torch.stack([scores[number, start + place - 1, row["tokens"][place]] for place in places]))
    return found


def padded_values(model, head: torch.nn.Linear, rows: list[dict]) -> list[torch.Tensor]:
    """The head's value of each row's sampled tokens, read where a token is predicted."""
    whole = [row["prompt_tokens"] + row["tokens"] for row in rows]
    width = max(map(len, whole))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in whole])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in whole])
    values = head(model.model(input_ids=tokens, attention_mask=mask).last_hidden_state).squeeze(-1)
    found = []
    for number, row in enumerate(rows):
        start = len(row["prompt_tokens"])
        places = [start + place - 1 for place, sampled in enumerate(row["sampled"]) if sampled]
        found.append(values[number, places])
    return found


@pytest.mark.slow("compares with a padded model")
@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradient_are_those_of_a_plain_padded_model(name, runs):
    rows = [
        row
        for row in pq.read_table(runs(name) / "rollouts/step-000001.parquet").to_pylist()
        if row["state"] == "trained"
    ]
    assert len(rows) >= 4
    model = load_model(resolve("tiny-arithmetic"), device="cpu", dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    logprobs = padded_logprobs(model, rows)
    plain = [
        {
            "group": row["group"],
            "reward": row["reward"],
            "new": own.tolist(),
            "old": own.tolist(),  # it is the first update
            "ref": own.tolist(),
        }
        for row, own in zip(rows, logprobs, strict=True)
    ]
    loss, slopes = REFERENCES[name](plain)
    torch.stack(
        [(own * own.new_tensor(slope)).sum() for own, slope in zip(logprobs, slopes, strict=True)]
    ).sum().backward()
    norm = math.sqrt(
        sum(float((each.grad.double() ** 2).sum()) for each in model.parameters() if each.grad is not None)
    )
    [update] = json.loads(pq.read_schema(runs(name) / "rollouts/step-000001.parquet").metadata[b"proximo"])["updates"]
    assert update["policy_loss"] == pytest.approx(loss, abs=1e-5)
    assert norm > 0
    assert update["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def plain_gae(rewards: list[float], values: list[float], decay: float) -> list[float]:
    """Advantages of the sampled tokens of one episode."""
    found, after, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + value_after - value + decay * after
        found.append(after)
        value_after = value
    return found[::-1]


@pytest.mark.slow("compares with a padded model")
def test_ppo_is_that_of_a_plain_padded_model(runs):
    """The second step, whose value head is not 0 any more: values, advantages, targets, loss and gradient of sampled
    tokens alone, in episodes in which an environment's tokens lie between them."""
    [rows, checkpoint] = [
        pq.read_table(runs("ppo") / "rollouts/step-000002.parquet").to_pylist(),
        runs("ppo") / "checkpoints/step-000001",
    ]
    assert all(row["state"] == "trained" and not all(row["sampled"]) for row in rows)
    model, first = (
        load_model(str(path), device="cpu", dtype=torch.float32) for path in (checkpoint, resolve("tiny-arithmetic"))
    )
    head = torch.nn.Linear(model.config.hidden_size, 1)
    head.load_state_dict(
        {
            name.removeprefix("head."): each
            for name, each in read_tensors(checkpoint / "state/value.safetensors").items()
        }
    )
    for each in (model, first):
        each.set_attn_implementation("sdpa")
    own, before = padded_logprobs(model, rows), padded_logprobs(first, rows)
    values = padded_values(model, head, rows)
    advantages, targets = [], []
    for row, new, old, value in zip(rows, own, before, values, strict=True):
        places = [place for place, sampled in enumerate(row["sampled"]) if sampled]
        rewards = (-0.05 * (new - old)).tolist()
        for number, place in enumerate(places):
            rewards[number] += row["turn_rewards"][place]
        credit = plain_gae(rewards, value.tolist(), 0.95)
        advantages += credit
        targets += [one + other for one, other in zip(credit, value.tolist(), strict=True)]
        assert [row["values"][place] for place in places] == pytest.approx(value.tolist(), abs=1e-5)
        assert [row["returns"][place] for place in places] == pytest.approx(targets[-len(places) :], abs=1e-5)
    whole = torch.tensor(advantages, dtype=torch.float64)
    whole = (whole - whole.mean()) / (whole.var(correction=1) + 1e-8).sqrt()
    stored = [row["advantages"][place] for row in rows for place, own in enumerate(row["sampled"]) if own]
    assert stored == pytest.approx(whole.tolist(), abs=1e-5)
    value_loss = 0.1 * 0.5 * ((torch.cat(values) - torch.tensor(targets)) ** 2).mean()
    (value_loss - (whole * torch.cat(own)).mean()).backward()
    [norm, value_norm] = [
        math.sqrt(sum(float((each.grad.double() ** 2).sum()) for each in part.parameters() if each.grad is not None))
        for part in (model, head)
    ]
    [update] = json.loads(pq.read_schema(runs("ppo") / "rollouts/step-000002.parquet").metadata[b"proximo"])["updates"]
    assert update["policy_loss"] == pytest.approx(-float(whole.mean()), abs=1e-5)
    assert update["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    [logged] = [row for row in metrics(runs("ppo")) if row["step"] == 2]
    assert logged["value_loss"] == pytest.approx(float(value_loss.detach()) / 0.1, rel=1e-4)
    assert logged["value_gradient_norm"] == pytest.approx(value_norm, rel=1e-4)


def test_a_turn_s_reward_comes_with_the_turn():
    """Two replies of two tokens, with an answer between them; 0.5 for the first, 1 for the second."""
    turns = (Turn("assistant", "", 2, 0.5), Turn("user", "", 3), Turn("assistant", "", 5, 1.0))
    completion = Completion(
        (7, 8, 9, 7, 8), (0.0,) * 5, "", "stop", sampled=(True, True, False, True, True), turns=turns
    )
    group = Group(Problem("a", "1+1=", "2"), (5, 6), (Rollout(completion, Grade(1.5)),))
    batch = to_batch([group])
    assert batch.turn_rewards is not None
    values = torch.tensor([[0.1, 0.2, 9.0, 0.3, 0.4]], dtype=torch.float64)
    feedback = Feedback(rewards=batch.rewards, group=batch.group, mask=batch.mask, values=values)
    moved = at_their_turns(feedback, batch, 1.0, Gae())
    assert moved.rewards.tolist() == [1.5]
    assert assign(ReturnToGo(), moved).advantages.tolist() == [[1.5, 1.5, 0.0, 1.0, 1.0]]
    halved = at_their_turns(replace(feedback, rewards=batch.rewards / 2), batch, 0.5, Gae())
    assert assign(ReturnToGo(), halved).advantages.tolist() == [[0.75, 0.75, 0.0, 0.5, 0.5]]
    # δ: 0 + 0.2 − 0.1, 0.5 + 0.3 − 0.2, 0 + 0.4 − 0.3, 1 − 0.4; the answer is stepped over.
    one_step = assign(Gae(decay=0.0), moved).advantages
    torch.testing.assert_close(one_step, torch.tensor([[0.1, 0.6, 0.0, 0.1, 0.6]], dtype=torch.float64))


def test_equal_rewards_earned_in_another_order_stay_equal():
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floating point, and siblings that earn the same have no advantage."""
    earned = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1)]
    rollouts = []
    for rewards in earned:
        turns = tuple(Turn("assistant", "", end, reward) for end, reward in enumerate(rewards, 1))
        rollouts.append(Rollout(Completion((7, 8, 9), (0.0,) * 3, "", "stop", turns=turns), Grade(0.6)))
    batch = to_batch([Group(Problem("a", "1+1=", "2"), (5, 6), tuple(rollouts))])
    feedback = Feedback(rewards=batch.rewards, group=batch.group, mask=batch.mask)
    whole = GroupNormalized(epsilon=0.0)
    assert not assign(whole, at_their_turns(feedback, batch, 1.0, whole)).advantages.any()


@pytest.mark.slow("trains and resumes runs")
@pytest.mark.parametrize("name", ["ppo", "dapo"])
@pytest.mark.parametrize("turn", [4, 5])
def test_a_run_that_dies_in_the_middle_of_an_episode_resumes_to_the_same_bytes(name, turn, runs, tmp_path, monkeypatch):
    """Three turns a step: the fourth and the fifth are those of the second step."""
    answer, calls = EpisodeBatch._answer, []

    def dies(self, live) -> None:
        calls.append(len(live))
        if len(calls) == turn:
            raise InterruptedError("killed")
        answer(self, live)

    monkeypatch.setattr(EpisodeBatch, "_answer", dies)
    with pytest.raises(InterruptedError):
        train(Run(config(FIVE[name]), tmp_path, Quiet()))
    assert not (tmp_path / "result.json").exists()
    train(Run(config(FIVE[name]), tmp_path, Quiet()))
    assert_same(numbers(tmp_path), numbers(runs(name)))


@pytest.mark.scale
@pytest.mark.parametrize("name", FIVE)
def test_killed_at_random_moments_nothing_is_lost(name, tmp_path, small_model: Path):
    """Ten SIGKILLs of each algorithm, most of them in the middle of episodes."""
    kills = 10
    settings = config(FIVE[name], model=str(small_model / "tiny-arithmetic"), steps=2 * kills)
    (tmp_path / "run.toml").write_text(toml.dumps(settings))

    def start(run: str, number: int = 0) -> Command:
        arguments = ("train", str(tmp_path / "run.toml"), "--run", str(tmp_path / run))
        return Command(*arguments, stderr=tmp_path / f"{run}-{number}.txt")

    assert start("whole").wait() == 0, (tmp_path / "whole-0.txt").read_text()
    draws = random.Random(name)
    for number in range(kills):
        process, steps = start("run", number), draws.choice([1, 1, 2])
        for line in process.lines():
            steps -= line.startswith("step ")
            if not steps:
                break
        process._process.join(draws.uniform(0.0, 0.3))
        process.kill()
        process.wait()
    assert start("run", kills).wait() == 0, (tmp_path / f"run-{kills}.txt").read_text()
    assert len(json.loads((tmp_path / "run/run.json").read_text())["attempts"]) > kills // 2
    assert_same(numbers(tmp_path / "run"), numbers(tmp_path / "whole"))
