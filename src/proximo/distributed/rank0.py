"""A run on ranks: what rank 0 gives to the loop, and how the others are built from the same config."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from proximo.distributed.gathered_weights import CopyPlace
from proximo.distributed.launching import GROUP_FAILED, is_launched, own_rank
from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.distributed.rank_group import Crew
from proximo.distributed.stages import ShardedStageModel
from proximo.learner.policy import PlainPolicy, Policy
from proximo.models import load_tokenizer, pick_device
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.out_of_memory import first_line
from proximo.models.shipped import resolve
from proximo.rl.build import Built, build_learner
from proximo.rl.config import RunConfig
from proximo.runs.signals import SIGNALS
from proximo.samplers.sampler import (
    More,
    RunSamplers,
    SampledPolicy,
    Sampler,
    SamplingOptions,
    Stream,
    build_samplers,
    gathered,
    streamed,
    takes_more,
)
from proximo.supervised.dpo import DpoConfig, dpo_without_data
from proximo.supervised.encoding import EncodedRows
from proximo.supervised.reward_model import RewardModelConfig, reward_model_without_data
from proximo.supervised.schedule import FitOptions
from proximo.supervised.sft import SftConfig, sft_without_data
from proximo.supervised.stage_model import SplitStage
from proximo.types import Completion, Request


class CopiedPolicy:
    """A sharded policy as samplers see it: its whole copy."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self._policy = policy
        self.device, self.logprobs, self.weights = policy.device, policy.logprobs, policy.weights

    @property
    def model(self) -> PreTrainedModel:
        return self._policy.copy.model


class RankSampler:
    """A sampler of rank 0 that refreshes from the shards; with `spread`, every rank samples some of the requests with
    one of its own. Requests are then answered together, not one by one."""

    def __init__(self, local: Sampler, policy: ShardedPolicy, crew: Crew, name: str, *, spread: bool) -> None:
        self._local, self._policy, self._crew, self._name = local, policy, crew, name
        self._copied = CopiedPolicy(policy)
        self._spread = spread and crew.size > 1
        crew.add(**{f"refresh_{name}": self._refresh_here, f"sample_{name}": self._sample_here})

    @property
    def repeats(self) -> bool:
        return self._local.repeats

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        self._policy.copy.refresh()
        return self._crew.tell(f"refresh_{self._name}", version)[0] if self._spread else self._refresh_here(version)

    @property
    def takes_more(self) -> bool:
        """True where rank 0 samples alone: what all ranks sample, they are asked for together."""
        return not self._spread and takes_more(self._local)

    def stream(
        self,
        requests: Any,
        options: SamplingOptions,
        *,
        seed: int,
        step: int,
        version: int = 0,
        more: More | None = None,
    ) -> Stream:
        if not self._spread:
            yield from streamed(self._local, requests, options, seed=seed, step=step, version=version, more=more)
            return
        shares = [list(range(rank, len(requests), self._crew.size)) for rank in range(self._crew.size)]
        orders = [([requests[number] for number in numbers], options, seed, step, version) for numbers in shares]
        parts = self._crew.ask(f"sample_{self._name}", orders)
        answers = {
            number: each
            for numbers, part in zip(shares, parts, strict=True)
            for number, each in zip(numbers, part, strict=True)
        }
        yield from sorted(answers.items())

    def _refresh_here(self, version: int) -> int:
        return self._local.refresh(self._copied, version)

    def _sample_here(
        self, requests: list[Request], options: SamplingOptions, seed: int, step: int, version: int
    ) -> list[tuple[Completion, ...]]:
        stream = self._local.stream(requests, options, seed=seed, step=step, version=version)
        return gathered(stream, len(requests)) if requests else []


class NoSampler:
    """Sampler of a rank above 0 where rank 0 alone has what samples."""

    repeats = True

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        raise AssertionError("only rank 0 samples")

    def stream(self, requests: Any, options: SamplingOptions, *, seed: int, step: int, version: int = 0) -> Stream:
        raise AssertionError("only rank 0 samples")


