"""A curriculum that follows measured pass rates: prompts that are always or never solved are drawn less often."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proximo.data import stable_hash


@dataclass(frozen=True)
class Curriculum:
    """Draws a prompt with probability 4·p·(1 − p), where p is its running pass rate: 1 at one half, little near 0 and
    1, where a group teaches nothing. A prompt without a rate is drawn.

    Prompts come in the task's order, and those that are not drawn are passed over until they come again. Decisions
    follow from the seed, the draw's number and the rates, which checkpoints keep: a resume makes the same ones. For
    tasks whose problems repeat, such as files.
    """

    floor: float = 0.1
    """Lowest probability of a draw, so that no prompt is lost for good."""
    newest: float = 0.5
    """Weight of the newest group in a prompt's running pass rate; 1: the last group alone."""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1 or not 0 < self.newest <= 1:
            raise ValueError(
                f"training.curriculum: floor {self.floor}, newest {self.newest}: give shares above 0, up to 1"
            )

    def chance(self, rate: float | None) -> float:
        """The probability that a prompt with this pass rate is drawn.

        Example: Curriculum().chance(0.5) == 1.0
        """
        return 1.0 if rate is None else max(self.floor, 4 * rate * (1 - rate))

    def draws(self, index: int, seed: int, rate: float | None) -> bool:
        """Whether the prompt at this position of the task's order is drawn."""
        return stable_hash("curriculum", seed, index) < self.chance(rate) * 2**64

    def updated(self, rates: Mapping[str, float], measured: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Running rates by problem id after these groups."""
        found = dict(rates)
        for name, share in measured:
            found[name] = found[name] + self.newest * (share - found[name]) if name in found else share
        return found
