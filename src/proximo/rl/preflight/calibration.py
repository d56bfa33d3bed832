"""Calibration of the grader before training: are right answers graded right, and wrong ones wrong?

A few of a data set's own answers may be wrong, so a grader is refused only if it fails more often than not; fewer
failures are reported.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from proximo.processes.failures import plain
from proximo.rewards import GraderFailed
from proximo.rewards.grading import grading
from proximo.tasks import RewardRange, Split, Task, reward_range
from proximo.types import Completion, Grade, Problem

SAMPLE = 8
"""Number of training problems checked, from the start."""
TRIES = 3
"""Number of problems checked if no answer is known: then the only test is whether anything gets a score."""

Asked = tuple[Problem, str]
"""A problem and a completion text."""


@dataclass(frozen=True)
class Probe:
    """The grade of a known text."""

    problem: Problem
    text: str
    grade: Grade
    is_reference: bool = False
    """True if the text is the task's own answer."""

    @property
    def is_unscored(self) -> bool:
        return math.isnan(self.grade.verdict)

    @property
    def is_right(self) -> bool:
        return self.grade.outcome >= 1

    def __str__(self) -> str:
        scores = "is unscored" if self.is_unscored else f"scores {self.grade.outcome:g}"
        return f"{self.problem.id}: {short(self.text)} {scores}"


@dataclass(frozen=True)
class Calibration:
    """Results of a calibration."""

    remarks: list[str]
    """Remarks on the grader."""
    graded: tuple[Probe, ...] = ()
    """Texts with their grades, to show a person: a reference answer and a wrong one, or any text where no answer is
    known."""


def calibrate(task: Task, seed: int, split: Split = "train") -> list[str]:
    """Remarks on the grader; one that cannot be trained with is refused."""
    return calibration(task, seed, split).remarks


def calibration(task: Task, seed: int, split: Split = "train") -> Calibration:
    """Remarks on the grader, and what it gave; one that cannot be trained with is refused."""
    with grading():
        return _calibrated(task, seed, split)


def _calibrated(task: Task, seed: int, split: Split) -> Calibration:
    size = task.size(split)
    problems = [task.problem(index, split, seed) for index in range(min(size or SAMPLE, SAMPLE))]
    asked = with_references(task, problems)
    declared = reward_range(task)
    if not asked:
        if not (probes := _refuse_silence(task, problems)):
            unclaimed = f"calibration: every reward function returned None for the first {len(problems)} problems"
            return Calibration([unclaimed, *_errors()])
        return Calibration([*_out_of_range(declared, [], probes), *_errors()], tuple(probes[:1]))
    references = [replace(probe, is_reference=True) for probe in probed(task, asked)]
    failed = [probe for probe in references if not probe.is_right or probe.is_unscored]
    faults = dict.fromkeys("no score" if probe.is_unscored else "less than 1" for probe in failed)
    remarks = _weighed(f"gives {' or '.join(faults)} to the task's own answers", failed, references)
    right = [probe for probe in references if probe not in failed]
    wrong_probes: list[Probe] = []
    for what, wrong in {
        "gives as much to another problem's answer": [_foreign(probe, references) for probe in right],
        "gives as much to an empty text": [[(probe.problem, "")] for probe in right],
        "gives as much to answers with a changed character": [_changed(probe) for probe in right],
    }.items():
        more, probes = _compared(task, what, right, wrong)
        remarks += more
        wrong_probes += probes
    remarks += [*_out_of_range(declared, right, wrong_probes), *_whole_solutions(task, right), *_errors()]
    return Calibration(remarks, (*references[:1], *wrong_probes[:1]))


def _whole_solutions(task: Task, right: Sequence[Probe]) -> list[str]:
    """Check that the number alone is right too, if answers are solutions that end with `#### 72`, as in GSM8K."""
    finals = [(probe.problem, probe.text.rpartition("####")[2].strip()) for probe in right if "####" in probe.text]
    wrong = [probe for probe in probed(task, finals) if not probe.is_right]
    if not wrong:
        return []
    return [
        f"calibration: {wrong[0].problem.id}: the grader requires the whole solution text, and {short(wrong[0].text)} "
        "after its '####' alone is wrong; to grade the final answer set "
        "task.reward.last_number, or put MathVerify in task.reward"
    ]


def with_references(task: Task, problems: Sequence[Problem]) -> list[Asked]:
    """The problems for which the task knows an answer that must score 1."""
    return [(problem, text) for problem in problems if (text := task.reference(problem)) is not None]


def probed(task: Task, asked: Sequence[Asked]) -> list[Probe]:
    completions = [Completion(tokens=(), logprobs=(), text=text, finish="stop") for _, text in asked]
    grades = task.grade([problem for problem, _ in asked], completions)
    return [Probe(problem, text, grade) for (problem, text), grade in zip(asked, grades, strict=True)]


def short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _compared(
    task: Task, what: str, right: Sequence[Probe], wrong: Sequence[Sequence[Asked]]
) -> tuple[list[str], list[Probe]]:
    """Compare each reference with texts of which at least one must score less; returns remarks and all grades."""
    tried, failed, silent = [], [], 0
    everything = probed(task, [text for asked in wrong for text in asked])
    graded = iter(everything)
    for reference, asked in zip(right, wrong, strict=True):
        probes = list(islice(graded, len(asked)))
        if probes:
            tried.append(probes[0])
            silent += all(probe.is_unscored for probe in probes)
            if all(probe.grade.outcome >= reference.grade.outcome for probe in probes):
                failed.append(probes[0])
    remarks = _weighed(what, failed, tried)
    if silent:
        remarks.append(
            f"calibration: of texts that should score less ({what}), {silent} of {len(tried)} are unscored: the grader "
            "does not call them wrong"
        )
    return remarks, everything


def _out_of_range(declared: RewardRange | None, right: Sequence[Probe], others: Sequence[Probe]) -> list[str]:
    """Remarks on a declared range that the grader contradicts: length penalties, scaled by it, would be off."""
    if declared is None:
        return []
    low, high = declared
    odd = [probe for probe in right if probe.grade.outcome != high]
    odd += [probe for probe in others if not probe.is_unscored and not low <= probe.grade.outcome <= high]
    if not odd:
        return []
    example = plain(str(odd[0]), 200)
    return [
        f"calibration: reward_range says that a wrong answer earns {low:g} and a right one {high:g}, but {example}: "
        "length penalties are measured by this range, correct it"
    ]


def _weighed(what: str, failed: Sequence[Probe], tried: Sequence[Probe]) -> list[str]:
    """Refuse a grader that fails more often than not; otherwise return remarks."""
    if not failed:
        return []
    examples = "; ".join(plain(str(probe), 200) for probe in failed[:3])
    message = f"calibration: the grader {what}, {len(failed)} of {len(tried)}: {examples}"
    if 2 * len(failed) <= len(tried):
        return [f"{message}; check these problems"]
    last = f"{message}; nothing was trained: correct the reward or the answers"
    raise GraderFailed("\n".join([*_causes(tried[0].problem), last]))


def _refuse_silence(task: Task, problems: Sequence[Problem]) -> list[Probe]:
    """Grade one problem after the other up to the first score, which is returned, since a grader may be slow. Problems
    that every reward function declines are skipped; if all are, none is returned."""
    tried = 0
    for problem in problems:
        texts = ["1", "", *([] if problem.answer is None else [str(problem.answer)])]
        probes = probed(task, [(problem, text) for text in texts])
        if not all(math.isnan(probe.grade.reward) for probe in probes):
            return probes
        tried += any(probe.grade.applies for probe in probes)
        if tried == TRIES:
            break
    if not tried:
        return []
    message = f"calibration: no text could be scored, of {tried} problems; nothing was trained"
    raise GraderFailed("\n".join([*_causes(problems[0]), message]))


def _errors() -> list[str]:
    """Errors inside graders."""
    with grading() as active:
        return [f"calibration: {line}" for line in active.failures.take()]


def _causes(problem: Problem) -> list[str]:
    """Errors inside graders, each with what helps as far as that is known."""
    return [f"{line}{_remedy(line, problem)}" for line in _errors()]


def _remedy(error: str, problem: Problem) -> str:
    if "required positional argument" in error or "required keyword-only argument" in error:
        columns = sorted({"prompts", "completions", "answer", *problem.data})
        return f"; the columns that are there are {', '.join(columns)}"
    if "'list' object has no attribute" in error and not isinstance(problem.prompt, str):
        return "; prompts are conversations, so each completion is a list of messages: its text is c[0]['content']"
    return ""


def _foreign(probe: Probe, references: Sequence[Probe]) -> list[Asked]:
    """Another problem's answer, if there is one."""
    start = references.index(probe)
    others = (other.text for other in (*references[start + 1 :], *references[:start]) if other.text != probe.text)
    return [(probe.problem, text) for text in list(others)[:1]]


def _changed(probe: Probe) -> list[Asked]:
    """The answer with a changed first digit of its last number, and with a changed last letter or digit: a grader may
    round, and the end of a text may not matter."""
    positions = [match.start() for match in re.finditer(r"\d[\d.,]*", probe.text)][-1:]
    positions += [position for position, character in enumerate(probe.text) if character.isalnum()][-1:]
    return [(probe.problem, probe.text[:at] + _other(probe.text[at]) + probe.text[at + 1 :]) for at in positions]


def _other(character: str) -> str:
    return str(int(character) % 9 + 1) if character in "0123456789" else "y" if character in "zZ" else "z"
