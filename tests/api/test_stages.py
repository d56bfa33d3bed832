"""`proximo.sft`, `dpo`, `reward_model`, `evaluate` and `compare`: what their commands do."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import proximo
from proximo.cli import main
from proximo.insight.compare import workers
from proximo.system import slow_work
from proximo.tasks import Arithmetic
from tests.api.settings import small
from tests.run_processes import RunStarter
from tests.runs.tracking.folders import MINE


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow("trains a run")
@pytest.mark.parametrize(("stage", "command"), [(proximo.dpo, "dpo"), (proximo.reward_model, "reward-model")])
def test_stages_write_what_their_commands_write(stage, command: str, pairs: str, tmp_path: Path, capsys):
    fitted = stage(pairs, tmp_path / "ours", model="tiny-arithmetic", quiet=True)
    assert capsys.readouterr().err == ""
    assert main([command, pairs, "--model", "tiny-arithmetic", "--run", str(tmp_path / "theirs")]) == 0
    ours, theirs = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("ours", "theirs"))
    assert ours == theirs
    assert fitted.checkpoint.parent == tmp_path / "ours" / "checkpoints"
    assert stage(pairs, tmp_path / "ours", model="tiny-arithmetic", quiet=True) == fitted
    with pytest.raises(ValueError, match="holds a run with another config"):
        stage(pairs, tmp_path / "ours", model=str(fitted.checkpoint), quiet=True)


def test_a_whole_config_has_its_own_model(pairs: str, tmp_path: Path):
    config = proximo.DpoConfig(proximo.DataFile(pairs))
    with pytest.raises(ValueError, match="set config.model"):
        proximo.dpo(config, tmp_path / "run", model="tiny-arithmetic")
    assert proximo.dpo(config, tmp_path / "run", quiet=True).steps > 0


# Trackers


@pytest.mark.slow("trains a model")
def test_a_stage_is_tracked_while_it_runs_and_sent_afterwards(pairs: str, tmp_path: Path, monkeypatch):
    """Both doors start the trackers of a run that is not finished; what is sent comes from the folder."""
    started: list[tuple[Path, list[str]]] = []

    @contextmanager
    def tracked(run: Path, names, say):
        started.append((run, list(names)))
        yield

    for module in ("proximo.api.stages", "proximo.cli.commands.stages"):
        monkeypatch.setattr(f"{module}.tracked", tracked)
    (tmp_path / "mine.py").write_text(MINE)
    tracker, run = f"{tmp_path / 'mine.py'}:Mine", tmp_path / "run"
    proximo.dpo(pairs, run, model="tiny-arithmetic", track=[tracker], quiet=True)
    flags = [pairs, "--model", "tiny-arithmetic", "--run", str(run), "--track", tracker]
    assert main(["dpo", *flags]) == 0  # finished
    assert main(["reward-model", *flags[:-3], str(tmp_path / "other"), *flags[-2:]]) == 0
    assert started == [(run, [tracker]), (run, []), (tmp_path / "other", [tracker])]
    [sent] = proximo.track(run, to=[tracker])
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    metrics = [row for row in rows if row[0] == "metrics"]
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [values["loss"] for _, _, values in metrics if "loss" in values] == [
        row["loss"] for row in written if "loss" in row
    ]
    assert any(name.startswith("best/") for name in rows[-1][1])
    assert rows[-1][0] == "close"
    assert sent.items == len(rows) - 1
    with pytest.raises(ValueError, match="nothing"):
        proximo.sft(pairs, tmp_path / "third", model="tiny-arithmetic", track=["nothing"])


# evaluate


def test_evaluate_is_what_eval_prints(capsys):
    task = Arithmetic(digits=1, held_out=8)
    found = proximo.evaluate("tiny-arithmetic", task, problems=8, samples=2, quiet=True)
    flags = ["--task.digits", "1", "--task.held-out", "8", "--problems", "8", "--samples", "2"]
    assert main(["eval", "tiny-arithmetic", *flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.items() >= found.floats().items()
    assert printed["held_out/pass@2"] == found.pass_at_k


def test_evaluate_asks_every_row_of_data(tmp_path: Path, capsys):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = proximo.SamplingOptions(max_tokens=2)
    by_path = proximo.evaluate("tiny-arithmetic", data=str(path), sampling=short, quiet=True)
    assert by_path.problems == 6
    assert proximo.evaluate("tiny-arithmetic", str(path), sampling=short, quiet=True).accuracy == by_path.accuracy
    with pytest.raises(ValueError, match="task and data are both given"):
        proximo.evaluate("tiny-arithmetic", "arithmetic", data=rows)


@pytest.mark.slow("trains a model")
def test_a_runs_own_model_is_evaluated_as_the_run_evaluated_itself(tmp_path: Path, capsys):
    result = proximo.train(small(steps=1), tmp_path / "run", quiet=True)
    assert proximo.evaluate(tmp_path / "run") == result.after
    assert "settings from" in capsys.readouterr().err
    assert proximo.evaluate(result.checkpoint, problems=2, quiet=True).problems == 2


def test_a_model_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere"):
        proximo.evaluate(tmp_path / "nowhere")


# compare


@pytest.mark.slow("trains several runs")
def test_compare_trains_each_config_with_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "starter", RunStarter)
    base = small(training=replace(small().training, minibatches=1))
    configs = [base, replace(base, algorithm=proximo.SAPO)]
    result = proximo.compare(configs, seeds=1, updates=1, run=tmp_path / "both", quiet=True)
    assert [standing.name for standing in result.contenders] == ["grpo", "sapo"]
    assert result.fair
    assert all(not standing.unfinished for standing in result.contenders)
    assert (tmp_path / "both" / "compare.html").is_file()
    assert proximo.open_run(tmp_path / "both" / "runs" / "sapo-seed-0").algorithm == proximo.SAPO
    again = proximo.compare(configs, seeds=1, updates=1, run=tmp_path / "both", quiet=True)
    assert again.contenders == result.contenders


def test_what_cannot_be_compared_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="a comparison needs two at least"):
        proximo.compare([small()], run=tmp_path / "run")
    with pytest.raises(ValueError, match="tokens and updates are both given"):
        proximo.compare([small(), small()], tokens=9, updates=9, run=tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a comparison"):
        proximo.compare([small(), small()], run=tmp_path / "full")


@pytest.mark.slow("prepares four runs")
def test_what_takes_long_before_the_first_step_is_told_unless_it_is_to_be_quiet(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slow_work, "PATIENCE", -1.0)
    monkeypatch.chdir(tmp_path)
    bad = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": ""}]
    good = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(100)]
    for quiet in (True, False):
        with pytest.raises(ValueError, match="completion is empty"):
            proximo.sft(bad, model="tiny-arithmetic", run="stage", quiet=quiet)
        assert ("1 of 1 rows encoded" in capsys.readouterr().err) is not quiet
        with pytest.raises(ValueError, match="no room for a prompt"):
            proximo.train("tiny-arithmetic", data=good, quiet=quiet, max_tokens=10**6)
        assert ("1 of 100 rows of " in capsys.readouterr().err) is not quiet
