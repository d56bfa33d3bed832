"""A run on several processes that is started from Python."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import proximo
from proximo.distributed import launching
from proximo.learner.ranks import Ranks
from proximo.rl.config import EvaluationOptions, TrainingOptions
from proximo.runs.webhook import Webhook

CONFIG = replace(
    proximo.presets.ARITHMETIC,
    steps=1,
    training=TrainingOptions(groups=4, group_size=4, minibatches=2),
    evaluation=EvaluationOptions(problems=8),
    ranks=Ranks(processes=2),
)


def test_what_the_command_is_asked_and_what_becomes_of_its_status(tmp_path, monkeypatch):
    asked, told = [], []
    monkeypatch.setenv("PROXIMO_NOTIFY", "https://ntfy.sh/mine")

    def launch(command, ranks, say, folder, webhook, *, quiet, start):
        asked.append((command[3:], ranks, quiet, Path(command[4]).read_text()))
        told.append((folder, webhook))
        return status

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr("proximo.api.training.check_names", lambda names: None)
    call = {"allow_change": ["steps"], "accept_lost_rows": True, "track": ["tensorboard"], "quiet": True}
    status = 1
    with pytest.raises(ValueError, match="`proximo train` ended with status 1"):
        proximo.train(CONFIG, tmp_path / "run", **call)
    [(arguments, ranks, quiet, config)] = asked
    flags = "--allow-change steps --accept-lost-rows --track tensorboard"
    assert (arguments[0], arguments[2:]) == ("train", ["--run", str(tmp_path / "run"), *flags.split()])
    assert (ranks, quiet) == (2, True)
    assert told == [(tmp_path / "run", Webhook("https://ntfy.sh/mine", "ntfy.sh"))]
    assert "processes = 2" in config
    status = 130
    with pytest.raises(KeyboardInterrupt, match="the same call resumes"):
        proximo.train(CONFIG, tmp_path / "run", quiet=True)


def test_what_other_processes_cannot_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_step is given, but ranks are processes of their own"):
        proximo.train(CONFIG, tmp_path / "run", on_step=print)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    with pytest.raises(ValueError, match="which is not empty, and resume is False"):
        proximo.train(CONFIG, tmp_path / "used", resume=False)


@pytest.mark.scale
def test_python_trains_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(proximo.__file__).parents[1])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = proximo.train(CONFIG, tmp_path / "run", quiet=True)
    assert run.after.problems == 8
    assert run.checkpoint.name == "step-000001"
    [row] = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    assert {"rank 0", "rank 1"} <= {lane for lane, *_ in row["intervals"]}
