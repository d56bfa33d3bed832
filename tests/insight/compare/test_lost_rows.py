"""A run of a comparison or a pipeline whose log has lost rows is resumed where that is accepted, and only there."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import proximo
from proximo.api.training import with_values
from proximo.insight.compare.runs import is_finished
from proximo.insight.compare.worker import train_one
from proximo.recipes.pipeline import stages
from proximo.system.machine import Machine
from tests.api.settings import small


@pytest.fixture(scope="module")
def config() -> proximo.RunConfig:
    return with_values(replace(small(steps=2), checkpoints=proximo.CheckpointOptions(every=1)))


@pytest.fixture
def folder(config, tmp_path: Path) -> Path:
    """Of a run that was not finished, and has lost its metrics."""
    proximo.train(config, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    return tmp_path / "run"


@pytest.mark.slow("trains a run, and goes on with it")
def test_a_comparison_goes_on_with_a_run_whose_config_may_change(config, tmp_path: Path):
    folder = tmp_path / "run"
    proximo.train(config, folder, quiet=True)
    (folder / "result.json").unlink()
    later = replace(config, training=replace(config.training, learning_rate=1e-5))
    job: Any = SimpleNamespace(config=later)
    place: Any = SimpleNamespace(run=lambda job: folder, allowed=())
    with pytest.raises(ValueError, match="training.learning_rate was"):
        is_finished(job, place)
    place.allowed = ("training.learning_rate", "algorithm.shape.coefficient")  # which another contender has
    assert not is_finished(job, place)
    train_one(later, folder, Machine.current(), allowed=place.allowed)
    assert is_finished(job, place)
    assert "training.learning_rate was" in (folder / "events.jsonl").read_text()


@pytest.mark.slow("trains two runs")
def test_a_comparison_takes_a_run_with_lost_rows_where_told_to(config, folder: Path):
    job: Any = SimpleNamespace(config=config)
    place: Any = SimpleNamespace(run=lambda job: folder, allowed=())
    with pytest.raises(ValueError, match="`accept_lost_rows=True`"):
        is_finished(job, place)
    assert not is_finished(job, place, accept_lost=True)
    with pytest.raises(ValueError, match="`accept_lost_rows=True`"):
        train_one(config, folder, Machine.current())
    train_one(config, folder, Machine.current(), accept_lost=True)
    assert (folder / "result.json").is_file()
    assert is_finished(job, place)  # it saved no other checkpoint, and still need not be told twice


@pytest.mark.slow("trains two runs")
def test_a_pipeline_takes_a_stage_with_lost_rows_where_told_to(config, folder: Path):
    with pytest.raises(ValueError, match="`accept_lost_rows=True`"):
        stages._reinforced(config, folder, lambda line: None, accept_lost=False)
    assert stages._reinforced(config, folder, lambda line: None, accept_lost=True)[0] > 0
