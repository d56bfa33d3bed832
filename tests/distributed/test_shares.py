"""How rows are dealt out to ranks."""

from dataclasses import replace

import torch

from proximo.distributed.shares import batch_shares, row_shares, trimmed, update_shares
from proximo.learner.gradients import UpdateRows
from proximo.learner.passes import Passes
from proximo.learner.ranks import deal
from proximo.losses.objective import Plan
from proximo.rl.assemble import to_batch
from tests.distributed.rank_cases import make_groups


def test_the_largest_group_goes_first_to_the_rank_with_the_fewest_tokens():
    assert deal({0: 5, 1: 9, 2: 4, 3: 4}, 2) == [[1, 3], [0, 2]]
    assert deal({0: 3, 1: 3}, 3) == [[0], [1], []]


def test_groups_are_never_split_and_every_row_is_dealt_once():
    batch = to_batch(make_groups(7, seed=0))
    shares = row_shares(batch, 3)
    assert sorted(torch.cat(shares).tolist()) == list(range(28))
    owners = [set(batch.group[rows].tolist()) for rows in shares]
    assert not (owners[0] & owners[1])
    assert not (owners[0] & owners[2])
    assert not (owners[1] & owners[2])
    assert row_shares(batch, 1)[0].tolist() == list(range(28))


def test_every_rank_makes_equally_many_passes():
    batch, passes = to_batch(make_groups(5, seed=0)), Passes(1.0, 40)
    for ranks in (1, 2, 3, 7):
        shares = batch_shares(batch, passes, ranks)
        own = [0 if share.rows is None else len(list(passes.parts(share.rows))) for share in shares]
        assert {count + share.idle for count, share in zip(own, shares, strict=True)} == {max(own)}
        assert all(len(list(passes.parts(share.idle_rows))) == 1 for share in shares)
    assert shares[-1].rows is None  # seven ranks, five groups


def test_rows_without_weight_keep_what_they_are_scored_by():
    batch = replace(to_batch(make_groups(2, seed=0)), advantages=torch.ones(8, 1))
    ones = torch.ones_like(batch.old_logprobs)
    update = UpdateRows(batch, ones, Plan(ones, extra_weights=(ones, None)), torch.ones(8, dtype=torch.bool))
    with_rows, without = update_shares(update, Passes(1.0, 1000), 3)[::2]
    assert with_rows.rows is not None
    assert without.rows is None
    assert with_rows.rows.plan is not None
    assert float(with_rows.rows.plan.weights.min()) == 1.0
    idle = without.idle_rows
    assert idle.plan is not None
    assert idle.plan.extra_weights[0] is not None
    assert not (idle.weights.any())
    assert not (idle.plan.weights.any())
    assert not (idle.plan.extra_weights[0].any())
    assert idle.plan.extra_weights[1] is None
    assert idle.batch.advantages.all()


def test_a_share_has_its_own_prompts_only_under_their_numbers():
    batch = to_batch(make_groups(3, seed=0))
    own = trimmed(batch.rows(torch.tensor([5, 6])))
    assert own.prompts == ((), batch.prompts[1], ())
    assert own.groups == ()
    assert own.group.tolist() == [1, 1]
