"""Episodes of several turns: exact tokens, limits, tools, and environments that fail."""

import json
import math
import re
import subprocess
import sys
import threading
from contextvars import copy_context
from dataclasses import replace
from itertools import compress
from unittest.mock import ANY

import pytest

from proximo.config import toml
from proximo.environments import episode_pool
from proximo.environments.episodes import Episode
from proximo.environments.instance import Instance, allowed
from proximo.environments.kinds import MultiTurn
from proximo.environments.protocol import Question
from proximo.environments.tool_calls import HERMES, call_format, schema_of
from proximo.models import problem_tokens, tiny_tokenizer
from proximo.processes.failures import GraderFailed
from proximo.rewards.grading import Grading
from proximo.rl.config import RunConfig
from proximo.types import Completion, Problem, Request, Turn
from tests.environments.chat_templates import TEMPLATES, chat_tokenizer
from tests.environments.scripted import played

TOKENIZER = tiny_tokenizer()
HERE = "tests.environments.worlds"
COUNTING = MultiTurn(f"{HERE}:Counting")
ASKED = [Problem("a", "3+4=", "7"), Problem("b", "5+5=", "10")]
TALKED = [Problem("c", ({"role": "user", "content": "What is 3+4?"},), "7")]


def say(key: int, sample: int, turn: int) -> str:
    return f"{key}{sample}{turn}"


@pytest.fixture(scope="module", autouse=True)
def workers():
    """One process for all tests of an environment."""
    grading = Grading()
    with grading.active():
        yield grading
    grading.close()


def failures(grading: Grading) -> str:
    return "; ".join(map(str, grading.failures.take()))


def test_a_config_holds_it():
    config = RunConfig(environment=replace(COUNTING, arguments={"replies": 2, "reward": 0.5}, tools=(f"{HERE}:add",)))
    assert toml.loads(toml.dumps(config), RunConfig) == config


def test_an_episode_is_its_turns_in_order():
    [(first, second), _], sampler = played(COUNTING, TOKENIZER, say, ASKED)
    end = TOKENIZER.eos_token_id
    said = [[*TOKENIZER.encode(f"00{turn}", add_special_tokens=False), end] for turn in range(3)]
    answers = [TOKENIZER.encode(f"{count}:00+", add_special_tokens=False) for count in (1, 2)]
    assert first.tokens == (*said[0], *answers[0], *said[1], *answers[1], *said[2])
    assert [len(list(each)) for each in (first.tokens, first.logprobs, first.sampled, first.entropies)] == [22] * 4
    assert first.sampled == (True,) * 4 + (False,) * 5 + (True,) * 4 + (False,) * 5 + (True,) * 4
    assert all(value == 0 for value in compress(first.logprobs, [not each for each in first.sampled]))
    assert [(turn.role, turn.text, turn.end, turn.reward) for turn in first.turns] == [
        ("assistant", "000", 4, 0.25),
        ("user", "1:00+", 9, None),
        ("assistant", "001", 13, 0.25),
        ("user", "2:00+", 18, None),
        ("assistant", "002", 22, 1.0),
    ]
    assert (first.earned, first.finish, first.text, first.version) == (1.5, "stop", "002", 3)
    assert second.turns[1].text == "1:01+"
    # Each turn asks with what was sampled, as it was sampled, and with the room that is left.
    later = [request for request in sampler.asked if request.key == 0 and request.first_sample == 0]
    prompt = problem_tokens(TOKENIZER, ASKED[0])
    assert [request.prompt_tokens for request in later] == [
        prompt,
        prompt + first.tokens[:9],
        prompt + first.tokens[:18],
    ]
    assert [(request.turn, request.max_tokens) for request in later] == [(0, None), (1, 391), (2, 382)]


