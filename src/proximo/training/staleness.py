"""How far sampling may run ahead of training, and what happens to groups that take long."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AheadOptions:
    """Running ahead: later steps are sampled while a step is trained.

    Example: AheadOptions(staleness=1)
    """

    staleness: int = 0
    """Age of the weights that sample a step, in training steps; the first steps sample with the weights of the start.
    0: each step is sampled and then trained. Above 0, use a correction: algorithm.correct."""
    switch: Literal["between", "in_flight"] = "between"
    """When the sampler gets new weights. `between`: between two steps that are sampled, so that a run repeats to the
    bit. `in_flight`: after every training step, which interrupts completions; they continue with the new weights.
    Needs sampler Fleet; `staleness` is then the largest age of a group's first token, and a run does not repeat."""
    window: float = 0.0
    """Groups that may overtake a slow group, as a multiple of `training.groups`; `in_flight` only. As many fewer are in
    flight, so that the bound on staleness holds."""
    expire: float | None = None
    """Seconds after which a slow group is dropped, if other groups can fill the step; `in_flight` only. None: the step
    waits for it."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"ahead.staleness is {self.staleness}: give a number of steps, 0 or more")
        if self.switch == "between" and (self.window or self.expire is not None):
            name = "window" if self.window else "expire"
            raise ValueError(
                f'ahead.{name} is {getattr(self, name)}, but ahead.switch is "between", where every step waits for its '
                'own groups: leave it out, or use switch = "in_flight"'
            )
        if self.switch == "in_flight" and not self.staleness:
            raise ValueError('ahead.switch is "in_flight" and ahead.staleness is 0: give a staleness of at least 1')
        if self.window and not 0 < self.window < self.staleness:
            raise ValueError(f"ahead.window is {self.window}: give 0, or less than ahead.staleness, {self.staleness}")
        if self.expire is not None and not self.expire > 0:
            raise ValueError(f"ahead.expire is {self.expire}: give a positive number of seconds, or None to wait")

    @property
    def copies_weights(self) -> bool:
        """Whether older weights are kept to sample with."""
        return self.staleness > 0 and self.switch == "between"

    def check_run(self, *, on_ranks: bool, refill: str) -> None:
        """ValueError where a run cannot do this."""
        if on_ranks and self.copies_weights:
            raise ValueError(
                f'ahead.staleness is {self.staleness} and ahead.switch "between", but ranks keep no older weights to '
                'sample with: use switch = "in_flight" with sampler Fleet, or leave one of them out'
            )
        if self.switch == "in_flight" and refill == "same_prompt":
            raise ValueError(
                'training.refill is "same_prompt", but with ahead.switch "in_flight" dropped groups are replaced by '
                "new prompts: leave one of them out"
            )
