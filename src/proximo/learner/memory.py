"""Size of one pass: how many tokens, and how many layers remember them, decided by the memory that is free.

The plan cannot change a result, only how often a device is called. On a GPU more tokens keep it busier. A group that
does not fit is split, and its prompt computed again for each part; layers are checkpointed where that costs less, or
where not even one completion with its prompt fits; at last, what they keep waits in the host's memory.

A completion is never split over its own length. The exact way would keep the keys and values of all layers, with their
gradients: more than the one layer at a time that a checkpointed and offloaded pass keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from proximo.learner.passes import Passes
from proximo.models import free_bytes, supports_packing
from proximo.models.compiling import checkpoint_layers, compiles_layers
from proximo.models.model_types import PreTrainedConfig, PreTrainedModel
from proximo.models.packing.attention import decoder_layers, head_width
from proximo.models.packing.layout import split_group
from proximo.types.batches import Batch

MAX_TOKENS = 28672
"""Maximum tokens of a pass. More make no kernel faster: on one H200 a pass of this size by a model of 0.6 B keeps the
GPU busy for 0.3 s, several times as long as the host needs to launch it."""
SPARE = 0.85
"""The share of free memory that is planned with: kernels need room of their own, and memory is in pieces."""
CHUNK_BYTES = 3 * 2**30
"""Bytes around a chunk of logits, in the backward pass."""
COMPILED_SHARE = 0.7
"""Share of what plain layers keep for the backward pass: compiled ones compute the cheap parts again."""
CHECKPOINT_STEPS = 4
"""Steps in which all layers are checkpointed, one after each pass that ran out of memory."""


@dataclass(frozen=True)
class TokenCost:
    """Bytes that a token takes between the forward and the backward pass, of one model or of several in a row."""

    layers: tuple[int, ...]
    """Bytes that each layer keeps, in the order of the forward pass."""
    entering: tuple[int, ...]
    """Bytes of what enters each layer, which is all that a checkpointed layer keeps."""
    ends: int
    """Bytes outside the layers that can be checkpointed."""

    def __add__(self, other: "TokenCost") -> "TokenCost":
        return TokenCost(self.layers + other.layers, self.entering + other.entering, self.ends + other.ends)

    def bytes(self, checkpointed: int, *, offloaded: bool = False) -> int:
        """Bytes, first layers checkpointed. One of them at a time is whole again, after those behind it are done."""
        kept = self.entering[:checkpointed]
        # Offloaded, one input is on its way while the next one is made.
        entering = 2 * max(kept, default=0) if offloaded else sum(kept)
        return self.ends + entering + max(sum(self.layers[checkpointed:]), *self.layers[:checkpointed], 0)

    @property
    def kept(self) -> int:
        """Bytes without any checkpoint."""
        return self.bytes(0)

    @property
    def checkpointed(self) -> int:
        """Bytes with all layers checkpointed."""
        return self.bytes(len(self.layers))

    @property
    def offloaded(self) -> int:
        """Bytes with all layers checkpointed, and what enters them in the host's memory."""
        return self.bytes(len(self.layers), offloaded=True)

    def without_checkpoints(self) -> "TokenCost":
        """Cost in a model whose layers cannot be checkpointed."""
        return TokenCost((), (), self.kept)


@dataclass(frozen=True)
class MemoryPlan:
    token_budget: int
    checkpointed: int = 0
    """Number of layers that are checkpointed, from the first on."""
    offloaded: bool = False
    """True if what they keep waits in the host's memory."""


@dataclass(frozen=True)
class GroupLengths:
    """Tokens of a prompt and of each of its completions."""

    prompt: int
    completions: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the whole group, the prompt once."""
        return self.prompt + sum(self.completions)

    @property
    def row(self) -> int:
        """Tokens of the longest completion with its prompt: no pass over the group can be smaller."""
        return self.prompt + max(self.completions)

    def computed(self, token_budget: int) -> int:
        """Tokens that passes of this size compute, the prompt once for each part."""
        parts = split_group(self.prompt, self.completions, token_budget)
        return sum(self.completions) + len(parts) * self.prompt


def token_cost(config: PreTrainedConfig, dtype: torch.dtype, *, compiled: bool) -> TokenCost:
    """Cost from a decoder's shape: its norms, projections, attention and MLP as transformers writes them."""
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    width = head_width(config)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    if chosen := getattr(config, "num_experts_per_tok", None):
        # Mixtral and gpt-oss give an expert's width as intermediate_size.
        inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
    size = dtype.itemsize
    queries, keys = heads * width, key_heads * width
    # Norms and residuals; projections; rotated queries and keys; what attention says; gate, up and their product.
    layer = size * (12 * hidden + (queries + 2 * keys) + (queries + keys) + queries + 4 * inner)
    layer = int(layer * COMPILED_SHARE) if compiled else layer
    ends, entering = 12 * size * hidden, 4 * hidden  # the residual stream is in float32
    return TokenCost((layer,) * layers, (entering,) * layers, ends)


