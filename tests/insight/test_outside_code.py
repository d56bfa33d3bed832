"""Reading a run folder executes no code. Where loading is asked for, only what the user has run is, outside of run
folders."""

import builtins
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import proximo
from proximo.cli import main
from proximo.config import toml
from proximo.insight.doctor.checkup import check_up
from proximo.insight.folder import RunFolder
from proximo.insight.page.overview import about, summary
from proximo.insight.report.run_details import gather
from proximo.insight.report.settings import configuration
from proximo.rl.config import RunConfig
from proximo.runs.session import open_session
from proximo.system.sealing import sealed
from tests.outside_files import TASK

LOUD = "import builtins\nbuiltins.executed = True\n" + TASK


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    builtins.__dict__.pop("executed", None)


def written(folder: Path, name: str, source: str = LOUD) -> RunFolder:
    """The folder of a run that named a class; then what it executed is forgotten."""
    place = Path(name.rpartition(":")[0])
    if place.suffix == ".py":
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source)
    text = toml.dumps(toml.loads(f'[task]\ntype = "{name}"', RunConfig))
    with open_session(folder, text) as attempt:
        attempt.start()
    for module in [each for each in sys.modules if each.startswith("proximo_outside_")]:
        del sys.modules[module]
    builtins.__dict__.pop("executed", None)
    return RunFolder(folder, own_code=True)


def is_executed() -> bool:
    return bool(builtins.__dict__.pop("executed", False))


def why_not(run: RunFolder) -> str:
    """Why the class is not loaded; everything that does not need it is there, and nothing was executed."""
    with pytest.raises(ValueError, match="task.type is") as refused:
        _ = run.config
    assert str(refused.value).count("\n") == 0
    page = configuration(gather(run))
    assert "Parrot, " in page
    assert "The settings are shown as text" in page
    assert "config.toml, whole" in page
    assert check_up(run).state == "stopped"
    assert summary(run)["steps"] == 40
    shown = about(run, {})
    assert "Parrot" in shown["config"]
    assert shown["algorithm"]["name"] is None
    assert shown["algorithm"]["why"].startswith("type = ")
    assert main(["report", str(run.path), "--out", "page.html"]) == 0
    assert not is_executed()
    return str(refused.value)


def test_the_recorded_file_outside_of_the_run_is_loaded(here):
    run = written(here / "run", "mine.py:Parrot")
    (here / "mine.py").write_text(LOUD.replace("Which letters", "Which other letters"))
    assert "is not what you ran" in why_not(run)
    (here / "mine.py").write_text(LOUD)
    fresh = RunFolder(run.path, own_code=True)
    assert toml.plain(fresh.config)["task"]["type"] == "mine.py:Parrot"
    assert fresh.unavailable == gather(fresh).unavailable == {}
    assert "shown as text" not in configuration(gather(fresh))


def test_a_run_is_viewed_reported_and_diagnosed_without_its_code(here, capsys):
    """As a stranger sends it: a run folder, with the file that its config names next to it."""
    run = RunFolder(written(here / "run", "mine.py:Parrot").path)
    assert "not loaded, because a run may come from anyone" in why_not(run)
    assert main(["doctor", "run"]) == 0
    assert "type = mine.py:Parrot, not loaded" in (here / "page.html").read_text()
    assert not is_executed()
    assert main(["report", "run", "--load-code", "--out", "page.html"]) == 0
    assert "not loaded" not in (here / "page.html").read_text()
    assert is_executed()


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_opened_run_loads_its_code_only_for_its_config(here, is_gone):
    written(here / "run", "mine.py:Parrot")
    found = proximo.Evaluation(accuracy=0.5, low=0.4, high=0.6, problems=2, unscored=0, outcome=0.5, reward=0.5)
    result = {"checkpoint": "step-000002", "generated_tokens": 9, "seconds": 1.0}
    answer = {"problem": "parrot-0", "text": "a"}
    result |= {"before": asdict(found), "after": asdict(found), "examples": [[answer, answer]]}
    (here / "run" / "result.json").write_text(json.dumps(result))
    if is_gone:
        (here / "mine.py").unlink()
    run = proximo.open_run("run")
    assert repr(run) == "<run run: type = mine.py:Parrot, not loaded, finished, 0 steps>"
    assert run.metrics().num_rows == 0
    kept = run.result
    assert isinstance(kept, proximo.RunResult)
    assert (kept.after, kept.examples) == (found, [])
    assert 'type = "mine.py:Parrot"' in run.config_text
    assert run.findings() is not None
    assert not is_executed()
    if is_gone:
        with pytest.raises(ValueError, match="mine.py is not there"):
            _ = run.config
    else:
        assert toml.plain(run.config)["task"]["type"] == "mine.py:Parrot"
        assert is_executed()


