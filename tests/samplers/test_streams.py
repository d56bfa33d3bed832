"""Streams of the engines: whole requests, as soon as they have ended, the same as the list."""

import pytest
import torch
from transformers import PreTrainedModel

from proximo.learner.policy import PlainPolicy
from proximo.models import prompt_tokens, tiny_model, tiny_tokenizer
from proximo.samplers.embedded import EmbeddedSampler, local_sampler
from proximo.samplers.mismatched import Mismatched, MismatchedSampler
from proximo.samplers.partial import PartialCompletion
from proximo.samplers.plain import PlainSampler
from proximo.samplers.sampler import SamplingOptions, gathered
from proximo.types import Completion, Request

TOKENIZER = tiny_tokenizer()
OPTIONS = SamplingOptions(max_tokens=12)
TEXTS = ("1+1=", "a", "the sum of 12 and 30 is ", "99*3=", "x")
REQUESTS = [Request(100 + i, prompt_tokens(TOKENIZER, text), 4) for i, text in enumerate(TEXTS)]
ENGINES = ["embedded", "plain", "mismatched"]


def model_of(engine: str) -> PreTrainedModel:
    model = tiny_model(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
    if engine == "plain":
        model.set_attn_implementation("sdpa")
    return model


def sampler_of(engine: str, model: PreTrainedModel, slots: int) -> EmbeddedSampler | PlainSampler | MismatchedSampler:
    if engine == "mismatched":
        return MismatchedSampler(PlainPolicy(model), TOKENIZER, Mismatched("bfloat16"), slots=slots)
    kind = {"embedded": EmbeddedSampler, "plain": PlainSampler}[engine]
    sampler = local_sampler(model, TOKENIZER, slots=slots)
    assert isinstance(sampler, kind)
    return sampler


def test_gathered_is_in_the_order_of_the_requests():
    first, second = ((Completion((token,), (-0.1,), "", "stop"),) for token in (1, 2))
    assert gathered(iter([(1, second), (0, first)]), 2) == [first, second]
    with pytest.raises(KeyError):
        gathered(iter([(1, second)]), 2)


@pytest.mark.slow("draws many completions")
@pytest.mark.parametrize("slots", [3, 7, 64])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_is_the_list_and_repeats_in_its_order(engine, slots):
    sampler = sampler_of(engine, model_of(engine), slots)
    streams = [list(sampler.stream(REQUESTS, OPTIONS, seed=1, step=2, version=3)) for _ in range(2)]
    assert streams[0] == streams[1]
    assert sorted(number for number, _ in streams[0]) == [0, 1, 2, 3, 4]
    listed = sampler.sample(REQUESTS, OPTIONS, seed=1, step=2, version=3)
    assert dict(streams[0]) == dict(enumerate(listed))
    assert [len(siblings) for siblings in listed] == [4] * 5


@pytest.mark.parametrize("engine", ENGINES)
def test_between_two_groups_everything_is_as_the_caller_left_it(engine):
    model = model_of(engine)
    sampler = sampler_of(engine, model, slots=3)
    model.train()
    model.get_submodule("model.norm").eval()
    before = [module.training for module in model.modules()]
    for _ in sampler.stream(REQUESTS, OPTIONS, seed=0, step=0):
        assert [module.training for module in model.modules()] == before
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert torch.ones(1, requires_grad=True).mul(2).requires_grad


def test_the_plain_sampler_gives_each_group_as_soon_as_its_last_row_has_ended():
    model = model_of("plain")
    passes: list[tuple[int, int]] = []
    model.get_submodule("model.embed_tokens").register_forward_pre_hook(
        lambda module, args: passes.append(tuple(args[0].shape))
    )
    options = SamplingOptions(max_tokens=1)  # each batch is one pass: over its prompts
    requests = [Request(0, (5, 6, 7), 4), Request(1, (8,), 1), Request(2, (9,), 4), Request(3, (4, 3, 2), 2)]
    stream = PlainSampler(model, TOKENIZER, slots=3).stream(requests, options, seed=0, step=0)
    seen = [(number, len(siblings), len(passes)) for number, siblings in stream]
    # The five rows of one token first, in two batches of which request 1 is in the first; then the six of three.
    assert passes == [(3, 1), (2, 1), (3, 3), (3, 3)]
    assert seen == [(1, 1, 1), (2, 4, 2), (0, 4, 4), (3, 2, 4)]


def test_a_stream_of_a_mismatched_sampler_loads_its_weights_when_it_starts():
    model = model_of("mismatched")
    sampler = MismatchedSampler(PlainPolicy(model), TOKENIZER, Mismatched(lag=1))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    exact = local_sampler(model, TOKENIZER).sample(REQUESTS, OPTIONS, seed=0, step=0)
    for version in (1, 2):
        sampler.refresh(PlainPolicy(model), version)
    found = dict(sampler.stream(REQUESTS, OPTIONS, seed=0, step=0, version=99))
    assert [[each.tokens for each in found[number]] for number in range(5)] == [
        [each.tokens for each in siblings] for siblings in exact
    ]
    assert {each.version for siblings in found.values() for each in siblings} == {1}


@pytest.mark.parametrize("engine", ["embedded", "plain"])
def test_a_listener_hears_every_token_and_may_end_a_row(engine: str):
    model = model_of(engine)
    sampler = local_sampler(model, TOKENIZER, slots=4)
    whole = gathered(sampler.stream(REQUESTS[:2], OPTIONS, seed=1, step=0), 2)
    heard: dict[tuple[int, int], list[int]] = {}

    def listener(partial: PartialCompletion) -> bool:
        tokens = heard.setdefault((partial.key, partial.sample), [])
        tokens.append(partial.tokens[-1])
        return len(tokens) < 5 or partial.key != 101

    ended = gathered(sampler.stream(REQUESTS[:2], OPTIONS, seed=1, step=0, listener=listener), 2)
    for key, before, after in zip((100, 101), whole, ended, strict=True):
        for sample, (first, second) in enumerate(zip(before, after, strict=True)):
            limit = 5 if key == 101 else len(first.tokens)
            assert second.tokens == first.tokens[:limit]
            # Of tokens that end a row by themselves there is nothing to decide.
            assert tuple(heard[key, sample]) == second.tokens[: limit if key == 101 else len(first.tokens) - 1]
            assert second.finish == ("stop" if len(first.tokens) > limit else first.finish)
