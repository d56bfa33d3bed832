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


def run(folder: Path, *, shard: int, names: list[str]) -> Path:
    """Cases on two ranks; the folder of what they found."""
    start_group("tests.distributed.rank_cases", [str(folder), str(shard), *names], folder)
    return folder


def test_repeated_shards_agree_too(tmp_path):
    folder = run(tmp_path, shard=1, names=["kl"])
    assert relative(Results(**torch.load(folder / "kl.pt")), run_case("kl")) < WEIGHTS


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_agree_with_one_process(two_ranks, name):
    ours = Results(**torch.load(two_ranks / f"{name}.pt"))
    plain = run_case(name)
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
