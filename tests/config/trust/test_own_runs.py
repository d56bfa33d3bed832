"""A user's own run goes on without a flag, wherever its code is named; a copy, altered code and a stranger's run do
not, and nothing of them is executed."""

import json
import shutil
from pathlib import Path

import pytest

import proximo
from proximo.cli import main
from proximo.runs.checkpoints import CHECKPOINTS
from proximo.system.sealing import sealed
from tests.outside_files import GATE

pytestmark = [
    pytest.mark.usefixtures("small_shipped_model", "ordinary_precision"),
    pytest.mark.filterwarnings("ignore"),
]
HELPER = """
from pathlib import Path
with Path("executed").open("a") as file:
    file.write(".")
def length(text):
    return float(len(text))
"""
MINE = '''
from dataclasses import dataclass
from helper import length
from proximo.environments import Done
from proximo.types import Grade, Problem

@dataclass(frozen=True)
class Letters:
    """Asks for letters."""
    while_sampling = True
    reward_range = (0.0, 1.0)
    def size(self, split):
        return 8 if split == "held_out" else None
    def problem(self, index, split, seed):
        return Problem(f"{split}-{index % 8}", "1+1=", "2")
    def grade(self, problems, completions):
        return [Grade(min(length(each.text), 1.0)) for each in completions]
    def reference(self, problem):
        return problem.answer

class Once:
    def reset(self, problem):
        pass
    def step(self, reply):
        return Done(length(reply))

def short(completions, **_):
    return [-length(each) for each in completions]
'''
CONFIG = """
model = "tiny-arithmetic"
device = "cpu"
steps = 2
[task]
type = "mine.py:Letters"
[environment]
type = "MultiTurn"
path = "mine.py:Once"
max_turns = 1
[algorithm.gate]
type = "mine.py:Ceiling"
[[rewards.rules]]
weight = 0.1
[rewards.rules.reward]
type = "PythonFunction"
path = "mine.py:short"
[sampling]
max_tokens = 3
[training]
groups = 2
group_size = 2
minibatches = 1
[evaluation]
problems = 2
[checkpoints]
every = 1
keep = 9
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory, small_shipped_model) -> Path:
    """A run that the user started, which ended early."""
    here = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        for name, text in {"mine.py": MINE + GATE, "helper.py": HELPER, "run.toml": CONFIG}.items():
            Path(name).write_text(text)
        assert main(["train", "run.toml", "--run", "runs/a"]) == 0
        stop(Path("runs/a"))
    return here


def stop(run: Path) -> None:
    (run / "result.json").unlink(missing_ok=True)
    shutil.rmtree(run / CHECKPOINTS / "step-000002", ignore_errors=True)


COMMANDS = {
    "resume": ("resume", "{run}"),
    "train": ("train", "{run}/config.toml", "--run", "again"),
    "fork": ("fork", "{run}", "--at", "1", "--run", "fork"),
    "eval": ("eval", "{run}"),
    "replay": ("replay", "{run}", "--step", "1"),
    "replay as": ("replay", "{run}", "--step", "1", "--as", "{run}/config.toml"),
    "plan": ("plan", "{run}/config.toml"),
    "selfcheck": ("selfcheck", "{run}/config.toml"),
    "job": ("job", "slurm", "{run}/config.toml", "--run", "elsewhere"),
}


@pytest.fixture
def own(begun, monkeypatch):
    monkeypatch.chdir(begun)
    yield begun
    for each in ("again", "fork", "copy", "elsewhere"):
        shutil.rmtree(each, ignore_errors=True)
    Path("helper.py").write_text(HELPER)


def run(command: str, folder: str, *more: str) -> int | str | None:
    try:
        return main([each.format(run=folder) for each in COMMANDS[command]] + [*more])
    except SystemExit as ended:
        return ended.code


@pytest.mark.slow("trains runs and runs commands on them")
@pytest.mark.parametrize("command", COMMANDS)
def test_his_own_run_needs_no_flag(own, capsys, command):
    assert run(command, "runs/a") == 0, capsys.readouterr().err
    if command == "fork":  # a run of his own, too
        capsys.readouterr()
        stop(own / "fork")
        assert main(["resume", "fork"]) == 0, capsys.readouterr().err
    stop(own / "runs" / "a")


@pytest.mark.slow("trains and resumes runs")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["copied", "altered", "foreign"])
def test_what_he_has_not_run_is_refused_in_one_line(own, capsys, monkeypatch, command, kind):
    folder = "runs/a"
    if kind == "copied":
        shutil.copytree("runs/a", folder := "copy")
    elif kind == "altered":
        Path("helper.py").write_text(HELPER + "# another\n")
    else:
        monkeypatch.setenv("PROXIMO_DATA_HOME", str(own / "a-stranger"))
    Path("executed").unlink(missing_ok=True)
    capsys.readouterr()
    assert run(command, folder) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "mine.py:" in line
    assert "--load-code" in line
    assert not Path("executed").exists()


@pytest.mark.slow("trains runs and runs commands on them")
@pytest.mark.parametrize("command", ["resume", "eval"])
def test_the_flag_permits_a_copy_and_is_needed_once(own, capsys, command):
    shutil.copytree("runs/a", "copy")
    assert run(command, "copy", "--load-code") == 0, capsys.readouterr().err
    stop(own / "copy")
    assert run(command, "copy") == 0, capsys.readouterr().err


@pytest.mark.slow("trains and resumes runs")
def test_a_code_that_lies_in_a_run_is_not_executed_with_the_flag_either(own, capsys):
    shutil.copytree("runs/a", "copy")
    for name in ("mine.py", "helper.py"):
        shutil.copy(name, "copy")
    for file in ("config.toml", "run.json"):
        text = (Path("copy") / file).read_text()
        (Path("copy") / file).write_text(text.replace("mine.py:", "copy/mine.py:"))
    Path("copy/run.json").write_text(json.dumps(sealed(json.loads(Path("copy/run.json").read_text()))))
    Path("executed").unlink(missing_ok=True)
    for command in COMMANDS:
        assert run(command, "copy", "--load-code") == 2
        assert "lies in a run folder" in capsys.readouterr().err
    assert not Path("executed").exists()


@pytest.mark.slow("trains a run")
def test_from_python(own, monkeypatch):
    opened = proximo.open_run("runs/a")
    assert isinstance(opened.config, proximo.RunConfig)
    monkeypatch.setenv("PROXIMO_DATA_HOME", str(own / "a-stranger"))
    with pytest.raises(ValueError, match="you have not run this"):
        _ = proximo.open_run("runs/a").config
    with pytest.raises(ValueError, match="you have not run this"):
        proximo.evaluate("runs/a", quiet=True)
    with pytest.raises(ValueError, match="you have not run this"):
        proximo.fork("runs/a", 1, "fork", quiet=True)
    assert proximo.evaluate("runs/a", quiet=True, load_code=True).problems == 2
    assert proximo.evaluate("runs/a", quiet=True).problems == 2


@pytest.mark.slow("trains a run")
def test_a_run_says_that_its_code_is_not_remembered(own, monkeypatch, capsys):
    (own / "a-file").write_text("")
    monkeypatch.setenv("PROXIMO_DATA_HOME", str(own / "a-file"))
    assert main(["train", "run.toml", "--run", "again"]) == 0
    assert capsys.readouterr().err.count("the code of this run is not remembered") == 1
    events = [json.loads(line) for line in Path("again/events.jsonl").read_text().splitlines()]
    assert [each["kind"] for each in events].count("not_remembered") == 1
