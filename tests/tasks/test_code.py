"""The task of programs: what passes, what does not, and that the grader cannot be talked into a reward."""

import json
import math
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proximo.config import toml
from proximo.processes.sandbox import Limits, ProgramResult, Sandbox, SandboxJob
from proximo.rl.config import RunConfig
from proximo.tasks import Code, Task
from proximo.tasks.testing import extract_program, read_tests, same_text, same_value
from proximo.types import Completion, Problem
from tests.processes.sandbox.captivity import left_behind, needs_sandbox
from tests.tasks.exploits import EXPLOITS, PRIMES, SCRIPT, WRONG, Exploit

ANSWERS = {10: 73, 100: 181, 1000: 1103}
"""Counted by hand: 11 13 17 19 23 29 31 37 41 43 47 53 59 61 67 71 73, and so on."""
SPOKEN = {
    "prompt": "Print the 17th prime after n.",
    "tests": [{"input": str(n), "output": f"{answer}\n"} for n, answer in ANSWERS.items()],
    "solution": PRIMES + SCRIPT,
}
CALLED = {
    "prompt": "solve(n): the 17th prime after n.",
    "function": "solve",
    "tests": [{"arguments": [n], "result": answer} for n, answer in ANSWERS.items()],
    "solution": PRIMES,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (SPOKEN, CALLED)))
    path.chmod(0o644)
    task = Code(str(path), held_out=0.0, limits=Limits(seconds=5.0, cpu_seconds=2), workers=2)
    needs_sandbox()
    yield task
    task._sandbox.close()
    assert not left_behind()


@pytest.fixture(scope="module")
def sandbox(task: Code) -> Sandbox:
    return task._sandbox


def problem(task: Code, function: bool) -> Problem:
    problems = [task.problem(index, "train", 0) for index in range(2)]
    return next(each for each in problems if ("function" in each.data) is function)


def outcomes(task: Code, asked: Problem, *texts: str) -> list[float]:
    completions = [Completion((1,), (-0.1,), text, "stop") for text in texts]
    return [grade.outcome for grade in task.grade([asked] * len(texts), completions)]


# Right and wrong


@pytest.mark.parametrize("function", [False, True])
def test_all_tests_or_nothing(task: Code, function: bool):
    asked, end = problem(task, function), "" if function else SCRIPT
    almost = PRIMES.replace("return n", "return n if n < 1000 else 0")
    said = f"Let me think.\n```python\nprint('no')\n```\nBetter:\n```python\n{PRIMES + end}\n```\nDone."
    texts = [PRIMES + end, said, WRONG + end, almost + end, "", "The answer is 73.", PRIMES]
    assert outcomes(task, asked, *texts) == [1, 1, 0, 0, 0, 0, float(function)]


def test_the_solution_is_the_reference(task: Code):
    for function in (False, True):
        asked = problem(task, function)
        reference = task.reference(asked)
        assert reference is not None
        assert outcomes(task, asked, reference) == [1]
    assert isinstance(task, Task)
    assert task.while_sampling


@pytest.mark.slow("starts many programs")
def test_a_program_that_fails_is_wrong_and_not_unscored(task: Code, grading):
    asked = problem(task, function=True)
    broken = [
        "def solve(n):\n    while True: pass",
        "def solve(n): return bytearray(1 << 40)",
        "def solve(n): return 1 / 0",
        "def solve(n: return n",
        "\0",
        "\udc80",
        "def solve(n):\n    print('x' * 2_000_000)\n    return 73",
        "import ctypes\nctypes.string_at(0)",
        "x = 1",
    ]
    assert outcomes(task, asked, *broken) == [0] * len(broken)
    assert not grading.failures.take()


def test_what_is_printed_around_the_answer_counts_for_scripts_alone(task: Code):
    loud = "print('hello')\n" + PRIMES
    assert outcomes(task, problem(task, function=True), loud) == [1]
    assert outcomes(task, problem(task, function=False), loud + SCRIPT) == [0]


def test_a_script_that_fails_after_its_answer_is_wrong(task: Code):
    asked = problem(task, function=False)
    assert outcomes(task, asked, PRIMES + SCRIPT + "raise ValueError\n") == [0]
    assert outcomes(task, asked, PRIMES + SCRIPT + "import sys\nsys.exit()\n") == [1]


def test_a_sandbox_that_dies_leaves_the_completion_unscored_and_is_replaced(task: Code, grading):
    asked = problem(task, function=True)
    # Different programs, so many that both servers have been started.
    assert outcomes(task, asked, *(f"{PRIMES}# {number}" for number in range(12))) == [1] * 12
    servers = [task._sandbox._free.get() for _ in range(2)]
    for server in servers:
        task._sandbox._free.put(server)
    for server in servers:
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
    first = outcomes(task, asked, PRIMES, PRIMES + "#", PRIMES)
    assert all(math.isnan(each) for each in first)
    assert [failures.unscored for failures in grading.failures.take()] == [3]
    assert outcomes(task, asked, PRIMES, WRONG) == [1, 0]


def test_programs_of_a_group_are_judged_in_order(task: Code):
    asked = problem(task, function=True)
    texts = [(PRIMES if number % 3 else WRONG) + f"# {number // 2}" for number in range(12)]
    assert outcomes(task, asked, *texts) == [float(number % 3 > 0) for number in range(12)]


# Exploits


@pytest.mark.parametrize("exploit", EXPLOITS, ids=lambda each: each.name)
@pytest.mark.parametrize("function", [False, True])
def test_exploits_earn_nothing(task: Code, sandbox: Sandbox, exploit: Exploit, function: bool):
    asked, end = problem(task, function), "" if function else SCRIPT
    nonce = secrets.token_hex(8)
    begun = f"import os\nos.write(2, {nonce!r}.encode())\n"
    program = begun + exploit.code.replace("TESTS", task.path) + end
    # It runs as the task runs it; that it ran at all is seen here.
    watched = Watched(sandbox)
    assert not read_tests(asked.data["tests"], asked.data.get("function")).passed(program, watched)
    assert watched.results
    assert all(nonce.encode() in result.stderr for result in watched.results), f"{exploit.name} did not run"


@pytest.mark.parametrize(
    "name",
    ["exit outside", "exit inside", "hard exit outside", "hard exit inside", "equal to everything",
     "an integer equal to everything", "a list equal to everything", "tracing"],
)  # fmt: skip
def test_a_grader_beside_the_program_would_have_paid(name: str):
    """The control: assertions in the program's own process, and its exit code as the verdict."""
    [exploit] = [each for each in EXPLOITS if each.name == name]
    script = f"{exploit.code}\nassert solve(10) == {ANSWERS[10]}\n"
    assert subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, check=False).returncode == 0


class Watched(Sandbox):
    """Another sandbox, with all that was asked of it and what came back."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._real = sandbox
        self.jobs: list[SandboxJob] = []
        self.results: list[ProgramResult] = []

    def run_marked(self, job: SandboxJob) -> tuple[ProgramResult, str]:
        self.jobs.append(job)
        result, nonce = self._real.run_marked(job)
        self.results.append(result)
        return result, nonce


@pytest.mark.parametrize("function", [False, True])
def test_expected_answers_never_enter_the_sandbox(task: Code, sandbox: Sandbox, function: bool):
    asked, watched = problem(task, function), Watched(sandbox)
    program = PRIMES + ("" if function else SCRIPT)
    assert read_tests(asked.data["tests"], asked.data.get("function")).passed(program, watched)
    assert watched.jobs
    for job in watched.jobs:
        assert job.program == program
        assert not any(str(answer) in repr((job.stdin, job.calls)) for answer in ANSWERS.values())


# Comparing and reading


@pytest.mark.parametrize(
    ("expected", "said", "same"),
    [
        ("1 2\n3", "1 2  \n3\n\n", True),
        ("1 2", "1  2", True),
        ("1 2", "1 2 3", False),
        ("1\n2", "1 2", False),
        ("0.333333333", "0.33333333333", True),
        ("0.3333", "0.3334", False),
        ("2.0", "2", True),
        ("2", "2.0", False),
        ("1e3", "1000", True),
        ("abc", "ABC", False),
        ("1.5", "nan", False),
        ("1.5", "inf", False),
        ("1.5", "1_5", False),
        ("", "", True),
        ("0.000000000001", "0.0", False),
        ("0.000000000001", "1.0000001e-12", True),
        ("0.0", "-0.0000000001", True),
        ("-.5", "-5e-1", True),
        ("1.", "1.0", True),
        ("1." + "0" * 500, "1", False),
    ],
)
def test_texts(expected: str, said: str, same: bool):
    assert same_text(expected, said) is same


@pytest.mark.parametrize(
    ("expected", "said", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (0, None, False),
        (None, None, True),
        (0.1, 0.1 + 1e-9, True),
        (0.1, 0.1001, False),
        (0.5, 10**400, False),
        (3e-12, 0, False),
        (3e-12, 3.000001e-12, True),
        (0.0, 1e-10, True),
        (math.nan, math.nan, True),
        (1.0, math.nan, False),
        ("1", 1, False),
        ([1, [2, "x"]], [1, [2, "x"]], True),
        ([1], [1, 2], False),
        ([1], {"0": 1}, False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, ["a"], False),
    ],
)
def test_values(expected: Any, said: Any, same: bool):
    assert same_value(expected, said) is same


@pytest.mark.parametrize("said", ["1" * 10**6 + "x", "1." + "1" * 10**6 + "x", "1e" + "1" * 10**6 + "x", "-" * 10**6])
def test_comparing_takes_one_pass(said: str):
    """In steps that grow with the square of the length this would take hours."""
    assert not same_text("0.5", said)
    for text in (f"```{said}", f"```python{said}\n" * 3, " " * 10**6 + "```", "\n```" * 10**5, "```a\n" * 10**5):
        extract_program(text)


FORGING = """
import json, os, sys
def solve(n):
    frame = sys._getframe()
    while "nonce" not in frame.f_locals:
        frame = frame.f_back
    nonce = frame.f_locals["nonce"]
    os.write(3, LINE(nonce) + b"\\n")
    os._exit(0)
