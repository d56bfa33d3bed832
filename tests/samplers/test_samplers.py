"""The engines: what they draw is what the learner scores, in any company and any number of slots."""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from proximo.models import prompt_tokens, score, tiny_model, tiny_tokenizer
from proximo.samplers.embedded import EmbeddedSampler, local_sampler
from proximo.samplers.plain import PlainSampler
from proximo.samplers.sampler import Sampler, SamplingOptions
from proximo.types import Completion, Request

TOKENIZER = tiny_tokenizer()
OPTIONS = SamplingOptions(max_tokens=12)
TEXTS = ("1+1=", "a", "the sum of 12 and 30 is ", "99*3=", "x")
REQUESTS = [Request(100 + i, prompt_tokens(TOKENIZER, text), 4) for i, text in enumerate(TEXTS)]


def sharp_model(ends: list[int] | None = None) -> PreTrainedModel:
    """Random weights whose attention matters and whose greedy text varies; tokens in `ends` end a completion."""
    model = tiny_model(hidden=32, layers=3, heads=4, kv_heads=2, intermediate=48)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(15)
        for weights in model.get_submodule("model.layers").parameters():
            weights.mul_(10 if weights.dim() == 2 else 1)
    model.generation_config = GenerationConfig(eos_token_id=ends or [TOKENIZER.eos_token_id])
    return model


def plain_model(ends: list[int] | None = None) -> PreTrainedModel:
    model = sharp_model(ends)
    model.set_attn_implementation("sdpa")
    return model


def tiny_gpt2() -> PreTrainedModel:
    """Learned positions, no key-value sharing: outside the fast path."""
    size = len(TOKENIZER)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=size, n_positions=64, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(5 if weights.dim() == 2 else 1)
    return model.eval()


