"""Environments and tools of a user's own, well behaved and not."""

import asyncio
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from proximo import Done, Environment, Observation


class Counting(Environment):
    """Ends after some replies; each earns a little."""

    def __init__(self, replies: int = 3, reward: float = 0.25) -> None:
        self.replies, self.reward, self.seen = replies, reward, 0

    def reset(self, problem: dict[str, Any]) -> str:
        return problem["prompt"]

    def step(self, reply: str) -> Observation | Done:
        self.seen += 1
        return Done(1.0) if self.seen == self.replies else Observation(f"{self.seen}:{reply[:2]}+", self.reward)


class Lucky(Environment):
    """Draws its start; says it, with the process it lives in."""

    async def reset(self, problem: dict[str, Any]) -> None:
        self.luck = random.random()

    async def step(self, reply: str) -> Observation:
        return Observation(f"{self.luck} {random.random()} {os.getpid()}")


class Live(Environment):
    """Starts a program, a thread and an event loop's work in reset, and uses all of them in each step."""

    async def reset(self, problem: dict[str, Any]) -> None:
        self.echo = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.pool = ThreadPoolExecutor(1)
        await asyncio.to_thread(str)

    async def step(self, reply: str) -> Observation:
        assert self.echo.stdin is not None
        assert self.echo.stdout is not None
        self.echo.stdin.write(f"{reply}\n")
        await asyncio.to_thread(self.pool.submit(str).result)
        return Observation(self.echo.stdout.readline().strip())


@dataclass
class Broken(Environment):
    """Fails in its third reply, in the way it is told."""

    how: str
    notes: list[str] = field(default_factory=list)

    def reset(self, problem: dict[str, Any]) -> str | None:
        if self.how == "reset":
            raise RuntimeError("no start")
        return "another start" if self.how == "start" else None

    def step(self, reply: str) -> Any:
        self.notes.append(reply)
        if len(self.notes) < 3:
            return Observation("on")
        match self.how:
            case "raise":
                raise ConnectionError("turn 3")
            case "hang":
                time.sleep(100)
            case "exit":
                os._exit(3)
            case "junk":
                return "a text"
            case "nan":
                return Done(float("nan"))
            case "megabyte":
                return Observation("x" * 2**20) if len(self.notes) == 3 else Done(1.0)
            case "fork":
                if not os.fork():
                    time.sleep(100)
        return Done(1.0)


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: a number
        second: another
    """
    return first + second


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "slept"


async def read(name: str) -> str:
    """Read a file.

    Args:
        name: its name
    """
    return Path(name).read_text()


class Picky(Environment):
    """Hangs when it is told b."""

    def reset(self, problem: dict[str, Any]) -> None:
        pass

    def step(self, reply: str) -> Done:
        if reply == "b":
            time.sleep(100)
        return Done(1.0)


class Stopping(Environment):
    """Stops the process that it was forked from, and with `b` that one's keeper first."""

    def reset(self, problem: dict[str, Any]) -> None:
        pass

    def step(self, reply: str) -> Done:
        parent = os.getppid()
        if reply == "b":
            keeper = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(keeper), signal.SIGSTOP)
        os.kill(parent, signal.SIGSTOP)
        return Done(1.0)


class Slow(Environment):
    """Takes longer than a second for a reply."""

    def reset(self, problem: dict[str, Any]) -> None:
        pass

    def step(self, reply: str) -> Done:
        time.sleep(1.2)
        return Done(1.0)


class Parity(Environment):
    """Three replies, each of which earns something by what it says."""

    def reset(self, problem: dict[str, Any]) -> None:
        self.seen = 0

    def step(self, reply: str) -> Observation | Done:
        self.seen += 1
        reward = 0.5 * (sum(map(ord, reply)) % 2)
        return Done(reward) if self.seen == 3 else Observation(f"+{self.seen}=", reward)


@dataclass
class Meeting(Environment):
    """Waits in its step until another episode is in its own."""

    folder: str

    def reset(self, problem: dict[str, Any]) -> None:
        pass

    def step(self, reply: str) -> Done:
        Path(self.folder, reply).touch()
        until = time.monotonic() + 5.0
        while (count := len(list(Path(self.folder).iterdir()))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        return Done(float(count == 2))


class Loud(Environment):
    """Prints twelve megabytes in every step."""

    def reset(self, problem: dict[str, Any]) -> None:
        pass

    def step(self, reply: str) -> Done:
        for _ in range(12):
            print("x" * 2**20, flush=True)
        return Done(1.0)


class Counter(Environment):
    """Adds what it is told; two replies earn a little, and the third ends it. Some replies are its own errors."""

    own_errors = (ZeroDivisionError,)

    def reset(self, problem: dict[str, Any]) -> None:
        self.seen = 0

    async def step(self, reply: str) -> Observation | Done:
        self.seen += 1
        match reply:
            case "own":
                return Done(1 / 0)
            case "network":
                raise type("ReadTimeout", (Exception,), {})("late")
            case "caused":
                raise RuntimeError("no score") from ConnectionResetError("gone")
            case "missing":
                raise NotImplementedError
            case "wrong":
                return Done(-2.0)
            case "exit":
                raise SystemExit(2)
            case "graph":
                raise type("NetworkXNoPath", (Exception,), {})("no path")
        return Done(1.0) if self.seen == int(reply) else Observation(f"{self.seen}", 0.1 * self.seen)


def roll() -> str:
    """Roll a die."""
    return str(random.random())


class Prepared(Environment):
    """Says which process it was prepared in, and by what."""

    prepared: ClassVar[list[str]] = []

    def __init__(self, label: str) -> None:
        self.label = label

    @classmethod
    def before_episodes(cls, label: str, **_: Any) -> None:
        cls.prepared.append(f"{label} {os.getpid()}")

    def reset(self, problem: dict[str, Any]) -> None:
        pass

    def step(self, reply: str) -> Observation:
        return Observation(f"{self.prepared} {os.getppid()}")
