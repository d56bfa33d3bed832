"""Every command, on run folders from strangers: nothing outside the folder changes, nothing of it is executed, and
there is an answer of one line within seconds.

Commands and what they take are read from the usage that they are listed by, so that one that is added is tried too.
"""

import io
import json
import os
import re
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest

from proximo.cli import COMMANDS, LOAD_CODE, USAGE, WITHOUT_RUNS, main
from proximo.config import toml
from proximo.config.toml import table_lines
from proximo.insight.folder import RunFolder
from proximo.insight.page import overview
from proximo.models import loading
from proximo.rl.config import TrainingOptions
from proximo.runs.checkpoints import CHECKPOINTS
from proximo.system.folders import MANIFEST, _seal, read_manifest
from proximo.system.opening import remove
from proximo.system.sealing import sealed
from tests.runs.test_resume import config, trained
from tests.runs.tracking.folders import MINE

pytestmark = [
    pytest.mark.usefixtures("small_shipped_model", "ordinary_precision"),
    pytest.mark.filterwarnings("ignore"),
]
SECONDS = 10
LAST = f"{CHECKPOINTS}/step-000002"

# What a command takes

PLACES = {
    **dict.fromkeys(("RUN", "MODEL", "ADAPTER", "DIR"), "run"),
    **dict.fromkeys(("run.toml", "config.toml"), "run/config.toml"),
    **dict.fromkeys(("DATA", "DATA.jsonl", "FILE"), "run/rows.jsonl"),
    "OUT": "written",
    "N": "1",
    "FILE.py:NAME": "tracker.py:Mine",
    **{each: each for each in ("slurm", "kubernetes", "kuberay")},
}
"""What stands for a word of the usage."""
IGNORED = {"PRESET", "five", "NAME", "DATA.parquet", "wandb", "trackio", "tensorboard", "mlflow", "..."}
"""Words for what is no file of a stranger's."""
PROBLEM = ("run/config.toml:", "run/rows.jsonl:", "  ")
"""With what lines begin that say what is wrong with a config or data, one for each problem."""
WRITTEN = ("--out", "--run")
"""Flags of what is written, in a place of its own."""
QUICK = {
    "watch": ["--once"],
    "compare": ["--seeds", "1", "--updates", "1"],
    "study": ["clip-higher", "--dry-run", "--out", "run"],
    "iterate": ["--rounds", "1"],
    "eval": ["--data", "run/rows.jsonl"],
}


def command_lines() -> dict[str, list[list[str]]]:
    """What each command is tried with: one line for each alternative of what it takes."""
    found: dict[str, list[list[str]]] = {}
    for command, usage in re.findall(r"^  proximo ([a-z-]+) (.*)$", USAGE, re.MULTILINE):
        if command in COMMANDS and command not in WITHOUT_RUNS:
            found.setdefault(command, []).extend(lines(command, usage))
    return found


def lines(command: str, usage: str) -> list[list[str]]:
    made: list[list[str]] = [[command]]
    flag = ""
    for group, word in re.findall(r"\[([^\]]*)\]|(\S+)", usage):
        if group.startswith("--"):
            if group == "--run DIR":
                made = [[*line, "--run", "other"] for line in made]
            continue
        if word.startswith("--"):
            flag = word
            continue
        choices = [each for each in re.split(r"[ |]+", group or word) if each not in IGNORED and not each[:1].islower()]
        choices += [each for each in re.split(r"[ |]+", group or word) if each in PLACES and each[:1].islower()]
        if flag in WRITTEN:
            made = [[*line, flag, f"written{flag}.jsonl"] for line in made]
        elif choices:
            assert all(each in PLACES for each in choices), f"{command}: what does {choices} stand for?"
            made = [[*line, *[flag] * bool(flag), PLACES[each]] for line in made for each in dict.fromkeys(choices)]
        flag = ""
    cloud = ["--image", "i", "--claim", "c"]
    made = [[*line, *QUICK.get(command, []), *cloud * bool({*line} & {"kubernetes", "kuberay"})] for line in made]
    return [line for line in made if any(each.startswith("run") for each in line)]


LINES = command_lines()
LINES["view"].append(["view", "--static", "written", "run"])
LINES["train"].append(["train", "run.toml", "--run", "run"])


@pytest.mark.slow("asks every command for its help")
def test_every_command_is_tried_with_a_folder():
    assert {*LINES} == {*COMMANDS} - {*WITHOUT_RUNS}
    for command, tried in LINES.items():
        assert all(any(each.startswith("run") for each in line) for line in tried if line[1:2] != ["--run"]), command


# Folders

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("executed")
class Code:
    pass
def function(*_, **__):
    return [0.0]
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "run"
    few = TrainingOptions(groups=2, group_size=2, minibatches=1)  # pages are written with all of them, again and again
    trained(config(steps=2, training=few), folder)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(9)))
    return folder


