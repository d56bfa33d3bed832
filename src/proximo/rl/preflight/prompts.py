"""Finds prompts that a run cannot use, before a model is loaded."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Protocol

from proximo.environments.kinds import Acting, EnvironmentOptions, played
from proximo.models import problem_tokens
from proximo.models.context_length import Reach, reach_of
from proximo.models.loading import read_config
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.keys import SECONDS, tokens_key
from proximo.models.tokens.tokenizing import each_prompt_tokens
from proximo.samplers.sampler import SamplingOptions
from proximo.system.caches import Cache
from proximo.system.slow_work import told_while_slow
from proximo.tasks import Split, Task, TaskOptions
from proximo.tasks.protocol import Complaints
from proximo.tasks.sources.mixture import Checked
from proximo.types import Problem

MEASURED = 256
"""Number of prompts whose tokens are counted for a person; more of a file are checked, but only for their limit."""
LOOKED_AT = 8
"""Number of prompts checked for a task without a file."""


MANY = 1_000
"""Number of prompts from which on it is remembered that all of them fit."""
CACHE = Cache("prompts", max_bytes=1 << 20)
FITS = b"all fit"


class Asks(Protocol):
    """A config with a task, its environment, sampling options and a seed."""

    @property
    def task(self) -> TaskOptions: ...

    @property
    def sampling(self) -> SamplingOptions: ...

    @property
    def seed(self) -> int: ...

    @property
    def environment(self) -> EnvironmentOptions: ...


def check_prompts(config: Asks, path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Check every prompt of a file: is it too long for the model at `path`, or refused by the chat template? All bad
    rows are refused in one error, or skipped and returned if the task allows that. For other tasks the first few
    prompts are checked; the sampler refuses later ones."""
    reach, max_tokens = reach_of(read_config(path)), config.sampling.max_tokens
    if reach is not None and max_tokens >= reach.tokens:
        raise ValueError(
            f"sampling.max_tokens is {max_tokens}, which leaves no room for a prompt: {reach.why}; give less than "
            f"{reach.tokens}, or use a model with a longer context"
        )

    task = played(config.task, config.environment, tokenizer)
    acts = config.environment if isinstance(config.environment, Acting) else None

    def complaints(problems: Sequence[Problem]) -> Iterator[str | None]:
        prepare = None if acts is None else partial(acts.prepared, tokenizer=tokenizer)
        each = each_prompt_tokens(tokenizer, problems, prepare)
        for tokens in told_while_slow(each, "prompts checked", len(problems)):
            yield str(tokens) if isinstance(tokens, ValueError) else _too_long(len(tokens), max_tokens, reach)

    def complaints_once(problems: Sequence[Problem]) -> Iterator[str | None]:
        key = None if acts is not None else _key(tokenizer, problems, (max_tokens, reach))
        return complaints(problems) if key is None else _remembered(key, problems, complaints)

    if isinstance(config.task, Checked):
        return config.task.check(complaints_once)
    _check_first(task, config.seed, tokenizer, max_tokens, reach)
    return []


def _key(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], limits: tuple[int, Reach | None]
) -> str | None:
    """Key of prompts and their limits; None where they are few, or ask in a template of their own."""
    if len(problems) < MANY or any("chat_template" in problem.chat_template_kwargs for problem in problems):
        return None
    return tokens_key(
        tokenizer, chain([repr(limits)], (repr((each.prompt, each.chat_template_kwargs)) for each in problems))
    )


def _remembered(key: str, problems: Sequence[Problem], complaints: Complaints) -> Iterator[str | None]:
    """The complaints about problems; that there was none about any of them is kept where the answer took long."""
    if CACHE.read(key) is not None:
        yield from repeat(None, len(problems))
        return
    start, is_fine = time.monotonic(), True
    for complaint in complaints(problems):
        is_fine = is_fine and complaint is None
        yield complaint
    if is_fine and time.monotonic() - start > SECONDS:
        CACHE.write(key, FITS)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as the model reads it."""

    text: str
    """The text with its special tokens."""
    tokens: int


def rendered_prompt(config: Asks, tokenizer: PreTrainedTokenizerBase, split: Split = "train") -> RenderedPrompt:
    """The first prompt as the model reads it."""
    tokens = _tokens(config, tokenizer, played(config.task, config.environment, tokenizer), 0, split)
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return RenderedPrompt(str(text), len(tokens))


@dataclass(frozen=True)
class PromptLengths:
    """Tokens of prompts, in order of length."""

    tokens: tuple[int, ...]
    prompts: int | None
    """Number of prompts that there are; None: the task generates them without end."""

    def quantile(self, share: float) -> int:
        """Tokens that this share of the prompts does not exceed."""
        return self.tokens[max(0, math.ceil(share * len(self.tokens)) - 1)]

    @property
    def is_whole(self) -> bool:
        """True if every prompt was counted."""
        return len(self.tokens) == self.prompts


def prompt_lengths(config: Asks, tokenizer: PreTrainedTokenizerBase, split: Split = "train") -> PromptLengths:
    """Tokens of the prompts, or of some that lie evenly among many; those that the template refuses are left out."""
    task = played(config.task, config.environment, tokenizer)
    size = task.size(split)
    number = MEASURED if size is None else min(MEASURED, size)
    step = 1.0 if size is None else size / max(1, number)
    lengths = []
    for index in range(number):
        with suppress(ValueError):  # the run names it
            lengths.append(len(_tokens(config, tokenizer, task, int(index * step), split)))
    return PromptLengths(tuple(sorted(lengths)), size)


def _tokens(config: Asks, tokenizer: PreTrainedTokenizerBase, task: Task, index: int, split: Split) -> Sequence[int]:
    """Tokens of a problem's prompt, with what its environment adds to it."""
    problem = task.problem(index, split, config.seed)
    acts = config.environment if isinstance(config.environment, Acting) else None
    return problem_tokens(tokenizer, acts.prepared(problem, tokenizer) if acts else problem)


def _check_first(
    task: Task, seed: int, tokenizer: PreTrainedTokenizerBase, max_tokens: int, reach: Reach | None
) -> None:
    size = task.size("train")
    for index in range(LOOKED_AT if size is None else min(LOOKED_AT, size)):
        problem = task.problem(index, "train", seed)
        try:
            length = len(problem_tokens(tokenizer, problem))
        except ValueError:
            continue  # reported when the prompt is used
        if (what := _too_long(length, max_tokens, reach)) is not None:
            raise ValueError(f"{problem.id}: {what}")


def _too_long(length: int, max_tokens: int, reach: Reach | None) -> str | None:
    if reach is None or length + max_tokens <= reach.tokens:
        return None
    return (
        f"the prompt has {length} tokens and sampling.max_tokens is {max_tokens}: {reach.why}, which leaves "
        f"{reach.tokens - max_tokens} for a prompt"
    )
