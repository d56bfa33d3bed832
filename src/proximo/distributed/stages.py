"""Fine-tuning, DPO and reward models on ranks: rank 0 runs the loop and has the data, each rank computes micro-batches.

A step's items are dealt out whole, the largest first. Their weights are over the whole step, so that the gradients of
all ranks add up to the step's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from proximo.distributed.gathered_weights import WholeCopy
from proximo.distributed.rank_group import Crew
from proximo.distributed.saving import check_written, read_moments, read_shards, write_shards
from proximo.distributed.sharding import (
    HALVES,
    check_shardable,
    like_shard,
    local,
    reshard,
    shard,
    whole,
)
from proximo.learner.named_tensors import copy_named, read_tensors, write_tensors
from proximo.learner.optimizer import MASTER
from proximo.learner.ranks import deal
from proximo.models import score_rows
from proximo.models.model_types import PreTrainedModel
from proximo.models.out_of_memory import explaining_memory
from proximo.supervised.encoding import Encoded, EncodedRows
from proximo.supervised.schedule import FitOptions
from proximo.supervised.stage_model import SplitStage, StepLoss, WholeStageModel

Part = TypeVar("Part")


class ShardedStageModel:
    """A stage's model whose parameters, gradients and moments are in shards on all ranks.

    Every rank builds one. Rank 0's loop uses it; the others call `follow`.
    """

    def __init__(self, model: PreTrainedModel, options: FitOptions, seed: int, dtype: torch.dtype, crew: Crew) -> None:
        """`model` is whole, and is sharded here; its passes compute in `dtype`."""
        check_shardable(model)
        self._crew, self._options, self._dtype = crew, options, dtype
        # Rank 0 keeps a whole model on the CPU, which is filled when it is saved.
        self._copy = WholeCopy(model, dtype, crew, "host")
        self._root = shard(model, crew.mesh, dtype)
        self._inner = WholeStageModel(model, options, seed, dtype)
        self._stage: SplitStage | None = None
        crew.add(
            gradients=self._gradients_here,
            norm=self._norm_here,
            overflowed=self._overflowed_here,
            step=self._step_here,
            measured=self._measured_here,
            scored=self._scored_here,
            keep_best=self._keep_here,
            restore_best=self._restore_here,
            write_stage=self._write_here,
            read_stage=self._read_here,
        )

    def follow(self, stage: SplitStage) -> None:
        """Work for rank 0 until the run ends, on ranks above 0. `stage` has the model, and no data."""
        self._stage = stage
        self._crew.follow()

    # Passes

    def gradients(self, stage: SplitStage, items: Sequence[int]) -> StepLoss:
        self._stage = stage
        while True:
            loss = self._gradients(stage, items)
            if not any(self._crew.tell("overflowed")):
                return loss

    def _overflowed_here(self) -> bool:
        return self._inner.optimizer.overflowed(whole)

    def _gradients(self, stage: SplitStage, items: Sequence[int]) -> StepLoss:
        shares = dealt([stage.train[item] for item in items], self._crew.size)
        idle = stage.parts(items, [smallest([stage.train[item] for item in items])])
        losses: list[StepLoss] = self._crew.ask(
            "gradients", with_idle([stage.parts(items, numbers) if numbers else [] for numbers in shares], idle[0])
        )
        sums = dict[str, float]()
        for each in losses:
            sums |= {name: sums.get(name, 0.0) + value for name, value in each.sums.items()}
        return StepLoss(sum(each.loss for each in losses), sums)

    def _gradients_here(self, parts: Sequence[Any], idle: int, idle_part: Any) -> StepLoss:
        stage = self._stage
        assert stage is not None

        def losses() -> Iterator[tuple[Tensor, Any]]:
            for part in parts:
                yield self._root.run(lambda part=part: stage.part_loss(part))
            for _ in range(idle):
                loss, _ = self._root.run(lambda: stage.part_loss(idle_part))
                yield loss * 0.0, {}

        with self._explaining():
            result = self._inner.backward(losses)
        reshard(self._root)
        return result

    def held_out(self, stage: SplitStage) -> dict[str, float]:
        if not stage.kept:
            return {}
        self._stage = stage
        shares = dealt(stage.kept, self._crew.size)
        idle = stage.kept_parts([smallest(stage.kept)])
        measured = self._crew.ask("measured", with_idle([stage.kept_parts(numbers) for numbers in shares], idle[0]))
        return stage.metrics([each for part in measured for each in part])

    def _measured_here(self, parts: Sequence[Any], idle: int, idle_part: Any) -> list[Any]:
        assert self._stage is not None
        return tree_map_only(Tensor, Tensor.cpu, self._each(self._stage.measured, parts, idle, idle_part))

    def scored(self, rows: Sequence[EncodedRows]) -> list[list[float]]:
        """Log-probs of all rows of each micro-batch, summed over their tokens."""
        size = self._crew.size
        if not rows:
            return []
        sums = self._crew.ask("scored", with_idle([rows[rank::size] for rank in range(size)], rows[0]))
        return [sums[number % size][number // size] for number in range(len(rows))]

    def _scored_here(self, rows: Sequence[EncodedRows], idle: int, idle_rows: EncodedRows) -> list[list[float]]:
        def run(each: EncodedRows) -> Tensor:
            return score_rows(self._inner.model, each).logprobs.sum(dim=1)

        return [each.tolist() for each in self._each(run, rows, idle, idle_rows)]

    @torch.no_grad()
    def _each(self, run: Callable[[Part], Any], parts: Sequence[Part], idle: int, idle_part: Part) -> list[Any]:
        """Run passes on this rank's own micro-batches, and then the passes that others still make."""
        self._inner.model.eval()
        with self._explaining():
            results = [self._root.run(lambda part=part: run(part)) for part in (*parts, *[idle_part] * idle)]
        reshard(self._root)
        return results[: len(parts)]

    def _explaining(self) -> AbstractContextManager[None]:
        rank, budget = self._crew.mesh.rank, self._options.token_budget
        return explaining_memory(f"on rank {rank}; set a smaller fit.token_budget, it is {budget}")

    # Steps

    def apply(self, rate: float, max_norm: float, accepts: Callable[[float], bool]) -> float:
        norm: float = self._crew.tell("norm")[0]
        if accepts(norm):
            self._crew.tell("step", rate, max_norm)
        return norm

    def _norm_here(self) -> float:
        self._norms = [whole(norm) for norm in self._inner.optimizer.norms()]
        return float(self._norms[0])

    def _step_here(self, rate: float, max_norm: float) -> None:
        self._inner.optimizer.set_rates(rate)
        self._inner.optimizer.step_clipped(max_norm, self._norms)
        self._copy.is_old = True

    def keep_best(self) -> None:
        self._crew.tell("keep_best")

    def _keep_here(self) -> None:
        self._inner.best = [local(each.detach()).to("cpu", copy=True) for each in self._inner.trained().values()]

    def restore_best(self) -> None:
        self._crew.tell("restore_best")

    @torch.no_grad()
    def _restore_here(self) -> None:
        if self._inner.best is not None:
            for parameter, weight in zip(self._inner.trained().values(), self._inner.best, strict=True):
                local(parameter).copy_(weight)
            self._copy.is_old = True

    # Files

    def save(self, folder: Path) -> None:
        self._copy.save(folder)

    def write(self, folder: Path) -> None:
        write_tensors(folder / "random.safetensors", self._inner.draws.state())
        check_written(folder, self._crew.tell("write_stage", str(folder)))

    def _write_here(self, folder: str) -> str | None:
        named = self._inner.trained()
        best = {} if self._inner.best is None else dict(zip(named, self._inner.best, strict=True))
        tensors = {
            "model": {name: each.detach().to(self._dtype) for name, each in named.items()},
            "optimizer": self._inner.optimizer.tensors(list(named)),
            "best": {name: like_shard(each.to(self._dtype), named[name]) for name, each in best.items()},
        }
        if self._dtype in HALVES:  # the other two are rounded, as those of one process are
            tensors["optimizer"] |= {f"{name}.{MASTER}": each for name, each in named.items()}
        return write_shards(Path(folder), tensors, self._crew.mesh)

    def read(self, folder: Path) -> None:
        self._inner.draws.load(read_tensors(folder / "random.safetensors"))
        self._crew.tell("read_stage", str(folder))

    @torch.no_grad()
    def _read_here(self, folder: str) -> None:
        path, named, mesh = Path(folder), self._inner.trained(), self._crew.mesh
        stored = read_shards(path, "model", named, mesh)
        copy_named(named, {name: each.float() for name, each in stored.items()}, "the model")
        moments, masters = read_moments(path, named, mesh)
        for name, each in masters.items():
            named[name].copy_(each)
        self._inner.optimizer.load_tensors(moments, list(named))
        self._copy.is_old = True
        best = read_shards(path, "best", named, mesh)
        self._inner.best = [local(best[name]).float().cpu() for name in named] if best else None


def dealt(items: Sequence[Encoded], ranks: int) -> list[list[int]]:
    """Places of the items that each rank gets, in order: the largest item first, to the rank with the fewest tokens."""
    return [sorted(share) for share in deal(dict(enumerate(map(tokens_of, items))), ranks)]


def smallest(items: Sequence[Encoded]) -> int:
    """Place of the item with the fewest tokens."""
    return min(range(len(items)), key=lambda number: tokens_of(items[number]))


def tokens_of(item: Encoded) -> int:
    return len(item.prompt) + sum(map(len, item.completions))


def with_idle(parts: Sequence[Sequence[Part]], idle: Part) -> list[tuple[Sequence[Part], int, Part]]:
    """Micro-batches of each rank, and the number of passes that it makes with another one that does not count: passes
    of a sharded model are made by all ranks together."""
    longest = max(map(len, parts))
    return [(batches, longest - len(batches), idle) for batches in parts]
