"""Builds what a run samples and trains, from its config."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from proximo.data import DataFile, read_examples
from proximo.data.mixing import Ptx
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
from proximo.models.stop_tokens import end_tokens
from proximo.models.values import OwnModel, ValueForm, load_value_model, value_model
from proximo.rl.config import RunConfig
from proximo.rl.rollouts import Collector, Rollouts, Synchronous
from proximo.samplers.sampler import RunSamplers, build_samplers
from proximo.supervised.encoding import prepare
from proximo.system.timeline import Lanes
from proximo.types.batches import Stats

if TYPE_CHECKING:  # read by the runs that need it alone
    from proximo.rl.async_sampling.one_step_ahead import PolicyCopy

MAX_SLOTS = 512
"""Number of slots for decoding; a step with more rows refills slots as rows end."""


class HoldsOnRanks(Protocol):
    """Holds a run's policy in shards on several processes, see `proximo.distributed`."""

    @property
    def conducts(self) -> bool:
        """True if this process has the run's loop, and is not one that follows."""
        ...

    def hold(self, policy: PlainPolicy, dtype: torch.dtype, factory: Any) -> Policy:
        """Hold a policy; `factory` is the run's `sampler`."""
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
    copy: "PolicyCopy | None"
    """Copy of the policy that is sampled, if sampling runs ahead."""
    samplers: RunSamplers
    learner: Learner


def build_learner(
    config: RunConfig, path: str, device: str, tokenizer: PreTrainedTokenizerBase, ranks: HoldsOnRanks | None = None
) -> Built:
    """Load the models of a run, and build what samples and trains them."""
    value, dtype = config.value_options, pick_dtype(config.dtype, device)
    # A rank has a shard of it: the whole model stays in its files until then.
    load_device, held = (device, dtype) if ranks is None else ("cpu", None)
    backbone = value and _value_backbone(value.form, load_device, held)
    quantization = None if config.adapter is None else config.adapter.quantize_base
    model = load_model(path, device=load_device, dtype=held, quantization=quantization)
    teacher = _teacher(config, device, dtype) if ranks is None or ranks.conducts else None
    for network in filter(None, (model, backbone, teacher)):
        allow_compiling(network, config.compile)
    # First the value model, which may copy layers: a copy has no use for an adapter.
    values = value and value_model(value.form, model, backbone)
    policy = plain = build_policy(model, config, path)
    rows, records = config.training.groups * config.training.group_size, config.routing_replay == "sampler"
    if config.ahead.switch == "in_flight":
        rows *= config.ahead.staleness + 1
    slots, bound = min(rows, MAX_SLOTS), max_gap(model, dtype)
    copy = None
    if ranks is None:
        copy = _policy_copy(policy) if config.ahead.copies_weights else None
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
    """Build the policy to train: the model, which was loaded from `path`, or an adapter that is added to it."""
    if config.adapter is None:
        return PlainPolicy(model)
    return LoraPolicy(model, config.adapter, base=base_for(path), seed=config.seed)


def _policy_copy(policy: PlainPolicy) -> "PolicyCopy":
    from proximo.rl.async_sampling.one_step_ahead import PolicyCopy

    return PolicyCopy(policy)


def build_rollouts(config: RunConfig, built: Built, collector: Collector, lanes: Lanes) -> Rollouts:
    """Build what samples this run's groups: ahead of its updates, while weights change, or step by step."""
    staleness, samplers = config.ahead.staleness, built.samplers
    if built.copy is not None:
        from proximo.rl.async_sampling.one_step_ahead import OneStepAhead

        device = built.model.device
        return OneStepAhead.of(collector, built.copy, device, staleness=staleness, steps=config.steps, lanes=lanes)
    if staleness and samplers.drop is not None:
        from proximo.rl.async_sampling.in_flight import InFlight

        return InFlight(
            collector,
            samplers.drop,
            config.ahead,
            steps=config.steps,
            begun=samplers.begun,
            history=samplers.history,
        )
    return Synchronous(collector, samplers.history)


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


class MixedIn:
    """PPO-ptx: adds the gradient of examples from a file to that of an update. Which examples an update gets follows
    from the seed and the number of updates before it, so a resumed run draws the same."""

    def __init__(
        self,
        options: Ptx,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        token_budget: int,
        seed: int,
    ) -> None:
        """Read the examples; ValueError lists what is wrong with the file."""
        from proximo.supervised.sft import Supervised

        self._options, self._seed = options, seed
        file = DataFile(options.path, held_out=0.0, max_tokens=options.max_tokens, too_long=None)
        data = prepare(file, read_examples, tokenizer, end_tokens(model, tokenizer))
        data.check_room(model)
        self._stage = Supervised(model, data.train, [], token_budget=token_budget)

    def __call__(self, version: int, backward: Callable[[Tensor], None]) -> Stats:
        """Add the gradient for the update after `version` others; the loss is without its coefficient."""
        total = torch.zeros(())
        for loss, _ in self._stage.losses(self.items(version)):
            backward(self._options.coefficient * loss)
            total = total + loss.detach().cpu()
        return Stats(totals={"ptx_loss": total})

    def items(self, version: int) -> list[int]:
        """Indices of the examples of an update: the next ones of a permutation, then of another."""
        first, size = version * self._options.examples, self._stage.size
        numbers = range(first, first + self._options.examples)
        orders = {epoch: self._order(epoch) for epoch in {number // size for number in numbers}}
        return [orders[number // size][number % size] for number in numbers]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * epoch)
        return torch.randperm(self._stage.size, generator=generator).tolist()
