"""A reward function that misbehaves for some completions. It is read by a worker from this file, so it imports little.

What it does to whom stands in a JSON file beside the run, which the environment names: what, and every how many.
"""

import ctypes
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path


def is_guilty(text: str, answer: str, every: int) -> bool:
    return zlib.crc32(f"{answer} {text}".encode()) % every == 0


def score(completions, answer, **_):
    options = json.loads(Path(os.environ["HOSTILE_REWARD"]).read_text())
    scores = []
    for text, right in zip(completions, answer, strict=True):
        harm = is_guilty(text, right, options["every"]) and Path(options["switch"]).exists()
        value = DEEDS[options["deed"]]() if harm else RIGHT
        scores.append(float(text.strip() == right) if value is RIGHT else value)
    return scores


RIGHT = object()
"""Scored like any other."""


def raises():
    raise KeyError("no such column")


def leaks():
    held = []
    while True:
        held.append(bytearray(64 << 20))


def floods():
    while True:
        print("x" * (1 << 20))


def forks():
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)


def changes_everything():
    os.chdir("/")
    os.environ["HOME"] = "elsewhere"
    random.seed(1)
    sys.path.clear()
    return RIGHT


def slow():
    time.sleep(0.05)
    return RIGHT


DEEDS = {
    "raises": raises,
    "returns None": lambda: None,
    "returns NaN": lambda: float("nan"),
    "returns 1e30": lambda: 1e30,
    "returns a text": lambda: "1.0",
    "hangs": lambda: time.sleep(600),
    "exits": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "leaks": leaks,
    "floods its output": floods,
    "forks and leaves": forks,
    "changes folder, environment and random numbers": changes_everything,
    "is slow": slow,
}