def plan_memory(
    cost: TokenCost, free: int, groups: Sequence[GroupLengths], floor: MemoryPlan | None = None
) -> MemoryPlan:
    """The plan for `free` bytes that computes least, counted in tokens and in layers that run again.

    A pass holds the longest completion with its prompt at least, and no more than `MAX_TOKENS` or the largest group.
    Layers that `floor` checkpoints or offloads stay so.
    """
    floor, layers = floor or MemoryPlan(0), len(cost.layers)
    row, max_tokens = max(group.row for group in groups), max(MAX_TOKENS, *(group.tokens for group in groups))

    def plan(checkpointed: int, offloaded: bool) -> MemoryPlan:
        fits = free // cost.bytes(checkpointed, offloaded=offloaded)
        return MemoryPlan(min(fits, max_tokens), checkpointed, offloaded)

    def work(plan: MemoryPlan) -> int:
        """A backward pass is twice the work of a forward pass; a checkpointed layer's forward pass comes twice."""
        return sum(group.computed(plan.token_budget) for group in groups) * (3 * max(layers, 1) + plan.checkpointed)

    plans = [plan(number, floor.offloaded) for number in range(floor.checkpointed, layers + 1)]
    if fitting := [each for each in plans if each.token_budget >= row]:
        return min(fitting, key=work)
    last = plan(layers, layers > 0)
    return replace(last, token_budget=max(last.token_budget, row))


def room_for_activations(free: int, *, pending: int, vocabulary: int, hidden: int) -> int:
    """Rest of free bytes after what is still to come: gradients and moments, a chunk of logits, a head's gradient as it
    is summed."""
    return max(int(SPARE * free) - pending - CHUNK_BYTES - 8 * vocabulary * hidden, 0)


def is_planned_on(device: torch.device) -> bool:
    """A CPU has its budget: more tokens at once make it no faster."""
    return device.type == "cuda"


def with_room(passes: Passes, models: Sequence[PreTrainedModel], batch: Batch, pending: int) -> Passes:
    """The passes with a plan for this GPU: decided with the first batch, and again for a longer row.

    `models` are run in one pass with gradient, the policy first; `pending` bytes are still to be taken by others.
    """
    policy, groups = models[0], group_lengths(batch)
    is_enough = passes.is_planned and all(group.row <= passes.token_budget for group in groups)
    if not groups or is_enough or not is_planned_on(policy.device):
        return passes
    config = policy.config.get_text_config()
    free = room_for_activations(
        free_bytes(policy.device), pending=pending, vocabulary=config.vocab_size, hidden=config.hidden_size
    )
    costs = [_cost(model) for model in models]
    floor = MemoryPlan(0, passes.checkpointed, passes.offloaded)
    plan = plan_memory(sum(costs[1:], costs[0]), free, groups, floor)
    planned = replace(passes, **vars(plan), is_planned=True)
    checkpoint_models(models, planned)
    return planned


def _cost(model: PreTrainedModel) -> TokenCost:
    packs = supports_packing(model)
    cost = token_cost(model.config.get_text_config(), model.dtype, compiled=packs and compiles_layers(model))
    return cost if packs else cost.without_checkpoints()


def checkpoint_models(models: Sequence[PreTrainedModel], passes: Passes) -> None:
    """Let the models' layers keep what the passes say."""
    left = passes.checkpointed
    for model in filter(supports_packing, models):
        checkpoint_layers(model, left, offload=passes.offloaded)
        left = max(left - len(decoder_layers(model)), 0)


def checkpointable_layers(models: Sequence[PreTrainedModel]) -> int:
    """Number of layers that `checkpoint_models` can reach."""
    return sum(len(decoder_layers(model)) for model in filter(supports_packing, models))


def group_lengths(batch: Batch) -> list[GroupLengths]:
    """Lengths of the groups that have rows in this batch."""
    completions: dict[int, list[int]] = {}
    for number, length in zip(batch.group.tolist(), batch.lengths.tolist(), strict=True):
        completions.setdefault(number, []).append(length)
    return [GroupLengths(len(batch.prompts[number]), tuple(lengths)) for number, lengths in completions.items()]


# Where the plan was wrong


def smaller_passes(passes: Passes, batch: Batch, layers: int = 0) -> Passes | None:
    """Passes that take less memory, after one over this batch ran out of it: half as many tokens in the largest, down
    to a single row; then more checkpointed layers; then these offloaded. None where nothing is left.

    `layers` is how many can be checkpointed: 0 without a gradient, where nothing is kept anyway.
    """
    parts = list(passes.parts(batch))
    sizes = [group_lengths(batch.rows(part)) for part in parts]
    largest = max(sizes, key=_tokens)
    if _tokens(largest) > max(group.row for group in largest):
        smaller = passes.with_token_limit(_tokens(largest))
        while len(list(smaller.parts(batch))) == len(parts):
            smaller = smaller.with_token_limit(smaller.token_budget // 2)
        return smaller
    if passes.checkpointed < layers:
        more = passes.checkpointed + -(-layers // CHECKPOINT_STEPS)
        return replace(passes, checkpointed=min(more, layers))
    return replace(passes, offloaded=True) if layers and not passes.offloaded else None


def difference(before: Passes, after: Passes, layers: int) -> str:
    """Message on what a step of `smaller_passes` changed, for the user."""
    if after.token_budget < before.token_budget:
        return (
            f"all passes have {after.token_budget} tokens at most from now on, and larger groups are split. "
            f"Begin there the next time: training.token_budget = {after.token_budget}"
        )
    if after.checkpointed > before.checkpointed:
        return f"{after.checkpointed} of {layers} layers run again in the backward pass from now on"
    return "what checkpointed layers keep waits in the host's memory from now on"


def _tokens(groups: Sequence[GroupLengths]) -> int:
    return sum(group.tokens for group in groups)
