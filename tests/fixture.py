"""Four rows of one group, small enough for paper and pencil, that reach every branch of every gate.

Upper clip (z = 0.30), between 1.2 and 1.28 (0.22), lower clip for A < 0 (−0.35, −0.30), unclipped r > 1
for A < 0 (0.25), dual clip (1.30), unequal lengths, a sampler far too sure (e^0.9) and far too unsure (e^−0.8).
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import proximo
from proximo import Algorithm, Stats


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


MASK = matrix([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
OLD = matrix([[-1.0, -0.5, -2.0, -0.7], [-0.3, -1.2, 0, 0], [-0.9, -0.4, -1.5, 0], [-0.6, 0, 0, 0]])
LOG_RATIO = matrix([[0.30, -0.10, 0.05, -0.40], [0.25, -0.35, 0, 0], [-0.30, 0.10, 1.30, 0], [0.22, 0, 0, 0]])
SMALL_LOG_RATIO = matrix([[4e-4, -1e-4, 2e-4, 1e-3], [-2e-4, -6e-4, 0, 0], [3e-4, -1e-4, 1e-4, 0], [9e-4, 0, 0, 0]])
REF = OLD + matrix([[0.10, -0.20, 0.00, 0.30], [-0.15, 0.05, 0, 0], [0.20, -0.10, -0.50, 0], [0.05, 0, 0, 0]])
ROLLOUT = OLD - matrix([[0.05, -0.02, 0.90, 0.00], [0.00, -0.80, 0, 0], [0.10, 0.00, -0.05, 0], [0.02, 0, 0, 0]])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
ADVANTAGES = math.sqrt(3) / 2 * torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64).expand(4, 4)
GROUP = torch.zeros(4, dtype=torch.long)

_GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
GOLDEN_LOSSES = _GOLDEN["losses"]
GOLDEN = _GOLDEN["values"]


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def run(
    algorithm: Algorithm, log_ratio: Tensor = LOG_RATIO, advantages: Tensor = ADVANTAGES, mask: Tensor = MASK, **more
) -> tuple[Tensor, Tensor, Stats]:
    """Loss, its gradient with respect to log-probs, and statistics on the fixture."""
    logprobs = (OLD + log_ratio).requires_grad_()
    tensors: dict[str, Any] = {
        "old_logprobs": OLD,
        "advantages": advantages,
        "mask": mask,
        "group": GROUP,
        "ref_logprobs": REF,
        "rollout_logprobs": ROLLOUT,
    }
    loss, stats = proximo.policy_loss(algorithm, logprobs=logprobs, **(tensors | more))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, stats


def assert_close(actual: Tensor | float, expected: Tensor | float | list, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=tolerance,
    )
