"""Bytes and seconds of a learner rank, by hand."""

from dataclasses import replace

import pytest
import torch

from proximo.algorithms import GRPO
from proximo.planning.cards import card
from proximo.planning.holdings import Holding, holdings
from proximo.planning.memory import StepSize
from proximo.planning.ranks import RankCount, balance, rank_memory, rank_time, sampling_rank_memory
from proximo.rl.config import RunConfig, TrainingOptions

H100 = card("H100")
CONFIG = RunConfig(model="8B", algorithm=replace(GRPO, kl=None), training=TrainingOptions(minibatches=1))
SIZE = StepSize(groups=64, group_size=8, prompt_tokens=256, max_tokens=1024)


@pytest.fixture(scope="module")
def holding() -> Holding:
    return holdings(CONFIG, torch.bfloat16, compiled=True)[0]


def test_bytes_of_8_b_on_8_ranks(holding):
    found = rank_memory(holding, SIZE, H100, RankCount(8, 8))
    parameters, table = 8_190_735_360, 151936 * 4096
    assert found.shards == 16 * parameters // 8  # float32: weight, gradient, two moments
    assert found.root == 2 * 2 * table  # embedding and head are not tied
    # Two layers in bf16, a layer's gradients in bf16, and those of another in float32, as they are reduced.
    assert found.gathered == pytest.approx((2 + 2 + 2 + 4) * (parameters - 2 * table) / 36, rel=1e-3)
    assert found.head >= 4 * table
    assert found.fits
    assert rank_memory(holding, SIZE, H100, RankCount(64, 64)).shards == -(-16 * parameters // 64)


def test_layers_in_use_by_hand():
    """A layer of 8B has matrices of 4096² for queries and output, of 1024 · 4096 for keys and values, and three of
    4096 · 12288."""
    layer = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 12288
    full, lora = holdings(CONFIG, torch.bfloat16, compiled=True)
    assert rank_memory(full, SIZE, H100, RankCount(8, 8)).gathered == 10 * layer
    assert rank_memory(lora, SIZE, H100, RankCount(8, 8)).gathered == 4 * layer  # a frozen base has no gradients
    wide, _ = holdings(CONFIG, torch.float32, compiled=True)
    assert rank_memory(wide, SIZE, H100, RankCount(8, 8)).gathered == 16 * layer


def test_one_rank_gathers_nothing_and_copies_do_not_shard_further(holding):
    engines = rank_memory(holding, SIZE, H100, RankCount(8, 8))
    own = sampling_rank_memory(holding, SIZE, H100, RankCount(8, 8))
    assert (
        own.held == engines.shards + engines.gathered + engines.root + 2 * holding.shape.parameters
    )  # and the copy that samples
    alone = rank_memory(holding, SIZE, H100, RankCount(1, 1))
    assert (alone.gathered, alone.root) == (0, 0)
    assert not alone.fits
    assert (
        rank_memory(holding, SIZE, H100, RankCount(32, 8)).shards
        == rank_memory(holding, SIZE, H100, RankCount(8, 8)).shards
    )


def test_whole_groups_go_to_the_emptiest_rank():
    assert balance([4, 3, 2, 1], 2, minibatches=1) == 1.0
    assert balance([6, 3, 2, 1], 2, minibatches=1) == 1.0
    assert balance([5, 1, 1, 1], 2, minibatches=1) == 5 / 4
    # Two mini-batches of two groups on four ranks: half of the ranks have nothing.
    assert balance([1, 1, 1, 1], 4, minibatches=2) == 2.0


def test_twice_the_ranks_take_half_the_time_until_groups_run_out(holding):
    lengths = [[512] * 8] * 64

    def seconds(number):
        return rank_time(CONFIG, holding, SIZE, lengths, H100, RankCount(number, 8))

    assert seconds(32).total == pytest.approx(seconds(16).total / 2, rel=0.05)
    assert seconds(64).balance == 1.0
    assert seconds(128).balance == 2.0


def test_traffic_across_nodes_is_slower(holding):
    lengths = [[512] * 8] * 64
    within, across = (rank_time(CONFIG, holding, SIZE, lengths, H100, RankCount(16, shard)) for shard in (8, 16))
    assert across.traffic > 5 * within.traffic
    with pytest.raises(ValueError, match="shard is 6: give a divisor of the 16 ranks"):
        RankCount(16, 6)
