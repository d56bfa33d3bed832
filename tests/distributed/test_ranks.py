"""Two ranks compute what one process does, up to the order of sums."""

from pathlib import Path

import pytest
import torch

from tests.distributed.groups import start_group
from tests.distributed.rank_cases import CASES, Results, run_case

pytestmark = pytest.mark.scale
NORM, WEIGHTS = 1e-5, 5e-6
"""Relative differences of gradient norms, and of all weights together, that the order of sums explains."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("ranks"), shard=0, names=list(CASES))


def run(folder: Path, *, shard: int, names: list[str], ranks: int = 2) -> Path:
    """Cases on ranks; the folder of what they found."""
    start_group("tests.distributed.rank_cases", [str(folder), str(shard), *names], folder, ranks)
    return folder


def test_repeated_shards_agree_too(tmp_path):
    folder = run(tmp_path, shard=1, names=["kl"])
    assert relative(Results(**torch.load(folder / "kl.pt")), run_case("kl")) < WEIGHTS


NODES = ["grpo", "kl", "ppo_layers", "lora", "moe"]


def test_two_nodes_of_two_ranks_that_repeat_their_shards_agree_with_one_process(tmp_path):
    """HSDP: shards travel inside a node, and gradients are summed between nodes."""
    folder = run(tmp_path, shard=2, names=NODES, ranks=4)
    for name in NODES:
        assert_agree(Results(**torch.load(folder / f"{name}.pt")), run_case(name))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_agree_with_one_process(two_ranks, name):
    assert_agree(Results(**torch.load(two_ranks / f"{name}.pt")), run_case(name))


def assert_agree(ours: Results, plain: Results) -> None:
    assert ours.norms == pytest.approx(plain.norms, rel=NORM, nan_ok=True)
    assert [x or 0.0 for x in ours.value_norms] == pytest.approx(
        [x or 0.0 for x in plain.value_norms], rel=NORM, nan_ok=True
    )
    assert ours.logprobs == pytest.approx(plain.logprobs, rel=NORM, nan_ok=True)
    assert [reason is None for reason in ours.skipped] == [reason is None for reason in plain.skipped]
    if not any(plain.skipped):
        assert relative(ours, plain) < WEIGHTS


def relative(ours: Results, plain: Results) -> float:
    """Distance between all weights, relative to their size."""
    mine, theirs = (torch.cat([each.flatten() for each in found.weights.values()]).double() for found in (ours, plain))
    return float((mine - theirs).norm() / theirs.norm())
