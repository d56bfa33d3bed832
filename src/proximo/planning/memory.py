"""Peak memory of a rollout and of an update, predicted as the run itself decides: sampler first, then the learner.

The sampler takes pages for keys and values before the first update, out of what weights and masters leave free, and
after the first rollout keeps those that it needed. The learner plans its passes with what is left then; gradients and
moments come with the first update and stay.
"""

from dataclasses import dataclass, replace

from proximo.learner.memory import GroupLengths, MemoryPlan, plan_memory, room_for_activations
from proximo.learner.options import CPU_TOKENS
from proximo.models.logprobs import CHUNK_BYTES, ELSEWHERE, KEPT_ELSEWHERE, KEPT_SHARE, chunk_rows, chunks_kept
from proximo.planning.cards import DeviceCard
from proximo.planning.holdings import Holding
from proximo.planning.keys import KeyUse, keys_in_pages, keys_in_slots, pages_at_once, row_pages
from proximo.planning.workloads import Tail
from proximo.rl.build import MAX_SLOTS
from proximo.rl.config import RunConfig
from proximo.samplers.embedded.attention import PAGE, pages_for
from proximo.samplers.embedded.buffers import BufferPlan, plan_of, room_for_keys
from proximo.samplers.embedded.prefill import PREFILL_TOKENS

LOGITS_COPIES = 2
"""Copies of a row's float32 logits in the captured steps' memory, while tokens are drawn and afterwards. Fitted to
seven measured rollouts on an H200."""
PREFILL_COPIES = 2
"""Copies of the keys and values of a batch of prompts while it is read."""
HEAD_CHUNKS = 1.5
"""Chunks of float32 logits around the head in a backward pass: the logits, and their gradient in half precision."""


@dataclass(frozen=True)
class StepSize:
    """Size of a training step: the completions that it samples."""

    groups: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    mean_tokens: int | None = None
    """Tokens of an average completion, of which lengths are log-normal. None: all reach their limit."""
    minibatches: int = 1
    token_budget: int | None = None
    """Tokens per pass if the config says so."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}: give at least 1")
        if self.mean_tokens is not None and not 1 <= self.mean_tokens <= self.max_tokens:
            raise ValueError(
                f"mean_tokens is {self.mean_tokens}: give 1 to sampling.max_tokens, which is {self.max_tokens}"
            )

    @classmethod
    def of(cls, config: RunConfig, prompt_tokens: int, mean_tokens: int | None = None) -> "StepSize":
        training = config.training
        return cls(
            groups=training.groups,
            group_size=training.group_size,
            prompt_tokens=prompt_tokens,
            max_tokens=config.sampling.max_tokens,
            mean_tokens=mean_tokens,
            minibatches=training.minibatches,
            token_budget=training.token_budget,
        )

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        if self.mean_tokens is None or self.mean_tokens == self.max_tokens:
            return [self.max_tokens] * self.rows
        return Tail(self.mean_tokens, self.max_tokens).lengths(self.rows)

    @property
    def group_tokens(self) -> int:
        """Tokens of a prompt and all its completions, at their limit."""
        return self.prompt_tokens + self.group_size * self.max_tokens

    @property
    def update_groups(self) -> int:
        """Groups of the largest update."""
        return -(-self.groups // self.minibatches)

    @property
    def extremes(self) -> tuple["StepSize", ...]:
        """Sizes with all completions at their limit, and with average ones, of which a pass may keep more."""
        if self.mean_tokens is None:
            return (self,)
        return replace(self, mean_tokens=None), replace(self, max_tokens=self.mean_tokens)

    @property
    def smallest(self) -> "StepSize":
        """Size with one completion at a time: less cannot be sampled."""
        return replace(self, groups=1, group_size=1, mean_tokens=None, minibatches=1)


@dataclass(frozen=True)
class Pass:
    """The largest pass with gradient of an update."""

    tokens: int
    plan: MemoryPlan
    """Plan of its memory: how many layers are checkpointed, and whether what they keep is offloaded."""
    bytes: int
    """Activations that it keeps for its backward pass."""
    parts: int
    """Passes over each group, of which each has the prompt."""
    scored: int
    """Completion tokens of it, which have logits."""
    alone: bool
    """True if it is the only one of its update."""


@dataclass(frozen=True)
class MemoryUse:
    """Predicted bytes on a device."""

    held: int
    """Models with gradients, masters and moments."""
    live: int
    """Completions decoded at a time: those whose keys fit."""
    first_keys: int
    """Keys and values that the sampler takes for the first rollout, before it has seen how long completions are."""
    keys: int
    """Keys and values that it keeps from then on."""
    sampling: int
    """Prefill and logits of a rollout."""
    captured: int
    """Part of that which stays with the captured decode steps."""
    pass_tokens: int
    """Tokens of the largest pass with gradient."""
    checkpointed: int
    """Layers that are run again in the backward pass."""
    offloaded: bool
    """True if what these keep waits in the host's memory."""
    parts: int
    """Passes over each group: 1 if a group fits into one."""
    activations: int
    """Activations that the largest pass keeps for its backward pass."""
    head: int
    """Logits of a chunk, and the sum of the head's gradient."""
    logits: int
    """Logits that are kept for the backward pass, because the memory is free."""
    rollout_peak: int
    update_peak: int
    needed: int
    """The least with which the run could work: one completion decoded, or in a pass with its layers offloaded, at a
    time."""
    usable: int
    """Bytes that the device has for tensors."""
    refused: bool
    """True if the keys of one completion are more than the sampler may take: a run refuses it."""

    @property
    def peak(self) -> int:
        return max(self.rollout_peak, self.update_peak)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable and not self.refused


