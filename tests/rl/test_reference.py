"""The five algorithms against references that share nothing with them: plain loops over plain floats.

Loss and gradient are written out from the papers' equations, the gradient by hand, not by autograd.
"""

import math
import random

import pytest
import torch

import proximo
from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO

Row = dict


def random_rows(seed: int) -> list[Row]:
    """Ragged rows, several groups, log-ratios from tiny to large."""
    rng = random.Random(seed)
    spread = rng.choice([1e-4, 0.05, 0.3, 1.5])
    rows = []
    for group in range(rng.randint(1, 4)):
        for _ in range(rng.randint(1, 5)):
            length = rng.randint(1, 9)
            old = [-rng.expovariate(1) for _ in range(length)]
            rows.append(
                {
                    "group": group,
                    "old": old,
                    "new": [value + rng.gauss(0, spread) for value in old],
                    "ref": [value + rng.gauss(0, 0.4) for value in old],
                    "values": [rng.random() for _ in range(length)],
                    "reward": rng.choice([0.0, 1.0, 0.5, rng.uniform(-1, 1)]),
                }
            )
    return rows


def group_advantages(rows: list[Row]) -> list[float]:
    advantages = []
    for row in rows:
        rewards = [other["reward"] for other in rows if other["group"] == row["group"]]
        if max(rewards) == min(rewards):
            advantages.append(0.0)
            continue
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        advantages.append((row["reward"] - mean) / (std + 1e-6))
    return advantages


def clipped(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Objective of one token, and its derivative by log π."""
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    return ratio * advantage, ratio * advantage


def grpo(rows: list[Row]) -> tuple[float, list[list[float]]]:
    loss, gradient = 0.0, []
    for row, advantage in zip(rows, group_advantages(rows), strict=True):
        length, slopes = len(row["old"]), []
        for new, old, ref in zip(row["new"], row["old"], row["ref"], strict=True):
            value, slope = clipped(math.exp(new - old), advantage, 0.2, 0.2)
            kl = math.exp(ref - new) - (ref - new) - 1
            loss -= (value - 0.04 * kl) / length / len(rows)
            slopes.append(-(slope - 0.04 * (1 - math.exp(ref - new))) / length / len(rows))
        gradient.append(slopes)
    return loss, gradient


def dapo(rows: list[Row]) -> tuple[float, list[list[float]]]:
    tokens = sum(len(row["old"]) for row in rows)
    loss, gradient = 0.0, []
    for row, advantage in zip(rows, group_advantages(rows), strict=True):
        pairs = [
            clipped(math.exp(new - old), advantage, 0.2, 0.28) for new, old in zip(row["new"], row["old"], strict=True)
        ]
        loss -= sum(value for value, _ in pairs) / tokens
        gradient.append([-slope / tokens for _, slope in pairs])
    return loss, gradient


def gspo(rows: list[Row]) -> tuple[float, list[list[float]]]:
    loss, gradient = 0.0, []
    for row, advantage in zip(rows, group_advantages(rows), strict=True):
        length = len(row["old"])
        mean = sum(new - old for new, old in zip(row["new"], row["old"], strict=True)) / length
        value, slope = clipped(math.exp(mean), advantage, 3e-4, 4e-4)
        loss -= value / len(rows)
        gradient.append([-slope / length / len(rows)] * length)
    return loss, gradient


def sapo(rows: list[Row]) -> tuple[float, list[list[float]]]:
    loss, gradient = 0.0, []
    for row, advantage in zip(rows, group_advantages(rows), strict=True):
        tau = 1.0 if advantage > 0 else 1.05
        length, slopes = len(row["old"]), []
        for new, old in zip(row["new"], row["old"], strict=True):
            ratio = math.exp(new - old)
            opening = 1 / (1 + math.exp(-tau * (ratio - 1)))
            loss -= 4 / tau * opening * advantage / length / len(rows)
            slopes.append(-4 * opening * (1 - opening) * ratio * advantage / length / len(rows))
        gradient.append(slopes)
    return loss, gradient


def gae(rows: list[Row]) -> tuple[list[list[float]], list[list[float]]]:
    """λ = 0.95, k1 in the reward with 0.05, then whitening over all tokens: advantages and returns."""
    raw, returns = [], []
    for row in rows:
        length = len(row["old"])
        rewards = [-0.05 * (old - ref) for old, ref in zip(row["old"], row["ref"], strict=True)]
        rewards[-1] += row["reward"]
        values = [*row["values"], 0.0]
        errors = [rewards[t] + values[t + 1] - values[t] for t in range(length)]
        raw.append([sum(0.95 ** (s - t) * errors[s] for s in range(t, length)) for t in range(length)])
        returns.append([raw[-1][t] + values[t] for t in range(length)])
    flat = [value for row in raw for value in row]
    if len(flat) < 2:
        return [[0.0] * len(row) for row in raw], returns
    mean = sum(flat) / len(flat)
    variance = sum((value - mean) ** 2 for value in flat) / (len(flat) - 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in raw], returns


def ppo(rows: list[Row]) -> tuple[float, list[list[float]]]:
    tokens = sum(len(row["old"]) for row in rows)
    loss, gradient = 0.0, []
    for row, advantages in zip(rows, gae(rows)[0], strict=True):
        pairs = [
            clipped(math.exp(new - old), advantage, 0.2, 0.2)
            for new, old, advantage in zip(row["new"], row["old"], advantages, strict=True)
        ]
        loss -= sum(value for value, _ in pairs) / tokens
        gradient.append([-slope / tokens for _, slope in pairs])
    return loss, gradient


def padded(rows: list[Row], name: str, width: int) -> torch.Tensor:
    return torch.tensor([row[name] + [123.0] * (width - len(row[name])) for row in rows])


@pytest.mark.slow("compares with a padded model")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(
    ("algorithm", "reference"),
    [(PPO, ppo), (GRPO, grpo), (DAPO, dapo), (GSPO, gspo), (SAPO, sapo)],
    ids=["ppo", "grpo", "dapo", "gspo", "sapo"],
)
def test_from_rewards_to_gradient(algorithm, reference, seed):
    rows = random_rows(seed)
    width = max(len(row["old"]) for row in rows) + seed % 3
    old, new, ref = (padded(rows, name, width) for name in ("old", "new", "ref"))
    mask = torch.arange(width) < torch.tensor([[len(row["old"])] for row in rows])
    group = torch.tensor([row["group"] for row in rows])

    token_rewards = algorithm.shape(old, ref, mask) if algorithm is PPO else None
    advantages, returns = proximo.advantages(
        algorithm,
        rewards=torch.tensor([row["reward"] for row in rows]),
        group=group,
        mask=mask,
        values=padded(rows, "values", width),
        token_rewards=token_rewards,
    )
    if returns is not None:
        for ours, theirs in zip(returns, gae(rows)[1], strict=True):
            assert ours[: len(theirs)].tolist() == pytest.approx(theirs, abs=1e-12)

    logprobs = new.clone().requires_grad_()
    loss, _ = proximo.policy_loss(
        algorithm, logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask, group=group, ref_logprobs=ref
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected_loss, expected_gradient = reference(rows)
    assert loss.item() == pytest.approx(expected_loss, abs=1e-11)
    for ours, theirs in zip(gradient, expected_gradient, strict=True):
        assert ours[: len(theirs)].tolist() == pytest.approx(theirs, abs=1e-11)
        assert ours[len(theirs) :].tolist() == [0.0] * (width - len(theirs))
