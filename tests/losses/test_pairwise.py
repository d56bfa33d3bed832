"""Rankings as pairs, and how well their scores are calibrated."""

import math

import torch
from torch.testing import assert_close

from proximo.losses.pairwise import calibration_error, pair_accuracy, ranked_pairs


def test_all_pairs_of_a_ranking_share_one_weight():
    pairs = ranked_pairs(torch.tensor([7, 4, 7, 7, 4, 9]))
    found = dict(zip(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True), pairs.weights, strict=True))
    assert found == {(0, 2): 1 / 3, (0, 3): 1 / 3, (2, 3): 1 / 3, (1, 4): 1.0}
    assert len(ranked_pairs(torch.tensor([1, 2, 3])).weights) == 0


def test_equal_scores_are_a_coin_toss():
    assert pair_accuracy(torch.tensor([0.3, 0.0, -2.0])).tolist() == [1.0, 0.5, 0.0]


def gaps(*confidences: float) -> torch.Tensor:
    """Of pairs ranked right with this confidence; wrong where it is negative."""
    return torch.tensor([math.copysign(math.log(abs(p) / (1 - abs(p))), p) for p in confidences])


def test_calibration_by_hand():
    one = torch.ones(2)
    # One bin: 0.62 and 0.63 believed, half of it true.
    assert_close(calibration_error(gaps(0.62, -0.63), one), torch.tensor(abs(0.62 + 0.63 - 1) / 2))
    # Two bins, of 0.05 each: one far too modest, one far too sure; nothing cancels.
    assert_close(calibration_error(gaps(0.52, -0.58), one), torch.tensor((0.48 + 0.58) / 2))
    # Weights count, in the bin and across bins.
    weighted = calibration_error(gaps(0.62, -0.63, 0.97), torch.tensor([1.0, 3.0, 4.0]))
    assert_close(weighted, torch.tensor((abs(0.62 + 3 * 0.63 - 1) + 4 * 0.03) / 8))
    # Certainty stands in the last bin, equal scores in the first.
    assert_close(calibration_error(torch.tensor([50.0, 0.0]), one), torch.tensor(0.0))
    assert_close(calibration_error(torch.tensor([-50.0, 0.0]), one), torch.tensor(0.5))
