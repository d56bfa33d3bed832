"""The model of a stage with its optimizer, and how they are held: here whole in one process.

The loop asks a stage model for gradients, steps, held-out metrics and files, and never touches parameters itself: so a
model in shards on several processes is another stage model under the same loop.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from proximo.learner.named_tensors import by_name, copy_named, optimizer_by_name, read_tensors, write_tensors
from proximo.learner.optimizer import HALVES, POLICY, Optimizer
from proximo.learner.policy import freeze
from proximo.learner.ranks import Ranks
from proximo.models.adapters.files import save_model
from proximo.models.adapters.lora import Lora
from proximo.models.adapters.starting import base_dtype, whole_base
from proximo.models.devices import Precision, pick_device
from proximo.models.model_types import PreTrainedModel
from proximo.models.shipped import resolve
from proximo.models.torch_globals import OwnDraws
from proximo.runs.files import BASE
from proximo.supervised.encoding import Encoded, EncodedRows
from proximo.supervised.kept_checkpoints import KeptCheckpoints
from proximo.supervised.schedule import FREEZE, FitOptions

Losses = Iterable[tuple[Tensor, Mapping[str, float | Tensor]]]
"""Weighted loss and sums of each micro-batch: the losses add up to the step's exact loss, the sums to its metrics."""


class StageOptions(Protocol):
    """Fields that the configs of all stages have."""

    @property
    def model(self) -> str | None: ...

    @property
    def adapter(self) -> Lora | None: ...

    @property
    def fit(self) -> FitOptions: ...

    @property
    def checkpoints(self) -> KeptCheckpoints | None: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> Precision: ...

    @property
    def seed(self) -> int: ...

    @property
    def ranks(self) -> Ranks | None: ...


class Stage(Protocol):
    """A stage of training on files: the losses of its training items, and held-out metrics."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def size(self) -> int:
        """Number of training items."""
        ...

    def losses(self, items: Sequence[int]) -> Losses: ...

    def held_out(self) -> dict[str, float]:
        """Metrics on held-out data, including `loss`; empty if there is none."""
        ...


class SplitStage(Stage, Protocol):
    """A stage whose micro-batches can be computed by other processes, which have the model and no data."""

    @property
    def train(self) -> Sequence[Encoded]: ...

    @property
    def kept(self) -> Sequence[Encoded]:
        """Held-out items."""
        ...

    def parts(self, items: Sequence[int], local: Sequence[int] | None = None) -> Sequence[Any]:
        """Inputs of a step's micro-batches; `local`: those of some of its items alone, by their indices in `items`."""
        ...

    def part_loss(self, part: Any) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        """The loss of a micro-batch, weighted over all items of the step, and its share of the step's metrics."""
        ...

    def kept_parts(self, local: Sequence[int] | None = None) -> Sequence[Any]:
        """Inputs of micro-batches of held-out items, of all or of some."""
        ...

    def measured(self, part: Any) -> Any:
        """Contribution of a micro-batch of held-out items to the metrics: tensors in tuples or dictionaries."""
        ...

    def metrics(self, measures: Sequence[Any]) -> dict[str, float]:
        """Held-out metrics from what was measured in all micro-batches."""
        ...


@dataclass(frozen=True)
class StepLoss:
    """Loss and metrics of a step, with its gradient in the parameters."""

    loss: float
    sums: Mapping[str, float]


class StageModel(Protocol):
    """A stage's model and optimizer, however they are held."""

    def gradients(self, stage: Any, items: Sequence[int]) -> StepLoss:
        """The gradient of a step over these items."""
        ...

    def apply(self, rate: float, max_norm: float, accepts: Callable[[float], bool]) -> float:
        """Clip the gradient and step, if its norm is accepted; the norm."""
        ...

    def held_out(self, stage: Any) -> dict[str, float]: ...

    def keep_best(self) -> None:
        """Keep the weights as they are now, in the place of those kept before."""
        ...

    def restore_best(self) -> None:
        """Bring back the weights that were kept, if any."""
        ...

    def write(self, folder: Path) -> None:
        """Write weights, kept weights, optimizer and random state into a resume point's folder."""
        ...

    def read(self, folder: Path) -> None:
        """Bring back what `write` wrote; ValueError where it is of another model."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        ...


class HoldsStages(Protocol):
    """Holds a stage's model in shards on several processes, see `proximo.distributed`."""

    def hold_stage(self, model: PreTrainedModel, options: FitOptions, seed: int, dtype: torch.dtype) -> StageModel: ...

    def scored(self, rows: Sequence[EncodedRows]) -> list[list[float]]:
        """Log-probs of all rows of each micro-batch under the model that is held, summed over their tokens."""
        ...

    def hold_signals(self, held: Callable[[], Any]) -> None: ...


