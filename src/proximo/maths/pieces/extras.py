"""Stage 11, and supervised learning: terms beside the policy's own.

Each returns one loss per token, before weights, so that they add up over micro-batches too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.maths.arithmetic import at_least_float32
from proximo.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class ValueLoss:
    """½·max((V − R)², (clip(V, V_old ± clip) − R)²): the value model's own objective, a token mean."""

    coefficient: float = 0.1
    clip: float | None = 0.2
    """None: plain ½(V − R)²."""

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ValueError(f"extra.coefficient is {self.coefficient}: a value loss must count for something")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"extra.clip is {self.clip}: give how far a value may move, say 0.2, or None")

    def __call__(
        self,
        values: Float[Tensor, "B T"],
        old_values: Float[Tensor, "B T"],
        returns: Float[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Before the coefficient."""
        error = (values - returns).square()
        if self.clip is not None:
            near = old_values + (values - old_values).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - returns).square())
        return error / 2


@dataclass(frozen=True)
class EntropyBonus:
    """−coefficient · entropy of each token's distribution, weighted like the policy term."""

    coefficient: float = 1e-3

    def __call__(self, entropy: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        return -self.coefficient * entropy


@dataclass(frozen=True)
class PositiveNll:
    """coefficient · NLL of the correct completions, a token mean over them alone. VAPO."""

    coefficient: float = 0.1
    above: float = 0.0
    """An outcome above this is correct: fits outcomes of 0 and 1, and of −1 and 1."""

    def weights(self, mask: Bool[Tensor, "B T"], outcome: Float[Tensor, " B"]) -> Float[Tensor, "B T"]:
        """1 / (sampled tokens of correct completions) on those, over the whole step."""
        return mask.double() * self.of_rows(mask.sum(dim=1).double(), outcome).unsqueeze(1)

    def of_rows(self, counts: Float[Tensor, " B"], outcome: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """The same for each sampled token of a row, from the rows' counts of them."""
        correct = (outcome > self.above).double()
        return correct / (correct * counts).sum().clamp(min=1)

    def __call__(self, logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        return -self.coefficient * logprobs


@dataclass(frozen=True)
class RouterBalance:
    """coefficient · X · Σ_i f_i·P_i over X experts: those that are used most become less likely. Switch Transformer.

    f is each expert's share of assignments, P its mean probability, both over all layers and the tokens that train,
    read where a token is predicted. f is counted once over the whole update and carries no gradient.
    """

    coefficient: float = 0.001

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ValueError(f"extra.coefficient is {self.coefficient}: a balance must count for something")

    def assignments(self, logits: Float[Tensor, "M L X"], chosen: int) -> Int[Tensor, " X"]:
        """How often each expert is among the `chosen` of a token and layer."""
        return logits.topk(chosen).indices.flatten().bincount(minlength=logits.shape[2])

    def __call__(self, logits: Float[Tensor, "M L X"], load: Float[Tensor, " X"]) -> Float[Tensor, " M"]:
        """X · Σ_i f_i·p_i of each token, a mean over layers, before the coefficient; `load` is f."""
        probabilities = at_least_float32(logits).softmax(dim=-1).mean(dim=1)
        return len(load) * (probabilities * load.to(probabilities.dtype)).sum(dim=-1)


Extra = ValueLoss | EntropyBonus | PositiveNll | RouterBalance


def supervised_loss(logprobs: Float[Tensor, "B T"], dynamic: bool = False) -> Float[Tensor, "B T"]:
    """−log π of each token. Dynamic fine-tuning (DFT) multiplies it by the token's own probability, held constant."""
    return -logprobs * logprobs.detach().exp() if dynamic else -logprobs
