"""An engine inside this process: a copy of the model behind the same interface as a server.

It is exact and deterministic, and slow: it decodes one completion at a time. It lets a fleet be tried where there is no
server, and is what the conformance suite holds servers against.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Condition, Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from proximo.models import frozen_copy
from proximo.models.adapters.lora import has_adapter, merge
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.samplers.embedded import local_sampler
from proximo.samplers.engines.buckets import Layout, connect_store, gloo_group, receive
from proximo.samplers.engines.engine import Draw, EngineLost, Generated, Health, PauseMode, Span
from proximo.samplers.partial import PartialCompletion
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Completion, Request

ONE_TOKEN = SamplingOptions(max_tokens=1)


class EmbeddedEngine:
    """A frozen copy of a model that samples in this process."""

    repeats = True

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, record_routes: bool = False
    ) -> None:
        self._name = name
        self._copy = frozen_copy(model)
        if has_adapter(self._copy):  # weights come with the adapter added to them
            merge(self._copy)
        self._sampler = local_sampler(self._copy, tokenizer, slots=1, record_routes=record_routes)
        self._weights = dict(self._copy.named_parameters())
        self._decoding = Lock()
        self._changed = Condition()
        self._paused: PauseMode | None = None
        self._running = 0
        self._stopped = False
        self._version: int | None = None
        self._group: Any = None

    @property
    def name(self) -> str:
        return self._name

    def start(self, deadline: float) -> None:
        self._check()

    def version(self) -> int | None:
        self._check()
        return self._version

    # Generating

    def generate(
        self, prompt: tuple[int, ...], options: SamplingOptions, draw: Draw, prefix: tuple[int, ...] = ()
    ) -> Generated:
        assert draw.start == len(prefix)
        generated = Generated((), (), "abort", ())
        with self._in_flight():
            while True:
                self._wait_if_kept()
                known = prefix + generated.tokens
                part, was_cut = self._decode(prompt + known, options, draw, len(known))
                ends = was_cut and self._paused == "abort"
                spans = (Span(self._version or 0, 0, len(part.tokens)),)
                finish = "abort" if was_cut else part.finish
                generated = generated.continued(Generated(part.tokens, part.logprobs, finish, spans, _read(part)))
                if not was_cut or ends:
                    return generated

    def _decode(
        self, tokens: tuple[int, ...], options: SamplingOptions, draw: Draw, start: int
    ) -> tuple[Completion, bool]:
        """Decode up to the end, or to a pause that does not wait; True then."""
        was_cut = False

        def listen(partial: PartialCompletion) -> bool:
            nonlocal was_cut
            was_cut = self._paused in ("keep", "abort") or self._stopped
            return not was_cut

        # A continued completion has a key of its own: the sampler counts positions from 0.
        key = draw.key if start == 0 else Draw(draw.seed, draw.step, draw.key, draw.sample, start).number
        rest = replace(options, max_tokens=options.max_tokens - start)
        request = Request(key, tokens, 1, first_sample=draw.sample)
        with self._decoding:
            stream = self._sampler.stream([request], rest, seed=draw.seed, step=draw.step, listener=listen)
            [(_, (completion,))] = list(stream)
        self._check()
        return completion, was_cut

    def alive(self, deadline: float) -> Health:
        begun = time.monotonic()
        try:
            self._check()
            self._decode((0,), ONE_TOKEN, Draw(0, 0, 0, 0), 0)
        except EngineLost as lost:
            return Health(False, time.monotonic() - begun, str(lost))
        return Health(True, time.monotonic() - begun)

    # Pauses

    def pause(self, mode: PauseMode, deadline: float) -> None:
        with self._changed:
            self._check()
            self._paused = mode
            if not self._changed.wait_for(lambda: mode == "keep" or not self._running, deadline):
                raise EngineLost(f"{self._name}: {self._running} requests did not end within {deadline:g} s")
        if mode == "keep":
            with self._decoding:  # so that no token is drawn while weights change
                pass

    def resume(self, deadline: float) -> None:
        with self._changed:
            self._check()
            self._paused = None
            self._changed.notify_all()

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        """A new request waits for the end of any pause; then it counts as running."""
        with self._changed:
            self._changed.wait_for(lambda: self._paused is None or self._stopped)
            self._check()
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _wait_if_kept(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._paused != "keep" or self._stopped)
        self._check()

    # Weights

    def workers(self) -> int:
        return 1

    def join(self, info: Mapping[str, Any], deadline: float) -> None:
        if info:
            store = connect_store(info["address"], info["port"], info["size"], deadline)
            self._group = gloo_group(store, info["first_rank"], info["size"], deadline)

    def begin_update(self, deadline: float) -> None:
        self._check()

    @torch.no_grad()
    def update(self, info: Mapping[str, Any], deadline: float) -> None:
        self._check()
        try:
            self._load(receive(self._group, Layout(**info)) if "names" in info else _stored(info["path"]))
        except (OSError, KeyError, RuntimeError) as error:
            raise EngineLost(f"{self._name}: an update failed, {type(error).__name__}: {error}") from error

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in named:
            self._weights[name].copy_(weight)

    def finish_update(self, version: int, deadline: float) -> None:
        self._check()
        self._version = version

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._stopped:
            raise EngineLost(f"{self._name} was stopped")


def _read(part: Completion) -> Tensor | None:
    """Routes of all tokens that were read; the last one was not."""
    if part.routes is None or part.prompt_routes is None:
        return None
    return torch.cat([part.prompt_routes, part.routes[:-1]])


def _stored(folder: str) -> Iterable[tuple[str, Tensor]]:
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
