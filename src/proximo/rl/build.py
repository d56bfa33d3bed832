"""Builds what a run samples and trains, from its config."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from proximo.learner.learner import Learner
from proximo.learner.lora import LoraPolicy
from proximo.learner.options import CPU_TOKENS
from proximo.learner.policy import PlainPolicy, Policy
from proximo.learner.rounding import max_gap
from proximo.models import load_model, pick_dtype
from proximo.models.adapters.starting import base_for
from proximo.models.compiling import allow_compiling
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.shipped import resolve
from proximo.models.values import OwnModel, ValueForm, load_value_model, value_model
from proximo.rl.async_sampling.weights import PolicyCopy
from proximo.rl.config import RunConfig
from proximo.rl.ptx import MixedIn
from proximo.samplers.sampler import RunSamplers, build_samplers

MAX_SLOTS = 512
"""Number of slots for decoding; a step with more rows refills slots as rows end."""


class HoldsOnRanks(Protocol):
    """Holds a run's policy in shards on several processes, see `proximo.distributed`."""

    @property
    def conducts(self) -> bool:
        """Whether this process has the run's loop, and is not one that follows."""
        ...

    def hold(self, policy: PlainPolicy, dtype: torch.dtype, factory: Any) -> Policy:
        """`factory` is the run's `sampler`."""
        ...

    def samplers(
        self, factory: Any, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers: ...

    def hold_signals(self, held: Callable[[], AbstractContextManager[None]]) -> None: ...


@dataclass(frozen=True)
class Built:
    """The models of a run, with what samples and trains them."""

    model: PreTrainedModel
    teacher: PreTrainedModel | None
    copy: PolicyCopy | None
    """Copy of the policy that is sampled, if sampling runs ahead."""
    samplers: RunSamplers
    learner: Learner


def build_learner(
    config: RunConfig, path: str, device: str, tokenizer: PreTrainedTokenizerBase, ranks: HoldsOnRanks | None = None
) -> Built:
    """Load the models of a run, and build what samples and trains them."""
    value, dtype = config.value_options, pick_dtype(config.dtype, device)
    # A rank has a shard of it: the whole model stays in its files until then.
    place, held = (device, dtype) if ranks is None else ("cpu", None)
    backbone = value and _value_backbone(value.form, place, held)
    quantization = None if config.adapter is None else config.adapter.quantize_base
    model = load_model(path, device=place, dtype=held, quantization=quantization)
    teacher = _teacher(config, device, dtype) if ranks is None or ranks.conducts else None
    for each in filter(None, (model, backbone, teacher)):
        allow_compiling(each, config.compile)
    # First the value model, which may copy layers: a copy has no use for an adapter.
    values = value and value_model(value.form, model, backbone)
    policy = plain = build_policy(model, config, path)
    rows, records = config.training.groups * config.training.group_size, config.routing_replay == "sampler"
    if config.ahead.switch == "in_flight":
        rows *= config.ahead.staleness + 1
    slots, bound = min(rows, MAX_SLOTS), max_gap(model, dtype)
    copy = None
    if ranks is None:
        copy = PolicyCopy(policy) if config.ahead.copies_weights else None
        samplers = build_samplers(config.sampler, copy or policy, tokenizer, slots=slots, record_routes=records)
    else:
        policy = ranks.hold(plain, dtype, config.sampler)
        samplers = ranks.samplers(config.sampler, tokenizer, slots=slots, record_routes=records)
    _check_ahead(config, samplers)
    learner = Learner(
        policy,
        config.algorithm.with_length_limit(config.sampling.max_tokens),
        config.training.for_learner(),
        temperature=config.sampling.temperature,
        seed=config.seed,
        value=values,
        value_learning_rate=value and value.rate(config.training.learning_rate),
        replay=config.routing_replay,
        max_gap=None if samplers.differs or config.ahead.staleness else bound,
        steps=config.steps,
    )
    if config.ptx is not None:
        budget = config.training.token_budget or CPU_TOKENS
        learner.gradients.mixed_in = MixedIn(config.ptx, model, tokenizer, token_budget=budget, seed=config.seed)
    return Built(model, teacher, copy, samplers, learner)


def build_policy(model: PreTrainedModel, config: RunConfig, path: str) -> PlainPolicy:
    """What is trained: the model, which was loaded from `path`, or an adapter that is added to it."""
    if config.adapter is None:
        return PlainPolicy(model)
    return LoraPolicy(model, config.adapter, base=base_for(path), seed=config.seed)


def _check_ahead(config: RunConfig, samplers: RunSamplers) -> None:
    staleness = config.ahead.staleness
    if staleness and samplers.history is not None and samplers.history.kept():
        raise ValueError(
            f"ahead.staleness is {staleness}, but sampler {type(config.sampler).__name__} keeps older weights itself: "
            "leave one of the two out"
        )
    if config.ahead.switch == "in_flight" and samplers.drop is None:
        raise ValueError(
            f'ahead.switch is "in_flight", but sampler {type(config.sampler).__name__} cannot take new weights while '
            'it samples: use Fleet, or switch = "between"'
        )


def _teacher(config: RunConfig, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
    if config.teacher is None:
        return None
    return load_model(resolve(config.teacher), device=device, dtype=dtype).requires_grad_(False)


def _value_backbone(form: ValueForm, device: str, dtype: torch.dtype | None) -> PreTrainedModel | None:
    """The value model's own weights, if it has a separate folder."""
    if not isinstance(form, OwnModel) or form.path is None:
        return None
    return load_value_model(resolve(form.path), device=device, dtype=dtype)
