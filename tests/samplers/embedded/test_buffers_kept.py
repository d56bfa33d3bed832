"""A GPU's room, on a CPU: kept for the next call, padded to few sizes, looked at every sixteen steps."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch

from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.packing.attention import decoder_layers
from proximo.samplers.embedded import EmbeddedSampler, buffers, prefill
from proximo.samplers.embedded import sampler as embedded
from proximo.samplers.embedded.cuda_graphs import CapturedSteps
from proximo.samplers.embedded.merged_projections import joined_layers
from proximo.samplers.embedded.paged import PagedCache
from proximo.samplers.sampler import SamplingOptions, gathered
from proximo.types import Request

TOKENIZER = tiny_tokenizer()
REQUESTS = [Request(key, tuple(range(3 + key, 4 + key + 5 * key)), 5) for key in range(4)]
LONG = SamplingOptions(max_tokens=33)
"""A row that is cut has its last token in the first place beyond two blocks of sixteen."""


class Direct(CapturedSteps):
    """Does each step at once, and notes its kind."""

    kinds: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        """Without a GPU."""

    def run(self, kind: Hashable, step: Callable[[], Any]) -> Any:
        self.kinds.append(kind)
        return step()


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "is_gpu", lambda device: True)
    monkeypatch.setattr(buffers, "has_kernels", lambda shape: True)
    monkeypatch.setattr(buffers, "free_bytes", lambda device: 10**12)
    monkeypatch.setattr(buffers, "CapturedSteps", Direct)
    monkeypatch.setattr(prefill.ModelPasses, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(Direct, "kinds", [])


def model(*ends: int):
    policy = tiny_model(hidden=32, layers=2)
    assert policy.generation_config is not None
    policy.generation_config.eos_token_id = list(ends)
    return policy.double()


def plainly(policy, requests, options, step):
    """As a CPU does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "is_gpu", lambda device: False)
        patch.setattr(prefill.ModelPasses, "on_gpu", property(lambda self: False))
        return EmbeddedSampler(policy, TOKENIZER).sample(requests, options, seed=0, step=step)


def said(answers):
    return [(each.tokens, each.text, each.finish) for siblings in answers for each in siblings]


FEWER = [replace(request, num_samples=2) for request in REQUESTS]
CALLS = [
    (FEWER, LONG),
    (FEWER[:2], replace(LONG, max_tokens=17)),
    (FEWER, replace(LONG, stop=("7", "+"))),
    (FEWER[1:], replace(LONG, max_tokens=1)),
    (FEWER, LONG),
]


@cache
def on_a_cpu():
    """What the calls give, whatever the slots."""
    return [said(plainly(model(*range(1, 9)), *call, step)) for step, call in enumerate(CALLS)]


@pytest.mark.slow("samples as a GPU does")
@pytest.mark.parametrize("slots", [1, 3, 7, 20])
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_calls_one_after_the_other_say_what_a_cpu_says(slots, shared_prefix):
    sampler = EmbeddedSampler(model(*range(1, 9)), TOKENIZER, slots=slots, shared_prefix=shared_prefix)
    lengths = set()
    for step, ((requests, options), expected) in enumerate(zip(CALLS, on_a_cpu(), strict=True)):
        found = said(sampler.sample(requests, options, seed=0, step=step))
        assert found == expected
        lengths |= {len(tokens) for tokens, *_ in found}
    assert len(lengths) > 3  # rows leave at different times


@pytest.mark.slow("samples as a GPU does")
@pytest.mark.parametrize("pages", [4, 6])
def test_rows_that_no_longer_fit_wait_and_say_the_same(monkeypatch, pages):
    """A row at its longest takes two pages and a prompt one: with few pages rows are paused and put back."""
    policy = model().requires_grad_(False)
    per_page = buffers.key_shape(policy).bytes_per_token * buffers.PAGE
    monkeypatch.setattr(buffers, "free_bytes", lambda device: int(pages * per_page / buffers.MEMORY_SHARE) + 1)
    paused, store = [], PagedCache.store
    monkeypatch.setattr(PagedCache, "store", lambda cache, slot: paused.append(slot) or store(cache, slot))
    requests, options = [replace(each, num_samples=2) for each in REQUESTS[:2]], replace(LONG, max_tokens=80)
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=12)
    assert said(sampler.sample(requests, options, seed=0, step=0)) == said(plainly(policy, requests, options, 0))
    assert paused


@pytest.mark.slow("samples as a GPU does")
def test_pages_that_no_call_needs_are_given_back(monkeypatch):
    """Rows end long before the limit: after the first call there are about as many pages as it needed."""
    policy, made = model(*range(1, 30)), []
    real = buffers.BufferPool._made
    monkeypatch.setattr(buffers.BufferPool, "_made", lambda pool, plan: made.append(real(pool, plan)) or made[-1])
    monkeypatch.setattr(buffers, "LARGE", 0)
    options = replace(LONG, max_tokens=1000)
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=20)
    for step in range(3):
        found = said(sampler.sample(REQUESTS, options, seed=0, step=step))
        assert found == said(plainly(policy, REQUESTS, options, step))
    pages = [each.cache.pages for each in made if isinstance(each.cache, PagedCache)]
    assert pages[0] == 4 + 20 * 16
    assert len(pages) == 2
    assert pages[1] <= 31  # a page for each of four prompts and twenty rows, and a quarter more