@pytest.fixture
def here(whole, tmp_path, monkeypatch) -> Iterator[Path]:
    """Where a user stands, with the stranger's folder, and with things of his own."""
    shutil.copytree(whole, tmp_path / "run")
    mine = tmp_path / "mine"
    (mine / "home").mkdir(parents=True)
    (mine / "secret").write_text("secret\n" * 100)
    (tmp_path / "tracker.py").write_text(MINE)
    (tmp_path / "run.toml").write_text(toml.dumps(config(steps=2)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(mine / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(whole.parent / "cache"))  # where pages of help are kept
    monkeypatch.setenv("PROXIMO_DATA_HOME", str(tmp_path / "data"))  # where nothing is remembered
    monkeypatch.setattr("proximo.serving.server.server", lambda *_, **__: Ending())
    monkeypatch.setattr("proximo.insight.page.server.server", lambda *_, **__: Ending())
    for place in ("evil.py", "evil_module.py", "run/evil.py", "proximo.environments.examples:evil.py"):
        (tmp_path / place).write_text(EVIL.format(marker=str(tmp_path / "EXECUTED")))
    yield tmp_path
    sys.modules.pop("evil_module", None)


class Ending:
    """A server that is asked for the overview, and ends."""

    def run(self, **_: Any) -> None:
        for request in (overview.health, overview.about):
            try:
                request(RunFolder(Path("run")), {})
            except (OSError, ValueError):
                continue


def outside() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path("mine").rglob("*")) if path.is_file()}


class TooLong(BaseException):
    """A command that does not answer."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(line: list[str], capsys) -> tuple[int, str]:
    """Exit status, and what was said on stderr."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    directory, nice = os.getcwd(), os.nice
    os.nice = lambda _: 0
    try:
        with limited(SECONDS):
            status = main(list(line))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        os.nice = nice
        os.chdir(directory)
        for each, handler in handlers.items():
            signal.signal(each, handler)
    return status, capsys.readouterr().err


def tried(line: list[str], capsys, monkeypatch) -> tuple[int, str]:
    """The answer of a command, which changes nothing and is one line where it refuses."""
    for each in [path for path in Path().iterdir() if path.name.startswith(("written", "other"))]:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    before = outside()
    status, err = answer(line, capsys)
    assert outside() == before, line
    assert not Path("EXECUTED").exists(), line
    assert "Traceback" not in err, line
    if status == 2:
        error = [*dropwhile(lambda each: not each.startswith("error: "), err.splitlines())]
        assert error, err
        assert all(each.startswith(PROBLEM) for each in error[1:]), err
    return status, err


# Files that are none

FILES = ("config.toml", "run.json", "metrics.jsonl", "lock", "rollouts", "rows.jsonl", CHECKPOINTS)
INSIDE = (f"{LAST}/{MANIFEST}", f"{LAST}/state/run_state.json", f"{LAST}/config.json", f"{LAST}/model.safetensors")


def linked(path: Path) -> None:
    remove(path)
    path.symlink_to(os.path.relpath("mine" if path.suffix == "" else "mine/secret", path.parent))


def piped(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def device(path: Path) -> None:
    remove(path)
    path.symlink_to("/dev/zero")


def cut(path: Path) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    if path.is_file() and (data := path.read_bytes()):
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x55]) + data[len(data) // 2 + 1 :])


def huge(path: Path) -> None:
    if path.is_file():
        with path.open("r+b") as file:
            file.truncate(1 << 40)


DAMAGES: tuple[Callable[[Path], None], ...] = (linked, piped, device, cut, flipped, huge)


def escaping(run: Path) -> None:
    """Names that lead out of the folder, wherever names are read."""
    for step in ("step-000001", "step-000002"):
        state = run / CHECKPOINTS / step / "state" / "run_state.json"
        facts = json.loads(state.read_text())
        state.write_text(json.dumps(facts | {"sizes": facts["sizes"] | {"../mine/secret": 1}}))
        known = {key: value for key, value in read_manifest(state.parents[1]).items() if key != "files"}
        (state.parents[1] / MANIFEST).unlink()
        _seal(state.parents[1], known)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"checkpoint": "../../mine", "last": "/etc"}))
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(sealed(record | {"fork": {"of": "../../../../etc", "step": 1}})))


@pytest.fixture
def no_training(monkeypatch) -> None:
    """What is asked for here is over once a model would be loaded."""

    def refused(*_: object, **__: object) -> None:
        raise ValueError("no model is loaded here")

    monkeypatch.setattr(loading, "load_weights", refused)


@pytest.mark.slow("runs every command on hostile folders")
@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("command", sorted(LINES))
def test_files_that_are_none_harm_nobody(here, capsys, monkeypatch, command):
    run, failures = Path("run"), []
    shutil.copytree(run, "kept")
    for name, damage in [(name, damage) for name in (*FILES, *INSIDE) for damage in DAMAGES] + [("", escaping)]:
        path = run / name
        if not path.exists() and damage not in (linked, piped, device):
            continue
        damage(path)
        for line in LINES[command]:
            try:
                tried(line, capsys, monkeypatch)
            except (Exception, TooLong) as error:
                failures.append(
                    f"{' '.join(line)}, where {name} is {damage.__name__}: {str(error)[:400]!r} {type(error)}"
                )
        remove(run)
        shutil.copytree("kept", run)
    assert not failures, "\n".join(failures)


