"""Basic checks: prompts, grader, ends of completions, masks.

A check gives the size of a fault and its bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.models import problem_tokens
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.stop_tokens import end_tokens
from proximo.models.tokens.spelling import Spelling
from proximo.rewards.grading import grading
from proximo.rl.preflight.calibration import probed, short, with_references
from proximo.rl.progress import prompt_text
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Task
from proximo.types import Completion, Group, Problem
from proximo.types.batches import Batch

PROBLEMS = 32
"""Number of problems whose prompts and reference answers are checked."""
FIRST = 6
"""Number of prompt tokens shown."""


@dataclass(frozen=True)
class Check:
    """One check and its result."""

    name: str
    value: float | None
    """Size of the fault; None if there was nothing to check, and `detail` says why."""
    bound: float
    detail: str
    only_warns: bool = False
    """True if exceeding the bound may be intended: it is shown but does not fail."""

    @property
    def ok(self) -> bool:
        """True if the check passes; NaN does not."""
        return self.only_warns or self.value is None or self.value <= self.bound

    @property
    def warns(self) -> bool:
        return self.only_warns and self.value is not None and not self.value <= self.bound


# Prompts and the grader


def prompts_have_tokens(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> Check:
    mistakes, shortest = [], math.inf
    for problem in problems:
        try:
            shortest = min(shortest, len(problem_tokens(tokenizer, problem)))
        except ValueError as error:
            mistakes.append(f"{problem.id}: {error}")
    detail = mistakes[0] if mistakes else f"{len(problems)} prompts, the shortest has {shortest} tokens"
    return Check("prompts without tokens", float(len(mistakes)), 0.0, detail)


def prompts_decode_back(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> Check:
    """Prompts survive encoding: nothing unknown to the tokenizer, nothing dropped by the chat template."""
    lost = []
    for problem in problems:
        # A template may trim a turn; plain text is used as it is.
        asked = problem.prompt if isinstance(problem.prompt, str) else prompt_text(problem).strip()
        read = tokenizer.decode(list(problem_tokens(tokenizer, problem)), clean_up_tokenization_spaces=False)
        assert isinstance(read, str)
        if asked not in read:
            lost.append(f"{short(asked)} is read as {short(read)}")
    return Check("prompts not read as written", float(len(lost)), 0.0, lost[0] if lost else f"{len(problems)} prompts")


def prompts_begin_rightly(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> Check:
    """One BOS if the tokenizer has one, and no end token before the completion; the first tokens are shown."""
    prompts = [problem_tokens(tokenizer, problem) for problem in problems]
    odd = [(tokens, what) for tokens in prompts if (what := _odd(tokenizer, tokens))]
    tokens, what = odd[0] if odd else (prompts[0], "")
    first = tokens[:FIRST]
    spelled = " ".join(f"{token}:{piece!r}" for token, piece in zip(first, Spelling(tokenizer)(first), strict=True))
    detail = f"{what + '; ' if what else ''}a prompt begins with {spelled}{' …' if len(tokens) > FIRST else ''}"
    return Check("prompts with odd special tokens", float(len(odd)), 0.0, detail, only_warns=True)


def _odd(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Fault in a prompt's special tokens; empty if there is none."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if tokens[-1] == end != tokens[0]:
        return f"it ends with the end-of-sequence token {tokenizer.eos_token!r}, before the completion begins"
    # A tokenizer with one token for both, like GPT-2's, uses it only between documents.
    if not isinstance(begin, int) or begin == end:
        return ""
    if tokens[0] != begin:
        return f"it does not begin with the tokenizer's BOS {tokenizer.bos_token!r}: was the model trained without it?"
    if tokens[1:2] == (begin,):
        return f"it begins with two BOS {tokenizer.bos_token!r}: write none into the text or the chat template"
    return ""


def references_are_right(task: Task, seed: int) -> Check:
    name, problems = "references graded wrong", _held_out(task, seed)
    known = with_references(task, problems)
    if not known:
        return Check(name, None, 0.0, "skipped: the task has no reference answers")
    with grading() as active:
        wrong = [str(probe) for probe in probed(task, known) if not probe.is_right]
        failures = map(str, active.failures.take())
    detail = "; ".join([*wrong[:1], *failures]) if wrong else f"{len(known)} references score at least 1"
    return Check(name, float(len(wrong)), 0.0, detail)


def silence_is_wrong(task: Task, seed: int) -> Check:
    problems = _held_out(task, seed)
    with grading():
        right = [probe.problem.id for probe in probed(task, [(problem, "") for problem in problems]) if probe.is_right]
    detail = f"{right[0]}: no answer at all scores 1" if right else f"{len(problems)} empty answers score less than 1"
    return Check("empty answers graded right", float(len(right)), 0.0, detail)


def _held_out(task: Task, seed: int) -> list[Problem]:
    size = task.size("held_out")
    split = "train" if size == 0 else "held_out"
    return [task.problem(index, split, seed) for index in range(min(size or PROBLEMS, PROBLEMS))]


# Completions and masks


def end_of_sequence(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Check:
    """Check that there is an end token, and that the model can generate it."""
    name, ends, pad = "end-of-sequence ids missing", sorted(end_tokens(model, tokenizer)), tokenizer.pad_token_id
    if not ends:
        return Check(name, 1.0, 0.0, "neither the model nor the tokenizer names one: completions never end")
    beyond = [token for token in ends if token >= vocabulary_size(model)]
    if beyond:
        return Check(name, float(len(beyond)), 0.0, f"{beyond} is beyond the model's {vocabulary_size(model)} tokens")
    same = " (the same, which is fine: masks go by position)" if pad in ends else ""
    return Check(name, 0.0, 0.0, f"ids {', '.join(map(str, ends))}; padding {pad}{same}")


def completions_end(groups: Sequence[Group], ends: frozenset[int], sampling: SamplingOptions) -> Check:
    """Each completion stops at its first end token or at the limit, and is marked accordingly."""
    completions = completions_of(groups)
    wrong = [completion for completion in completions if not _ends_rightly(completion, ends, sampling)]
    cut = sum(completion.finish == "length" for completion in completions)
    detail = f"{len(completions) - cut} ended by themselves, {cut} at the limit of {sampling.max_tokens} tokens"
    if wrong:
        detail = f"finish is {wrong[0].finish!r}, the limit {sampling.max_tokens}, the tokens {wrong[0].tokens[-8:]}"
    return Check("completions with a wrong end", float(len(wrong)), 0.0, detail)


def _ends_rightly(completion: Completion, ends: frozenset[int], sampling: SamplingOptions) -> bool:
    """An end token also ends a turn: then a token follows that was not sampled."""
    tokens, sampled = completion.tokens, sampled_flags(completion)
    inner = (token for token, *both in zip(tokens, sampled, sampled[1:], strict=False) if all(both))
    if not tokens or ends.intersection(inner):
        return False
    if not all(sampled):  # an environment may end it after any turn
        return completion.finish == "stop" or tokens[-1] not in ends
    ended = tokens[-1] in ends
    if completion.finish == "length":
        return not ended and len(tokens) == sampling.max_tokens
    return ended or bool(sampling.stop)


def mask_counts_tokens(groups: Sequence[Group], batch: Batch) -> Check:
    """The mask is True on exactly the sampled tokens, including the end token."""
    flags = [sampled_flags(completion) for completion in completions_of(groups)]
    width, count = batch.mask.shape[1], sum(map(sum, flags))
    expected = torch.tensor([[*row, *[False] * (width - len(row))] for row in flags])
    wrong = (batch.mask != expected).any(dim=1)
    detail = f"{count} sampled tokens of {len(flags)} completions, {int(batch.mask.sum())} in the mask"
    return Check("rows with a wrong mask", float(wrong.sum()), 0.0, detail)


def sampled_flags(completion: Completion) -> tuple[bool, ...]:
    """Flag of each token: True if it was sampled."""
    return completion.sampled or (True,) * len(completion.tokens)


def completions_of(groups: Sequence[Group]) -> list[Completion]:
    return [rollout.completion for group in groups for rollout in group.rollouts]


def vocabulary_size(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return len(weight)
