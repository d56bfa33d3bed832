"""A curriculum draws by measured pass rates, and rates measure them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import proximo
from proximo.cli.commands.rate import RateConfig, rated
from proximo.data import Mistakes, read_rows
from proximo.recipes import pass_rates
from proximo.rewards import ExactMatch
from proximo.rl.config import Curriculum, RunConfig
from proximo.rl.preflight.preflight import rehearse
from proximo.runs.ledger import check_ledger
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import File, Mixture, Source
from proximo.tasks.sources.mixture import data_remarks
from tests.api.settings import small

pytestmark = pytest.mark.usefixtures("ordinary_precision")


def sums(path: Path, count: int, **columns: Any) -> str:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "pass_rate": n / count} | columns for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_chances_and_running_rates():
    curriculum = Curriculum(floor=0.1, newest=0.25)
    chances = [curriculum.chance(rate) for rate in (None, 0.0, 0.5, 0.75, 1.0)]
    assert chances == [1.0, 0.1, 1.0, 0.75, 0.1]
    assert curriculum.updated({"a": 0.5}, [("a", 1.0), ("b", 0.25), ("a", 1.0)]) == {"a": 0.71875, "b": 0.25}
    drawn = sum(curriculum.draws(index, 0, 0.75) for index in range(2000)) / 2000
    assert drawn == pytest.approx(0.75, abs=0.03)
    with pytest.raises(ValueError, match="training.curriculum: floor 0.0"):
        Curriculum(floor=0.0)


@pytest.mark.slow("trains and resumes a run")
def test_a_run_with_a_curriculum_resumes_to_the_same_bytes(tmp_path: Path):
    task = File(sums(tmp_path / "x.jsonl", 6), held_out=0.0, reward=ExactMatch(last_number=True))
    config = small(task=task, evaluation=proximo.EvaluationOptions(problems=0), steps=6)
    config = replace(config, training=replace(config.training, curriculum=Curriculum(floor=0.3)))
    proximo.train(config, tmp_path / "whole", quiet=True)
    proximo.train(config, tmp_path / "parts", quiet=True, on_step=lambda step, _: step == 4)
    proximo.train(config, tmp_path / "parts", quiet=True, allow_change=["steps"])
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    proof = check_ledger(whole)
    assert not proof.wrong
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert proof.states["passed_over"] == sum(row["passed_over"] for row in rows) > 0
    assert rows[0]["passed_over"] == rows[1]["passed_over"] == 0  # before any prompt has a rate


# Rates


def test_rates_are_the_same_however_often_rating_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pass_rates, "AT_ONCE", 2)
    task = File(sums(tmp_path / "x.jsonl", 5), held_out=1.0)
    config = RateConfig(task=task, sampling=SamplingOptions(max_tokens=4), samples=3, device="cpu")
    whole = rated(config, tmp_path / "whole.jsonl")
    assert [row["prompt"] for row in whole.rows] == [f"{n}+{n}=" for n in range(5)]
    assert all(row["pass_rate_samples"] == 3 for row in whole.rows)
    assert any(rate in (1 / 3, 2 / 3, 1.0) for rate in whole.rates)
    out = tmp_path / "parts.parquet"

    def stop(done: int, rows: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("proximo.cli.commands.rate._tell", stop)
    with pytest.raises(KeyboardInterrupt):
        rated(config, out)
    part = tmp_path / "parts.parquet.part.jsonl"
    part.write_text(part.read_text() + '{"problem": "cut')
    with pytest.raises(ValueError, match="was rated with other settings"):
        rated(replace(config, samples=4), out)
    seen = []
    monkeypatch.setattr("proximo.cli.commands.rate._tell", lambda done, rows: seen.append(done))
    assert rated(config, out).rows == whole.rows
    assert seen == [4, 5]
    assert [row.values for row in read_rows(str(out), Mistakes())] == whole.rows
    assert not part.exists()
    with pytest.raises(ValueError, match="which exists: give another name"):
        rated(config, out)


def test_rows_are_kept_by_their_pass_rate(tmp_path: Path):
    path = sums(tmp_path / "x.jsonl", 10)
    kept = File(path, held_out=0.0, keep_pass_rate=(0.2, 0.5))
    assert sorted(kept.problem(index, "train", 0).data["pass_rate"] for index in range(4)) == [0.2, 0.3, 0.4, 0.5]
    assert kept.size("train") == 4
    line = f"{path}: task.keep_pass_rate leaves out 6 of 10 training rows, whose pass rate is not within 0.2 to 0.5"
    assert data_remarks(kept) == data_remarks(Mixture((Source("sums", kept),))) == [line]
    assert data_remarks(File(path, held_out=0.0)) == []
    config = RunConfig(task=replace(kept, held_out=0.3), device="cpu", sampling=SamplingOptions(max_tokens=4))
    assert any("task.keep_pass_rate leaves out" in remark for remark in rehearse(config).remarks)
    assert File(path, held_out=1.0, keep_pass_rate=(0.2, 0.5)).size("held_out") == 10
    unrated = File(sums(tmp_path / "y.jsonl", 2, pass_rate=None), held_out=0.0, keep_pass_rate=(0.0, 1.0))
    with pytest.raises(ValueError, match="no row is left for train"):
        unrated.size("train")
    (tmp_path / "z.jsonl").write_text('{"prompt": "p", "answer": "1"}\n')
    with pytest.raises(ValueError, match="has no column pass_rate: `proximo rate` writes it"):
        File(str(tmp_path / "z.jsonl"), held_out=0.0, keep_pass_rate=(0.0, 1.0)).size("train")
    with pytest.raises(ValueError, match="give two shares, the lower first"):
        File(path, keep_pass_rate=(0.9, 0.1))


# Data given in Python


class Dataset:
    """As Hugging Face's, as far as it is asked."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def to_list(self) -> list[dict[str, Any]]:
        return self.rows


def test_rows_given_in_python_are_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n}+1=", "answer": f"#### {n + 1}"} for n in range(8)]
    task = proximo.task_of(rows, held_out=0.25)
    assert isinstance(task, File)
    assert task.reward == ExactMatch(last_number=True)
    assert "8 rows, GSM8K's shape" in capsys.readouterr().err
    assert proximo.task_of(Dataset(rows), held_out=0.25, quiet=True) == task
    assert [row.values for row in read_rows(task.path, Mistakes())] == rows
    with pytest.raises(ValueError, match="data has no rows"):
        proximo.task_of(Dataset([]))


def test_a_run_on_data_and_a_reward_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows, others = ([{"prompt": f"{n}+{k}="} for n in range(8)] for k in (1, 2))
    longer = lambda completions, **columns: [float(len(text)) for text in completions]  # noqa: E731
    proximo.train(small(steps=1), "runs/mine", data=rows, evaluation_data=others, rewards=longer, quiet=True)
    config = proximo.open_run("runs/mine").config
    assert isinstance(config, proximo.RunConfig)
    assert isinstance(config.task, File)
    assert (config.task.size("train"), config.task.size("held_out")) == (8, 8)
