"""Log-probs and entropy of tokens straight from hidden states, a few rows of logits at a time.

With a vocabulary of 150 000 the logits of 16 000 tokens take 10 GB, several times over in a backward pass. Here
they exist only for one chunk of rows; the backward pass computes them again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximo.shapes import Float, Int


def token_logprobs(
    states: Float[Tensor, "C E"],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, " C"],
    *,
    temperature: float,
    byte_budget: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Log-prob of each target under softmax(states · weightᵀ / temperature), and that distribution's entropy.

    Half-precision inputs give float32 results from float32 logits. `byte_budget` bounds one chunk of logits; a
    pass holds a handful of such chunks. The entropy carries a gradient only where `entropy_gradient` asks.
    """
    check_temperature(temperature)
    rows = max(1, byte_budget // (weight.shape[0] * 4))
    return _TokenLogprobs.apply(states, weight, targets, temperature, rows, entropy_gradient)


def check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: a distribution needs one above 0 (greedy has no log-probs)")


def project(left: Float[Tensor, "M K"], right: Float[Tensor, "K N"]) -> Float[Tensor, "M N"]:
    """A matrix product whose half-precision inputs are summed into a float32 result, not rounded to half again."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: int, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normalisers = [], [], []
        for chunk, wanted in zip(states.split(rows), targets.split(rows), strict=True):
            logits = project(chunk, weight.T).div_(temperature)
            normaliser = logits.logsumexp(-1)
            everything = logits.sub_(normaliser[:, None])
            logprobs.append(everything.gather(-1, wanted[:, None])[:, 0])
            entropy.append(-(everything.exp().mul_(everything)).sum(-1))
            normalisers.append(normaliser)
        results = torch.cat(logprobs), torch.cat(entropy)
        ctx.save_for_backward(states, weight, targets, torch.cat(normalisers), results[1])
        ctx.temperature, ctx.rows, ctx.entropy_gradient = temperature, rows, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        states, weight, targets, normalisers, entropy = ctx.saved_tensors
        logprob_gradient, entropy_gradient = gradients
        need_states, need_weight = ctx.needs_input_grad[:2]
        to_states = torch.zeros_like(states) if need_states else None
        to_weight = torch.zeros_like(weight, dtype=entropy.dtype) if need_weight else None
        for start in range(0, len(states), ctx.rows):
            here = slice(start, start + ctx.rows)
            everything = project(states[here], weight.T).div_(ctx.temperature).sub_(normalisers[here, None])
            to_logits = everything.exp()
            if ctx.entropy_gradient:
                # d entropy / d logit_j = −p_j (log p_j + entropy)
                steepness = everything.add_(entropy[here, None]).mul_(entropy_gradient[here, None])
                to_logits.mul_(steepness.add_(logprob_gradient[here, None])).neg_()
            else:
                to_logits.mul_(-logprob_gradient[here, None])
            to_logits.scatter_add_(-1, targets[here, None], logprob_gradient[here, None])
            to_logits = to_logits.div_(ctx.temperature).to(states.dtype)
            if to_states is not None:
                to_states[here] = project(to_logits, weight)
            if to_weight is not None:
                to_weight += project(to_logits.T, states[here])
        return to_states, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None
