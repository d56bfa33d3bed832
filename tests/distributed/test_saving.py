"""A checkpoint of shards holds the same numbers as one of a whole model, and each is read by the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from proximo.distributed.following import Crew
from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.training.learner.learner import Learner
from proximo.training.learner.named_tensors import STATE, read_tensors
from proximo.training.rl.assemble import assemble
from tests.distributed.rank_cases import CASES, Holding, build, make_groups


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.alone()
    yield mesh
    mesh.close()


def advanced(learner: Learner, step: int) -> Learner:
    """After one more update."""
    learner.start_step()
    learner.set_learning_rate(step)
    for _ in learner.updates(assemble(make_groups(2, seed=step), [], learner, 24).batch):
        pass
    return learner


def save(learner: Learner, folder: Path) -> None:
    (folder / STATE).mkdir(parents=True)
    learner.policy.save(folder)
    learner.policy.write(folder / STATE)


def load(learner: Learner, folder: Path, state: dict[str, object]) -> Learner:
    learner.policy.load(folder, state)
    return learner


@pytest.mark.parametrize("name", ["ppo_layers", pytest.param("kl", marks=pytest.mark.scale)])
def test_shards_and_a_whole_model_read_each_other(mesh, tmp_path, name):
    def sharded(policy):
        return ShardedPolicy(policy, Crew(mesh))

    def whole(policy):
        return policy

    first: list[Learner] = []
    for holding in (sharded, whole):
        learner = advanced(build(CASES[name], holding), 0)
        if learner.policy.has_reference:
            learner.policy.reset_reference()
        save(learner, tmp_path / holding.__name__)
        first.append(learner)
    files = sorted(each.relative_to(tmp_path / "whole") for each in (tmp_path / "whole").rglob("*.safetensors"))
    assert files
    for file in files:
        ours, theirs = (read_tensors(tmp_path / each / file) for each in ("sharded", "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), file
    state = first[0].policy.state()
    assert state == first[1].policy.state()
    want = weights(advanced(first[1], 1))
    for holding in (sharded, whole):
        for written in (sharded, whole):
            assert_equal(resumed(name, holding, tmp_path / written.__name__, state), want)


def resumed(name: str, holding: Holding, folder: Path, state: dict[str, object]) -> dict[str, torch.Tensor]:
    return weights(advanced(load(build(CASES[name], holding), folder, state), 1))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in learner.policy.weights()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
