"""One rank in shards computes, to the last bit, what a whole model does."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from proximo.distributed.following import Crew
from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.training.rl.assemble import assemble
from tests.distributed.rank_cases import CASES, build, make_groups, run_case

QUICK = ("ppo_layers", "broken")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.alone()
    yield mesh
    mesh.close()


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
