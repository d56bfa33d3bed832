"""Stage 11: terms of the loss in addition to the policy's, and the supervised loss.

Each returns one loss per token, before weights, so that they add up over micro-batches too. The objective calls
`term` of all but those that need the values of a value model or the logits of routers: these the learner computes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from proximo.losses.arithmetic import Tokens, at_least_float32
from proximo.losses.pieces.protocols import ExtraProtocol, ExtraTraits, Need, Peers
from proximo.losses.records import Rows
from proximo.types.tensor_types import Float, Int

__all__ = ["EntropyBonus", "PositiveNll", "RouterBalance", "ValueLoss", "supervised_loss"]


@dataclass(frozen=True)
class ValueLoss:
    """½·max((V − R)², (clip(V, V_old ± clip) − R)²): the value model's own objective, a token mean."""

    coefficient: float = 0.1
    """Strength of the term."""
    clip: float | None = 0.2
    """Largest change of the value that counts. None: plain ½(V − R)²."""
    needs: ClassVar[tuple[Need, ...]] = ("values",)
    peers: ClassVar[Peers] = Peers("none: PPOTrainer was removed", "critic.cliprange_value 0.5")

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ValueError(f"extra.coefficient is {self.coefficient}: a value loss must count for something")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"extra.clip is {self.clip}: give how far a value may move, say 0.2, or None")

    @property
    def formula(self) -> str:
        clipped = "" if self.clip is None else f", V within ±{self.clip:g} of V_old"
        return f"− {self.coefficient:g} · ½(V − return)²{clipped}"

    def __call__(self, values: Tokens, old_values: Tokens, returns: Tokens) -> Tokens:
        """The value loss of each token, before the coefficient."""
        error = (values - returns).square()
        if self.clip is not None:
            near = old_values + (values - old_values).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - returns).square())
        return error / 2


@dataclass(frozen=True)
class EntropyBonus:
    """−coefficient · entropy of each token's distribution, weighted like the policy term."""

    coefficient: float = 1e-3
    """Strength of the term."""
    needs: ClassVar[tuple[Need, ...]] = ("entropy",)
    peers: ClassVar[Peers] = Peers("entropy_coef 0.0", "entropy_coeff 0")

    @property
    def formula(self) -> str:
        return f"+ {self.coefficient:g} · entropy"

    def term(self, rows: Rows) -> Tokens:
        assert rows.entropy is not None
        return self(rows.entropy)

    def __call__(self, entropy: Tokens) -> Tokens:
        return -self.coefficient * entropy


@dataclass(frozen=True)
class PositiveNll:
    """coefficient · NLL of the correct completions, a token mean over them alone. VAPO."""

    coefficient: float = 0.1
    """Strength of the term."""
    above: float = 0.0
    """Task scores above this count as correct; 0 fits task scores of 0 and 1, and of −1 and 1."""
    needs: ClassVar[tuple[Need, ...]] = ("outcome",)
    peers: ClassVar[Peers] = Peers("none", "none")

    @property
    def formula(self) -> str:
        return f"+ {self.coefficient:g} · mean log π of correct completions"

    def row_weights(
        self, counts: Float[Tensor, " B"], outcome: Float[Tensor, " B"] | None, group: Int[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """1 / (sampled tokens of correct completions) for each of those tokens, over the whole step."""
        assert outcome is not None
        correct = (outcome > self.above).double()
        return correct / (correct * counts).sum().clamp(min=1)

    def term(self, rows: Rows) -> Tokens:
        return self(rows.logprobs)

    def __call__(self, logprobs: Tokens) -> Tokens:
        return -self.coefficient * logprobs


@dataclass(frozen=True)
class RouterBalance:
    """coefficient · X · Σ_i f_i·P_i over X experts: makes the most used experts less likely. Switch Transformer.

    f is each expert's share of assignments, P its mean probability, both over all layers and the tokens that train,
    read where a token is predicted. f is counted once over the whole update and carries no gradient.
    """

    coefficient: float = 0.001
    """Strength of the term."""
    needs: ClassVar[tuple[Need, ...]] = ("router_logits",)
    peers: ClassVar[Peers] = Peers(
        "router_aux_loss_coef None: the model's own, so on for a mixture; prompts count too, per micro-batch",
        "off for Qwen3-MoE on Megatron (load balancing none); none on FSDP",
    )

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ValueError(f"extra.coefficient is {self.coefficient}: it must be positive, say 0.001")

    @property
    def formula(self) -> str:
        legend = "X experts, f an expert's share of tokens, P its mean weight"
        return f"− {self.coefficient:g} · X Σ_i f_i·P_i over {legend}"

    def assignments(self, logits: Float[Tensor, "M L X"], chosen: int) -> Int[Tensor, " X"]:
        """Number of times that each expert is among the `chosen` of a token and layer."""
        return logits.topk(chosen).indices.flatten().bincount(minlength=logits.shape[2])

    def __call__(self, logits: Float[Tensor, "M L X"], load: Float[Tensor, " X"]) -> Float[Tensor, " M"]:
        """X · Σ_i f_i·p_i of each token, a mean over layers, before the coefficient; `load` is f."""
        probabilities = at_least_float32(logits).softmax(dim=-1).mean(dim=1)
        return len(load) * (probabilities * load.to(probabilities.dtype)).sum(dim=-1)


Extra = ValueLoss | EntropyBonus | PositiveNll | RouterBalance | ExtraProtocol


def terms_of(extras: Sequence[Extra]) -> tuple[ExtraProtocol, ...]:
    """The extras whose term the objective computes, in order."""
    return tuple(cast(ExtraProtocol, extra) for extra in extras if not ExtraTraits.read(extra).of_learner)


def value_loss_of(extras: Sequence[Extra]) -> ValueLoss | None:
    """The extra that trains a value model, if there is one."""
    return next((cast(ValueLoss, extra) for extra in extras if "values" in ExtraTraits.read(extra).needs), None)


def router_balance_of(extras: Sequence[Extra]) -> RouterBalance | None:
    """The extra that reads the routers, if there is one."""
    matches = (extra for extra in extras if "router_logits" in ExtraTraits.read(extra).needs)
    return next((cast(RouterBalance, extra) for extra in matches), None)


def unmet_needs(extras: Sequence[Extra]) -> Iterator[str]:
    """Messages about needs that nothing meets, which would silently leave a term out of the loss."""
    for extra in extras:
        traits, name = ExtraTraits.read(extra), type(extra).__name__
        if traits.of_learner and traits.term is not None:
            yield (
                f"extra {name} has a term and needs {' and '.join(traits.needs)}: only ValueLoss and RouterBalance are "
                "given values and router logits, a term may need entropy or outcome"
            )


def needing(extras: Sequence[Extra], need: Need) -> list[str]:
    """Names of the extras that need this input."""
    return [type(extra).__name__ for extra in extras if need in ExtraTraits.read(extra).needs]


def supervised_loss(logprobs: Tokens, dynamic: bool = False) -> Tokens:
    """−log π of each token. Dynamic fine-tuning (DFT) multiplies it by the token's own probability, held constant."""
    return -logprobs * logprobs.detach().exp() if dynamic else -logprobs
