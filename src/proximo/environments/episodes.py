"""One sample's episode on the side of the trainer: its tokens so far, and how it ends."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from proximo.environments.protocol import Question
from proximo.types import Completion, Request, Turn


@dataclass
class Episode:
    """Tokens after the prompt. Those that were sampled stay as the sampler returned them; answers come in between."""

    question: Question
    group: int
    """Number of its question."""
    sample: int
    max_tokens: int
    """Length limit of all turns together."""
    number: int = -1
    """Number of the episode at its host."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] | None = field(default_factory=list)
    """Entropy of each token. None: the sampler does not record them."""
    sampled: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Updates that the policy had seen at each token; those of an answer count with the reply before it."""
    turns: list[Turn] = field(default_factory=list)
    replies: int = 0
    """Number of turns of the policy."""
    finish: Literal["stop", "length"] | None = None
    """Reason of the end; None while it is played."""
    last: Completion | None = None
    failed: str = ""
    """Reason why it could not be started; empty: it was."""
    is_lost: bool = False
    """True if it ended in an error of the policy's making."""

    @property
    def room(self) -> int:
        """Tokens that are left."""
        return self.max_tokens - len(self.tokens)

    def request(self, turn_tokens: int | None) -> Request:
        """Request for the next reply."""
        prompt = self.question.request.prompt_tokens + tuple(self.tokens)
        limit = min(self.room, turn_tokens or self.room)
        return replace(
            self.question.request,
            prompt_tokens=prompt,
            num_samples=1,
            turn=self.replies,
            first_sample=self.sample,
            max_tokens=limit,
        )

    def reply(self, completion: Completion, reward: float | None) -> None:
        """Add what the policy sampled, with the reward that it has if nothing more is said."""
        self.last = completion
        self._add(completion.tokens, completion.logprobs, completion.entropies, sampled=True)
        self.versions += completion.versions or (completion.version,) * len(completion.tokens)
        self.replies += 1
        self.turns.append(Turn("assistant", completion.text, len(self.tokens), reward))
        if not self.room and completion.finish == "length":
            self.finish = "length"

    def answer(self, tokens: tuple[int, ...], messages: list[Turn]) -> None:
        """Add what the environment answered, all of it in these tokens; it ends where no room is left to reply."""
        if len(tokens) >= self.room:
            self.finish = "length"
            return
        nothing = (0.0,) * len(tokens)
        self._add(tokens, nothing, nothing, sampled=False)
        self.versions += self.versions[-1:] * len(tokens)
        self.turns += [replace(turn, end=len(self.tokens)) for turn in messages]

    def earn(self, reward: float) -> None:
        """Set what the newest reply earned."""
        self.turns[-1] = replace(self.turns[-1], reward=reward)

    def fail(self, reason: str) -> None:
        """End it after its newest reply, without a score."""
        self.finish = "stop"
        self.turns[-1] = replace(self.turns[-1], reward=math.nan, failed=reason)

    def lose(self, lowest: float, reason: str) -> None:
        """End it after its newest reply, which was an error: all of it has earned the lowest reward, or less."""
        self.finish, self.is_lost = "stop", True
        self.earn_at_most(lowest)
        self.turns[-1] = replace(self.turns[-1], failed=reason)

    @property
    def earned(self) -> float:
        """Reward of all replies together; NaN where one has no score."""
        return math.fsum(turn.reward or 0.0 for turn in self.turns)

    def earn_at_most(self, limit: float) -> None:
        """Limit the reward of all replies together, where the policy has caused an error; less stays."""
        if self.is_lost and self.earned >= limit:
            self.turns = [turn if turn.reward is None else replace(turn, reward=0.0) for turn in self.turns]
            self.earn(limit)

    def _add(
        self, tokens: tuple[int, ...], logprobs: tuple[float, ...], entropies: tuple[float, ...], *, sampled: bool
    ) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.entropies = (
            None if self.entropies is None or len(entropies) < len(tokens) else [*self.entropies, *entropies]
        )
        self.sampled += [sampled] * len(tokens)

    def completion(self) -> Completion:
        """The whole episode as one completion; its text is the last reply's."""
        last = self.last
        assert last is not None
        assert self.finish is not None
        routes, prompt_routes = last.routes, last.prompt_routes
        if routes is not None and prompt_routes is not None:  # the last turn has read everything before it
            prompt = len(self.question.request.prompt_tokens)
            routes, prompt_routes = torch.cat((prompt_routes[prompt:], routes)), prompt_routes[:prompt]
        first = min(self.versions, default=last.version)
        return replace(
            last,
            version=first,
            versions=tuple(self.versions) if max(self.versions, default=first) > first else (),
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            entropies=tuple(self.entropies or ()),
            sampled=tuple(self.sampled),
            finish=self.finish,
            turns=tuple(self.turns),
            routes=routes,
            prompt_routes=prompt_routes,
        )
