"""Updates of tiny models for tests on ranks: the same work for a plain policy and for one in shards.

`python -m tests.distributed.rank_cases FOLDER SHARD CASE ...` runs cases in a process of a group; rank 0 writes what it
found.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm
from proximo.learner.learner import Learner
from proximo.learner.lora import LoraPolicy
from proximo.learner.options import LearnerOptions, RoutingReplay
from proximo.learner.policy import PlainPolicy, Policy
from proximo.losses.pieces.divergences import KlLoss
from proximo.losses.pieces.extras import RouterBalance, ValueLoss
from proximo.losses.pieces.gates import Clip
from proximo.models import tiny_model
from proximo.models.adapters.lora import Lora
from proximo.models.tiny import tiny_moe
from proximo.models.values import OwnLayers, OwnModel, TrunkHead, ValueForm, value_model
from proximo.rl.assemble import assemble
from proximo.types import Completion, Grade, Group, Problem, Rollout

Holding = Callable[[PlainPolicy], Policy]
"""How the plain or LoRA policy of a case is held: as it is, or in shards."""


@dataclass(frozen=True)
class Case:
    """Some updates of one algorithm."""

    algorithm: Algorithm
    form: ValueForm | None = None
    lora: bool = False
    experts: bool = False
    replay: RoutingReplay | None = None
    pretrain: int = 0
    """First steps that train only the value model."""
    groups: int = 5
    steps: int = 5
    broken_step: int | None = None
    """Step at which a weight of the last shard is not a number."""
    later: Algorithm | None = None
    """The algorithm with other numbers, which holds from the second step on."""


CASES = {
    "grpo": Case(replace(GRPO, kl=None)),
    "dapo": Case(DAPO),
    "gspo": Case(GSPO),
    "sapo": Case(SAPO),
    "ppo_layers": Case(PPO, OwnLayers()),
    "ppo_trunk": Case(PPO, TrunkHead()),
    "ppo_model": Case(PPO, OwnModel()),
    "kl": Case(replace(GRPO, kl=KlLoss())),
    "lora": Case(replace(GRPO, kl=KlLoss()), lora=True),
    "moe": Case(replace(GRPO, kl=None), experts=True, replay="old_policy"),
    "balance": Case(replace(GRPO, kl=None, extra=RouterBalance(0.1)), experts=True, steps=2),
    "pretrain": Case(PPO, OwnLayers(), pretrain=1, steps=2),
    "one_group": Case(replace(GRPO, kl=None), groups=1),
    "scheduled": Case(PPO, OwnLayers(), steps=2, later=replace(PPO, gate=Clip(0.01, 0.02), extra=ValueLoss(0.5))),
    "broken": Case(replace(GRPO, kl=None), steps=3, broken_step=1),
}


@dataclass(frozen=True)
class Results:
    norms: list[float]
    value_norms: list[float | None]
    logprobs: list[float]
    """Sum of all log-probs, for each update."""
    skipped: list[str | None]
    broken: list[tuple[str, ...]]
    weights: dict[str, Tensor]


def run_case(name: str, hold: Holding = lambda policy: policy) -> Results:
    """All updates of a case. On ranks above 0, `hold` gives a policy that follows, and this returns nothing new."""
    case = CASES[name]
    learner = build(case, hold)
    norms, value_norms, logprobs, skipped, broken = [], [], [], [], []
    for step in range(case.steps):
        learner.start_step()
        if case.later is not None and step:
            learner.set_numbers(case.later, learner.options, temperature=0.7)
        learner.set_learning_rate(step)
        if step == case.broken_step:
            poison(learner)
        assembled = assemble(make_groups(case.groups, seed=step), [], learner, 24)
        updates = learner.updates(assembled.batch)
        if step < case.pretrain:
            updates = learner.value_updates(replace(assembled.batch, returns=assembled.earned))
        for update in updates:
            norms.append(update.gradient_norm)
            value_norms.append(update.value_gradient_norm)
            logprobs.append(float(torch.nan_to_num(update.logprobs).double().sum()))
            skipped.append(update.skipped and update.skipped.reason)
            broken.append(() if update.skipped is None else update.skipped.parameters)
    weights = {each: tensor.clone() for each, tensor in learner.policy.weights()}
    return Results(norms, value_norms, logprobs, skipped, broken, weights)


def build(case: Case, hold: Holding) -> Learner:
    shape = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 24}
    model = tiny_moe(**shape, experts=4) if case.experts else tiny_model(**shape)
    value = None if case.form is None else value_model(case.form, model)
    inner = LoraPolicy(model, Lora(rank=4), base="tiny", seed=0) if case.lora else PlainPolicy(model)
    options = LearnerOptions(groups=5, minibatches=1, learning_rate=1e-3, warmup_steps=0, token_budget=60)
    return Learner(hold(inner), case.algorithm, options, temperature=1.0, seed=0, value=value, replay=case.replay)


@torch.no_grad()
def poison(learner: Learner) -> None:
    """One weight becomes NaN, where only the last rank can see it if the model is in shards."""
    weight = learner.model.get_submodule("model.layers.0.mlp.down_proj").get_parameter("weight")
    local = weight.to_local() if hasattr(weight, "to_local") else weight  # pyright: ignore[reportAttributeAccessIssue]
    local[-1, 0] = torch.nan


def make_groups(count: int, *, seed: int) -> list[Group]:
    """Groups of four random completions, of prompts and lengths that differ."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=random).tolist()

    groups = []
    for number in range(count):
        prompt = tuple(draw(5, 90, draw(3, 12)[0]))
        rollouts = []
        for sample in range(4):
            tokens = tuple(draw(5, 90, draw(1, 12)[0]))
            outcome = float(sample == 0 or draw(0, 2)[0]) if sample < 3 else 0.0
            rollouts.append(Rollout(Completion(tokens, (-4.0,) * len(tokens), "", "stop"), Grade(outcome)))
        groups.append(Group(Problem(str(number), "", None), prompt, tuple(rollouts), ordinal=number))
    return groups


def main(folder: Path, shard: int, names: list[str]) -> None:
    from proximo.distributed.mesh import Mesh
    from proximo.distributed.policy import ShardedPolicy
    from proximo.distributed.rank_group import Crew

    torch.set_num_threads(1)
    mesh = Mesh.join(device="cpu", timeout=60.0, shard=shard)
    for name in names:
        crew = Crew(mesh)
        if mesh.rank == 0:
            found = run_case(name, lambda policy, crew=crew: ShardedPolicy(policy, crew))
            torch.save(vars(found), folder / f"{name}.pt")
            crew.dismiss()
        else:
            learner = build(CASES[name], lambda policy, crew=crew: ShardedPolicy(policy, crew))
            assert isinstance(learner.policy, ShardedPolicy)
            learner.policy.follow(learner)
    mesh.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
