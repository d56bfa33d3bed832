"""pass@k and maj@k against values counted by hand, and pass@k against its definition."""

from itertools import combinations

import pytest

from proximo.api.evaluation.estimates import curve, majority, pass_at_k
from proximo.rewards import ExactMatch, MathVerify
from proximo.rewards.mathematics import boxed
from proximo.tasks import Arithmetic, Countdown, File
from proximo.tasks.protocol import final_answer, final_answers
from proximo.types import Completion


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 − C(3,2)/C(4,2) = 1 − 3/6
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 5, 4) == 1.0
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@5 of 4 completions"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(samples: int):
    for correct in range(samples + 1):
        for k in range(1, samples + 1):
            subsets = list(combinations(range(samples), k))
            share = sum(min(each) < correct for each in subsets) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(share)


def test_majority_by_hand():
    assert majority(["7", "7", "8"], [True, True, False]) == 1.0
    assert majority(["8", "8", "7"], [False, False, True]) == 0.0
    assert majority(["7", "8"], [True, False]) == 0.5  # a tie counts by halves
    assert majority([None, None, "7"], [False, False, True]) == 1.0  # no answer is no vote
    assert majority([None], [False]) == 0.0


def test_reported_ks():
    assert [curve(samples) for samples in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("of", "text", "answer"),
    [
        (Arithmetic(), " 12\n34", "12"),
        (Arithmetic(chat=True), "It is 1,200.0.", "1200"),
        (ExactMatch(), " a b ", "a b"),
        (ExactMatch(last_number=True), "none", None),
        (MathVerify(), r"so \boxed{\frac{1}{2} } or \boxed{ {3} x }.", "{3}x"),
        (MathVerify(), "so 0.50", "0.5"),
        (File("f.jsonl", reward=ExactMatch(last_number=True)), "x 5", "5"),
        (File("f.jsonl", reward=None), "x 5", None),
        (Countdown(), "1+2", None),  # many expressions are the same answer
    ],
)
def test_final_answers(of: object, text: str, answer: str | None):
    assert final_answer(of, Completion((1,), (0.0,), text, "stop")) == answer


@pytest.mark.slow("starts math-verify")
def test_answers_vote_together_where_math_verify_finds_them_equal(monkeypatch):
    task = File("f.jsonl", reward=MathVerify())
    texts = [r"\boxed{0.5}", "none", r"\boxed{\frac{1}{2}}", "so 3", r"\boxed{1/2}", "it is 4", r"\boxed{50\%}"]
    said = [Completion((1,), (0.0,), text, "stop") for text in texts]
    assert final_answers(task, said) == ["0.5", None, "0.5", "3", "0.5", "4", "0.5"]
    monkeypatch.setattr("proximo.rewards.mathematics.score_or_pass", None)  # plain numbers need no comparison
    assert final_answers(task, [said[0], said[3], said[5], said[3]]) == ["0.5", "3", "4", "3"]
    assert final_answers(ExactMatch(), [said[3], said[5]]) == ["so 3", "it is 4"]


def test_an_unfinished_box_is_no_answer():
    assert boxed(r"\boxed{1") is None
    assert boxed("1}") is None
