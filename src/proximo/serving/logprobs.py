"""Log-probs of given tokens under the model at temperature 1, with the most likely alternatives."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from proximo.models import completion_states, supports_packing
from proximo.models.logprobs import project
from proximo.models.model_types import PreTrainedModel
from proximo.models.sampled import evaluating
from proximo.types.tensor_types import Float

CHUNK = 256
"""Tokens whose logits are held at a time."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-prob."""

    token: int
    logprob: float | None
    """Log-prob of the token; None for the first of all, which nothing precedes."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens in its place, best first."""


Row = tuple[Sequence[int], Sequence[int]]
"""Tokens to score, after those that precede them, of which there is at least one."""


def token_logprobs(model: PreTrainedModel, rows: Sequence[Row], top: int) -> list[tuple[TokenLogprob, ...]]:
    """The log-probs of each row's tokens, with `top` alternatives. Rows run through the model together."""
    scored = [row for row in rows if row[1]]
    logprobs: list[TokenLogprob] = []
    targets = torch.tensor([token for _, tokens in scored for token in tokens], dtype=torch.long, device=model.device)
    with evaluating(model):
        start = 0
        for logits in _logits(model, scored) if scored else ():
            logprobs += _read(logits, targets[start : start + len(logits)], top)
            start += len(logits)
    each = iter(logprobs)
    return [tuple(next(each) for _ in tokens) for _, tokens in rows]


def prompt_logprobs(model: PreTrainedModel, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """The log-probs of all tokens of a prompt; the first one has none."""
    [rest] = token_logprobs(model, [(tokens[:1], tokens[1:])], top)
    return TokenLogprob(tokens[0], None), *rest


def _logits(model: PreTrainedModel, rows: Sequence[Row]) -> Iterator[Float[Tensor, "C V"]]:
    """The logits that predict each token, row after row."""
    if not supports_packing(model):
        for before, tokens in rows:
            ids = torch.tensor([[*before, *tokens]], device=model.device)
            yield model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].float()
        return
    # Each prompt runs once, however many rows follow it.
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(tuple(before) for before, _ in rows))}
    states = completion_states(
        model,
        prompts=list(prompts),
        tokens=pad_sequence([torch.tensor(tokens) for _, tokens in rows], batch_first=True),
        lengths=torch.tensor([len(tokens) for _, tokens in rows]),
        group=torch.tensor([prompts[tuple(before)] for before, _ in rows]),
    )
    weight = model.get_submodule("lm_head").get_parameter("weight")
    for chunk in states.flat.split(CHUNK):
        yield project(chunk, weight.T)


def _read(logits: Float[Tensor, "C V"], targets: Tensor, top: int) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    rows = zip(targets.tolist(), chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprob(token, logprob, tuple(zip(ids, near, strict=True))) for token, logprob, ids, near in rows]
