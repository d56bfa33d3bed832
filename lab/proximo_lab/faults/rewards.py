"""Reward functions that fail in every way, in whole runs: a failure is unscored, never 0, and the run goes on."""

import json
import os
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq

from proximo.algorithms import GRPO
from proximo.rewards import PythonFunction
from proximo.rl.config import EvaluationOptions
from proximo.system.lines import JsonLines
from proximo.tasks import File
from proximo_lab.faults.cases import Findings, NotRun
from proximo_lab.faults.hostile_reward import DEEDS, is_guilty
from proximo_lab.faults.processes import Ended, descendants
from proximo_lab.faults.runs import RunSet, rows_file, small
from proximo_lab.faults.tested import Rule, run_tests

FUNCTION = Path(__file__).with_name("hostile_reward.py")
EVERY = 6
"""Number of completions of which about one is at fault."""
HARMLESS = ("changes folder, environment and random numbers", "is slow")
WORKERS = {
    "test_what_hangs_is_killed": Rule("a function that hangs: sleep, regex, lock, signals", "C"),
    "test_only_the_guilty_completion_is_unscored": Rule("a function that raises, dies or returns junk", "C"),
    "test_what_is_no_list_of_scores": Rule("a function that returns no list of scores", "C"),
    "test_a_wrong_length_is_found_out_one_by_one": Rule("a function that returns no list of scores", "C"),
    "test_a_group_that_keeps_killing_is_given_up": Rule("a group that kills its worker again and again", "C"),
    "test_siblings_that_are_compared_are_not_tried_alone": Rule("a function that compares siblings and fails", "C"),
    "test_a_fork_that_comes_back_does_not_answer_twice": Rule("a function that forks", "C"),
    "test_a_function_cannot_touch_the_trainer": Rule("a function that changes its inputs and surroundings", "C"),
    "test_a_worker_that_grows_is_replaced_before_it_fails": Rule("a function that leaks a little", "C"),
    "test_a_worker_that_leaves_processes_behind_is_replaced": Rule("a function that leaves processes behind", "C"),
    "test_no_descriptor_is_left_open": Rule("workers that die: open files", "C"),
    "test_a_signal_in_the_middle_of_a_call_leaves_no_stale_answer": Rule("a signal in the middle of a call", "C"),
    "test_a_call_of_another_thread_ends_when_workers_are_closed": Rule("workers closed in the middle of a call", "C"),
    "test_no_process_outlives_the_trainer": Rule("a trainer that ends, fails or is killed", "C"),
    "test_a_pattern_that_never_ends_costs_its_own_completion": Rule("a regular expression without an end", "C"),
    "test_mathematics_that_never_ends_costs_its_own_completion": Rule("an answer of 9^9^9^9", "C"),
    "test_an_answer_that_is_a_program_does_not_run": Rule("a program as a mathematical answer", "C"),
    "test_our_own_patterns_read_a_megabyte": Rule("a megabyte of digits and commas", "C"),
}
WORKS = {"test_a_worker_scores_and_stays": "a function that behaves keeps its worker"}
CALIBRATION = {
    "test_a_grader_that_cannot_tell_is_refused_with_examples": Rule("a grader that cannot tell right from wrong", "S"),
    "test_a_function_that_breaks_is_refused_with_its_own_words": Rule("a grader that breaks at once", "S"),
    "test_three_bad_steps_in_a_row_stop_the_run_with_examples": Rule("too many unscored completions", "S"),
    "test_a_resumed_watch_stops_where_the_first_would": Rule("too many unscored completions", "S"),
}


def run(folder: Path, deeds: tuple[str, ...] = tuple(DEEDS), tables: bool = True) -> Findings:
    findings = Findings(figures={"unscored": 0, "zeros": 0})
    hostile = Hostile(folder, findings)
    for deed in deeds:
        harmless = deed in HARMLESS
        kind = f"in a run, a function that {deed}"
        findings.attempt(kind, deed, "C", lambda d=deed, h=harmless: hostile.in_a_run(d, h))
    if tables:
        findings.attempt("a worker killed from outside", "SIGKILL", "C", lambda: hostile.struck(signal.SIGKILL))
        findings.attempt("a worker stopped from outside", "SIGSTOP", "C", lambda: hostile.struck(signal.SIGSTOP))
        findings.attempt("a trainer killed with a busy worker", "SIGKILL", "R", hostile.trainer_killed)
        findings.attempt("in a run, a function that fails from a step on", "raises", "S", hostile.too_many)
        run_tests("rewards/test_workers.py", WORKERS, WORKS, folder, findings)
        run_tests("rl/preflight/test_calibration.py", CALIBRATION, {}, folder, findings)
    return findings


