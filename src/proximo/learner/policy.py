"""The policy: the weights under training, and everything that depends on how they are held.

A learner never touches parameters or an optimizer: a model with an adapter, or in shards, is another policy under it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from proximo.learner.named_tensors import by_name, copy_named, optimizer_by_name, read_parts, write_parts
from proximo.learner.optimizer import HALVES, POLICY, VALUE, Optimizer
from proximo.learner.options import LearnerOptions
from proximo.learner.passes import OldScores, Passes, RowResult, Rows, RowTask, Shards
from proximo.models import Scores, frozen_copy, load_model
from proximo.models.model_types import PreTrainedModel
from proximo.models.progress_bars import bars_for_terminals
from proximo.models.sampled import SampledPolicy, WholeModel
from proximo.models.values import ValueModel
from proximo.types.batches import Batch
from proximo.types.tensor_types import Float

VALUE_NAMES = "value/"
"""Prefix of the value model's parameters among the optimizer's names."""

Tensors = dict[str, dict[str, Tensor]]


class Policy(SampledPolicy, Protocol):
    """Weights that can be sampled from, evaluated, trained, saved, and compared with a reference."""

    version: int
    """Updates applied so far."""

    def start(self, options: LearnerOptions, value: ValueModel | None, *, needs_reference: bool) -> None:
        """Called once, by the learner: set up the optimizer, with the value model's parameters, and the reference."""
        ...

    # Passes

    def scores(
        self,
        passes: Passes,
        rows: Batch,
        value: ValueModel | None = None,
        *,
        record: bool = False,
        until: ExitStack | None = None,
    ) -> tuple[Scores, Float[Tensor, "B T"] | None]:
        """Scores of a micro-batch, with gradient unless that is off, and the values of the same pass."""
        ...

    def values(self, passes: Passes, value: ValueModel, rows: Batch) -> Float[Tensor, "B T"]:
        """Values alone; their gradient does not reach the policy."""
        ...

    def without_gradient(
        self, passes: Passes, batch: Batch, value: ValueModel | None = None, *, record: bool = False
    ) -> OldScores:
        """Scores of all rows, on the CPU."""
        ...

    def map_rows(
        self, task: RowTask, run: Callable[[Passes, Rows], RowResult], passes: Passes, rows: Rows
    ) -> Shards[RowResult]:
        """Results of `run` for the rows, in shares where several processes hold the policy: these know it as `task`."""
        ...

    @property
    def can_retry(self) -> bool:
        """True if a pass that ran out of memory can be repeated: not while other processes wait in it."""
        ...

    @property
    def has_reference(self) -> bool: ...

    def reference_logprobs(self, passes: Passes, batch: Batch) -> Float[Tensor, "B T"]: ...

    def reset_reference(self) -> None:
        """Reset the reference to the current policy."""
        ...

    # Updates

    def set_rates(self, policy: float, value: float) -> None: ...

    def zero_grad(self) -> None: ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss."""
        ...

    def overflowed(self) -> bool:
        """True if the gradient has to be computed again: in float16 it was too large."""
        ...

    def zero_missing_gradients(self) -> None:
        """Give the policy's parameters a gradient of 0: to an optimizer that is not the same as none."""
        ...

    def apply(self, max_norm: float, accepts: Callable[[list[float]], bool]) -> list[float]:
        """Clip each group's gradient and step, if its norms are accepted; the norms of policy and value model."""
        ...

    @property
    def trains_values(self) -> bool:
        """True if the optimizer has parameters of a value model."""
        ...

    def nonfinite_gradients(self) -> tuple[str, ...]:
        """Parameters whose gradients are not finite."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Memory that gradients and moments will still take."""
        ...

    # State

    def save(self, folder: Path) -> None:
        """Write the model into a checkpoint's folder."""
        ...

    def state(self) -> dict[str, Any]:
        """State that is small, as plain values."""
        ...

    def write(self, folder: Path) -> None:
        """Write what is large and not in the model's files into the folder of a checkpoint's state."""
        ...

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Bring back a checkpoint that `save` and `write` wrote; ValueError where it is of another model."""
        ...


class PlainPolicy(WholeModel):
    """A whole model in memory; the reference is a second one.

    Example: Learner(PlainPolicy(model), GRPO, LearnerOptions(), temperature=1.0, seed=0)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.version = model, 0
        self.reference: PreTrainedModel | None = None
        self.reference_was_reset = False
        self._value: dict[str, nn.Parameter] = {}

    def start(self, options: LearnerOptions, value: ValueModel | None, *, needs_reference: bool) -> None:
        self.set_up(options, needs_reference=needs_reference)
        self.start_optimizer(options, value, self.model.dtype)

    def set_up(
        self,
        options: LearnerOptions,
        *,
        needs_reference: bool,
        copied: Callable[[PreTrainedModel], PreTrainedModel] = frozen_copy,
    ) -> None:
        """Decide what is trained, and keep the reference, which `copied` makes of the model."""
        self.reference = copied(self.model) if needs_reference else None
        freeze(self.model, options.freeze)

    def start_optimizer(self, options: LearnerOptions, value: ValueModel | None, dtype: torch.dtype) -> None:
        """`dtype` is what passes compute in."""
        self._value = {} if value is None else _trained(value.named_parameters())
        self.optimizer = Optimizer(
            [list(self.parameters().values()), list(self._value.values())],
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            betas=(options.adam_beta1, options.adam_beta2),
            epsilon=options.adam_epsilon,
            moments=options.adam_moments,
            computes_in=dtype,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters, by name."""
        return _trained(self.model.named_parameters())

    def value_parameters(self) -> dict[str, nn.Parameter]:
        """The value model's own parameters, by name."""
        return self._value

    # Passes

    def scores(
        self,
        passes: Passes,
        rows: Batch,
        value: ValueModel | None = None,
        *,
        record: bool = False,
        until: ExitStack | None = None,
    ) -> tuple[Scores, Float[Tensor, "B T"] | None]:
        return passes.with_values(self.model, value, rows, record=record, until=until)

    def values(self, passes: Passes, value: ValueModel, rows: Batch) -> Float[Tensor, "B T"]:
        return passes.values(self.model, value, rows)

    def without_gradient(
        self, passes: Passes, batch: Batch, value: ValueModel | None = None, *, record: bool = False
    ) -> OldScores:
        return passes.without_gradient(self.model, batch, value, record=record)

    def map_rows(
        self, task: RowTask, run: Callable[[Passes, Rows], RowResult], passes: Passes, rows: Rows
    ) -> Shards[RowResult]:
        return [(torch.arange(len(rows)), run(passes, rows))]

    @property
    def can_retry(self) -> bool:
        return True

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def reference_logprobs(self, passes: Passes, batch: Batch) -> Float[Tensor, "B T"]:
        assert self.reference is not None
        return passes.without_gradient(self.reference, batch).logprobs

    def reset_reference(self) -> None:
        if self.reference is not None:
            self.reference, self.reference_was_reset = frozen_copy(self.model), True

    # Updates

    def set_rates(self, policy: float, value: float) -> None:
        self.optimizer.set_rates(policy, value)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)

    def overflowed(self) -> bool:
        return self.optimizer.overflowed()

    def zero_missing_gradients(self) -> None:
        self.optimizer.zero_missing_gradients(POLICY)

    def apply(self, max_norm: float, accepts: Callable[[list[float]], bool]) -> list[float]:
        return self.optimizer.apply(max_norm, accepts)

    @property
    def trains_values(self) -> bool:
        return bool(self._value)

    def nonfinite_gradients(self) -> tuple[str, ...]:
        held = zip(self.optimized(), [*self.optimizer.held(POLICY), *self.optimizer.held(VALUE)], strict=True)
        return tuple(name for name, each in held if each.grad is not None and not each.grad.isfinite().all())

    @property
    def pending_bytes(self) -> int:
        return self.optimizer.pending_bytes

    # State

    def save(self, folder: Path) -> None:
        with bars_for_terminals():
            self.model.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "reference_was_reset": self.reference_was_reset}

    def tensors(self) -> Tensors:
        """State that is large and not in the model's files, by name; not copied."""
        named: Tensors = {"optimizer": self.optimizer.tensors(list(self.optimized())), "value": dict(self._value)}
        if self.reference_was_reset:
            named["reference"] = self.reference_tensors()
        return named

    def reference_tensors(self) -> dict[str, Tensor]:
        """Tensors of a reference that was reset, by name."""
        assert self.reference is not None
        return dict(self.reference.named_parameters())

    def write(self, folder: Path) -> None:
        write_parts(folder, self.tensors())

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._load_weights(folder)
        self.load_state(state, read_parts(folder, without=None if self._value else VALUE_NAMES))

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        named = self.optimized()
        names, halves = list(named), [name for name, each in named.items() if each.dtype in HALVES]
        self.optimizer.load_tensors(optimizer_by_name(tensors["optimizer"], names, halves), names)
        known = tensors["value"] or self._value  # without one, the algorithm was changed, and it starts anew
        copy_named(self._value, by_name(known, list(self._value)), "the value model")
        self.version = state["version"]
        self.reference_was_reset = state["reference_was_reset"] and self.has_reference
        if self.reference_was_reset:
            reference = self.reference_tensors()
            copy_named(reference, by_name(tensors["reference"], list(reference)), "the reference")

    def _load_weights(self, folder: Path) -> None:
        """Load what `save` wrote into the parameters where they are: samplers and captured steps read them there."""
        stored = load_model(str(folder), dtype=self.model.dtype)
        copy_named(dict(self.model.named_parameters()), dict(stored.named_parameters()), "the model")

    def optimized(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimizer steps, by name, in its order."""
        return {**self.parameters(), **{f"{VALUE_NAMES}{name}": each for name, each in self._value.items()}}


def _trained(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def frozen_names(model: nn.Module, patterns: Sequence[str], field: str = "training.freeze") -> set[str]:
    """Parameters whose names contain one of the patterns, which may have wildcards; ValueError for a pattern without
    such a parameter, or where none is left to train. Tied weights have all their names. `field` has the patterns."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    frozen = set[str]()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, f"*{pattern}*")}
        if not matches:
            there = f"such as {names[0]} or {names[-1]}"
            raise ValueError(f"{field} has {pattern!r}, which no parameter's name contains: names are {there}")
        frozen |= matches
    if frozen.issuperset(names):
        raise ValueError(f"{field} is {list(patterns)}, which freezes every parameter: leave some to train")
    return frozen


def freeze(model: nn.Module, patterns: Sequence[str], field: str = "training.freeze") -> None:
    frozen = frozen_names(model, patterns, field)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen:
            parameter.requires_grad_(False)
