"""What a model thinks of completions: log-probs, entropy and hidden states, aligned with the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.models.attention import NAME, attention, body, hidden_states
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
    states: Float[Tensor, "C E"]
    """The hidden state that predicts each completion token, flat, row by row."""
    where: Bool[Tensor, "B T"]
    """True at the C completion tokens: values = zeros.masked_scatter(where, head(states))."""


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
    tokens, lengths, group = (tensor.to(model.device) for tensor in (tokens, lengths, group))
    empty = [number for number in group.unique().tolist() if len(prompts[number]) == 0]
    if empty:
        raise ValueError(f"prompts[{empty[0]}] has no tokens: give at least one, from which a completion can start")
    assert int(lengths.max()) <= tokens.shape[1], "a completion is longer than its row"
    where = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    targets = tokens[where]

    if supports_packing(model):
        states = (_packed_states if layout == "packed" else _padded_states)(model, prompts, tokens, lengths, group)
        weight = model.get_submodule("lm_head").get_parameter("weight")
        logprobs, entropy = token_logprobs(
            states,
            weight,
            targets,
            temperature=temperature,
            byte_budget=byte_budget,
            entropy_gradient=entropy_gradient,
        )
    else:
        if layout == "packed":
            warn_of_fallback(type(model).__name__)
        states, logprobs, entropy = _own_logits(model, pad(prompts, tokens, lengths, group), targets, temperature)
        entropy = entropy if entropy_gradient else entropy.detach()
    blank = torch.zeros(where.shape, dtype=logprobs.dtype, device=where.device)
    return Scores(blank.masked_scatter(where, logprobs), blank.masked_scatter(where, entropy), states, where)


def _packed_states(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Tensor, lengths: Tensor, group: Tensor
) -> Float[Tensor, "C E"]:
    packed = pack(prompts, tokens, lengths, group)
    with attention(model, NAME):
        states = hidden_states(model, packed.tokens, packed.positions, packed.reader)
    return states[0].index_select(0, packed.predictors)


def _padded_states(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Tensor, lengths: Tensor, group: Tensor
) -> Float[Tensor, "C E"]:
    padded = pad(prompts, tokens, lengths, group)
    with attention(model, "sdpa"):
        output = body(model)(input_ids=padded.tokens, attention_mask=padded.mask, use_cache=False)
    return output.last_hidden_state.flatten(0, 1).index_select(0, padded.predictors)


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
