"""The line of a step."""

import pytest

from proximo.rl.progress import summary

STEP = {"outcome": 0.5, "length": 123.4, "entropy": 0.7264, "clip_low": 0.0, "clip_high": 0.0, "gate": 1.0}
STEP |= {"gradient_norm": 0.92, "dead_groups": 0.25, "learning_rate": 1e-6}
REST = "length 123.4  entropy 0.726  norm 0.92  no-signal groups 25%  lr 1e-06"


def test_a_step_s_line_leaves_room_for_its_number_and_speed():
    assert summary(STEP) == f"task score 0.500  {REST}"
    assert len(summary(STEP | {"dead_groups": 0.0})) <= 120 - len("step 100/1000    1,068 tokens/s  10.7 s  2 h left")


def test_own_metrics_and_several_parts_of_a_reward_are_in_the_line():
    parts = {"rewards/correct": 0.25, "rewards/brief": -0.125}
    assert summary(STEP | parts) == f"task score 0.500  correct 0.25  brief -0.125  {REST}"
    assert summary(STEP | {"rewards/correct": 0.25}) == summary(STEP)  # the whole reward
    own = {"user/a_very_long_name_of_mine": 3.0, "user/\x1b[31m\nred": 1.0, "user/": 2.0}
    shown = summary(STEP | parts | own)
    assert shown == f"task score 0.500  a_very_long… 3  \\x1b[31m red 1   2  {REST}"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"clip_low": 0.01, "clip_high": 0.002, "gate": 0.99}, "clipped low 1.0% high 0.2%"),
        ({"gate": 0.9}, "gradient kept 90.0%"),
    ],
)
def test_what_a_gate_takes_is_shown_where_it_takes_something(changes: dict[str, float], shown: str):
    assert summary(STEP | changes) == f"task score 0.500  {REST.replace('norm', f'{shown}  norm')}"
