"""The advantages of a stored step under another algorithm: the run's, or newly computed ones if possible."""

from dataclasses import replace

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.insight.lens.steps import StoredStep
from proximo.losses.advantage_inputs import feedback_in, shaped_rewards
from proximo.losses.pieces.credit import assign_parts
from proximo.losses.pieces.protocols import AdvantageTraits
from proximo.rl.assemble import at_their_turns
from proximo.rl.config import RunConfig
from proximo.types.tensor_types import Float


def advantages_under(
    step: StoredStep, algorithm: Algorithm, config: RunConfig
) -> tuple[Float[Tensor, " N"], list[str]]:
    """The stored advantages if both algorithms compare siblings, whatever their normalisation, so that only the update
    differs.

    Advantages per token are computed again, those of a value model only if values were stored; so are those
    between siblings, if the run did not compare siblings. Rewards stay as the run shaped them.
    """
    run_traits, other = (AdvantageTraits.read(each.advantage) for each in (config.algorithm, algorithm))
    batch, notes, limit, unit = step.batch, list[str](), config.sampling.max_tokens, config.penalty_unit
    shaped = [shaped_rewards(batch, each.length_penalties, limit, unit) for each in (algorithm, config.algorithm)]
    if not torch.equal(*((rewards - batch.rewards).nan_to_num(0.0) for rewards in shaped)):
        notes.append("its length penalty differs: rewards are as the run shaped them")
    if algorithm.advantage == config.algorithm.advantage:
        return batch.advantages, notes
    if other.needs_values and batch.values is None:
        return batch.advantages, [*notes, "no values were stored: the advantages are the run's own"]
    if missing := sorted(name for name in other.all_needs if getattr(batch, name) is None):
        return batch.advantages, [*notes, f"no {missing[0]} were stored: the advantages are the run's own"]
    if not run_traits.per_token and not other.per_token:
        return batch.advantages, [*notes, "the advantages are the run's own"]
    if algorithm.kl_reward is not None and batch.ref_logprobs is None:
        notes.append("no reference was stored: its KL in the reward is left out")
    kind = type(algorithm.advantage).__name__
    notes.append(f"the advantages are computed again by {kind} from the stored data")
    return _anew(step, algorithm, config.rewards.task), notes


@torch.no_grad()
def _anew(step: StoredStep, algorithm: Algorithm, outcome_weight: float) -> Float[Tensor, " N"]:
    """An algorithm's own advantages for all rows."""
    parts = step.layout.parts(torch.arange(len(step.batch)))
    grids = [step.layout.grid(index) for index in parts]
    batch = replace(step.batch, routes=None)
    scored = [batch.rows(index) for index in parts]
    whole = [replace(rows, mask=rows.sampled) for rows in scored]
    together = [
        at_their_turns(feedback_in(rows, algorithm.kl_reward), rows, outcome_weight, algorithm.advantage)
        for rows in whole
    ]
    advantages = torch.zeros_like(batch.advantages)
    for (places, real), credit in zip(grids, assign_parts(algorithm.advantage, together), strict=True):
        advantages[places[real]] = credit.advantages[real].to(advantages.dtype)
    return advantages
