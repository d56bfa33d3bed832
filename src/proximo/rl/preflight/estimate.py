"""Estimates of a run's sizes and memory, before anything is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from proximo.learner.footprint import machine_bytes, moments_on, parameter_bytes
from proximo.learner.memory import (
    GroupLengths,
    is_planned_on,
    plan_memory,
    room_for_activations,
    token_cost,
)
from proximo.learner.optimizer import HALVES
from proximo.learner.options import CPU_TOKENS, Moments
from proximo.learner.policy import frozen_names
from proximo.models import free_bytes, pick_device, pick_dtype
from proximo.models.adapters.lora import adapter_size
from proximo.models.adapters.quantized import quantized_size
from proximo.models.loading import read_config, skeleton
from proximo.models.model_types import PreTrainedModel
from proximo.models.shipped import resolve
from proximo.models.values import OwnLayers, OwnModel
from proximo.rl.config import RunConfig
from proximo.runs.banner import BannerLine
from proximo.system.amounts import in_units
from proximo.system.safe_text import counted


def batch_lines(config: RunConfig, reasons: Mapping[str, str] = MappingProxyType({})) -> list[BannerLine]:
    """Prompts, completions, updates and tokens of a step and of the whole run. `reasons` of chosen fields, by field,
    stand behind their values."""
    training = config.training

    def why(field: str) -> str:
        return f" ({reasons[field]})" if field in reasons else ""

    completions = training.groups * training.group_size
    tokens, limit = completions * config.sampling.max_tokens, config.max_generated_tokens
    updates = f"{counted(training.updates, 'update')} of {completions // training.minibatches} completions each"
    budget = "" if limit is None else f"; ends sooner once {limit:,} tokens are sampled"
    return [
        (
            "step",
            f"{counted(training.groups, 'prompt')} × {training.group_size} completions = {completions:,} of at most "
            f"{config.sampling.max_tokens:,} tokens{why('sampling.max_tokens')}; {updates}",
        ),
        (
            "run",
            f"{counted(config.steps, 'step')}{why('steps')}: {config.steps * training.updates:,} updates, "
            f"{config.steps * completions:,} completions, at most {config.steps * tokens:,} tokens{budget}",
        ),
        ("length penalty", _penalty(config)),
    ]


def _penalty(config: RunConfig) -> str:
    """The unit of length penalties; nothing where it is guessed, which a remark says."""
    if not config.algorithm.length_penalties or config.penalty_remarks:
        return ""
    return f"in units of {config.penalty_unit:g}, half the difference between the rewards of a right and a wrong answer"


@dataclass(frozen=True)
class Held:
    """Weights that a run keeps in memory."""

    role: str
    parameters: int
    trained: bool
    quantized: int = 0
    """Parameters among them that are quantised."""
    quantized_bytes: int = 0
    """Bytes of these, with their scales."""
    whole: bool = False
    """True if a rank that has it has all of it, and not a shard."""

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize * (self.parameters - self.quantized) + self.quantized_bytes

    def bytes(self, dtype: torch.dtype, moments: Moments = "float32") -> int:
        """Bytes of the weights and, if trained, of gradients, masters and moments."""
        trained = parameter_bytes(dtype, trained=self.trained, moments=moments) - dtype.itemsize
        return self.weight_bytes(dtype) + int(self.parameters * trained)


def _skeleton(name: str) -> PreTrainedModel:
    return skeleton(resolve(name))


def held_models(config: RunConfig, skeleton_of: Callable[[str], PreTrainedModel] = _skeleton) -> list[Held]:
    """Every set of weights, the policy's first. A head on the policy's hidden states is not a separate model.
    `skeleton_of` builds the model that a config names, without weights."""
    policy = skeleton_of(config.model)
    held = _held_policy(config, policy)
    if config.algorithm.needs_reference and config.adapter is None:  # with an adapter, the reference is its base model
        held.append(Held("reference", _count(policy), trained=False))
    if config.teacher is not None:
        held.append(Held("teacher", _count(skeleton_of(config.teacher)), trained=False, whole=True))
    if config.sampler.copies:
        copies = config.sampler.copies * _count(policy)
        held.append(Held("the sampler's copies", copies, trained=False, whole=True))
    if config.ahead.copies_weights:
        trained = sum(model.parameters for model in _held_policy(config, policy) if model.trained)
        held.append(Held("copy that samples ahead", _count(policy), trained=False))
        held.append(Held("weights of active steps", (config.ahead.staleness + 1) * trained, trained=False))
    match config.value_options and config.value_options.form:
        case OwnLayers(layers):
            held.append(Held(f"value model's {layers} layers", _count(_last_layers(policy, layers)), trained=True))
        case OwnModel(path):
            model = policy if path is None else skeleton_of(path)
            held.append(Held("value model", _count(model), trained=True))
    return held + [
        Held(f"reward model {judge.path}", _count(skeleton_of(judge.path)), trained=False, whole=True)
        for judge in config.rewards.models
    ]


def _held_policy(config: RunConfig, policy: PreTrainedModel) -> list[Held]:
    """The policy's weights: those that are trained and those that are not."""
    if config.adapter is not None:
        adapter = Held("its LoRA adapter", adapter_size(policy, config.adapter), trained=True)
        kind = config.adapter.quantize_base
        codes = (0, 0) if kind is None else quantized_size(policy, kind)
        return [Held("policy", _count(policy), False, *codes), adapter]
    names = frozen_names(policy, config.training.freeze)
    frozen = sum(parameter.numel() for name, parameter in policy.named_parameters() if name in names)
    held = [Held("policy", _count(policy) - frozen, trained=True)]
    return [*held, Held("its frozen part", frozen, trained=False)] if frozen else held