def full_forward(model: PreTrainedModel, prompt: tuple[int, ...], completion: Completion, temperature: float = 1.0):
    """Log-probs and entropies of a completion from one unpadded forward pass over all of it, no cache."""
    tokens = torch.tensor([prompt + completion.tokens])
    with torch.no_grad():
        logprobs = (model(tokens).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def assert_scored_alike(model, requests, completions, temperature=1.0):
    for request, siblings in zip(requests, completions, strict=True):
        assert len(siblings) == request.num_samples
        for completion in siblings:
            expected, entropy = full_forward(model, request.prompt_tokens, completion, temperature)
            assert len(completion.logprobs) == len(completion.tokens)
            torch.testing.assert_close(torch.tensor(completion.logprobs).float(), expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(completion.entropies).float(), entropy, atol=1e-5, rtol=0)


def record_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Filled with the [rows, positions] of every forward pass to come."""
    shapes: list[tuple[int, int]] = []
    model.get_submodule("model.embed_tokens").register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape))
    )
    return shapes


def rows(completions):
    return [completion.tokens for siblings in completions for completion in siblings]


def num_differing(ours, theirs):
    return sum(left != right for left, right in zip(rows(ours), rows(theirs), strict=True))


@pytest.mark.parametrize("shared_prefix", [None, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_learners(temperature, shared_prefix):
    options = replace(OPTIONS, temperature=temperature)
    sampler = EmbeddedSampler(sharp_model(), TOKENIZER, shared_prefix=shared_prefix)
    completions = sampler.sample(REQUESTS, options, seed=0, step=0)
    assert_scored_alike(plain_model(), REQUESTS, completions, temperature)

    lengths = torch.tensor([len(tokens) for tokens in rows(completions)])
    scores = score(
        sharp_model(),
        prompts=[request.prompt_tokens for request in REQUESTS],
        tokens=pad_sequence([torch.tensor(tokens) for tokens in rows(completions)], batch_first=True),
        lengths=lengths,
        group=torch.arange(len(REQUESTS)).repeat_interleave(4),
        temperature=temperature,
    )
    ours = [torch.tensor(each.logprobs).float() for siblings in completions for each in siblings]
    torch.testing.assert_close(pad_sequence(ours, batch_first=True), scores.logprobs, atol=1e-5, rtol=0)
    ours = [torch.tensor(each.entropies).float() for siblings in completions for each in siblings]
    torch.testing.assert_close(pad_sequence(ours, batch_first=True), scores.entropy, atol=1e-5, rtol=0)


def test_equal_calls_are_bit_equal():
    sampler = EmbeddedSampler(sharp_model(), TOKENIZER)
    first, second = (sampler.sample(REQUESTS, OPTIONS, seed=3, step=4) for _ in range(2))
    assert first == second
    entropies = [[each.entropies for siblings in found for each in siblings] for found in (first, second)]
    assert entropies[0] == entropies[1]


def test_siblings_seeds_steps_keys_and_prompts_differ():
    sampler = EmbeddedSampler(sharp_model(), TOKENIZER)
    request = Request(7, REQUESTS[0].prompt_tokens, 8)
    first = sampler.sample([request], OPTIONS, seed=0, step=0)
    assert len(set(rows(first))) == 8
    others = [
        sampler.sample([request], OPTIONS, seed=1, step=0),
        sampler.sample([request], OPTIONS, seed=0, step=1),
        sampler.sample([replace(request, key=8)], OPTIONS, seed=0, step=0),
    ]
    assert not set(rows(first)) & {tokens for other in others for tokens in rows(other)}


def test_a_request_alone_draws_what_it_draws_among_others():
    sampler = EmbeddedSampler(sharp_model(), TOKENIZER)
    together = sampler.sample(REQUESTS, OPTIONS, seed=0, step=0)
    alone = [sampler.sample([request], OPTIONS, seed=0, step=0)[0] for request in REQUESTS]
    # Rounding may turn a draw that lies on an edge, once in about a million tokens.
    assert num_differing(together, alone) <= 1
    assert_scored_alike(plain_model(), REQUESTS, alone)


@pytest.mark.slow("draws many completions")
@pytest.mark.parametrize("shared_prefix", [None, True])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_waiting_rows_take_the_slots_of_finished_ones(slots, shared_prefix):
    ends = list(range(1, 12))
    enough = EmbeddedSampler(sharp_model(ends), TOKENIZER).sample(REQUESTS, OPTIONS, seed=0, step=0)
    sampler = EmbeddedSampler(sharp_model(ends), TOKENIZER, slots=slots, shared_prefix=shared_prefix)
    scarce = sampler.sample(REQUESTS, OPTIONS, seed=0, step=0)
    assert len({len(tokens) for tokens in rows(scarce)}) > 5  # rows leave at different times
    assert num_differing(enough, scarce) <= 1
    assert_scored_alike(plain_model(), REQUESTS, scarce)


def test_a_row_that_moves_into_a_younger_one_s_slot_keeps_its_length():
    """How many keys it reads goes by what it has drawn, not by what the row before it in that slot had."""
    limits = (18, 40, 20, 6, 2)  # the fourth takes the first slot, and leaves it to the second, which is older
    requests = [Request(i, prompt_tokens(TOKENIZER, "x"), 1, max_tokens=limit) for i, limit in enumerate(limits)]
    sampler = EmbeddedSampler(sharp_model(), TOKENIZER, slots=3)
    found = sampler.sample(requests, SamplingOptions(max_tokens=40), seed=0, step=0)
    assert [len(completion.tokens) for [completion] in found] == list(limits)
    assert_scored_alike(plain_model(), requests, found)


def test_prompts_are_read_once_and_only_live_rows_are_computed():
    model = sharp_model(list(range(1, 12)))
    shapes = record_shapes(model)
    twins = [*REQUESTS, Request(5, REQUESTS[2].prompt_tokens, 4)]
    completions = EmbeddedSampler(model, TOKENIZER, slots=6).sample(twins, OPTIONS, seed=0, step=0)
    lengths = [len(tokens) for tokens in rows(completions)]
    # A row's first token comes from its prompt and its last is never fed: the rest are one forward row each.
    prompts, decoded = len(TEXTS), sum(lengths) - len(lengths)
    assert sum(count for count, _ in shapes) == prompts + decoded
    assert max(count for count, _ in shapes) <= 6


def test_large_prefills_are_split(monkeypatch):
    monkeypatch.setattr("proximo.samplers.embedded.prefill.PREFILL_TOKENS", 10)
    model = sharp_model()
    shapes = record_shapes(model)
    completions = EmbeddedSampler(model, TOKENIZER).sample(REQUESTS, OPTIONS, seed=0, step=0)
    # Prompts of 1, 1, 4, 5 and 24 tokens, padded to ten at most; a longer one goes alone.
    assert shapes[:3] == [(2, 1), (2, 5), (1, 24)]
    assert_scored_alike(plain_model(), REQUESTS, completions)


def test_greedy_is_what_transformers_generates():
    ends = [1, 40]
    options = SamplingOptions(temperature=0.0, max_tokens=20)
    completions = EmbeddedSampler(sharp_model(ends), TOKENIZER).sample(REQUESTS, options, seed=0, step=0)
    model = plain_model(ends)
    for request, siblings in zip(REQUESTS, completions, strict=True):
        prompt = torch.tensor([request.prompt_tokens])
        generated = model.generate(  # pyright: ignore[reportCallIssue]
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        expected = tuple(generated[0, prompt.shape[1] :].tolist())
        for completion in siblings:
            assert completion.tokens == expected
            assert completion.logprobs == (0.0,) * len(expected)


def test_truncation_renormalises():
    options = replace(OPTIONS, top_k=3, temperature=0.7)
    completions = EmbeddedSampler(sharp_model(), TOKENIZER).sample(REQUESTS, options, seed=0, step=0)
    reference = plain_model()
    for request, siblings in zip(REQUESTS, completions, strict=True):
        for completion in siblings:
            tokens = torch.tensor([request.prompt_tokens + completion.tokens])
            with torch.no_grad():
                logits = reference(tokens).logits[0, len(request.prompt_tokens) - 1 : -1] / 0.7
            best = logits.topk(3)
            where = best.indices == torch.tensor(completion.tokens)[:, None]
            assert where.any(dim=1).all()
            expected = best.values.log_softmax(-1)[where]
            torch.testing.assert_close(torch.tensor(completion.logprobs).float(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", [EmbeddedSampler, PlainSampler])
def test_endings(engine):
    def sample(ends, **options):
        model = sharp_model(ends) if engine is EmbeddedSampler else plain_model(ends)
        options = SamplingOptions(temperature=0.0, **options)
        [[completion]] = engine(model, TOKENIZER).sample([replace(REQUESTS[0], num_samples=1)], options, seed=0, step=0)
        return completion

    whole = sample(None, max_tokens=12)
    assert whole.finish == "length"
    assert len(whole.tokens) == 12
    assert whole.text == TOKENIZER.decode(list(whole.tokens), skip_special_tokens=True)

    end = whole.tokens[5]
    cut = whole.tokens[: whole.tokens.index(end) + 1]
    ended = sample([1, end], max_tokens=12)
    assert (ended.tokens, ended.finish) == (cut, "stop")

    # End of sequence in the last place allowed is an end, not a cut.
    assert sample([1, end], max_tokens=len(cut)).finish == "stop"
    assert sample([1, end], max_tokens=len(cut) - 1).finish == "length"

    stop = whole.text[3:5]
    stopped = sample(None, max_tokens=12, stop=("never there", stop))
    assert stopped.finish == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert TOKENIZER.decode(list(stopped.tokens), skip_special_tokens=True) == stopped.text + stop
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]


def test_every_first_token_may_be_the_last():
    model = sharp_model(list(range(len(TOKENIZER))))
    completions = EmbeddedSampler(model, TOKENIZER, slots=2).sample(REQUESTS, OPTIONS, seed=0, step=0)
    assert {(len(c.tokens), c.finish) for siblings in completions for c in siblings} == {(1, "stop")}
    one = EmbeddedSampler(sharp_model(), TOKENIZER).sample(REQUESTS, SamplingOptions(max_tokens=1), seed=0, step=0)
    assert [len(tokens) for tokens in rows(one)] == [1] * 20


def test_the_model_is_left_as_it_was():
    model = sharp_model()
    model.train()
    model.get_submodule("model.layers.1").eval()
    before = [module.training for module in model.modules()]
    [[completion]] = EmbeddedSampler(model, TOKENIZER).sample(
        [replace(REQUESTS[0], num_samples=1)], OPTIONS, seed=0, step=0, version=17
    )
    assert [module.training for module in model.modules()] == before
    assert completion.version == 17
    # Nothing of the inference mode stays behind: the next update must find an ordinary model.
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("build", [plain_model, tiny_gpt2])
def test_the_plain_sampler_is_the_same_to_its_caller(build):
    model = build()
    sampler = local_sampler(model, TOKENIZER, slots=6)
    assert isinstance(sampler, PlainSampler)
    completions = sampler.sample(REQUESTS, OPTIONS, seed=0, step=0)
    assert_scored_alike(model, REQUESTS, completions)
    if build is plain_model:
        embedded = local_sampler(sharp_model(), TOKENIZER)
        assert isinstance(embedded, EmbeddedSampler)
        assert num_differing(embedded.sample(REQUESTS, OPTIONS, seed=0, step=0), completions) <= 1


def test_no_requests_no_completions():
    for sampler in (local_sampler(sharp_model(), TOKENIZER), local_sampler(plain_model(), TOKENIZER)):
        assert isinstance(sampler, Sampler)
        assert sampler.sample([], OPTIONS, seed=0, step=0) == []


def test_large_keys_and_seeds_are_welcome():
    sampler = EmbeddedSampler(sharp_model(), TOKENIZER)
    requests = [replace(REQUESTS[0], key=key) for key in (2**64 - 5, -(2**70))]
    assert len(set(rows(sampler.sample(requests, OPTIONS, seed=2**90, step=0)))) == 8


def test_errors_name_the_way_out():
    sampler = EmbeddedSampler(sharp_model(), TOKENIZER)
    with pytest.raises(ValueError, match=r"requests\[1\].prompt_tokens is empty"):
        sampler.sample([REQUESTS[0], Request(0, (), 1)], OPTIONS, seed=0, step=0)
    with pytest.raises(ValueError, match=r"requests\[0\].num_samples is 0"):
        sampler.sample([Request(0, (5,), 0)], OPTIONS, seed=0, step=0)
    with pytest.raises(ValueError, match=r"max_tokens is 5000: the model has 4096 positions"):
        sampler.sample(REQUESTS, SamplingOptions(max_tokens=5000), seed=0, step=0)
    with pytest.raises(ValueError, match="'<eos>', a special token"):
        sampler.sample(REQUESTS, SamplingOptions(stop=("<eos>",)), seed=0, step=0)
    with pytest.raises(ValueError, match="slots is 0"):
        EmbeddedSampler(sharp_model(), TOKENIZER, slots=0)
    with pytest.raises(ValueError, match="sample with PlainSampler"):
        EmbeddedSampler(plain_model(), TOKENIZER)
    with pytest.raises(ValueError, match="sample with EmbeddedSampler"):
        PlainSampler(sharp_model(), TOKENIZER)
    diverged = sharp_model()
    torch.nn.init.constant_(diverged.get_submodule("model.norm").weight, torch.nan)  # pyright: ignore[reportArgumentType]
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="logits are NaN"):
            EmbeddedSampler(diverged, TOKENIZER).sample(
                REQUESTS, replace(OPTIONS, temperature=temperature), seed=0, step=0
            )
