"""`proximo eval` of several models, of checkpoints and of data files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from proximo.api.evaluating import task_name
from proximo.cli import main
from proximo.config import toml
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rewards import ExactMatch, FormatReward
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Echo, File, Mixture, Source


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on a file with two checkpoints of the same weights."""
    folder = tmp_path_factory.mktemp("eval")
    rows = [json.dumps({"question": f"{number}+{number}=", "label": str(2 * number)}) for number in range(20)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    for step in (1, 2):
        checkpoint = folder / "run" / "checkpoints" / f"step-{step:06d}"
        tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=0).save_pretrained(checkpoint)
        tiny_tokenizer().save_pretrained(checkpoint)
    task = File(str(folder / "train.jsonl"), "question", ("label",), ExactMatch(last_number=True), 0.5)
    config = RunConfig(task=task, sampling=SamplingOptions(max_tokens=2), evaluation=EvaluationOptions(problems=3))
    (folder / "run" / "config.toml").write_text(toml.dumps(config))
    return folder / "run"


def test_checkpoints_stand_in_one_table(run: Path, tmp_path: Path, capsys):
    out = tmp_path / "answers.jsonl"
    assert main(["eval", str(run), "--checkpoints", "all", "--samples", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    _, first, second = printed.out.splitlines()
    assert first.startswith(f"{run} step 1  ")
    assert second.startswith(f"{run} step 2  ")
    assert second.endswith("the same")  # they have the same weights
    [line, *_] = printed.err.splitlines()
    assert line.startswith(f"settings from {run / 'config.toml'}: File ")
    assert line.endswith("/train.jsonl, 2 tokens at most")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 3 * (1 + 2)
    assert {row["model"] for row in rows} == {f"{run} step 1", f"{run} step 2"}


def test_a_task_is_named_with_its_data():
    mixture = Mixture((Source("a", File("a.jsonl")), Source("b", File("long/" * 9 + "b.jsonl")), Source("c", Echo())))
    assert [task_name(each) for each in (Echo(), File("a/b.jsonl"), mixture)] == [
        "Echo", "File a/b.jsonl", "Mixture a.jsonl, …/b.jsonl"
    ]  # fmt: skip


def test_every_row_of_a_data_file_is_asked_with_the_runs_reward(run: Path, tmp_path: Path, capsys):
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+0=", "label": str(n)}) + "\n" for n in range(5)))
    assert main(["eval", str(run), "--data", str(data), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["held_out/problems"] == 5
    assert f"asked instead: every row of {data}\n" in printed.err
    # A model without a run reads it as any file, and a flag names its columns.
    model = str(run / "checkpoints" / "step-000001")
    shutil.copytree(model, tmp_path / "model")
    flags = ["--task.prompt-column", "question", "--problems", "2", "--json"]
    assert main(["eval", str(tmp_path / "model"), "--data", str(data), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["held_out/problems"] == 2


@pytest.mark.parametrize("files", [1, 2])
def test_a_run_of_several_rewards_is_asked_the_rows_of_files(files: int, run: Path, tmp_path: Path, capsys):
    """All rows are held out then, so there is no training problem to look at."""
    both = tmp_path / "both"
    shutil.copytree(run, both)
    rules = (WeightedRule(FormatReward("[0-9]+")), WeightedRule(ExactMatch(last_number=True)))
    config = toml.load(str(run / "config.toml"), RunConfig)
    task = replace(config.task, reward=None)  # pyright: ignore[reportArgumentType]
    config = replace(config, task=task, rewards=RewardMix(task=0.0, rules=rules))
    (both / "config.toml").write_text(toml.dumps(config))
    names = [str(tmp_path / f"{number}.jsonl") for number in range(files)]
    for number, name in enumerate(names):
        rows = (json.dumps({"question": f"{n}+{number}=", "label": str(n + number)}) for n in range(3))
        Path(name).write_text("\n".join(rows))
    assert main(["eval", str(both), "--data", *names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_out/problems"] == 3 * files


def test_models_of_other_tasks_are_asked_the_same(run: Path, tmp_path: Path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "config.toml").write_text(toml.dumps(RunConfig(task=Echo())))
    assert main(["eval", str(run), str(other), "--json"]) == 0
    printed = capsys.readouterr()
    assert f"{other} was trained on another task (Echo): it is asked the same as the others" in printed.err
    first, second = json.loads(printed.out)
    assert "difference" not in first
    assert (second["difference"], second["verdict"]) == (0.0, "the same")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--checkpoints", "9"], "none of step 9; it has 1, 2"),
        (["--out", "answers.txt"], "a file that ends in .jsonl"),
        (["--data", "none.jsonl"], "none.jsonl"),
    ],
)
def test_eval_refuses_before_a_model_is_loaded(flags: list[str], complaint: str, run: Path, capsys, monkeypatch):
    monkeypatch.setattr("proximo.api.evaluating.open_model", None)
    with pytest.raises(SystemExit):
        main(["eval", str(run), *flags])
    assert complaint in capsys.readouterr().err