# Code that is named


def renamed(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another config, which run.json has as well."""
    tables = tomllib.loads((run / "config.toml").read_text())
    change(tables)
    text = "\n".join(table_lines(tables, "")).strip() + "\n"
    (run / "config.toml").write_text(text)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(sealed(record | {"config": text, "fingerprints": {}, "functions": {}})))
    (run / "result.json").unlink(missing_ok=True)


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tables: dict[str, Any]) -> None:
        *outer, name = path.split(".")
        for each in outer:
            tables = tables[each]
        tables[name] = value

    return change


def ruled(reward: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return put("rewards.rules", [{"reward": reward, "weight": 1.0}])


def played(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return put("environment", {"type": "MultiTurn", **fields})


def asked(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return put("task", {"type": "File", "path": "run/rows.jsonl", "held_out": 2, **fields})


NAMES = (
    "evil.py:Code",
    "run/evil.py:Code",
    "evil_module:Code",
    "./evil.py:Code",
    "proximo.environments.examples:evil.py:Code",
)
CODE: dict[str, Callable[[dict[str, Any]], None]] = {
    **{f"task {name}": put("task", {"type": name}) for name in NAMES},
    **{f"sampler {name}": put("sampler", {"type": name}) for name in NAMES[:3]},
    **{f"gate {name}": put("algorithm.gate", {"type": name}) for name in NAMES[:3]},
    **{f"environment {name}": played(path=name) for name in NAMES},
    "an environment's class": put("environment", {"type": "evil.py:Code"}),
    "tools": played(tools=["evil.py:function"]),
    "tools of the package's": played(tools=["proximo.environments.examples:evil.py:function"]),
    "a reward": ruled({"type": "PythonFunction", "path": "evil.py:function"}),
    "a reward's class": ruled({"type": "evil.py:Code"}),
    "a reward that is a module": ruled({"type": "PythonFunction", "path": "evil_module:function"}),
    "a reward of Python's": ruled({"type": "PythonFunction", "path": "os:system"}),
    "builtins": ruled({"type": "PythonFunction", "path": "builtins:eval"}),
    "a task's reward": asked(reward={"type": "PythonFunction", "path": "evil.py:function"}),
    "starts": put("task", {"type": "proximo.environments.kinds:Starts", "path": "evil.py:Code"}),
    "another library's environment": played(
        path="proximo.environments.adapters:Gymnasium", arguments={"modules": ["evil_module"]}
    ),
    "a program": put("sampler", {"type": "Fleet", "python": "./evil"}),
    "arguments of a server": put("sampler", {"type": "Fleet", "arguments": ["--worker-cls", "evil_module.Code"]}),
    "a schedule": put("schedules", {"sampling.temperature": {"type": "PythonSchedule", "path": "evil.py:function"}}),
    "a schedule as a text": put("schedules", {"sampling.temperature": "evil.py:function"}),
    "a schedule in tables": put("schedules", {"training": {"learning_rate": "evil_module:function"}}),
    "a schedule by a word": put("schedules", {"temperature": "run/evil.py:function"}),
    "a metric": put("metrics", [{"type": "PythonMetric", "path": "evil.py:function"}]),
    "a metric as a text": put("metrics", "evil_module:function"),
    "metrics as texts": put("metrics", ["run/evil.py:function"]),
    "a judge": ruled(
        {"type": "Judge", "url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r", "key_variable": "HOME"}
    ),
    "a judge's cache": ruled(
        {"type": "Judge", "url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r", "cache": "mine/home"}
    ),
}
USES = {"train", "resume", "fork", "eval", "plan", "selfcheck", "job", "iterate", "compare"}
"""Commands that take the whole config of a run."""
LEARNS = [kind for kind in CODE if re.match("gate|sampler|a program|arguments|a schedule|a metric|metrics", kind)]
"""What an evaluation does not need."""


@pytest.mark.slow("runs every command on hostile folders")
@pytest.mark.parametrize("command", sorted(LINES))
def test_code_that_a_run_names_is_not_executed(here, capsys, monkeypatch, command):
    run, failures = Path("run"), []
    shutil.copytree(run, "kept")
    Path("evil").write_text("#!/bin/sh\ntouch EXECUTED\n")
    Path("evil").chmod(0o755)
    for kind, change in CODE.items():
        renamed(run, change)
        (run / "tracking" / "evil.py:Code").mkdir(parents=True)
        for line in LINES[command]:
            try:
                status, err = tried(line, capsys, monkeypatch)
                if command in USES and "run.toml" not in line and not (command == "eval" and kind in LEARNS):
                    assert status == 2, err
                    assert LOAD_CODE in err or "lies in a run folder" in err, err
            except (Exception, TooLong) as error:
                failures.append(f"{' '.join(line)}, {kind}: {str(error)[:400]!r} {type(error)}")
        remove(run)
        shutil.copytree("kept", run)
    assert not failures, "\n".join(failures)