def test_a_file_inside_of_the_run_folder_is_never_loaded(here):
    run = written(here / "run", "run/mine.py:Parrot")
    assert "lies in a run folder" in why_not(run)
    assert "lies in a run folder" in why_not(written(here / "other", "run/mine.py:Parrot"))


def test_a_link_into_or_out_of_a_run_folder_is_no_way_around(here):
    run = written(here / "run", "run/mine.py:Parrot")
    (here / "link.py").symlink_to(here / "run" / "mine.py")
    record = run.path / "config.toml"
    record.write_text(record.read_text().replace("run/mine.py", "link.py"))
    assert "lies in a run folder" in why_not(RunFolder(run.path, own_code=True))
    (here / "mine.py").write_text(LOUD)
    (here / "run" / "mine.py").unlink()
    (here / "run" / "mine.py").symlink_to(here / "mine.py")
    record.write_text(record.read_text().replace("link.py", "run/mine.py"))
    assert "lies in a run folder" in why_not(RunFolder(run.path, own_code=True))


def test_a_module_is_treated_like_its_file(here, monkeypatch):
    (here / "some_package").mkdir()
    (here / "some_package" / "__init__.py").touch()
    (here / "some_package" / "mine.py").write_text(LOUD)
    monkeypatch.syspath_prepend(here)
    run = written(here / "run", "some_package.mine:Parrot")
    assert run.config.task.problem(0, "train", 0).answer == "a"
    (here / "some_package" / "mine.py").write_text(LOUD + "# another\n")
    assert "is not what you ran" in why_not(RunFolder(run.path, own_code=True))
    monkeypatch.syspath_prepend(run.path)  # as where one stands in the folder
    (run.path / "their_package").mkdir()
    (run.path / "their_package" / "__init__.py").write_text("import builtins\nbuiltins.executed = True\n")
    (run.path / "their_package" / "mine.py").symlink_to(here / "some_package" / "mine.py")
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace("some_package", "their_package"))
    assert "lies in a run folder" in why_not(RunFolder(run.path, own_code=True))


def test_what_was_not_run_or_is_not_here_is_not_loaded(here):
    run = written(here / "run", "mine.py:Parrot")
    record = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(sealed(record | {"identity": "another"})))
    assert "you have not run this with" in why_not(RunFolder(run.path, own_code=True))
    (here / "mine.py").unlink()
    assert "mine.py is not there" in why_not(RunFolder(run.path, own_code=True))


def test_what_a_stranger_recorded_is_no_permission(here, monkeypatch):
    """run.json has the hash of the code, and anybody can write one there."""
    run = written(here / "run", "mine.py:Parrot")
    monkeypatch.setenv("PROXIMO_DATA_HOME", str(here / "another"))
    assert "you have not run this with" in why_not(RunFolder(run.path, own_code=True))
    assert toml.plain(RunFolder(run.path, load_code=True).config)["task"]["type"] == "mine.py:Parrot"
    assert is_executed()
    assert "you have not run this with" in why_not(RunFolder(run.path, own_code=True)), "it was permitted for reading"
    assert RunFolder(run.path, load_code=True, own_code=True).config is not None
    assert RunFolder(run.path, own_code=True).config is not None
