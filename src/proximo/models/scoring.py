"""What a model thinks of completions: log-probs, entropy and hidden states, aligned with the tokens."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.models.attention import NAME, attention, hidden_states
from proximo.models.layout import Padded, pack, pad
from proximo.models.loading import supports_packing, warn_of_fallback
from proximo.models.logprobs import check_temperature, token_logprobs
from proximo.shapes import Bool, Float, Int


@dataclass(frozen=True)
class Scores:
    """Entry [b, t] describes token t of completion b."""

    logprobs: Float[Tensor, "B T"]
    """0 beyond each row's length."""
    entropy: Float[Tensor, "B T"]
    """Of the distribution each token was drawn from; carries a gradient only where that was asked for."""
    states: "States"
    """The hidden states behind them."""


@dataclass(frozen=True)
class States:
    """The hidden states of a pass from which completion tokens are predicted: before each token is consumed."""

    flat: Float[Tensor, "C E"]
    """One for each completion token, row by row."""
    where: Bool[Tensor, "B T"]
    """True at the C completion tokens."""
    places: Int[Tensor, " C"]
    """Where they stood among the positions of the pass, flattened."""

    def aligned(self, flat: Float[Tensor, " C"]) -> Float[Tensor, "B T"]:
        """A number per completion token, in rows; 0 beyond each row's length."""
        blank = torch.zeros(self.where.shape, dtype=flat.dtype, device=flat.device)
        return blank.masked_scatter(self.where, flat)


def score(
    model: PreTrainedModel,
    *,
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    temperature: float = 1.0,
    byte_budget: int = 2**26,
    layout: Literal["packed", "padded"] = "packed",
    entropy_gradient: bool = False,
) -> Scores:
    """Score completions; row b, `tokens[b, :lengths[b]]`, continues `prompts[group[b]]`.

    Both layouts give the same numbers and gradients. Packed runs each prompt once, in one row without padding;
    padded is transformers' ordinary forward pass, for reference and for models that packing does not support.
    Rows of a group need not be neighbours. `byte_budget` bounds the logits held at a time.
    """
    tokens, lengths, group = _checked(model, prompts, tokens, lengths, group)
    targets = tokens[_where(tokens, lengths)]
    if supports_packing(model):
        states = completion_states(model, prompts=prompts, tokens=tokens, lengths=lengths, group=group, layout=layout)
        weight = model.get_submodule("lm_head").get_parameter("weight")
        logprobs, entropy = token_logprobs(
            states.flat,
            weight,
            targets,
            temperature=temperature,
            byte_budget=byte_budget,
            entropy_gradient=entropy_gradient,
        )
    else:
        if layout == "packed":
            warn_of_fallback(type(model).__name__)
        padded = pad(prompts, tokens, lengths, group)
        flat, logprobs, entropy = _own_logits(model, padded, targets, temperature)
        entropy = entropy if entropy_gradient else entropy.detach()
        states = States(flat, _where(tokens, lengths), padded.predictors)
    return Scores(states.aligned(logprobs), states.aligned(entropy), states)


def completion_states(
    model: PreTrainedModel,
    *,
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    layout: Literal["packed", "padded"] = "packed",
) -> States:
    """The states alone, of a model with any head: each prompt runs once where packing is supported."""
    tokens, lengths, group = _checked(model, prompts, tokens, lengths, group)
    if supports_packing(model) and layout == "packed":
        packed = pack(prompts, tokens, lengths, group)
        with attention(model, NAME):
            states = hidden_states(model, packed.tokens, packed.positions, packed.reader)
        places = packed.predictors
    else:
        padded = pad(prompts, tokens, lengths, group)
        # Outside the fast path a model's own attention may be part of what it computes.
        with attention(model, "sdpa") if supports_packing(model) else nullcontext():
            output = model.base_model(input_ids=padded.tokens, attention_mask=padded.mask, use_cache=False)
        states, places = output.last_hidden_state, padded.predictors
    return States(states.flatten(0, 1).index_select(0, places), _where(tokens, lengths), places)


def _checked(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Tensor, lengths: Tensor, group: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """On the model's device, and nothing empty."""
    empty = [number for number in group.unique().tolist() if len(prompts[number]) == 0]
    if empty:
        raise ValueError(f"prompts[{empty[0]}] has no tokens: give at least one, from which a completion can start")
    assert int(lengths.max()) <= tokens.shape[1], "a completion is longer than its row"
    return tokens.to(model.device), lengths.to(model.device), group.to(model.device)


def _where(tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Bool[Tensor, "B T"]:
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def _own_logits(
    model: PreTrainedModel, padded: Padded, targets: Int[Tensor, " C"], temperature: float
) -> tuple[Float[Tensor, "C E"], Float[Tensor, " C"], Float[Tensor, " C"]]:
    """States, log-probs and entropy from the logits as the model itself computes them, all at once."""
    check_temperature(temperature)
    output = model(input_ids=padded.tokens, attention_mask=padded.mask, use_cache=False, output_hidden_states=True)
    states = output.hidden_states[-1].flatten(0, 1).index_select(0, padded.predictors)
    logits = output.logits.flatten(0, 1).index_select(0, padded.predictors)
    wide = torch.promote_types(logits.dtype, torch.float32)
    everything = (logits.to(wide) / temperature).log_softmax(-1)
    logprobs = everything.gather(-1, targets[:, None])[:, 0]
    return states, logprobs, -(everything.exp() * everything).sum(-1)
