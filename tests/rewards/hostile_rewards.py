"""Reward functions that misbehave, one for each way. Loaded by file in a worker, so it imports little."""

import collections
import ctypes
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def act(completions, folder=None, **_):
    """Each completion names what is done when it is its turn; what it returns is its score."""
    place = Path(folder[0]) if folder else None
    return [ACTIONS[text](place) if text in ACTIONS else float(text) for text in completions]


def begun(place):
    """The positive control: the fault really began, and never came to its end."""
    (place / "begun").write_text(str(os.getpid()))


def ended(place):
    (place / "ended").write_text("")
    return 1.0


def sleep(place):
    begun(place)
    time.sleep(60)
    return ended(place)


def regex(place):
    begun(place)
    re.fullmatch("(a+)+b", "a" * 60)
    return ended(place)


def holds_the_lock(place):
    """A loop in C that lets no other thread run and looks at no signal."""
    begun(place)
    collections.deque(itertools.repeat(0), maxlen=0)
    return ended(place)


def ignores_signals(place):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    begun(place)
    while True:
        time.sleep(1)


def raises(place):
    raise KeyError("no such column")


def segfault(place):
    begun(place)
    ctypes.string_at(0)
    return ended(place)


def floods(place):
    begun(place)
    for _ in range(1024):
        print("x" * 2**20)
    return ended(place)


def leaks(place):
    begun(place)
    held = []
    while len(held) < 64:
        held.append(bytearray(64 * 2**20))
    return ended(place)


def forks_and_leaves(place):
    """The child would hold every pipe open."""
    if os.fork() == 0:
        time.sleep(60)
    os._exit(5)


def starts_processes(place):
    """One in our group, one in a session of its own, and one that is an orphan too."""
    here = subprocess.Popen(["sleep", "60"])
    away = subprocess.Popen(["sleep", "60"], start_new_session=True)
    script = "setsid sleep 60 > /dev/null & echo $!"
    orphan = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True, timeout=30)
    (place / "pids").write_text(f"{os.getpid()} {os.getppid()} {here.pid} {away.pid} {int(orphan.stdout)}")
    return 1.0


def starts_and_sleeps(place):
    starts_processes(place)
    return sleep(place)


def stops_its_keeper(place):
    """Which then neither hears that its time is over nor ends what was started."""
    starts_processes(place)
    os.kill(os.getppid(), signal.SIGSTOP)
    return sleep(place)


def stops_its_keeper_and_leaves(place):
    starts_processes(place)
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(0)


def writes_into_the_protocol(place):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00" * 7 + b"\x02{}")
        except OSError:
            continue
    return 1.0


def answers_too_much(place):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x7f" * 8)
        except OSError:
            continue
    return 1.0


def changes_everything(place):
    os.chdir("/")
    os.environ["HOSTILE"] = "yes"
    random.seed(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.clear()
    return 1.0


class Breaks(Exception):
    def __str__(self):
        raise ValueError("not even its text")

    __repr__ = __str__


def raises_the_unprintable(place):
    raise Breaks


ACTIONS = {
    "sleep": sleep,
    "regex": regex,
    "holds the lock": holds_the_lock,
    "ignores signals": ignores_signals,
    "raises": raises,
    "raises the unprintable": raises_the_unprintable,
    "interrupts": lambda place: (_ for _ in ()).throw(KeyboardInterrupt()),
    "sys.exit": lambda place: sys.exit(0),
    "os._exit": lambda place: os._exit(0),
    "segfault": segfault,
    "floods": floods,
    "leaks": leaks,
    "forks and leaves": forks_and_leaves,
    "starts processes": starts_processes,
    "starts and sleeps": starts_and_sleeps,
    "stops its keeper": stops_its_keeper,
    "stops its keeper and leaves": stops_its_keeper_and_leaves,
    "writes into the protocol": writes_into_the_protocol,
    "answers too much": answers_too_much,
    "changes everything": changes_everything,
    "closes its protocol": lambda place: os.closerange(3, 256),
    "closes its output": lambda place: os.closerange(0, 3) or 1.0,
    "kills its keeper": lambda place: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(60),
    "kills its group": lambda place: os.killpg(0, signal.SIGKILL),
    "recurses": lambda place: ACTIONS["recurses"](place),
    "None": lambda place: None,
    "nan": lambda place: float("nan"),
    "inf": lambda place: float("-inf"),
    "str": lambda place: "1.0",
    "huge": lambda place: 1e30,
    "huge int": lambda place: 10**400,
    "list": lambda place: [1.0],
    "object": lambda place: Breaks(),
    "bool": lambda place: True,
    "prints": lambda place: print("\x1b[31mI \u202eprint") or 2.0,
    "prints and raises": lambda place: print("\x1b[31mI print") or raises(place),
    "pid": lambda place: float(os.getpid() % 10**6),
    "draws": lambda place: random.random(),
    "forks": lambda place: 3.0 if os.fork() else 4.0,
}


def longer_is_better(prompts, completions, **_):
    """One that does behave."""
    return [float(len(text)) for text in completions]


def drops(completions, **_):
    """Leaves out what it does not like."""
    return [1.0 for text in completions if text != "bad"]


def returns_none(completions, **_):
    return None


def returns_text(completions, **_):
    return "1"


def returns_forever(completions, **_):
    return itertools.repeat(1.0)


def needs_two(completions, **_):
    """Compares siblings: alone it would say something else."""
    if "bad" in completions:
        raise ValueError("bad")
    return [float(len(completions))] * len(completions)


def fails_for_several(completions, **_):
    if len(completions) > 1:
        raise ValueError("one at a time, please")
    return [7.0]


def grows(completions, **_):
    """Keeps 8 MB of each call for ever."""
    _KEPT.append(bytearray(b"x") * (8 * 2**20))
    return [float(os.getpid())] * len(completions)


_KEPT = []


def leaves_processes(completions, **_):
    subprocess.Popen(["sleep", "60"])
    return [float(os.getpid())] * len(completions)


def mutates(prompts, completions, level, **columns):
    level[0].clear()
    prompts[0][0]["content"] = "changed"
    completions.clear()
    columns.clear()
    return [2.0]


def numpy_scores(completions, **_):
    import numpy

    return numpy.array([float(len(text)) for text in completions], dtype=numpy.float32)


def torch_scores(completions, **_):
    import torch

    return [torch.tensor(0.5), torch.tensor([0.25]), torch.tensor([1.0, 2.0])][: len(completions)]


def counts_sets(completions, **_):
    """An order that differs between processes, unless their hashes are the same."""
    return [float(int.from_bytes("".join({"a", "b", "c", "d", "e", "f"}).encode()) % 99991) for _ in completions]
