"""A task with a reward mix: the task's score, reward models and rules."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence

from proximo.models import Precision, load_tokenizer, pick_device, pick_dtype, problem_tokens
from proximo.models.compiling import allow_compiling
from proximo.models.context_length import check_length
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.reward_models import completion_scores, load_reward_model
from proximo.models.shipped import resolve
from proximo.models.stop_tokens import declared_ends
from proximo.models.tokens.templates import rendered
from proximo.models.tokens.tokenizing import asked_text, following_tokens, reply_tokens, special_prefix
from proximo.processes.failures import Failure, plain
from proximo.rewards.grading import grading, note_failure
from proximo.rewards.protocol import Scores, Waiting
from proximo.rewards.scoring import begin_scores
from proximo.rl.reward_config import RewardMix, RewardModel, has_verdict
from proximo.supervised.encoding import EncodedRows, check_ends, completion_tokens, end_of
from proximo.tasks import RewardRange, Split, Task, reward_range
from proximo.tasks.protocol import begin_grading
from proximo.types import Completion, Grade, Message, Problem, Turn

Scorer = Callable[[Sequence[Problem], Sequence[Completion]], Waiting[Scores]]
"""A rule or a reward model: one number per completion; NaN: unscored; None: does not apply to it."""
SHOWN = "what turn {} answered"
"""Text that stands for a turn, to see whether a template writes it."""


def with_reward_models(
    task: Task,
    mix: RewardMix,
    tokenizer: PreTrainedTokenizerBase,
    dtype: Precision = "auto",
    *,
    compiled: bool = True,
) -> Task:
    """The task with the mix as its reward; the task itself if the mix is only its task score. Loads the reward models.
    `compiled` is whether these may be compiled on a GPU."""
    if mix.is_verdict:
        return task
    problem = task.problem(0, "held_out" if task.size("train") == 0 else "train", 0)
    for rule in mix.rules:
        if rule.reward.needs_answer and problem.answer is None:
            kind = type(rule.reward).__name__
            raise ValueError(f"rewards.rules has {kind}, which needs an answer, but problem {problem.id} has none")
    models = [ScoringModel(model, tokenizer, problem, dtype) for model in mix.models]
    for model in models:
        allow_compiling(model.model, compiled)
    scorers: list[tuple[float, Scorer]] = [
        (options.weight, model.begin) for options, model in zip(mix.models, models, strict=True)
    ]
    scorers += [(rule.weight, partial(begin_scores, rule.reward)) for rule in mix.rules]
    while_sampling = not mix.models and task.while_sampling
    return MixedReward(task, mix.task, dict(zip(mix.names, scorers, strict=True)), while_sampling)


@dataclass(frozen=True)
class MixedReward:
    """A task whose reward is a mix."""

    task: Task
    weight: float
    """Weight of the task's own score."""
    scorers: Mapping[str, tuple[float, Scorer]]
    """Rules and reward models by name, with their weights."""
    while_sampling: bool = False
    """True: grade during sampling. Not with reward models: they share the device with the sampler, and are fastest on
    many rows at once."""

    def size(self, split: Split) -> int | None:
        return self.task.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self.task.problem(index, split, seed)

    def reference(self, problem: Problem) -> str | None:
        return self.task.reference(problem)

    @property
    def reward_range(self) -> RewardRange | None:
        """The range of the task's score, which the mix does not change."""
        return reward_range(self.task)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        """Grade by the task's verdict; where there is none, of prompts alone or where the task's own function returned
        None, by the reward. A function that returns None for a completion takes no part in its reward."""
        with grading():
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Grade]]:
        waiting = begin_grading(self.task, problems, completions)
        begun = {name: scorer(problems, completions) for name, (_, scorer) in self.scorers.items()}
        return lambda: self._mixed(waiting(), {name: scores() for name, scores in begun.items()})

    def _mixed(self, task_grades: Sequence[Grade], parts: Mapping[str, Scores]) -> list[Grade]:
        weights = {name: weight for name, (weight, _) in self.scorers.items()}
        grades = []
        for row, grade in enumerate(task_grades):
            rewards = {"task": self.weight * grade.reward} if self.weight and grade.applies else {}
            row_scores = {name: scores[row] for name, scores in parts.items()}
            rewards |= {name: weights[name] * finite(score) for name, score in row_scores.items() if score is not None}
            is_verdict = has_verdict(self.task) and grade.applies
            outcome = grade.outcome if is_verdict else math.fsum(rewards.values()) if rewards else math.nan
            grades.append(Grade(outcome, rewards, applies=bool(rewards), steps=grade.steps))
        return grades


