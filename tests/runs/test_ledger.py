"""What became of each prompt: every state by hand, and that a wrong ledger is found out."""

import json
import math
from pathlib import Path

import pytest
import torch

from proximo.learner.guard import Skipped, Update
from proximo.rl.assemble import to_batch
from proximo.runs.ledger import check_ledger, entries
from proximo.runs.records import Assembled, Collected, DataCursor
from proximo.types import Completion, Grade, Group, Problem, Rollout
from proximo.types.batches import Stats


def group(ordinal: int, *outcomes: float) -> Group:
    rollouts = tuple(Rollout(Completion((7, 1), (-1.0, -1.0), "", "stop"), Grade(outcome)) for outcome in outcomes)
    return Group(Problem(f"p{ordinal}", "?", ""), (5, 6), rollouts, ordinal=ordinal)


def update(rows: list[int], skipped: bool = False) -> Update:
    index = torch.tensor(rows)
    reason = Skipped("not finite", index) if skipped else None
    blank = torch.zeros(len(rows), 2)
    return Update(Stats(), 1.0, None, None, index, blank, blank, blank, reason)


def assembled(groups: list[Group]) -> Assembled:
    """As `assemble` leaves it: rows that nobody could score are out."""
    batch = to_batch(groups)
    index = (~batch.rewards.isnan()).nonzero().squeeze(1)
    return Assembled(batch.rows(index), batch, index, 0, 0, None, None)


NAN = math.nan


def test_every_state_by_hand():
    kept = [group(3, 1.0, 0.0), group(9, NAN, 1.0), group(10, NAN, NAN), group(12, 0.0, 1.0), group(13, 1.0, 0.0)]
    dropped = [group(8, 0.0, 0.0), group(12, 1.0, 1.0), group(11, NAN, NAN), group(14, 1.0, 1.0), group(14, 0.0, 0.0)]
    before = DataCursor(8, (group(3, 1.0, 0.0), group(4, 1.0, 0.0)))
    after = DataCursor(16, (group(4, 1.0, 0.0), group(15, 1.0, 0.0)))
    collected = Collected(tuple(kept), tuple(dropped), after, rounds=2, sampled_tokens=1)
    # Rows: 3 has 0 and 1, 9 has 2, 10 has none, 12 has 3 and 4, 13 has 5 and 6, in an update that was left out.
    updates = [update([0, 1, 2]), update([3, 4]), update([5, 6], skipped=True)]
    found = entries(7, before, collected, assembled(kept), updates, size=5)
    assert [(row.ordinal, row.state) for row in found] == [
        (3, "trained"),  # carried over to this step
        (8, "filtered"),
        (9, "trained"),
        (10, "unscored"),
        (11, "unscored"),
        (12, "trained"),  # dropped, sampled anew and kept
        (13, "abandoned"),
        (14, "filtered"),  # once, though it was dropped twice
        (15, "carried"),  # 4 was carried before, and still is
    ]
    assert found[1].to_dict() == {"ordinal": 8, "problem": "p8", "epoch": 1, "step": 7, "state": "filtered"}
    assert {row.epoch for row in entries(7, before, collected, None, [], size=None)} == {0}


def test_a_group_that_an_epoch_left_out_and_another_did_not_was_trained():
    kept = [group(0, 1.0, 0.0)]
    collected = Collected(tuple(kept), (), DataCursor(1), rounds=1, sampled_tokens=1)
    updates = [update([0, 1], skipped=True), update([0, 1])]
    [row] = entries(0, DataCursor(), collected, assembled(kept), updates, None)
    assert row.state == "trained"


def written(folder: Path, *rows: tuple[int, str] | tuple[int, str, int] | tuple[int, str, int, int, str]) -> Path:
    lines = []
    for ordinal, state, *more in rows:
        step, epoch, problem = [*more, *(0, 0, f"p{ordinal}")[len(more) :]]
        lines.append({"ordinal": ordinal, "problem": problem, "epoch": epoch, "step": step, "state": state})
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_ledger_that_is_right(tmp_path):
    folder = written(tmp_path, (0, "trained"), (2, "carried"), (1, "filtered"), (2, "trained", 1), (3, "carried", 1))
    proof = check_ledger(folder, drawn=4)
    assert proof.wrong == ()
    assert (proof.drawn, proof.states) == (4, {"trained": 2, "filtered": 1, "carried": 1})
    assert check_ledger(tmp_path / "none").drawn == 0


WRONG = [
    ([(0, "trained"), (2, "trained")], None, "draw 1 is missing"),
    ([(0, "trained")], 2, "draw 1 is missing"),
    ([(0, "trained"), (1, "trained")], 1, "draw 1 was never made"),
    ([(0, "trained"), (0, "trained", 1)], None, "draw 0 ended more than once: trained, trained"),
    ([(0, "trained"), (0, "carried", 1)], None, "draw 0 ended more than once: trained, carried"),
    ([(0, "carried"), (0, "carried", 1)], None, "draw 0 ended more than once: carried, carried"),
    ([(0, "carried"), (0, "trained", 1), (0, "filtered", 1)], None, "draw 0 ended more than once"),
    ([(0, "eaten")], None, "draw 0 has unknown states: eaten"),
    ([(0, "carried", 2), (0, "trained", 1)], None, "draw 0 has decreasing steps"),
    ([(0, "carried", 0, 0, "a"), (0, "trained", 1, 0, "b")], None, "draw 0 has more than one problem"),
    (
        [(0, "trained", 0, 0, "a"), (1, "trained", 0, 1, "b"), (2, "trained", 0, 2, "a")],
        None,
        "the epochs have different",
    ),
    ([(0, "trained", 0, 0, "a"), (1, "trained", 0, 1, "b")], None, "the last epoch has problems that the others"),
]


@pytest.mark.parametrize(("rows", "drawn", "message"), WRONG)
def test_a_ledger_that_is_wrong_is_found_out(rows, drawn, message, tmp_path):
    wrong = check_ledger(written(tmp_path, *rows), drawn).wrong
    assert any(message in each for each in wrong), wrong
