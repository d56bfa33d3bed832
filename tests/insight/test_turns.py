"""Episodes of several turns in lens, replay, report and the data of the page, on one that is made by hand."""

import json
import math

import pytest

from proximo.algorithms import GRPO
from proximo.insight.folder import RunFolder
from proximo.insight.lens.explanations import why
from proximo.insight.lens.lens import look
from proximo.insight.lens.replay import FIVE, chosen, compared, token_table
from proximo.insight.lens.turns import counted, place_in_words, read_turns, starts, turns_of_tokens
from proximo.insight.page import reader
from proximo.insight.report import gather, render, summary
from proximo.types import Turn
from tests.insight.page.browser import append
from tests.stored import Asked, Said, store

PIECES = ["add(1,", " 2)", "<end>", "<tool>", "3", "<tool>", "Error", "<end>", "it is ", "3", "<end>"]
TURNS = [
    Turn("assistant", "add(1, 2)", 3, 0.25),
    Turn("tool", "3", 8),
    Turn("tool", "Error", 8, failed="raised"),
    Turn("assistant", "it is 3", 11, 0.75),
]
COSTS = {"episode_seconds": 1.0, "episode_slowest": 0.5, "judge_requests": 7, "judge_prompt_tokens": 9_000}
LOST = [Turn("assistant", "hm", 2, math.nan, failed="step 1: timeout: 10 s")]


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> RunFolder:
    said = [Said(PIECES, 1.0, turns=TURNS), Said(["hm", "<end>"], 0.0, turns=LOST), Said(["it is 3"], 0.5)]
    prompt = ({"role": "system", "content": "You may call add."}, {"role": "user", "content": "1 + 2?"})
    run = store(tmp_path_factory.mktemp("runs") / "played", GRPO, [Asked(said, prompt=prompt)], step=1)
    append(run.path, "timings", {"step": 1, "rollout": 0.5, "update": 9.0, "episode_count": 4, **COSTS})
    return run


def test_turns_have_their_tokens_and_are_counted():
    assert starts(TURNS) == [0, 3, 3, 8]
    assert turns_of_tokens(TURNS, 11) == [0] * 3 + [1] * 5 + [3] * 3
    assert [place_in_words(TURNS, token) for token in (0, 7, 8)] == [
        "reply 1 of 2",
        "result of a tool to reply 1",
        "reply 2 of 2",
    ]
    assert place_in_words((), 0) == ""
    assert (counted(TURNS).replies, counted(TURNS).calls, counted(TURNS).failed) == (2, 2, 1)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '[{"role": "user", "text": "a", "end": 9}]',
        '[{"role": "user", "text": "a", "end": 2}, {"role": "user", "text": "a", "end": 1}]',
        '[{"role": "user", "text": 1, "end": 1}]',
        '[{"role": "user", "text": "a", "end": true}]',
    ],
)
def test_turns_that_no_run_writes_are_refused(text):
    with pytest.raises(ValueError, match="its turns do not fit its tokens"):
        read_turns([text], [3])


def test_a_stored_step_has_its_turns_and_conversation(played):
    step = played.step(1)
    assert list(step.turns[0]) == TURNS
    assert math.isnan(step.turns[1][0].reward)
    assert step.turns[2] == ()
    assert step.messages[0][1] == {"role": "user", "text": "1 + 2?"}
    assert step.pieces[0] == PIECES


def test_lens_and_replay_say_which_turn(played):
    step = played.step(1)
    seen = look(step, GRPO, played.config)
    assert why(step, seen, 0, 4) == "result of a tool to reply 1: it is input only, and not trained on"
    views = compared(step, played.config, chosen(played.config, FIVE[:1]))
    table = token_table(step, views).slice(0, 14)
    assert table["turn"].to_pylist() == [*turns_of_tokens(TURNS, 11), 0, 0, None]
    assert table["role"].to_pylist() == ["assistant"] * 3 + ["tool"] * 5 + ["assistant"] * 5 + [None]


def test_the_page_is_told_turns_and_marks_only_the_template_s_tokens(played):
    [told, lost, plain] = reader.group(played, {"step": "1", "group": "0"})["rows"]
    assert told["specials"] == [2, 3, 5, 7, 10]
    assert [(turn["role"], turn["start"], turn["end"], turn["reward"]) for turn in told["turns"]] == [
        ("assistant", 0, 3, 0.25),
        ("tool", 3, 8, None),
        ("tool", 3, 8, None),
        ("assistant", 8, 11, 0.75),
    ]
    assert [told["turns"][2]["failed"], lost["turns"][0]["failed"]] == ["raised", "step 1: timeout: 10 s"]
    assert plain["turns"] == []
    rows = reader.step(played, {"step": "1"})["rows"]
    assert [(row["length"], row["size"], row["replies"], row["failed"]) for row in rows] == [
        (6, 11, 2, 1),
        (2, 2, 1, 1),
        (1, 1, 0, 0),
    ]
    assert rows[2]["duplicate"] is None  # it ends as the first does, but begins differently
    assert reader.step(played, {"step": "1", "find": "add(1, 2)"})["matches"] == [0]
    assert reader.why(played, {"step": "1", "row": "0", "token": "9"})["turn"] == "reply 2 of 2"


def test_what_judges_and_episodes_cost_is_no_phase_of_a_step(played):
    assert gather(played).seconds == 9.5


def test_the_report_counts_turns_calls_failures_and_seconds(played):
    facts = gather(played)
    [told] = summary(facts)["episodes"]
    assert told == {
        "step": 1,
        "episodes": 2,
        "replies": 1.5,
        "most_replies": 2,
        "calls": 1.0,
        "failed": 1.0,
        "earned": [0.25, 0.75],
        "seconds": 0.25,
        "slowest": 0.5,
        "reasons": {"raised": 1, "step 1: timeout: 10 s": 1},
    }
    page = render(facts)
    assert "tool: Error" in page
    assert "1 × <bdi>step 1: timeout: 10 s</bdi>" in page
    json.dumps(told)
