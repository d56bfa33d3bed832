"""Passes that fit into the memory of every rank.

All ranks make a pass together, so one that runs out of memory cannot do its part again with fewer tokens: the others
are waiting in the middle of it. It leaves a smaller plan and ends, and the launcher starts all ranks again from the
newest checkpoint, with the smallest plan that any of them left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from proximo.distributed.launching import agreed_plan, can_restart_smaller, leave_for_smaller
from proximo.distributed.shares import Share
from proximo.learner.gradients import UpdateRows
from proximo.learner.memory import checkpointable_layers, smaller_passes
from proximo.learner.passes import Passes
from proximo.models.model_types import PreTrainedModel
from proximo.models.out_of_memory import first_line, is_out_of_memory


def planned(passes: Passes) -> Passes:
    """The passes within the plan that this group of ranks was started with."""
    if (plan := agreed_plan()) is None:
        return passes
    return replace(
        passes.with_token_limit(plan["token_budget"]),
        checkpointed=max(passes.checkpointed, plan["checkpointed"]),
        offloaded=passes.offloaded or bool(plan["offloaded"]),
    )


@contextmanager
def starting_smaller(passes: Passes, share: Share[Any], models: Sequence[PreTrainedModel], rank: int) -> Iterator[None]:
    """A rank that runs out of memory inside leaves a smaller plan for all. ValueError where nothing starts the ranks
    again, or nothing smaller is left."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows = share.idle_rows if share.rows is None else share.rows
        has_gradient = isinstance(rows, UpdateRows)
        layers = checkpointable_layers(models) if has_gradient else 0
        smaller = smaller_passes(passes, rows.batch if has_gradient else rows, layers)
        if can_restart_smaller() and smaller is not None:
            names = ("token_budget", "checkpointed", "offloaded")
            leave_for_smaller({name: int(getattr(smaller, name)) for name in names})
        raise ValueError(
            f"out of memory ({first_line(error)}): on rank {rank}; set a smaller training.token_budget, the last was "
            f"{passes.token_budget}"
        ) from error
