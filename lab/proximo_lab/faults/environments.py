"""Environments that fail in every way, in whole runs: their episodes are unscored, and the run goes on."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from proximo.algorithms import GRPO
from proximo.environments.kinds import MultiTurn
from proximo.models import tiny_tokenizer
from proximo.rl.config import EvaluationOptions
from proximo.rl.reward_config import RewardMix
from proximo.samplers.sampler import SamplingOptions
from proximo.system.lines import JsonLines
from proximo_lab.faults.cases import Findings, NotRun
from proximo_lab.faults.hostile_environment import MARKS
from proximo_lab.faults.processes import descendants
from proximo_lab.faults.runs import RunSet, small

ENVIRONMENT = Path(__file__).with_name("hostile_environment.py")
UNSCORED = (
    "hangs at turn 3",
    "leaks memory",
    "ends its process",
    "starts differently in each sibling",
)
RAISES = "raises at turn 3"
"""Deed that a reply causes: the policy's own doing, which earns the least."""
HARMLESS = ("prints 50 megabytes", "leaves a process behind")


def run(folder: Path) -> Findings:
    findings = Findings(figures={"unscored": 0})
    hostile = Hostile(folder, findings)
    for deed in UNSCORED:
        findings.attempt(f"an environment that {deed}", deed, "C", lambda d=deed: hostile.unscored(d))
    findings.attempt(f"an environment that {RAISES}", RAISES, "C", lambda: hostile.earns_least(RAISES))
    for deed in HARMLESS:
        findings.attempt(f"an environment that {deed}", deed, "C", lambda d=deed: hostile.harmless(d))
    megabyte, marks = "answers a megabyte", "answers with special tokens and marks of templates"
    findings.attempt(f"an environment that {megabyte}", "cut", "C", lambda: hostile.cut(megabyte))
    findings.attempt(f"an environment that {marks}", "text", "C", lambda: hostile.text(marks))
    findings.attempt("episodes killed from outside", "SIGKILL", "C", hostile.struck)
    findings.attempt("a trainer killed in the middle of episodes", "SIGKILL", "R", hostile.trainer_killed)
    findings.controls.append("a run whose environment behaves has no unscored episode")
    return findings


class Hostile:
    """Runs whose environment misbehaves as a file says; without that file it is like any other."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.findings, self.options = findings, folder / "options.json"
        os.environ["HOSTILE_ENVIRONMENT"] = str(self.options)  # for all that are forked from now on
        environment = MultiTurn(
            f"{ENVIRONMENT}:Hostile", max_turns=3, max_turn_tokens=4, max_answer_tokens=24, seconds=1.0, memory_mb=512
        )
        config = small(
            GRPO,
            environment=environment,
            sampling=SamplingOptions(max_tokens=120),
            steps=3,
            evaluation=EvaluationOptions(problems=2),
            rewards=RewardMix(max_unscored=0.99),
        )
        self.runs = RunSet(folder / "run", config).golden()
        if self._unscored("golden"):
            raise AssertionError("episodes of an environment that behaves are unscored")

    def _ran(self, deed: str) -> str | None:
        self.options.write_text(json.dumps({"deed": deed}))
        ended = self.runs.finish(_name(deed))
        self.options.unlink()
        return ended.complaint or (f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else None)

    def _unscored(self, name: str) -> int:
        return sum(row.get("unscored", 0) for row in JsonLines(self.runs.folder / name / "metrics.jsonl"))

    def _rows(self, name: str) -> list[dict[str, Any]]:
        files = (self.runs.folder / name).glob("rollouts/*.parquet")
        return [{**row, "file": file.name} for file in files for row in pq.read_table(file).to_pylist()]

    def unscored(self, deed: str) -> str | None:
        if wrong := self._ran(deed):
            return wrong
        return self._counted(_name(deed))

    def _counted(self, name: str) -> str | None:
        unscored = self._unscored(name)
        self.findings.figures["unscored"] += unscored
        if not unscored:
            raise NotRun("no episode was at fault")
        if "unscored" not in (self.runs.folder / name / "events.jsonl").read_text():
            return "no event says so"
        trained = [row for row in self._rows(name) if row["updates"] and json.loads(row["turns"])[-1]["failed"]]
        return f"{len(trained)} episodes that failed were trained on" if trained else None

    def earns_least(self, deed: str) -> str | None:
        if wrong := self._ran(deed):
            return wrong
        rows = self._rows(_name(deed))
        raised = [row for row in rows if json.loads(row["turns"])[-1]["failed"]]
        if not raised:
            raise NotRun("no episode raised")
        lowest: dict[tuple[str, int], float] = {}
        for row in rows:
            group = (row["file"], row["group"])
            lowest[group] = min(row["reward"], lowest.get(group, row["reward"]))
        more = [row for row in raised if not row["reward"] <= lowest[row["file"], row["group"]]]
        return f"{len(more)} episodes that raised earned more than a sibling" if more else None

    def harmless(self, deed: str) -> str | None:
        return self._ran(deed) or self.runs.difference(_name(deed))

    def cut(self, deed: str) -> str | None:
        if wrong := self._ran(deed):
            return wrong
        answers = [turn["text"] for row in self._rows(_name(deed)) for turn in json.loads(row["turns"])[1::2]]
        if self._unscored(_name(deed)) or not answers:
            return f"{self._unscored(_name(deed))} unscored, {len(answers)} answers"
        return next((f"an answer of {len(text)} characters" for text in answers if len(text) > 60), None)

    def text(self, deed: str) -> str | None:
        if wrong := self._ran(deed):
            return wrong
        special, rows = set(tiny_tokenizer().all_special_ids), self._rows(_name(deed))
        messages = [turn["text"] for row in rows for turn in json.loads(row["turns"])[1::2]]
        if not any(MARKS[:12] in text for text in messages):
            raise NotRun("no answer had a mark")
        for row in rows:
            unsampled = [
                token for token, is_sampled in zip(row["tokens"], row["sampled"], strict=True) if not is_sampled
            ]
            if special.intersection(unsampled):
                return f"a special token was told: {row['tokens']}"
        return None

    def struck(self) -> str | None:
        child = self.runs.start("struck")
        killed: list[int] = []

        def strike() -> bool:
            for pid in descendants(child.pid):
                if _is_episode(pid):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return True
            return False

        if not child.wait_for(strike):
            raise NotRun("no episode was seen")
        ended = child.wait()
        if ended.complaint or ended.code:
            return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
        return None  # in an evaluation it is unscored there

    def trainer_killed(self) -> str | None:
        child = self.runs.start("killed")
        if not child.wait_for(lambda: "step 1/" in child.printed and any(map(_is_episode, descendants(child.pid)))):
            raise NotRun("no episode was seen after the first step")
        child.send(signal.SIGKILL)
        child.wait()
        ended = self.runs.finish("killed")
        if ended.code:
            return f"exit {ended.code}: {ended.printed[-300:]}"
        return self.runs.difference("killed")


def _name(deed: str) -> str:
    return deed.replace(" ", "-")


def _is_episode(pid: int) -> bool:
    """Tell whether a process is an episode: below the one with the environment loaded, which leads a session itself."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        above = Path(f"/proc/{parent}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        grand = Path(f"/proc/{above}/cmdline").read_bytes()
    except (OSError, IndexError):
        return False
    return b"environments/worker.py" in command and b"environments/worker.py" in grand
