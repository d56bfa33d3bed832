"""Checks on a few completions that model, tokenizer, task and algorithm work together, before a run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from proximo.algorithms import Algorithm
from proximo.environments.kinds import played
from proximo.learner.learner import Learner
from proximo.learner.optimizer import POLICY, VALUE
from proximo.learner.policy import PlainPolicy
from proximo.learner.rounding import Bounds, bounds_of, gate_width
from proximo.losses.arithmetic import at_least_float32, row_mean
from proximo.losses.pieces.filters import KeepAll
from proximo.models import score_rows, supports_packing
from proximo.models.adapters.quantized import quantize
from proximo.models.compiling import allow_compiling
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.shipped import resolve
from proximo.models.stop_tokens import end_tokens
from proximo.models.values import OwnModel, value_model
from proximo.recipes.selfcheck.checks import (
    PROBLEMS,
    Check,
    completions_end,
    completions_of,
    end_of_sequence,
    mask_counts_tokens,
    prompts_begin_rightly,
    prompts_decode_back,
    prompts_have_tokens,
    references_are_right,
    silence_is_wrong,
    vocabulary_size,
)
from proximo.rl.assemble import assemble, to_batch
from proximo.rl.build import build_policy
from proximo.rl.config import RunConfig
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.rollouts import Collector
from proximo.runs.records import DataCursor
from proximo.samplers.sampler import Sampler, SamplingOptions, build_samplers
from proximo.tasks import Task
from proximo.types import Completion, Grade, Group, Rollout
from proximo.types.batches import Batch

GROUPS, SIBLINGS, TOKENS = 4, 4, 64
"""Maximum sample sizes: enough for every code path, small enough for a laptop."""


def selfcheck(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Check]:
    """Run every check, the cheap ones first, with the run's own sampler and environment. The model's weights are not
    changed; a run that trains an adapter adds one to it."""
    allow_compiling(model, config.compile)
    if config.adapter is not None and config.adapter.quantize_base is not None:
        quantize(model, config.adapter.quantize_base, str(model.device))
    policy = build_policy(model, config, resolve(config.model))
    # Rewards and value models are those of the run, so that what it would refuse is refused here.
    base_task = played(config.task, config.environment, tokenizer)
    task = with_reward_models(base_task, config.rewards, tokenizer, config.dtype, compiled=config.compile)
    problems = [base_task.problem(index, "train", config.seed) for index in range(PROBLEMS)]
    encoded = prompts_have_tokens(tokenizer, problems)
    yield encoded
    yield references_are_right(base_task, config.seed)
    yield silence_is_wrong(base_task, config.seed)
    if not encoded.ok:
        return  # there is nothing to sample from
    yield prompts_decode_back(tokenizer, problems)
    yield prompts_begin_rightly(tokenizer, problems)
    yield end_of_sequence(model, tokenizer)

    sampling = replace(config.sampling, max_tokens=min(config.sampling.max_tokens, TOKENS))
    samplers = build_samplers(
        config.sampler, policy, tokenizer, slots=GROUPS * SIBLINGS, record_routes=config.routing_replay == "sampler"
    )
    try:
        version = samplers.training.refresh(policy, 0)
        groups = sampled_groups(config, task, sampling, tokenizer, samplers.training, version)
    finally:
        samplers.close()
    batch = to_batch(groups)
    yield completions_end(groups, end_tokens(model, tokenizer), sampling)
    yield mask_counts_tokens(groups, batch)
    for check in sampler_is_learner(model, batch, config.algorithm, sampling.temperature):
        yield replace(check, only_warns=samplers.differs)

    made_up = made_up_groups(model, groups, sampling, config.seed)
    yield from packed_is_padded(model, to_batch(made_up), sampling.temperature)
    yield micro_batches_add_up(model, made_up, config)


# Numbers


def sampler_is_learner(
    model: PreTrainedModel, batch: Batch, algorithm: Algorithm, temperature: float
) -> tuple[Check, Check, Check]:
    """The learner's log-probs of the sampled tokens equal those that the sampler recorded."""
    with torch.no_grad():
        logprobs = score_rows(model, batch, temperature=temperature).logprobs.cpu()
    difference = logprobs - batch.rollout_logprobs.to(logprobs.dtype)
    gaps, bounds = difference.abs()[batch.mask], bounds_of(model)
    return (
        Check("sampler = learner, largest gap", float(gaps.max()), bounds.largest, f"log-probs of {len(gaps)} tokens"),
        Check("sampler = learner, mean gap", float(gaps.mean()), bounds.mean, f"log-probs of {len(gaps)} tokens"),
        _ratio_check(row_mean(difference, batch.mask).abs(), gate_width(algorithm), bounds),
    )


def _ratio_check(ratios: Tensor, width: float, bounds: Bounds) -> Check:
    """The ratios that the gate would see. In half precision a gate may be narrower than rounding: that is not a fault,
    since a run measures the same and then computes the old log-probs itself."""
    value, trusted = float(ratios.mean()), width / 10
    detail = f"of {len(ratios)} completions; the bound is a tenth of the gate's width {width:g}"
    if bounds.trusts or value < trusted:
        return Check("sampler = learner, log-ratio", value, trusted, detail)
    detail = (
        f"of {len(ratios)} completions: above a tenth of the gate's width {width:g}, so a run with several updates a "
        "step computes the old log-probs in a separate pass instead of using the sampler's"
    )
    return Check("sampler = learner, log-ratio", value, bounds.mean, detail)