def test_an_episode_over_an_update_keeps_the_version_of_each_token():
    question = Question(Problem("p", "ask", None), Request(0, (1, 2), 1))
    episode = Episode(question, group=0, sample=0, max_tokens=20)
    episode.reply(Completion((3, 4), (-1.0, -1.0), "a", "stop", version=5), None)
    episode.answer((7,), [Turn("user", "more", 0)])
    episode.reply(Completion((5, 6), (-1.0, -1.0), "b", "stop", version=5, versions=(5, 6)), None)
    episode.finish = "stop"
    whole = episode.completion()
    assert (whole.version, whole.versions) == (5, (5, 5, 5, 5, 6))
    once = Episode(question, group=0, sample=0, max_tokens=20)
    once.reply(Completion((3,), (-1.0,), "a", "stop", version=5), None)
    once.finish = "stop"
    assert (once.completion().version, once.completion().versions) == (5, ())


@pytest.mark.parametrize(
    ("change", "max_tokens", "length", "earned", "turns"),
    [
        ({"max_turns": 2}, 400, 13, 0.5, 3),
        ({}, 13, 13, 0.5, 3),  # the answer to the second reply leaves no room for a third
        ({}, 12, 12, 0.25, 3),  # the second reply is cut, and the environment does not see it
        ({}, 3, 3, 0.0, 1),
        ({"max_turn_tokens": 2}, 400, 16, 1.5, 5),
    ],
)
def test_limits_cut_an_episode(change, max_tokens, length, earned, turns):
    [(first, _), _], _ = played(replace(COUNTING, **change), TOKENIZER, say, ASKED, max_tokens=max_tokens)
    assert len(first.tokens) == length <= max_tokens
    assert (first.earned, len(first.turns)) == (earned, turns)
    assert first.finish == ("stop" if earned == 1.5 else "length")


def test_siblings_begin_with_the_same_start_in_processes_of_their_own():
    environment = MultiTurn(f"{HERE}:Lucky", max_turns=3)
    groups, _ = played(environment, TOKENIZER, say, ASKED)
    spoken = [[each.turns[1].text.split() + each.turns[3].text.split() for each in siblings] for siblings in groups]
    starts = [{text[0] for text in siblings} for siblings in spoken]
    assert [len(each) for each in starts] == [1, 1]
    assert starts[0] != starts[1]
    assert len({text[1] for siblings in spoken for text in siblings}) == 4  # later draws are an episode's own
    assert len({text[2] for siblings in spoken for text in siblings}) == 4
    assert all(text[2] == text[5] for siblings in spoken for text in siblings)
    again, _ = played(environment, TOKENIZER, say, ASKED)
    other, _ = played(environment, TOKENIZER, say, ASKED, step=1)
    draws = [[turn.text.split()[:2] for turn in groups[0][0].turns[1::2]] for groups in (groups, again, other)]
    assert draws[0] == draws[1] != draws[2]


def test_what_reset_opens_belongs_to_one_sibling(workers):
    environment = MultiTurn(f"{HERE}:Live", max_turns=3, seconds=5.0)
    [siblings], _ = played(environment, TOKENIZER, say, ASKED[:1], samples=4)
    assert not failures(workers)
    assert [[turn.text for turn in each.turns] for each in siblings] == [
        [f"0{sample}0", f"0{sample}0", f"0{sample}1", f"0{sample}1", f"0{sample}2"] for sample in range(4)
    ]


@pytest.mark.slow("waits for environments that hang")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "raise",
            r"Broken: 2 completions unscored \(ConnectionError\): step 3: ConnectionError: turn 3 \(worlds.py, line \d",
        ),
        ("hang", r"\(time\): step 3: no answer within 1 s"),
        ("exit", r"\(time\): step 3: no answer within 1 s, or its process died"),
        ("junk", r"\(TypeError\): step 3: TypeError: step returned 'a text': return an Observation"),
        ("nan", r"\(ValueError\): step 3: ValueError: a reward of nan"),
        ("reset", r"\(RuntimeError\): reset: RuntimeError: no start"),
        ("start", r"\(ValueError\): reset: ValueError: reset returned 'another start'"),
    ],
)
def test_an_environment_that_fails_leaves_its_episode_unscored(workers, how, message):
    environment = MultiTurn(f"{HERE}:Broken", {"how": how}, seconds=1.0)
    [siblings], _ = played(environment, TOKENIZER, say, ASKED[:1])
    assert all(math.isnan(each.earned or 0.0) and each.finish == "stop" for each in siblings)
    assert re.search(message, failures(workers))
    assert siblings[0].turns[-1].failed
    assert len(siblings[0].turns) == (1 if how in ("reset", "start") else 5)


