"""Log-probs and entropy of tokens straight from hidden states, a few rows of logits at a time.

With a vocabulary of 150 000 the logits of 16 000 tokens take 10 GB, several times over in a backward pass. Here
they exist only for one chunk of rows; the backward pass computes them again, but for chunks that there is memory to
keep. On a GPU what is done to a chunk is compiled: each pass over it is a trip to memory, and costs as much as the
matrix product that made it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximo.models.compiling import keep_variants
from proximo.models.devices import free_bytes
from proximo.types.tensor_types import Float, Int

CHUNK_BYTES = {"cuda": 2**30}
"""Bytes of logits held at a time, by kind of device: a GPU wants large products, a CPU what its cache holds."""
ELSEWHERE = 2**26
KEPT_SHARE = 0.5
"""Share of a GPU's free memory for logits kept until the backward pass. They are the first to go there, before the
gradients of the layers come."""
KEPT_ELSEWHERE = 2**28
"""Bytes of logits kept on a CPU, which other programs use too."""


def token_logprobs(
    states: Float[Tensor, "C E"],
    weight: Float[Tensor, "V E"],
    targets: Int[Tensor, " C"],
    *,
    temperature: float,
    byte_budget: int | None = None,
    entropy_gradient: bool = False,
    compiled: bool | None = None,
    kept_bytes: int | None = None,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Log-prob of each target under softmax(states · weightᵀ / temperature), and that distribution's entropy.

    Half-precision inputs give float32 results from float32 logits. `byte_budget` bounds one chunk of logits; a
    pass holds a handful of such chunks. The entropy carries a gradient only where `entropy_gradient` asks.
    `compiled` is whether what is done to a chunk is compiled; None: on a GPU. Up to `kept_bytes` of logits are kept for
    the backward pass; None: what is free on a GPU decides, and elsewhere a few hundred megabytes are. Nothing of it
    changes a result.
    """
    check_temperature(temperature)
    if byte_budget is None:
        byte_budget = CHUNK_BYTES.get(states.device.type, ELSEWHERE)
    rows = chunk_rows(weight.shape[0], byte_budget)
    passes = _compiled_passes() if (states.is_cuda if compiled is None else compiled) else _PLAIN
    if not torch.is_grad_enabled():
        kept_bytes = 0
    elif kept_bytes is None:
        kept_bytes = int(KEPT_SHARE * free_bytes(states.device)) if states.is_cuda else KEPT_ELSEWHERE
    kept = chunks_kept(weight.shape[0], kept_bytes, rows)
    return _TokenLogprobs.apply(states, weight, targets, temperature, rows, kept, entropy_gradient, passes)


