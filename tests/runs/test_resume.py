"""A run that was killed and gone on with is the run that was not: to the last bit, from every step."""

import io
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import proximo
from proximo.algorithms import DAPO, DISTILL, GRPO, GSPO, PPO, SAPO, Algorithm, explain
from proximo.cli import main
from proximo.config import toml
from proximo.data import DataFile
from proximo.learner.named_tensors import write_tensors
from proximo.losses import AdaptiveKl, GroupNormalized, KlReward, TeacherKl
from proximo.models import load_model, tiny_model, tiny_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.shipped import resolve
from proximo.models.values import OwnLayers, OwnModel, TrunkHead
from proximo.processes.failures import Failure
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.grading import GroupGrader
from proximo.rl.result import RunResult
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.checkpoints import (
    CHECKPOINTS,
    MAX_FAILURES,
    Saver,
    newest_valid,
    retain,
    saved,
    step_of,
    write_checkpoint,
)
from proximo.runs.config_changes import differences, function_fingerprints
from proximo.runs.ledger import check_ledger
from proximo.runs.log import RunLog
from proximo.runs.options import CheckpointOptions
from proximo.runs.session import open_session
from proximo.runs.signals import Stopped
from proximo.runs.state import naming_io
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.dpo import DpoConfig, dpo
from proximo.supervised.fitting import FitOptions
from proximo.supervised.kept_checkpoints import KeptCheckpoints
from proximo.supervised.reward_model import RewardModelConfig, train_reward_model
from proximo.supervised.sft import SftConfig, sft
from proximo.supervised.snapshots import POINTS
from proximo.system.folders import MANIFEST, complaints, file_hash, write_folder
from proximo.system.lines import JsonLines
from proximo.system.locks import FolderLock
from proximo.system.sealing import sealed
from proximo.system.version import source_fingerprint
from proximo.tasks.arithmetic import Arithmetic
from tests.policies import plain
from tests.run_processes import Command

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")


class Quiet:
    """Says nothing, and can be asked to stop something at a step."""

    def __init__(self, at: Callable[[int], None] = lambda _: None) -> None:
        self.at, self.warnings = at, list[str]()

    def start(self, steps, before) -> None: ...
    def stepped(self, step, metrics, seconds, collected) -> None:
        self.at(step)

    def evaluated(self, step, evaluation) -> None: ...
    def warned(self, step, message) -> None:
        self.warnings.append(message)

    def stop(self) -> None: ...


def config(algorithm: Algorithm = GRPO, **changes) -> RunConfig:
    small = RunConfig(
        algorithm=algorithm,
        task=Arithmetic(operations=("+",), digits=1, terms=2, held_out=8),
        device="cpu",
        sampling=SamplingOptions(max_tokens=6),
        training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-4, warmup_steps=2),
        evaluation=EvaluationOptions(problems=4),
        checkpoints=CheckpointOptions(every=1, keep=100),
        steps=4,
    )
    return replace(small, **changes)


def trained(settings: RunConfig, folder: Path, progress: Quiet | None = None) -> RunResult:
    return train(Run(settings, folder, progress or Quiet()))


def numbers(folder: Path) -> dict[str, Any]:
    """Everything that must be the same in both runs."""
    last = saved(folder / CHECKPOINTS)[0]
    standing = json.loads((last / "state" / "run_state.json").read_text())
    del standing["seconds"], standing["run"]  # the clock, and how the run began: perhaps with fewer steps
    result = json.loads((folder / "result.json").read_text())
    del result["seconds"]
    files = [*last.glob("*.safetensors"), *last.glob("state/*.safetensors"), *folder.glob("rollouts/*.parquet")]
    files += [folder / "metrics.jsonl", folder / "ledger.jsonl"]
    return {"standing": standing, "result": result} | {
        str(file.relative_to(folder)): file.read_bytes() for file in files
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name] == wanted[name], name  # the first that differs


def left_after(step: int, whole: Path, folder: Path) -> Path:
    """What a run leaves that dies somewhere after this step was saved: logs go on behind it."""
    ignore = [path.name for path in saved(whole / CHECKPOINTS) if step_of(path) != step]
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*ignore, "result.json"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "torn')
    return folder


LORA = Lora(rank=4, alpha=8)
RUNS = {
    "grpo": config(),
    "grpo, two epochs": config(training=TrainingOptions(groups=4, group_size=4, minibatches=2, epochs=2)),
    "dapo": config(DAPO, training=TrainingOptions(groups=3, group_size=4, minibatches=1, learning_rate=1e-4), steps=5),
    "dapo, same prompt": config(DAPO, training=replace(config().training, refill="same_prompt"), steps=3),
    "ppo": config(PPO, value=ValueOptions(TrunkHead()), steps=3),
    "ppo, own layers": config(PPO, value=ValueOptions(OwnLayers(1), pretrain_steps=1), steps=3),
    "ppo, own model": config(
        PPO,
        value=ValueOptions(OwnModel(), pretrain_steps=1),
        training=replace(config().training, adam_moments="cpu", learning_rate_schedule="cosine"),
        steps=3,
    ),
    "split groups": config(PPO, training=replace(config().training, token_budget=12), steps=3),
    "reset reference": config(training=replace(config().training, reset_reference_every=1)),
    "lagging sampler": config(sampler=Mismatched(precision="bfloat16", lag=2), steps=5),
    "adaptive kl": config(replace(PPO, shape=KlReward(0.1, controller=AdaptiveKl(target=1.0, horizon=8))), steps=3),
    "distill": config(
        replace(DISTILL, advantage=TeacherKl(0.1, of=GroupNormalized())), teacher="tiny-arithmetic", steps=2
    ),
    "evaluated": config(evaluation=EvaluationOptions(problems=4, every=1), steps=3),
    "frozen, 8-bit moments": config(
        training=replace(config().training, freeze=("embed", "layers.0."), adam_moments="8bit"), steps=2
    ),
    "lora, grpo": config(adapter=LORA, training=replace(config().training, reset_reference_every=1), steps=3),
    "int8 base, ppo": config(
        PPO, adapter=replace(LORA, quantize_base="int8"), value=ValueOptions(OwnLayers(1)), steps=2
    ),
    "lora, dapo": config(DAPO, adapter=LORA, steps=2),
    "lora, gspo": config(GSPO, adapter=LORA, steps=2),
    "nf4 base, sapo": config(SAPO, adapter=replace(LORA, quantize_base="nf4"), steps=2),
}


EVERY_STEP = ("dapo",)
"""The others go on from one step in the middle here, and from each in the fault suite."""


@pytest.fixture(scope="module")
def golden(tmp_path_factory, small_shipped_model) -> Callable[[str], Path]:
    """The folder of a run that nobody has disturbed, by name; made when it is first asked for."""
    root = tmp_path_factory.mktemp("golden")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            trained(RUNS[name], root / name)
        return root / name

    return folder


