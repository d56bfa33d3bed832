"""One rank in shards computes, to the last bit, what a whole model does."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.distributed.rank_group import Crew
from proximo.learner.lora import LoraPolicy
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.models import tiny_model, with_precision
from proximo.models.adapters.lora import Lora
from proximo.rl.assemble import assemble
from tests.distributed.rank_cases import CASES, build, make_groups, run_case

QUICK = ("ppo_layers", "broken")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.alone()
    yield mesh
    mesh.close()


@pytest.mark.slow("trains several runs")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.scale) for name in CASES]
)
def test_one_rank_equals_none(mesh, name):
    plain = run_case(name)
    ours = run_case(name, lambda policy: ShardedPolicy(policy, Crew(mesh)))
    for field in ("norms", "value_norms", "logprobs", "skipped", "broken"):
        assert str(getattr(ours, field)) == str(getattr(plain, field))  # str: NaN equals NaN
    assert ours.weights.keys() == plain.weights.keys()
    for each, weight in plain.weights.items():
        torch.testing.assert_close(ours.weights[each], weight, rtol=0, atol=0, equal_nan=True)


def test_trained_weights_are_held_in_float32_and_frozen_ones_as_they_compute(mesh):
    """Whatever the files hold: here bfloat16, with an adapter, of which only A and B are trained."""
    model = with_precision(tiny_model(layers=2, hidden=32), torch.bfloat16)
    policy = ShardedPolicy(LoraPolicy(model, Lora(rank=2), base="tiny", seed=0), Crew(mesh), torch.bfloat16)
    policy.start(LearnerOptions(), None, needs_reference=False)
    held = {(each.requires_grad, each.dtype) for each in model.parameters()}
    assert held == {(True, torch.float32), (False, torch.bfloat16)}
    model = with_precision(tiny_model(layers=2, hidden=32), torch.bfloat16)
    policy = ShardedPolicy(PlainPolicy(model), Crew(mesh), torch.bfloat16)
    policy.start(LearnerOptions(freeze=("embed",)), None, needs_reference=True)
    held = {(each.requires_grad, each.dtype) for each in model.parameters()}
    assert held == {(True, torch.float32), (False, torch.bfloat16)}
    reference = policy._inner.reference
    assert reference is not None
    assert {each.dtype for each in reference.parameters()} == {torch.bfloat16}
    rows = [(5, 6, 7)], torch.tensor([[8, 9]]), torch.tensor([2])
    assert policy.logprobs(*rows).isfinite().all()


@pytest.mark.slow("trains a run")
def test_an_adapter_is_trained_behind_a_first_pass_without_it(mesh):
    """The reference's, as after a resume: what shards the model looks at the first pass for what is trained."""
    batch = assemble(make_groups(2, seed=0), [], build(CASES["lora"], lambda policy: policy), 24).batch
    learner = build(CASES["lora"], lambda policy: ShardedPolicy(policy, Crew(mesh), torch.bfloat16))
    learner.policy.reference_logprobs(learner.passes, batch)
    learner.start_step()
    learner.set_learning_rate(0)
    [update] = learner.updates(batch)
    assert update is not None


def test_one_shard_is_gathered_once_for_all_passes_of_an_update(mesh, monkeypatch):
    """There is nothing to save by giving it back between passes, and torch would copy every weight before each."""
    gathered, plain = Counter[int](), FSDPParam.to_unsharded

    def counted(self: FSDPParam) -> None:
        gathered[id(self)] += 1
        plain(self)

    monkeypatch.setattr(FSDPParam, "to_unsharded", counted)
    learner = build(CASES["grpo"], lambda policy: ShardedPolicy(policy, Crew(mesh)))
    learner.start_step()
    learner.set_learning_rate(0)
    batch = assemble(make_groups(5, seed=0), [], learner, 24).batch
    assert len(list(learner.passes.parts(batch))) > 2
    gathered.clear()
    assert len(list(learner.updates(batch))) == 1
    assert set(gathered.values()) == {1}