def chunk_rows(vocabulary: int, byte_budget: int) -> int:
    """Rows of float32 logits in a chunk."""
    return max(1, byte_budget // (4 * vocabulary))


def chunks_kept(vocabulary: int, kept_bytes: int, rows: int) -> int:
    """Whole chunks of so many rows for which there is room."""
    return kept_bytes // (4 * vocabulary) // rows


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


def add_product(total: Float[Tensor, "M N"], left: Float[Tensor, "M K"], right: Float[Tensor, "K N"]) -> None:
    """Add a product to a total in full precision; on a GPU without a trip to memory for the product itself."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += project(left, right)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        rows: int,
        kept: int,
        entropy_gradient: bool,
        passes: "_Passes",
    ) -> tuple[Tensor, Tensor]:
        """The logits of the first `kept` chunks are kept."""
        logprobs, entropy, normalisers = [], [], []
        ctx.logits = {}
        for number, (chunk, wanted) in enumerate(zip(states.split(rows), targets.split(rows), strict=True)):
            logits = project(chunk, weight.T)
            if number < kept and any(ctx.needs_input_grad):
                ctx.logits[number * rows] = logits
            read = passes.read(logits, wanted, temperature)
            del logits  # before the next ones are there
            for values, value in zip((logprobs, entropy, normalisers), read, strict=True):
                values.append(value)
        results = torch.cat(logprobs), torch.cat(entropy)
        ctx.save_for_backward(states, weight, targets, torch.cat(normalisers), results[1])
        ctx.temperature, ctx.rows, ctx.entropy_gradient, ctx.passes = temperature, rows, entropy_gradient, passes
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
            logits = ctx.logits.pop(start, None)
            to_logits = ctx.passes.gradient(
                project(states[here], weight.T) if logits is None else logits,
                targets[here],
                None if logits is not None and ctx.passes.normalises else normalisers[here],
                logprob_gradient[here],
                (entropy[here], entropy_gradient[here]) if ctx.entropy_gradient else None,
                ctx.temperature,
                states.dtype,
            )
            if to_states is not None:
                to_states[here] = project(to_logits, weight)
            if to_weight is not None:
                add_product(to_weight, to_logits.T, states[here])
            del to_logits, logits  # before the next logits are there
        return to_states, None if to_weight is None else to_weight.to(weight.dtype), *([None] * 6)


# What is done to one chunk of logits, which is not needed afterwards


@dataclass(frozen=True)
class _Passes:
    read: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., Tensor]
    """Takes what `_gradient` takes; without a normaliser only if it normalises."""
    normalises: bool
    """True if reading leaves log-probs in the place of the logits."""


def _read(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], temperature: float
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Float[Tensor, " C"]]:
    """The targets' log-probs, the entropy, and the logarithm of the sum of exponentials. In the place of the logits are
    then the log-probs of all tokens."""
    logits = logits.div_(temperature)
    normaliser = logits.logsumexp(-1)
    everything = logits.sub_(normaliser[:, None])
    logprobs = everything.gather(-1, targets[:, None])[:, 0]
    return logprobs, -(everything.exp().mul_(everything)).sum(-1), normaliser


def _gradient(
    logits: Float[Tensor, "C V"],
    targets: Int[Tensor, " C"],
    normaliser: Float[Tensor, " C"] | None,
    pull: Float[Tensor, " C"],
    entropy: tuple[Float[Tensor, " C"], Float[Tensor, " C"]] | None,
    temperature: float,
    dtype: torch.dtype,
) -> Float[Tensor, "C V"]:
    """Gradient of the logits. Without a normaliser they are log-probs already. `pull` is the gradient of the targets'
    log-probs; `entropy` its value and its gradient, where it has one."""
    everything = logits if normaliser is None else logits.div_(temperature).sub_(normaliser[:, None])
    to_logits = everything.exp()
    if entropy is None:
        to_logits.mul_(-pull[:, None])
    else:
        # d entropy / d logit_j = −p_j (log p_j + entropy)
        value, its_pull = entropy
        steepness = everything.add_(value[:, None]).mul_(its_pull[:, None])
        to_logits.mul_(steepness.add_(pull[:, None])).neg_()
    return to_logits.scatter_add_(-1, targets[:, None], pull[:, None]).div_(temperature).to(dtype)


def read_once(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], temperature: float | None
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Float[Tensor, " C"]]:
    """`_read` as one kernel: the largest logit, then both sums together, and nothing written but the results."""
    scaled = logits if temperature is None else logits / temperature
    top = scaled.amax(-1, keepdim=True)
    below = scaled - top
    weights = below.exp()
    total = weights.sum(-1)
    rest = total.log()
    logprobs = below.gather(-1, targets[:, None])[:, 0] - rest
    return logprobs, rest - (weights * below).sum(-1) / total, top[:, 0] + rest


def gradient_once(
    logits: Float[Tensor, "C V"],
    targets: Int[Tensor, " C"],
    normaliser: Float[Tensor, " C"],
    pull: Float[Tensor, " C"],
    entropy: tuple[Float[Tensor, " C"], Float[Tensor, " C"]] | None,
    temperature: float | None,
    dtype: torch.dtype,
) -> Float[Tensor, "C V"]:
    """`_gradient` as one kernel, rounded on its way out."""
    everything = (logits if temperature is None else logits / temperature) - normaliser[:, None]
    chances = everything.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32) == targets[:, None].int()
    to_logits = torch.where(is_target, pull[:, None], 0.0) - chances * pull[:, None]
    if entropy is not None:
        value, its_pull = entropy
        to_logits = to_logits - chances * (everything + value[:, None]) * its_pull[:, None]
    return (to_logits if temperature is None else to_logits / temperature).to(dtype)


_PLAIN = _Passes(_read, _gradient, normalises=True)


@cache
def _compiled_passes() -> _Passes:
    keep_variants()
    read, gradient = torch.compile(read_once, fullgraph=True), torch.compile(gradient_once, fullgraph=True)
    return _Passes(_for_any_rows(read), _for_any_rows(gradient), normalises=False)


def _for_any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The last chunk has fewer rows than the others: the number of rows is marked as one that may differ.

    The vocabulary is not: after a second model with another one, kernels for any would take five times as long.

    A temperature of 1 is left out: a division is a tenth of such a pass.
    """

    def call(*given: Any) -> Any:
        arguments = [None if isinstance(value, float) and value == 1 else value for value in given]
        for value in arguments:
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
                    if tensor.dim() == 2:
                        torch._dynamo.mark_static(tensor, 1)
        return function(*arguments)

    return call
