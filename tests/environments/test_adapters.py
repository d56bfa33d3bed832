"""Environments and servers of other libraries, unchanged; a test is skipped where its library is not installed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proximo.environments.adapters.mcp import tools_of
from proximo.environments.adapters.trl import SEED, environment_of, started
from proximo.environments.kinds import MultiTurn, Starts
from proximo.environments.tool_calls import schema_of
from proximo.rewards.grading import Grading
from proximo.types import Problem
from tests.environments.chat_templates import chat_tokenizer
from tests.environments.scripted import played

GYM = "proximo.environments.adapters.gymnasium:Gymnasium"
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


# verifiers, by a stand-in

STAND_IN = {
    "verifiers/__init__.py": "",
    "verifiers/v1/utils/__init__.py": "",
    "verifiers/v1/__init__.py": """
import os, pathlib
with open(os.environ["IMPORTS"], "a") as file:
    file.write("verifiers\\n")

class EnvInfo:
    def __init__(self, id): pass

class Episode:
    def __init__(self, env, task): self.traces = []
""",
    "verifiers/v1/utils/loaders.py": """
import importlib, types
from verifiers.v1.agent import Segment

class Environment:
    _agent_specs, config = {"agent": None}, types.SimpleNamespace(env_id="e")
    def __init__(self, taskset): self.taskset = taskset
    async def setup(self, agents): pass
    async def finalize(self, task, episode): pass
    async def run(self, task, agents): await agents.agent.run(task)

def resolve_env_config(given):
    return importlib.import_module(given["taskset"]["id"])

def load_environment(config):
    return Environment(config.tasks())
""",
    "verifiers/v1/trace.py": """
class TraceTask:
    def __init__(self, type, data, key, hash): pass

class AgentInfo(TraceTask):
    def __init__(self, config, name, trainable): pass

class Trace:
    def __init__(self, task, agent): self.reward = 0.0
""",
    "verifiers/v1/types.py": """
class AssistantMessage:
    role = "assistant"
    def __init__(self, content): self.content = content

class Response:
    def __init__(self, id, created, model, message, finish_reason): self.message = message

def content_text(content): return content
""",
    "verifiers/v1/dialects.py": "def parse_message(each): return each",
    "verifiers/v1/agent.py": "class Segment:\n    def __init__(self, messages): self.messages = messages",
    "verifiers/v1/graph.py": """
class Turn:
    def __init__(self, trace): self.trace = trace
    def commit(self, response): self.trace.reward = float(response.message.content == "7")

def prepare_turn(trace, messages): return Turn(trace)
""",
    "their_tasks.py": """
import os, types
with open(os.environ["IMPORTS"], "a") as file:
    file.write("tasks\\n")

class Task:
    key, hash, data = "k", "h", types.SimpleNamespace(system_prompt=None, prompt="What?")
    async def score(self, trace): pass

def tasks(): return [Task()]
""",
}


def test_verifiers_is_imported_once_and_not_in_every_episode(tmp_path, monkeypatch):
    for name, text in STAND_IN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IMPORTS", str(tmp_path / "imports"))
    environment = MultiTurn("proximo.environments.adapters.verifiers:Verifiers", {"taskset": "their_tasks"})
    problems = [Problem(str(number), ASKED.prompt, None, {"task": 0}) for number in range(2)]
    with Grading().active() as grading:
        found, _ = played(
            environment, chat_tokenizer("qwen"), lambda _, sample, turn: "77x7"[sample], problems, samples=4
        )
        failed = [*grading.failures.take(), *grading.failed.take()]
        grading.close()
    assert [str(each) for each in failed] == []
    assert [each.earned for siblings in found for each in siblings] == [1.0, 1.0, 0.0, 1.0] * 2
    assert (tmp_path / "imports").read_text().split() == ["verifiers", "tasks"]


# MCP

TIME = """
import sys
from proximo.environments.adapters.mcp import tools_of
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


