"""Do this model, tokenizer, task and algorithm hold together? Checked on a few completions, before a run.

A check says how large a fault is and how large it may be: bounds on numbers are for float32, counts must be 0.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.algorithms import Algorithm
from proximo.maths.arithmetic import row_mean
from proximo.maths.keeping import KeepAll
from proximo.models import Scores, prompt_tokens, score, supports_packing
from proximo.samplers import Sampler, SamplingOptions
from proximo.samplers.drafts import end_tokens
from proximo.tasks import Task
from proximo.training.assemble import assemble, to_batch
from proximo.training.collect import Collector, Frontier
from proximo.training.config import RunConfig
from proximo.training.learner import Learner, gate_width
from proximo.training.progress import prompt_text
from proximo.types import Batch, Completion, Grade, Group, Problem, Rollout

PROBLEMS = 32
"""Problems whose prompts and reference answers are looked at."""
GROUPS, SIBLINGS, TOKENS = 4, 4, 64
"""What is sampled at most: enough for every path through the code, little enough for a laptop."""
ROUNDING = 1e-4
"""How far float32 may drift between two ways of computing the same."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    value: float | None
    """The size of the fault; None where there was nothing to check, and `detail` says why."""
    bound: float
    detail: str

    @property
    def ok(self) -> bool:
        """A NaN is under no bound."""
        return self.value is None or self.value <= self.bound


def selfcheck(
    config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampler: Sampler
) -> Iterator[Check]:
    """Every check, the cheap ones first; the model is left as it was."""
    problems = [config.task.problem(index, "train", config.seed) for index in range(PROBLEMS)]
    encoded = prompts_have_tokens(tokenizer, problems)
    yield encoded
    yield references_are_right(config.task, config.seed)
    yield silence_is_wrong(config.task, config.seed)
    if not encoded.ok:
        return  # there is nothing to sample from
    yield prompts_decode_back(tokenizer, problems)
    yield end_of_sequence(model, tokenizer)

    sampling = replace(config.sampling, max_tokens=min(config.sampling.max_tokens, TOKENS))
    groups = sampled_groups(config, sampling, tokenizer, sampler)
    batch = to_batch(groups)
    yield completions_end(groups, end_tokens(model, tokenizer), sampling)
    yield mask_counts_tokens(groups, batch)
    yield from sampler_is_learner(model, batch, config.algorithm, sampling.temperature)

    made_up = made_up_groups(model, groups, sampling, config.seed)
    yield from packed_is_padded(model, to_batch(made_up), sampling.temperature)
    yield micro_batches_add_up(model, made_up, config)


# Prompts and the grader


