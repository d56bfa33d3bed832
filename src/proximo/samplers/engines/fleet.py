"""A sampler over engines: pushes weights, probes who has them, shares requests out, and replaces what is lost."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import ClassVar

from proximo.models.context_length import check_requests
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.stop_tokens import end_tokens
from proximo.samplers.engines.engine import Draw, Engine, EngineLost, Generated
from proximo.samplers.engines.pool import FleetLost, Roster
from proximo.samplers.engines.probe import Gap, LogprobProbe
from proximo.samplers.engines.sync import WeightSync, in_parallel
from proximo.samplers.in_progress import BegunRequests
from proximo.samplers.partial import PartialCompletion, TokenWriter, partials_of
from proximo.samplers.sampler import More, SampledPolicy, SamplerEvent, SamplingOptions, Stream
from proximo.system.phases import phase
from proximo.system.scratch import Scratch
from proximo.system.timeline import Interval
from proximo.types import Completion, Request

NOTING = 2.0
"""Seconds for the answers of interrupted requests to arrive."""


class FleetSampler:
    """Samples on engines that all have the same version of the policy.

    An engine that dies, hangs, fails half-way through an update or does not pass the probe is stopped. Its requests go
    to other engines, with the same random numbers, and a new engine takes its place at the next push.

    Streams may be read on several threads, also while `refresh` is called: a push interrupts requests, and they
    continue behind the tokens that they have when the engines have passed the probe. Keys and values are then computed
    anew, so that no token depends on those of older weights.
    """

    takes_more: ClassVar[bool] = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        make: Callable[[str, int], Engine],
        sync: WeightSync,
        scratch: Scratch,
        *,
        engines: int,
        slots: int,
        probe: int,
        deadline: float,
        repeats: bool,
        record_routes: bool = False,
    ) -> None:
        """`make`: see `Roster`. `slots` is the number of requests in flight at a time. `scratch` holds the engines'
        files, and is removed with them. `record_routes`: whether completions carry the experts that tokens went to,
        which the engines must say."""
        self._model, self._tokenizer, self._ends = model, tokenizer, end_tokens(model, tokenizer)
        self._sync, self._probe, self._deadline = sync, LogprobProbe(model, probe), deadline
        self.roster = Roster(make, engines, sync.leave)
        self.repeats, self._record_routes = repeats, record_routes
        self._remove_scratch = weakref.finalize(self, scratch.remove)
        self._pool, self._has_started = ThreadPoolExecutor(slots), False
        self._streams: dict[tuple[int, int], threading.Event] = {}
        """Set where requests are given up, by step and key."""
        self.take_events, self.lanes = self.roster.take_events, self.roster.lanes
        self.begun = BegunRequests(self._interrupt_noting)

    # Weights

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        """Replace engines that were lost, and give all of them the policy's weights. Where all are lost on the way,
        new ones get a second chance; not where none has ever started."""
        for _ in range(2):
            self._start_missing()
            if not self.roster.engines and not self._has_started:
                break
            self._has_started = True
            if behind := self.roster.behind(version):
                with self.roster.pushing():
                    self._push(policy, behind, version)
            if self.roster.ready():
                return version
        raise FleetLost(f"no engine has the policy's weights of version {version}: {self.roster.why()}")

    def _start_missing(self) -> None:
        new = self.roster.missing()

        def start(engine: Engine) -> None:
            with self.lanes.during(engine.name, "start"):
                engine.start(self._deadline)
                self._sync.join(engine, self._deadline)

        self.roster.lose_all(new, in_parallel(new, start))

    def _push(self, policy: SampledPolicy, engines: Sequence[Engine], version: int) -> None:
        begun, deadline = time.perf_counter(), self._deadline
        failed = in_parallel(engines, lambda engine: engine.pause("abort", deadline))
        failed |= self._sync.push(_without(engines, failed), policy.weights, version, deadline)
        failed |= in_parallel(_without(engines, failed), lambda engine: engine.resume(deadline))
        seconds = (ended := time.perf_counter()) - begun
        for engine in engines:
            self.lanes.add(Interval(engine.name, "push", begun, ended, {"version": version}))
        gaps: dict[str, Gap] = {}
        for engine, answers in self._asked(_without(engines, failed), version).items():
            if isinstance(answers, EngineLost):
                failed[engine.name] = str(answers)
                continue
            gap = gaps[engine.name] = self._probe.compare(policy, answers)
            if self._probe.passes(gap):
                self.roster.confirm(engine, version)
            else:
                failed[engine.name] = (
                    f"{engine.name} is not the policy after a push of version {version}: its log-probs differ by {gap}"
                )
        self.roster.lose_all(engines, failed)
        worst = max((gap.mean for gap in gaps.values()), default=0.0)
        message = f"version {version} reached {len(engines) - len(failed)} of {len(engines)} engines in {seconds:.2f} s"
        numbers = {"version": version, "seconds": seconds, "gap": worst}
        self.roster.note(SamplerEvent("push", f"{message}; probe gap {worst:.1e} nats", numbers))

    def _asked(self, engines: Sequence[Engine], version: int) -> dict[Engine, list[Generated] | EngineLost]:
        """Answers of the engines to the probe; one that hangs is stopped."""
        if not engines:
            return {}
        answers: dict[Engine, list[Generated] | EngineLost] = {}
        with ThreadPoolExecutor(len(engines)) as pool:
            asked = [(each, pool.submit(self._probed, each, version)) for each in engines]
            for engine, future in asked:
                self._wait([future], lambda engine=engine: [engine])
                error = future.exception()
                assert error is None or isinstance(error, EngineLost), error
                answers[engine] = future.result() if error is None else error
        return answers

    def _probed(self, engine: Engine, version: int) -> list[Generated]:
        with self.lanes.during(engine.name, "probe", version=version):
            return self._probe.ask(engine, version)

    # Requests

    def stream(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        *,
        seed: int,
        step: int,
        version: int = 0,
        more: More = tuple,
    ) -> Stream:
        """Sample in the order of the requests; those that come meanwhile wait behind the others."""
        writer, dropped = TokenWriter(self._tokenizer, self._ends, options, seed, step), threading.Event()

        def submitted(partial: PartialCompletion, key: int) -> "Future[Completion]":
            return self._pool.submit(self._completed, partial, writer, version, dropped, key)

        def begin(requests: Sequence[Request]) -> None:
            partials = partials_of(requests)
            check_requests(self._model, requests, options.max_tokens)
            self._streams.update(dict.fromkeys([(step, request.key) for request in requests], dropped))
            keys.extend((step, request.key) for request in requests)
            for request, siblings in zip(requests, partials, strict=True):
                tasks.append([submitted(each, request.key) for each in siblings])

        keys, tasks = list[tuple[int, int]](), list[list[Future[Completion]]]()
        begin(requests)
        try:
            for number, siblings in enumerate(tasks):  # which may grow
                with phase("waiting for engines"):
                    self._wait(siblings, self.roster.ready)
                yield number, tuple(each.result() for each in siblings)
                begin(more())
        finally:
            for key in keys:
                self._streams.pop(key, None)
            running = [task for siblings in tasks for task in siblings if not task.cancel() and not task.done()]
            if running:
                dropped.set()
                self._interrupt()
                wait(running)

    def drop(self, step: int, key: int) -> None:
        """Give up the requests of this step and key: their stream raises Dropped, and the others are not affected."""
        if (dropped := self._streams.get((step, key))) is not None:
            dropped.set()
            self._interrupt()

    def _completed(
        self, partial: PartialCompletion, writer: TokenWriter, version: int, dropped: threading.Event, key: int
    ) -> Completion:
        """`key` is the request's, without its turn."""
        draw = Draw(writer.seed, writer.step, partial.key, partial.sample)
        limit = min(partial.max_tokens or writer.options.max_tokens, writer.options.max_tokens)
        generated = self._generated(partial, replace(writer.options, max_tokens=limit), draw, dropped, key)
        # The end is found here again, by the rules of all samplers: engines read text in ways of their own.
        logprobs = [0.0] * len(generated.tokens) if writer.options.greedy else list(generated.logprobs)
        writer.take(partial, list(generated.tokens), logprobs, [])
        partial.finish = partial.finish or ("length" if generated.finish == "length" else "stop")
        if self._record_routes and generated.routes is not None:
            read = generated.routes[: partial.length - 1]
            partial.prompt_routes, partial.routes = read[: len(partial.prompt)], [*read[len(partial.prompt) :]]
        versions = generated.versions[: len(partial.tokens)]
        completion = writer.completion(partial, min(version, *versions))
        return replace(completion, versions=versions if max(versions) > version else ())

    def _generated(
        self, partial: PartialCompletion, options: SamplingOptions, draw: Draw, dropped: threading.Event, key: int
    ) -> Generated:
        """Sample from any engine. Where it is lost, from another one with the same draw; where the request is
        interrupted, now or before a resume, continued behind the tokens that it has. What was known before a resume has
        no routes: where they are recorded, it is sampled again."""
        begun = self.begun.find(draw.step, key, (draw.key, draw.sample), partial.prompt)
        generated = Generated.of(None if self._record_routes else begun)
        while generated.finish == "abort" and len(generated.tokens) < options.max_tokens:
            with self.roster.engine(dropped.is_set) as engine:
                try:
                    draw = replace(draw, start=len(generated.tokens))
                    rest = engine.generate(partial.prompt, options, draw, generated.tokens)
                    self.lanes.count(engine.name, "sample", requests=1, tokens=len(rest.tokens))
                    generated = generated.continued(rest)
                    self.begun.note(draw.step, key, generated.begun(partial))
                except EngineLost as lost:
                    self.roster.lose(engine, str(lost))
        return generated

    def _interrupt(self) -> None:
        """Interrupt all requests, which ends those that were given up."""
        with self.roster.pausing():
            for engine in self.roster.ready():
                try:
                    engine.pause("abort", self._deadline)
                    engine.resume(self._deadline)
                except EngineLost as lost:
                    self.roster.lose(engine, str(lost))

    def _interrupt_noting(self) -> None:
        """Interrupt all requests, and return when the tokens of each are noted. One that reaches an engine after its
        pause waits there, and has nothing to note."""
        with self.roster.pushing():
            engines, deadline = self.roster.ready(), self._deadline
            failed = in_parallel(engines, lambda engine: engine.pause("abort", deadline))
            self.roster.lose_all(engines, failed)
            self.roster.wait_until_idle(NOTING)
            engines = _without(engines, failed)
            self.roster.lose_all(engines, in_parallel(engines, lambda engine: engine.resume(deadline)))

    def _wait(self, tasks: Iterable[Future], engines: Callable[[], Sequence[Engine]]) -> None:
        """Wait until all have ended. Where none ends within the deadline, engines that owe a token are stopped, which
        ends what waits for them."""
        pending = set(tasks)
        while pending:
            done, pending = wait(pending, self._deadline, FIRST_COMPLETED)
            if not done:
                for engine in engines():
                    health = engine.alive(self._deadline)
                    if not health.alive:
                        self.roster.lose(engine, f"{engine.name} hangs: {health.reason}")

    def close(self) -> None:
        """Stop every engine."""
        self.roster.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._remove_scratch()


def _without(engines: Sequence[Engine], failed: dict[str, str]) -> list[Engine]:
    return [each for each in engines if each.name not in failed]