@pytest.mark.slow("samples as a GPU does")
def test_more_pages_are_taken_after_a_call_that_had_too_few(monkeypatch):
    policy = model()
    requests, options = [replace(each, num_samples=2) for each in REQUESTS[:2]], replace(LONG, max_tokens=80)
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=12)
    real, made = buffers.BufferPool._made, []
    monkeypatch.setattr(buffers.BufferPool, "_made", lambda pool, plan: made.append(real(pool, plan)) or made[-1])
    sampler._buffers._needs[buffers.plan_for(Counter({each.prompt_tokens: 2 for each in requests}), 80, 12)] = 5
    for step in range(3):
        sampler.sample(requests, options, seed=0, step=step)
    assert [each.cache.pages for each in made] == [5, 10]


def test_the_room_for_keys_leaves_what_training_will_take(monkeypatch):
    policy = model()
    weights, shape = sum(each.numel() for each in policy.parameters()), buffers.key_shape(policy)
    pool = EmbeddedSampler(policy, TOKENIZER)._buffers
    free = 40 * weights
    monkeypatch.setattr(buffers, "free_bytes", lambda device: free)
    assert pool._room(shape) == int((40 - 12) * weights * buffers.MEMORY_SHARE) // shape.bytes_per_token
    policy.requires_grad_(False)
    assert pool._room(shape) == int(40 * weights * buffers.MEMORY_SHARE) // shape.bytes_per_token


@pytest.mark.slow("samples as a GPU does")
def test_rows_that_are_cut_write_nowhere_else():
    """None ends by itself, so all stand at their last place while others, which entered later, go on."""
    policy = model()
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=7)
    assert said(sampler.sample(REQUESTS, LONG, seed=0, step=0)) == said(plainly(policy, REQUESTS, LONG, 0))


def test_a_slot_that_a_row_has_left_is_nobodys(monkeypatch):
    """Else what is computed there, from memory that nobody wrote, could say that the model is broken."""
    policy = model(*range(1, 9))
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=20)
    seen = []
    look = buffers.DecodeTable.look

    def watched(table, rows):
        seen.append(int(table.live[rows:].sum()))
        return look(table, rows)

    monkeypatch.setattr(buffers.DecodeTable, "look", watched)
    sampler.sample(REQUESTS, replace(LONG, stop=("7",)), seed=0, step=0)
    assert len(seen) > 2
    assert not any(seen)


@pytest.mark.slow("samples as a GPU does")
def test_a_second_call_while_a_stream_is_open_disturbs_neither():
    policy = model(*range(1, 9))
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=6)
    expected = plainly(policy, REQUESTS, LONG, 0)
    stream = sampler.stream(REQUESTS, LONG, seed=0, step=0)
    first = next(stream)
    assert said(sampler.sample(REQUESTS, LONG, seed=0, step=1)) == said(plainly(policy, REQUESTS, LONG, 1))
    assert said(gathered([first, *stream], len(REQUESTS))) == said(expected)


@pytest.mark.slow("samples as a GPU does")
def test_a_stream_that_is_left_and_a_model_that_fails_leave_no_trace():
    policy = model(*range(1, 9))
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=6)
    next(sampler.stream(REQUESTS, LONG, seed=0, step=3))
    layer = policy.get_submodule("model.layers.1")
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("out of memory")

    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.sample(REQUESTS, LONG, seed=0, step=4)
    handle.remove()
    assert said(sampler.sample(REQUESTS, LONG, seed=0, step=0)) == said(plainly(policy, REQUESTS, LONG, 0))


@pytest.mark.slow("samples as a GPU does")
def test_a_room_is_kept_and_its_steps_have_few_kinds():
    policy = model(*range(1, 9))
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=20)
    with torch.no_grad():
        for step in range(3):
            sampler.sample(REQUESTS, replace(LONG, stop=("7",) if step else ()), seed=0, step=step)
    kinds = set(Direct.kinds)
    assert {size for size, _ in kinds} <= {1, 2, 4, 8, 16, 20}
    assert len({options for _, options in kinds}) == 1  # what is read by the host is no part of a step


@pytest.mark.slow("samples as a GPU does")
def test_weights_that_are_laid_side_by_side_are_so_before_the_first_room(monkeypatch):
    """Else the first room, and all that was captured in it, would be thrown away by the second call."""
    policy = model(*range(1, 9))
    moved = []

    def compiled(policy):
        before = [weight.data_ptr() for weight in policy.parameters()]
        joined_layers(decoder_layers(policy))
        moved.append(before != [weight.data_ptr() for weight in policy.parameters()])

    monkeypatch.setattr(embedded, "compiled_states", compiled)
    made = []
    real = buffers.BufferPool._made
    monkeypatch.setattr(buffers.BufferPool, "_made", lambda rooms, plan: made.append(plan) or real(rooms, plan))
    sampler = EmbeddedSampler(policy, TOKENIZER, slots=20)
    for step in range(3):
        sampler.sample(REQUESTS, LONG, seed=0, step=step)
    assert moved == [True, False, False]
    assert len(made) == 1
