"""Environments and tools given in Python, and what a config makes of them."""

import pytest

from proximo.environments.given import given_environment
from proximo.environments.kinds import MultiTurn, SingleTurn
from tests.environments.worlds import Broken, Counting, Lucky, add

HERE = "tests.environments.worlds"


def test_what_is_given_becomes_a_path():
    assert given_environment(None, (), None) is None
    assert given_environment(Counting, (), 4) == MultiTurn(f"{HERE}:Counting", max_turns=4)
    assert given_environment(Lucky(), (), None) == MultiTurn(f"{HERE}:Lucky")
    assert given_environment("a.py:B", (), None) == MultiTurn("a.py:B")
    assert given_environment(None, [add, "b.py:f"], None) == MultiTurn(tools=(f"{HERE}:add", "b.py:f"))
    assert given_environment(MultiTurn("a.py:B"), [add], 2) == MultiTurn("a.py:B", tools=(f"{HERE}:add",), max_turns=2)
    assert given_environment(SingleTurn(), (), None) == SingleTurn()
    made = given_environment(Broken("hang"), (), None)
    assert made == MultiTurn(f"{HERE}:Broken", {"how": "hang", "notes": []})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (SingleTurn(), (), 3),
            "environment is a SingleTurn, which has turns and tools of its own: leave max_turns out",
        ),
        ((None, (), 3), "max_turns is 3, but there is no environment and no tools"),
        ((7, (), None), "environment is 7: give a class with reset"),
        ((Counting(), (), None), "a Counting with replies, reward, seen, and each episode gets"),
        ((None, [lambda x: x], None), "tools has .*lambda.*which another process cannot find"),
    ],
)
def test_what_no_config_can_hold_is_refused(given, message):
    with pytest.raises(ValueError, match=message) as refusal:
        given_environment(*given)
    assert "\n" not in str(refusal.value)
