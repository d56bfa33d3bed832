"""`proximo.open_run`: what is in a run folder, as tables and charts."""

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest
import torch

import proximo
from proximo.supervised.fitting import Fitted
from proximo.system.locks import FolderLock
from tests.api.settings import small
from tests.rows import metrics_of

CONFIG = small(training=replace(small().training, groups=8), evaluation=proximo.EvaluationOptions(problems=4, every=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("runs") / "mine"
    proximo.train(CONFIG, folder, quiet=True)
    return folder


def killed(folder: Path, copy: Path) -> Path:
    """As a run is left that died in the middle of a row."""
    (copy / "rollouts").mkdir(parents=True)
    for name in ("config.toml", "run.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    (copy / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-20])
    return copy


@pytest.mark.slow("trains a run")
def test_metrics_have_one_row_a_step(folder: Path):
    table = proximo.open_run(folder).metrics()
    rows = metrics_of(folder)
    assert table.column("step").to_pylist() == [0, 1, 2, 3]
    trained = {row["step"]: row["outcome"] for row in rows if "outcome" in row}
    assert table.column("outcome").to_pylist() == [None, *trained.values()]
    evaluated = {row["step"]: row["held_out/accuracy"] for row in rows if "held_out/accuracy" in row}
    assert table.column("held_out/accuracy").to_pylist() == [evaluated.get(step) for step in range(4)]
    assert evaluated.keys() == {0, 2, 3}
    assert table.schema.field("step").type == pa.int64()
    assert {field.type for field in table.schema if field.name != "step"} == {pa.float64()}


def test_rollouts_are_all_completions_of_a_step(folder: Path):
    run = proximo.open_run(folder)
    assert run.steps == [1, 2, 3]
    table = run.rollouts(step=2)
    assert table.num_rows == 8 * 4
    assert {"prompt", "text", "tokens", "outcome", "reward", "advantages"} <= set(table.column_names)
    with pytest.raises(ValueError, match="no rollouts of step 9: there are 1 to 3"):
        run.rollouts(9)


def test_config_algorithm_result_and_events(folder: Path):
    run = proximo.open_run(str(folder))
    assert run.config == CONFIG
    assert run.algorithm == proximo.GRPO
    assert run.path == folder
    assert isinstance(run.result, proximo.RunResult)
    assert run.result.after.accuracy == metrics_of(folder)[-1]["held_out/accuracy"]
    assert run.state == "finished"
    assert repr(run) == f"<run {folder}: grpo, finished, 3 steps>"
    assert all("kind" in event for event in run.events())
    assert run.findings() == []


def test_a_killed_run_opens_too(folder: Path, tmp_path: Path):
    run = proximo.open_run(killed(folder, tmp_path / "dead"))
    assert (run.state, run.result) == ("stopped", None)
    assert run.metrics().column("step").to_pylist() == [0, 1, 2, 3]
    assert math.isfinite(run.metrics().column("outcome").to_pylist()[-1])
    lock = FolderLock(run.path)
    try:
        assert run.state == "running"
    finally:
        lock.release()
    empty = proximo.open_run(killed(folder, tmp_path / "new"))
    (empty.path / "metrics.jsonl").write_text("")
    assert empty.metrics().num_rows == 0
    assert repr(empty).endswith("stopped, 0 steps>")


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="is no run"):
        proximo.open_run(tmp_path)


# Charts


def test_a_plot_is_a_drawing_with_its_own_style(folder: Path, tmp_path: Path):
    plot = proximo.open_run(folder).plot("outcome")
    drawing = ElementTree.fromstring(plot._repr_svg_())
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text or "" for element in drawing.iter() if element.tag.endswith("}text")]
    assert texts[0] == "outcome"
    assert any(text.startswith("training ") for text in texts)
    assert any(text.startswith("held-out ") for text in texts)
    (style,) = [element.text or "" for element in drawing.iter() if element.tag.endswith("}style")]
    assert "--s1: #1e5581" in style
    assert "--s1: #95bacd" in style  # on dark
    selectors = [each.strip() for each in style.replace("@media (prefers-color-scheme: dark){", "").split("}")]
    assert all(each.startswith((".chart", "@media")) for each in selectors if each)  # nothing outside is restyled
    assert plot.svg in plot._repr_html_()
    assert plot.save(tmp_path / "a.svg").read_text() == plot.svg
    assert "outcome of mine" in repr(plot)


def test_several_metrics_are_several_lines(folder: Path):
    svg = proximo.open_run(folder).plot("clip_low", "clip_high", title="Clipped").svg
    assert "Clipped" in svg
    assert "clip_low" in svg
    assert "clip_high" in svg
    with pytest.raises(ValueError, match="'clip' is no metric of .*; there are .*clip_low"):
        proximo.open_run(folder).plot("clip")


# The lens


def test_the_lens_reproduces_the_logged_loss(folder: Path):
    own, sapo, wide = proximo.open_run(folder).lens(2, "sapo", proximo.DAPO)
    (row,) = [row for row in metrics_of(folder) if row["step"] == 2 and "policy_loss" in row]
    assert own.policy_loss == pytest.approx(row["policy_loss"], abs=1e-6)
    assert (own.name, sapo.name, wide.name) == ("grpo", "sapo", "dapo")
    assert 0 < sapo.cosine <= 1 + 1e-9
    with pytest.raises(ValueError, match="no algorithm is called 'gropo'"):
        proximo.open_run(folder).lens(2, "gropo")


# Stages


def test_a_stage_opens_too(tmp_path: Path):
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(20)))
    fitted = proximo.sft(data, tmp_path / "sft", model="tiny-arithmetic", quiet=True)
    run = proximo.open_run(tmp_path / "sft")
    assert isinstance(run.config, proximo.SftConfig)
    assert run.algorithm is None
    assert isinstance(run.result, Fitted)
    assert run.result == fitted
    assert run.metrics().num_rows == fitted.steps + 1
    assert "a stage, finished" in repr(run)
    ElementTree.fromstring(run.plot("loss").svg)
