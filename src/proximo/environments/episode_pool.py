"""Hosts of episodes: killable processes, or this process for episodes of Proximo's own."""

import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from proximo.environments.instance import Instance, allowed
from proximo.processes.child import NodePlaces, NotLoaded, WorkerProcess, located
from proximo.processes.failures import Failure, GraderFailed, plain
from proximo.processes.pool import Threads, WorkerSlot
from proximo.processes.tree import cores
from proximo.processes.worker import described
from proximo.rewards.calling import finished

SCRIPT = Path(__file__).with_name("worker.py")
SLACK = 30.0
"""Seconds that a process has, besides the limit of a call, to fork, answer and kill."""
Message = Mapping[str, Any]
Answer = Mapping[str, Any] | Failure
"""An episode's answer as plain values, or why there is none."""


@dataclass(frozen=True)
class ActingJob:
    """An environment and tools, and what a call of them may take."""

    environment: str | None
    """package.module:Class or path/to/file.py:Class; None: tools only."""
    arguments: str
    """Arguments of the class, as JSON."""
    tools: tuple[str, ...]
    seconds: float
    """Time limit of a call. Calls that run at once share the cores, so that n of them on c cores together have
    ceil(n / c) times as long, counted again for those that are left whenever one has answered."""
    memory_mb: int
    max_characters: int

    @property
    def path(self) -> str:
        """Path that names it in errors."""
        return self.environment or ", ".join(self.tools)

    def message(self) -> dict[str, Any]:
        """Message that says what the process loads."""
        return {
            "environment": None if self.environment is None else located(self.environment),
            "arguments": json.loads(self.arguments),
            "tools": [located(tool) for tool in self.tools],
            "max_characters": self.max_characters,
        }


class Host(Protocol):
    """Runs episodes, each of which has a number."""

    def start(self, groups: Sequence[int], messages: Sequence[Message]) -> list[tuple[list[int], list[Answer]]]:
        """Start `groups[i]` episodes with the same message; their numbers and answers."""
        ...

    def ask(self, asks: Sequence[tuple[int, Message]]) -> list[Answer]:
        """Ask each of these episodes once; all of them work at the same time."""
        ...

    def end(self, numbers: Sequence[int]) -> None:
        """End episodes, also those in the middle of something."""
        ...

    def close(self) -> None: ...