@pytest.mark.slow("trains and resumes runs")
@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits_wherever_it_went_on_from(name, golden, tmp_path):
    if "nf4" in name:
        pytest.importorskip("bitsandbytes")
    settings, whole = RUNS[name], golden(name)
    wanted = numbers(whole)
    assert any(
        0 < row.get("outcome", 0) < 1 for row in JsonLines(whole / "metrics.jsonl")
    )  # there is something to learn
    for step in range(1, settings.steps + 1) if name in EVERY_STEP else [settings.steps - 1]:
        folder = left_after(step, whole, tmp_path / str(step))
        trained(settings, folder)
        assert_same(numbers(folder), wanted)
        [first, second] = json.loads((folder / "run.json").read_text())["attempts"]
        assert (first["number"], first["from"], second["from"]) == (1, None, f"step-{step:06d}")
    proof = check_ledger(
        whole, json.loads((saved(whole / CHECKPOINTS)[0] / "state/run_state.json").read_text())["next_problem"]
    )
    assert proof.wrong == ()
    assert proof.drawn == sum(proof.states.values()) > 0


@pytest.mark.slow("trains and resumes a run")
def test_a_run_that_stops_improving_ends_early_and_resumes_to_the_same_end(tmp_path):
    """With steps too small to change an answer: the first evaluation is the best, and two more find nothing better."""
    settings = config(
        training=replace(config().training, learning_rate=1e-12),
        evaluation=EvaluationOptions(problems=4, every=1, patience=2),
        steps=6,
    )
    whole = tmp_path / "whole"
    trained(settings, whole)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "held_out/accuracy" in row] == [0, 1, 2, 3]
    assert [step_of(path) for path in saved(whole / CHECKPOINTS)] == [3, 2, 1]
    assert "2 evaluations in a row found nothing better than" in (whole / "events.jsonl").read_text()
    for step in (2, 3):
        folder = left_after(step, whole, tmp_path / str(step))
        trained(settings, folder)
        assert_same(numbers(folder), numbers(whole))
    with pytest.raises(ValueError, match=r"evaluation.patience is 2, evaluation.every None"):
        EvaluationOptions(patience=2)


def test_a_run_ends_at_its_target_by_the_metric_that_is_named(tmp_path):
    """The second evaluation between steps reaches the target; outcomes alone would name the first the best."""
    options = EvaluationOptions(problems=4, every=1, metric="reward", target=0.6)
    settings = config(evaluation=options, steps=6)
    run = Run(settings, tmp_path / "run", Quiet())
    found, evaluate = iter([0.1, 0.2, 0.6, 0.7]), run.evaluate

    def told():
        evaluation, answers = evaluate()
        reward = next(found)
        return replace(evaluation, outcome=1 - reward, reward=reward), answers

    run.evaluate = told
    train(run)
    [newest, *_] = saved(tmp_path / "run" / CHECKPOINTS)
    assert step_of(newest) == 2
    assert json.loads((newest / "state/run_state.json").read_text())["best"] == {"step": 2, "value": 0.6}
    assert "reward 0.6 after step 2 reaches evaluation.target, 0.6" in (tmp_path / "run/events.jsonl").read_text()


def test_metrics_that_no_evaluation_has_are_refused(tmp_path):
    for metric, words in (("pass_at_k", "with evaluation.samples"), ("parts/tone", "an evaluation gives accuracy, ")):
        with pytest.raises(ValueError, match=f"evaluation.metric is '{metric}'.*{words}"):
            trained(config(evaluation=EvaluationOptions(problems=4, metric=metric)), tmp_path / metric)
    with pytest.raises(ValueError, match=r"evaluation.target is 0.5, but evaluation.every is None"):
        EvaluationOptions(target=0.5)


def to_format_1(point: Path, settings: RunConfig) -> None:
    """Rewrite a checkpoint as versions before named tensors did: one flat table, and numbers in parameter order."""
    state, run = point / "state", Run(settings, point.parent, Quiet())
    facts = json.loads((state / "run_state.json").read_text())
    learner, sampler = facts["parts"].pop("learner"), facts["parts"].pop("sampler")
    facts["parts"] |= learner | learner["policy"] | {"snapshot_versions": sampler["versions"]}
    del facts["parts"]["policy"]
    guard = facts["parts"]["guard"]
    facts["parts"]["guard"] = {"most_tokens": guard.pop("max_tokens")} | guard
    (state / "run_state.json").unlink()
    names = {
        "value": list(plain(run.learner).value_parameters()),
        "reference": [name for name, _ in run.model.named_parameters()],
    }
    names["sampler"] = names["reference"]
    names["optimizer"] = [*plain(run.learner).parameters(), *(f"value/{name}" for name in names["value"])]
    for file, known in names.items():
        path, found = state / f"{file}.safetensors", {}
        for key, tensor in (load_file(path) if path.exists() else {}).items():
            before, name, after = "", key, ""
            if file == "optimizer":
                name, _, after = key.rpartition(".")
                before, after = f"{after}.", ""
            if file == "sampler":
                before, _, name = key.partition(".")
                before += "."
            found[f"{before}{known.index(name)}{after}"] = tensor
        write_tensors(path, found)

    def fill(folder: Path) -> None:
        shutil.copytree(point, folder, dirs_exist_ok=True)
        (folder / MANIFEST).unlink()
        (folder / "state" / "standing.json").write_text(json.dumps(facts | {"format": 1}) + "\n")

    write_folder(point, fill)


@pytest.mark.slow("trains and resumes runs")
@pytest.mark.parametrize("name", ["ppo, own layers", "reset reference", "lagging sampler", "adaptive kl"])
def test_a_checkpoint_that_numbered_its_tensors_is_resumed(name, golden, tmp_path):
    settings, whole = RUNS[name], golden(name)
    folder = left_after(settings.steps - 1, whole, tmp_path / "run")
    [point] = saved(folder / CHECKPOINTS)
    to_format_1(point, settings)
    assert not (point / "state" / "run_state.json").exists()
    assert all(key.rpartition(".")[2].isdigit() for key in load_file(point / "state" / "optimizer.safetensors"))
    trained(settings, folder)
    [_, attempt] = json.loads((folder / "run.json").read_text())["attempts"]
    assert attempt["from"] == point.name
    assert_same(numbers(folder), numbers(whole))


@pytest.mark.slow("trains and resumes a run")
def test_the_runs_reach_what_they_are_to_test(golden):
    """Carried groups, filtered ones, a moved coefficient, older weights: there is something to get wrong."""
    assert any(row.get("unneeded_prompts") for row in JsonLines(golden("dapo") / "metrics.jsonl"))
    for name in ("dapo", "dapo, same prompt"):
        assert {"trained", "filtered"} <= check_ledger(golden(name)).states.keys()
    assert any(row.get("carried_groups") for row in JsonLines(golden("dapo, same prompt") / "metrics.jsonl"))
    assert "carried" in [row["state"] for row in JsonLines(golden("dapo, same prompt") / "ledger.jsonl")]
    coefficients = {row.get("kl_coefficient") for row in JsonLines(golden("adaptive kl") / "metrics.jsonl")}
    assert len(coefficients - {None}) == 3
    assert (golden("lagging sampler") / CHECKPOINTS / "step-000002" / "state" / "sampler.safetensors").exists()
    checkpoints = saved(golden("reset reference") / CHECKPOINTS)
    assert [(path / "state" / "reference.safetensors").exists() for path in checkpoints] == [True, True, True, False]


