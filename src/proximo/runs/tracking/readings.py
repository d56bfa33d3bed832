"""`python -m proximo.runs.tracking.readings RUN PID`: readings of the machine, into the run folder, while it runs."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from proximo.runs.files import METRICS
from proximo.runs.tracking.processes import arm, end_of_run, yield_processor
from proximo.runs.tracking.source import SYSTEM, FileCursor, RunSource, new_rows
from proximo.system.lines import JsonLines
from proximo.system.opening import make_folder

EVERY = 15.0
"""Seconds between two readings."""
GPU = ("utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")
"""Values that nvidia-smi is asked for."""
GIB = 1 << 30


def main(run: Path, pid: int) -> None:
    yield_processor()
    over, start, before, cursor = end_of_run(), time.monotonic(), processor_times(), FileCursor()
    while not over.wait(EVERY):
        arm()
        if not RunSource(run).is_run:
            continue
        for _, behind in new_rows(run / METRICS, cursor, is_over=True, resumed_after=lambda: 0):
            cursor = behind
        now = processor_times()
        row = {
            "step": max(cursor.step, 0),
            "seconds": round(time.monotonic() - start, 1),
            **busy_share(before, now),
            **memory(pid),
            "disk_free_gib": shutil.disk_usage(run).free / GIB,
            **gpus(),
        }
        before = now
        with suppress(OSError):  # a full disk
            make_folder((run / SYSTEM).parent)
            JsonLines(run / SYSTEM).append(row)


def processor_times() -> tuple[int, int]:
    """Time of all processors since boot: busy, and all."""
    fields = _words(Path("/proc/stat"))[1:9]
    times = [int(each) for each in fields if each.isdigit()]
    return (sum(times) - sum(times[3:5]), sum(times)) if len(times) == 8 else (0, 0)


def busy_share(before: tuple[int, int], now: tuple[int, int]) -> dict[str, float]:
    """Share of the processors' time that was used, in percent.

    Example: busy_share((0, 0), (30, 40)) == {"cpu_percent": 75.0}
    """
    passed = now[1] - before[1]
    return {"cpu_percent": 100 * (now[0] - before[0]) / passed} if passed > 0 else {}


def memory(pid: int) -> dict[str, float]:
    """Memory of the machine, and of the run's process."""
    machine, process = _words(Path("/proc/meminfo")), _words(Path(f"/proc/{pid}/status"))
    kibibytes = {
        "memory_gib": _after(machine, "MemTotal:") - _after(machine, "MemAvailable:"),
        "memory_total_gib": _after(machine, "MemTotal:"),
        "run_memory_gib": _after(process, "VmRSS:"),
    }
    return {name: value * 1024 / GIB for name, value in kibibytes.items() if value}


def gpus() -> dict[str, float]:
    """Readings of NVIDIA GPUs; empty where there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parsed_gpus(done.stdout) if done.returncode == 0 else {}


def parsed_gpus(text: str) -> dict[str, float]:
    """Example: parsed_gpus("90, 100, 200, 60, [N/A]") == {"gpu0/utilization": 90.0, "gpu0/memory_mib": 100.0, …}"""
    names = ("utilization", "memory_mib", "memory_total_mib", "temperature", "power_watts")
    readings = {}
    for number, line in enumerate(text.strip().splitlines()):
        for name, value in zip(names, line.split(","), strict=False):
            with suppress(ValueError):  # [N/A]
                readings[f"gpu{number}/{name}"] = float(value)
    return readings


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").split()
    except OSError:
        return []


def _after(words: list[str], name: str) -> int:
    index = words.index(name) + 1 if name in words else len(words)
    return int(words[index]) if index < len(words) and words[index].isdigit() else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
