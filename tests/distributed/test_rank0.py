"""What a run on ranks gets of its sampler."""

from types import SimpleNamespace
from typing import Any

from proximo.distributed.rank0 import OnRanks
from proximo.samplers.sampler import RunSamplers, SamplerEvent
from proximo.system.timeline import Interval, Lanes


class Engines:
    """Stands for a sampler with processes of its own."""

    repeats = False

    def refresh(self, policy: Any, version: int) -> int:
        return version

    def stream(self, requests: Any, options: Any, *, seed: int, step: int, version: int = 0) -> Any:
        return iter(())

    def build(self, policy: Any, tokenizer: Any, *, slots: int, record_routes: bool) -> RunSamplers:
        event = SamplerEvent("push", "version 3 reached 2 engines")
        return RunSamplers(
            self,
            self,
            close=self.close,
            take_events=lambda: [event],
            take_intervals=lambda: [Interval("engine-0", "push", 0.0, 1.0)],
            drop=lambda step, key: None,
        )

    def close(self) -> None:
        self.is_closed = True


def test_a_sampler_of_rank_0_is_closed_and_tells_what_happened():
    crew: Any = SimpleNamespace(size=1, mesh=SimpleNamespace(rank=0), add=lambda **orders: None, lanes=Lanes())
    held, engines, tokenizer = OnRanks(crew), Engines(), Any
    held._policy = SimpleNamespace(copy=None, device=None, logprobs=None, weights=None)  # pyright: ignore[reportAttributeAccessIssue]
    found = held.samplers(engines, tokenizer, slots=1, record_routes=False)  # pyright: ignore[reportArgumentType]
    assert [each.kind for each in found.take_events()] == ["push"]
    crew.lanes.add(Interval("rank 1", "update", 0.0, 1.0))
    assert [each.lane for each in found.take_intervals()] == ["engine-0", "rank 1"]
    found.close()
    assert engines.is_closed
    assert found.drop is not None  # engines sample on their own, so that what waits for them can be dropped
    engines.on_every_rank = True  # pyright: ignore[reportAttributeAccessIssue]
    found = held.samplers(engines, tokenizer, slots=1, record_routes=False)  # pyright: ignore[reportArgumentType]
    assert found.drop is None  # ranks sample together, so that one alone cannot leave a group
