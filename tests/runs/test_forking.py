"""A fork is the run up to its step, and with nothing changed also after it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import proximo
from proximo.algorithms import GSPO, PPO, Algorithm
from proximo.api.forking import refuse_scheduled
from proximo.cli import main
from proximo.config import toml
from proximo.insight.folder import RunFolder
from proximo.insight.lens.fork_divergence import parting, parting_in_words
from proximo.insight.page.overview import Runs
from proximo.learner.named_tensors import read_tensors
from proximo.rl.config import RunConfig
from proximo.rl.run import Run
from proximo.rl.schedules import constant, linear, with_schedules
from proximo.rl.train import train
from proximo.runs.checkpoints import CHECKPOINTS
from proximo.runs.forking import changes, checkpoint_at, fork, parent_of
from proximo.runs.ledger import check_ledger
from proximo.runs.session import open_session
from tests.runs.test_resume import Quiet, assert_same, config, numbers, trained

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forks") / "parent"
    trained(config(), folder)
    return folder


def continued(parent: Path, folder: Path, step: int, settings: RunConfig, **options) -> Path:
    fork(parent, folder, checkpoint_at(parent, step), **options)
    text = toml.dumps(settings)
    with open_session(folder, text, allowed=changes(folder, text)) as attempt:
        train(Run(settings, folder, Quiet()), attempt)
    return folder


def test_a_new_value_of_what_follows_a_schedule_is_refused(tmp_path):
    """The schedule stays, so that the value would have no effect; another schedule, or another field, is a change."""
    began = replace(RunConfig(), steps=4, schedules=with_schedules({"sampling.temperature": linear(1.0, 0.6)}, None, 4))
    (tmp_path / "config.toml").write_text(toml.dumps(began))
    cooler = replace(began, sampling=replace(began.sampling, temperature=0.9))
    line = "sampling.temperature was 1.0, now 0.9, but it follows a schedule, .* sampling.temperature=constant:0.9$"
    with pytest.raises(ValueError, match=line):
        refuse_scheduled(tmp_path, cooler)
    others = with_schedules({"sampling.temperature": constant(0.9)}, None, 4)
    for allowed in (began, replace(began, seed=3), replace(cooler, schedules=others), replace(cooler, schedules=None)):
        refuse_scheduled(tmp_path, allowed)


@pytest.mark.slow("trains and forks runs")
@pytest.mark.parametrize("step", [1, 3])
def test_with_nothing_changed_it_writes_the_same_bytes(parent, tmp_path, step):
    before = {file: file.read_bytes() for file in parent.rglob("*") if file.is_file()}
    assert_same(numbers(continued(parent, tmp_path / "fork", step, config())), numbers(parent))
    assert before == {file: file.read_bytes() for file in parent.rglob("*") if file.is_file()}


@pytest.mark.slow("trains and forks runs")
@pytest.mark.parametrize("algorithm", [GSPO, PPO], ids=["gspo", "ppo"])
def test_another_algorithm_gets_the_same_prompts_and_first_draws(parent, tmp_path, algorithm: Algorithm):
    folder = continued(parent, tmp_path / "fork", 2, config(algorithm))
    ours, theirs = (pq.read_table(each / "rollouts" / "step-000003.parquet") for each in (folder, parent))
    for column in ("problem", "tokens"):
        assert ours[column].to_pylist() == theirs[column].to_pylist()
    whole = [each.joinpath("metrics.jsonl").read_text().splitlines() for each in (folder, parent)]
    assert whole[0][:3] == whole[1][:3]
    assert whole[0][-2] != whole[1][-2]  # the last one is of the evaluation
    assert check_ledger(folder / "ledger.jsonl") == check_ledger(parent / "ledger.jsonl")


@pytest.mark.slow("trains and forks a run")
def test_back_from_a_value_model(parent, tmp_path):
    middle = continued(parent, tmp_path / "ppo", 2, config(PPO))
    folder = continued(middle, tmp_path / "grpo", 3, config())
    assert json.loads((folder / "result.json").read_text())["checkpoint"] == "step-000004"


@pytest.mark.slow("trains and forks a run")
def test_without_the_moments_the_optimizer_begins_anew(parent, tmp_path):
    folder, kept = tmp_path / "fork", tmp_path / "kept"
    fork(parent, folder, checkpoint_at(parent, 2), fresh_optimizer=True)
    fork(parent, kept, checkpoint_at(parent, 2))
    moments = [
        read_tensors(each / CHECKPOINTS / "step-000002" / "state" / "optimizer.safetensors") for each in (folder, kept)
    ]
    assert not moments[0]
    assert moments[1]
    settings = config()
    with open_session(folder, toml.dumps(settings)) as attempt:
        train(Run(settings, folder, Quiet()), attempt)
    rows = [each.joinpath("metrics.jsonl").read_text().splitlines() for each in (folder, parent)]
    assert rows[0][:3] == rows[1][:3]
    assert rows[0][-2] != rows[1][-2]


@pytest.mark.slow("trains and forks a run")
def test_the_command_forks_and_resumes_and_the_page_knows(parent, capsys):
    arguments = ["fork", str(parent), "--at", "3", "--algorithm", "gspo", "--json"]
    assert main(list(arguments)) == 0
    folder = parent.with_name("parent-at-3-gspo")
    assert json.loads(capsys.readouterr().out)["run"] == str(folder)
    record = json.loads((folder / "run.json").read_text())
    assert parent_of(folder, record) == (parent, 3)
    assert len(record["attempts"]) == 1
    assert main(list(arguments)) == 0  # finished: the same again
    assert len(json.loads((folder / "run.json").read_text())["attempts"]) == 1
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*arguments, "--training.learning-rate", "1e-5"])
    said = capsys.readouterr().err
    assert "Use its config, or choose another name" in said
    assert "--allow-change" not in said
    assert main(["fork", str(folder), "--at", "4", "--steps", "5", "--run", str(folder.with_name("again"))]) == 0
    shutil.rmtree(folder.with_name("again"))
    listed = {each["name"]: each["fork"] for each in Runs(parent.parent).listed()["runs"]}
    assert listed == {"parent": None, "parent-at-3-gspo": {"run": "parent", "step": 3}}


def test_what_cannot_be_forked_is_refused_in_a_line(parent, tmp_path, capsys):
    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["fork", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "there are those after 1, 2, 3, 4" in refusal(str(parent), "--at", "9")
    assert "holds no run" in refusal(str(tmp_path / "nothing"))
    assert "the fork begins after step 4: give more, such as --steps 104" in refusal(str(parent))
    said = refusal(str(parent), "--at", "2", "--model", str(parent))
    assert f"model is not that of {parent}: a fork continues the weights of the run's checkpoint" in said
    assert f"adapter is not that of {parent}: " in refusal(str(parent), "--at", "2", "--adapter.type", "Lora")
    assert not parent.with_name("parent-at-2").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert "not this fork" in refusal(str(parent), "--at", "2", "--run", str(tmp_path / "taken"))
    (tmp_path / "taken" / "file").unlink()
    before = sorted(tmp_path.iterdir())
    metrics = parent / "metrics.jsonl"
    whole = metrics.read_bytes()
    try:
        metrics.write_bytes(whole[: len(whole) // 2])
        assert "rows are lost" in refusal(str(parent), "--at", "3", "--run", str(tmp_path / "taken"))
    finally:
        metrics.write_bytes(whole)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_next_to_the_fork_is_left_alone(parent, tmp_path):
    (tmp_path / "a.fork").mkdir()
    (tmp_path / "a.fork" / "mine").touch()
    fork(parent, tmp_path / "a", checkpoint_at(parent, 2))
    assert (tmp_path / "a.fork" / "mine").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "a.fork"]


def test_verdicts_of_judges_go_along(parent, tmp_path):
    (parent / "verdicts").mkdir()
    try:
        (parent / "verdicts" / "one").write_text("{}")
        fork(parent, tmp_path / "fork", checkpoint_at(parent, 2))
        assert (tmp_path / "fork" / "verdicts" / "one").read_text() == "{}"
    finally:
        shutil.rmtree(parent / "verdicts")


@pytest.mark.slow("trains and forks a run")
def test_a_fork_of_another_seed_draws_otherwise(parent, tmp_path):
    folder = continued(parent, tmp_path / "fork", 2, replace(config(), seed=1))
    ours, theirs = (pq.read_table(each / "rollouts" / "step-000003.parquet") for each in (folder, parent))
    assert ours["tokens"].to_pylist() != theirs["tokens"].to_pylist()


@pytest.mark.slow("trains and forks a run")
def test_from_python_it_forks_and_is_compared_from_there_on(parent, tmp_path, capsys):
    other = proximo.fork(parent, 2, tmp_path / "gspo", algorithm="gspo", quiet=True)
    assert other.config == proximo.presets.with_values(replace(config(), algorithm=GSPO))
    assert proximo.fork(parent, 2, tmp_path / "gspo", algorithm="gspo", quiet=True).result.after == other.after
    with pytest.raises(TypeError, match="learning_rate is no field of RunConfig"):
        proximo.fork(parent, 2, learning_rate=1e-5)
    with pytest.raises(ValueError, match="the fork begins after step 4: give more"):
        proximo.fork(parent)

    found = parting(RunFolder(other.path), RunFolder(parent))
    assert (found.at, found.until, found.update) == (2, 4, 3)
    assert found.draws is None or found.draws.step == 4  # step 3 has the same prompts and draws
    with pytest.raises(ValueError, match="no fork of"):
        parting(RunFolder(parent), RunFolder(other.path))

    result = proximo.compare([other], run=tmp_path / "compared")  # its parent is added
    assert [(each.name, each.steps) for each in result.contenders] == [("parent", {0: 2}), ("gspo", {0: 2})]
    assert {check.what for check in result.checks if not check.equal} == set()
    assert result.forked is not None
    assert result.forked["gspo"].at == 2
    rows = [[*map(json.loads, (each / "metrics.jsonl").read_text().splitlines())] for each in (other.path, parent)]
    steps = [{row["step"]: row["outcome"] for row in each if row["step"] > 2 and "outcome" in row} for each in rows]
    [outcome] = [each for each in result.differences if each.measure == "outcome"]
    assert outcome.difference == pytest.approx(sum(steps[0][step] - steps[1][step] for step in (3, 4)) / 2)
    assert outcome.interval is None  # two steps say nothing of their noise
    page = (tmp_path / "compared" / "compare.html").read_text()
    assert "gspo begins after step 2 of parent" in page
    assert "Step 3 is the first whose numbers differ" in page
    assert main(["compare", str(parent), str(other.path), "--run", str(tmp_path / "compared")]) == 0
    assert "gspo against parent" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["compare", str(parent), "--run", str(tmp_path / "alone")])
    assert "none of" in capsys.readouterr().err


@pytest.mark.slow("trains and forks a run")
def test_the_first_other_draw_is_found(parent, tmp_path):
    """A fork whose rollouts of step 4 differ from the parent's in one token of one completion."""
    folder = continued(parent, tmp_path / "fork", 2, config())
    same = parting(RunFolder(folder), RunFolder(parent))
    assert (same.update, same.draws) == (None, None)
    assert "are equal from step 3 to 4" in parting_in_words(same, "fork", "parent")[0]
    file = folder / "rollouts" / "step-000004.parquet"
    table = pq.read_table(file)
    tokens, pieces = table["tokens"].to_pylist(), table["pieces"].to_pylist()
    tokens[5][0], pieces[5][0] = tokens[5][0] + 1, "<other>"
    for name, column in {"tokens": tokens, "pieces": pieces}.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(column, table.schema.field(name).type))
    pq.write_table(table, file)
    draws = parting(RunFolder(folder), RunFolder(parent)).draws
    assert draws is not None
    assert (draws.step, draws.token, draws.before) == (4, 0, "")
    assert (draws.same_prompts, draws.same) == (draws.prompts, draws.completions - 1)
    assert draws.problem == table["problem"].to_pylist()[5]
    assert draws.ours is not None
    assert draws.theirs is not None
    assert (draws.ours.text, draws.ours.row, draws.theirs.row) == ("<other>", 5, 5)
    assert "drew '<other>'" not in " ".join(parting_in_words(same, "fork", "parent"))
    other = parting(RunFolder(folder), RunFolder(parent))
    assert "fork '<other>'" in " ".join(parting_in_words(other, "fork", "parent"))
