"""Each tracker's data, read back by the tracker's own package; skipped where the package is not installed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from proximo.runs.tracking.sending import track
from proximo.runs.tracking.trackers import mlflow
from tests.runs.tracking.folders import add_finding, add_rollouts, add_step, finish, make_run

WANTED = {1: 0.1, 2: 0.2, 3: 0.3}
"""Outcomes of a run that is sent in two parts."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "runs" / "mine", steps=2)
    add_rollouts(made, 1, 3)
    add_finding(made, 2)
    return made


def send(run: Path, name: str) -> str:
    """Send a run, continue it, and return what the tracker calls it."""
    track(run, [name])
    add_step(run, 3)
    finish(run)
    track(run, [name])
    return json.loads((run / "tracking" / name / "sent.json").read_text())["key"]


def test_tensorboard(run: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    send(run, "tensorboard")
    found = accumulator.EventAccumulator(str(run / "tracking/tensorboard"))
    found.Reload()
    assert {event.step: pytest.approx(event.value) for event in found.Scalars("outcome")} == WANTED
    assert [event.step for event in found.Scalars("seconds/rollout")] == [1, 2, 3]
    texts = {tag: found.Tensors(tag) for tag in found.Tags()["tensors"]}
    assert set(texts) == {"config", "tables/completions", "tables/events", "summary"}
    assert texts["tables/completions"][0].tensor_proto.string_val[0].startswith(b"| text | group | reward | tokens |")


@pytest.mark.filterwarnings("ignore")
def test_mlflow(run: Path):
    pytest.importorskip("sqlalchemy")
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    key = send(run, "mlflow")
    assert {each.step: each.value for each in client.get_metric_history(key, "outcome")} == WANTED
    found = client.get_run(key)
    assert found.info.status == "FINISHED"
    assert found.data.params["training.learning_rate"] == "0.001"
    assert {each.path for each in client.list_artifacts(key)} == {
        "completions",
        "config.json",
        "events",
        "summary.json",
    }


@pytest.mark.filterwarnings("ignore")
def test_trackio(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    key = send(run, "trackio")
    # Read in a process of its own: trackio looks at its folder's name once.
    code = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("proximo", sys.argv[1])
print(json.dumps([[row["step"], row["outcome"]] for row in rows if "outcome" in row]))
print(sum("tables/completions" in row for row in rows))
"""
    done = subprocess.run([sys.executable, "-c", code, key], capture_output=True, text=True, check=True)
    outcomes, tables = done.stdout.strip().splitlines()[-2:]
    assert dict(json.loads(outcomes)) == WANTED
    assert tables == "1"


@pytest.mark.filterwarnings("ignore")
def test_wandb(run: Path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    key = send(run, "wandb")
    folders = sorted((run / "tracking/wandb/wandb").glob("offline-run-*"))
    assert [folder.name.endswith(key) for folder in folders] == [True, True]
    outcomes, tables = {}, set()
    for folder in folders:
        command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for record in map(json.loads, done.stdout.splitlines()):
            items = record.get("history", {}).get("item", {})
            outcomes |= {items["step"]: items["outcome"]} if "outcome" in items else {}
            tables |= {name for name in items if name.startswith("tables/")}
    assert outcomes == WANTED
    assert any(name.startswith("tables/completions") for name in tables)


class HalfMade(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("ends", [True, False])
def test_mlflows_database_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool):
    """A tracker that was ended while MLflow made its tables left a file that MLflow never opened again."""

    class Client:
        def __init__(self, address: str) -> None:
            self.file = Path(address.removeprefix("sqlite:///"))

        def search_experiments(self, max_results: int) -> None:
            self.file.write_text("half")
            if ends:
                raise HalfMade
            self.file.write_text("whole")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    path = tmp_path / "mlflow.db"
    if ends:
        with pytest.raises(HalfMade):
            mlflow._database(path)
        assert not path.exists()
        return
    for _ in range(2):  # the second time it is there
        assert mlflow._database(path) == f"sqlite:///{path}"
    assert path.read_text() == "whole"
    assert [each.name for each in tmp_path.iterdir()] == ["mlflow.db"]