def packed_is_padded(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[Check, Check]:
    """Our attention over packed rows gives the same as transformers' own over padded ones."""
    names, bound = ("packed = padded, log-probs", "packed = padded, gradient"), bounds_of(model).relative
    if not supports_packing(model):
        why = f"skipped: {type(model).__name__} is always scored padded"
        return Check(names[0], None, bound, why), Check(names[1], None, bound, why)
    packed, packed_gradient = _score_with_gradient(model, batch, temperature, "packed")
    padded, padded_gradient = _score_with_gradient(model, batch, temperature, "padded")
    detail = f"relative difference, {len(batch)} random completions"
    return (
        Check(names[0], relative_difference([padded], [packed]), bound, detail),
        Check(names[1], relative_difference(padded_gradient, packed_gradient), bound, detail),
    )


def micro_batches_add_up(model: PreTrainedModel, groups: Sequence[Group], config: RunConfig) -> Check:
    """One update gives the same gradient with all groups in one forward pass and with each completion in its own."""
    largest = sum(len(group.prompt_tokens) for group in groups) + sum(len(c.tokens) for c in completions_of(groups))
    whole = _update_gradient(model, groups, config, token_budget=largest)
    split = _update_gradient(model, groups, config, token_budget=1)
    value = relative_difference(whole, split)
    detail = f"relative difference, {len(groups)} groups at once and their completions one by one"
    if math.isnan(value):
        detail = "the gradient is 0 or not a number"
    return Check("micro-batches = batch, gradient", value, bounds_of(model).relative, detail)


def relative_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """|first − second| / |first| over all tensors together; NaN if the first is 0, since then nothing was tested."""
    first, second = [*map(at_least_float32, first)], [*map(at_least_float32, second)]
    gap = math.hypot(*(float((a - b).norm()) for a, b in zip(first, second, strict=True)))
    size = math.hypot(*(float(a.norm()) for a in first))
    return gap / size if size else math.nan


def sampled_groups(
    config: RunConfig,
    task: Task,
    sampling: SamplingOptions,
    tokenizer: PreTrainedTokenizerBase,
    sampler: Sampler,
    version: int = 0,
) -> tuple[Group, ...]:
    """A few groups of the run; `version` is what the sampler's `refresh` returned."""
    siblings = min(config.training.group_size, SIBLINGS)
    training = replace(config.training, groups=GROUPS, group_size=siblings, minibatches=1)
    collector = Collector(
        task, sampler, tokenizer, sampling, training, KeepAll(), config.seed, environment=config.environment
    )
    return collector.collect(DataCursor(), step=0, version=version).groups


def made_up_groups(
    model: PreTrainedModel, groups: Sequence[Group], sampling: SamplingOptions, seed: int
) -> list[Group]:
    """The same prompts with random completions of all lengths, every second one right.

    Completions of a good model do not test gradients: equal rewards cancel, and a certain token has no gradient.
    """
    random = torch.Generator().manual_seed(seed)

    def rollout(number: int) -> Rollout:
        length = int(torch.randint(1, max(sampling.max_tokens, 2) + 1, (), generator=random))
        tokens = torch.randint(vocabulary_size(model), (length,), generator=random).tolist()
        return Rollout(Completion(tuple(tokens), (0.0,) * length, "", "stop"), Grade(float(number % 2)))

    drafts = [
        replace(group, rollouts=tuple(rollout(index + number) for number in range(len(group.rollouts))))
        for index, group in enumerate(groups)
    ]
    with torch.no_grad():
        rows = iter(score_rows(model, to_batch(drafts), temperature=sampling.temperature).logprobs.tolist())

    def with_logprobs(rollout: Rollout) -> Rollout:
        """Give the rollout the model's own log-probs, so that a mismatch correction finds no mismatch."""
        completion = rollout.completion
        return replace(rollout, completion=replace(completion, logprobs=tuple(next(rows)[: len(completion.tokens)])))

    return [replace(group, rollouts=tuple(map(with_logprobs, group.rollouts))) for group in drafts]


def _update_gradient(
    model: PreTrainedModel, groups: Sequence[Group], config: RunConfig, token_budget: int
) -> list[Tensor]:
    # Clipping to a norm would hide a gradient that is wrong by a factor.
    options = replace(config.training.for_learner(), token_budget=token_budget, max_gradient_norm=math.inf)
    algorithm = config.algorithm.with_length_limit(config.sampling.max_tokens)
    form = config.value_options and config.value_options.form
    if isinstance(form, OwnModel):
        form = OwnModel()  # any weights will do
    policy = PlainPolicy(model)
    learner = Learner(
        policy,
        algorithm,
        options,
        temperature=config.sampling.temperature,
        seed=config.seed,
        value=None if form is None else value_model(form, model),
    )
    optimizer = policy.optimizer
    optimizer.set_rates(0.0, 0.0)  # the model is not changed
    limit, unit = config.sampling.max_tokens, config.penalty_unit
    learner.update(assemble(groups, [], learner, limit, penalty_unit=unit).batch, fresh=False)
    optimizer.close()
    return _taken_gradient([*optimizer.held(POLICY), *optimizer.held(VALUE)])


def _score_with_gradient(
    model: PreTrainedModel, batch: Batch, temperature: float, layout: Literal["packed", "padded"]
) -> tuple[Tensor, list[Tensor]]:
    logprobs = score_rows(model, batch, temperature=temperature, layout=layout).logprobs
    logprobs.mean().backward()
    return logprobs.detach(), _taken_gradient(list(model.parameters()))


def _taken_gradient(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Take the gradients off the parameters."""
    taken = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken
