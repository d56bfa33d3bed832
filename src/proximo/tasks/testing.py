"""Tests of a program, and whether it passes them. The sandbox gets only the inputs, never the expected results."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proximo.data.rows import is_text, shortened
from proximo.processes.sandbox import Calls, Sandbox, SandboxJob

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
"""Tolerances for an expected number that is not whole: relative, and absolute where 0 is expected."""
# Both match model output outside the sandbox, so they must take linear time however long it is.
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)
_LONGEST = 400
"""Maximum characters of a number; no float needs more."""


@dataclass(frozen=True)
class Conversations:
    """Inputs and expected outputs of a script; each test runs in its own process."""

    pairs: tuple[tuple[str, str], ...]
    """Pairs of input and expected output."""

    def passed(self, program: str, sandbox: Sandbox) -> bool:
        for given, expected in self.pairs:
            result = sandbox.run(SandboxJob(program, stdin=given))
            if not result.finished or not same_text(expected, result.stdout.decode(errors="replace")):
                return False
        return True


@dataclass(frozen=True)
class FunctionTests:
    """Arguments and expected results of a function; all calls run in one process."""

    calls: Calls
    expected: tuple[Any, ...]

    def passed(self, program: str, sandbox: Sandbox) -> bool:
        result, nonce = sandbox.run_marked(SandboxJob(program, calls=self.calls))
        lines = result.answers.splitlines()
        if not result.finished or len(lines) != len(self.expected):
            return False
        try:
            answers = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return False
        return all(
            _is_answer(answer, nonce, number) and same_value(expected, answer[2])
            for number, (expected, answer) in enumerate(zip(self.expected, answers, strict=True))
        )


def _is_answer(answer: Any, nonce: str, number: int) -> bool:
    """Tell whether the line comes from the harness; a program can write arbitrary lines of its own."""
    return isinstance(answer, list) and len(answer) == 3 and answer[:2] == [nonce, number]


def read_tests(value: Any, function: Any) -> Conversations | FunctionTests:
    """The tests in a column's value (a list or its JSON), for a function if the row names one."""
    tests = json.loads(value) if isinstance(value, str) else value
    if not isinstance(tests, Sequence) or not tests or not all(isinstance(test, Mapping) for test in tests):
        raise ValueError(f"tests are {shortened(value)}: give a list of objects, at least one")
    if function is None:
        return Conversations(tuple(_pair(test) for test in tests))
    if not is_text(function) or not all(part.isidentifier() for part in function.split(".", 1)):
        raise ValueError(f"function is {shortened(function)}: give a name, or Class.method")
    for test in tests:
        if not isinstance(test.get("arguments"), list | dict) or "result" not in test:
            raise ValueError(f"a test is {shortened(test)}: for a function give arguments (list or object) and result")
    arguments = tuple(json.dumps(test["arguments"]) for test in tests)
    return FunctionTests(Calls(function, arguments), tuple(test["result"] for test in tests))


def _pair(test: Mapping[str, Any]) -> tuple[str, str]:
    given, expected = test.get("input", ""), test.get("output")
    if not is_text(given) or not is_text(expected) or not expected.strip():
        raise ValueError(
            f"a test is {shortened(test)}: give input and output as texts, the output not empty; or a column function"
        )
    return given, expected


def extract_program(text: str) -> str:
    """The last fenced block marked as Python, else the last one without a language, else the whole text."""
    blocks = _FENCE.findall(text)
    for languages in (("python", "py", "python3"), ("",)):
        for language, body in reversed(blocks):
            if language.lower() in languages:
                return body
    return text


def same_text(expected: str, given: str) -> bool:
    """Compare line by line, ignoring trailing spaces and trailing empty lines; decimal numbers up to rounding."""
    wanted, actual = _lines(expected), _lines(given)
    return len(wanted) == len(actual) and all(map(_same_line, wanted, actual))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(expected: str, given: str) -> bool:
    if expected == given:
        return True
    wanted, actual = expected.split(), given.split()
    return len(wanted) == len(actual) and all(map(_same_word, wanted, actual))


def _same_word(expected: str, given: str) -> bool:
    if expected == given:
        return True
    decimal = _is_number(expected) and not expected.lstrip("+-").isdecimal()
    return decimal and _is_number(given) and _close(float(expected), float(given))


def _is_number(word: str) -> bool:
    return len(word) <= _LONGEST and _NUMBER.fullmatch(word) is not None


def same_value(expected: Any, given: Any) -> bool:
    """Compare JSON values. True is not 1; whole numbers are exact, others up to rounding; objects need equal keys."""
    if isinstance(expected, bool) or isinstance(given, bool) or expected is None or isinstance(expected, str):
        return type(expected) is type(given) and expected == given
    if isinstance(expected, list):
        return isinstance(given, list) and len(given) == len(expected) and all(map(same_value, expected, given))
    if isinstance(expected, dict):
        return isinstance(given, dict) and given.keys() == expected.keys() and all(
            same_value(item, given[key]) for key, item in expected.items()
        )  # fmt: skip
    if not isinstance(given, int | float):
        return False
    return expected == given if isinstance(expected, int) else _close(expected, given)


def _close(expected: float, given: int | float) -> bool:
    try:
        # An absolute tolerance anywhere else would accept 0 for any small number.
        near = math.isclose(expected, given, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE if expected == 0 else 0.0)
    except OverflowError:  # a whole number that no float can hold
        return False
    return near or (math.isnan(expected) and math.isnan(given))
