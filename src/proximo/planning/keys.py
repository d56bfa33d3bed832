"""Keys and values that the embedded sampler keeps: pages on a GPU, a slot for each row on a CPU.

All limits are the sampler's own. On a GPU it takes pages for all rows at their longest, if its share of the memory
allows; after the first rollout it gives back what the rows did not come near to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.samplers.embedded.attention import PAGE, pages_for
from proximo.samplers.embedded.buffers import BufferPlan, fewer_pages, with_pages
from proximo.samplers.embedded.cache import aligned


@dataclass(frozen=True)
class KeyUse:
    """Predicted bytes of keys and values."""

    live: int
    """Completions whose keys fit at the same time; others wait."""
    first: int
    """Bytes in the first rollout."""
    kept: int
    """Bytes from the end of the first rollout on."""
    refused: bool = False
    """True if the keys of one completion are more than the sampler may take: a run refuses it."""


def keys_in_pages(plan: BufferPlan, completion_pages: int, token_bytes: int, free_bytes: int) -> KeyUse:
    """Predict the use by rows that would hold `completion_pages` at once, next to their prompts', in `free_bytes`."""
    page, min_pages = PAGE * token_bytes, row_pages(plan)
    plan, pages = with_pages(plan, max(free_bytes // page, min_pages))
    prompts = plan.prompts * pages_for(plan.max_prompt_tokens)
    fewer = fewer_pages(pages, prompts + completion_pages, pages * page)
    kept = pages if fewer is None else with_pages(plan, pages, fewer)[1]
    live = min(plan.slots, plan.slots * (pages - prompts) // completion_pages)
    # One page more belongs to slots without a row.
    return KeyUse(live, (pages + 1) * page, (kept + 1) * page, refused=free_bytes // page < min_pages)


def keys_in_slots(plan: BufferPlan, token_bytes: int) -> KeyUse:
    """Each slot has room for a prompt and the longest completion."""
    size = plan.slots * aligned(plan.max_prompt_tokens + plan.max_tokens) * token_bytes
    return KeyUse(plan.slots, size, size)


def pages_at_once(lengths: Sequence[int]) -> int:
    """The most pages that completions hold at the same time, if they start together."""
    # Where one ends, it and all longer ones hold as much as it does.
    return max(rank * pages_for(length) for rank, length in enumerate(sorted(lengths, reverse=True), 1))


def row_pages(plan: BufferPlan) -> int:
    """Pages of one row at its longest, with its prompt: fewer cannot work."""
    return pages_for(plan.max_prompt_tokens) + pages_for(plan.max_tokens)