@pytest.mark.parametrize(("declared", "lowest"), [(None, 0.0), ((-1.0, 1.0), -1.0)])
def test_an_error_that_a_reply_causes_is_the_lowest_reward(workers, declared, lowest):
    replies = [["3", "3", "x"], ["3", "3", "3"], ["", "", ""], ["9", "9", "9"]]
    environment = MultiTurn(f"{HERE}:Counter", max_turns=3, reward_range=declared)
    [siblings], _ = played(environment, TOKENIZER, lambda _, sample, turn: replies[sample][turn], ASKED[:1], samples=4)
    failed, right, at_once, cut = siblings
    assert (right.earned, cut.earned) == (pytest.approx(1.3), pytest.approx(0.6))
    assert failed.earned == at_once.earned == lowest  # to the last bit: siblings that failed are equal
    assert [each.finish for each in siblings] == ["stop", "stop", "stop", "length"]
    assert [turn.failed for turn in failed.turns][:-1] == [""] * 4
    assert "ValueError: invalid literal for int()" in failed.turns[-1].failed
    assert failures(workers) == ""
    [told] = map(str, workers.failed.take())
    assert re.search(r"Counter: 2 episodes failed, with the lowest reward \(ValueError\): step \d: .*worlds.py", told)


def test_an_episode_that_had_earned_less_than_the_lowest_keeps_it(workers):
    environment = MultiTurn(f"{HERE}:Counter", max_turns=3, reward_range=(0.5, 1.0))
    [[failed]], _ = played(environment, TOKENIZER, lambda _, sample, turn: "33x"[turn], ASKED[:1], samples=1)
    assert failed.earned == pytest.approx(0.3)
    assert len(workers.failed.take()) == 1


@pytest.mark.parametrize(("declared", "lowest"), [(None, -2.0), ((-1.0, 1.0), -1.0)])
def test_a_failed_episode_is_no_better_than_its_worst_sibling(workers, declared, lowest):
    """Where wrong answers cost something and nobody has said how much, a crash would be the way out."""
    environment = MultiTurn(f"{HERE}:Counter", max_turns=3, reward_range=declared)
    replies = [["x"], ["wrong"], ["exit"], ["graph"], ["1"]]
    [siblings], _ = played(environment, TOKENIZER, lambda _, sample, turn: replies[sample][turn], ASKED[:1], samples=5)
    assert [each.earned for each in siblings] == [lowest, -2.0, lowest, lowest, 1.0]
    assert failures(workers) == ""
    told = " ".join(map(str, workers.failed.take()))
    assert all(kind in told for kind in ("ValueError", "SystemExit", "NetworkXNoPath"))


@pytest.mark.parametrize("reply", ["own", "network", "caused", "missing"])
def test_an_error_of_the_environment_itself_is_no_score(workers, reply):
    environment = MultiTurn(f"{HERE}:Counter", max_turns=3, reward_range=(-1.0, 1.0))
    [siblings], _ = played(environment, TOKENIZER, lambda key, sample, turn: reply, ASKED[:1])
    assert all(math.isnan(each.earned or 0.0) for each in siblings)
    assert "2 completions unscored" in failures(workers)
    assert workers.failed.take() == []


def test_worlds_of_this_process_fail_alike():
    def refuses(message):
        raise KeyError(message)

    environment = type("Refuses", (), {"step": lambda self, reply: refuses(reply)})()
    instance = Instance(lambda: environment, {}, lambda result: result, 100)
    found = instance.answer({"do": "step", "reply": "x"})
    assert found == {"done": True, "error": "KeyError", "message": ANY}