class WholeStageModel:
    """A model that is whole in this process."""

    def __init__(
        self, model: PreTrainedModel, options: FitOptions, seed: int, computes_in: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.optimizer = Optimizer(
            [list(self.trained().values())],
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            betas=(options.adam_beta1, options.adam_beta2),
            epsilon=options.adam_epsilon,
            moments=options.adam_moments,
            computes_in=computes_in or model.dtype,
        )
        self.draws = OwnDraws(seed, model.device)
        """For models with dropout."""
        self.best: list[Tensor] | None = None
        """Kept weights, on the CPU."""

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer holds, by name and in its order; the others never change."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    # Steps

    def gradients(self, stage: Stage, items: Sequence[int]) -> StepLoss:
        while True:
            loss = self.backward(lambda: stage.losses(items))
            if not self.optimizer.overflowed():
                return loss

    def backward(self, losses: Callable[[], Losses]) -> StepLoss:
        """The gradient of losses, which are computed one by one."""
        self.model.train()
        self.optimizer.zero_grad()
        total, sums = torch.zeros(()), dict[str, float | Tensor]()
        with self.draws.active():
            for loss, part in losses():
                self.optimizer.backward(loss)
                total = total.to(loss) + loss.detach()
                sums |= {name: sums.get(name, 0.0) + value for name, value in part.items()}
        return StepLoss(float(total), {name: float(value) for name, value in sums.items()})

    def apply(self, rate: float, max_norm: float, accepts: Callable[[float], bool]) -> float:
        self.optimizer.set_rates(rate)
        return self.optimizer.apply(max_norm, lambda norms: accepts(norms[POLICY]))[POLICY]

    def held_out(self, stage: Stage) -> dict[str, float]:
        self.model.eval()
        return stage.held_out()

    def keep_best(self) -> None:
        self.best = [parameter.detach().to("cpu", copy=True) for parameter in self.trained().values()]

    @torch.no_grad()
    def restore_best(self) -> None:
        if self.best is not None:
            for parameter, weight in zip(self.trained().values(), self.best, strict=True):
                parameter.copy_(weight)

    # Files

    def write(self, folder: Path) -> None:
        named = self.trained()
        write_tensors(folder / "random.safetensors", self.draws.state())
        write_tensors(folder / "model.safetensors", named)
        write_tensors(folder / "optimizer.safetensors", self.optimizer.tensors(list(named)))
        write_tensors(folder / "best.safetensors", dict(zip(named, self.best, strict=True)) if self.best else {})

    def read(self, folder: Path) -> None:
        named = self.trained()
        halves = [name for name, tensor in named.items() if tensor.dtype in HALVES]
        copy_named(named, by_name(read_tensors(folder / "model.safetensors"), list(named)), "the model")
        stored = optimizer_by_name(read_tensors(folder / "optimizer.safetensors"), list(named), halves)
        self.optimizer.load_tensors(stored, list(named))
        self.draws.load(read_tensors(folder / "random.safetensors"))
        best = by_name(read_tensors(folder / "best.safetensors"), list(named))
        self.best = [best[name] for name in named] if best else None

    def save(self, folder: Path) -> None:
        save_model(self.model, folder)


def stage_model(
    model: PreTrainedModel, options: FitOptions, seed: int, dtype: torch.dtype, ranks: HoldsStages | None
) -> StageModel:
    """A stage's model as it is to be held: whole, or in shards that compute in `dtype`; with what is not trained
    frozen."""
    freeze(model, options.freeze, FREEZE)
    return WholeStageModel(model, options, seed) if ranks is None else ranks.hold_stage(model, options, seed, dtype)


def loading_place(device: str, ranks: HoldsStages | None) -> str:
    """The device that a model is loaded on. Of one that is to be in shards no device ever holds the whole."""
    return device if ranks is None else "cpu"


def starting_path(config: StageOptions, folder: Path | None, ranks: HoldsStages | None) -> str | None:
    """Path of the weights that a stage starts from: under a new adapter always a whole model, which is written into the
    run's `folder` if need be. Ranks above 0 have no folder, and merge by themselves."""
    path = None if config.model is None else resolve(config.model)
    if path is None or config.adapter is None or folder is None:
        return path
    dtype = base_dtype(config.dtype, pick_device(config.device), sharded=ranks is not None)
    return whole_base(path, folder / BASE, dtype)


def check_held(ranks: Ranks | None, fit: FitOptions, adapter: Lora | None) -> None:
    """Refuse what shards cannot be, and weights that are frozen twice; ValueError."""
    if ranks is not None:
        ranks.check_run("fit", fit.adam_moments, adapter)
    if adapter is not None and fit.freeze:
        raise ValueError(
            f"{FREEZE} is {list(fit.freeze)}, but with adapter no weight of the model is trained: leave one of them out"
        )
