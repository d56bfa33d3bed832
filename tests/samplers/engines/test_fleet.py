"""A sampler over engines: what they sample, and what becomes of requests and weights when engines fail."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from proximo.models import score
from proximo.samplers.embedded import local_sampler
from proximo.samplers.engines.embedded import EmbeddedEngine
from proximo.samplers.engines.engine import Draw, EngineLost, Generated, Health
from proximo.samplers.engines.fleet import FleetSampler
from proximo.samplers.engines.pool import Dropped, FleetLost
from proximo.samplers.engines.sync import Folder, Gloo, WeightSync
from proximo.samplers.sampler import Sampler, SamplingOptions
from proximo.system.scratch import Scratch
from proximo.types import Completion, Request
from tests.samplers.engines.conformance import SmallPolicy, nudge
from tests.waiting import wait_until

OPTIONS = SamplingOptions(max_tokens=4)


@pytest.fixture(scope="module")
def shipped() -> SmallPolicy:
    return SmallPolicy()


@pytest.fixture
def policy(shipped) -> Iterator[SmallPolicy]:
    before = {name: each.clone() for name, each in shipped.weights()}
    yield shipped
    for name, each in shipped.weights():
        each.copy_(before[name])


class Sick(EmbeddedEngine):
    """An engine that does something wrong from the moment that it is told to."""

    does: str = ""
    stays: bool = False
    """Whether it does that again after a pause."""
    waiting: int = 0
    """Requests that have two tokens, and wait for a pause or have waited for one."""

    def generate(self, prompt, options, draw, prefix=()) -> Generated:
        if self.does == "die":
            self.stop()
        if self.does == "hang":
            with self._changed:
                self._changed.wait_for(lambda: self._stopped)
        return super().generate(prompt, options, draw, prefix)

    def _decode(self, tokens, options, draw, start) -> Any:
        if self.does != "wait for a pause":
            return super()._decode(tokens, options, draw, start)
        completion, _ = super()._decode(tokens, replace(options, max_tokens=2), draw, start)
        with self._changed:
            self.waiting += 1
            while self._paused is None:
                self._changed.wait(0.01)
        return completion, True

    def pause(self, mode, deadline: float) -> None:
        super().pause(mode, deadline)
        if self.does == "wait for a pause" and not self.stays:
            self.does = ""

    def alive(self, deadline: float) -> Health:
        return Health(False, deadline, "no token") if self.does == "hang" else super().alive(deadline)

    def begin_update(self, deadline: float) -> None:
        if self.does == "refuse":
            raise EngineLost(f"{self.name} was answered with 500")
        super().begin_update(deadline)

    def _load(self, named) -> None:
        """The faults that only log-probs show: its version is the new one after each of them."""
        pairs = list(named)
        if self.does == "half":
            pairs = pairs[: len(pairs) // 2]
        if self.does == "head":
            pairs = [(name, each) for name, each in pairs if "embed" not in name]
        if self.does == "everything":
            pairs = []
        super()._load(pairs)


class Kit:
    """A fleet of engines that can be made sick."""

    def __init__(self, policy: SmallPolicy, sync: WeightSync | None = None, deadline: float = 30.0) -> None:
        self.policy, self.made, self.places, self.fault = policy, [], [], ""
        scratch = Scratch("proximo-test-fleet-")
        self.fleet = FleetSampler(
            policy.model, policy.tokenizer, self.make, sync or Folder(scratch.path), scratch,
            engines=2, slots=4, probe=4, deadline=deadline, repeats=True,
        )  # fmt: skip

    def make(self, name: str, place: int) -> Any:
        self.places.append(place)
        self.made.append(Sick(name, self.policy.model, self.policy.tokenizer))
        self.made[-1].does = self.fault
        return self.made[-1]

    def requests(self) -> list[Request]:
        texts = ("12+7=", "3+8=", "40-1=")
        encode = self.policy.tokenizer
        return [Request(key, tuple(encode(text)["input_ids"]), 2) for key, text in enumerate(texts)]

    def sample(self, version: int = 0) -> dict:
        return dict(self.fleet.stream(self.requests(), OPTIONS, seed=1, step=2, version=version))

    def kinds_of_events(self) -> list[str]:
        return [each.kind for each in self.fleet.take_events()]


@pytest.fixture
def kit(policy) -> Iterator[Kit]:
    made = Kit(policy)
    yield made
    made.fleet.close()


def expected(kit: Kit) -> list:
    return local_sampler(kit.policy.model, kit.policy.tokenizer).sample(kit.requests(), OPTIONS, seed=1, step=2)


@pytest.mark.slow("starts engines")
@pytest.mark.parametrize("sync", ["folder", "gloo"])
def test_a_fleet_samples_what_the_policy_samples(policy, sync):
    kit = Kit(policy, Gloo() if sync == "gloo" else None)
    assert isinstance(kit.fleet, Sampler)
    for engine_version in (3, 4):
        nudge(policy.model, engine_version)
        assert kit.fleet.refresh(policy, engine_version) == engine_version
        found = kit.sample(engine_version)
        assert list(found) == [0, 1, 2]
        for number, siblings in enumerate(expected(kit)):
            for ours, theirs in zip(siblings, found[number], strict=True):
                assert (ours.tokens, ours.text, ours.finish) == (theirs.tokens, theirs.text, theirs.finish)
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
                assert theirs.version == engine_version
    assert kit.kinds_of_events() == ["push", "push"]
    assert [each.version() for each in kit.made] == [4, 4]
    kit.fleet.close()
    assert not any(each.alive(1).alive for each in kit.made)


def test_weights_that_are_there_are_not_pushed_again(kit):
    for _ in range(2):
        kit.fleet.refresh(kit.policy, 0)
    assert kit.kinds_of_events() == ["push"]


@pytest.mark.slow("starts engines and kills one")
def test_requests_of_a_dead_engine_go_to_the_others_with_the_same_draws(kit):
    kit.fleet.refresh(kit.policy, 0)
    whole = kit.sample()
    kit.made[0].does = "die"
    assert kit.sample() == whole
    assert kit.kinds_of_events() == ["push", "engine_lost"]
    kit.fleet.refresh(kit.policy, 0)  # the next push brings a new engine
    assert [each.name for each in kit.made] == ["engine-0", "engine-1", "engine-2"]
    assert kit.places == [0, 1, 0]
    assert kit.kinds_of_events() == ["push"]
    assert kit.sample() == whole


@pytest.mark.slow("starts engines")
def test_an_engine_that_hangs_is_found_by_the_token_that_it_owes(policy):
    kit = Kit(policy, deadline=0.5)
    kit.fleet.refresh(policy, 0)
    whole = kit.sample()
    kit.made[1].does = "hang"
    assert kit.sample() == whole
    [_, lost] = kit.fleet.take_events()
    assert lost.message == "engine-1 hangs: no token"
    assert lost.warns
    kit.fleet.close()


@pytest.mark.slow("starts engines")
@pytest.mark.parametrize("fault", ["half", "head", "everything", "refuse", "hang"])
def test_an_engine_that_is_not_the_policy_after_a_push_is_out(policy, fault):
    kit = Kit(policy, deadline=1.0 if fault == "hang" else 30.0)
    kit.fleet.refresh(policy, 0)
    kit.made[0].does = fault
    nudge(policy.model, 1)
    kit.fleet.refresh(policy, 1)
    lost = [each.message for each in kit.fleet.take_events() if each.kind == "engine_lost"]
    assert len(lost) == 1
    assert "engine-0" in lost[0]
    assert not kit.made[0].alive(1).alive or fault == "hang"
    assert kit.made[0]._stopped  # never resumed
    assert {each.version for siblings in kit.sample(1).values() for each in siblings} == {1}
    kit.fleet.close()


def test_new_engines_get_a_second_chance_where_all_are_lost_in_a_push(kit):
    kit.fleet.refresh(kit.policy, 0)
    for each in kit.made:
        each.does = "head"
    nudge(kit.policy.model, 1)
    assert kit.fleet.refresh(kit.policy, 1) == 1
    assert [each.name for each in kit.made] == ["engine-0", "engine-1", "engine-2", "engine-3"]
    assert kit.kinds_of_events() == ["push", "engine_lost", "engine_lost", "push", "push"]


def test_a_run_ends_where_no_engine_takes_the_policy(kit):
    kit.fault = "refuse"
    with pytest.raises(FleetLost, match="no engine has the policy's weights of version 1: engine-2 was answered with"):
        kit.fleet.refresh(kit.policy, 1)


def test_a_run_ends_where_all_engines_die_and_says_why(kit):
    kit.fleet.refresh(kit.policy, 0)
    for each in kit.made:
        each.does = "die"
    with pytest.raises(FleetLost, match="all engines were lost: engine-. was stopped; engine-. was stopped"):
        kit.sample()


def test_requests_that_come_later_wait_behind_the_others(kit):
    kit.fleet.refresh(kit.policy, 0)
    later = [kit.requests()[1:2], kit.requests()[2:]]
    stream = kit.fleet.stream(
        kit.requests()[:1], OPTIONS, seed=1, step=2, version=0, more=lambda: later.pop(0) if later else ()
    )
    parts = list(stream)
    assert [number for number, _ in parts] == [0, 1, 2]
    assert dict(parts) == kit.sample()


def test_a_stream_that_is_left_early_leaves_no_request_behind(kit):
    kit.fleet.refresh(kit.policy, 0)
    whole = kit.sample()
    stream = kit.fleet.stream(kit.requests(), replace(OPTIONS, max_tokens=60), seed=1, step=2)
    next(stream)
    stream.close()
    assert [each._running for each in kit.made] == [0, 0]
    assert kit.sample() == whole
    assert threading.active_count() < 20


LONG = replace(OPTIONS, temperature=2.0, max_tokens=9)
"""So hot that completions are not over after two tokens."""


def gaps(policy: SmallPolicy, prompt: tuple[int, ...], found: Completion) -> torch.Tensor:
    tokens, group = torch.tensor([found.tokens]), torch.tensor([0])
    lengths = torch.tensor([tokens.shape[1]])
    scores = score(
        policy.model, prompts=[prompt], tokens=tokens, lengths=lengths, group=group, temperature=LONG.temperature
    )
    return (scores.logprobs[0] - torch.tensor(found.logprobs)).abs()


def test_a_push_interrupts_requests_which_continue_with_the_new_weights(kit):
    kit.fleet.refresh(kit.policy, 3)
    for each in kit.made:
        each.does = "wait for a pause"
    [request, *_] = kit.requests()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: list(kit.fleet.stream([request], LONG, seed=1, step=2, version=3)))
        # Running is not enough: a pause may come after one token.
        wait_until(lambda: sum(each.waiting for each in kit.made) == 2)
        assert not asked.done()
        old = {name: each.clone() for name, each in kit.policy.weights()}
        nudge(kit.policy.model, 1, size=0.3)
        kit.fleet.refresh(kit.policy, 4)
        [(_, siblings)] = asked.result()
    new = [gaps(kit.policy, request.prompt_tokens, each) for each in siblings]
    for name, each in kit.policy.weights():
        each.copy_(old[name])
    old = [gaps(kit.policy, request.prompt_tokens, each) for each in siblings]
    for found in siblings:
        assert (found.version, found.versions) == (3, (3, 3) + (4,) * (len(found.tokens) - 2))
        assert len(found.tokens) > 2
    before = [torch.cat([each[:2] for each in under]).max() for under in (old, new)]
    after = [torch.cat([each[2:] for each in under]).max() for under in (old, new)]
    assert before[0] <= 1e-4 < 1e-2 < before[1]
    assert after[1] <= 1e-4 < 1e-2 < after[0]


def test_requests_that_are_given_up_end_and_the_others_continue(kit):
    kit.fleet.refresh(kit.policy, 0)
    for each in kit.made:
        each.does = "wait for a pause"
    first, second, _ = kit.requests()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(list, kit.fleet.stream([each], LONG, seed=1, step=2)) for each in (first, second)]
        wait_until(lambda: sum(each.waiting for each in kit.made) == 4)
        assert not any(each.done() for each in asked)
        kit.fleet.drop(7, first.key)  # of another step
        kit.fleet.drop(2, first.key)
        with pytest.raises(Dropped):
            asked[0].result()
        [(_, siblings)] = asked[1].result()
    assert all(len(each.tokens) > 2 and each.versions == () for each in siblings)
    assert kit.fleet._streams == {}


def test_a_draw_is_one_number_of_63_bits_in_which_every_part_counts():
    draws = [Draw(0, 0, 0, 0, 0), *(replace(Draw(0, 0, 0, 0, 0), **{name: 1}) for name in vars(Draw(0, 0, 0, 0)))]
    numbers = {each.number for each in draws}
    assert len(numbers) == 6
    assert all(0 <= each < 2**63 for each in numbers)


def test_the_oldest_span_is_a_completion_s_version():
    from proximo.samplers.engines.engine import Span

    assert Generated((1, 2), (0.0, 0.0), "stop", (Span(4, 0, 1), Span(3, 1, 2))).version == 3


def test_greedy_log_probs_are_zero_as_in_every_sampler(kit):
    kit.fleet.refresh(kit.policy, 0)
    found = dict(kit.fleet.stream(kit.requests(), replace(OPTIONS, temperature=0.0), seed=1, step=2))
    assert {value for siblings in found.values() for each in siblings for value in each.logprobs} == {0.0}


def test_a_probe_that_is_longer_than_the_model_is_refused(policy):
    from proximo.samplers.engines.probe import LogprobProbe

    with pytest.raises(ValueError, match="sampler.probe is 99999999.*give fewer"):
        LogprobProbe(policy.model, 99_999_999)
    assert torch.tensor(LogprobProbe(policy.model, 4).prompts).unique(dim=0).shape[0] == 4
