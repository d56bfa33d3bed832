"""The journeys of new users: what counts as reached, and the page. `make journeys` goes through them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import proximo_lab.journeys.__main__ as script
from proximo_lab.journeys.page import TITLES, page
from proximo_lab.journeys.user import Goal, User
from tests import ROOT


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(1, tmp_path)


def test_a_goal_is_reached_with_what_is_excellent_or_less(user: User, capsys):
    with user.wants("one command and a line", lines=1) as goal:
        goal.writes("a.py", "import json\n\nprint(7)\n")
        goal.sees(goal.types("echo seen 7").out, r"seen (\d)")
    with user.wants("too many commands") as goal:
        goal.types("true")
        goal.types("true")
    with user.wants("too many lines") as goal:
        goal.writes("b.py", "a = 1\n")
    assert [(each.typed, each.written, each.is_reached) for each in user.goals] == [
        (1, 1, True), (2, 0, False), (0, 1, False)
    ]  # fmt: skip
    assert user.goals[0].seen == ["7"]


@pytest.mark.parametrize(
    ("command", "code", "pattern", "left"),
    [
        ("exit 3", 0, "", "exit 3: exit 3: "),
        ("exit 0", 2, "", "exit 0: exit 0: "),
        ("echo a", 0, "b", "does not see 'b' in 'a\\n'"),
    ],
)
def test_a_goal_is_left_where_a_command_ends_otherwise_or_nothing_is_seen(
    user: User, command: str, code: int, pattern: str, left: str, capsys
):
    with user.wants("something") as goal:
        goal.sees(goal.types(command, code).out, pattern)
    assert not user.goals[0].is_reached
    assert user.goals[0].left == left


def seen(goals: list[Goal]) -> dict[str, Any]:
    return {"made": "One run.", "journeys": {"7": [asdict(goal) for goal in goals]}}


def failing(user: User) -> None:
    with user.wants("something"):
        user.run("true")
    user.run("exit 3")


def reaching(user: User) -> None:
    with user.wants("something") as goal:
        goal.types("true")


@pytest.mark.parametrize("numbers", [[], [7, 9]])
def test_a_journey_that_fails_is_named_at_the_end_and_loses_no_other(numbers, tmp_path: Path, monkeypatch, capsys):
    """Only a whole run writes the page, so that it is from one run."""
    (tmp_path / "docs").mkdir()
    places = {
        "ROOT": tmp_path,
        "FOLDER": tmp_path / "made",
        "RESULTS": tmp_path / "x.json",
        "PAGE": tmp_path / "docs/x",
    }
    for name, place in places.items():
        monkeypatch.setattr(script, name, place)
    monkeypatch.setattr(script, "install", lambda: None)
    monkeypatch.setattr(script, "JOURNEYS", {7: failing, 9: reaching})
    assert script.main(numbers) == 1
    printed = capsys.readouterr().out
    last = printed.splitlines()[-2:]
    assert last[0].startswith("journeys: LEFT 7, the rest of the journey: ended early: exit 3: exit 3")
    assert last[1] == "journeys: 2 of 3 goals reached"
    assert (tmp_path / "x.json").exists() == (tmp_path / "docs/x").exists() == (not numbers)
    kept = [json.loads((tmp_path / "made" / f"journey-{number}.json").read_text()) for number in (7, 9)]
    assert [len(each) for each in kept] == [2, 1]
    if not numbers:
        assert json.loads((tmp_path / "x.json").read_text())["journeys"] == {"7": kept[0], "9": kept[1]}
        assert (tmp_path / "docs/x").read_text() in printed


def test_the_page_has_what_was_seen_and_what_is_left():
    goals = [
        Goal(7, "a | b", 1, 0, typed=1, seen=["x", "y"]),
        Goal(7, "c", 1, 2, typed=3, written=2),
        Goal(7, "d", 1, 0, typed=1, left="does not see it"),
    ]
    text = page(seen(goals))
    assert "\nOne run.\n" in text
    assert "| a \\| b | 1 command | 1 command | x; y |" in text
    assert "| c | 1 command, 2 lines | 3 commands, 2 lines | **left**: took 3 commands, 2 lines |" in text
    assert "- 7, d: does not see it\n" in text
    assert "What is left" not in page(seen(goals[:1]))


def test_the_page_in_the_documentation_is_that_of_the_results():
    results = json.loads((ROOT / "lab" / "proximo_lab" / "journeys" / "results.json").read_text())
    assert (ROOT / "docs" / "journeys.md").read_text() == page(results)
    assert list(script.JOURNEYS) == list(TITLES) == sorted(map(int, results["journeys"]))
