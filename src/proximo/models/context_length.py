"""Length that a row may have, prompt and completion together, for a model to give exact numbers.

Two things limit it. A model has a limited number of positions. And a rope of type longrope or dynamic takes its
frequencies from the longest row of a forward pass as soon as that is longer than the model's original length: a
row's numbers would then depend on its neighbours, and a sampler's on how far it has come. Such rows are refused, and
up to the original length the frequencies are held fixed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from proximo.models.model_types import PreTrainedConfig, PreTrainedModel
from proximo.types import Request
from proximo.types.tensor_types import Int

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Fields of transformers' configs for the number of positions of a model; some have no limit and say nothing."""
FOLLOWING = ("longrope", "su", "dynamic")
"""Types of rope whose frequencies follow the longest row."""


@dataclass(frozen=True)
class Reach:
    """The most tokens of a row, prompt and completion together."""

    tokens: int
    why: str
    """Reason for the limit, for error messages."""


def reach_of(config: PreTrainedConfig) -> Reach | None:
    """Reach of a model; None where nothing limits a row, as in models that only keep a state."""
    text = config.get_text_config()
    named = next((count for name in POSITIONS if isinstance(count := getattr(text, name, None), int)), None)
    reaches = [] if named is None or named < 1 else [Reach(named, f"the model has {named} positions")]
    for kind, original in _following(text):
        length = original if original is not None and kind != "dynamic" else named
        if length is not None:
            why = f"the model's {kind} rope changes its frequencies with the longest row beyond {length} tokens"
            reaches.append(Reach(length, why))
    return min(reversed(reaches), key=lambda reach: reach.tokens, default=None)


def check_rows(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Int[Tensor, " B"], group: Int[Tensor, " B"]
) -> None:
    """A ValueError for a row, `lengths[b]` tokens after `prompts[group[b]]`, that is out of reach."""
    if lengths.numel():
        _, prompt, length = max(
            (len(prompts[number]) + length, len(prompts[number]), length)
            for number, length in zip(group.tolist(), lengths.tolist(), strict=True)
        )
        check_length(model, prompt, length)


def check_length(model: PreTrainedModel, prompt: int, completion: int) -> None:
    """Raise a ValueError if a row of this length is too long for the model."""
    reach = reach_of(model.config)
    if reach is not None and prompt + completion > reach.tokens:
        raise ValueError(
            f"a prompt of {prompt} tokens with a completion of {completion} is too long: {reach.why}; shorten one of "
            "the two"
        )


def check_requests(model: PreTrainedModel, requests: Sequence[Request], max_tokens: int) -> None:
    """A ValueError that names the first request whose completion may go out of reach."""
    reach = reach_of(model.config)
    for number, request in enumerate(requests):
        limit = request.limit(max_tokens)
        if reach is not None and len(request.prompt_tokens) + limit > reach.tokens:
            raise ValueError(
                f"requests[{number}] has {len(request.prompt_tokens)} prompt tokens, and max_tokens is {limit}: "
                f"{reach.why}, shorten one of the two"
            )


def hold_frequencies(model: nn.Module) -> None:
    """Keep rope frequencies as they are up to the original length, whatever passes through the model."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _follows(kinds):
            module.rope_type = "default"  # pyright: ignore[reportArgumentType] # what transformers asks at each pass
        elif isinstance(kinds, dict):
            kinds.update({layer: "default" for layer, kind in kinds.items() if _follows(kind)})


def _follows(kind: str) -> bool:
    return any(name in kind for name in FOLLOWING) if isinstance(kind, str) else False


def _following(config: PreTrainedConfig) -> Iterator[tuple[str, int | None]]:
    """The type and the original length of each rope of the model that follows the longest row."""
    ropes: Any = getattr(config, "rope_parameters", None) or {}
    parts = [ropes, *ropes.values()] if isinstance(ropes, Mapping) else []
    for part in parts:
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and _follows(kind):
            length = part.get("original_max_position_embeddings")
            yield kind, length or getattr(config, "original_max_position_embeddings", None)
