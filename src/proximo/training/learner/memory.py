"""How many tokens one pass holds: what the free memory has room for, decided when the first batch is there.

A budget cannot change a result, only how often a device is called. On a GPU more tokens keep it busier; where even one
group does not fit, layers are run again in the backward pass instead of being remembered.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from proximo.models import free_bytes, supports_packing
from proximo.models.compiling import checkpoint_layers, compiles_layers
from proximo.models.packing.attention import body, head_width
from proximo.training.learner.passes import Passes
from proximo.types import Batch

MAX_TOKENS = 28672
"""More make no kernel faster: on one H200 a pass over so many of a model of 0.6 B keeps the GPU busy for 0.3 s, several
times as long as the host needs to launch it."""
SPARE = 0.85
"""The share of free memory that is planned with: kernels need room of their own, and memory is in pieces."""
CHUNK_BYTES = 3 * 2**30
"""Around a chunk of logits, in the backward pass."""
ALLOCATION_FAILED = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed", "bad_alloc")
"""As allocators say it that have no exception of their own: torch's on a CPU, libraries on a GPU."""
COMPILED_SHARE = 0.7
"""Of what plain layers keep for the backward pass: compiled ones compute the cheap parts again."""


@dataclass(frozen=True)
class TokenCost:
    """Bytes that a token takes between the forward and the backward pass."""

    kept: int
    checkpointed: int
    """Where only what enters each layer is kept, beside one layer that is run again."""

    def __add__(self, other: "TokenCost") -> "TokenCost":
        return TokenCost(self.kept + other.kept, self.checkpointed + other.checkpointed)


@dataclass(frozen=True)
class MemoryPlan:
    token_budget: int
    checkpointed: bool


def token_cost(config: PreTrainedConfig, dtype: torch.dtype, *, compiled: bool) -> TokenCost:
    """From a decoder's shape: its norms, projections, attention and MLP as transformers writes them."""
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    width = head_width(config)
    if getattr(config, "num_experts_per_tok", None):
        inner = config.num_experts_per_tok * config.moe_intermediate_size
    else:
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
    size = dtype.itemsize
    queries, keys = heads * width, key_heads * width
    # Norms and residuals; projections; rotated queries and keys; what attention says; gate, up and their product.
    layer = size * (12 * hidden + (queries + 2 * keys) + (queries + keys) + queries + 4 * inner)
    layer = int(layer * COMPILED_SHARE) if compiled else layer
    ends, entering = 12 * size * hidden, 4 * hidden  # the residual stream is in float32
    return TokenCost(kept=layers * layer + ends, checkpointed=layers * entering + layer + ends)


def plan_memory(cost: TokenCost, free: int, largest: int) -> MemoryPlan:
    """Between the largest group and `MAX_TOKENS`, in `free` bytes; with checkpoints only if that group needs them."""
    fits = free // cost.kept
    if fits >= largest:
        return MemoryPlan(max(largest, min(fits, MAX_TOKENS)), checkpointed=False)
    return MemoryPlan(max(largest, min(free // cost.checkpointed, MAX_TOKENS)), checkpointed=True)


def room_for_activations(free: int, *, pending: int, vocabulary: int, hidden: int) -> int:
    """What is left of free bytes after what is still to come: gradients and moments, a chunk of logits, a head's
    gradient as it is summed."""
    return max(int(SPARE * free) - pending - CHUNK_BYTES - 8 * vocabulary * hidden, 0)


def is_planned_on(device: torch.device) -> bool:
    """A CPU has its budget: more tokens at once make it no faster."""
    return device.type == "cuda"


def with_room(passes: Passes, models: Sequence[PreTrainedModel], batch: Batch, pending: int) -> Passes:
    """The passes with a budget for this GPU: decided with the first batch, and again for a larger group.

    `models` are run in one pass with gradient, the policy first; `pending` bytes are still to be taken by others.
    """
    policy, largest = models[0], largest_group(batch)
    if not is_planned_on(policy.device) or (passes.is_planned and largest <= passes.token_budget):
        return passes
    costs = [
        token_cost(each.config.get_text_config(), each.dtype, compiled=supports_packing(each) and compiles_layers(each))
        for each in models
    ]
    config = policy.config.get_text_config()
    free = room_for_activations(
        free_bytes(policy.device), pending=pending, vocabulary=config.vocab_size, hidden=config.hidden_size
    )
    plan = plan_memory(sum(costs[1:], costs[0]), free, largest)
    for model in filter(supports_packing, models):
        checkpoint_layers(model, plan.checkpointed)
    return replace(passes, token_budget=plan.token_budget, is_planned=True)


def is_checkpointed(model: PreTrainedModel) -> bool:
    """Whether its layers are run again in the backward pass."""
    if not supports_packing(model):
        return False
    first = body(model).get_submodule("layers.0")
    return bool(getattr(first, "gradient_checkpointing", False))


def largest_group(batch: Batch) -> int:
    """Tokens of a prompt and all its completions."""
    sizes = [len(prompt) for prompt in batch.prompts]
    for number, length in zip(batch.group.tolist(), batch.lengths.tolist(), strict=True):
        sizes[number] += length
    return max(sizes)


# Where the plan was wrong


def smaller_passes(passes: Passes, batch: Batch) -> Passes | None:
    """With half as many tokens in the largest pass over this batch; None where each group stands alone already."""
    parts = list(passes.parts(batch))
    if len(parts) == len(batch.group.unique()):
        return None
    smaller = passes.with_token_limit(max(_tokens(batch.rows(part)) for part in parts))
    while len(list(smaller.parts(batch))) == len(parts):
        smaller = smaller.with_token_limit(smaller.token_budget // 2)
    return smaller


def _tokens(batch: Batch) -> int:
    """Of the rows and of their prompts."""
    prompts = sum(len(batch.prompts[number]) for number in batch.group.unique().tolist())
    return prompts + int(batch.lengths.sum())


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in ALLOCATION_FAILED)


@contextmanager
def explaining_memory(remedy: str) -> Iterator[None]:
    """Where less cannot be done at a time, running out of memory ends in a line that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"out of memory ({first_line(error)}): {remedy}") from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