@pytest.mark.slow("trains and resumes a run")
def test_state_that_is_lost_is_noticed(golden, tmp_path):
    """The comparison above can fail: without its moments, or its place among the problems, a run is another."""
    whole = golden("grpo")
    for name, file in (("moments", "optimizer.safetensors"), ("place", "run_state.json")):
        folder = left_after(2, whole, tmp_path / name)
        state = folder / CHECKPOINTS / "step-000002" / "state"
        if name == "place":
            facts = json.loads((state / file).read_text())
            (state / file).write_text(json.dumps(facts | {"next_problem": facts["next_problem"] + 1}))
        else:
            (state / file).unlink()
        (state.parent / "manifest.json").unlink()
        assert complaints(state.parent) == ["manifest.json: No such file or directory"]
        run = Run(config(), folder, Quiet())
        reseal(state.parent)
        train(run)
        assert numbers(folder)["metrics.jsonl"] != numbers(whole)["metrics.jsonl"]
    assert check_ledger(tmp_path / "place").wrong == ("draw 8 is missing",)


def reseal(folder: Path) -> None:
    """A manifest for a folder as it is."""
    from proximo.system.folders import _seal

    _seal(folder)


# Killed for real

TINY = ["--training.groups", "3", "--training.group-size", "4", "--training.minibatches", "1", "--steps", "8"]
TINY += ["--evaluation.problems", "4", "--evaluation.every", "3", "--checkpoints.every", "1", "--algorithm", "dapo"]


def command(folder: Path) -> Command:
    return Command("train", "--run", str(folder), *TINY, stderr=folder.with_suffix(".log"))


@pytest.mark.slow("kills runs")
def test_kills_at_random_moments_change_nothing(tmp_path):
    whole = command(tmp_path / "whole")
    chance, killed = random.Random(5), []
    for _ in range(2):
        process = command(tmp_path / "killed")
        # A moment within the run, not within its start: some lines on, and a little.
        for _ in zip(range(chance.randint(2, 4)), process.lines(), strict=False):
            pass
        time.sleep(chance.random() * 0.3)
        process.kill()
        killed.append(process.wait())
        assert check_ledger(tmp_path / "killed").wrong == ()
    assert killed == [-signal.SIGKILL] * 2  # the fault happened
    assert command(tmp_path / "killed").wait() == 0
    assert whole.wait() == 0
    wanted = numbers(tmp_path / "whole")
    assert_same(numbers(tmp_path / "killed"), wanted)
    attempts = json.loads((tmp_path / "killed" / "run.json").read_text())["attempts"]
    assert [each["number"] for each in attempts] == list(range(1, len(attempts) + 1))
    assert [each["ended"] for each in attempts] == ["died"] * (len(attempts) - 1) + ["finished"]


# What is in the way


@pytest.mark.slow("trains and resumes a run")
def test_damaged_checkpoints_are_named_and_passed_over(golden, tmp_path):
    whole = golden("grpo")
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("result.json"))
    (folder / CHECKPOINTS / "step-000004" / "model.safetensors").write_bytes(b"")
    (folder / CHECKPOINTS / "step-000003" / "state" / "random.safetensors").unlink()
    (folder / CHECKPOINTS / "step-000005.partial").mkdir()
    trained(config(), folder)
    assert_same(numbers(folder), numbers(whole))
    events = list(JsonLines(folder / "events.jsonl"))
    assert [(row["kind"], row["attempt"]) for row in events] == [("damaged_checkpoint", 2)] * 2 + [("resumed", 2)]
    assert "step-000004 is damaged (model.safetensors: 0 bytes" in events[0]["message"]
    assert "step-000003 is damaged (state/random.safetensors: missing)" in events[1]["message"]
    assert not (folder / CHECKPOINTS / "step-000005.partial").exists()


@pytest.mark.slow("trains and resumes a run")
def test_a_checkpoint_of_another_run_is_passed_over(golden, tmp_path):
    other = replace(config(), seed=1)
    trained(other, tmp_path / "other")
    folder = left_after(2, golden("grpo"), tmp_path / "mixed")
    shutil.copytree(tmp_path / "other" / CHECKPOINTS / "step-000003", folder / CHECKPOINTS / "step-000003")
    trained(config(), folder)
    assert_same(numbers(folder), numbers(golden("grpo")))
    [message] = [row["message"] for row in JsonLines(folder / "events.jsonl") if row["kind"] == "damaged_checkpoint"]
    assert "step-000003 cannot be resumed from: it belongs to another run" in message


@pytest.mark.parametrize("damage", ["gone", "config = [", "run.json", "fingerprints", "functions", "machine"])
def test_a_run_without_its_papers_is_refused(damage, golden, tmp_path, capsys):
    folder = left_after(2, golden("grpo"), tmp_path / "run")
    if damage == "gone":
        (folder / "config.toml").unlink()
    elif damage in ("fingerprints", "functions", "machine"):
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(sealed(record | {damage: []})))
    else:
        (folder / (damage if damage.endswith(".json") else "config.toml")).write_text("config = [")
    with pytest.raises(ValueError, match="it cannot be resumed .its run.json or config.toml is missing, damaged"):
        trained(config(), folder)


@pytest.mark.slow("trains and resumes a run")
def test_without_a_valid_checkpoint_it_begins_again(golden, tmp_path):
    folder = left_after(2, golden("grpo"), tmp_path / "again")
    (folder / CHECKPOINTS / "step-000002" / "manifest.json").write_text("{}")
    trained(config(), folder)
    assert_same(numbers(folder), numbers(golden("grpo")))


LOST = {
    "by bytes": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "by rows": lambda file: file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2])),
    "wholly": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("how", LOST)
