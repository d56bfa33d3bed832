"""A step that is captured as a whole runs in its parts while it is profiled, and draws the same."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from proximo.models import tiny_model, tiny_tokenizer
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.embedded.cuda_graphs import CapturedSteps
from proximo.samplers.embedded.sampler import BufferPool
from proximo.samplers.sampler import SamplingOptions
from proximo.system.phases import watched
from proximo.types import Request

REQUESTS = [Request(0, (3, 4, 5), 3), Request(1, (5,), 2)]
OPTIONS = SamplingOptions(max_tokens=5)


class Runs:
    """Runs steps as captured ones are run, without a GPU, and writes down their kinds."""

    def __init__(self) -> None:
        self.kinds: list[Hashable] = []

    def run(self, kind: Hashable, step: Callable[[], Any]) -> Any:
        self.kinds.append(kind)
        return step()


class Watch:
    """Watch that nobody reads."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield


def test_parts_draw_what_the_whole_draws(monkeypatch):
    runs, made = Runs(), BufferPool._made
    monkeypatch.setattr(BufferPool, "_made", lambda self, plan: replace(made(self, plan), captured=runs))
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1)
    sampler = EmbeddedSampler(model, tiny_tokenizer(), slots=5, shared_prefix=True)
    whole = sampler.sample(REQUESTS, OPTIONS, seed=0, step=0)
    steps = len(runs.kinds)
    assert steps > 1
    with watched(Watch()):
        assert sampler.sample(REQUESTS, OPTIONS, seed=0, step=0) == whole
    parts = runs.kinds[steps:]
    assert len(parts) == 2 * steps
    assert all(isinstance(kind, int) for kind in parts[::2]), "layers do not depend on how tokens are drawn"
    assert all(isinstance(kind, tuple) and kind[1] == size for size, kind in zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.usefixtures("fake_graphs")
def test_a_replayed_part_gives_the_tensor_that_was_captured():
    steps, results = CapturedSteps(), [torch.tensor([float(number)]) for number in range(9)]
    calls = iter(results)
    first, captured, replayed = (steps.run("layers", lambda: next(calls)) for _ in range(3))
    assert first is results[0]
    assert captured is replayed is results[1], "a later part was captured over this memory"


@pytest.fixture
def fake_graphs(monkeypatch) -> None:
    class Graph:
        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: nullcontext())
