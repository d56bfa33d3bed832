"""Value models: what is still to be earned, estimated before each completion token is consumed.

Three forms, one protocol. All of them ride the packed layout, so a prompt is computed once per group there too.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from proximo.models.adapters.quantized import dequantize
from proximo.models.context_length import check_rows
from proximo.models.loading import has_score, load_model, read_config
from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import attention, body, wide_sums
from proximo.models.packing.support import supports_packing
from proximo.models.reward_models import load_reward_model
from proximo.models.scoring import States, completion_states, states_at
from proximo.types.batches import Batch
from proximo.types.tensor_types import Float

# What a user chooses


@dataclass(frozen=True)
class TrunkHead:
    """A linear head on the policy's own states: one pass for both, and nothing more in memory."""

    pace: ClassVar[float] = 10.0
    trains_trunk: bool = True
    """True if the value loss also moves the policy's layers. False: the head takes the states as they come."""

    def check(self, policy: PreTrainedModel) -> None:
        """Any policy will do."""

    def build(self, policy: PreTrainedModel, loaded: PreTrainedModel | None) -> "ValueModel":
        return HeadOnTrunk(policy, trains_trunk=self.trains_trunk)


@dataclass(frozen=True)
class OwnLayers:
    """A head on its own copy of the policy's last layers, on top of the policy's pass below them, detached."""

    pace: ClassVar[float] = 50.0
    """Factor by which it learns faster than the policy unless told otherwise: its head starts from nothing, its layers
    from another purpose."""
    layers: int = 1
    """Number of the policy's last layers that are copied."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"value.form.layers is {self.layers}: copy at least 1, or use TrunkHead")

    def check(self, policy: PreTrainedModel) -> None:
        _copied_from(policy, self.layers)

    def build(self, policy: PreTrainedModel, loaded: PreTrainedModel | None) -> "ValueModel":
        return HeadOnOwnLayers(policy, layers=self.layers)


@dataclass(frozen=True)
class OwnModel:
    """A model of its own, of any backbone with the policy's vocabulary."""

    pace: ClassVar[float] = 10.0
    path: str | None = None
    """A folder or hub id: a causal model gets a new head, a reward model brings its own. None: a copy of the policy."""

    def check(self, policy: PreTrainedModel) -> None:
        """Any policy will do; preflight looks at the model that `path` names."""

    def build(self, policy: PreTrainedModel, loaded: PreTrainedModel | None) -> "ValueModel":
        model = _dense_copy(policy) if loaded is None else loaded
        return HeadOnOwnModel(model, own_head(model))


# What a learner holds


@runtime_checkable
class ValueModel(Protocol):
    """Estimates that share the policy's pass where they can."""

    @property
    def needs_policy(self) -> bool:
        """True if it reads the policy's pass."""
        ...

    def observing(self, policy: PreTrainedModel) -> AbstractContextManager[None]:
        """Held around a pass of the policy whose states are then handed to `estimate`."""
        ...

    def estimate(self, rows: Batch, states: States | None) -> Float[Tensor, "B T"]:
        """The value before each completion token; `states` are the policy's, None where they are not needed."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the value model, without the policy's."""
        ...


@runtime_checkable
class BuildsValueModel(Protocol):
    """A form of value model: a frozen value that a config names."""

    @property
    def pace(self) -> float:
        """The value model's learning rate as a multiple of the policy's, unless the config gives a rate."""
        ...

    def check(self, policy: PreTrainedModel) -> None:
        """Raise ValueError for a policy that this form cannot have; only the policy's shape may be read."""
        ...

    def build(self, policy: PreTrainedModel, loaded: PreTrainedModel | None) -> ValueModel:
        """The value model for this policy; `loaded` is the model that `OwnModel.path` names, else None."""
        ...


ValueForm = TrunkHead | OwnLayers | OwnModel | BuildsValueModel
"""Forms that a config may name: one of ours, or any BuildsValueModel from a file, type = "my_file.py:MyForm"."""


class HeadOnTrunk(nn.Module):
    needs_policy = True

    def __init__(self, policy: PreTrainedModel, *, trains_trunk: bool) -> None:
        super().__init__()
        self.head = zero_head(policy)
        self.trains_trunk = trains_trunk

    def observing(self, policy: PreTrainedModel) -> AbstractContextManager[None]:
        return nullcontext()

    def estimate(self, rows: Batch, states: States | None) -> Float[Tensor, "B T"]:
        assert states is not None
        return read(self.head, states, states.flat if self.trains_trunk else states.flat.detach())