def finite(score: float) -> float:
    """A valid score; anything else is NaN: unscored."""
    return score if math.isfinite(score) else math.nan


class ScoringModel:
    """A reward model that scores the policy's completions: from tokens if both share a vocabulary, otherwise from
    text."""

    def __init__(
        self, options: RewardModel, policy: PreTrainedTokenizerBase, problem: Problem, dtype: Precision = "auto"
    ) -> None:
        """`policy` is the policy's tokenizer; a prompt that cannot be read is detected with the first problem."""
        path = resolve(options.path)
        tokenizer = load_tokenizer(path)
        self.name, self.token_budget = options.path, options.token_budget
        self.mean, self.deviation = options.mean, options.deviation
        self.same_tokens = same_tokens(tokenizer, policy)
        self.tokenizer = policy if self.same_tokens else tokenizer
        self.policy_ends = frozenset(policy.all_special_ids)
        self.ends = declared_ends(path)
        try:
            problem_tokens(self.tokenizer, problem)
        except (ValueError, TemplateError) as error:
            raise ValueError(f"rewards.models has {options.path!r}, which cannot read {problem.id}: {error}") from error
        device = pick_device(options.device)
        self.model = load_reward_model(path, device=device, dtype=pick_dtype(dtype, device), fresh_head=False)

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[Scores]:
        """Score at once: the model shares its device with the sampler."""
        scores = self(problems, completions)
        return lambda: scores

    @torch.no_grad()
    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        scores = torch.full((len(completions),), torch.nan)
        readable, rows = self._rows(problems, completions)
        for part in rows.parts(self.token_budget) if readable else ():
            some = rows.at(part)
            values = completion_scores(
                self.model, prompts=some.prompts, tokens=some.tokens, lengths=some.lengths, group=some.group
            )
            scores[torch.tensor(readable)[part]] = values.to(scores)
        return [finite((score - self.mean) / self.deviation) for score in scores.tolist()]

    def _rows(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> tuple[list[int], EncodedRows]:
        """The readable completions by index, in groups that share a prompt."""
        groups: dict[tuple[int, tuple[int, ...]], int] = {}
        readable, encoded, group = [], [], []
        for row, (problem, completion) in enumerate(zip(problems, completions, strict=True)):
            try:
                prompt, tokens = self.tokens(problem, completion)
                check_length(self.model, len(prompt), len(tokens))
            except (ValueError, TemplateError) as error:
                message = plain(f"it cannot read a completion of {problem.id}: {error}")
                note_failure(self.name, Failure("unreadable", message))
                continue
            encoded.append(torch.tensor(tokens, dtype=torch.long))
            readable.append(row)
            group.append(groups.setdefault((id(problem), prompt), len(groups)))  # siblings share their problem
        tokens = pad_sequence(encoded, batch_first=True) if encoded else torch.zeros(0, 0, dtype=torch.long)
        lengths = torch.tensor([len(tokens) for tokens in encoded], dtype=torch.long)
        return readable, EncodedRows(
            prompts=tuple(prompt for _, prompt in groups),
            tokens=tokens,
            lengths=lengths,
            mask=torch.arange(tokens.shape[1]) < lengths.unsqueeze(1),
            group=torch.tensor(group, dtype=torch.long),
        )

    def tokens(self, problem: Problem, completion: Completion) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A prompt and its completion as the reward model reads them, all turns of an episode included."""
        prompt = problem_tokens(self.tokenizer, problem)
        if len(completion.turns) < 2:
            return prompt, self._reply(problem, completion)
        if self.same_tokens:
            return prompt, completion.tokens
        for turn in completion.turns:
            if turn.role == "assistant":
                check_ends(self.tokenizer, turn.text, self.ends)
        if isinstance(problem.prompt, str):
            return prompt, self._joined(problem.prompt, completion)
        return self._conversation(problem, prompt, completion)

    def _reply(self, problem: Problem, completion: Completion) -> tuple[int, ...]:
        """A finished completion ends with an end token, a truncated one does not."""
        finished, arguments = completion.finish == "stop", problem.chat_template_kwargs
        text = partial(completion_tokens, self.tokenizer, problem.prompt, completion.text, self.ends)
        if not self.same_tokens:
            tokens = text(arguments=arguments)
            return tokens if finished else tokens[:-1]
        tokens = completion.tokens
        # One that a stop string ended has it in its tokens but not in its text, and no end token of its own.
        is_open = finished and (not tokens or tokens[-1] not in self.policy_ends)
        return text(arguments=arguments, sampled=True) if is_open else tokens

    # Episodes, in another vocabulary than the policy's

    def _has_ended(self, completion: Completion, turn: Turn) -> bool:
        """Tell whether the policy ended a turn: a last one that an episode's limit cut off has no end."""
        is_last = turn is completion.turns[-1]
        return (is_last and completion.finish == "stop") or completion.tokens[turn.end - 1] in self.policy_ends

    def _joined(self, prompt: str, completion: Completion) -> tuple[int, ...]:
        """An episode behind a text: turns as they follow each other, with an end token where the policy had one."""
        tokens, (end, _) = (), end_of(self.tokenizer)
        for number, turn in enumerate(completion.turns):
            tokens += following_tokens(self.tokenizer, turn.text) if number else ()
            tokens += () if number else reply_tokens(self.tokenizer, prompt, turn.text)
            tokens += (end,) if turn.role == "assistant" and self._has_ended(completion, turn) else ()
        return tokens

    def _conversation(
        self, problem: Problem, prompt: tuple[int, ...], completion: Completion
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The whole conversation in the reward model's own template, up to the end of its last turn. A template may
        write the start otherwise once more follows; then the prompt is what both begin with."""
        asked = asked_text(self.tokenizer, problem.prompt, problem.chat_template_kwargs)
        text, behind = self._rendered(problem, completion)
        if text.startswith(asked):
            tokens = reply_tokens(self.tokenizer, asked, text.removeprefix(asked))
        else:
            whole = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            pairs = enumerate(zip(prompt, whole, strict=False))
            same = max(1, next((index for index, (one, other) in pairs if one != other), len(prompt)))
            prompt, tokens = whole[:same], whole[same:]
        closed = _up_to_end(self.tokenizer, tokens, behind, self.ends)
        return prompt, closed if self._has_ended(completion, completion.turns[-1]) else closed[:-1]

    def _rendered(self, problem: Problem, completion: Completion) -> tuple[str, str]:
        """The conversation as text, and what the template writes behind its last turn; results of tools are the user's
        where it knows no tools."""
        messages = completion.messages
        if not self._shows(problem, messages) and not self._shows(problem, messages := _in_turn(messages)):
            raise ValueError("its chat template leaves out what the environment or a tool answered")
        # Asked of a text that occurs once: a last turn may be empty, or spell a part of what ends it.
        last = SHOWN.format(len(messages))
        _, is_shown, behind = self._text(problem, [*messages[:-1], {**messages[-1], "content": last}]).rpartition(last)
        return self._text(problem, messages), behind if is_shown else ""

    def _shows(self, problem: Problem, messages: Sequence[Message]) -> bool:
        """Tell whether the template takes messages of these roles and writes what was answered in them."""
        answers = [number for number, message in enumerate(messages) if message["role"] != "assistant"]
        marked = [
            {**message, "content": SHOWN.format(number)} if number in answers else message
            for number, message in enumerate(messages)
        ]
        try:
            text = self._text(problem, marked)
        except ValueError as error:
            if isinstance(error.__cause__, TemplateError):
                return False
            raise
        return all(SHOWN.format(number) in text for number in answers)

    def _text(self, problem: Problem, messages: Sequence[Message]) -> str:
        assert not isinstance(problem.prompt, str)
        whole, arguments = [*problem.prompt, *messages], problem.chat_template_kwargs
        return rendered(self.tokenizer, whole, for_answer=False, arguments=arguments)


def _in_turn(messages: Sequence[Message]) -> list[Message]:
    """The messages of two who speak in turn: whatever is not the assistant's is the user's."""
    parts = groupby(messages, key=lambda message: "assistant" if message["role"] == "assistant" else "user")
    return [{"role": role, "content": "\n".join(message["content"] for message in some)} for role, some in parts]


def _up_to_end(
    tokenizer: PreTrainedTokenizerBase, tokens: tuple[int, ...], behind: str, ends: Collection[int]
) -> tuple[int, ...]:
    """Tokens up to the first end token in what stands `behind` the last turn; with the tokenizer's own where there is
    none."""
    end, _ = end_of(tokenizer)
    rest = len(following_tokens(tokenizer, behind)) if behind else 0
    start = max(0, len(tokens) - rest)
    indices = [index for index in range(start, len(tokens)) if tokens[index] in {end, *ends}]
    return tokens[: indices[0] + 1] if indices else (*tokens[:start], end)


def same_tokens(judge: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> bool:
    """Tell whether a reward model can read a policy's tokens directly: same vocabulary, BOS, EOS and chat template."""
    return (
        judge.get_vocab() == policy.get_vocab()
        and special_prefix(judge) == special_prefix(policy)
        and judge.eos_token_id == policy.eos_token_id
        and judge.chat_template in (None, policy.chat_template)
    )
