"""Cost of a broken tracker for a step: `python -m proximo_lab.experiments.tracker_cost [ROUNDS]`. Needs the right to
mount.

Each round trains one seed without a tracker and with each of several broken ones, in an order that changes from round
to round, all in one process, which is warm by then. Read for each step: wall time, and the training process's own
processor time. A run's first steps are left out. Within a round, the median step of a run is divided by that of the
run without a tracker; the result is the median over rounds. metrics.jsonl and ledger.jsonl must have the same bytes.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import proximo
from proximo.runs.tracking import processes

STEPS, WARM = 24, 4
"""Steps of a run, and how many of the first are left out."""
NONE = "no tracker"
BROKEN = {
    "hangs, asleep": "while True: time.sleep(60)",
    "hangs, spinning": "while True: pass",
    "fails at each call": "raise ConnectionError('the server is away')",
    "has filled its disk": "open({disk!r} + '/rows', 'ab', 0).write(bytes(1 << 16))",
}
TRACKER = """
import time


class Broken:
    def open(self, run, key):
        return "a"

    def metrics(self, *given):
        {fault}

    event = completions = metrics

    def flush(self):
        pass

    def close(self, summary, finished):
        pass
"""
FILES = ("metrics.jsonl", "ledger.jsonl")


@dataclass(frozen=True)
class Steps:
    """Seconds of a run's median step, and what the run wrote."""

    processor: float
    wall: float
    taken: float
    """The tracker processes' own processor time, as a share of the run's wall time: on a busy machine with one core
    for the run, a step cannot lose more than this to them."""
    written: list[bytes]


def main(rounds: int) -> None:
    processes.PATIENCE = 0.0
    with tempfile.TemporaryDirectory() as folder:
        folder_of_all = Path(folder)
        disk = folder_of_all / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", disk], check=True)
        try:
            _trained(folder_of_all / "warm", 0, [])
            rounds_timed = [_round(folder_of_all, number) for number in range(rounds)]
        finally:
            subprocess.run(["umount", disk], check=True)
    for fault in BROKEN:
        for name in ("processor", "wall"):
            ratios = [
                100 * (getattr(by_fault[fault], name) / getattr(by_fault[NONE], name) - 1) for by_fault in rounds_timed
            ]
            shown = ", ".join(f"{ratio:+.2f}" for ratio in ratios)
            print(f"{fault:20} {name:9} median {statistics.median(ratios):+.2f} %  ({shown})")
        taken = [100 * by_fault[fault].taken for by_fault in rounds_timed]
        print(f"{fault:20} taken     median {statistics.median(taken):.2f} %  at most {max(taken):.2f} %")


def _round(folder_of_all: Path, number: int) -> dict[str, Steps]:
    names = [NONE, *BROKEN]
    order = [names[(each + number) % len(names)] for each in range(len(names))]
    steps = {}
    for fault in order:
        folder = folder_of_all / f"{number}-{names.index(fault)}"
        tracker = folder_of_all / f"broken_{number}_{names.index(fault)}.py"
        tracker.write_text(TRACKER.format(fault=BROKEN.get(fault, "").format(disk=str(folder_of_all / "disk"))))
        steps[fault] = _trained(folder, number, [] if fault == NONE else [f"{tracker}:Broken"])
        print(f"round {number}, {fault}: {steps[fault].processor:.4f} s, wall {steps[fault].wall:.4f} s", flush=True)
        assert steps[fault].written == steps[order[0]].written, f"the run folder differs where a tracker {fault}"
    return steps


def _trained(folder: Path, seed: int, track: list[str]) -> Steps:
    base = proximo.presets.ARITHMETIC
    config = replace(
        base,
        seed=seed,
        steps=STEPS,
        training=replace(base.training, groups=8, minibatches=1),
        evaluation=proximo.EvaluationOptions(problems=20),
    )
    marks: list[tuple[float, float]] = []
    began = time.perf_counter()
    proximo.train(config, folder, on_step=lambda step, metrics: marks.append(_now()), track=track, quiet=True)
    taken = 0.0
    for child in _children():
        os.kill(child, signal.SIGKILL)  # a tracker has a minute after its run, in which the next one trains
        used = os.wait4(child, 0)[2]
        taken += used.ru_utime + used.ru_stime
    pairs = list(zip(marks[WARM - 1 :], marks[WARM:], strict=False))
    processor, wall = ([after[kind] - before[kind] for before, after in pairs] for kind in (0, 1))
    written = [(folder / name).read_bytes() for name in FILES]
    taken /= time.perf_counter() - began
    return Steps(statistics.median(processor), statistics.median(wall), taken, written)


def _now() -> tuple[float, float]:
    """Processor time of this process, all threads and no children; and the clock."""
    return time.process_time(), time.perf_counter()


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