def test_each_call_of_a_reply_has_random_numbers_of_its_own():
    call = '<tool_call>{"name": "roll", "arguments": {}}</tool_call>'

    def rolled() -> list[str]:
        environment, tokenizer = MultiTurn(tools=(f"{HERE}:roll",)), chat_tokenizer("qwen")
        [siblings], _ = played(environment, tokenizer, lambda *place: "done" if place[2] else call * 4, TALKED)
        return [turn.text for each in siblings for turn in each.turns if turn.role == "tool"]

    first = rolled()
    assert len(first) == len(set(first)) == 8
    assert first == rolled()


def test_what_episodes_need_is_imported_once_before_them():
    environment = MultiTurn(f"{HERE}:Prepared", {"label": "x"}, max_turns=2)
    found, _ = played(environment, TOKENIZER, say, ASKED, samples=3)
    [text] = {each.turns[1].text for siblings in found for each in siblings}
    parent = text.rpartition(" ")[2]
    assert text == f"['x {parent}'] {parent}"


@pytest.mark.slow("waits for environments that hang")
def test_one_episode_that_hangs_takes_no_other_with_it(workers):
    environment = MultiTurn(f"{HERE}:Picky", seconds=1.0)
    [siblings], _ = played(environment, TOKENIZER, lambda key, sample, turn: "ab"[sample == 1], ASKED[:1], samples=4)
    assert [math.isnan(each.earned or 0.0) for each in siblings] == [False, True, False, False]
    assert [each.earned for each in siblings if each.turns[-1].failed == ""] == [1.0] * 3
    failures(workers)


@pytest.mark.slow("waits for environments that hang")
def test_calls_that_share_a_core_have_the_time_of_all_of_them(workers, monkeypatch):
    monkeypatch.setattr(episode_pool, "cores", lambda: 1)
    [siblings], _ = played(MultiTurn(f"{HERE}:Slow", seconds=1.0), TOKENIZER, say, ASKED[:1], samples=4)
    assert not failures(workers)
    assert [each.earned for each in siblings] == [1.0] * 4
    assert [allowed(1.5, calls, 2) for calls in (1, 2, 3, 30)] == [1.5, 1.5, 3.0, 22.5]
    assert allowed(86_400, 1024, 1) * 1000 < 2**31


def test_rounds_that_are_played_at_the_same_time_do_not_wait_for_one_another(workers, tmp_path):
    environment, found = MultiTurn(f"{HERE}:Meeting", {"folder": str(tmp_path)}), []

    def play(reply: str) -> None:
        [(only,)], _ = played(environment, TOKENIZER, lambda *_: reply, ASKED[:1], samples=1)
        found.append(only.earned)

    threads = [threading.Thread(target=copy_context().run, args=(play, reply), daemon=True) for reply in "01"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert found == [1.0, 1.0]


def test_what_one_episode_prints_is_no_other_ones_concern(workers):
    [siblings], _ = played(MultiTurn(f"{HERE}:Loud"), TOKENIZER, say, ASKED[:1], samples=2)
    assert [each.earned for each in siblings] == [1.0, 1.0]
    assert not failures(workers)


@pytest.mark.slow("waits for processes to be killed")
def test_a_megabyte_is_cut_and_what_is_forked_is_killed(workers):
    environment = MultiTurn(f"{HERE}:Broken", {"how": "megabyte"}, max_answer_tokens=20)
    [(first, _)], _ = played(environment, TOKENIZER, say, ASKED[:1])
    assert first.turns[5].text == "x" * 20 + " ... (cut)"
    assert first.earned == 1.0
    played(MultiTurn(f"{HERE}:Broken", {"how": "fork"}, seconds=2.0), TOKENIZER, say, ASKED[:1])
    workers.close()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in left.splitlines() if "environments/worker.py" in line and str(sys.executable) in line]
    assert not failures(workers)


def test_an_environment_that_cannot_be_loaded_ends_the_run():
    with pytest.raises(GraderFailed, match=r"environment.path is .*:Missing'.*no class or function Mis"):
        played(MultiTurn(f"{HERE}:Missing"), TOKENIZER, say, ASKED[:1])


