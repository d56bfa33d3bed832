"""Reward functions that fail in every way, in real processes: what is lost is their own score, and nothing else."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextvars import copy_context
from pathlib import Path

import pytest
import torch

from proximo.processes import failures
from proximo.processes.child import KEPT_OUTPUT, Output
from proximo.processes.failures import Failure, Failures, Tally, plain
from proximo.rewards import ExactMatch, FormatReward, MathVerify, PythonFunction, workers
from proximo.rewards.grading import grading as current_grading
from proximo.types import Completion, Problem
from tests import ROOT
from tests.waiting import SOON, is_running, wait_until

FILE = ROOT / "tests/rewards/hostile_rewards.py"


@pytest.fixture(autouse=True)
def _no_process_is_left(grading):
    before = set(children())  # of other tests, like a sandbox that is kept
    yield
    grading.close()
    assert set(children()) <= before


def children(of: int | None = None) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == (of or os.getpid()) and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def said(texts: Sequence[str]) -> list[Completion]:
    return [Completion(tokens=(1,), logprobs=(-0.1,), text=text, finish="stop") for text in texts]


def scores(
    texts: Sequence[str],
    folder: Path | None = None,
    *,
    function: str = "act",
    seconds: float = 5.0,
    memory_mb: int = 512,
    siblings: bool = False,
) -> list[float]:
    problem = Problem("p", "question", None, {} if folder is None else {"folder": str(folder)})
    reward = PythonFunction(f"{FILE}:{function}", seconds=seconds, memory_mb=memory_mb, siblings=siblings)
    return reward([problem] * len(texts), said(texts))


def taken() -> list[Failures]:
    with current_grading() as active:
        return active.failures.take()


def kinds() -> dict[str, int]:
    return {failures.kind: failures.unscored for failures in taken()}


def test_a_worker_scores_and_stays():
    first, second = scores(["1.5", "pid"]), scores(["pid", "-2"])
    assert first[0] == 1.5
    assert second[1] == -2.0
    assert first[1] == second[0]
    assert kinds() == {}


# One guilty completion among three


HANGS = ["sleep", "regex", "holds the lock", "ignores signals"]


@pytest.mark.slow("waits for functions that hang")
@pytest.mark.parametrize("what", HANGS)
def test_what_hangs_is_killed(what: str, tmp_path: Path):
    first, guilty, last = scores(["1", what, "2"], tmp_path, seconds=0.5)
    assert (first, last) == (1.0, 2.0)
    assert math.isnan(guilty)
    assert kinds() == {"time": 1}
    hung = int((tmp_path / "begun").read_text())
    assert not (tmp_path / "ended").exists()
    assert not is_running(hung)


@pytest.mark.parametrize(("what", "kind"), [("stops its keeper", "time"), ("stops its keeper and leaves", "died")])
def test_a_keeper_that_is_stopped_saves_nothing(what: str, kind: str, tmp_path: Path):
    [guilty] = scores([what], tmp_path, seconds=0.5)
    assert math.isnan(guilty)
    assert kinds() == {kind: 1}
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5
    assert not any(map(is_running, pids))


@pytest.mark.slow("waits for functions that hang")
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("raises", "KeyError"),
        ("raises the unprintable", "Breaks"),
        ("interrupts", "KeyboardInterrupt"),
        ("recurses", "RecursionError"),
        ("sys.exit", "exit"),
        ("os._exit", "died"),
        ("segfault", "died"),
        ("kills its keeper", "died"),
        ("kills its group", "died"),
        ("forks and leaves", "died"),
        ("closes its protocol", "died"),
        ("writes into the protocol", "junk"),
        ("answers too much", "junk"),
        ("floods", "output"),
        ("leaks", "memory"),
        ("nan", "not a number"),
        ("inf", "not a number"),
        ("str", "not a number"),
        ("huge", "too large"),
        ("huge int", "not a number"),
        ("list", "not a number"),
        ("object", "not a number"),
    ],
)
def test_only_the_guilty_completion_is_unscored(what: str, kind: str, tmp_path: Path):
    first, guilty, last = scores(["1", what, "2"], tmp_path)
    assert (first, last) == (1.0, 2.0)
    assert math.isnan(guilty)
    assert kinds() == {kind: 1}
    if what in ("segfault", "floods", "leaks"):
        assert (tmp_path / "begun").exists()
        assert not (tmp_path / "ended").exists()


def test_what_does_no_harm_is_scored():
    assert scores(["closes its output", "1"]) == [1.0, 1.0]
    assert scores(["prints", "bool", "1000000"]) == [2.0, 1.0, 1e6]
    assert kinds() == {}


def test_a_fork_that_comes_back_does_not_answer_twice():
    assert scores(["forks", "1"]) == [3.0, 1.0]
    assert scores(["2", "3"]) == [2.0, 3.0]
    assert kinds() == {}


def test_what_it_printed_is_told_on_one_line_and_cannot_colour_the_terminal():
    assert math.isnan(scores(["prints and raises"])[0])
    [failures] = taken()
    assert "it printed: �[31mI print" in str(failures)
    assert str(failures).startswith(
        f"{FILE}:act: 1 completion unscored (KeyError): KeyError: 'no such column' (hostile"
    )
    assert "the completion: 'prints and raises'" in str(failures)
    assert str(failures).isprintable()


# Whole calls


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("returns_none", "it returned NoneType None, not a list of 1 numbers"),
        ("returns_text", "it returned str '1', not a list of 1 numbers"),
        ("returns_forever", "it returned more scores for 1 completions"),
    ],
)
def test_what_is_no_list_of_scores(function: str, why: str):
    assert all(map(math.isnan, scores(["1", "2"], function=function)))
    [failures] = taken()
    assert (failures.kind, failures.unscored) == ("junk", 2)
    assert why in failures.example


def test_a_wrong_length_is_found_out_one_by_one():
    first, guilty, last = scores(["1", "bad", "2"], function="drops")
    assert (first, last) == (1.0, 1.0)
    assert math.isnan(guilty)
    [failures] = taken()
    assert "it returned 0 scores for 1 completions" in failures.example


def test_siblings_that_are_compared_are_not_tried_alone():
    assert scores(["a", "b", "c"], function="needs_two", siblings=True) == [3.0, 3.0, 3.0]
    assert all(map(math.isnan, scores(["a", "bad", "c"], function="needs_two", siblings=True)))
    assert kinds() == {"ValueError": 3}


def test_a_function_that_fails_only_for_several_is_scored_and_told_of():
    assert scores(["a", "b"], function="fails_for_several") == [7.0, 7.0]
    assert kinds() == {"ValueError": 0}


def test_a_group_that_keeps_killing_is_given_up():
    found = scores(["1"] + ["os._exit"] * 5 + ["2"])
    assert found[0] == 1.0
    assert all(map(math.isnan, found[1:]))
    assert kinds() == {"died": 4, "given up": 2}


def test_groups_are_called_each_by_itself():
    reward = PythonFunction(f"{FILE}:needs_two")
    a, b = Problem("a", "?", None), Problem("b", "?", None)
    assert reward([a, a, b, a], said("wxyz")) == [2.0, 2.0, 1.0, 1.0]
    assert reward([], []) == []


@pytest.mark.slow("waits for functions that hang")
def test_numbers_of_numpy_and_torch_are_numbers():
    assert scores(["a", "bc"], function="numpy_scores", memory_mb=4096) == [1.0, 2.0]
    first, second, third = scores(["a", "b", "c"], function="torch_scores", seconds=60.0, memory_mb=8192)
    assert (first, second) == (0.5, 0.25)
    assert math.isnan(third)
    assert kinds() == {"not a number": 1}


# What stays as it was


def test_a_function_cannot_touch_the_trainer():
    problem = Problem("p", ({"role": "user", "content": "hi"},), "a", {"level": [1, 2]})
    folder, environment, state = Path.cwd(), dict(os.environ), torch.get_rng_state()
    handler, path = signal.getsignal(signal.SIGINT), list(sys.path)
    assert scores(["changes everything"]) == [1.0]
    assert Path.cwd() == folder
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() != random.Random(1).getstate()  # the checks of types in tests draw from it, too
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.path == path
    assert PythonFunction(f"{FILE}:mutates")([problem], said(["x"])) == [2.0]
    assert problem == Problem("p", ({"role": "user", "content": "hi"},), "a", {"level": [1, 2]})


def test_what_a_function_draws_follows_what_it_is_asked(grading):
    first, order = scores(["draws", "1", "draws"]), scores(["1"], function="counts_sets")
    assert first[0] != first[2]
    assert scores(["draws", "2"])[0] != first[0]
    assert scores(["draws", "1", "draws"]) == first
    assert math.isnan(scores(["os._exit"])[0])
    assert scores(["draws", "1", "draws"]) == first
    grading.close()
    assert scores(["draws", "1", "draws"]) == first
    assert scores(["1"], function="counts_sets") == order


# Workers come and go


def test_a_worker_that_grows_is_replaced_before_it_fails():
    pids = [scores(["1"], function="grows", memory_mb=128)[0] for _ in range(20)]
    assert kinds() == {}
    assert len(set(pids)) > 1
    assert len(set(pids)) < 10


def test_a_worker_that_leaves_processes_behind_is_replaced():
    pids = [scores(["1"], function="leaves_processes")[0] for _ in range(workers.MAX_CHILDREN + 2)]
    assert len(set(pids)) == 2
    assert not is_running(int(pids[0]))


def test_a_worker_is_replaced_after_many_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "RECYCLE_CALLS", 2)
    pids = [scores(["pid"])[0] for _ in range(5)]
    assert pids[0] == pids[1] != pids[2]
    assert pids[2] == pids[3] != pids[4]


def test_no_descriptor_is_left_open():
    scores(["1"])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        scores(["os._exit"])
    assert scores(["1"]) == [1.0]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class Interrupted(Exception):
    pass


def test_a_signal_in_the_middle_of_a_call_leaves_no_stale_answer(tmp_path: Path):
    def stop(*_: object) -> None:
        raise Interrupted

    def in_the_middle() -> None:
        wait_until(lambda: begun.exists() and begun.read_text())
        os.kill(os.getpid(), signal.SIGALRM)

    begun = tmp_path / "begun"
    scores(["1"])
    before = signal.signal(signal.SIGALRM, stop)
    sender = threading.Thread(target=in_the_middle)
    try:
        sender.start()
        with pytest.raises(Interrupted):
            scores(["sleep"], tmp_path, seconds=SOON)
        sender.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not is_running(int(begun.read_text()))
    assert scores(["2"]) == [2.0]
    # Also of the very worker that was killed; into whatever has its numbers now nothing is written.
    victims = [(tmp_path / f"victim{number}").open("wb") for number in range(10)]
    assert scores(["3"], seconds=SOON) == [3.0]
    for victim in victims:
        victim.close()
    assert not [path for path in tmp_path.glob("victim*") if path.stat().st_size]


def test_an_answer_that_was_written_before_it_was_asked_for_is_none(tmp_path: Path):
    """A child of one call, which knows the pipe, cannot know what the next call is named."""
    function = tmp_path / "forging.py"
    function.write_text(
        "import json, os, sys, time\n"
        "def forge(completions, **_):\n"
        "    frame = sys._getframe()\n"
        "    while 'answers' not in frame.f_locals:\n"
        "        frame = frame.f_back\n"
        "    last = frame.f_locals['request']['id']\n"
        "    name = last + 1 if isinstance(last, int) else last\n"
        "    body = json.dumps({'id': name, 'scores': [1.0]}).encode()\n"
        "    if completions == ['evil'] and os.fork() == 0:\n"
        "        time.sleep(0.3)\n"
        "        os.write(frame.f_locals['answers'], len(body).to_bytes(8) + body)\n"
        "        os._exit(0)\n"
        "    time.sleep(0 if completions == ['evil'] else 1)\n"
        "    return [0.0]\n"
    )
    reward = PythonFunction(f"{function}:forge")
    first, second = (reward([Problem("p", "?", None)], said([text])) for text in ("evil", "honest"))
    assert first == [0.0]
    assert math.isnan(second[0])
    assert kinds() == {"junk": 1}


def test_what_a_call_starts_has_no_hold_of_the_protocol(tmp_path: Path):
    function = tmp_path / "starting.py"
    function.write_text(
        "import subprocess\n"
        "def count(completions, **_):\n"
        "    listed = subprocess.run(['ls', '/proc/self/fd'], close_fds=False, capture_output=True, text=True)\n"
        "    return [float(len(set(listed.stdout.split()) - {'0', '1', '2', '3'}))]\n"
    )
    assert PythonFunction(f"{function}:count")([Problem("p", "?", None)], said(["x"])) == [0.0]


def test_when_memory_runs_out_it_goes_first(tmp_path: Path):
    function = tmp_path / "victim.py"
    function.write_text("def score(completions, **_):\n    return [float(open('/proc/self/oom_score_adj').read())]\n")
    assert PythonFunction(f"{function}:score")([Problem("p", "?", None)], said(["x"])) == [1000.0]


@pytest.mark.parametrize("value", [10**4000, -(10**400), 1, True, "1.0", [1.0], {}])
def test_only_a_float_is_a_score(value: object):
    """A function may write into its pipe what a worker never would."""
    judged = failures.checked(value)
    assert isinstance(judged, Failure)
    assert judged.kind == "not a number"


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3e6, math.inf, math.nan])
def test_a_time_is_between_nothing_and_a_day(seconds: float):
    with pytest.raises(ValueError, match="reward.seconds is"):
        PythonFunction("a:b", seconds=seconds)


def test_a_call_of_another_thread_ends_when_workers_are_closed(tmp_path: Path, grading):
    found: list[float] = []
    context = copy_context()
    thread = threading.Thread(target=lambda: found.extend(context.run(scores, ["sleep"], tmp_path, seconds=60.0)))
    thread.start()
    wait_until((tmp_path / "begun").exists)
    grading.close()
    thread.join(SOON)
    assert math.isnan(found[0])


# Nobody survives


PROGRAM = """
import sys
from proximo.rewards import PythonFunction
from proximo.types import Completion, Problem
reward = PythonFunction(sys.argv[1] + ":act", seconds=60.0)
problem = Problem("p", "?", None, {"folder": sys.argv[2]})
reward([problem], [Completion((1,), (-0.1,), sys.argv[3], "stop")])
if sys.argv[4] == "raise":
    raise RuntimeError("the run broke")
"""


@pytest.mark.slow("kills trainers")
@pytest.mark.parametrize(
    ("what", "end"),
    [
        ("starts processes", "return"),
        ("starts processes", "raise"),
        ("starts and sleeps", "kill"),
        ("stops its keeper", "kill"),
    ],
)
def test_no_process_outlives_the_trainer(what: str, end: str, tmp_path: Path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(FILE), str(tmp_path), what, end], stderr=subprocess.PIPE
    )
    try:
        if end == "kill":
            wait_until((tmp_path / "begun").exists)
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            assert all(map(is_running, pids))
            trainer.kill()
        _, complaint = trainer.communicate(timeout=2 * SOON)
    finally:
        with trainer:  # waits for it after a failure too, which would otherwise be told of another test
            trainer.kill()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5
    assert (b"the run broke" in complaint) == (end == "raise")
    wait_until(lambda: not any(map(is_running, pids)))


# Our own graders


@pytest.mark.slow("waits for functions that hang")
def test_a_pattern_that_never_ends_costs_its_own_completion():
    problem = Problem("p", "?", None)
    first, guilty, last = FormatReward("(a+)+b", seconds=0.5)([problem] * 3, said(["aab", "a" * 60, "x"]))
    assert (first, last) == (1.0, 0.0)
    assert math.isnan(guilty)
    assert kinds() == {"time": 1}


@pytest.mark.slow("waits for a grader to be given up")
def test_mathematics_that_never_ends_costs_its_own_completion():
    problem = Problem("p", "?", "1/2")
    found = MathVerify(seconds=2.0)([problem] * 3, said(["$0.5$", "$9^{9^{9^{9}}}$", "$0.6$"]))
    assert (found[0], found[2]) == (1.0, 0.0)
    assert math.isnan(found[1])
    assert kinds() == {"time": 1}


@pytest.mark.slow("waits for functions that hang")
def test_an_answer_that_is_a_program_does_not_run(tmp_path: Path):
    canary = tmp_path / "canary"
    call = f"__import__('os').system('touch {canary}')"
    payloads = [call, f"${call}$", f"\\boxed{{{call}}}", f"1+{call}", f'eval("{call}")', f"x=({call})", f"\n{call}=1\n"]
    payloads += [f"\\text{{{call}}}", f"exec({call!r})", f"[{call} for x in (1,)]", f"lambda: {call}", f"{{{call}}}"]
    reward = MathVerify()
    reward([Problem("p", "?", "1/2")] * len(payloads), said(payloads))
    for payload in payloads:
        reward([Problem("p", "?", payload)], said([payload]))
    assert not canary.exists()
    subprocess.run(["touch", str(canary)], check=True)  # the canary could have been seen
    assert canary.exists()


@pytest.mark.slow("waits for functions that hang")
@pytest.mark.parametrize(
    "text",
    ["9" * 10**6, "1," * 500_000, "1,111" * 200_000, ",111" * 250_000, "-" * 10**6, "1." * 500_000, "-1" * 500_000],
)
def test_our_own_patterns_read_a_megabyte(text: str):
    assert ExactMatch(last_number=True)([Problem("p", "?", "x 7")], said([text + " 7"])) == [1.0]


# Telling


def test_failures_are_counted_by_grader_and_kind():
    tally = Tally()
    tally.add("f", Failure("time", "together"), unscored=0)
    tally.add("f", Failure("time", "first"))
    tally.add("f", Failure("time", "second"), unscored=2)
    tally.add("g", Failure("time", "other"))
    assert tally.take() == [Failures("f", "time", 3, "first"), Failures("g", "time", 1, "other")]
    assert tally.take() == []


def test_failures_keep_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "CANARY-CANARY-3")
    tally = Tally()
    tally.add("f", Failure("E", "401 for https://me:hunter2@host with CANARY-CANARY-3"))
    assert tally.take() == [Failures("f", "E", 1, "401 for https://***@host with ***")]


def test_output_keeps_its_beginning_and_its_end():
    reading, writing = os.pipe()
    output = Output()
    for part in (b"first ", b"x" * 60_000, b" last"):
        os.write(writing, part)
        assert output.read(reading)
    os.close(writing)
    assert not output.read(reading)
    os.close(reading)
    assert output.size == 60_011
    assert output.text.startswith("first xxx")
    assert output.text.endswith("xxx last")
    assert len(output.text) == KEPT_OUTPUT + len(" ... ")


def test_plain_text_is_one_safe_line():
    assert plain("a\nb\tc\x1b[2J\u202ed\x00") == "a b c�[2J�d�"
    assert plain("x" * 600) == "x" * 250 + " … " + "x" * 250


def test_what_a_worker_says_of_its_memory_may_be_any_number():
    """One of thousands of digits was an OverflowError in the trainer, and `true` was a byte."""
    for number, bytes_of in ((10**4000, 0), (-5, 0), (True, 0), (None, 0), (1 << 20, 1 << 20)):
        assert workers._whole(number) == bytes_of