class HeadOnOwnLayers(nn.Module):
    needs_policy = True

    def __init__(self, policy: PreTrainedModel, *, layers: int) -> None:
        super().__init__()
        trunk = _copied_from(policy, layers)
        self.first = len(trunk) - layers
        # The config stays shared, so that the copies follow the policy's choice of attention.
        kept: dict[int, Any] = {id(policy.config): policy.config}
        self.layers = nn.ModuleList(copy.deepcopy(layer, kept) for layer in trunk[self.first :])
        dequantize(self.layers, policy.dtype)
        self.layers.requires_grad_(True)
        self.norm = copy.deepcopy(body(policy).get_submodule("norm"), kept).requires_grad_(True)
        self.head = zero_head(policy)
        self._seen: tuple[PreTrainedModel, str, Tensor, dict[str, Any]] | None = None

    @contextmanager
    def observing(self, policy: PreTrainedModel) -> Iterator[None]:
        """Remembers what enters the first layer that has a copy."""

        def remember(_: nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]) -> None:
            (hidden,) = inputs
            name = policy.config._attn_implementation
            assert name is not None
            self._seen = policy, name, hidden.detach(), others

        layer = body(policy).get_submodule(f"layers.{self.first}")
        handle = layer.register_forward_pre_hook(remember, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def estimate(self, rows: Batch, states: States | None) -> Float[Tensor, "B T"]:
        assert states is not None
        assert self._seen is not None, "estimate comes after a pass inside `observing`"
        policy, name, hidden, others = self._seen
        self._seen = None  # nothing of the pass outlives its use
        # As `hidden_states` runs them.
        with attention(policy, name), wide_sums(policy.dtype, hidden.device):
            for layer in self.layers:
                hidden = layer(hidden, **others)
        return read(self.head, states, states_at(self.norm(hidden).flatten(0, 1), states.places))


class HeadOnOwnModel(nn.Module):
    needs_policy = False

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        model.base_model.requires_grad_(True)  # its own head, if it has one, is not asked
        self.head = head

    def observing(self, policy: PreTrainedModel) -> AbstractContextManager[None]:
        return nullcontext()

    def estimate(self, rows: Batch, states: States | None) -> Float[Tensor, "B T"]:
        check_rows(self.model, rows.prompts, rows.lengths, rows.group)
        own_states = completion_states(
            self.model, prompts=rows.prompts, tokens=rows.tokens, lengths=rows.lengths, group=rows.group
        )
        return read(self.head, own_states, own_states.flat)


def check_form(form: ValueForm, policy: PreTrainedModel) -> None:
    """Refuse a form that this policy cannot have; its shape is enough, weights are not looked at."""
    form.check(policy)


def _copied_from(policy: PreTrainedModel, layers: int) -> nn.ModuleList:
    """The layers of which the last ones are copied."""
    if not supports_packing(policy):
        kind = type(policy).__name__
        raise ValueError(
            f"value.form is OwnLayers, but {kind} is outside the packed path: use TrunkHead or OwnModel "
            "(`value.form.type=TrunkHead`)"
        )
    trunk = body(policy).get_submodule("layers")
    assert isinstance(trunk, nn.ModuleList)
    if layers > len(trunk):
        raise ValueError(f"value.form.layers is {layers}, but the policy has {len(trunk)}: give at most as many")
    return trunk


def _dense_copy(policy: PreTrainedModel) -> PreTrainedModel:
    """To be trained: without quantised layers."""
    model = copy.deepcopy(policy)
    dequantize(model, policy.dtype)
    return model


def value_model(form: ValueForm, policy: PreTrainedModel, loaded: PreTrainedModel | None = None) -> ValueModel:
    """The chosen form for this policy; `loaded` is the model that OwnModel names, None for a copy of the policy."""
    return form.build(policy, loaded)


def load_value_model(path: str, *, device: str, dtype: torch.dtype | None = torch.float32) -> PreTrainedModel:
    """A backbone for OwnModel: a reward model with its head, or a causal model. `dtype` as in `load_model`."""
    scores = has_score(read_config(path))
    return (load_reward_model if scores else load_model)(path, device=device, dtype=dtype)


def own_head(model: PreTrainedModel) -> nn.Linear:
    """A reward model's own, in the precision of values; any other model gets a new one."""
    score = dict(model.named_children()).get("score")
    if not isinstance(score, nn.Linear):
        return zero_head(model)
    head = zero_head(model)
    with torch.no_grad():
        head.weight.copy_(score.weight)
    return head


def zero_head(model: PreTrainedModel) -> nn.Linear:
    """Starts at 0: the first advantages are returns, not noise."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    wide = torch.promote_types(weight.dtype, torch.float32)  # half a digit of a value is not enough to learn from
    # Not nn.Linear's own first weights, which draw from torch's generator.
    head = nn.utils.skip_init(nn.Linear, model.config.hidden_size, 1, device=weight.device, dtype=wide)
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    return head


def read(head: nn.Linear, states: States, flat: Float[Tensor, "C E"]) -> Float[Tensor, "B T"]:
    return states.aligned(head(flat.to(head.weight.dtype)).squeeze(1))
