"""Results of several models: estimates, paired differences, the table and the file, all counted by hand."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from proximo.api.evaluation.files import check_file, write_rows
from proximo.api.evaluation.models import Candidate, candidates
from proximo.api.evaluation.results import ModelResult
from proximo.api.evaluation.table import pass_line, table
from proximo.rl.evaluate import Answers
from proximo.tasks import Echo
from proximo.types import Completion, Grade, Problem, Rollout

NAN = float("nan")


def rollout(text: str, outcome: float) -> Rollout:
    return Rollout(Completion((1, 2), (0.0, 0.0), text, "stop"), Grade(outcome))


def result(name: str, greedy: list[float], sampled: list[str] | None = None) -> ModelResult:
    """Greedy outcomes, and for each problem a text whose letters are its sampled answers: `y` is correct, `?` not
    scored."""
    outcomes = {"y": 1.0, "?": NAN}
    drawn = [tuple(rollout(each, outcomes.get(each, 0.0)) for each in letters) for letters in sampled or []]
    problems = [Problem(f"p{number}", f"say {number}", "y") for number in range(len(greedy))]
    return ModelResult(name, Answers(problems, [rollout("y", each) for each in greedy], drawn), Echo())


def test_pass_and_majority_over_problems():
    found = result("m", [1, 0, 0], ["yyaa", "abcy", "????"])
    # The third problem has no scored completion. pass@2: 1 − C(2,2)/C(4,2) = 5/6 and 1 − C(3,2)/C(4,2) = 1/2.
    assert {k: each.mean for k, each in found.pass_at.items()} == pytest.approx({1: 0.375, 2: 2 / 3, 4: 1.0})
    assert found.majority is not None
    assert found.majority.mean == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert found.evaluation.mean_at_k == pytest.approx(0.375)
    assert found.evaluation.pass_at_k == 1.0
    # 95 % of the mean of 5/6 and 1/2: t(1) · stdev / √2.
    assert found.pass_at[2].half_width == pytest.approx(12.706 / 6, rel=1e-4)
    assert pass_line(found).startswith("pass@2 66.7% ± ")
    assert pass_line(result("m", [1, 0])) == ""


def test_a_problem_with_fewer_scores_counts_with_those():
    assert result("m", [1], ["y?aa"]).pass_at[4].mean == 1.0


def test_differences_are_paired_by_problem():
    first, other = result("a", [1, 0, 1, 0]), result("b", [1, 1, 1, NAN])
    found = other.difference(first)
    assert (found.difference, found.wins, found.losses) == (pytest.approx(1 / 3), 1, 0)
    facts = other.to_dict(first)
    assert facts["difference"] == pytest.approx(1 / 3)
    assert facts["difference_low"] < 0 < facts["difference_high"]
    assert (facts["better"], facts["worse"], facts["verdict"]) == (1, 0, "within noise")
    assert "difference" not in first.to_dict()


def test_the_table_has_a_line_for_each_model():
    first, other = result("runs/a step 20", [1, 0], ["yy", "ab"]), result("runs/b", [1, 1], ["yy", "yb"])
    heads, one, two = table([first, other])
    assert heads.split("  ")[0].strip() == "model"
    for head in ("accuracy", "mean@2", "pass@2", "maj@2", "difference from the first", "better/worse"):
        assert head in heads
    assert one.startswith("runs/a step 20  50.0% (")
    assert "points" not in one
    assert "+50.0 points (" in two
    assert "1/0" in two
    assert two.endswith("within noise")
    assert "outcome" in table([result("a", [0.5]), result("b", [0.25])])[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_completion_is_a_row(suffix: str, tmp_path: Path):
    path = tmp_path / f"answers{suffix}"
    found = result("m", [1, NAN], ["ya", "??"])
    write_rows(path, found.rows())
    if suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        text = path.read_text()
        rows = json.loads(text) if suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    assert [(row["problem"], row["kind"], row["sample"], row["outcome"]) for row in rows] == [
        ("p0", "greedy", 0, 1.0),
        ("p0", "sampled", 0, 1.0),
        ("p0", "sampled", 1, 0.0),
        ("p1", "greedy", 0, None),
        ("p1", "sampled", 0, None),
        ("p1", "sampled", 1, None),
    ]
    assert rows[0]["prompt"] == "say 0"
    assert (rows[2]["completion"], rows[2]["answer"], rows[2]["tokens"]) == ("a", "a", 2)


def test_files_are_refused_before_anything_is_computed(tmp_path: Path):
    with pytest.raises(ValueError, match=r"a file that ends in \.jsonl, \.json, \.parquet"):
        check_file(tmp_path / "answers.csv")
    with pytest.raises(ValueError, match="there is no folder"):
        check_file(tmp_path / "none" / "answers.json")


def test_checkpoints_of_runs(tmp_path: Path):
    for step in (40, 5):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    run = str(tmp_path)
    assert [each.label for each in candidates([run], "all")] == [f"{run} step 5", f"{run} step 40"]
    assert candidates([run], "40") == [Candidate(f"{run}/checkpoints/step-000040", f"{run} step 40")]
    assert candidates(["a", "b"]) == [Candidate("a", "a"), Candidate("b", "b")]
    for wanted, complaint in (("7", "none of step 7; it has 5, 40"), ("x", "give all, or steps such as 20,40")):
        with pytest.raises(ValueError, match=complaint):
            candidates([run], wanted)
    with pytest.raises(ValueError, match="tiny has none"):
        candidates(["tiny"], "all")
    with pytest.raises(ValueError, match="a is given twice"):
        candidates(["a", "b", "a"])
