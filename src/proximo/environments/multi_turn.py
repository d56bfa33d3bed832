"""Several turns: the policy replies, an environment or a tool answers, and the policy continues."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proximo.config.plugins import load_class, load_function
from proximo.environments.append_turn import MAX_CHARACTERS, Extender
from proximo.environments.episode_pool import ActingJob, Hosts, LocalHost, ProcessHost
from proximo.environments.episodes import Episode
from proximo.environments.protocol import Ask, Question
from proximo.environments.rollout import EpisodeBatch
from proximo.environments.tool_calls import HERMES, call_format, schema_of, with_tools
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.processes.child import NodePlaces
from proximo.rewards.function import check_range
from proximo.rewards.grading import grading
from proximo.rewards.judges.usage import Usage
from proximo.samplers.sampler import Stream
from proximo.types import Problem

EXAMPLES = "proximo.environments.examples"
"""Module whose environments and tools run in this process: they are known neither to hang nor to crash."""
MAX_HOSTS = 32
"""Processes that have loaded an environment, for rounds that are played at the same time."""


@dataclass(frozen=True)
class MultiTurn:
    """Episodes of several turns, with an environment of your own, tools, or both.

    A reply that calls tools gets their results. Any other reply goes to the environment's `step`; without an
    environment it is the answer, which the task grades. What the policy sampled is never tokenised again, and what is
    answered is not trained on. Environments and tools run in processes of their own, one for each episode, with limits.
    """

    path: str = ""
    """Environment: package.module:Class or path/to/file.py:Class, a class with reset(problem) and step(reply).
    Empty: tools only."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments with which the environment's class is called."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call: package.module:function or path/to/file.py:function, with types and a
    docstring, from which the model is told of them."""
    max_turns: int = 8
    """Maximum replies of the policy per episode."""
    max_turn_tokens: int | None = None
    """Maximum tokens of one reply. None: as many as sampling.max_tokens, the limit of the whole episode, leaves."""
    max_answer_tokens: int = 512
    """Length in tokens to which each answer of the environment or of a tool is cut."""
    seconds: float = 10.0
    """Time limit for one call of the environment or of a tool in seconds; then its process is killed. Calls run at
    once: n of them on c cores together have ceil(n / c) times as long."""
    memory_mb: int = 4096
    """Memory limit of each process for its own data."""
    reward_range: tuple[float, float] | None = None
    """Rewards of a failed and of a successful episode of the environment, which set the scale of length penalties.
    None: -1 and 1 are assumed. An episode that ends in an error of the policy's making earns the first; None: 0, or
    what the worst of its siblings earned."""

    def __post_init__(self) -> None:
        for name, path in [("path", self.path)] * bool(self.path) + [("tools", tool) for tool in self.tools]:
            module, _, wanted = path.rpartition(":")
            if not module or not wanted.isidentifier():
                raise ValueError(f"environment.{name} has {path!r}: give package.module:Name or file.py:Name")
        for name in ("max_turns", "max_turn_tokens", "max_answer_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"environment.{name} is {getattr(self, name)}: give at least 1")
        check_range(self.reward_range, "environment")
        if not 0 < self.seconds <= 86_400 or self.memory_mb < 64:
            raise ValueError(
                f"environment.seconds is {self.seconds}, environment.memory_mb {self.memory_mb}: give seconds above 0, "
                "at most a day, and at least 64 MB"
            )

    def check(self) -> None:
        """Refuse one without environment and tools, or whose own tools cannot run here. Not when it is made: flags fill
        its fields one by one."""
        if not self.path and not self.tools:
            raise ValueError(
                "environment.path is empty and so is environment.tools: give an environment, tools, or both"
            )
        names = [path.rpartition(":")[2] for path in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"environment.tools has two functions called {twice[0]!r}: give each another name")
        if self.arguments and not self.path:
            raise ValueError(f"environment.arguments is {dict(self.arguments)}, but environment.path is empty")
        for tool in (load_function(path) for path in self.tools if _is_own(path)):
            getattr(tool, "check", lambda: None)()

    @property
    def scores(self) -> bool:
        """True if there is an environment, which gives rewards; with tools alone the task grades the last reply."""
        return bool(self.path)

    def prepared(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> Problem:
        """The problem with the tools, as the chat template writes them."""
        if not self.tools:
            return problem
        if isinstance(problem.prompt, str):
            raise ValueError(
                f"environment.tools has {len(self.tools)} tools, but the prompt of {problem.id} is a text: tools need "
                "a conversation and a model with a chat template"
            )
        return with_tools(tokenizer, problem, [schema_of(path) for path in self.tools])

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        episodes = [
            Episode(question, group, sample, ask.options.max_tokens)
            for group, question in enumerate(questions)
            for sample in range(question.request.num_samples)
        ]
        with grading() as active, active.shared(self._job, lambda: self._hosts(active.places)).one() as host:
            game = EpisodeBatch(
                host=host,
                ask=ask,
                extend=Extender(ask.tokenizer, self.max_answer_tokens),
                name=self._job.path,
                scores=self.scores,
                tools=tuple(path.rpartition(":")[2] for path in self.tools),
                form=call_format(ask.tokenizer) if self.tools else HERMES,
                max_turns=self.max_turns,
                max_turn_tokens=self.max_turn_tokens,
                lowest=None if self.reward_range is None else self.reward_range[0],
                times=active.episodes if ask.step >= 0 else Usage("episode"),
            )
            try:
                yield from game.rounds(questions, episodes)
            finally:
                host.end([episode.number for episode in episodes if episode.number >= 0])

    @property
    def _job(self) -> ActingJob:
        arguments = json.dumps(dict(self.arguments), sort_keys=True, default=str)
        max_characters = MAX_CHARACTERS * self.max_answer_tokens
        return ActingJob(self.path or None, arguments, self.tools, self.seconds, self.memory_mb, max_characters)

    def _hosts(self, places: NodePlaces | None) -> Hosts:
        job = self._job
        if not all(map(_is_own, filter(None, (self.path, *self.tools)))):
            return Hosts(lambda rounds: ProcessHost(job, rounds, places), MAX_HOSTS)
        kind = load_class(self.path) if self.path else None
        tools = {path.rpartition(":")[2]: load_function(path) for path in self.tools}
        make = None if kind is None else lambda: kind(**self.arguments)
        return Hosts(lambda _: LocalHost(make, tools, job.max_characters), 1)


def _is_own(path: str) -> bool:
    return path.rpartition(":")[0] == EXAMPLES
