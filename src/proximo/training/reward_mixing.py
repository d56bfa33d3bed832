"""A task with a reward mix: the task's outcome, reward models and rules."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence

from proximo.models import Precision, load_tokenizer, pick_device, pick_dtype, problem_tokens
from proximo.models.compiling import allow_compiling
from proximo.models.ends import declared_ends
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.positions import check_length
from proximo.models.reward_models import completion_scores, load_reward_model
from proximo.models.shipped import resolve
from proximo.models.tokens.tokenizing import special_prefix
from proximo.rewards.failures import Failure, plain
from proximo.rewards.grading import grading, note_failure
from proximo.rewards.protocol import Scores, Waiting
from proximo.rewards.scoring import begin_scores
from proximo.tasks import RewardRange, Split, Task, reward_range
from proximo.tasks.protocol import begin_grading
from proximo.training.offline.encoding import EncodedRows, completion_tokens
from proximo.training.reward_mix import RewardMix, RewardModel, has_verdict
from proximo.types import Completion, Grade, Problem

Scorer = Callable[[Sequence[Problem], Sequence[Completion]], Waiting[Scores]]
"""A rule or a reward model: one number per completion; NaN: unscored; None: does not apply to it."""


def judged(
    task: Task,
    mix: RewardMix,
    tokenizer: PreTrainedTokenizerBase,
    dtype: Precision = "auto",
    *,
    compiled: bool = True,
) -> Task:
    """The task with the mix as its reward; the task itself if the mix is only its outcome. Loads the reward models.
    `compiled` is whether these may be compiled on a GPU."""
    if mix.is_verdict:
        return task
    problem = task.problem(0, "train", 0)
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
    return Judged(task, mix.task, dict(zip(mix.names, scorers, strict=True)), while_sampling)


@dataclass(frozen=True)
class Judged:
    """A task whose reward is a mix."""

    task: Task
    weight: float
    """Weight of the task's own outcome."""
    scorers: Mapping[str, tuple[float, Scorer]]
    """Rules and reward models by name, with their weights."""
    while_sampling: bool = False
    """Whether to grade during sampling. Not with reward models: they share the device with the sampler, and are fastest
    on many rows at once."""

    def size(self, split: Split) -> int | None:
        return self.task.size(split)

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return self.task.problem(index, split, seed)

    def reference(self, problem: Problem) -> str | None:
        return self.task.reference(problem)

    @property
    def reward_range(self) -> RewardRange | None:
        """The range of the task's outcome, which the mix does not change."""
        return reward_range(self.task)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        """The outcome is the task's verdict; where there is none, of prompts alone or where the task's own function
        returned None, it is the reward. A function that returns None for a completion takes no part in its reward."""
        with grading():
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[Grade]]:
        own = begin_grading(self.task, problems, completions)
        begun = {name: scorer(problems, completions) for name, (_, scorer) in self.scorers.items()}
        return lambda: self._mixed(own(), {name: scores() for name, scores in begun.items()})

    def _mixed(self, own: Sequence[Grade], parts: Mapping[str, Scores]) -> list[Grade]:
        weights = {name: weight for name, (weight, _) in self.scorers.items()}
        grades = []
        for row, grade in enumerate(own):
            rewards = {"task": self.weight * grade.reward} if self.weight and grade.applies else {}
            found = {name: scores[row] for name, scores in parts.items()}
            rewards |= {name: weights[name] * finite(score) for name, score in found.items() if score is not None}
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
        own = load_tokenizer(path)
        self.name, self.token_budget = options.path, options.token_budget
        self.mean, self.deviation = options.mean, options.deviation
        self.same_tokens = same_tokens(own, policy)
        self.tokenizer = policy if self.same_tokens else own
        self.ends = declared_ends(path)
        try:
            problem_tokens(self.tokenizer, problem)
        except (ValueError, TemplateError) as error:
            raise ValueError(f"rewards.models has {options.path!r}, which cannot read {problem.id}: {error}") from error
        device = pick_device(options.device)
        self.model = load_reward_model(path, device=device, dtype=pick_dtype(dtype, device), fresh_head=False)

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[Scores]:
        """Scores at once: the model shares its device with the sampler."""
        scores = self(problems, completions)
        return lambda: scores

    @torch.no_grad()
    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        scores = torch.full((len(completions),), torch.nan)
        readable, rows = self._rows(problems, completions)
        for part in rows.parts(self.token_budget) if readable else ():
            some = rows.at(part)
            found = completion_scores(
                self.model, prompts=some.prompts, tokens=some.tokens, lengths=some.lengths, group=some.group
            )
            scores[torch.tensor(readable)[part]] = found.to(scores)
        return [finite((score - self.mean) / self.deviation) for score in scores.tolist()]

    def _rows(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> tuple[list[int], EncodedRows]:
        """The readable completions by index, in groups that share a prompt."""
        prompts: dict[int, tuple[int, ...]] = {}
        readable, encoded = [], []
        for row, (problem, completion) in enumerate(zip(problems, completions, strict=True)):
            try:
                if id(problem) not in prompts:  # siblings share their problem
                    prompts[id(problem)] = problem_tokens(self.tokenizer, problem)
                tokens = self._tokens(problem, completion)
                check_length(self.model, len(prompts[id(problem)]), len(tokens))
                encoded.append(torch.tensor(tokens, dtype=torch.long))
                readable.append(row)
            except (ValueError, TemplateError) as error:
                message = plain(f"it cannot read a completion of {problem.id}: {error}")
                note_failure(self.name, Failure("unreadable", message))
        numbers = {key: number for number, key in enumerate(prompts)}
        tokens = pad_sequence(encoded, batch_first=True) if encoded else torch.zeros(0, 0, dtype=torch.long)
        lengths = torch.tensor([len(each) for each in encoded], dtype=torch.long)
        return readable, EncodedRows(
            prompts=tuple(prompts.values()),
            tokens=tokens,
            lengths=lengths,
            mask=torch.arange(tokens.shape[1]) < lengths.unsqueeze(1),
            group=torch.tensor([numbers[id(problems[row])] for row in readable], dtype=torch.long),
        )

    def _tokens(self, problem: Problem, completion: Completion) -> tuple[int, ...]:
        """A finished completion ends with an end token, a truncated one does not."""
        finished = completion.finish == "stop"
        if not self.same_tokens:
            tokens = completion_tokens(self.tokenizer, problem.prompt, completion.text, self.ends)
            return tokens if finished else tokens[:-1]
        tokens = completion.tokens
        # One that a stop string ended has it in its tokens but not in its text, and no end token of its own.
        is_open = finished and (not tokens or tokens[-1] not in self.tokenizer.all_special_ids)
        return completion_tokens(self.tokenizer, problem.prompt, completion.text, self.ends) if is_open else tokens


def same_tokens(judge: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> bool:
    """Whether a reward model can read a policy's tokens directly: same vocabulary, BOS, EOS and chat template."""
    return (
        judge.get_vocab() == policy.get_vocab()
        and special_prefix(judge) == special_prefix(policy)
        and judge.eos_token_id == policy.eos_token_id
        and judge.chat_template in (None, policy.chat_template)
    )
