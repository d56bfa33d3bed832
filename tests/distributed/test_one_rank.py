"""One rank in shards computes, to the last bit, what a whole model does."""

from collections.abc import Iterator

import pytest
import torch

from proximo.distributed.following import Crew
from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from tests.distributed.rank_cases import CASES, run_case

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
