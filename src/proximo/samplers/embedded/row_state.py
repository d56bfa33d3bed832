"""The rows of a decode batch as tensors: the tokens of each, and whether it is still decoding.

Drawing, the tests for an end and the counting happen here, on the device; the host looks now and then. Everything is
changed in place and nothing depends on a value, so that a captured graph can do it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.samplers.partial import PartialCompletion
from proximo.samplers.rng import draw, row_states, signed, uniforms_at
from proximo.samplers.sampler import SamplingOptions
from proximo.types.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class DecodeTable:
    """S slots with room for R tokens each."""

    tokens: Int[Tensor, " S"]
    """The newest of each row."""
    counts: Int[Tensor, " S"]
    """Number of tokens that it has drawn."""
    live: Bool[Tensor, " S"]
    """False from its last token on, until its slot is taken again."""
    prompts: Int[Tensor, " S"]
    """Lengths."""
    limits: Int[Tensor, " S"]
    """Tokens that it may draw at most."""
    states: Int[Tensor, " S"]
    """States of the random numbers: what is the same for all tokens of a row."""
    all_tokens: Int[Tensor, "S R1"]
    """All tokens of each row; the last place takes what is drawn for rows that have ended."""
    logprobs: Float[Tensor, "S R1"]
    entropies: Float[Tensor, "S R1"]
    """Entropy of the distribution before each token."""
    seed: Int[Tensor, ""]
    step: Int[Tensor, ""]
    broken: Bool[Tensor, ""]
    """A live row's log-prob was NaN."""

    def begin(self, seed: int, step: int) -> None:
        self.seed.fill_(signed(seed))
        self.step.fill_(signed(step))
        self.broken.fill_(False)
        self.live.fill_(False)

    def enter(self, partials: Sequence[PartialCompletion], first: int) -> None:
        """Empty rows for partials, in neighbouring slots."""
        here = slice(first, first + len(partials))
        room = self.all_tokens.shape[1] - 1
        rows = [
            [signed(partial.key), partial.sample, len(partial.prompt), min(partial.max_tokens or room, room)]
            for partial in partials
        ]
        entering = torch.tensor(rows, device=self.tokens.device)
        keys, samples, self.prompts[here], self.limits[here] = entering.unbind(dim=1)
        self.states[here] = row_states(self.seed, self.step, keys, samples)
        self.counts[here], self.live[here] = 0, True

    def advance(
        self,
        first: int,
        logits: Float[Tensor, "N V"],
        options: SamplingOptions,
        ends: Int[Tensor, " E"],
        draw: Callable[..., tuple[Tensor, Tensor, Tensor]] = draw,
    ) -> None:
        """One token for each of the rows from the first on; rows that have ended stay as they are."""
        here = slice(first, first + len(logits))
        live, counts = self.live[here], self.counts[here]
        tokens, logprobs, entropies = draw(logits, uniforms_at(self.states[here], counts), options)
        self.tokens[here] = tokens
        self.all_tokens[here].scatter_(1, counts.unsqueeze(1), tokens.unsqueeze(1))
        self.logprobs[here].scatter_(1, counts.unsqueeze(1), logprobs.unsqueeze(1))
        self.entropies[here].scatter_(1, counts.unsqueeze(1), entropies.unsqueeze(1))
        self.broken.logical_or_((live & logprobs.isnan()).any())
        counts += live
        limits = self.limits[here].clamp(max=options.max_tokens)
        live &= (tokens.unsqueeze(1) != ends).all(dim=1) & (counts < limits)

    def positions(self, rows: int) -> Int[Tensor, " N"]:
        """Positions of the newest tokens. A slot that nobody has taken has none, and stands at the beginning."""
        return (self.prompts[:rows] + self.counts[:rows] - 1).clamp(min=0)

    def release(self, sources: Sequence[int], targets: Sequence[int], left: int) -> None:
        """Move rows to other slots, and free the slots from `left` on."""
        if sources:
            for column in self._columns():
                column[targets] = column[sources]
        self.live[left:] = False

    def store(self, slot: int) -> list[Tensor]:
        """A copy of a row, in the host's memory."""
        return [column[slot].to("cpu", copy=True) for column in self._columns()]

    def restore(self, slot: int, row: Sequence[Tensor]) -> None:
        for column, value in zip(self._columns(), row, strict=True):
            column[slot] = value

    def _columns(self) -> tuple[Tensor, ...]:
        columns = (self.tokens, self.counts, self.live, self.prompts, self.limits, self.states)
        return *columns, self.all_tokens, self.logprobs, self.entropies

    def look(self, rows: int) -> tuple[list[int], list[bool], bool]:
        """Counts, who goes on, and whether something is broken, in one transfer."""
        seen = torch.cat((self.counts[:rows], self.live[:rows], self.broken[None])).tolist()
        return seen[:rows], [bool(live) for live in seen[rows:-1]], bool(seen[-1])

    def texts(self, slots: Sequence[int], longest: int) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """The first tokens of rows, with their log-probs and entropies."""
        tokens, logprobs, entropies = (
            each[slots, :longest] for each in (self.all_tokens, self.logprobs, self.entropies)
        )
        return tokens.tolist(), logprobs.tolist(), entropies.tolist()


def empty_table(slots: int, room: int, device: torch.device) -> DecodeTable:
    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device)

    return DecodeTable(
        tokens=integers(slots),
        counts=integers(slots),
        live=integers(slots).bool(),
        prompts=integers(slots),
        limits=integers(slots),
        states=integers(slots),
        all_tokens=integers(slots, room + 1),
        logprobs=torch.zeros(slots, room + 1, dtype=torch.float32, device=device),
        entropies=torch.zeros(slots, room + 1, dtype=torch.float32, device=device),
        seed=integers(),
        step=integers(),
        broken=integers().bool(),
    )
