"""Examples that are mixed into the updates of a run."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Ptx:
    """PPO-ptx: coefficient · NLL of examples from a file, a mean over their tokens, added to the loss of every update.
    InstructGPT mixes pretraining text in so, to keep what the model could do before."""

    path: str
    """File of examples as `proximo sft` takes: prompt and completion, or messages; any of its formats."""
    coefficient: float = 1.0
    """Strength of the term. InstructGPT's 27.8 stands before a sum over each text's tokens, this before their mean."""
    examples: int = 32
    """Examples per update, drawn without repetition until all have had their turn. InstructGPT has eight for each
    completion."""
    max_tokens: int = 2048
    """Maximum tokens of prompt and completion together; a longer row is refused."""

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < math.inf or self.examples < 1 or self.max_tokens < 2:
            raise ValueError(
                f"ptx.coefficient is {self.coefficient}, ptx.examples {self.examples}, ptx.max_tokens "
                f"{self.max_tokens}: give a number above 0, at least 1 and at least 2; leave ptx out for no term"
            )

    def check_run(self, *, on_ranks: bool) -> None:
        """Raise ValueError for a run that cannot mix examples in."""
        if on_ranks:
            raise ValueError("ptx is given with ranks: examples are mixed in by one process; leave one of them out")
