"""What a model thinks of completions: log-probs, entropy and hidden states, aligned with the tokens."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.models.attention import NAME, attention, hidden_states
from proximo.models.layout import Packed, Padded, pack, pad
from proximo.models.loading import supports_packing, warn_of_fallback
from proximo.models.logprobs import check_temperature, token_logprobs
from proximo.models.routing import Agreement, Recorder, Replay, Routes, recording, replaying, routes_of
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
    routes: Routes | None = None
    """The experts that were used, where they were to be recorded."""
    router_logits: Float[Tensor, "C L X"] | None = None
    """Of each layer's X experts where a completion token is predicted, row by row, where they were asked for."""
    agreement: tuple[Agreement, Agreement] | None = None
    """Of replayed routes with the routers' own choice: of the completions, and of the prompts."""


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
    routes: Routes | None = None,
    record: bool = False,
    router_logits: bool = False,
    until: ExitStack | None = None,
) -> Scores:
    """Score completions; row b, `tokens[b, :lengths[b]]`, continues `prompts[group[b]]`.

    Both layouts give the same numbers and gradients. Packed runs each prompt once, in one row without padding;
    padded is transformers' ordinary forward pass, for reference and for models that packing does not support.
    Rows of a group need not be neighbours. `byte_budget` bounds the logits held at a time.

    In a mixture of experts, tokens go where `routes` says, and `record` says where they went. A replay ends with
    this call, or with `until`: layers that are checkpointed run once more in the backward pass.
    """
    tokens, lengths, group = _checked(model, prompts, tokens, lengths, group)
    where = _where(tokens, lengths)
    laid = _laid_out(model, prompts, tokens, lengths, group, layout)
    places = laid.places
    with ExitStack() as stack:
        replay, recorder = _experts(model, laid, routes, record or router_logits, router_logits, stack, until)
        if supports_packing(model):
            states = _states(model, laid, where)
            logprobs, entropy = token_logprobs(
                states.flat,
                model.get_submodule("lm_head").get_parameter("weight"),
                tokens[where],
                temperature=temperature,
                byte_budget=byte_budget,
                entropy_gradient=entropy_gradient,
            )
        else:
            if layout == "packed":
                warn_of_fallback(type(model).__name__)
            assert isinstance(laid, Padded)
            flat, logprobs, entropy = _own_logits(model, laid, tokens[where], temperature)
            entropy = entropy if entropy_gradient else entropy.detach()
            states = States(flat, where, laid.predictors)
    return Scores(
        logprobs=states.aligned(logprobs),
        entropy=states.aligned(entropy),
        states=states,
        routes=routes_of(recorder.chosen, places, [*map(len, prompts)]) if recorder and record else None,
        router_logits=recorder.logits[laid.predictors] if recorder and router_logits else None,
        agreement=replay and (replay.agreement(places.completion_tokens), replay.agreement(places.prompt_tokens)),
    )


def _experts(
    model: PreTrainedModel,
    laid: Packed | Padded,
    routes: Routes | None,
    listen: bool,
    keeps_logits: bool,
    stack: ExitStack,
    until: ExitStack | None,
) -> tuple[Replay | None, Recorder | None]:
    """The replay and the recorder of a pass, where they are asked for; what is recorded is what was replayed."""
    replay = None
    if routes is not None:
        again = torch.is_grad_enabled() and model.is_gradient_checkpointing
        assert until is not None or not again, "checkpointed layers would run again without their routes"
        indices = routes.at(laid.places, laid.tokens.numel())
        replay = (until or stack).enter_context(replaying(model, indices))
    return replay, stack.enter_context(recording(model, keeps_logits=keeps_logits)) if listen else None


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
    return _states(model, _laid_out(model, prompts, tokens, lengths, group, layout), _where(tokens, lengths))


def _laid_out(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    layout: Literal["packed", "padded"],
) -> Packed | Padded:
    return (pack if supports_packing(model) and layout == "packed" else pad)(prompts, tokens, lengths, group)


def _states(model: PreTrainedModel, laid: Packed | Padded, where: Bool[Tensor, "B T"]) -> States:
    """Of a pass through the body."""
    if isinstance(laid, Packed):
        with attention(model, NAME):
            states = hidden_states(model, laid.tokens, laid.positions, laid.reader)
    else:
        # Outside the fast path a model's own attention may be part of what it computes.
        with attention(model, "sdpa") if supports_packing(model) else nullcontext():
            output = model.base_model(input_ids=laid.tokens, attention_mask=laid.mask, use_cache=False)
        states = output.last_hidden_state
    return States(states.flatten(0, 1).index_select(0, laid.predictors), where, laid.predictors)


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
