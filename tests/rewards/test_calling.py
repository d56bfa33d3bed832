"""Reward functions of TRL, verl and verifiers are known by their parameters and called as there."""

from pathlib import Path

import pytest

from proximo.rewards import GivenFunction, GraderFailed, PythonFunction
from proximo.rewards.calling import RUBRIC, TRL, VERIFIERS, VERL, VERL_BATCH, VERL_WHOLE, adapted
from proximo.types import Completion, Problem
from tests.rewards import others_rewards as others

ASKED = ({"role": "user", "content": "1+1?"},)
ROW = {"data_source": "sums", "extra_info": {"index": 3}, "reward_model": {"ground_truth": "2"}, "kind": "sum"}
PROBLEM = Problem("sum", ASKED, "2", ROW | {"info": {"length": 4}})
COMPLETIONS = [Completion((1,), (), text, "stop") for text in ("2", "four")]

SCORES = {
    "compute_score": (VERL, [4.0, 3.0]),
    "batch_score": (VERL_BATCH, [1.0, 0.0]),
    "exact": (VERIFIERS, [1.0, 0.0]),
    "informed": (VERIFIERS, [1.25, 2.0]),
    "grouped": (TRL, [1.0, 1.0]),
    "slow_trl": (TRL, [1.0, 1.0]),
    "rubric": (RUBRIC, [1.0 + 0.5 + 0.25, 0.5 + 0.25]),
}
UNHEARD = {"slow_trl": "; what it gives to log_extra is not logged, what it gives to log_metric is"}


@pytest.mark.parametrize("name", [name for name in SCORES if name not in ("grouped", "rubric")])
def test_functions_given_in_python(name: str, grading):
    form, scores = SCORES[name]
    assert GivenFunction.of(getattr(others, name))([PROBLEM] * 2, COMPLETIONS) == scores
    assert grading.called() == [f"reward {name}: called as {form}{UNHEARD.get(name, '')}"]
    assert grading.failures.take() == []


@pytest.mark.parametrize("name", ["compute_score", "slow_trl", "rubric"])
def test_functions_in_a_process_of_their_own(name: str, grading):
    form, scores = SCORES[name]
    path = f"{Path(others.__file__)}:{name}"
    assert PythonFunction(path)([PROBLEM] * 2, COMPLETIONS) == scores
    assert grading.called() == [f"reward {path}: called as {form}{UNHEARD.get(name, '')}"]


def test_forms():
    assert {name: adapted(getattr(others, name)).form for name in SCORES} == {
        name: form for name, (form, _) in SCORES.items()
    }
    assert adapted(lambda **columns: []).form == TRL
    columns = {"prompts": ["p"], "completions": ["2"], "answer": ["2"], "data_source": ["dict"]}
    assert adapted(others.compute_score)(columns, 1) == [1.0]  # of a dictionary, its score
    assert adapted(others.slow_trl)({**columns, "kind": ["neither"]}, 1) == [None]


TINYZERO = "A conversation between User and Assistant.\nUser: make 2.\nAssistant: Let me think.\n<think>"
PROMPTS = {
    "text with its header": TINYZERO,
    "message with its header": ({"role": "user", "content": TINYZERO},),
    "conversation": ({"role": "system", "content": "Be short."}, {"role": "user", "content": "make 2."}),
    "in ChatML": "<|im_start|>user\nmake 2<|im_end|>\n<|im_start|>assistant\n<think>",
}


@pytest.mark.slow("starts functions")
@pytest.mark.parametrize("prompt", PROMPTS)
def test_functions_that_take_prompt_and_answer_in_one_text_get_them(prompt: str, grading):
    truth = {"ground_truth": {"target": 2, "numbers": [1, 1]}}
    problem = Problem("sum", PROMPTS[prompt], None, {"data_source": "countdown", "reward_model": truth})
    said = [Completion((1,), (), f"{text}</think> <answer>{text}</answer>", "stop") for text in ("2", "3")]
    said.append(Completion((1,), (), "2", "stop"))
    for name in ("countdown_score", "chosen_score"):
        assert GivenFunction.of(getattr(others, name))([problem] * 3, said) == [1.0, 0.1, 0.0]
        assert grading.called()[-1] == f"reward {name}: called as {VERL_WHOLE}"
    path = f"{Path(others.__file__)}:countdown_score"
    assert PythonFunction(path)([problem] * 3, said) == [1.0, 0.1, 0.0]


def test_a_header_may_be_a_pattern_of_the_module():
    assert adapted(others.patterned).headers == ("<|im_start|>assistant",)
    assert adapted(others.patterned)({"prompts": [ASKED], "completions": ["2"]}, 1) == [1.0]


def test_functions_that_only_forbid_a_header_get_the_answer_alone():
    assert adapted(others.polite_score).form == VERL
    columns = {"prompts": [TINYZERO], "completions": ["it is 2"], "ground_truth": ["2"]}
    assert adapted(others.polite_score)(columns, 1) == [1.0]
    with pytest.raises(ValueError, match="'Assistant:' in solution_strs.*take each as it is"):
        adapted(others.wholes_score)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "mixed",
            r"its parameters \(completions, solution_str\) are of TRL's .* and of verl's .*: rename those of one",
        ),
        (
            "neither",
            r"its signature \(text, truth\) is not recognised: give TRL's f\(prompts, .*verl's .*verifiers'",
        ),
        ("parsed", "it needs a parser, which only a rubric gives: name the Rubric instead"),
    ],
)
def test_functions_of_no_one_form_are_refused_in_one_line(name: str, line: str, grading):
    for reward in (GivenFunction.of(getattr(others, name)), PythonFunction(f"{Path(others.__file__)}:{name}")):
        with pytest.raises(GraderFailed, match=line) as told:
            reward([PROBLEM], COMPLETIONS[:1])
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(("kind", "score"), [("def", 0.0), ("async def", 1.0)])
def test_a_worker_imports_asyncio_only_for_what_awaits(kind: str, score: float, grading, tmp_path: Path):
    """It is half of a worker's start."""
    lines = ["import sys", f"{kind} found(prompts, completions):", "    return ['asyncio' in sys.modules] * 2"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    assert PythonFunction(f"{tmp_path / 'mine.py'}:found")([PROBLEM] * 2, COMPLETIONS) == [score] * 2
