"""Environments and servers of other libraries, unchanged; a test is skipped where its library is not installed."""

import json
from pathlib import Path

import pytest

from proximo.acting.adapters.trl import environment_of, started
from proximo.environments import MultiTurn, Starts
from proximo.environments.tool_calls import schema_of
from proximo.rewards.grading import Grading
from proximo.types import Problem
from tests.environments.chat_templates import chat_tokenizer
from tests.environments.scripted import played

GYM = "proximo.acting.adapters.gymnasium:Gymnasium"
ASKED = Problem("1", ({"role": "user", "content": "What?"},), "7")


@pytest.fixture(scope="module", autouse=True)
def workers():
    grading = Grading()
    with grading.active():
        yield grading
    grading.close()


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# gymnasium


def test_a_lake_of_gymnasium_is_crossed(workers):
    pytest.importorskip("gymnasium")
    arguments = {"name": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "is_slippery": False}
    task = Starts(GYM, arguments, "Reach G.")
    problems = [task.problem(index, "held_out", 0) for index in range(2)]
    [asked] = problems[0].prompt
    assert isinstance(asked, dict)
    assert asked["content"] == "Reach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert problems == [task.problem(index, "held_out", 5) for index in range(2)]
    way = ["swim", "down", "I go down", "right", "right", "DOWN", "right"]
    [(only,), _], _ = played(
        MultiTurn(GYM, arguments), chat_tokenizer("qwen"), lambda *at: way[at[2]], problems, samples=1, max_tokens=2000
    )
    assert not [str(each) for each in workers.failures.take()]
    assert only.turns[1].text == "Reply with one of left, down, right, up."
    assert "[F]" in only.turns[3].text
    assert (only.earned, len(only.turns)) == (1.0, 13)


def test_a_taxi_of_gymnasium_takes_numbers_and_pays_each_turn():
    known = pytest.importorskip("gymnasium").registry
    arguments = {"name": max(name for name in known if name.startswith("Taxi-"))}
    task = Starts(GYM, arguments, chat=False)
    problems = [task.problem(index, "train", 0) for index in range(3)]
    assert len({str(each.prompt) for each in problems}) == 3
    groups, _ = played(
        MultiTurn(GYM, arguments, max_turns=2), chat_tokenizer("qwen"), lambda *_: "action 0", problems, samples=1
    )
    assert [each.earned for (each,) in groups] == [-2.0] * 3


# MCP

TIME = """
import sys
from proximo.acting.adapters.mcp import tools_of
globals().update(tools_of(sys.executable, "-m", "mcp_server_time"))
"""


def test_tools_of_an_mcp_server_are_called(tmp_path: Path, workers):
    pytest.importorskip("mcp_server_time")
    file = tmp_path / "clock.py"
    file.write_text(TIME)
    environment = MultiTurn(tools=(f"{file}:convert_time", f"{file}:get_current_time"), seconds=60.0)
    assert schema_of(environment.tools[0])["function"]["parameters"]["required"][0] == "source_timezone"
    asks = {"source_timezone": "Europe/Berlin", "time": "12:30", "target_timezone": "Asia/Kolkata"}
    script = [called("convert_time", **asks), called("convert_time", time="1"), "17:00"]
    [siblings], sampler = played(
        environment, chat_tokenizer("qwen"), lambda *at: script[at[2]], [ASKED], samples=2, max_tokens=9000
    )
    assert not [str(each) for each in workers.failures.take()]
    for each in siblings:
        assert [turn.role for turn in each.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
        assert '"timezone": "Asia/Kolkata"' in each.turns[1].text
        assert "Error: RuntimeError: " in each.turns[3].text
    asked = chat_tokenizer("qwen").decode(list(sampler.asked[0].prompt_tokens))
    assert "Source IANA timezone name" in asked


# TRL's environment_factory


class Counter:
    """As TRL's users write them."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, **row: object) -> str | None:
        self.count = 0
        return f"\nCount to {row['goal']}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: by how much
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count == 5)


Game, _tools = environment_of(Counter)
increment = _tools["increment"]


def test_an_environment_for_trl_is_played(workers):
    here = "tests.environments.test_adapters"
    environment = MultiTurn(f"{here}:Game", tools=(f"{here}:increment",))
    function = schema_of(environment.tools[0])["function"]
    assert function["parameters"] == {
        "type": "object",
        "properties": {"step": {"type": "integer", "description": "by how much"}},
        "required": ["step"],
    }
    [row] = started(Counter, [{"prompt": [{"role": "user", "content": "Play."}], "goal": 5}])
    assert row["prompt"][-1]["content"] == "Play.\nCount to 5."
    problem = Problem("1", tuple(row["prompt"]), None, {"goal": 5})

    def say(key: int, sample: int, turn: int) -> str:
        return [called("increment", step=2), called("increment", step=3 - sample), "done"][turn]

    [siblings], _ = played(environment, chat_tokenizer("qwen"), say, [problem], max_tokens=2000)
    assert not [str(each) for each in workers.failures.take()]
    assert [each.earned for each in siblings] == [1.0, 0.0]
    assert [each.turns[3].text for each in siblings] == ["5", "4"]
    with pytest.raises(ValueError, match="give started"):
        Game().reset({"prompt": "Play.", "goal": 5})


# verifiers


def test_a_game_that_ships_with_verifiers_is_played(workers, monkeypatch, tmp_path):
    """Hangman of textarena, by the environment that verifiers has for it; its list of words, which it would download,
    is one of ours."""
    pytest.importorskip("verifiers.v1")
    pytest.importorskip("textarena")
    from proximo.acting.adapters.verifiers import rows

    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text("apple\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    environment = MultiTurn(
        "proximo.acting.adapters.verifiers:Verifiers", {"taskset": "textarena", "game": "Hangman-v0"}, seconds=120.0
    )
    [row] = rows("textarena", 1, game="Hangman-v0")
    problem = Problem("1", tuple(row["prompt"]), None, {"task": row["task"]})

    def say(key: int, sample: int, turn: int) -> str:
        return ["I try [P]", "[APPLE]" if sample == 0 else "[X]"][min(turn, 1)]

    [siblings], _ = played(environment, chat_tokenizer("qwen"), say, [problem], max_tokens=20_000)
    assert not [str(each) for each in workers.failures.take()]
    assert [len(each.turns) for each in siblings] == [3, 7]  # the second says the same twice, which ends it
    assert "P" in siblings[0].turns[1].text
    assert siblings[0].earned == 1.0
    assert (siblings[1].earned or 0.0) < 1.0
