"""Scores of completions under a model: log-probs, entropy and hidden states, aligned with the tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from proximo.models.compiling import checkpoints, compiles, layer_run, reads_blocks
from proximo.models.context_length import check_rows
from proximo.models.logprobs import check_temperature, token_logprobs
from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import attention, hidden_states, registered
from proximo.models.packing.layout import Packed, Padded, pack, pad
from proximo.models.packing.support import supports_packing, warn_of_fallback
from proximo.models.routing import Agreement, Recorder, Replay, Routes, recording, replaying, routes_of
from proximo.system.phases import phase
from proximo.types.batches import to_device
from proximo.types.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class Scores:
    """Entry [b, t] describes token t of completion b."""

    logprobs: Float[Tensor, "B T"]
    """Log-prob of each token; 0 beyond the row's length."""
    entropy: Float[Tensor, "B T"]
    """Entropy of the distribution each token was drawn from; carries a gradient only where that was asked for."""
    states: "States"
    """Hidden states from which the tokens are predicted."""
    routes: Routes | None = None
    """Experts that were used, if they are recorded."""
    router_logits: Float[Tensor, "C L X"] | None = None
    """Logits of each layer's X experts where a completion token is predicted, row by row, where they were asked for."""
    agreement: tuple[Agreement, Agreement] | None = None
    """Agreement of replayed routes with the routers' own choice: of the completions, and of the prompts."""


@dataclass(frozen=True)
class States:
    """The hidden states of a pass from which completion tokens are predicted: before each token is consumed."""

    flat: Float[Tensor, "C E"]
    """Hidden states, one for each completion token, row by row."""
    where: Bool[Tensor, "B T"]
    """True at the C completion tokens."""
    places: Int[Tensor, " C"]
    """Indices of these states among the positions of the pass, flattened."""
    entries: Int[Tensor, " C"]
    """Indices of these tokens among the B · T tokens, flattened."""

    def aligned(self, flat: Float[Tensor, " C"]) -> Float[Tensor, "B T"]:
        """A number per completion token, in rows; 0 beyond each row's length."""
        blank = flat.new_zeros(self.where.numel())
        # By index, not by mask: the gradient of a masked scatter stops to count the mask.
        return blank.index_copy(0, self.entries, flat).reshape(self.where.shape)