def memory_use(holding: Holding, size: StepSize, card: DeviceCard) -> MemoryUse:
    """Predict the memory that a run of this size would take."""
    resting = holding.total - holding.pending
    keys = _keys(holding, size, card, free=card.usable - resting)
    logits = 4 * _buffers(size).slots * holding.shape.vocabulary
    captured = LOGITS_COPIES * logits if card.is_gpu else 0
    free = card.usable - resting - keys.kept - captured
    candidates = [largest_pass(holding, extreme, card, free) for extreme in size.extremes]
    passes = max(candidates, key=lambda candidate: candidate.bytes)
    head, sampling = head_bytes(holding, card), LOGITS_COPIES * logits + PREFILL_COPIES * _prefill(holding, size)
    # Of a single pass the gradients come while its activations go.
    gradients = holding.gradients if passes.alone else 0
    taken = holding.total + keys.kept + captured + max(passes.bytes - gradients, 0)
    kept = kept_logits(holding, card, passes.scored, free=card.usable - taken)
    return MemoryUse(
        held=holding.total,
        live=keys.live,
        first_keys=keys.first,
        keys=keys.kept,
        sampling=sampling,
        captured=captured,
        pass_tokens=passes.tokens,
        checkpointed=passes.plan.checkpointed,
        offloaded=passes.plan.offloaded,
        parts=passes.parts,
        activations=passes.bytes,
        head=head,
        logits=kept,
        rollout_peak=max(resting + keys.first, holding.total + keys.kept) + sampling,
        update_peak=holding.total + keys.kept + captured + max(passes.bytes + head + kept - gradients, 0),
        needed=needed(holding, size, card),
        usable=card.usable,
        refused=keys.refused,
    )


def needed(holding: Holding, size: StepSize, card: DeviceCard) -> int:
    """The least memory with which the run could work, whatever the device's own is."""
    smallest, per_token = size.smallest, holding.shape.kv_bytes(holding.dtype.itemsize)
    one = _buffers(smallest)
    keys = (row_pages(one) + 1) * PAGE * per_token if card.is_gpu else keys_in_slots(one, per_token).kept
    cost = min(holding.cost.offloaded, holding.cost.kept) if card.is_gpu else holding.cost.kept
    sampling = LOGITS_COPIES * 4 * holding.shape.vocabulary + PREFILL_COPIES * _prefill(holding, smallest)
    update = smallest.group_tokens * (cost + holding.unplanned) + head_bytes(holding, card)
    if not card.is_gpu:  # where what is free does not decide
        update += kept_logits(holding, card, smallest.group_tokens, 0)
    return holding.total + keys + max(sampling, update)