SERVER = """
import json
import sys

TAKES = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add.", "inputSchema": TAKES}
for line in sys.stdin:
    asked = json.loads(line)
    name, given = asked["method"], asked.get("params", {})
    if name == "initialize":
        result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "sums", "version": "1"}
    elif name == "tools/list":
        result = {"tools": [ADD]}
    else:
        wrong = "a" not in given.get("arguments", {})
        text = "give a" if wrong else str(given["arguments"]["a"] + 1)
        result = {"content": [{"type": "text", "text": text}], "isError": wrong}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def test_what_an_mcp_server_sends_is_read_by_the_protocols_names(tmp_path: Path):
    """With mcp 1 and with mcp 2, whose attributes are called otherwise."""
    pytest.importorskip("mcp")
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    [(name, add)] = tools_of(sys.executable, str(file)).items()
    assert (name, add.__name__, vars(add)["schema"]["function"]["parameters"]["type"]) == ("add", "add", "object")
    assert add(a=4) == "5"
    with pytest.raises(RuntimeError, match="give a"):
        add()


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


@pytest.mark.slow("starts environments that import much")
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


class Increments:
    """Draws its task by itself, as the class does that begins TRL's documentation of environments."""

    def reset(self, **_: object) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 1000)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def add(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: by how much
        """
        self.counter += step
        return self.counter


Drawing, _adding = environment_of(Increments)
add = _adding["add"]


@pytest.mark.slow("starts environments that import much")
def test_a_class_for_trl_that_draws_its_task_draws_the_same_for_siblings(workers):
    here = "tests.environments.test_adapters"
    rows = started(Increments, 3)
    assert rows == started(Increments, 3)
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert len(set(asked)) == 3
    wanted = [int(text.rstrip(".").rpartition(" ")[2]) for text in asked]
    problems = [Problem(f"{n}", tuple(row["prompt"]), None, {SEED: row[SEED]}) for n, row in enumerate(rows)]
    environment = MultiTurn(f"{here}:Drawing", tools=(f"{here}:add",))

    def say(key: int, sample: int, turn: int) -> str:
        return [called("add", step=wanted[key] + sample), "done"][turn]

    groups, _ = played(environment, chat_tokenizer("qwen"), say, problems, max_tokens=2000)
    assert not [str(each) for each in workers.failures.take()]
    assert [[each.earned for each in siblings] for siblings in groups] == [[1.0, 0.0]] * 3


# OpenEnv

ECHO = """
import sys
sys.path.insert(0, {folder!r})
import my_env.server.app  # once: episodes fork
from proximo.environments.adapters.openenv import OpenEnv
"""


@pytest.mark.scale
def test_an_environment_that_openenv_makes_is_played(tmp_path: Path, workers):
    """The one of `openenv init`, unchanged: it echoes messages, and rewards their length. Its server allows one session
    at a time, so that each episode has a server of its own."""
    pytest.importorskip("openenv.core")
    made = [sys.executable, "-m", "openenv.cli", "init", "my_env"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    file = tmp_path / "echo.py"
    file.write_text(ECHO.format(folder=str(tmp_path)))
    arguments = {"app": "my_env.server.app:app", "shown": "echoed_message"}
    task = Starts(f"{file}:OpenEnv", arguments, chat=False)
    problem = task.problem(0, "train", 0)
    assert problem.prompt == "My Env environment ready!"
    [siblings], _ = played(
        MultiTurn(f"{file}:OpenEnv", arguments, max_turns=2, seconds=120.0),
        chat_tokenizer("qwen"),
        lambda key, sample, turn: "ab" * (1 + sample),
        [problem],
    )
    assert not [str(each) for each in workers.failures.take()]
    assert [each.turns[1].text for each in siblings] == ["ab", "abab"]
    assert [each.earned for each in siblings] == [pytest.approx(0.4), pytest.approx(0.8)]


def test_a_field_of_an_observation_that_is_not_there_is_named():
    pytest.importorskip("openenv.core")
    from proximo.environments.adapters.openenv import OpenEnv

    with pytest.raises(ValueError, match="give the address of a server, or an app"):
        OpenEnv()
    seen = {"messages": [{"content": "a"}, {"content": "b"}], "done": False}
    assert OpenEnv("http://127.0.0.1:9", shown="messages.-1.content")._text(seen) == "b"
    for shown, reason in (("prompt", "has messages, done"), ("messages.5", "has 2 entries"), ("done.x", "is 'False'")):
        with pytest.raises(ValueError, match=reason):
            OpenEnv("http://127.0.0.1:9", shown=shown)._text(seen)


# verifiers


@pytest.fixture
def word_list(monkeypatch, tmp_path) -> Path:
    """In the place of the list of words that textarena would download."""
    pytest.importorskip("verifiers.v1")
    pytest.importorskip("textarena")
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text("apple\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    return tmp_path


def guesses(key: int, sample: int, turn: int) -> str:
    return ["I try [P]", "[APPLE]" if sample == 0 else "[X]"][min(turn, 1)]


def test_a_game_that_ships_with_verifiers_is_played(workers, word_list):
    """Hangman of textarena, by the environment that verifiers has for it."""
    from proximo.environments.adapters.verifiers import rows

    environment = MultiTurn(
        "proximo.environments.adapters.verifiers:Verifiers",
        {"taskset": "textarena", "game": "Hangman-v0"},
        seconds=120.0,
    )
    [row] = rows("textarena", 1, game="Hangman-v0")
    problem = Problem("1", tuple(row["prompt"]), None, {"task": row["task"]})

    [siblings], _ = played(environment, chat_tokenizer("qwen"), guesses, [problem], max_tokens=20_000)
    assert not [str(each) for each in workers.failures.take()]
    assert [len(each.turns) for each in siblings] == [3, 7]  # the second says the same twice, which ends it
    assert "P" in siblings[0].turns[1].text
    assert siblings[0].earned == 1.0
    assert (siblings[1].earned or 0.0) < 1.0


SERVE = """
from verifiers.v1.serve.pool import serve_env
from verifiers.v1.utils.loaders import resolve_env_config
player = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
config = resolve_env_config({"taskset": {"id": "textarena", "game": "Hangman-v0"}, "player": player})
serve_env(max_workers=1, elastic=False, address="ipc://server", config=config)
"""


@pytest.mark.scale
def test_a_server_of_verifiers_plays_with_the_policy(workers, word_list):
    """The same game: the server runs the program of its harness, which needs uv, and asks the policy through it."""
    if shutil.which("uv") is None:
        pytest.skip("the harness is started by uv, which is not installed")
    from proximo.environments.adapters.verifiers_server import served_rows

    address = f"ipc://{word_list}/server"
    server = subprocess.Popen([sys.executable, "-c", SERVE.replace("ipc://server", address)], start_new_session=True)
    try:
        place = "proximo.environments.adapters.verifiers_server:VerifiersServer"
        environment = MultiTurn(place, {"address": address}, seconds=300.0)
        [row] = served_rows("textarena", 1, game="Hangman-v0")
        problem = Problem("1", tuple(row["prompt"]), None, {"task_data": row["task_data"]})
        [siblings], _ = played(environment, chat_tokenizer("qwen"), guesses, [problem], max_tokens=20_000)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert not [str(each) for each in workers.failures.take()]
    assert "P" in siblings[0].turns[1].text
    assert siblings[0].earned == 1.0
    assert (siblings[1].earned or 0.0) < 1.0
