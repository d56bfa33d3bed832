"""A checkpoint of shards holds the same numbers as one of a whole model, and each is read by the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.distributed.rank_group import Crew
from proximo.learner.learner import Learner
from proximo.learner.named_tensors import PARTS, STATE, read_tensors
from tests.distributed.groups import start_group
from tests.distributed.rank_cases import CASES, Holding, build
from tests.distributed.saving_cases import advanced, load, save


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.alone()
    yield mesh
    mesh.close()


@pytest.mark.slow("trains and resumes runs")
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
    assert first[0].policy.state() == first[1].policy.state()
    want = weights(advanced(first[1], 1))
    for holding in (sharded, whole):
        for written in (sharded, whole):
            assert_equal(resumed(name, holding, tmp_path / written.__name__), want)


@pytest.mark.scale
def test_other_numbers_of_ranks_read_the_same_state(tmp_path):
    """Two ranks write, and three, two and none read it; with as many ranks as before everything after is equal too."""
    for ranks, source, target in ((2, "-", "two"), (3, "two", "three"), (2, "two", "again")):
        place = tmp_path / target
        place.mkdir()
        found = source if source == "-" else str(tmp_path / source)
        start_group("tests.distributed.saving_cases", ["ppo_layers", found, str(place)], place, ranks)
    written = state_of(tmp_path / "two")
    assert_equal(state_of(tmp_path / "three"), written)
    assert len(list((tmp_path / "three" / STATE / "optimizer").iterdir())) == 3
    assert_equal(state_of(tmp_path / "again" / "next"), state_of(tmp_path / "two" / "next"))
    for file in (tmp_path / "two" / "next" / STATE / "optimizer").iterdir():  # each rank writes what it wrote before
        again = tmp_path / "again" / "next" / STATE / "optimizer" / file.name
        assert load_file(again).keys() == load_file(file).keys()
    alone = load(build(CASES["ppo_layers"], lambda policy: policy), tmp_path / "two")
    save(alone, tmp_path / "none")
    assert_equal(state_of(tmp_path / "none"), written)
    want = weights(advanced(alone, 1))
    for each in ("three", "again"):
        for name, tensor in read_tensors(tmp_path / each / "next" / "model.safetensors").items():
            torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.scale
@pytest.mark.parametrize("name", ["lora", "kl"])
def test_where_engines_sample_only_rank_0_has_a_copy_and_all_numbers_are_the_same(tmp_path, name):
    for target, more in (("everywhere", []), ("alone", ["elsewhere"])):
        place = tmp_path / target
        place.mkdir()
        start_group("tests.distributed.saving_cases", [name, "-", str(place), *more], place)
        (place / "again").mkdir()
    for target, more in (("everywhere", ["elsewhere"]), ("alone", [])):  # each reads what the other wrote
        place = tmp_path / target / "again"
        other = {"everywhere": "alone", "alone": "everywhere"}[target]
        start_group("tests.distributed.saving_cases", [name, str(tmp_path / other), str(place), *more], place)
    files = sorted(each.relative_to(tmp_path / "alone") for each in (tmp_path / "alone").rglob("*.safetensors"))
    assert len(files) > 6
    for file in files:
        ours, theirs = (read_tensors(tmp_path / each / file) for each in ("alone", "everywhere"))
        assert_equal(ours, theirs)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    parts = {part: read_tensors(folder / STATE / f"{part}.safetensors") for part in PARTS}
    parts["model"] = read_tensors(folder / "model.safetensors")
    return {f"{part}/{name}": each for part, own in parts.items() for name, each in own.items()}


def resumed(name: str, holding: Holding, folder: Path) -> dict[str, torch.Tensor]:
    return weights(advanced(load(build(CASES[name], holding), folder), 1))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in learner.policy.weights()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