def _buffers(size: StepSize) -> BufferPlan:
    """Plan of the sampler's buffers."""
    return plan_of(size.groups, size.rows, size.prompt_tokens, size.max_tokens, MAX_SLOTS)


def _keys(holding: Holding, size: StepSize, card: DeviceCard, free: int) -> KeyUse:
    """`free` bytes are what weights and masters leave."""
    per_token = holding.shape.kv_bytes(holding.dtype.itemsize)
    if not card.is_gpu:
        return keys_in_slots(_buffers(size), per_token)
    if size.rows <= MAX_SLOTS:
        pages = pages_at_once(size.lengths)
    else:  # a row takes the slot of another that ended: at any time there are short and long ones
        pages = MAX_SLOTS * pages_for(size.mean_tokens or size.max_tokens)
    return keys_in_pages(_buffers(size), pages, per_token, free_bytes=max(room_for_keys(free, holding.trained), 0))


def largest_pass(holding: Holding, size: StepSize, card: DeviceCard, free: int) -> Pass:
    """Plan the largest pass as the learner does: whole groups or, of one that is larger than the token budget, as few
    parts as possible, spread evenly over the passes. Groups of different lengths fill a pass to its budget."""
    plan = _planned(holding, size, card, free)
    rows = size.group_size
    if size.group_tokens > plan.token_budget:
        rows = max(1, (plan.token_budget - size.prompt_tokens) // size.max_tokens)
    parts = -(-size.group_size // rows)
    part = size.prompt_tokens + -(-size.group_size // parts) * size.max_tokens
    passes = -(-size.update_groups * parts // max(1, plan.token_budget // part))
    tokens = -(-size.update_groups * parts // passes) * part
    if size.mean_tokens is not None:
        tokens = max(tokens, min(plan.token_budget, size.update_groups * size.group_tokens))
    cost = holding.cost.bytes(plan.checkpointed, offloaded=plan.offloaded) + holding.unplanned
    prompts = tokens // part * size.prompt_tokens
    return Pass(tokens, plan, tokens * cost, parts, scored=tokens - prompts, alone=passes == 1)


def _planned(holding: Holding, size: StepSize, card: DeviceCard, free: int) -> MemoryPlan:
    if size.token_budget is not None or not card.is_gpu:
        return MemoryPlan(size.token_budget or CPU_TOKENS)
    shape = holding.shape
    free_bytes = room_for_activations(free, pending=holding.pending, vocabulary=shape.vocabulary, hidden=shape.hidden)
    return plan_memory(
        holding.cost, free_bytes, [GroupLengths(size.prompt_tokens, (size.max_tokens,) * size.group_size)]
    )


def kept_logits(holding: Holding, card: DeviceCard, tokens: int, free: int) -> int:
    """Whole chunks of float32 logits, as `token_logprobs` keeps them."""
    chunk, free_bytes = (CHUNK_BYTES["cuda"], int(KEPT_SHARE * free)) if card.is_gpu else (ELSEWHERE, KEPT_ELSEWHERE)
    vocabulary = holding.shape.vocabulary
    rows = chunk_rows(vocabulary, chunk)
    return 4 * vocabulary * min(tokens, rows * chunks_kept(vocabulary, max(free_bytes, 0), rows))


def head_bytes(holding: Holding, card: DeviceCard) -> int:
    chunk = CHUNK_BYTES["cuda"] if card.is_gpu else ELSEWHERE
    return int(HEAD_CHUNKS * chunk) + (0 if holding.lora else 4 * holding.shape.head)


def _prefill(holding: Holding, size: StepSize) -> int:
    """Keys and values of the largest batch of prompts."""
    tokens = max(min(PREFILL_TOKENS, size.groups * size.prompt_tokens), size.prompt_tokens)
    return tokens * holding.shape.kv_bytes(holding.dtype.itemsize)
