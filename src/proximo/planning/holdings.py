"""Memory that a run holds from its first update on: models and, of those that are trained, the optimizer's state."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from proximo.learner.memory import TokenCost, token_cost
from proximo.learner.optimizer import HALVES
from proximo.learner.options import Moments, moment_bytes
from proximo.models.adapters.lora import Lora
from proximo.models.adapters.targets import target_layers
from proximo.models.values import OwnLayers, OwnModel
from proximo.planning.shapes import ModelShape, read_shape
from proximo.rl.config import RunConfig
from proximo.rl.preflight.estimate import Held, held_models


@dataclass(frozen=True)
class Component:
    """Bytes of one model."""

    role: str
    parameters: int
    trained: bool
    weights: int
    gradients: int
    masters: int
    moments: int
    quantized: int = 0
    """Parameters among them that are quantised."""
    whole: bool = False
    """True if a rank that has it has all of it, and not a shard: rank 0, which grades and has engines of its own."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def component(held: Held, dtype: torch.dtype, moments: Moments = "float32") -> Component:
    """A trained parameter has a gradient and two moments: in float32, with a float32 master, if it is in half
    precision; the moments may be in 8 bits, or elsewhere."""
    number, wide = held.parameters, max(dtype.itemsize, 4) * held.trained
    masters = wide * number if dtype in HALVES else 0
    return Component(
        held.role,
        number,
        held.trained,
        held.weight_bytes(dtype),
        wide * number,
        masters,
        int(number * moment_bytes(moments, wide)) if held.trained else 0,
        held.quantized,
        held.whole,
    )


@dataclass(frozen=True)
class Holding:
    """A way to train a policy: what is held for it, and what a token costs in a pass with gradient."""

    shape: ModelShape
    dtype: torch.dtype
    components: tuple[Component, ...]
    cost: TokenCost
    """Bytes of a token that the learner plans its passes with."""
    unplanned: int = 0
    """Bytes of a token that the learner does not count: value layers' and adapters' activations."""
    lora: Lora | None = None

    @property
    def total(self) -> int:
        return sum(component.total for component in self.components)

    @property
    def pending(self) -> int:
        """Gradients and moments, which are made by the first update."""
        return sum(component.gradients + component.moments for component in self.components)

    @property
    def trained(self) -> int:
        """Weights of the policy, or of its adapter, that are trained."""
        return next(component.parameters for component in self.components if component.trained)

    @property
    def gradients(self) -> int:
        return sum(component.gradients for component in self.components)


def holdings(config: RunConfig, dtype: torch.dtype, *, compiled: bool) -> tuple[Holding, Holding]:
    """A run's full fine-tuning, and the same with its adapter, or with one of the default kind."""
    lora, shape_of = config.adapter or Lora(), cache(read_shape)
    shape = shape_of(config.model)
    cost, unplanned = token_cost(shape.config, dtype, compiled=compiled), 0
    match config.value_options and config.value_options.form:
        case OwnLayers(layers):
            unplanned = cost.kept * layers // shape.layers
        case OwnModel(path):
            value_shape = shape if path is None else shape_of(path)
            cost += token_cost(value_shape.config, dtype, compiled=compiled)

    def held(config: RunConfig) -> list[Held]:
        return held_models(config, lambda name: shape_of(name).model)

    whole = held(replace(config, adapter=None))
    frozen, adapter, *rest = held(replace(config, adapter=lora, training=replace(config.training, freeze=())))
    wide = torch.promote_types(dtype, torch.float32)  # adapters are kept in float32
    form = config.training.adam_moments
    small = (
        component(frozen, dtype),
        component(adapter, wide, form),
        *(component(model, dtype, form) for model in rest),
    )
    narrow = dtype.itemsize * lora.rank * len(target_layers(shape.model, lora.targets))
    return (
        Holding(shape, dtype, tuple(component(model, dtype, form) for model in whole), cost, unplanned),
        Holding(shape, dtype, small, cost, unplanned + narrow, lora),
    )