def prompts_have_tokens(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> Check:
    mistakes, shortest = [], math.inf
    for problem in problems:
        try:
            shortest = min(shortest, len(prompt_tokens(tokenizer, problem.prompt)))
        except ValueError as error:
            mistakes.append(f"{problem.id}: {error}")
    detail = mistakes[0] if mistakes else f"{len(problems)} prompts, the shortest has {shortest} tokens"
    return Check("prompts without tokens", float(len(mistakes)), 0.0, detail)


def prompts_decode_back(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> Check:
    """The model reads what was asked: nothing unknown to the tokenizer, nothing dropped by the chat template."""
    lost = []
    for problem in problems:
        # A template may trim a turn; a text is used as it is.
        asked = problem.prompt if isinstance(problem.prompt, str) else prompt_text(problem).strip()
        read = tokenizer.decode(list(prompt_tokens(tokenizer, problem.prompt)), clean_up_tokenization_spaces=False)
        if asked not in read:
            lost.append(f"{_short(asked)} is read as {_short(read)}")
    return Check("prompts not read as written", float(len(lost)), 0.0, lost[0] if lost else f"{len(problems)} prompts")


def references_are_right(task: Task, seed: int) -> Check:
    name, problems = "references graded wrong", _held_out(task, seed)
    known = [(problem, text) for problem in problems if (text := task.reference(problem)) is not None]
    if not known:
        return Check(name, None, 0.0, "skipped: the task has no reference answers")
    outcomes = _outcomes(task, [problem for problem, _ in known], [text for _, text in known])
    wrong = [
        f"{problem.id}: {_short(text)} scores {outcome:g}"
        for (problem, text), outcome in zip(known, outcomes, strict=True)
        if not outcome >= 1
    ]
    return Check(name, float(len(wrong)), 0.0, wrong[0] if wrong else f"{len(known)} references score at least 1")


def silence_is_wrong(task: Task, seed: int) -> Check:
    problems = _held_out(task, seed)
    outcomes = _outcomes(task, problems, [""] * len(problems))
    right = [problem.id for problem, outcome in zip(problems, outcomes, strict=True) if outcome >= 1]
    detail = f"{right[0]}: no answer at all scores 1" if right else f"{len(problems)} empty answers score less than 1"
    return Check("empty answers graded right", float(len(right)), 0.0, detail)


def _held_out(task: Task, seed: int) -> list[Problem]:
    size = task.size("held_out")
    split = "train" if size == 0 else "held_out"
    return [task.problem(index, split, seed) for index in range(min(size or PROBLEMS, PROBLEMS))]


def _outcomes(task: Task, problems: list[Problem], texts: list[str]) -> list[float]:
    completions = [Completion(tokens=(), logprobs=(), text=text, finish="stop") for text in texts]
    return [grade.outcome for grade in task.grade(problems, completions)]


# Completions and masks


def end_of_sequence(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Check:
    """Some token ends a completion, and the model can say it."""
    name, ends, pad = "end-of-sequence ids missing", sorted(end_tokens(model, tokenizer)), tokenizer.pad_token_id
    if not ends:
        return Check(name, 1.0, 0.0, "neither the model nor the tokenizer names one: completions never end")
    beyond = [token for token in ends if token >= _vocabulary(model)]
    if beyond:
        return Check(name, float(len(beyond)), 0.0, f"{beyond} is beyond the model's {_vocabulary(model)} tokens")
    same = " (the same, which is fine: masks go by position)" if pad in ends else ""
    return Check(name, 0.0, 0.0, f"ids {', '.join(map(str, ends))}; padding {pad}{same}")


def completions_end(groups: Sequence[Group], ends: frozenset[int], sampling: SamplingOptions) -> Check:
    """Each completion stops at its first end-of-sequence or at the limit, and says which."""
    completions = _completions(groups)
    wrong = [completion for completion in completions if not _ends_rightly(completion, ends, sampling)]
    cut = sum(completion.finish == "length" for completion in completions)
    detail = f"{len(completions) - cut} ended by themselves, {cut} at the limit of {sampling.max_tokens} tokens"
    if wrong:
        detail = f"finish is {wrong[0].finish!r}, the limit {sampling.max_tokens}, the tokens {wrong[0].tokens[-8:]}"
    return Check("completions with a wrong end", float(len(wrong)), 0.0, detail)


def _ends_rightly(completion: Completion, ends: frozenset[int], sampling: SamplingOptions) -> bool:
    if not completion.tokens or ends.intersection(completion.tokens[:-1]):
        return False
    ended = completion.tokens[-1] in ends
    if completion.finish == "length":
        return not ended and len(completion.tokens) == sampling.max_tokens
    return ended or bool(sampling.stop)


def mask_counts_tokens(groups: Sequence[Group], batch: Batch) -> Check:
    """The mask is True on exactly the sampled tokens, end-of-sequence included."""
    lengths = [len(completion.tokens) for completion in _completions(groups)]
    expected = torch.arange(batch.mask.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    wrong = (batch.mask != expected).any(dim=1)
    detail = f"{sum(lengths)} tokens of {len(lengths)} completions, {int(batch.mask.sum())} in the mask"
    return Check("rows with a wrong mask", float(wrong.sum()), 0.0, detail)


def _completions(groups: Sequence[Group]) -> list[Completion]:
    return [rollout.completion for group in groups for rollout in group.rollouts]


# Numbers


def sampler_is_learner(
    model: PreTrainedModel, batch: Batch, algorithm: Algorithm, temperature: float
) -> tuple[Check, Check, Check]:
    """The learner gives the sampled tokens the log-probs that the sampler said it drew them with."""
    with torch.no_grad():
        logprobs = _scored(model, batch, temperature).logprobs.cpu()
    difference = logprobs - batch.rollout_logprobs.to(logprobs.dtype)
    gaps, width = difference.abs()[batch.mask], gate_width(algorithm)
    sequences = row_mean(difference, batch.mask).abs()
    return (
        Check("sampler = learner, largest gap", float(gaps.max()), ROUNDING, f"log-probs of {len(gaps)} tokens"),
        Check("sampler = learner, mean gap", float(gaps.mean()), ROUNDING, f"log-probs of {len(gaps)} tokens"),
        Check(
            "sampler = learner, log-ratio",
            float(sequences.mean()),
            width / 10,
            f"of {len(sequences)} completions; the bound is a tenth of the gate's width {width:g}",
        ),
    )


def packed_is_padded(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[Check, Check]:
    """Our attention over packed rows against transformers' own over padded ones."""
    names = "packed = padded, log-probs", "packed = padded, gradient"
    if not supports_packing(model):
        why = f"skipped: {type(model).__name__} is always scored padded"
        return Check(names[0], None, ROUNDING, why), Check(names[1], None, ROUNDING, why)
    packed, packed_gradient = _score_with_gradient(model, batch, temperature, "packed")
    padded, padded_gradient = _score_with_gradient(model, batch, temperature, "padded")
    detail = f"relative difference, {len(batch)} random completions"
    return (
        Check(names[0], relative_difference([padded], [packed]), ROUNDING, detail),
        Check(names[1], relative_difference(padded_gradient, packed_gradient), ROUNDING, detail),
    )


def micro_batches_add_up(model: PreTrainedModel, groups: Sequence[Group], config: RunConfig) -> Check:
    """One update of the algorithm, with all groups in one forward pass and with each in its own."""
    largest = sum(len(group.prompt_tokens) for group in groups) + sum(len(c.tokens) for c in _completions(groups))
    whole = _update_gradient(model, groups, config, token_budget=largest)
    split = _update_gradient(model, groups, config, token_budget=1)
    value = relative_difference(whole, split)
    detail = f"relative difference, {len(groups)} groups at once and one by one"
    return Check("micro-batches = batch, gradient", value, ROUNDING, "no gradient" if math.isnan(value) else detail)


def relative_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """|first − second| / |first| over all tensors together; NaN where the first is 0, for then nothing was shown."""
    gap = math.hypot(*(float((a - b).norm()) for a, b in zip(first, second, strict=True)))
    size = math.hypot(*(float(a.norm()) for a in first))
    return gap / size if size else math.nan


def sampled_groups(
    config: RunConfig, sampling: SamplingOptions, tokenizer: PreTrainedTokenizerBase, sampler: Sampler
) -> tuple[Group, ...]:
    siblings = min(config.training.group_size, SIBLINGS)
    training = replace(config.training, groups=GROUPS, group_size=siblings, minibatches=1)
    collector = Collector(config.task, sampler, tokenizer, sampling, training, KeepAll(), config.seed)
    return collector.collect(Frontier(), step=0, version=0).groups


def made_up_groups(
    model: PreTrainedModel, groups: Sequence[Group], sampling: SamplingOptions, seed: int
) -> list[Group]:
    """The same prompts with random completions of all lengths, every second one right.

    What a good model says is no test of gradients: equal siblings cancel, and a certain token has none.
    """
    random = torch.Generator().manual_seed(seed)

    def rollout(number: int) -> Rollout:
        length = int(torch.randint(1, max(sampling.max_tokens, 2) + 1, (), generator=random))
        tokens = torch.randint(_vocabulary(model), (length,), generator=random).tolist()
        return Rollout(Completion(tuple(tokens), (0.0,) * length, "", "stop"), Grade(float(number % 2)))

    drafts = [
        replace(group, rollouts=tuple(rollout(place + number) for number in range(len(group.rollouts))))
        for place, group in enumerate(groups)
    ]
    with torch.no_grad():
        rows = iter(_scored(model, to_batch(drafts), sampling.temperature).logprobs.tolist())

    def with_logprobs(rollout: Rollout) -> Rollout:
        """A correction for the sampler's mismatch must find none."""
        completion = rollout.completion
        return replace(
            rollout, completion=replace(completion, logprobs=tuple(next(rows)[: len(completion.tokens)]))
        )

    return [replace(group, rollouts=tuple(map(with_logprobs, group.rollouts))) for group in drafts]


def _update_gradient(
    model: PreTrainedModel, groups: Sequence[Group], config: RunConfig, token_budget: int
) -> list[Tensor]:
    # Clipping to a norm would hide a gradient that is off by a factor.
    options = replace(config.training, token_budget=token_budget, max_gradient_norm=math.inf)
    learner = Learner(model, config.algorithm, options, temperature=config.sampling.temperature, seed=config.seed)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.0  # the model stays as it is
    learner.update(
        assemble(groups, [], config.algorithm, learner, config.sampling.max_tokens).batch, fresh=False
    )
    return _taken_gradient(learner.parameters())


def _score_with_gradient(
    model: PreTrainedModel, batch: Batch, temperature: float, layout: Literal["packed", "padded"]
) -> tuple[Tensor, list[Tensor]]:
    logprobs = _scored(model, batch, temperature, layout).logprobs
    logprobs.mean().backward()
    return logprobs.detach(), _taken_gradient(list(model.parameters()))


def _taken_gradient(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients, which the parameters then no longer have."""
    taken = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def _scored(
    model: PreTrainedModel, batch: Batch, temperature: float, layout: Literal["packed", "padded"] = "packed"
) -> Scores:
    return score(
        model,
        prompts=batch.prompts,
        tokens=batch.tokens,
        lengths=batch.lengths,
        group=batch.group,
        temperature=temperature,
        layout=layout,
    )


def _vocabulary(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return len(weight)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