class OnRanks:
    """Run held by several processes; the loop of rank 0 asks it for a policy and for samplers, or for the
    model of a stage."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def hold(self, policy: PlainPolicy, dtype: torch.dtype, factory: Any) -> Policy:
        copy: CopyPlace = "host" if getattr(factory, "reads_weights_only", False) else "rank 0"
        if getattr(factory, "on_every_rank", False):
            copy = "every rank"
        self._policy = ShardedPolicy(policy, self._crew, dtype, copy=copy)
        return self._policy

    @property
    def conducts(self) -> bool:
        return self._crew.mesh.rank == 0

    def samplers(
        self, factory: Any, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        """Samplers of this process. A sampler that does not run on every rank is rank 0's alone."""
        spread = getattr(factory, "on_every_rank", False)
        if not spread and not self.conducts:
            return RunSamplers(NoSampler(), NoSampler(), drop=lambda step, key: None)
        copied = CopiedPolicy(self._policy)
        built = build_samplers(factory, copied, tokenizer, slots=slots, record_routes=record_routes)
        if built.history is not None:
            raise ValueError(
                f"sampler {type(factory).__name__} keeps older weights, which ranks do not: leave ranks out"
            )
        training = RankSampler(built.training, self._policy, self._crew, "training", spread=spread)
        evaluation = RankSampler(built.evaluation, self._policy, self._crew, "evaluation", spread=spread)
        lanes = self._crew.lanes
        return replace(
            built,
            training=training,
            evaluation=evaluation,
            take_intervals=lambda: [*built.take_intervals(), *lanes.take()],
            drop=None if spread else built.drop,  # what all ranks sample, they sample together
            begun=None if spread else built.begun,
        )

    def hold_stage(
        self, model: PreTrainedModel, options: FitOptions, seed: int, dtype: torch.dtype
    ) -> ShardedStageModel:
        self._stage_model = ShardedStageModel(model, options, seed, dtype, self._crew)
        return self._stage_model

    def scored(self, rows: Sequence[EncodedRows]) -> list[list[float]]:
        return self._stage_model.scored(rows)

    def hold_signals(self, held: Callable[[], AbstractContextManager[None]]) -> None:
        """`held` is a context in which signals wait: one must not end what ranks do together."""
        self._crew.uninterrupted = held

    def dismiss(self) -> None:
        self._crew.dismiss()

    def follow(self, built: Built) -> None:
        """Work until rank 0 ends the run, on ranks above 0."""
        self._policy.follow(built.learner)

    def follow_stage(self, stage: SplitStage) -> None:
        """The same of a stage."""
        self._stage_model.follow(stage)


StageConfig = SftConfig | DpoConfig | RewardModelConfig
COMMANDS = {RunConfig: "train", SftConfig: "sft", DpoConfig: "dpo", RewardModelConfig: "reward-model"}


@contextmanager
def conducting(config: RunConfig | StageConfig) -> Iterator[OnRanks]:
    """Hold the run on all ranks, on rank 0; they are dismissed at the end."""
    with ended_with_group():
        mesh = _joined(config)
        ranks = OnRanks(Crew(mesh))
        try:
            yield ranks
        finally:
            ranks.dismiss()
            mesh.close()


def follow(config: RunConfig) -> None:
    """Build the same learner and samplers, on ranks above 0, and work until rank 0 ends the run."""
    with _following(config) as ranks:
        path, device = resolve(config.model), pick_device(config.device)
        ranks.follow(build_learner(config, path, device, load_tokenizer(path), ranks))


def follow_stage(config: StageConfig) -> None:
    """Build the same model, on ranks above 0, and work until rank 0 ends the run."""
    with _following(config) as ranks:
        ranks.follow_stage(without_data(config, ranks))


def without_data(config: StageConfig, ranks: OnRanks) -> SplitStage:
    """The stage of a process that computes micro-batches for rank 0."""
    match config:
        case SftConfig():
            return sft_without_data(config, ranks)
        case DpoConfig():
            return dpo_without_data(config, ranks)
        case RewardModelConfig():
            return reward_model_without_data(config, ranks)


@contextmanager
def _following(config: RunConfig | StageConfig) -> Iterator[OnRanks]:
    for each in SIGNALS:  # they are for rank 0, which tells the others when to end
        signal.signal(each, signal.SIG_IGN)
    with ended_with_group():
        mesh = _joined(config)
        yield OnRanks(Crew(mesh))
        mesh.close()


@contextmanager
def ended_with_group() -> Iterator[None]:
    """A rank that cannot reach another one ends with a status of its own, by which the launcher starts all again."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class of errors of its own.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        print(f"rank {own_rank()} lost the others: {first_line(error)}", file=sys.stderr)
        raise SystemExit(GROUP_FAILED) from error


def _joined(config: RunConfig | StageConfig) -> Mesh:
    """The group of processes that this one was started for; without RANK, one of its own."""
    assert config.ranks is not None
    device, wanted = torch.device(pick_device(config.device)).type, config.ranks.processes
    if not is_launched() and wanted != 1:
        started = f"start it with proximo {COMMANDS[type(config)]} --ranks N, torchrun or SLURM, which start them all"
        raise ValueError(f"ranks.processes is {wanted}, but this is one process: {started}")
    if not is_launched():
        return Mesh.alone(device=device, timeout=config.ranks.timeout)
    mesh = Mesh.join(device=device, timeout=config.ranks.timeout, shard=config.ranks.shard)
    if wanted and mesh.size != wanted:
        raise ValueError(f"ranks.processes is {wanted}, but WORLD_SIZE is {mesh.size}: start as many processes")
    return mesh
