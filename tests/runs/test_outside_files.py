"""A user's own code and data belong to the run: a changed file is named, and refused unless allowed."""

import json
from pathlib import Path

import pytest

from proximo.config import toml
from proximo.environments.kinds import MultiTurn
from proximo.rl.config import RunConfig
from proximo.runs.config_changes import changed_files, fingerprints, function_fingerprints, refuse_changes
from proximo.runs.session import open_session
from proximo.system.folders import file_hash
from proximo.tasks.arithmetic import Arithmetic
from tests.outside_files import REWARD, TASK, forget_package

TEXT = '[task]\ntype = "mine.py:Parrot"\n[[rewards.rules]]\n[rewards.rules.reward]\ntype = "{}:Short"\n'


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "short.py").write_text(REWARD)
    forget_package()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def started(text: str, folder: Path) -> str:
    """The identity of a run that has begun."""
    with open_session(folder, text) as attempt:
        attempt.start()
        (folder / "metrics.jsonl").write_text("{}\n")
    return json.loads((folder / "run.json").read_text())["identity"]


def test_files_and_modules_are_fingerprinted_by_field(here):
    text = toml.dumps(toml.loads(TEXT.format("package.short"), RunConfig))
    assert fingerprints(text) | {"model": ""} == {
        "model": "",
        "task.type": file_hash(here / "mine.py"),
        "rewards.rules[0].reward.type": file_hash(here / "package" / "short.py"),
    }
    assert function_fingerprints(text) == {}
    assert fingerprints(toml.dumps(RunConfig())).keys() == {"model"}


def test_code_is_known_by_its_form_in_any_field(here, monkeypatch):
    """A piece of one's own has fields of any name."""
    (here / "words.txt").write_text("not code")
    monkeypatch.setenv("HOME", str(here))
    lines = ['judge = "mine.py:score"', 'script = "mine.py"', 'tools = ["package.short:Short", "~/mine.py:f", "x"]']
    lines += ['words = "words.txt"', 'gone = "gone.py:f"', f'long = "{"a" * 5000}.py"', 'url = "http://host:port"']
    mine = file_hash(here / "mine.py")
    assert fingerprints("[task]\n" + "\n".join(lines)) == {
        "task.judge": mine,
        "task.script": mine,
        "task.tools[0]": file_hash(here / "package" / "short.py"),
        "task.tools[1]": mine,
    }


def test_more_steps_are_refused_with_the_command_that_trains_on():
    changes = {"steps": "was 20, now 50", "evaluation.every": "was 2, now 5"}
    known = "steps = 50\n[evaluation]\nevery = 5\n"
    with pytest.raises(ValueError, match="or for more steps by proximo resume r --steps 50, choose another name"):
        refuse_changes(Path("r"), changes, [], known)
    with pytest.raises(ValueError, match="by proximo resume r, choose another name"):
        refuse_changes(Path("r"), {"evaluation.every": "was 2, now 5"}, [], known)


def test_a_changed_file_is_named_and_refused_unless_it_is_allowed(here):
    text, folder = toml.dumps(toml.loads(TEXT.format("package.short"), RunConfig)), here / "run"
    started(text, folder)
    with open_session(folder, text):
        pass
    (here / "mine.py").write_text(TASK + "# another\n")
    (here / "package" / "short.py").write_text(REWARD + "# another\n")
    with pytest.raises(ValueError, match="holds a run with another config") as refused, open_session(folder, text):
        pass
    assert str(refused.value).splitlines()[1:] == [
        "  task.type (mine.py) has changed since the run began  (`allow_change=['task.type']`)",
        "  rewards.rules[0].reward.type (package.short) has changed since the run began  "
        "(`allow_change=['rewards.rules[0].reward.type']`)",
    ]
    with open_session(folder, text, allowed=["task", "rewards"]) as attempt:
        attempt.start()
    changes = json.loads((folder / "run.json").read_text())["attempts"][-1]["changes"]
    assert changes.keys() == {"task.type", "rewards.rules[0].reward.type"}
    with open_session(folder, text):  # what was allowed is the run's own from now on
        pass
    (here / "mine.py").unlink()
    with pytest.raises(ValueError, match="task.type its files are missing"), open_session(folder, text):
        pass


def test_data_that_changed_are_named_in_the_first_line_with_what_to_do(here):
    """Defaults follow the number of rows: a list of other fields would not say that the data are the reason."""
    text, folder = '[task]\ntype = "File"\npath = "sums.jsonl"\n[evaluation]\nproblems = {}\n', here / "run"
    (here / "sums.jsonl").write_text("{}\n{}\n")
    started(text.format(2), folder)
    (here / "sums.jsonl").write_text("{}\n")
    for problems, allowed, more in ((2, [], ""), (1, ["evaluation"], ""), (1, [], ", and allow what else differs:")):
        with pytest.raises(ValueError, match="other data") as refused:
            open_session(folder, text.format(problems), allowed=allowed).__enter__()
        first, *others = str(refused.value).splitlines()
        assert first == (
            f"`run={folder}` began with other data: sums.jsonl (task.path) has changed since the run began. Restore "
            f"the data, choose another name, or resume with the new rows: `allow_change=['task.path']`{more}"
        )
        assert others == ["  evaluation.problems was 2, now 1  (`allow_change=['evaluation.problems']`)"] * bool(more)
    with open_session(folder, text.format(1), allowed=["task.path", "evaluation.problems"]):
        pass


def test_a_runs_identity_includes_the_files(here):
    text = toml.dumps(toml.loads(TEXT.format("package.short"), RunConfig))
    first, again = started(text, here / "a"), started(text, here / "b")
    (here / "mine.py").write_text(TASK + "# another\n")
    assert first == again != started(text, here / "c")


def test_an_environment_of_tools_alone_names_no_file(here):
    """Its path is empty, which as a path is the current folder, where anything may change."""
    tools = MultiTurn(tools=("proximo.environments.examples:calculate",))
    text = toml.dumps(RunConfig(task=Arithmetic(chat=True), environment=tools))
    assert fingerprints(text).keys() == {"model", "environment.tools[0]"}
    identity = started(text, here / "run")
    (here / "notes.txt").write_text("new")
    assert started(text, here / "run") == identity
    noted = {"environment.path": "of the folder, by an earlier version", **fingerprints(text)}
    assert changed_files(noted, fingerprints(text), text) == {}
