"""A sampler over engines: pushes weights, probes who has them, shares requests out, and replaces what is lost."""

import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.fleet.engine import Draw, Engine, EngineLost, Generated
from proximo.fleet.probe import Gap, Probe
from proximo.fleet.sync import WeightSync, in_parallel
from proximo.models.positions import check_requests
from proximo.samplers import SampledPolicy, SamplerEvent, SamplingOptions, Stream
from proximo.samplers.partial import PartialCompletion, TokenWriter, end_tokens, partials_of
from proximo.types import Completion, Request


class FleetLost(ValueError):
    """No engine is left that has the policy's weights."""


class FleetSampler:
    """Samples on engines that all have the same version of the policy.

    An engine that dies, hangs, fails half-way through an update or does not pass the probe is stopped. Its requests go
    to other engines, with the same random numbers, and a new engine takes its place at the next push.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        make: Callable[[str, int], Engine],
        sync: WeightSync,
        scratch: Path,
        *,
        engines: int,
        slots: int,
        probe: int,
        deadline: float,
        repeats: bool,
    ) -> None:
        """`make` makes an engine, given its name and its place, from 0 to `engines` − 1, without starting it: a new
        engine has the place of the one that was lost. `slots` is the number of requests in flight at a time. `scratch`
        holds the engines' files, and is removed with them."""
        self._model, self._tokenizer, self._ends = model, tokenizer, end_tokens(model, tokenizer)
        self._make, self._sync, self._probe = make, sync, Probe(model, probe)
        self._wanted, self._slots, self._deadline = engines, slots, deadline
        self.repeats = repeats
        self._remove_scratch = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._made = 0
        self._places: dict[str, int] = {}
        """Place of each engine, by its name."""
        self._engines: list[Engine] = []
        self._confirmed: dict[str, int] = {}
        """Version that an engine has by its probe, by the engine's name."""
        self._busy: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._events: list[SamplerEvent] = []
        self._losses: list[str] = []

    # Weights

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        """Replace engines that were lost, and give all of them the policy's weights. Where all are lost on the way,
        new ones get a second chance."""
        for _ in range(2):
            self._start_missing()
            behind = [each for each in self._engines if self._confirmed.get(each.name) != version]
            if behind:
                self._push(policy, behind, version)
            if self._ready():
                return version
        raise FleetLost(f"no engine has the policy's weights of version {version}: {self._why()}")

    def _start_missing(self) -> None:
        new: list[Engine] = []
        for place in sorted(set(range(self._wanted)) - set(self._places.values())):
            new.append(self._make(f"engine-{self._made}", place))
            self._places[new[-1].name] = place
            self._made += 1
        self._engines += new

        def start(engine: Engine) -> None:
            engine.start(self._deadline)
            self._sync.join(engine, self._deadline)

        self._lose_all(new, in_parallel(new, start))

    def _push(self, policy: SampledPolicy, engines: Sequence[Engine], version: int) -> None:
        begun, deadline = time.monotonic(), self._deadline
        failed = in_parallel(engines, lambda engine: engine.pause("abort", deadline))
        failed |= self._sync.push(_without(engines, failed), policy.weights, version, deadline)
        failed |= in_parallel(_without(engines, failed), lambda engine: engine.resume(deadline))
        seconds = time.monotonic() - begun
        gaps: dict[str, Gap] = {}
        for engine, found in self._asked(_without(engines, failed), version).items():
            if isinstance(found, EngineLost):
                failed[engine.name] = str(found)
                continue
            gap = gaps[engine.name] = self._probe.compare(policy.model, found)
            if self._probe.passes(gap):
                self._confirmed[engine.name] = version
            else:
                failed[engine.name] = (
                    f"{engine.name} is not the policy after a push of version {version}: its log-probs differ by {gap}"
                )
        self._lose_all(engines, failed)
        worst = max((gap.mean for gap in gaps.values()), default=0.0)
        message = f"version {version} reached {len(engines) - len(failed)} of {len(engines)} engines in {seconds:.2f} s"
        numbers = {"version": version, "seconds": seconds, "gap": worst}
        self._events.append(SamplerEvent("push", f"{message}; probe gap {worst:.1e} nats", numbers))

    def _asked(self, engines: Sequence[Engine], version: int) -> dict[Engine, list[Generated] | EngineLost]:
        """What each engine says to the probe; one that hangs is stopped."""
        if not engines:
            return {}
        found: dict[Engine, list[Generated] | EngineLost] = {}
        with ThreadPoolExecutor(len(engines)) as pool:
            asked = [(each, pool.submit(self._probe.ask, each, version)) for each in engines]
            for engine, future in asked:
                self._wait([future], [engine])
                error = future.exception()
                assert error is None or isinstance(error, EngineLost), error
                found[engine] = future.result() if error is None else error
        return found

    # Requests

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Stream:
        """In the order of the requests."""
        partials = partials_of(requests)
        check_requests(self._model, requests, options.max_tokens)
        writer = TokenWriter(self._tokenizer, self._ends, options, seed, step)
        pool, closed = ThreadPoolExecutor(self._slots), threading.Event()
        tasks = [[pool.submit(self._completed, each, writer, closed) for each in siblings] for siblings in partials]
        try:
            for number, siblings in enumerate(tasks):
                self._wait(siblings, self._ready)
                yield number, tuple(each.result() for each in siblings)
        finally:
            closed.set()
            if any(not task.done() for siblings in tasks for task in siblings):
                pool.shutdown(wait=False, cancel_futures=True)
                self._abort()
            pool.shutdown()

    def _completed(self, partial: PartialCompletion, writer: TokenWriter, closed: threading.Event) -> Completion:
        draw = Draw(writer.seed, writer.step, partial.key, partial.sample)
        limit = min(partial.max_tokens or writer.options.max_tokens, writer.options.max_tokens)
        found = self._generated(partial.prompt, replace(writer.options, max_tokens=limit), draw, closed)
        # The end is found here again, by the rules of all samplers: engines read text in ways of their own.
        logprobs = [0.0] * len(found.tokens) if writer.options.greedy else list(found.logprobs)
        writer.take(partial, list(found.tokens), logprobs, [])
        partial.finish = partial.finish or ("length" if found.finish == "length" else "stop")
        return writer.completion(partial, found.version)

    def _generated(
        self, prompt: tuple[int, ...], options: SamplingOptions, draw: Draw, closed: threading.Event
    ) -> Generated:
        """From the engine with the fewest requests; from another one with the same draw where that is lost."""
        while True:
            with self._lock:
                ready = [each for each in self._engines if each.name in self._confirmed]
                if not ready:
                    raise FleetLost(f"all engines were lost: {self._why()}")
                engine = min(ready, key=lambda each: self._busy[each.name])
                self._busy[engine.name] += 1
            try:
                found = engine.generate(prompt, options, draw)
                if found.finish != "abort" or closed.is_set():
                    return found
            except EngineLost as lost:
                self._lose(engine, str(lost))
            finally:
                with self._lock:
                    self._busy[engine.name] -= 1

    def _abort(self) -> None:
        """End requests whose completions nothing waits for any more."""
        for engine in self._ready():
            try:
                engine.pause("abort", self._deadline)
                engine.resume(self._deadline)
            except EngineLost as lost:
                self._lose(engine, str(lost))

    # Engines

    def _ready(self) -> list[Engine]:
        with self._lock:
            return [each for each in self._engines if each.name in self._confirmed]

    def _wait(self, tasks: Iterable[Future], engines: Sequence[Engine] | Callable[[], Sequence[Engine]]) -> None:
        """Until all have ended. Where none ends within the deadline, engines that owe a token are stopped, which ends
        what waits for them."""
        pending = set(tasks)
        while pending:
            done, pending = wait(pending, self._deadline, FIRST_COMPLETED)
            if not done:
                for engine in engines() if callable(engines) else engines:
                    health = engine.alive(self._deadline)
                    if not health.alive:
                        self._lose(engine, f"{engine.name} hangs: {health.reason}")

    def _lose_all(self, engines: Sequence[Engine], failed: dict[str, str]) -> None:
        for engine in engines:
            if engine.name in failed:
                self._lose(engine, failed[engine.name])

    def _lose(self, engine: Engine, reason: str) -> None:
        with self._lock:
            if engine not in self._engines:
                return  # several requests find the same engine dead
            self._engines.remove(engine)
            self._confirmed.pop(engine.name, None)
            self._places.pop(engine.name)
            self._losses.append(reason)
            self._events.append(SamplerEvent("engine_lost", reason, warns=True))
        engine.stop()
        self._sync.leave(engine)

    def _why(self) -> str:
        """Why the last engines were lost."""
        return "; ".join(self._losses[-self._wanted :])

    def take_events(self) -> list[SamplerEvent]:
        """What happened since the last call."""
        with self._lock:
            taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        """Stop every engine."""
        with self._lock:
            engines, self._engines = self._engines, []
            self._confirmed.clear()
        for engine in engines:
            engine.stop()
            self._sync.leave(engine)
        self._remove_scratch()


def _without(engines: Sequence[Engine], failed: dict[str, str]) -> list[Engine]:
    return [each for each in engines if each.name not in failed]