@dataclass(frozen=True)
class MemoryEstimate:
    models: list[Held]
    bytes_held: int
    """Bytes of weights, gradients and optimizer, without activations."""
    bytes_there: int
    """Available bytes: on a GPU the free memory, on a CPU all of the machine's memory."""
    lines: list[str]
    """The models, and what they and their activations take."""

    @property
    def fits(self) -> bool:
        return self.bytes_held <= self.bytes_there

    def to_dict(self) -> dict[str, Any]:
        models = [asdict(model) for model in self.models]
        return {"models": models, "bytes": self.bytes_held, "device_bytes": self.bytes_there, "fits": self.fits}


def memory(config: RunConfig) -> MemoryEstimate:
    """Estimate weights, gradients and optimizer, plus the activations, bounded by training.token_budget."""
    held = held_models(config)
    name = pick_device(config.device)
    device, dtype = torch.device(name), pick_dtype(config.dtype, name)
    moments = moments_on(config.training.adam_moments, is_gpu=device.type == "cuda")
    bytes_held = sum(model.bytes(dtype, moments) for model in held)
    activations = _activations(config, device, dtype, bytes_held)
    there = free_bytes(device) if device.type == "cuda" else machine_bytes()
    parts = [f"{model.role} ({in_units(model.parameters)}, {_standing(model, config)})" for model in held]
    masters = ", float32 masters" if dtype in HALVES else ""
    lines = [
        ", ".join(parts),
        f"{bytes_held / 1e9:.2f} GB in {str(dtype).removeprefix('torch.')} (weights; if trained also "
        f"gradients, two moments{_form(moments)}{masters}), {activations}",
    ]
    return MemoryEstimate(held, bytes_held, there, lines)


def _form(moments: Moments) -> str:
    return {"float32": "", "8bit": " in 8 bits", "cpu": " on the host"}[moments]


def _standing(held: Held, config: RunConfig) -> str:
    if held.quantized and config.adapter is not None:
        return f"frozen, {held.quantized / 1e6:.1f} M of them in {config.adapter.quantize_base}"
    return "trained" if held.trained else "frozen"


def _activations(config: RunConfig, device: torch.device, dtype: torch.dtype, bytes_held: int) -> str:
    training = config.training
    if training.token_budget is not None or not is_planned_on(device):
        return f"and the activations of {training.token_budget or CPU_TOKENS} tokens at most"
    shape = read_config(resolve(config.model)).get_text_config()
    free = room_for_activations(
        free_bytes(device), pending=bytes_held, vocabulary=shape.vocab_size, hidden=shape.hidden_size
    )
    # Prompts are not included: they are not known yet, and the run checks again when it has them.
    cost = token_cost(shape, dtype, compiled=config.compile)
    group = GroupLengths(0, (config.sampling.max_tokens,) * training.group_size)
    plan = plan_memory(cost, free, [group])
    remarks = [
        "groups of the longest completions are split" * (plan.token_budget < group.tokens),
        f"{plan.checkpointed} of {len(cost.layers)} layers are run again in the backward pass"
        * bool(plan.checkpointed),
        "what they keep waits in the host's memory" * plan.offloaded,
    ]
    return "; ".join(
        [
            f"and {free / 1e9:.0f} GB for activations: about {plan.token_budget} tokens in a pass, "
            f"{cost.bytes(plan.checkpointed, offloaded=plan.offloaded) / 1e6:.2f} MB each",
            *filter(None, remarks),
        ]
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _last_layers(model: PreTrainedModel, number: int) -> nn.Module:
    layers = model.base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers[-number:]
