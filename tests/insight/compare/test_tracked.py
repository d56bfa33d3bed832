"""Runs of a comparison that are sent to trackers while they run."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proximo.cli import main
from proximo.insight.compare import worker, workers
from proximo.insight.compare.comparison_folder import ComparisonFolder
from proximo.insight.compare.plan import Budget, make_plan
from proximo.recipes.presets import ARITHMETIC
from proximo.system.machine import Machine


@pytest.fixture
def plan():
    return make_plan([("a", ARITHMETIC), ("b", replace(ARITHMETIC, seed=0, steps=3))], 1, Budget("updates", 4))


def test_each_process_is_given_the_trackers(plan, tmp_path: Path, monkeypatch):
    """What the comparison starts, its process reads: a run is tracked in its own folder while it trains."""
    files, job = ComparisonFolder(tmp_path / "c", ["tensorboard", "my file.py:Mine"]), next(iter(plan.jobs()))
    files.settle(plan, {}, [])
    commands: list[list[str]] = []
    starter: Any = SimpleNamespace(start=lambda arguments, log: commands.append([*map(str, arguments)]))
    workers._start(job, files, Machine.current(), False, starter)
    events: list[object] = []

    @contextmanager
    def tracked(run: Path, names: list[str], say):
        events.append((run, list(names)))
        yield
        events.append("ended")

    monkeypatch.setattr(worker, "tracked", tracked)
    monkeypatch.setattr(worker, "Run", lambda *arguments: None)
    monkeypatch.setattr(worker, "train", lambda run, session: events.append("trained"))
    monkeypatch.setattr(worker.tree, "end_with", lambda parent: True)
    assert worker.main([*commands[0], "1"]) == 0
    assert events == [(files.run(job), ["tensorboard", "my file.py:Mine"]), "trained", "ended"]


@pytest.mark.slow("chooses configs for a model and data")
def test_compare_takes_trackers_and_skips_bad_rows(tmp_path: Path, monkeypatch, capsys):
    from proximo.cli.commands import compare

    seen: list = []

    def compared(plan, path, jobs, command, view, *, accept_lost, track, allowed):
        seen.append((plan, track, allowed))
        raise ValueError("enough")

    monkeypatch.setattr(compare, "compared", compared)
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(40)) + "{}\n")
    flags = ["--model", "tiny-arithmetic", "--data", str(data), "--updates", "4", "--run", str(tmp_path / "c")]
    monkeypatch.setattr("proximo.cli.run_folders.check_names", lambda names: None)  # none of their packages is here
    more = ["--skip-bad", "--track", "tensorboard", "--sampling.max-tokens", "8", "--allow-change", "device"]
    with pytest.raises(SystemExit):
        main(["compare", "--algorithms", "grpo", "gspo", *flags, *more])
    assert "enough" in capsys.readouterr().err
    [(plan, track, allowed)] = seen
    assert [each.name for each in plan.contenders] == ["grpo", "gspo"]
    assert all(each.config.task.skip_bad for each in plan.contenders)
    assert (track, allowed) == (["tensorboard"], ["device"])
