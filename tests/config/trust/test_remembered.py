"""What is kept of the code that a user ran: where, by whom it can be written, and what is not counted as the same."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proximo.config.trust import permission, remembered
from proximo.config.trust.files import executed_files
from proximo.config.trust.naming import SHIPPED, named_code
from proximo.config.trust.permission import ANYTHING, OfRun, command_line, of_file, remember_run
from proximo.environments import examples

CODE = {"mine.py:Task 1234": {"/somewhere/mine.py": "abcd"}}


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PROXIMO_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"identity": "a"}')
    return tmp_path / "data"


RUN = Path("run")


def test_a_run_is_known_by_its_place_and_identity(data):
    remembered.remember(RUN, "a", CODE)
    assert remembered.recall(RUN, "a") == remembered.recall(RUN.absolute(), "a") == CODE
    assert remembered.recall(RUN, "b") == remembered.recall(Path("copy"), "a") == {}
    remembered.remember(RUN, "a", {})
    assert remembered.recall(RUN, "a") == {}
    assert data.stat().st_mode & 0o777 == (data / "code").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"XDG_DATA_HOME": "{here}/xdg"}, "xdg/proximo"),
        ({"XDG_DATA_HOME": "relative", "HOME": "{here}/home"}, "home/.local/share/proximo"),
        ({"XDG_DATA_HOME": "", "HOME": "{here}/home"}, "home/.local/share/proximo"),
    ],
)
def test_the_data_folder_is_the_users(data, tmp_path, monkeypatch, variables, place):
    monkeypatch.delenv("PROXIMO_DATA_HOME")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(here=tmp_path))
    assert remembered.home() == tmp_path / place
    remembered.remember(RUN, "a", CODE)
    assert remembered.recall(RUN, "a") == CODE


def damaged(file: Path, how: str) -> None:
    content = file.read_bytes()
    file.unlink()
    match how:
        case "cut":
            file.write_bytes(content[:20])
        case "zeros":
            file.write_bytes(b"\0" * 100)
        case "a list":
            file.write_text("[]")
        case "another's":
            file.write_text(json.dumps(json.loads(content) | {"run": "/elsewhere"}))
        case "deep":
            file.write_text("[" * 100_000)
        case "huge":
            file.write_bytes(content)
            os.truncate(file, 1 << 40)
        case "a link":
            (file.parent / "target").write_bytes(content)
            file.symlink_to("target")
        case "a pipe":
            os.mkfifo(file)
        case "a folder":
            file.mkdir()


@pytest.mark.parametrize("how", ["cut", "zeros", "a list", "another's", "deep", "huge", "a link", "a pipe", "a folder"])
def test_nothing_is_known_from_a_damaged_file(data, how):
    remembered.remember(RUN, "a", CODE)
    [file] = (data / "code").iterdir()
    damaged(file, how)
    assert remembered.recall(RUN, "a") == {}
    if how != "a folder":
        remembered.remember(RUN, "a", CODE)
        assert remembered.recall(RUN, "a") == CODE


@pytest.mark.parametrize("place", ["data", "data/code"])
def test_what_others_may_write_is_not_trusted(data, tmp_path, place):
    remembered.remember(RUN, "a", CODE)
    (tmp_path / place).chmod(0o777)
    assert remembered.recall(RUN, "a") == {}
    with pytest.raises(ValueError, match="no folder that only you can write"):
        remembered.remember(RUN, "a", CODE)
    (tmp_path / place).chmod(0o700)
    (tmp_path / place).rename(tmp_path / "moved")
    (tmp_path / place).symlink_to(tmp_path / "moved")
    assert remembered.recall(RUN, "a") == {}


def test_a_run_folder_holds_no_memory(data, tmp_path, monkeypatch):
    for place in (str(tmp_path / "run" / "data"), "relative", ""):
        monkeypatch.setenv("PROXIMO_DATA_HOME", place)
        assert remembered.recall(RUN, "a") == {}
        with pytest.raises(ValueError, match="set PROXIMO_DATA_HOME to a folder of your own"):
            remembered.remember(RUN, "a", CODE)


def test_it_does_not_grow_without_end(data, monkeypatch):
    monkeypatch.setattr(remembered, "MAX_RUNS", 3)
    for number in range(6):
        remembered.remember(RUN, str(number), CODE)
        os.utime(remembered._file(RUN, str(number)), (number, number))
    assert [bool(remembered.recall(RUN, str(number))) for number in range(6)] == [False] * 3 + [True] * 3
    with pytest.raises(ValueError, match="bytes are to be remembered"):
        remembered.remember(RUN, "big", {"x" * (1 << 20): {}})


def test_runs_that_start_at_once_are_all_remembered(data):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: remembered.remember(RUN, str(number), CODE), range(40)))
    assert all(remembered.recall(RUN, str(number)) == CODE for number in range(40))


def test_a_run_starts_where_nothing_can_be_remembered(data, tmp_path):
    (tmp_path / "mine.py").write_text("")
    data.write_text("a file")
    message = remember_run(RUN, "a", {"task": {"type": "mine.py:Task"}})
    assert message is not None
    assert "is not remembered, so that a resume needs `load_code=True`" in message
    assert message.count("\n") == 0
    assert remember_run(RUN, "a", {"task": {"type": "Arithmetic"}}) is None


# What is named


def test_what_a_config_names():
    tables = {
        "model": "a:b",
        "device": "cuda:0",
        "task": {"type": "Mixture", "sources": [{"task": {"type": "a.py:B"}}], "path": "owner/name:main"},
        "environment": {
            "type": "MultiTurn",
            "path": "proximo.environments.examples:WordGuessing",
            "tools": [
                "proximo.environments.examples:run_python",
                "proximo.environments.examples:evil.py:f",
                "os:system",
            ],
        },
        "rewards": {"rules": [{"reward": {"type": "PythonFunction", "path": "~/a.py:f"}}]},
        "sampler": {"type": "Fleet", "python": "/bin/sh", "arguments": ["--x"], "address": "auto", "urls": []},
        "system": "say:yes",
        "anything": {"new": "package.module:Name"},
    }
    assert [each.field for each in named_code(tables)] == [
        "task.sources[0].task.type",
        "environment.tools[1]",
        "environment.tools[2]",
        "rewards.rules[0].reward.path",
        "sampler.python",
        "sampler.arguments[0]",
        "anything.new",
    ]
    assert set(SHIPPED) == set(examples.__all__)


def test_other_arguments_are_another_use():
    [one], [other] = (named_code({"task": {"type": "a.py:B", "folder": each}}) for each in ("mine", "/"))
    assert one.use != other.use


def test_files_that_code_executes(tmp_path, monkeypatch):
    """What it imports from beside it counts, also by name and within packages; what is installed does not."""
    texts = {
        "mine.py": "import os, torch\nimport helper\nfrom pack import part\n__import__('late')",
        "helper.py": "from other import *",
        **dict.fromkeys(("other.py", "late.py", "unused.py", "os.py", "pack/__init__.py", "pack/unused.py"), ""),
        "pack/part.py": "from . import near\nfrom .deep.far import thing",
        **dict.fromkeys(("pack/near.py", "pack/deep/__init__.py", "pack/deep/far.py"), ""),
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    found = {os.path.relpath(each, os.path.realpath(tmp_path)) for each in executed_files("mine.py:f")}
    assert found == set(texts) - {"unused.py", "pack/unused.py", "os.py"}
    assert executed_files("gone.py:f") == executed_files("no_such.module:f") == executed_files("builtins:eval") == {}
    assert [Path(each).name for each in executed_files("json.decoder:f")] == ["decoder.py", "__init__.py"]


def test_too_many_files_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("proximo.config.trust.files.MAX_FILES", 2)
    for name, text in {"a": "import b", "b": "import c", "c": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match="imports more than 2 files"):
        executed_files(f"{tmp_path}/a.py:f")


# What is permitted

TABLES = {"rewards": {"path": "mine.py:f"}}


@pytest.fixture
def ran(data, tmp_path) -> Path:
    """A run that the user started, whose code imports what is beside it."""
    (tmp_path / "mine.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    assert remember_run(RUN, "a", TABLES) is None
    OfRun(RUN).admit(TABLES)
    return tmp_path


@pytest.mark.parametrize("name", ["mine.py", "helper.py"])
def test_altered_code_is_refused(ran, name):
    (ran / name).write_text("import os\n")
    with pytest.raises(ValueError, match="is not what you ran with this run"):
        OfRun(RUN).admit(TABLES)
    with command_line(True):
        OfRun(RUN).admit(TABLES)
    OfRun(RUN).admit(TABLES)  # he has run it now


def test_a_copy_is_another_run(ran):
    shutil.copytree(RUN, "copy")
    with pytest.raises(ValueError, match="you have not run this with copy before"):
        OfRun(Path("copy")).admit(TABLES)
    OfRun(Path("copy"), everything=True, keep=False).admit(TABLES)
    with pytest.raises(ValueError, match="you have not run this with copy before"):
        OfRun(Path("copy")).admit(TABLES)


def test_another_function_and_other_arguments_are_refused(ran):
    for tables in ({"rewards": {"path": "mine.py:g"}}, {"rewards": {"path": "mine.py:f", "folder": "/"}}):
        with pytest.raises(ValueError, match="you have not run this"):
            OfRun(RUN).admit(tables)


@pytest.mark.parametrize("argument", ["mine.py:f", "--rewards.path=mine.py:f", "mine.py"])
def test_code_that_is_named_on_the_command_line_is_permitted(data, tmp_path, argument):
    (tmp_path / "mine.py").write_text("")
    for arguments in (["train", "mine:f"], [argument]):
        with command_line(False, arguments):
            if arguments == [argument]:
                OfRun(RUN).admit(TABLES)
            else:
                with pytest.raises(ValueError, match="you have not run this"):
                    OfRun(RUN).admit(TABLES)


def test_a_link_to_other_code_is_other_code(ran):
    (ran / "same.py").write_bytes((ran / "mine.py").read_bytes())
    (ran / "mine.py").unlink()
    (ran / "mine.py").symlink_to("same.py")
    with pytest.raises(ValueError, match="is not what you ran"):
        OfRun(RUN).admit(TABLES)


def test_a_file_that_is_exchanged_after_it_was_asked_for_is_not_executed(ran, monkeypatch):
    code = OfRun(RUN)
    code.admit(TABLES)
    (ran / "mine.py").write_text("raise SystemExit\nclass f: ...")
    with pytest.raises(ValueError, match="is not the code that was asked for"):
        code.load_class("mine.py:f")


def test_a_pipe_in_the_place_of_code_is_not_waited_for(ran):
    (ran / "mine.py").unlink()
    os.mkfifo(ran / "mine.py")
    with pytest.raises(ValueError, match="mine.py"):
        OfRun(RUN).admit(TABLES)


def test_configs_in_run_folders_are_a_runs(data, tmp_path):
    (tmp_path / "link.toml").symlink_to("run/config.toml")
    for inside in ("run/config.toml", "run/deep/er/x.toml", "link.toml", str(tmp_path / "run" / "config.toml")):
        assert of_file(inside) is not ANYTHING, inside
    for own in ("config.toml", "running/config.toml"):
        assert of_file(own) is ANYTHING
    assert permission.is_everything_permitted() is False
