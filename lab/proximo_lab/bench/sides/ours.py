"""Our side: the sampler, the learner and the loop between them, on a workload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from proximo.algorithms import GRPO
from proximo.learner.guard import Update
from proximo.learner.learner import Learner
from proximo.learner.lora import LoraPolicy
from proximo.learner.policy import PlainPolicy, Policy
from proximo.losses.pieces.advantages import GroupNormalized
from proximo.losses.pieces.weights import TokenMean
from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import registered
from proximo.planning.workloads import Workload
from proximo.rl.assemble import assemble
from proximo.rl.config import TrainingOptions
from proximo.rl.rollouts import Collector
from proximo.runs.records import DataCursor
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Split
from proximo.types import Completion, Grade, Group, Problem, Request, Rollout
from proximo_lab.bench.timing import TOTAL, Clock, Watch

ALGORITHM = replace(GRPO, kl=None, weights=TokenMean(), advantage=GroupNormalized(epsilon=1e-4))
"""TRL's default algorithm as one of ours."""
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class FixedRewards:
    """A task with a workload's prompts; rewards do not depend on the completions."""

    workload: Workload
    while_sampling: bool = True

    @cached_property
    def prompts(self) -> list[str]:
        return [self.workload.text(prompt) for prompt in self.workload.prompts()]

    @cached_property
    def rewards(self) -> list[list[float]]:
        return self.workload.rewards()

    def size(self, split: Split) -> int | None:
        return self.workload.groups

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        return Problem(f"prompt-{index}", self.prompts[index], index)

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        """Siblings are told apart by their order."""
        left = {problem.id: iter(self.rewards[problem.answer]) for problem in problems}
        return [Grade(next(left[problem.id])) for problem in problems]

    def reference(self, problem: Problem) -> str | None:
        return None


@dataclass
class Ours:
    """A policy of the workload's shape with its sampler and its learner."""

    workload: Workload
    device: str
    clock: Clock
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Switches of the sampler, to measure what a technique is worth."""
    token_budget: int | None = None
    """Tokens per forward pass. None: as in a run."""
    policy: PreTrainedModel | None = None
    """Model to use. None: a new one."""

    def __post_init__(self) -> None:
        workload, on_gpu = self.workload, torch.device(self.device).type == "cuda"
        self.watch = Watch(self.device, self.clock)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.model = self.policy or workload.shape.model(attention=registered(), dtype=dtype, device=self.device)
        self.trained = self._policy()  # before the sampler, which reads what an adapter adds
        assert self.model.generation_config is not None
        self.model.generation_config.eos_token_id = workload.end_tokens or None  # where the sampler looks for them
        self.tokenizer = workload.shape.tokenizer()
        self.sampler = EmbeddedSampler(self.model, self.tokenizer, slots=workload.rows, **self.switches)
        self.sampling = SamplingOptions(max_tokens=workload.limit)
        self.requests = [Request(key, prompt, workload.siblings) for key, prompt in enumerate(workload.prompts())]
        self.turns = 0
        self.drawn: list[list[int]] = []
        """Lengths of the completions of each rollout, group by group."""
        options = TrainingOptions(
            groups=workload.groups,
            group_size=workload.siblings,
            minibatches=1,
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
        )
        if self.token_budget is not None:
            options = replace(options, token_budget=self.token_budget)
        self.options = options

    def _policy(self) -> Policy:
        adapter = self.workload.adapter
        if adapter is None:
            return PlainPolicy(self.model)
        assert self.policy is None, "a model that is given has its adapter already"
        return LoraPolicy(self.model, adapter, base=self.workload.shape.name, seed=0)

    @cached_property
    def learner(self) -> Learner:
        """The learner, created on first use: a rollout alone has no optimizer in memory."""
        return Learner(self.trained, ALGORITHM, self.options.for_learner(), temperature=1.0, seed=0)

    @cached_property
    def collector(self) -> Collector:
        return Collector(
            task=FixedRewards(self.workload),
            sampler=self.sampler,
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            training=self.options,
            keep=ALGORITHM.keep,
            seed=0,
        )

    @cached_property
    def fixed_groups(self) -> tuple[Group, ...]:
        """Groups of given (not sampled) completions with their rewards."""
        task, groups = FixedRewards(self.workload), []
        for number, siblings in enumerate(self.workload.completions()):
            rollouts = [
                Rollout(Completion(tokens, (0.0,) * len(tokens), "", "length"), Grade(reward))
                for tokens, reward in zip(siblings, task.rewards[number], strict=True)
            ]
            problem = task.problem(number, "train", 0)
            groups.append(Group(problem, self.requests[number].prompt_tokens, tuple(rollouts)))
        return tuple(groups)

    # Turns

    def rollout(self, tokens: int | None = None) -> Mapping[str, float]:
        """Sample all completions of the workload, or their first `tokens` tokens."""
        self.turns += 1
        sampling = self.sampling if tokens is None else replace(self.sampling, max_tokens=tokens)
        with self.watch.phase("rollout"):
            answers = self.sampler.sample(self.requests, sampling, seed=0, step=self.turns)
        lengths = [len(completion.tokens) for siblings in answers for completion in siblings]
        assert self.workload.end_tokens or set(lengths) == {sampling.max_tokens}
        self.drawn.append(lengths)
        return self.watch.taken()

    def training(self, groups: Sequence[Group] | None = None, *, apart: bool = False) -> Mapping[str, float]:
        """One update, on the fixed completions unless others are given."""
        groups = self.fixed_groups if groups is None else groups
        with self.watch.phase("train"):
            self.update(groups, apart=apart)
        return self.watch.taken()

    def step(self) -> Mapping[str, float]:
        """Sample, grade, learn."""
        self.turns += 1
        with self.watch.phase("rollout"):
            self.learner.start_step()
            collected = self.collector.collect(DataCursor(), step=self.turns, version=self.learner.version)
        with self.watch.phase("train"):
            self.update(collected.groups)
        self.drawn.append([len(rollout.completion.tokens) for group in collected.groups for rollout in group.rollouts])
        seconds = self.watch.taken()
        return seconds | {TOTAL: sum(seconds.values())}

    def update(self, groups: Sequence[Group], *, apart: bool = False) -> Update:
        """One update. With `apart`, each row has its own copy of its prompt."""
        self.learner.start_step()
        batch = assemble(groups, [], self.learner, self.sampling.max_tokens).batch
        if apart:
            prompts = tuple(batch.prompts[number] for number in batch.group.tolist())
            batch = replace(batch, prompts=prompts, group=torch.arange(len(batch)))
        [update] = self.learner.updates(batch)
        return update
