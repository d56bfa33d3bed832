"""Completions that are not finished: what is known of them when they are interrupted, and how they continue."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from proximo.samplers.engines.pool import Dropped
from proximo.samplers.in_progress import Begun, BegunRequests, digest
from proximo.types import Completion, Request
from tests.samplers.engines.conformance import SmallPolicy
from tests.samplers.engines.test_fleet import LONG, Kit

STEP, VERSION = 2, 3


@pytest.fixture(scope="module")
def policy() -> SmallPolicy:
    return SmallPolicy()


@pytest.fixture
def kits(policy) -> Iterator[list[Kit]]:
    made = [Kit(policy), Kit(policy)]
    for each in made:
        each.fleet.refresh(policy, VERSION)
    yield made
    for each in made:
        each.fleet.close()


def asked(kit: Kit, request: Request, version: int = VERSION) -> tuple[Completion, ...]:
    [(_, siblings)] = kit.fleet.stream([request], LONG, seed=1, step=STEP, version=version)
    return siblings


def interrupted(kit: Kit, request: Request) -> tuple[Begun, ...]:
    """What is known of a request's samples when they were interrupted; then it is given up."""
    kit.fleet.begun.open(STEP, request.key)
    for each in kit.made:
        each.does, each.stays = "wait for a pause", True
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(asked, kit, request)
        while sum(each._running for each in kit.made) < 2:
            assert not stream.done()
        assert [each.tokens for each in kit.fleet.begun.of_group(STEP, request.key)] == []
        kit.fleet.begun.interrupt()
        found = kit.fleet.begun.of_group(STEP, request.key)
        kit.fleet.drop(STEP, request.key)
        with pytest.raises(Dropped):
            stream.result()
    kit.fleet.begun.close(STEP, request.key)
    assert kit.fleet.begun.of_group(STEP, request.key) == ()
    return found


@pytest.mark.slow("starts engines")
def test_a_completion_continues_on_another_fleet_behind_the_tokens_that_are_known(kits):
    first, second = kits
    request = replace(first.requests()[0], num_samples=2)
    known = interrupted(first, request)
    assert sorted((each.sample, each.finish) for each in known) == [(0, "abort"), (1, "abort")]
    assert all(1 <= len(each.tokens) <= 2 and each.prompt == digest(request.prompt_tokens) for each in known)
    second.fleet.refresh(second.policy, VERSION + 1)
    second.fleet.begun.open(STEP, request.key, known)
    found = asked(second, request)
    for each in known:
        completion, count = found[each.sample], len(each.tokens)
        assert completion.tokens[:count] == each.tokens
        assert completion.logprobs[:count] == each.logprobs
        assert each.versions == (VERSION,) * count
        rest = len(completion.tokens) - count
        assert rest > 0
        assert (completion.version, completion.versions) == (VERSION, each.versions + (VERSION + 1,) * rest)
    # What has ended is answered without an engine.
    ended = second.fleet.begun.of_group(STEP, request.key)
    assert [each.finish in ("stop", "length") for each in ended] == [True, True]
    for each in second.made:
        each.stop()
    assert asked(second, request) == found


@pytest.mark.slow("starts engines")
def test_tokens_behind_another_prompt_are_not_used(kits):
    kit = kits[0]
    request = replace(kit.requests()[0], num_samples=1)
    alone = asked(kit, request)
    other = Begun(request.key, 0, digest((1, 2, 3)), (5, 5), (0.0, 0.0), (0, 0), "abort")
    kit.fleet.begun.open(STEP, request.key, [other])
    assert asked(kit, request) == alone


def test_only_groups_that_are_open_are_kept():
    kept = BegunRequests(lambda: None)
    begun = Begun(7, 0, digest((1,)), (5,), (0.0,), (0,), "abort")
    kept.note(0, 7, begun)
    assert kept.of_group(0, 7) == ()
    kept.open(0, 7)
    kept.note(0, 7, begun)
    kept.note(0, 7, replace(begun, tokens=(5, 6)))
    assert [each.tokens for each in kept.of_group(0, 7)] == [(5, 6)]
    assert kept.find(0, 7, (7, 0), (1,)) == replace(begun, tokens=(5, 6))
    assert kept.find(0, 7, (7, 0), (2,)) is kept.find(0, 7, (7, 1), (1,)) is kept.find(1, 7, (7, 0), (1,)) is None
