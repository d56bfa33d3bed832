"""Stages that learn from files, killed at random moments like the runs: fine-tuning, reward models, DPO."""

import json
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from proximo_lab.faults.cases import Findings
from proximo_lab.faults.processes import Child, Ended, command
from proximo_lab.faults.runs import difference

KILLS = 12
"""Number of kills for each stage."""
STARTING = 0.25
"""Share of the kills that come while a stage starts."""
FLAGS = ("--model", "tiny-arithmetic", "--fit.batch", "16", "--fit.epochs", "1", "--fit.save-every", "2")
STAGES = {"sft": "examples.jsonl", "reward-model": "rankings.jsonl", "dpo": "rankings.jsonl"}


def run(folder: Path, kills: int = KILLS) -> Findings:
    findings = Findings(figures={"kills": 0, "bit_equal": 0})
    examples = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(160)]
    rankings = [{"prompt": f"{number}+1=", "chosen": f"{number + 1}", "rejected": f"{number}"} for number in range(110)]
    for name, rows in (("examples.jsonl", examples), ("rankings.jsonl", rankings)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for stage in STAGES:
        _sweep(folder, stage, kills, findings)
    findings.controls.append(f"all {findings.figures['kills']} attempts that count ended by signal 9")
    return findings


def _start(folder: Path, stage: str, name: str) -> Child:
    arguments = [stage, str(folder / STAGES[stage]), "--run", str(folder / stage / name), *FLAGS]
    return Child(command(*arguments), folder / stage / f"{name}.txt")


def _sweep(folder: Path, stage: str, kills: int, findings: Findings) -> None:
    """Runs of one stage, each killed until it ends, until there were enough kills."""
    _checked(_start(folder, stage, "golden").wait())
    child = _start(folder, stage, "again")
    child.wait_for((folder / stage / "again" / "metrics.jsonl").exists)
    start_up, seconds = time.monotonic() - child.began, _checked(child.wait()).seconds
    golden, chance, counted, number = left_by(folder / stage / "golden"), random.Random(stage), 0, 0
    while counted < kills and number < 10 * kills:
        name, before, number = f"run-{number}", counted, number + 1
        ended = None
        while counted < kills and ended is None:
            early = chance.random() < STARTING
            moment = chance.uniform(0, start_up) if early else chance.uniform(start_up, seconds)
            child, moment = _start(folder, stage, name), time.monotonic() + moment
            child.wait_for(lambda at=moment: time.monotonic() > at)
            child.send(signal.SIGKILL)
            ended = child.wait()
            if ended.code == -signal.SIGKILL:
                ended, counted = None, counted + 1
        ended = ended or _start(folder, stage, name).wait()
        wrong = ended.complaint or (f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else None)
        wrong = wrong or difference(left_by(folder / stage / name), golden)
        for kill in range(counted - before):
            findings.judge(f"SIGKILL at a random moment, {stage}", f"{name}, kill {kill}", "R", wrong)
        findings.figures["bit_equal"] += (counted - before) * (wrong is None)
    findings.figures["kills"] += counted


def _checked(ended: Ended) -> Ended:
    assert ended.code == 0, f"an undisturbed stage failed, {ended.code}: {ended.printed[-500:]}"
    return ended


def left_by(folder: Path) -> Mapping[str, object]:
    """Metrics, the result without its time, and the weights."""
    result = json.loads((folder / "result.json").read_text())
    result = {key: value for key, value in result.items() if "seconds" not in key}
    files = [folder / "metrics.jsonl", *sorted(folder.glob("checkpoints/*/*.safetensors"))]
    return {"result": result} | {str(file.relative_to(folder)): file.read_bytes() for file in files}