def score(
    model: PreTrainedModel,
    *,
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    temperature: float = 1.0,
    byte_budget: int | None = None,
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
    Rows of a group need not be neighbours. `byte_budget` bounds the logits held at a time; None: the device decides.
    The rows are laid out on the CPU, and what is found stays on the model's device.

    In a mixture of experts, tokens go where `routes` says, and `record` says where they went. A replay ends with
    this call, or with `until`: layers that are checkpointed run once more in the backward pass.
    """
    with phase("packing"):
        tokens, lengths, group = _checked(prompts, tokens, lengths, group)
        check_rows(model, prompts, lengths, group)
        where = _where(tokens, lengths)
        targets = to_device(tokens[where], model.device)
        laid = _laid_out(model, prompts, tokens, lengths, group, layout).to(model.device)
        places = laid.places
    with ExitStack() as stack:
        replay, recorder = _experts(model, laid, routes, record or router_logits, router_logits, stack, until)
        if supports_packing(model):
            with phase("layers"):
                states = _states(model, laid, where)
            options: dict[str, Any] = {"byte_budget": byte_budget, "entropy_gradient": entropy_gradient}
            head = model.get_submodule("lm_head").get_parameter("weight")
            with phase("head"):
                logprobs, entropy = token_logprobs(
                    states.flat, head, targets, temperature=temperature, compiled=compiles(model), **options
                )
        else:
            if layout == "packed":
                warn_of_fallback(type(model).__name__)
            assert isinstance(laid, Padded)
            with phase("layers"):
                flat, logprobs, entropy = _own_logits(model, laid, targets, temperature)
            entropy = entropy if entropy_gradient else entropy.detach()
            states = _placed(flat, where, laid)
    return Scores(
        logprobs=states.aligned(logprobs),
        entropy=states.aligned(entropy),
        states=states,
        routes=routes_of(recorder.chosen.cpu(), places, [*map(len, prompts)]) if recorder and record else None,
        router_logits=recorder.logits[laid.predictors] if recorder and router_logits else None,
        agreement=replay and (replay.agreement(places.completion_tokens), replay.agreement(places.prompt_tokens)),
    )


@runtime_checkable
class ScoredRows(Protocol):
    """Completions as tensors, whatever else is known of them."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]: ...

    @property
    def tokens(self) -> Tensor: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def group(self) -> Tensor: ...


def score_rows(model: PreTrainedModel, rows: ScoredRows, **options: Any) -> Scores:
    """`score` of rows that know their prompts, with its options."""
    return score(model, prompts=rows.prompts, tokens=rows.tokens, lengths=rows.lengths, group=rows.group, **options)


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
        again = torch.is_grad_enabled() and checkpoints(model)
        assert until is not None or not again, "checkpointed layers would run again without their routes"
        indices = routes.at(laid.places, laid.tokens.numel())
        replay = (until or stack).enter_context(replaying(model, to_device(indices, model.device)))
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
    """The states alone, of a model with any head: each prompt runs once where packing is supported.

    How long rows may be is the caller's to check: a row's last token is never read.
    """
    tokens, lengths, group = _checked(prompts, tokens, lengths, group)
    laid = _laid_out(model, prompts, tokens, lengths, group, layout).to(model.device)
    return _states(model, laid, _where(tokens, lengths))


def _laid_out(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    tokens: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    layout: Literal["packed", "padded"],
) -> Packed | Padded:
    if supports_packing(model) and layout == "packed":
        return pack(prompts, tokens, lengths, group, in_blocks=reads_blocks(model))
    return pad(prompts, tokens, lengths, group)


def _states(model: PreTrainedModel, laid: Packed | Padded, where: Bool[Tensor, "B T"]) -> States:
    """States of a pass through the body."""
    if isinstance(laid, Packed):
        with attention(model, registered()):
            states = hidden_states(model, laid.tokens, laid.positions, laid.reader, layer_run(model))
    else:
        # Outside the fast path a model's own attention may be part of what it computes.
        with attention(model, "sdpa") if supports_packing(model) else nullcontext():
            output = model.base_model(input_ids=laid.tokens, attention_mask=laid.mask, use_cache=False)
        states = output.last_hidden_state
    return _placed(states_at(states.flatten(0, 1), laid.predictors), where, laid)


def states_at(flat: Float[Tensor, "S E"], places: Int[Tensor, " C"]) -> Float[Tensor, "C E"]:
    """The states at these places, of which some occur several times: siblings begin at the end of one prompt.

    On a GPU the gradient of `index_select` sums those in any order, and no two runs would be equal.
    """
    return flat[places] if flat.is_cuda else flat.index_select(0, places)


def _placed(flat: Float[Tensor, "C E"], where: Bool[Tensor, "B T"], laid: Packed | Padded) -> States:
    entries = where.flatten().nonzero()[:, 0]
    return States(flat, to_device(where, flat.device), laid.predictors, to_device(entries, flat.device))


def _checked(
    prompts: Sequence[Sequence[int]], tokens: Tensor, lengths: Tensor, group: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on the CPU, and nothing empty."""
    tokens, lengths, group = tokens.cpu(), lengths.cpu(), group.cpu()
    empty = [number for number in group.unique().tolist() if len(prompts[number]) == 0]
    if empty:
        raise ValueError(f"prompts[{empty[0]}] has no tokens: give at least one, from which a completion can start")
    assert int(lengths.max()) <= tokens.shape[1], "a completion is longer than its row"
    return tokens, lengths, group


def _where(tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Bool[Tensor, "B T"]:
    return torch.arange(tokens.shape[1]) < lengths[:, None]


def _own_logits(
    model: PreTrainedModel, padded: Padded, targets: Int[Tensor, " C"], temperature: float
) -> tuple[Float[Tensor, "C E"], Float[Tensor, " C"], Float[Tensor, " C"]]:
    """States, log-probs and entropy from the logits as the model itself computes them, all at once."""
    check_temperature(temperature)
    with _entering(model.get_output_embeddings() or nn.Identity()) as entered:
        output = model(input_ids=padded.tokens, attention_mask=padded.mask, use_cache=False, output_hidden_states=True)
    states = output.hidden_states[-1]
    if states.dim() > 3:  # Gemma 3n reports several streams; what its head reads is their mean
        [states] = entered
    states = states.flatten(0, 1).index_select(0, padded.predictors)
    logits = output.logits.flatten(0, 1).index_select(0, padded.predictors)
    wide = torch.promote_types(logits.dtype, torch.float32)
    everything = (logits.to(wide) / temperature).log_softmax(-1)
    logprobs = everything.gather(-1, targets[:, None])[:, 0]
    return states, logprobs, -(everything.exp() * everything).sum(-1)


@contextmanager
def _entering(head: nn.Module) -> Iterator[list[Tensor]]:
    """List what a module reads in each of its calls."""
    entered: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    try:
        yield entered
    finally:
        handle.remove()