def test_lost_rows_are_no_reason_to_train_again_unasked(how, name, golden, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(golden("grpo"), folder, ignore=shutil.ignore_patterns("result.json"))
    LOST[how](folder / name)
    left = (folder / name).read_bytes() if (folder / name).exists() else b""
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    message = (
        rf"{name} has {len(left)} bytes and had \d+ when step-000004 was saved.*Restore the complete file, or resume "
        "without those rows: `accept_lost_rows=True`$"
    )
    with pytest.raises(ValueError, match=message), open_session(folder, toml.dumps(config())):
        pass
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    with open_session(folder, toml.dumps(config()), accept_lost=True) as attempt:
        assert attempt.resume_from == folder / CHECKPOINTS / "step-000004"
        assert not attempt.damaged
        log = attempt.start()
        log.rewind(json.loads((folder / CHECKPOINTS / "step-000004/state/run_state.json").read_text())["sizes"], 4)
    whole = left[: left.rfind(b"\n") + 1]  # a torn last row goes, nothing else
    assert ((folder / name).read_bytes() if (folder / name).exists() else b"") == whole
    assert len(saved(folder / CHECKPOINTS)) == 4
    [event] = [row for row in JsonLines(folder / "events.jsonl") if row["kind"] == "lost_rows"]
    assert (event["step"], name in event["message"]) == (4, True)


@pytest.mark.slow("trains and resumes a run")
def test_a_run_that_lost_rows_ends_with_the_same_weights(golden, tmp_path, capsys):
    whole = golden("grpo")
    folder = left_after(2, whole, tmp_path / "short")
    (folder / "metrics.jsonl").unlink()
    with open_session(folder, toml.dumps(config()), accept_lost=True) as attempt:
        train(Run(config(), folder, Quiet()), attempt)
    found, wanted = numbers(folder), numbers(whole)
    weights = [name for name in wanted if name.endswith(".safetensors")]
    assert weights
    assert {name: found[name] for name in weights} == {name: wanted[name] for name in weights}
    assert found["ledger.jsonl"] == wanted["ledger.jsonl"]
    assert found["metrics.jsonl"] == b"".join(wanted["metrics.jsonl"].splitlines(keepends=True)[3:])  # 3, 4 and the end
    # And it can be resumed again, without the flag: its newest checkpoint knows the shorter file.
    with open_session(folder, toml.dumps(config())) as attempt:
        assert attempt.result is not None


def test_code_that_has_changed_is_told(golden, tmp_path, monkeypatch):
    folder = left_after(3, golden("grpo"), tmp_path / "other")
    record = json.loads((folder / "run.json").read_text())
    known = record["attempts"][0]["source"]
    assert known == record["source"] == source_fingerprint()
    assert record["attempts"][0]["version"] == record["version"] == proximo.__version__
    with open_session(folder, toml.dumps(config())) as attempt:
        assert attempt.other_code is None
    monkeypatch.setattr("proximo.runs.run_json.source_fingerprint", lambda: "feedfeedfeedfeed")
    monkeypatch.setattr("proximo.runs.log.source_fingerprint", lambda: "feedfeedfeedfeed")
    with open_session(folder, toml.dumps(config())) as attempt:
        said = attempt.other_code
        attempt.start()
    assert said is not None
    assert f"source {known} then; version {proximo.__version__}, source feedfeedfeedfeed now" in said
    [event] = [row for row in JsonLines(folder / "events.jsonl") if row["kind"] == "other_code"]
    assert (event["step"], event["message"]) == (3, said)
    assert json.loads((folder / "run.json").read_text())["attempts"][-1]["source"] == "feedfeedfeedfeed"
    with open_session(folder, toml.dumps(config())) as attempt:
        assert attempt.other_code is None  # since the last attempt nothing has changed


def test_the_fingerprint_is_of_the_code_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("proximo.system.version.__file__", str(tmp_path / "system" / "version.py"))

    def found() -> str:
        source_fingerprint.cache_clear()
        return source_fingerprint()

    try:
        (tmp_path / "inside").mkdir()
        (tmp_path / "inside" / "a.py").write_text("1")
        first = found()
        (tmp_path / "inside" / "a.pyc").write_text("compiled")
        assert found() == first
        (tmp_path / "inside" / "a.py").write_text("2")
        assert found() != first
        (tmp_path / "inside" / "a.py").rename(tmp_path / "a.py")
        (tmp_path / "a.py").write_text("1")
        assert found() != first
    finally:
        source_fingerprint.cache_clear()


def test_a_run_names_its_version_and_its_algorithm(tmp_path):
    changed = replace(DAPO, gate=replace(DAPO.gate, high=0.2))
    for name, algorithm, wanted in (("a", DAPO, "dapo"), ("b", changed, "dapo, changed: gate.high")):
        assert explain.named(algorithm) == wanted
        settings = config(algorithm)
        with open_session(tmp_path / name, toml.dumps(settings), algorithm=explain.named(algorithm)) as attempt:
            attempt.start()
        record, text = (
            json.loads((tmp_path / name / "run.json").read_text()),
            (tmp_path / name / "config.toml").read_text(),
        )
        assert (record["version"], record["algorithm"]) == (proximo.__version__, wanted)
        assert text.splitlines()[0] == f"# Proximo {proximo.__version__}, algorithm: {wanted}"
        assert toml.loads(text, RunConfig) == settings
        with open_session(tmp_path / name, toml.dumps(settings)):
            pass  # the comment is no change


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"proximo {proximo.__version__}\n"


def test_a_changed_config_is_refused_field_by_field(tmp_path, capsys):
    flags = ["train", "--run", str(tmp_path / "a"), *TINY, "--steps", "1"]
    assert main(flags) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([*flags, "--training.learning-rate", "0.5", "--seed", "3"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "seed was 0, now 3  (--allow-change seed)" in error
    assert "training.learning_rate was 2e-05, now 0.5  (--allow-change training.learning_rate)" in error
    with pytest.raises(SystemExit):
        main([*flags, "--seed", "3", "--allow-change", "sead"])
    assert "--allow-change sead: the config has no such field" in capsys.readouterr().err
    # What is allowed by name goes on, and is written down; checkpoints may change at any time.
    more = ["--allow-change", "steps", "--allow-change=training.learning-rate", "--checkpoints.keep", "7"]
    assert main([*flags, "--steps", "2", "--training.learning-rate", "0.001", *more]) == 0
    attempts = json.loads((tmp_path / "a" / "run.json").read_text())["attempts"]
    assert attempts[1]["changes"].keys() == {"steps", "training.learning_rate"}
    assert [row["step"] for row in JsonLines(tmp_path / "a" / "metrics.jsonl")] == [0, 1, 2, 2]
    loaded = toml.loads((tmp_path / "a" / "config.toml").read_text(), RunConfig)
    assert (loaded.steps, loaded.checkpoints.keep) == (2, 7)


def test_differences_of_values_kinds_and_pieces():
    assert differences("a = 1\n[b]\nc = 2\n", "a = 1\n[b]\nc = 2\n") == {}
    assert differences("a = 1\n", "a = 1.0\n") == {"a": "was 1, now 1.0"}
    assert differences("[b]\nc = 2\n", "[b]\nd = [1]\n") == {
        "b.c": "was 2, now not given",
        "b.d": "was not given, now [1]",
    }
    assert differences("[[m]]\np = 1\n", "[[m]]\np = 2\n") == {"m[0].p": "was 1, now 2"}
    assert differences("[checkpoints]\nevery = 1\n", "[checkpoints]\nevery = 2\n") == {}


@pytest.mark.slow("trains and resumes runs")
def test_more_steps_are_the_run_that_had_them_from_the_start(tmp_path):
    short = config(steps=2, evaluation=EvaluationOptions(problems=4, every=2))
    long = replace(short, steps=4)
    trained(long, tmp_path / "long")
    trained(short, tmp_path / "short")
    with open_session(tmp_path / "short", toml.dumps(long), allowed=["steps"]) as attempt:
        train(Run(long, tmp_path / "short", Quiet()), attempt)
    assert_same(numbers(tmp_path / "short"), numbers(tmp_path / "long"))


def test_other_files_under_the_same_name_are_refused(tmp_path):
    for name, seed in (("model", 1), ("other", 2)):
        tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=seed).save_pretrained(
            tmp_path / name
        )
        tiny_tokenizer().save_pretrained(tmp_path / name)
    settings = config(model=str(tmp_path / "model"), steps=1)
    trained(settings, tmp_path / "run")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "model" / "model.safetensors")
    named = re.escape(f"model ({tmp_path / 'model'}) has changed since the run began  (`allow_change=['model']`)")
    with pytest.raises(ValueError, match=named):
        trained(settings, tmp_path / "run")
    shutil.rmtree(tmp_path / "model")
    with (
        pytest.raises(ValueError, match="model its files are missing"),
        open_session(tmp_path / "run", toml.dumps(settings)),
    ):
        pass


def test_a_run_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    with FolderLock(tmp_path / "a"), pytest.raises(SystemExit) as stopped:
        main(["train", "--run", str(tmp_path / "a"), *TINY])
    assert stopped.value.code == 2
    assert f"a is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert list((tmp_path / "a").iterdir()) == []


def test_a_finished_run_says_its_result_again(tmp_path, capsys):
    flags = ["train", "--run", str(tmp_path / "a"), *TINY, "--steps", "1"]
    assert main(flags) == 0
    first = capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert main(flags) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "this run is finished" in again.err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*") if path.is_file()} == before
    assert main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    load_model(str(saved(tmp_path / "a" / CHECKPOINTS)[0]))


def test_a_folder_that_is_refused_is_not_left_behind(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--task.type", "Arithmetic", "--run", str(tmp_path / "a"), "--model", str(tmp_path / "none")])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="there is a run in this folder already, and it cannot be resumed"):
        trained(config(), tmp_path / "old")


# Which checkpoints stay


@pytest.mark.slow("trains a run")
def test_the_newest_and_the_best_stay(tmp_path, monkeypatch):
    outcomes = iter([0.0, 0.3, 0.9, 0.2, 0.9, 0.1, 0.0])
    real = Run.evaluate

    def evaluate(self: Run):
        found, answers = real(self)
        return replace(found, outcome=next(outcomes)), answers

    monkeypatch.setattr(Run, "evaluate", evaluate)
    options = CheckpointOptions(every=1, keep=2)
    small = TrainingOptions(groups=1, group_size=2, minibatches=1)
    settings = config(steps=6, training=small, evaluation=EvaluationOptions(problems=1, every=1), checkpoints=options)
    trained(settings, tmp_path / "a")
    assert [path.name for path in saved(tmp_path / "a" / CHECKPOINTS)] == ["step-000006", "step-000005", "step-000002"]
    # Only the best is off the beat.
    outcomes = iter([0.0, 0.3, 0.9, 0.2, 0.8, 0.1, 0.0])
    trained(replace(settings, checkpoints=CheckpointOptions(every=100, keep=1)), tmp_path / "b")
    assert [path.name for path in saved(tmp_path / "b" / CHECKPOINTS)] == ["step-000006", "step-000002"]
    outcomes = iter([0.0, 0.3, 0.9, 0.2, 0.8, 0.1, 0.0])
    trained(replace(settings, checkpoints=CheckpointOptions(every=100, keep=1, keep_best=False)), tmp_path / "c")
    assert [path.name for path in saved(tmp_path / "c" / CHECKPOINTS)] == ["step-000006"]


@pytest.mark.slow("trains a run")
def test_the_best_whose_save_failed_does_not_cost_the_one_before(tmp_path, monkeypatch):
    outcomes, real_rename, real = iter([0.0, 0.3, 0.9, 0.2, 0.95, 0.1, 0.0]), os.rename, Run.evaluate

    def evaluate(self: Run):
        found, answers = real(self)
        return replace(found, outcome=next(outcomes)), answers

    def rename(source, target, **more):
        if Path(target).name == "step-000004":
            raise OSError(28, "No space left on device", str(target))
        return real_rename(source, target, **more)

    monkeypatch.setattr(Run, "evaluate", evaluate)
    monkeypatch.setattr(os, "rename", rename)
    small = TrainingOptions(groups=1, group_size=2, minibatches=1)
    options = CheckpointOptions(every=100, keep=1)
    settings = config(steps=6, training=small, evaluation=EvaluationOptions(problems=1, every=1), checkpoints=options)
    trained(settings, tmp_path)
    assert [path.name for path in saved(tmp_path / CHECKPOINTS)] == ["step-000006", "step-000002"]
    assert json.loads((tmp_path / CHECKPOINTS / "step-000006/state/run_state.json").read_text())["best"] == {
        "step": 2,
        "value": 0.9,
    }
    assert "save_failed" in [row["kind"] for row in JsonLines(tmp_path / "events.jsonl")]


@pytest.mark.slow("trains and resumes a run")
def test_what_was_passed_over_is_no_checkpoint_any_more(golden, tmp_path):
    """Were it the newest, the one just saved would be the oldest and go."""
    settings = config(checkpoints=CheckpointOptions(every=1, keep=1))
    folder = tmp_path / "damaged"
    shutil.copytree(golden("grpo"), folder, ignore=shutil.ignore_patterns("result.json"))
    for step in (3, 4):
        (folder / CHECKPOINTS / f"step-{step:06d}" / "model.safetensors").write_bytes(b"")

    def dies(step: int) -> None:
        if step == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        trained(settings, folder, Quiet(dies))
    assert [path.name for path in saved(folder / CHECKPOINTS)] == ["step-000003"]
    assert complaints(folder / CHECKPOINTS / "step-000003") == []
    assert resolve(str(folder)) == str(folder / CHECKPOINTS / "step-000003")
    assert sorted(path.name for path in (folder / CHECKPOINTS).glob("*.passed-over")) == [
        "step-000003.passed-over",
        "step-000004.passed-over",
    ]
    # Should one be there all the same, it does not count.
    shutil.copytree(golden("grpo") / CHECKPOINTS / "step-000004", folder / CHECKPOINTS / "step-000009")
    retain(folder, CheckpointOptions(keep=1), step=3, best=None)
    assert [path.name for path in saved(folder / CHECKPOINTS)] == ["step-000009", "step-000003"]
    shutil.rmtree(folder / CHECKPOINTS / "step-000009")
    trained(settings, folder)
    assert numbers(folder)["metrics.jsonl"] == numbers(golden("grpo"))["metrics.jsonl"]


# What is changed on the way


def other_model(folder: Path) -> str:
    tiny_model(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, seed=2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def papers(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("config.toml", "run.json", "events.jsonl", "metrics.jsonl")}


def test_a_run_is_not_trained_under_another_config_than_its_folder_s(tmp_path):
    """Neither a new folder nor one that was taken says another algorithm than the one that runs."""
    settings = config(steps=1)
    other = replace(settings, algorithm=DAPO)
    with (
        open_session(tmp_path / "a", toml.dumps(other)) as attempt,
        pytest.raises(ValueError, match=r"with another algorithm\."),
    ):
        train(Run(settings, tmp_path / "a", Quiet()), attempt)
    assert not (tmp_path / "a" / "config.toml").exists()
    train(Run(settings, tmp_path / "b", Quiet()))
    assert toml.load(tmp_path / "b" / "config.toml", RunConfig) == settings


def changed(settings: RunConfig, folder: Path, *allowed: str) -> Run:
    """Go on with other settings."""
    run = Run(settings, folder, Quiet())
    with open_session(folder, toml.dumps(settings), allowed=allowed) as attempt:
        train(run, attempt)
    return run


def test_a_change_that_cannot_be_made_leaves_the_run_as_it_was(golden, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(golden("grpo"), folder)
    (folder / "events.jsonl").touch()
    before = papers(folder), (folder / "result.json").read_bytes()
    settings = config(model=other_model(tmp_path / "model"))
    with pytest.raises(ValueError, match="the model has .* tensors in the checkpoint and .* in this run"):
        changed(settings, folder, "model")
    with pytest.raises(ValueError, match="steps is 2, but 4 are done: give at least as many"):
        changed(config(steps=2), folder, "steps")
    assert (papers(folder), (folder / "result.json").read_bytes()) == before
    assert len(saved(folder / CHECKPOINTS)) == 4


def test_a_stage_with_a_change_that_cannot_be_made_stays_as_it_was(data, tmp_path):
    settings, folder = STAGES["sft"][1](data), tmp_path / "run"

    def say(said: str) -> None:
        if "after step 3" in said:
            raise Interrupted

    with pytest.raises(Interrupted):
        sft(settings, folder, say)
    (folder / "events.jsonl").touch()
    before = papers(folder)
    other = replace(settings, model=other_model(tmp_path / "model"))
    with (
        open_session(folder, toml.dumps(other), points=POINTS, allowed=["model"]) as attempt,
        pytest.raises(ValueError, match="the model has .* tensors in the checkpoint"),
    ):
        sft(other, folder, say, attempt)
    assert papers(folder) == before


def test_the_reference_stays_what_it_was_when_it_is_reset_less_often(golden, tmp_path):
    folder, whole = tmp_path / "run", RUNS["reset reference"]
    shutil.copytree(golden("reset reference"), folder)
    stored = load_file(folder / CHECKPOINTS / "step-000004/state/reference.safetensors")
    settings = replace(whole, steps=5, training=replace(whole.training, reset_reference_every=3))
    reference = plain(changed(settings, folder, "steps", "training.reset_reference_every").learner).reference
    assert reference is not None
    for name, weight in reference.named_parameters():
        assert torch.equal(weight, stored[name])
    assert (folder / CHECKPOINTS / "step-000005/state/reference.safetensors").exists()


@pytest.mark.slow("trains runs")
@pytest.mark.parametrize(("problems", "paired"), [(2, 2), (6, 4)])
def test_other_held_out_problems_at_the_end_are_paired_with_those_before(problems, paired, golden, tmp_path):
    folder = left_after(3, golden("grpo"), tmp_path / "run")
    changed(config(evaluation=EvaluationOptions(problems=problems)), folder, "evaluation")
    examples = json.loads((folder / "result.json").read_text())["examples"]
    assert [before["problem"] == after["problem"] for before, after in examples] == [True] * paired
    assert trained(config(evaluation=EvaluationOptions(problems=problems)), folder).after.problems == problems


def test_a_function_that_was_corrected_is_noted(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    files = [tmp_path / "score.py", tmp_path / "package" / "inner.py"]
    for file in files:
        file.write_text("def score(): ...")
    (tmp_path / "package" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    text = f'[[rules]]\npath = "{files[0]}:score"\n[[rules]]\npath = "package.inner:score"\n'
    text += '[[rules]]\npath = "no.such:score"\n[task]\npath = "file.jsonl"\n'
    assert function_fingerprints(text) == {
        "rules[0].path": file_hash(files[0]),
        "rules[1].path": file_hash(files[1]),
    }
    folder = tmp_path / "run"
    with open_session(folder, text) as attempt:
        attempt.start()
        (folder / "metrics.jsonl").write_text("{}\n")
    with open_session(folder, text) as attempt:
        assert attempt.corrected == []
    files[1].write_text("def score(): return 1")
    for again in (False, True):
        with open_session(folder, text) as attempt:  # not refused: who runs it was told to correct it
            assert [message.partition(":")[0] for message in attempt.corrected] == (
                [] if again else ["rules[1].path is a different function than before"]
            )
            attempt.start()
    assert [row["kind"] for row in JsonLines(folder / "events.jsonl")] == ["resumed", "changed", "resumed"]


def test_a_change_is_on_record_before_it_is_the_runs(tmp_path, monkeypatch):
    def dies(self: RunLog, record: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(RunLog, "record", dies)
        with pytest.raises(Interrupted):
            RunLog(tmp_path).start("seed = 1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]  # no run yet
    RunLog(tmp_path).start("seed = 1\n", {})
    monkeypatch.setattr(RunLog, "record", dies)
    with pytest.raises(Interrupted):
        RunLog(tmp_path).start("seed = 2\n", {})
    assert (tmp_path / "config.toml").read_text() == "seed = 1\n"


def test_a_finished_run_that_has_lost_rows_is_not_trained_again(golden, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(golden("grpo"), folder)
    with open_session(folder, toml.dumps(config())) as attempt:
        assert attempt.result is not None
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="rows are lost"), open_session(folder, toml.dumps(config())):
        pass
    with open_session(folder, toml.dumps(config()), accept_lost=True) as attempt:
        assert attempt.result is not None
    with open_session(folder, toml.dumps(config())) as attempt:  # once is enough, for this checkpoint
        assert attempt.result is not None
    record = json.loads((folder / "run.json").read_text())
    assert record["accepted_loss"] == "step-000004"
    (folder / "run.json").write_text(json.dumps(sealed(record | {"accepted_loss": "step-000003"})))
    with pytest.raises(ValueError, match="rows are lost"), open_session(folder, toml.dumps(config())):
        pass


@pytest.mark.slow("trains a run")
def test_a_finished_run_with_prompts_left_out_says_its_result_again(tmp_path, capsys):
    rows = [
        {"prompt": "9" * 5000 + "+0=", "answer": "9"},
        *({"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(9)),
    ]
    for name, sign in (("train", "-"), ("held_out", "+")):
        lines = [json.dumps(row | {"prompt": row["prompt"].replace("+", sign)}) + "\n" for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    flags = [
        "train",
        "--run",
        str(tmp_path / "a"),
        *TINY,
        "--steps",
        "1",
        "--skip-bad",
        "--model",
        "tiny-arithmetic",
        "--task.type",
        "File",
    ]
    flags += ["--task.path", str(tmp_path / "train.jsonl"), "--task.held-out", str(tmp_path / "held_out.jsonl")]
    assert main(flags) == 0
    first = capsys.readouterr().out
    assert "skipped_row" in [row["kind"] for row in JsonLines(tmp_path / "a" / "events.jsonl")]
    assert main(flags) == 0
    assert capsys.readouterr().out == first


# What is told


def test_what_fails_in_the_last_evaluation_is_told(golden, tmp_path, monkeypatch):
    folder, real, progress = left_after(4, golden("grpo"), tmp_path / "run"), Run.evaluate, Quiet()

    def evaluate(self: Run):
        self.grading.failures.add("a grader", Failure("time", "too slow"))
        return real(self)

    monkeypatch.setattr(Run, "evaluate", evaluate)
    trained(config(), folder, progress)
    assert progress.warnings == ["a grader: 1 completion unscored (time): too slow"]
    assert [(row["kind"], row["step"]) for row in JsonLines(folder / "events.jsonl")][-1] == ("unscored", 4)


def test_an_exit_is_no_failure_by_its_number(tmp_path):
    def leaves(code: int) -> None:
        with open_session(tmp_path / str(code), "") as attempt:
            attempt.start()
            raise SystemExit(code)

    for code in (2, 143):
        with pytest.raises(SystemExit):
            leaves(code)
        [attempt] = json.loads((tmp_path / str(code) / "run.json").read_text())["attempts"]
        assert attempt["ended"] == f"ended with the exit status {code}"


def test_whoever_is_stopped_is_told_from_where_it_goes_on(golden, tmp_path):
    folder = left_after(3, golden("grpo"), tmp_path / "run")
    with open_session(folder, toml.dumps(config())) as attempt:
        assert attempt.resume_hint == f"running it again with `run={folder}` resumes after step 3"
    shutil.rmtree(folder / CHECKPOINTS)
    with open_session(folder, toml.dumps(config())) as attempt:
        assert attempt.resume_hint.endswith(" resumes from the beginning")
    with open_session(tmp_path / "chain", "", points=None) as attempt:
        assert attempt.resume_hint.endswith(" resumes with the first unfinished stage")
    said = []

    def full() -> None:
        raise OSError(28, "No space left on device")

    saver = Saver(lambda *event: None, lambda step, message: said.append(message))
    for again in (True, False, False, False):
        assert not saver.save(3, full, again=again)
    assert ["trying again at the next one" in message for message in said] == [True, False, False, False]


# A disk that is full


def test_nobody_to_tell_is_no_reason_to_stop(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    (tmp_path / "metrics.jsonl").mkdir()  # cannot be written
    monkeypatch.setattr(sys, "stderr", Full())
    log = RunLog(tmp_path)
    log.metrics(0, {"loss": 1.0})
    (tmp_path / "metrics.jsonl").rmdir()
    log.metrics(1, {"loss": 2.0})
    assert [row["step"] for row in JsonLines(tmp_path / "metrics.jsonl")] == [0, 1]
    grader = GroupGrader(Arithmetic())
    grader._current = "a problem", time.monotonic()
    monkeypatch.setattr(grader._thread, "is_alive", lambda: True)
    grader._look()


def test_only_what_the_system_refuses_is_called_a_failed_save(tmp_path):
    model, tokenizer = tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16), tiny_tokenizer()

    def wrong(folder: Path) -> None:
        raise TypeError("Object of type float32 is not JSON serializable")

    with pytest.raises(TypeError):
        write_checkpoint(tmp_path / "a", model.save_pretrained, tokenizer, wrong)
    missing = tmp_path / "none" / "a.safetensors"
    with pytest.raises(SafetensorError):
        write_tensors(missing, {"a": torch.zeros(1)})
    with pytest.raises(OSError, match="No such file"), naming_io(missing):
        write_tensors(missing, {"a": torch.zeros(1)})
    with pytest.raises(OSError, match="os error"), naming_io(missing):
        tokenizer.backend_tokenizer.save(str(missing))


@pytest.mark.slow("trains a run")
def test_everything_a_checkpoint_stands_on_is_on_the_disk_first(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("proximo.runs.log.sync", synced.append)
    trained(config(steps=2, checkpoints=CheckpointOptions(every=2)), tmp_path)
    rollouts = tmp_path / "rollouts"
    assert {tmp_path, rollouts, rollouts / "step-000001.parquet", rollouts / "step-000002.parquet"} == set(synced)


def test_evidence_of_what_is_forgotten_goes(tmp_path):
    (tmp_path / "evidence").mkdir()
    for step in (1, 2, 3):
        (tmp_path / "evidence" / f"step-{step:06d}-update-0.json").write_text("{}")
    RunLog(tmp_path).rewind({}, 1)
    assert [path.name for path in (tmp_path / "evidence").iterdir()] == ["step-000001-update-0.json"]


@pytest.mark.slow("trains runs")
def test_a_save_that_fails_is_tried_again_and_changes_nothing(golden, tmp_path, monkeypatch):
    wanted = numbers(golden("grpo"))
    folder, real, failures = tmp_path / "full", os.rename, [1, 2]

    def rename(source, target, **more):
        if Path(target).name in [f"step-{step:06d}" for step in failures]:
            raise OSError(28, "No space left on device", str(target))
        return real(source, target, **more)

    monkeypatch.setattr(os, "rename", rename)
    progress = Quiet()
    trained(config(), folder, progress)
    monkeypatch.undo()
    assert_same(numbers(folder), wanted)
    assert [path.name for path in sorted((folder / CHECKPOINTS).iterdir())] == ["step-000003", "step-000004"]
    assert [row["kind"] for row in JsonLines(folder / "events.jsonl")] == ["save_failed"] * 2
    assert "No space left on device" in progress.warnings[0]
    failures[:] = [1, 2, 3]
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match=f"{MAX_FAILURES} saves in a row have failed: free disk space"):
        trained(config(), tmp_path / "fuller")
    assert json.loads((tmp_path / "fuller" / "run.json").read_text())["attempts"][0]["ended"].startswith("failed: ")


@pytest.mark.slow("trains a run")
def test_rows_without_room_wait_and_are_written_later(golden, tmp_path, monkeypatch, capsys):
    wanted = numbers(golden("grpo"))
    real, failing = os.write, [False]

    def write(file, data):
        if failing[0]:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    settings = config(checkpoints=CheckpointOptions(every=3, keep=100))
    progress = Quiet(lambda step: failing.__setitem__(0, step == 1))
    trained(settings, tmp_path / "full", progress)
    assert_same(numbers(tmp_path / "full"), wanted)
    assert capsys.readouterr().err.count("the run's log cannot be written") == 1
    [told] = JsonLines(tmp_path / "full" / "events.jsonl")  # by the next save, though nothing else happened
    assert (told["kind"], told["step"]) == ("log_failed", 3)
    assert [row["step"] for row in JsonLines(tmp_path / "full" / "timings.jsonl")] == [
        1,
        3,
        4,
    ]  # what is not numbers is lost
    log = RunLog(tmp_path / "full", attempt=7)
    failing[0] = True
    log.event(3, "lost", "x")
    failing[0] = False
    log.event(3, "kept", "y")
    assert [(row["kind"], row["attempt"]) for row in JsonLines(tmp_path / "full" / "events.jsonl")][-2:] == [
        ("log_failed", 7),
        ("kept", 7),
    ]


# Asked to stop


@pytest.mark.slow("trains and resumes a run")
@pytest.mark.parametrize("step", [0, 2])
def test_a_stop_within_a_step_saves_the_step_before(step, golden, tmp_path):
    """After the rollouts and the measured gap, before an update: what the step has touched by then is not saved."""
    settings = replace(RUNS["lagging sampler"], checkpoints=CheckpointOptions(every=100))
    run = Run(settings, tmp_path / "stopped", Quiet())
    real, seen = run.learner.updates, []

    def updates(batch):
        seen.append(batch)
        if len(seen) == step + 1:
            run.learner.shuffle.manual_seed(0)
            run.learner.trusts_sampler = not run.learner.trusts_sampler
            raise Stopped(signal.SIGTERM)
        return real(batch)

    run.learner.updates = updates
    with pytest.raises(Stopped):
        train(run)
    [attempt] = json.loads((tmp_path / "stopped" / "run.json").read_text())["attempts"]
    assert attempt["ended"] == "stopped by SIGTERM"
    found, damaged = newest_valid(tmp_path / "stopped" / CHECKPOINTS)
    assert (found and step_of(found), damaged) == (step, [])
    trained(settings, tmp_path / "stopped")
    assert_same(numbers(tmp_path / "stopped"), numbers(golden("lagging sampler")))


# The stages that learn from files


SUMS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(8) for b in range(8)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "77"} for row in SUMS]
FIT = FitOptions(epochs=2.0, batch=16, learning_rate=1e-3, evaluate_every=3, save_every=1)


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Callable[[list], DataFile]:
    folder = tmp_path_factory.mktemp("data")

    def written(rows: list) -> DataFile:
        path = folder / f"{'pairs' if rows is PAIRS else 'sums'}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataFile(str(path), held_out=0.2)

    return written


STAGES = {
    "sft": (sft, lambda data: SftConfig(data(SUMS), model="tiny-arithmetic", fit=FIT, device="cpu")),
    "reward-model": (train_reward_model, lambda data: RewardModelConfig(data(PAIRS), fit=FIT, device="cpu")),
    "dpo": (dpo, lambda data: DpoConfig(data(PAIRS), fit=replace(FIT, learning_rate=1e-5), device="cpu")),
    "sft, lora": (sft, lambda data: SftConfig(data(SUMS), model="tiny-arithmetic", adapter=LORA, fit=FIT)),
    "reward-model, lora": (train_reward_model, lambda data: RewardModelConfig(data(PAIRS), adapter=LORA, fit=FIT)),
    "dpo, frozen": (dpo, lambda data: DpoConfig(data(PAIRS), fit=replace(FIT, learning_rate=1e-5, freeze=("embed",)))),
    "dpo, lora": (dpo, lambda data: DpoConfig(data(PAIRS), adapter=LORA, fit=replace(FIT, learning_rate=1e-5))),
}


def stage_numbers(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    del result["seconds"]
    [checkpoint] = saved(folder / CHECKPOINTS)
    [weights] = checkpoint.glob("*model.safetensors")
    files = {"metrics": folder / "metrics.jsonl", "weights": weights}
    return {"result": result} | {name: file.read_bytes() for name, file in files.items()}


@pytest.mark.slow("trains and resumes runs")
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_goes_on_with_the_same_bits(name, data, tmp_path):
    stage, make = STAGES[name]
    settings, folder = make(data), tmp_path / "broken"
    stage(settings, tmp_path / "whole", lambda line: None)
    wanted = stage_numbers(tmp_path / "whole")
    for line in ("step 3", "after step 6"):  # said after the step, or after its evaluation, and before it is saved

        def say(said: str, line: str = line) -> None:
            if line in said:
                raise Interrupted

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("proximo.supervised.pace.EVERY", 1)
            with pytest.raises(Interrupted):
                stage(settings, folder, say)
    assert [path.name for path in saved(folder / "resume")] == ["step-000005", "step-000004"]
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        stage(replace(settings, seed=1), folder, lambda line: None)
    fitted = stage(settings, folder, lambda line: None)
    assert_same(stage_numbers(folder), wanted)
    assert not (folder / "resume").exists()
    attempts = json.loads((folder / "run.json").read_text())["attempts"]
    assert [each["from"] for each in attempts] == [None, "step-000002", "step-000005"]
    assert stage(settings, folder, lambda line: None) == fitted  # finished: said again
    assert len(json.loads((folder / "run.json").read_text())["attempts"]) == 3


@pytest.mark.slow("kills stages")
@pytest.mark.parametrize("name", ["sft", "dpo", "reward-model"])
def test_kills_of_a_stage_change_neither_its_result_nor_the_checkpoints_it_keeps(name, data, tmp_path):
    """Resume points, kept checkpoints and the best weights are each written at times of their own."""
    _, make = STAGES[name]
    fit = replace(FIT, steps=40, save_every=3, evaluate_every=4)
    settings = replace(make(data), fit=fit, checkpoints=KeptCheckpoints(every=5, keep=2))
    file, chance = tmp_path / "stage.toml", random.Random(3)
    file.write_text(toml.dumps(settings))

    def command(folder: str) -> Command:
        return Command(name, str(file), "--run", str(tmp_path / folder), stderr=tmp_path / f"{folder}.log")

    whole = command("whole")
    for step in (8, 24):
        process = command("killed")
        next(line for line in process.lines() if f"held-out after step {step}:" in line)
        time.sleep(chance.random() * 0.03)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert (command("killed").wait(), whole.wait()) == (0, 0)
    killed, wanted = (kept_numbers(tmp_path / folder) for folder in ("killed", "whole"))
    assert [each for each in wanted if each.startswith("checkpoints/")]
    assert_same(killed, wanted)
    assert not (tmp_path / "killed" / "resume").exists()


def kept_numbers(folder: Path) -> dict[str, Any]:
    """Metrics and result of a stage, and all files of all checkpoints."""
    result = json.loads((folder / "result.json").read_text())
    del result["seconds"]
    files = [folder / "metrics.jsonl", *(folder / CHECKPOINTS).rglob("*.safetensors")]
    return {"result": result} | {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.slow("trains a run and resumes it twice")
def test_a_stage_goes_on_for_more_steps(data, tmp_path, capsys):
    """By one flag, as long as it is not finished; it has what so many steps from the start would have given."""
    settings, folder = STAGES["sft"][1](data), tmp_path / "broken"
    settings = replace(settings, fit=replace(FIT, warmup_steps=2, learning_rate_schedule="constant"))
    sft(replace(settings, fit=replace(settings.fit, steps=9)), tmp_path / "whole", lambda line: None)

    def say(said: str) -> None:
        if "after step 6" in said:
            raise Interrupted

    with pytest.raises(Interrupted):
        sft(settings, folder, say)
    # Fewer than it had are a change like any other, and as many as are done leave nothing.
    for allowed, line in (
        ([], "fit.steps was not given, now 5"),
        (["--allow-change", "fit.steps"], "the run has 5 steps now, and 5 are done"),
    ):
        with pytest.raises(SystemExit):
            main(["resume", str(folder), "--steps", "5", *allowed])
        assert line in capsys.readouterr().err
    assert main(["resume", str(folder), "--steps", "9"]) == 0
    assert stage_numbers(folder) == stage_numbers(tmp_path / "whole")
    with pytest.raises(SystemExit):
        main(["resume", str(folder), "--steps", "12"])
    assert f"go on from its model by proximo sft DATA --model {folder} --run NEW" in capsys.readouterr().err


@pytest.mark.slow("trains a run")
def test_a_stage_that_is_asked_to_stop_saves_where_it_is(data, tmp_path):
    settings = STAGES["sft"][1](data)
    settings = replace(settings, fit=replace(FIT, save_every=100))
    sft(settings, tmp_path / "whole", lambda line: None)

    def say(said: str) -> None:
        if "after step 3" in said:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        sft(settings, tmp_path / "stopped", say)
    assert [path.name for path in saved(tmp_path / "stopped" / "resume")] == ["step-000003"]
    sft(settings, tmp_path / "stopped", lambda line: None)
    assert_same(stage_numbers(tmp_path / "stopped"), stage_numbers(tmp_path / "whole"))