"""


@pytest.mark.parametrize(
    "line",
    [
        "json.dumps([nonce]).encode()",
        "json.dumps([nonce, 0]).encode()",
        "json.dumps([nonce, 0, 73, 73]).encode()",
        "json.dumps([nonce, 0, [73]]).encode()",
        "json.dumps([nonce, 1, 73]).encode()",
        "json.dumps(['another', 0, 73]).encode()",
        "json.dumps({0: nonce, 1: 0, 2: 73}).encode()",
        "json.dumps(nonce).encode()",
        "b'[' * 100000",
        "b'[]'",
        "b'null'",
        "b'\\xff\\xfe'",
        "b'1' + b'0' * 5000",
        "b''",
    ],
)
def test_lines_that_a_program_makes_up_are_no_answers(sandbox: Sandbox, line: str):
    tests = read_tests([{"arguments": [10], "result": 73}], "solve")
    assert not tests.passed(FORGING.replace("LINE(nonce)", line), sandbox)


def test_a_made_up_line_of_the_right_shape_is_worth_its_answer(sandbox: Sandbox):
    """The control: such lines do arrive."""
    tests = read_tests([{"arguments": [10], "result": 73}], "solve")
    assert tests.passed(FORGING.replace("LINE(nonce)", "json.dumps([nonce, 0, 73]).encode()"), sandbox)


def test_problems_differ_by_their_function(tmp_path: Path):
    path = tmp_path / "problems.jsonl"
    rows = [CALLED | {"function": name} for name in ("solve", "answer")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [Code(str(path), held_out=0.0).problem(index, "train", 0) for index in range(2)]
    assert len({each.id for each in problems}) == 2


def test_the_last_python_block_is_the_program():
    assert extract_program("x = 1") == "x = 1"
    assert extract_program("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\n```text\nx = 3\n```") == "x = 2\n"
    assert extract_program("a\n```\nx = 1\n```") == "x = 1\n"
    assert extract_program("a\n```python\nx = 1") == "x = 1"
    assert extract_program("a ```python b") == "a ```python b"


def test_a_method_of_a_class(task: Code, sandbox: Sandbox):
    tests = read_tests([{"arguments": {"a": 2}, "result": [2, 4]}, {"arguments": [3], "result": [3, 9]}], "S.pair")
    assert tests.passed("class S:\n    def pair(self, a): return a, a * a", sandbox)
    assert not tests.passed("class S:\n    def pair(self, b): return b, b * b", sandbox)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "p"}, "no column 'tests'"),
        ({"prompt": "p", "tests": []}, "at least one"),
        ({"prompt": "p", "tests": "[]"}, "at least one"),
        ({"prompt": "p", "tests": "nonsense"}, "Expecting value"),
        ({"prompt": "p", "tests": [3]}, "give a list of objects"),
        ({"prompt": "p", "tests": [{"input": "1"}]}, "give input and output as texts"),
        ({"prompt": "p", "tests": [{"input": "1", "output": " "}]}, "not empty"),
        ({"prompt": "p", "tests": [{"arguments": [1], "result": 1}]}, "or a column function"),
        ({"prompt": "p", "tests": [{"input": "1", "output": "1"}], "function": "f"}, "give arguments"),
        ({"prompt": "p", "tests": [{"arguments": 1, "result": 1}], "function": "f"}, "give arguments"),
        ({"prompt": "p", "tests": [{"arguments": [], "result": 1}], "function": "f()"}, "function is"),
        ({"prompt": "p", "tests": [{"input": "1", "output": "1"}], "solution": 3}, "the solution is not a text"),
        ({"prompt": "p", "tests": [{"input": "1", "output": "1" * 2000000}]}, "set task.limits.output_kb"),
        ({"tests": [{"input": "1", "output": "1"}]}, "set task.prompt_column"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], what: str):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="with bad rows") as caught:
        Code(str(path), held_out=0.0).size("train")
    assert what in str(caught.value)
    assert "problems.jsonl:1" in str(caught.value)


def test_it_is_written_and_read_like_any_task():
    config = RunConfig(task=Code("problems.jsonl", limits=Limits(seconds=3.0), workers=2))
    text = toml.dumps(config)
    assert 'type = "Code"' in text
    assert "[task.limits]" in text
    assert toml.loads(text, RunConfig) == config
    for seconds in (math.nan, 0.0, 1e7, math.inf):
        with pytest.raises(ValueError, match="limits.seconds"):
            Limits(seconds=seconds)
    with pytest.raises(ValueError, match="limits.threads is 1: give at least 2"):
        Limits(threads=1)
    with pytest.raises(ValueError, match="task.workers is 0"):
        Code("a.jsonl", workers=0)