class Hostile:
    """Runs whose reward function misbehaves as a file says; without that file's switch it is like any other."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.findings, self.options, self.switch = findings, folder / "options.json", folder / "switch"
        os.environ["HOSTILE_REWARD"] = str(self.options)  # for all that are forked from now on
        reward = PythonFunction(f"{FUNCTION}:score", seconds=1.0, memory_mb=512)
        task = File(str(rows_file(folder)), reward=reward, held_out=0.3)
        config = small(GRPO, task=task, steps=4, evaluation=EvaluationOptions(problems=3))
        self._choose("is slow")
        self.runs = RunSet(folder / "run", config).golden()
        self.switch.touch()

    def _choose(self, deed: str, every: int = EVERY) -> None:
        self.options.write_text(json.dumps({"deed": deed, "every": every, "switch": str(self.switch)}))

    def in_a_run(self, deed: str, harmless: bool) -> str | None:
        self._choose(deed)
        name = deed.replace(" ", "-")
        ended = self.runs.finish(name)
        if ended.complaint or ended.code:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        if harmless:
            return self.runs.difference(name)
        unscored = sum(row.get("unscored", 0) for row in JsonLines(self.runs.folder / name / "metrics.jsonl"))
        zeros = self._zeros(self.runs.folder / name)
        self.findings.figures["unscored"] += unscored
        self.findings.figures["zeros"] += zeros
        if not unscored:
            raise NotRun("no completion was at fault")
        if "unscored" not in (self.runs.folder / name / "events.jsonl").read_text():
            return "no event says so"
        return f"{zeros} of them were trained as if they were scored" if zeros else None

    def _zeros(self, folder: Path) -> int:
        """Rows that were trained though their completions are at fault."""
        answers = {row["prompt"]: row["answer"] for row in JsonLines(self.runs.folder.parent / "sums.jsonl")}
        rows = [row for file in folder.glob("rollouts/*.parquet") for row in pq.read_table(file).to_pylist()]
        trained = [row for row in rows if row["updates"]]
        return sum(is_guilty(row["text"], answers[row["prompt"]], EVERY) for row in trained)

    def struck(self, number: signal.Signals) -> str | None:
        """The worker of a running trainer gets a signal, and everything is as if it had not."""
        self._choose("is slow", every=1)
        child = self.runs.start(f"struck-{number.name}")
        if not child.wait_for(lambda: "step 1/" in child.printed):
            return f"it ended early: {child.printed[-300:]}"
        hit = [pid for pid in descendants(child.pid) if self._send(pid, number)]
        if not hit:
            raise NotRun("no worker was found")
        ended = child.wait(120)
        if ended.complaint or ended.code:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        return self.runs.difference(f"struck-{number.name}")

    @staticmethod
    def _send(pid: int, number: signal.Signals) -> bool:
        try:
            os.kill(pid, number)
        except OSError:
            return False
        return True

    def trainer_killed(self) -> str | None:
        self._choose("is slow", every=1)
        child = self.runs.start("dead")
        if not child.wait_for(lambda: "step 1/" in child.printed and bool(descendants(child.pid))):
            return f"it ended early: {child.printed[-300:]}"
        below = descendants(child.pid)
        child.send(signal.SIGKILL)
        child.wait()
        until = time.monotonic() + 10
        while (alive := [pid for pid in below if _is_alive(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        if alive:
            return f"{len(alive)} of {len(below)} processes are still there"
        self.findings.controls.append(f"the killed trainer had {len(below)} processes below it")
        ended = self.runs.finish("dead")
        return ended.complaint or (f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else self._same("dead"))

    def _same(self, name: str) -> str | None:
        return self.runs.difference(name)

    def too_many(self) -> str | None:
        """Run a function that scores nothing from its first step on."""
        self._choose("raises", every=1)
        self.switch.unlink()
        try:
            child = self.runs.start("broken", "--steps", "12")
            child.wait_for(lambda: "step 1/" in child.printed)
            self.switch.touch()
            ended = child.wait(120)
        finally:
            self.switch.touch()
        if ended.complaint or ended.code != 1:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        return _explained(ended)


def _explained(ended: Ended) -> str | None:
    words = ("could not be scored", "KeyError", "rewards.max_unscored")
    return next((f"no word of {word!r}: {ended.printed[-300:]}" for word in words if word not in ended.printed), None)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
