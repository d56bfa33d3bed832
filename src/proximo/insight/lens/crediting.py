"""Which advantages another algorithm sees in a stored step: the run's, or its own where they can be computed."""

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.insight.lens.steps import Step
from proximo.maths.pieces.advantages import Feedback
from proximo.maths.pieces.credit import assign_parts, feedback_of
from proximo.tensor_types import Bool, Float, Int
from proximo.training.config import RunConfig
from proximo.training.rl.assemble import shaped_rewards


def advantages_under(step: Step, algorithm: Algorithm, config: RunConfig) -> tuple[Float[Tensor, " N"], list[str]]:
    """The stored ones where both compare siblings, whatever their normalisation: what differs is then the update alone.

    Advantages of single tokens are computed anew, a value model's only where values were stored; and so are those
    between siblings, where the run compared none. Rewards stay as the run shaped them.
    """
    own, batch = config.algorithm.advantage, step.batch
    notes, limit, unit = [], config.sampling.max_tokens, config.penalty_unit
    penalties = [shaped_rewards(batch, each, limit, unit) - batch.rewards for each in (algorithm, config.algorithm)]
    if not torch.equal(*(penalty.nan_to_num(0.0) for penalty in penalties)):
        notes.append("its length penalty differs: rewards are as the run shaped them")
    if algorithm.advantage == own:
        return batch.advantages, notes
    if algorithm.advantage.needs_values and batch.values is None:
        return batch.advantages, [*notes, "no values were stored: the advantages are the run's own"]
    if not own.per_token and not algorithm.advantage.per_token:
        return batch.advantages, [*notes, "the advantages are the run's own"]
    if algorithm.kl_reward is not None and batch.ref_logprobs is None:
        notes.append("no reference was stored: its KL in the reward is left out")
    kind = type(algorithm.advantage).__name__
    notes.append(f"the advantages are computed anew by {kind} from what was stored")
    return _anew(step, algorithm), notes


@torch.no_grad()
def _anew(step: Step, algorithm: Algorithm) -> Float[Tensor, " N"]:
    """An algorithm's own advantages, of all rows."""
    batch, parts = step.batch, step.layout.parts(torch.arange(len(step.batch)))
    grids = [step.layout.grid(index) for index in parts]

    def feedback(index: Int[Tensor, " M"], real: Bool[Tensor, "M T"]) -> Feedback:
        def padded(tensor: Tensor | None) -> Float[Tensor, "M T"] | None:
            return None if tensor is None else step.layout.padded(tensor, index)

        reference, token_rewards = padded(batch.ref_logprobs), None
        if algorithm.kl_reward is not None and reference is not None:
            token_rewards = algorithm.kl_reward(step.layout.padded(batch.old_logprobs, index), reference, real)
        return feedback_of(batch.rewards[index], batch.group[index], real, padded(batch.values), token_rewards)

    together = [feedback(index, real) for index, (_, real) in zip(parts, grids, strict=True)]
    found = torch.zeros_like(batch.advantages)
    for (places, real), credit in zip(grids, assign_parts(algorithm.advantage, together), strict=True):
        found[places[real]] = credit.advantages[real].to(found.dtype)
    return found