class Hosts:
    """The hosts of one job. Rounds that are played at the same time have one each, so that none waits for another."""

    def __init__(self, make: Callable[[Callable[[], int]], Host], max_hosts: int) -> None:
        """`make` gets the number of rounds that are played; beyond `max_hosts` they are shared."""
        self._make, self._max_hosts = make, max_hosts
        self._users: dict[Host, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[Host]:
        """Lend a host for a round."""
        with self._lock:
            free = min(self._users, key=lambda host: self._users[host], default=None)
            if free is None or (self._users[free] and len(self._users) < self._max_hosts):
                free = self._make(self.rounds)
            self._users[free] = self._users.get(free, 0) + 1
        try:
            yield free
        finally:
            with self._lock:
                self._users[free] -= 1

    def rounds(self) -> int:
        """Number of rounds that are played now."""
        return max(sum(self._users.values()), 1)

    def close(self) -> None:
        for host in self._users:
            host.close()


class ProcessHost:
    """Episodes in processes of their own, below one that has loaded the environment."""

    def __init__(self, job: ActingJob, rounds: Callable[[], int] = lambda: 1, places: NodePlaces | None = None) -> None:
        """`rounds`: how many are played at the same time and share the cores. `places`: where the process may run;
        None: on this machine."""
        self._job, self._rounds = job, rounds
        self._slot = WorkerSlot(SCRIPT, job, places)
        self._numbers = count()

    def start(self, groups: Sequence[int], messages: Sequence[Message]) -> list[tuple[list[int], list[Answer]]]:
        numbers = [[next(self._numbers) for _ in range(size)] for size in groups]
        starts = [{"episodes": group, "message": message} for group, message in zip(numbers, messages, strict=True)]
        answers = iter(self._exchange(starts=starts, count=sum(groups)))
        return [(group, [next(answers) for _ in group]) for group in numbers]

    def ask(self, asks: Sequence[tuple[int, Message]]) -> list[Answer]:
        return self._exchange(asks=asks, count=len(asks)) if asks else []

    def end(self, numbers: Sequence[int]) -> None:
        if self._slot.is_filled:
            self._exchange(ends=numbers, count=0)

    def close(self) -> None:
        self._slot.close()

    def _exchange(
        self, *, count: int, starts: Sequence[Any] = (), asks: Sequence[Any] = (), ends: Sequence[int] = ()
    ) -> list[Answer]:
        with self._slot:
            try:
                process = self._slot.worker()
            except NotLoaded as error:
                raise GraderFailed(f"environment.path is {self._job.path!r}: {error}") from None
            if process is None:
                return [Failure("died", "the run has ended")] * count
            share = cores() / self._rounds() if process.node_place is None else process.node_place.cores
            request = {"starts": starts, "asks": asks, "ends": ends, "seconds": self._job.seconds, "cores": share}
            answers = _asked(process, request, count, self._job)
        if isinstance(answers, Failure):
            return [answers] * count
        late = Failure("time", f"no answer within {self._job.seconds:g} s, or its process died; it was killed")
        return [late if answer is None else checked(answer) for answer in answers]


def _asked(process: WorkerProcess, request: Message, count: int, job: ActingJob) -> list[Any] | Failure:
    """Answers to a request of `count` episodes; one failure where the process itself has failed."""
    characters = count * (6 * job.max_characters + 4096) // 64  # a character may be six bytes of JSON
    seconds = allowed(job.seconds, count, request["cores"])
    answer = process.ask(json.dumps(request, default=str), characters, 0, seconds + SLACK)
    if isinstance(answer, Failure):
        return answer
    answers = answer.get("answers")
    return answers if isinstance(answers, list) else Failure("junk", "its process answered no list", fatal=True)


class LocalHost:
    """Episodes in this process: for environments and tools of Proximo's own, which never hang.

    Environments are asked one after the other, since they draw from the random numbers of the process; tools, which
    draw none and may wait for a program, at the same time.
    """

    def __init__(
        self, make: Callable[[], Any] | None, tools: Mapping[str, Callable[..., Any]], max_characters: int
    ) -> None:
        self._make, self._tools, self._max_characters = make, tools, max_characters
        self._numbers = count()
        self._instances: dict[int, Instance] = {}
        self._lock = threading.Lock()
        self._threads = Threads(cores())

    def start(self, groups: Sequence[int], messages: Sequence[Message]) -> list[tuple[list[int], list[Answer]]]:
        started = []
        for size, message in zip(groups, messages, strict=True):
            numbers = [next(self._numbers) for _ in range(size)]
            started.append((numbers, [self._started(number, message) for number in numbers]))
        return started

    def _started(self, number: int, message: Message) -> Answer:
        def reset() -> dict[str, Any]:
            instance = self._instances[number] = Instance(self._make, self._tools, finished, self._max_characters)
            return instance.answer(message)

        return self._seeded(reset, message)

    def ask(self, asks: Sequence[tuple[int, Message]]) -> list[Answer]:
        begun = [self._begun(partial(self._instances[number].answer, message), message) for number, message in asks]
        return [waiting() for waiting in begun]

    def _begun(self, call: Callable[[], dict[str, Any]], message: Message) -> Callable[[], Answer]:
        if message["do"] == "call":
            return self._threads.begin(lambda: _answer(call))
        answer = self._seeded(call, message)
        return lambda: answer

    def _seeded(self, call: Callable[[], dict[str, Any]], message: Message) -> Answer:
        with self._lock:
            state = random.getstate()
            random.seed(message["seed"])
            try:
                return _answer(call)
            finally:
                random.setstate(state)

    def end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._instances.pop(number, None)

    def close(self) -> None:
        self._instances.clear()
        self._threads.close()


def _answer(call: Callable[[], dict[str, Any]]) -> Answer:
    try:
        return checked(call())
    except Exception as error:
        return Failure(type(error).__name__, plain(described(error)))


def checked(answer: Any) -> Answer:
    """An answer that has what ours have. It may come from a process that ran foreign code: nothing is trusted."""
    if not isinstance(answer, Mapping):
        return Failure("junk", "its process answered something else than was asked")
    if isinstance(kind := answer.get("failed"), str) and "text" not in answer:
        return Failure(plain(kind, 80), plain(str(answer.get("message"))))
    reward, text = answer.get("reward", 0.0), answer.get("text", "")
    if not (isinstance(reward, float) and math.isfinite(reward) and isinstance(text, str)):
        return Failure("junk", "its process answered something else than was asked")
    return answer
