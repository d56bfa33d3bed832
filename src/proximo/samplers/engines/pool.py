"""Engines of a fleet: which there are, which of them have the policy's weights, and how many requests each has."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from proximo.samplers.engines.engine import Engine
from proximo.samplers.sampler import SamplerEvent
from proximo.system.timeline import Lanes


class FleetLost(ValueError):
    """No engine is left that has the policy's weights."""


class Dropped(Exception):
    """Requests were given up."""


class Roster:
    """The engines of a fleet. An engine that is lost is stopped, and never comes back."""

    def __init__(self, make: Callable[[str, int], Engine], size: int, leave: Callable[[Engine], None]) -> None:
        """`make` makes an engine, given its name and its place, from 0 to `size` − 1, without starting it: a new engine
        has the place of the one that was lost. `leave` is told of each engine that is not used again."""
        self._make, self._size, self._leave = make, size, leave
        self._made = 0
        self._places: dict[str, int] = {}
        """Place of each engine, by its name."""
        self.engines: list[Engine] = []
        self._confirmed: dict[str, int] = {}
        """Version that an engine has by its probe, by the engine's name."""
        self._busy: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._pausing = threading.Lock()
        self._is_pushing = False
        self._events: list[SamplerEvent] = []
        self._losses: list[str] = []
        self.lanes = Lanes()
        """When each engine did what."""

    def missing(self) -> list[Engine]:
        """New engines in the places that have none; they are not started yet."""
        new: list[Engine] = []
        for slot in sorted(set(range(self._size)) - set(self._places.values())):
            new.append(self._make(f"engine-{self._made}", slot))
            self._places[new[-1].name] = slot
            self._made += 1
        with self._changed:
            self.engines += new
        return new

    # Weights

    def behind(self, version: int) -> list[Engine]:
        """Engines that do not have this version."""
        return [each for each in self.engines if self._confirmed.get(each.name) != version]

    def confirm(self, engine: Engine, version: int) -> None:
        """The engine has passed the probe."""
        with self._changed:
            self._confirmed[engine.name] = version

    def ready(self) -> list[Engine]:
        """Engines that have passed their last probe."""
        with self._changed:
            return self._ready()

    def _ready(self) -> list[Engine]:
        return [each for each in self.engines if each.name in self._confirmed]

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """One at a time may pause and resume engines: a resumed engine must not be in the middle of an update."""
        with self._pausing:
            yield

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Requests wait inside: which engines have the policy's weights is not known."""
        with self.pausing():
            with self._changed:
                self._is_pushing = True
            try:
                yield
            finally:
                with self._changed:
                    self._is_pushing = False
                    self._changed.notify_all()

    # Requests

    @contextmanager
    def engine(self, dropped: Callable[[], bool]) -> Iterator[Engine]:
        """The engine with the fewest requests, which has one more inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_pushing)
            if dropped():
                raise Dropped
            ready = self._ready()
            if not ready:
                raise FleetLost(f"all engines were lost: {self.why()}")
            engine = min(ready, key=lambda each: self._busy[each.name])
            self._busy[engine.name] += 1
            version = self._confirmed[engine.name]
        try:
            with self.lanes.during(engine.name, "sample", version=version):
                yield engine
        finally:
            with self._changed:
                self._busy[engine.name] -= 1
                self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> None:
        """Wait, inside `pushing`, until no request is with an engine, or for some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._busy.values()), seconds)

    # Losses

    def lose_all(self, engines: Sequence[Engine], failed: Mapping[str, str]) -> None:
        """Lose those that failed; `failed` has the reasons, by name."""
        for engine in engines:
            if engine.name in failed:
                self.lose(engine, failed[engine.name])

    def lose(self, engine: Engine, reason: str) -> None:
        with self._changed:
            if engine not in self.engines:
                return  # several requests find the same engine dead
            self.engines.remove(engine)
            self._confirmed.pop(engine.name, None)
            self._places.pop(engine.name)
            self._losses.append(reason)
            self._events.append(SamplerEvent("engine_lost", reason, warns=True))
        engine.stop()
        self._leave(engine)

    def why(self) -> str:
        """Reasons why the last engines were lost."""
        return "; ".join(self._losses[-self._size :])

    # Events

    def note(self, event: SamplerEvent) -> None:
        with self._changed:
            self._events.append(event)

    def take_events(self) -> list[SamplerEvent]:
        """Events since the last call."""
        with self._changed:
            taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        """Stop every engine."""
        with self._changed:
            engines, self.engines = self.engines, []
            self._confirmed.clear()
        for engine in engines:
            engine.stop()
            self._leave(engine)
