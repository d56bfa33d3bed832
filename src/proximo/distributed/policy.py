"""A sharded policy: the third way to hold weights, next to a whole model and an adapter.

Rank 0's learner talks to it as to any other policy. Each call becomes an order that all ranks carry out with the plain
or the LoRA policy that they hold in shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proximo.distributed.fitting import planned, starting_smaller
from proximo.distributed.gathered_weights import CopyPlace, WholeCopy
from proximo.distributed.rank_group import Crew
from proximo.distributed.saving import check_written, restore, write_shards
from proximo.distributed.sharding import HALVES, Root, check_shardable, local, reshard, shard, whole
from proximo.distributed.shares import Share, batch_shares, on_cpu, update_shares
from proximo.learner.gradients import UpdateRows
from proximo.learner.guard import GradientPass
from proximo.learner.learner import Learner
from proximo.learner.memory import checkpoint_models, is_planned_on
from proximo.learner.optimizer import MASTER
from proximo.learner.options import LearnerOptions
from proximo.learner.passes import OldScores, Passes, RowResult, Rows, RowTask, Shards, directly, joined
from proximo.learner.policy import PlainPolicy
from proximo.models import Scores, free_bytes
from proximo.models.loading import sharing_copy
from proximo.models.model_types import PreTrainedModel
from proximo.models.sampled import evaluating, logprobs_of
from proximo.models.values import HeadOnOwnModel, ValueModel
from proximo.types.batches import Batch
from proximo.types.tensor_types import Float, Int


class ShardedPolicy:
    """A policy whose parameters, gradients and moments are in shards on all ranks.

    Every rank builds one, and a learner around it. Rank 0's learner uses it; the others call `follow`.

    Example: Learner(ShardedPolicy(PlainPolicy(model), crew), GRPO, LearnerOptions(), temperature=1.0, seed=0)
    """

    def __init__(
        self, inner: PlainPolicy, crew: Crew, dtype: torch.dtype = torch.float32, *, copy: CopyPlace = "every rank"
    ) -> None:
        """`inner` has a whole model, on a CPU or the rank's device, which `start` shards; its passes compute in
        `dtype`. `copy`: see `WholeCopy`."""
        check_shardable(inner.model)
        self._inner, self._crew, self._dtype = inner, crew, dtype
        self.version = 0
        self.copy = WholeCopy(inner.model, dtype, crew, copy)
        """To sample with and to save."""
        self._runs: dict[RowTask, Callable[[Passes, Any], Any]] = {}
        crew.add(
            map_rows=self._map_rows_here,
            old=self._old_here,
            reference=self._reference_here,
            norms=self._norms_here,
            step=self._step_here,
            rates=inner.set_rates,
            zero_grad=inner.zero_grad,
            zero_missing_gradients=inner.zero_missing_gradients,
            nonfinite=self._nonfinite_here,
            overflowed=self._overflowed_here,
            free=lambda: free_bytes(self.model.device),
            reset_reference=self._reset_here,
            logprobs=self._logprobs_here,
            write=self._write_here,
            load=self._load_here,
        )

    def start(self, options: LearnerOptions, value: ValueModel | None, *, needs_reference: bool) -> None:
        assert options.adam_moments == "float32", "Ranks.check_run refuses others"
        if value is not None and not isinstance(value, nn.Module):
            raise ValueError(f"value.form builds a {type(value).__name__}: with ranks it must be a torch module")
        self._inner.set_up(options, needs_reference=needs_reference, copied=sharing_copy)  # shards are new tensors
        mesh, model, reference = self._crew.mesh, self._inner.model, self._inner.reference
        self._value = value
        self._models = [model, *([value.model] if isinstance(value, HeadOnOwnModel) else [])]
        self._roots: list[tuple[PreTrainedModel, Root]] = [(model, shard(model, mesh, self._dtype, value))]
        if reference is not None:
            self._roots.append((reference, shard(reference, mesh, self._dtype)))
        self._inner.start_optimizer(options, value, self._dtype)
        self._norms: list[Tensor] = []
        self._checkpointed = (0, False)

    def follow(self, learner: Learner) -> None:
        """Work for rank 0 until the run ends, on ranks above 0. `learner` is this rank's own around this policy."""
        self._runs = {"update": learner.gradients.of_rows, "values": learner.gradients.of_row_values}
        if (balance := learner.balance) is not None:
            self._runs["load"] = lambda passes, batch: balance.of_rows(self, passes, batch)
        self._crew.follow()

    @property
    def model(self) -> PreTrainedModel:
        return self._inner.model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.copy.weights()

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
        return self._inner.scores(passes, rows, value, record=record, until=until)

    def values(self, passes: Passes, value: ValueModel, rows: Batch) -> Float[Tensor, "B T"]:
        return self._inner.values(passes, value, rows)

    def map_rows(
        self, task: RowTask, run: Callable[[Passes, Rows], RowResult], passes: Passes, rows: Rows
    ) -> Shards[RowResult]:
        self._runs[task] = run
        if not len(rows):
            return []
        passes = planned(passes)
        if isinstance(rows, UpdateRows):
            return self._asked("map_rows", update_shares(rows, passes, self._crew.size), passes, task)
        assert isinstance(rows, Batch)
        return self._asked("map_rows", batch_shares(rows, passes, self._crew.size), passes, task)

    def without_gradient(
        self, passes: Passes, batch: Batch, value: ValueModel | None = None, *, record: bool = False
    ) -> OldScores:
        passes = planned(passes)
        shares = batch_shares(batch, passes, self._crew.size)
        results: Shards[OldScores] = self._asked("old", shares, passes, value is not None, record)
        if len(results) == 1:
            return results[0][1]
        blank = torch.zeros_like(batch.rollout_logprobs)
        logprobs, entropy, values = blank.clone(), blank.clone(), None if value is None else blank.clone()
        for index, each in results:
            logprobs[index], entropy[index] = each.logprobs, each.entropy
            if values is not None:
                assert each.values is not None
                values[index] = each.values
        routes = [(index, each.routes) for index, each in results if each.routes is not None]
        return OldScores(logprobs, entropy, values, joined(routes, batch))

    def reference_logprobs(self, passes: Passes, batch: Batch) -> Float[Tensor, "B T"]:
        logprobs, passes = torch.zeros_like(batch.rollout_logprobs), planned(passes)
        for index, each in self._asked("reference", batch_shares(batch, passes, self._crew.size), passes):
            logprobs[index] = each
        return logprobs

    def _asked(self, job: str, shares: list[Share[Any]], passes: Passes, *more: Any) -> Shards[Any]:
        """Results of the ranks for their shares; of ranks that have rows."""
        plain = replace(passes, through=directly)
        results = self._crew.ask(job, [(plain, each, *more) for each in shares])
        return [(share.index, each) for share, each in zip(shares, results, strict=True) if share.rows is not None]

    def _each(self, passes: Passes, share: Share[Rows], run: Callable[[Passes, Rows], RowResult]) -> RowResult | None:
        """Run this rank's own rows, and then the passes that others still make."""
        if (passes.checkpointed, passes.offloaded) != self._checkpointed:
            checkpoint_models(self._models, passes)
            self._checkpointed = (passes.checkpointed, passes.offloaded)
        passes, rank = replace(passes, through=self._through), self._crew.mesh.rank
        with nullcontext() if self.can_retry else starting_smaller(passes, share, self._models, rank):
            result = None if share.rows is None else run(passes, share.rows)
            for _ in range(share.idle):
                run(passes, share.idle_rows)
        for _, root in self._roots:
            reshard(root)
        return result

    @property
    def device(self) -> torch.device:
        return self._crew.mesh.device

    def logprobs(
        self, prompts: Sequence[Sequence[int]], tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]
    ) -> Float[Tensor, "B T"]:
        """All ranks make the same pass."""
        return self._crew.tell("logprobs", prompts, tokens, lengths)[0]

    def _logprobs_here(self, *rows: Any) -> Float[Tensor, "B T"]:
        _, root = self._roots[0]
        with evaluating(self.model, in_shards=True):
            logprobs = root.run(lambda: logprobs_of(self.model, *rows))
        reshard(root)
        return logprobs.cpu()

    def _through(self, model: PreTrainedModel, work: Callable[[], Any]) -> Any:
        [root] = [root for known, root in self._roots if known is model]
        return root.run(work)

    def _map_rows_here(self, passes: Passes, share: Share[Any], task: RowTask) -> Any:
        result = self._each(passes, share, self._runs[task])
        return on_cpu(result) if isinstance(result, GradientPass) else result

    def _old_here(self, passes: Passes, share: Share[Batch], has_values: bool, record: bool) -> OldScores | None:
        value = self._value if has_values else None
        return self._each(
            passes, share, lambda passes, rows: self._inner.without_gradient(passes, rows, value, record=record)
        )

    def _reference_here(self, passes: Passes, share: Share[Batch]) -> Tensor | None:
        return self._each(passes, share, self._inner.reference_logprobs)

    @property
    def can_retry(self) -> bool:
        return self._crew.size == 1

    @property
    def has_reference(self) -> bool:
        return self._inner.has_reference

    def reset_reference(self) -> None:
        self._crew.tell("reset_reference")

    @torch.no_grad()
    def _reset_here(self) -> None:
        if self._inner.reference is None:  # an adapter, which keeps its own shards
            self._inner.reset_reference()
            return
        for reference, weight in zip(self._inner.reference.parameters(), self.model.parameters(), strict=True):
            local(reference).copy_(local(weight))
        self._inner.reference_was_reset = True

    # Updates

    def set_rates(self, policy: float, value: float) -> None:
        self._crew.tell("rates", policy, value)

    def zero_grad(self) -> None:
        self._crew.tell("zero_grad")

    def backward(self, loss: Tensor) -> None:
        self._inner.backward(loss)

    def overflowed(self) -> bool:
        return any(self._crew.tell("overflowed"))

    def _overflowed_here(self) -> bool:
        return self._inner.optimizer.overflowed(whole)

    def zero_missing_gradients(self) -> None:
        self._crew.tell("zero_missing_gradients")

    def apply(self, max_norm: float, accepts: Callable[[list[float]], bool]) -> list[float]:
        norms: list[float] = self._crew.tell("norms")[0]
        if accepts(norms):
            self._crew.tell("step", max_norm)
        return norms

    def _norms_here(self) -> list[float]:
        self._norms = [whole(norm) for norm in self._inner.optimizer.norms()]
        return [float(norm) for norm in self._norms]

    def _step_here(self, max_norm: float) -> None:
        self._inner.optimizer.step_clipped(max_norm, self._norms)
        self.copy.is_old = True

    @property
    def trains_values(self) -> bool:
        return self._inner.trains_values

    def nonfinite_gradients(self) -> tuple[str, ...]:
        by_rank = [set(names) for names in self._crew.tell("nonfinite")]
        return tuple(name for name in self._inner.optimized() if name in set().union(*by_rank))

    def _nonfinite_here(self) -> list[str]:
        gradients = {name: each.grad for name, each in self._inner.optimized().items() if each.grad is not None}
        return [name for name, each in gradients.items() if not local(each).isfinite().all()]

    @property
    def pending_bytes(self) -> int:
        """Also what is taken on another rank and free on this one: a plan has to fit on all of them."""
        pending = self._inner.pending_bytes // self._crew.mesh.shard_size
        if self.can_retry or not is_planned_on(self.model.device):
            return pending
        free: list[int] = self._crew.tell("free")
        return pending + free[0] - min(free)

    # State

    def save(self, folder: Path) -> None:
        self.copy.save(folder)

    def state(self) -> dict[str, Any]:
        return self._inner.state() | {"version": self.version}

    def write(self, folder: Path) -> None:
        check_written(folder, self._crew.tell("write", str(folder)))

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._crew.tell("load", str(folder), dict(state))
        self.version = self._inner.version

    def _write_here(self, folder: str) -> str | None:
        tensors = self._inner.tensors()
        if self._dtype in HALVES:  # the saved model rounds its weights
            tensors["optimizer"] |= {f"{name}.{MASTER}": each for name, each in self._inner.optimized().items()}
        return write_shards(Path(folder), tensors, self._crew.mesh)

    def _load_here(self, folder: str, state: dict[str, Any]) -> None:
        restore(self._inner, self.copy.kept, Path(folder), state, self._crew.mesh)
        self.copy.is_old = False