# Tools

TOOLS = MultiTurn(tools=(f"{HERE}:add", f"{HERE}:read", f"{HERE}:sleep"), seconds=1.0)


def written(family: str, tool: str, **arguments: object) -> str:
    body = f'{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}'
    return body.replace("arguments", "parameters") if family == "llama" else f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_model_calls_tools_in_the_format_of_its_template(family, workers):
    tokenizer = chat_tokenizer(family)
    script = [written(family, "add", first=3, second=4), written(family, "add", first="x"), "It is 7"]
    [(first, _)], sampler = played(TOOLS, tokenizer, lambda key, sample, turn: script[turn], TALKED, max_tokens=2000)
    assert [turn.role for turn in first.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [turn.text for turn in first.turns[1::2]] == ["7", "Error: TypeError: missing a required argument: 'second'"]
    assert [turn.failed for turn in first.turns] == ["", "", "", "TypeError", ""]
    assert (first.text, first.earned, first.finish) == ("It is 7", None, "stop")
    asked = tokenizer.decode(list(sampler.asked[0].prompt_tokens))
    assert '"name": "add"' in asked
    assert not failures(workers)


@pytest.mark.slow("waits for environments that hang")
@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<tool_call>{add</tool_call>", "Error: the call is not JSON"),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "Error: there is no tool 'sub', only add"),
        ('<tool_call>["add"]</tool_call>', 'Error: a call is {"name"'),
        (written("qwen", "read", name="/no/such/file"), "Error: FileNotFoundError"),
        (written("qwen", "sleep", seconds=9), "Error: no answer within 1 s"),
        (written("qwen", "add", first=1, second=1) * 2, "2"),
    ],
)
def test_what_goes_wrong_with_a_call_is_told_to_the_model(workers, reply, answer):
    tokenizer, script = chat_tokenizer("qwen"), [reply, written("qwen", "add", first=2, second=2), "done"]
    [(only,)], _ = played(TOOLS, tokenizer, lambda *at: script[at[2]], TALKED, samples=1, max_tokens=2000)
    tools = [turn.text for turn in only.turns if turn.role == "tool"]
    assert tools[0].startswith(answer)
    assert tools[-1] == "4"  # also after a process had to be killed
    assert only.finish == "stop"
    failures(workers)


def test_formats_are_read_from_templates():
    assert call_format(chat_tokenizer("qwen")) == HERMES == call_format(chat_tokenizer("smollm"))
    llama = call_format(chat_tokenizer("llama"))
    assert (llama.opening, llama.arguments) == ("", "parameters")
    assert llama.calls('{"name": "add", "parameters": {"a": 1}}', ["add"])[0].arguments == {"a": 1}
    assert not llama.calls("It is {7}", ["add"])
    assert schema_of(f"{HERE}:add")["function"]["parameters"]["required"] == ["first", "second"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": ("a.py:go", "b.py:go")}, "two functions called 'go'"),
        ({}, "environment.path is empty and so is environment.tools"),
        ({"path": "worlds.py"}, "environment.path has 'worlds.py': give package.module:Name or file.py:Name"),
        ({"tools": ("f",)}, "environment.tools has 'f'"),
        ({"tools": ("a:f",), "arguments": {"a": 1}}, "environment.arguments is .*, but environment.path is empty"),
        ({"path": "a:B", "max_turns": 0}, "environment.max_turns is 0"),
        ({"path": "a:B", "seconds": 0.0}, "environment.seconds is 0"),
    ],
)
def test_mistakes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MultiTurn(**fields).check()


def test_tools_need_a_conversation_and_a_docstring():
    with pytest.raises(ValueError, match="the prompt of a is a text: tools need a conversation"):
        TOOLS.prepared(ASKED[0], TOKENIZER)
    with pytest.raises(ValueError, match="environment.tools has .*:say.*docstring"):
        schema_of("tests.environments.test_multi_turn:say")
