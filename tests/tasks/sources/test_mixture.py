"""Several sources in one task: draws by weight, held-out problems of all, each graded by its own reward."""

import json
from collections import Counter
from pathlib import Path

import pytest

import proximo
from proximo.config import toml
from proximo.insight.folder import RunFolder
from proximo.insight.report import write_report
from proximo.rewards import ExactMatch
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.runs.ledger import check_ledger
from proximo.tasks import Arithmetic, File, Mixture, Source
from proximo.tasks.sources.opening import open_data
from proximo.types import Completion
from tests.api.settings import small


def sums(path: Path, first: range, question: str = "prompt") -> str:
    rows = [{question: f"{a}+{b}=", "answer": str(a + b)} for a in first for b in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    small_sums, large = sums(tmp_path / "small.jsonl", range(5)), sums(tmp_path / "large.jsonl", range(10, 15))
    return Mixture(
        (
            Source("small", File(small_sums, held_out=0.2), weight=0.75),
            Source("large", File(large, held_out=0.0, reward=ExactMatch(last_number=True)), weight=0.25),
            Source("test", Arithmetic(held_out=6), weight=0.0),
        )
    )


def test_draws_follow_the_weights_and_their_numbers_alone(mixture: Mixture):
    drawn = [mixture.problem(index, "train", 0) for index in range(40)]
    for start in (0, 4, 17):  # in any stretch
        assert Counter(problem.source for problem in drawn[start : start + 4]) == {"small": 3, "large": 1}
    again = Mixture(mixture.sources)
    assert again.problem(33, "train", 0) == drawn[33]
    own = [problem for problem in drawn if problem.source == "large"]
    task = mixture.sources[1].task
    assert [problem.id for problem in own] == [f"large/{task.problem(index, 'train', 0).id}" for index in range(10)]


def test_held_out_problems_of_all_sources_take_turns(mixture: Mixture):
    size = mixture.sources[0].task.size("held_out")
    assert size
    assert mixture.size("held_out") == size + 6
    assert [mixture.problem(index, "held_out", 0).source for index in range(4)] == ["small", "test", "small", "test"]


def test_skipped_rows_are_held_out_no_longer(tmp_path: Path):
    path = sums(tmp_path / "sums.jsonl", range(5))
    mixture = Mixture((Source("sums", Arithmetic()), Source("test", File(path, held_out=1.0, skip_bad=True), weight=0)))
    own = {index for index in range(25) if mixture.sources[1].task.problem(index, "held_out", 0).prompt == "2+2="}
    before = mixture.size("held_out")
    skipped = mixture.check(lambda problems: ["unusable" if problem.prompt == "2+2=" else None for problem in problems])
    assert len(own) == len(skipped) == 1
    assert before is not None
    assert mixture.size("held_out") == before - 1


def test_the_order_of_held_out_problems_is_found_once(mixture: Mixture, monkeypatch):
    asked = []
    size = File.size
    monkeypatch.setattr(File, "size", lambda self, split: asked.append(split) or size(self, split))
    for index in range(8):
        mixture.problem(index, "held_out", 0)
    assert asked == ["held_out"] * 2  # once for each of the two files


def test_each_source_has_its_own_reward(mixture: Mixture):
    drawn = {problem.source: problem for problem in (mixture.problem(index, "train", 0) for index in range(4))}
    problems = [drawn["large"], drawn["small"], drawn["large"]]
    said = [Completion((), (), f"so {problem.answer}", "stop") for problem in problems]
    assert [grade.outcome for grade in mixture.grade(problems, said)] == [1.0, 0.0, 1.0]
    assert mixture.reference(drawn["small"]) == drawn["small"].answer


def test_a_prompt_on_both_sides_is_refused(mixture: Mixture, tmp_path: Path):
    assert mixture.check(lambda problems: [None] * len(problems)) == []
    copied = Source("copy", File(sums(tmp_path / "copy.jsonl", range(5)), held_out=1.0), weight=0.0)
    with pytest.raises(ValueError, match="training prompts of small are also held out, such as small-"):
        Mixture((*mixture.sources, copied)).check(lambda problems: [None] * len(problems))


@pytest.mark.parametrize(
    ("sources", "line"),
    [
        ([("a", 0.0)], "task.sources has no source with a weight above 0"),
        ([("a", 1.0), ("a", 1.0)], "task.sources has the names a, a: give each source its own"),
        ([("a/b", 1.0)], "name is 'a/b': give a name without a slash"),
        ([("a", -1.0)], "weight of a is -1.0: give 0 or a positive number"),
    ],
)
def test_mixtures_that_cannot_be_meant(sources, line: str):
    with pytest.raises(ValueError, match=line):
        Mixture(tuple(Source(name, Arithmetic(held_out=2), weight) for name, weight in sources))


def test_a_source_without_training_problems_needs_weight_0(tmp_path: Path):
    task = File(sums(tmp_path / "x.jsonl", range(2)), held_out=1.0)
    with pytest.raises(ValueError, match="x has no problem to train on: give it weight 0"):
        Mixture((Source("x", task),)).problem(0, "train", 0)


# Opened from data


def test_data_with_weights_and_data_for_evaluation(tmp_path: Path):
    a, b = sums(tmp_path / "a.jsonl", range(5)), sums(tmp_path / "b.jsonl", range(5, 8))
    test, other = sums(tmp_path / "t.jsonl", range(20, 22)), sums(tmp_path / "o.jsonl", range(30, 32), "question")
    mixed = open_data([f"{a}=0.7", f"{b}=0.3"], [f"hard={other}"])
    assert isinstance(mixed.task, Mixture)
    assert [(each.name, each.weight) for each in mixed.task.sources] == [("a", 0.7), ("b", 0.3), ("hard", 0.0)]
    assert mixed.task.size("held_out") == 10
    assert len(mixed.lines) == 3
    alike = open_data([a], [test]).task
    assert isinstance(alike, File)
    assert (alike.path, alike.held_out, alike.size("train"), alike.size("held_out")) == (a, test, 25, 10)
    assert isinstance(open_data([a], [other]).task, Mixture)  # another column
    with pytest.raises(ValueError, match="give PATH, or PATH=WEIGHT with a number"):
        open_data([f"{a}=much"])


@pytest.mark.slow("trains and resumes a run")
@pytest.mark.usefixtures("ordinary_precision")
def test_a_mixed_run_resumes_to_the_same_bytes(mixture: Mixture, tmp_path: Path):
    config = small(task=mixture, evaluation=EvaluationOptions(problems=8), steps=4)
    assert toml.loads(toml.dumps(config), RunConfig) == config
    proximo.train(config, tmp_path / "whole", quiet=True)
    proximo.train(config, tmp_path / "parts", quiet=True, on_step=lambda step, _: step == 2)
    proximo.train(config, tmp_path / "parts", quiet=True, allow_change=["steps"])
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["held_out/problems"] == rows[0]["held_out/small/problems"] + rows[0]["held_out/test/problems"]
    assert {name for name in rows[2] if name.startswith("sources/small")} == {
        f"sources/small/{name}" for name in ("outcome", "accuracy", "completions", "unscored")
    }
    steps = [row for row in rows if "loss" in row]
    again = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [row for row in again if "loss" in row] == steps
    assert (parts / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert not check_ledger(whole).wrong
    page = write_report(RunFolder(whole))[0].read_text()
    assert all(f">{name} {when}<" in page for name in ("small", "test") for when in ("before", "after"))
    drawn = [json.loads(line)["source"] for line in (whole / "ledger.jsonl").read_text().splitlines()]
    assert Counter(drawn) == {"small": 6, "large": 2}


@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_without_evaluation(tmp_path: Path):
    task = File(sums(tmp_path / "x.jsonl", range(5)), held_out=0.0)
    config = small(task=task, evaluation=EvaluationOptions(problems=0), steps=1)
    result = proximo.train(config, tmp_path / "run", quiet=True)
    assert (result.before.problems, result.after.problems, result.examples) == (0, 0, [])
    assert "held_out" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="evaluation.problems is 0.*but every is 5"):
        EvaluationOptions(problems=0, every=5)
    with pytest.raises(ValueError, match="no problem to evaluate on.*set evaluation.problems to 0"):
        proximo.train(small(task=task), tmp_path / "other", quiet=True)


def test_no_data_is_said():
    with pytest.raises(ValueError, match="data is empty: give a path"):
        open_data([])
