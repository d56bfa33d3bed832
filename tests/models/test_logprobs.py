"""Log-probs and entropy from hidden states in chunks, against log_softmax of all logits at once."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from proximo.models import logprobs as module
from proximo.models.logprobs import gradient_once, project, read_once, token_logprobs

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def example(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return states, weight, targets


def naive(states, weight, targets, temperature):
    everything = (states @ weight.T / temperature).log_softmax(-1)
    return everything.gather(-1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def test_two_words_by_hand():
    # Logits 1 and 0 for words 0 and 1; at temperature 1 word 0 has probability e / (e + 1).
    states, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [0.0]])
    logprobs, entropy = token_logprobs(states, weight, torch.tensor([0, 1]), temperature=1.0, byte_budget=2**20)
    p = math.e / (math.e + 1)
    assert_close(logprobs, torch.tensor([math.log(p), math.log(1 - p)]))
    assert_close(entropy, torch.full((2,), -p * math.log(p) - (1 - p) * math.log(1 - p)))


@pytest.mark.parametrize("kept_chunks", [0, 1, 2, 9])
@pytest.mark.parametrize("compiled", [True, False])
def test_kept_logits_are_those_that_would_be_computed_again(compiled, kept_chunks, monkeypatch):
    monkeypatch.setattr(module, "_compiled_passes", lambda: module._Passes(read_once, gradient_once, normalises=False))
    products = []
    monkeypatch.setattr(module, "project", lambda *given: products.append(given) or project(*given))
    states, weight, targets = example()
    chunk = 3 * VOCABULARY * 4  # 3 of 7 rows: three chunks
    options = {"temperature": 0.7, "byte_budget": chunk, "kept_bytes": kept_chunks * chunk, "compiled": compiled}
    logprobs, _ = token_logprobs(states, weight, targets, **options)
    assert len(products) == 3
    found = torch.autograd.grad(logprobs.sum(), (states, weight))
    logits = [given for given in products if given[1].shape == (WIDTH, VOCABULARY)]
    assert len(logits) == 3 + max(3 - kept_chunks, 0)
    expected = torch.autograd.grad(naive(states, weight, targets, 0.7)[0].sum(), (states, weight))
    assert_close(found, expected)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_on_a_cpu_kept_logits_change_no_bit(entropy_gradient):
    states, weight, targets = (each.float() if each.is_floating_point() else each for each in example())
    states, weight = states.detach().requires_grad_(), weight.detach().requires_grad_()

    def gradients(kept_bytes: int | None) -> tuple[Tensor, ...]:
        options = {"temperature": 0.7, "byte_budget": 3 * VOCABULARY * 4, "entropy_gradient": entropy_gradient}
        logprobs, entropy = token_logprobs(states, weight, targets, kept_bytes=kept_bytes, **options)
        return torch.autograd.grad((logprobs * 3 + entropy).sum(), (states, weight))

    for kept, again in zip(gradients(None), gradients(0), strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_on_a_cpu_logits_are_kept_only_for_a_backward_pass(mode, monkeypatch):
    kept = []
    monkeypatch.setattr(
        module._TokenLogprobs,
        "apply",
        lambda *given: kept.append(given[5]) or (torch.zeros(TOKENS), torch.zeros(TOKENS)),
    )
    with mode():
        token_logprobs(*example(), temperature=1.0)
    assert (kept[0] > 0) == (mode is torch.enable_grad)


def test_temperature_divides_the_logits():
    states, weight = torch.tensor([[1.0]]), torch.tensor([[1.0], [0.0]])
    logprobs, _ = token_logprobs(states, weight, torch.tensor([0]), temperature=0.5, byte_budget=2**20)
    assert_close(logprobs, torch.tensor([2.0 - math.log(math.exp(2.0) + 1)]))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_all_logits_at_once(rows, temperature, entropy_gradient):
    states, weight, targets = example()
    on_logprobs, on_entropy = torch.linspace(-1, 2, TOKENS), torch.linspace(0.5, -1, TOKENS) * entropy_gradient

    logprobs, entropy = token_logprobs(
        states,
        weight,
        targets,
        temperature=temperature,
        byte_budget=rows * VOCABULARY * 4,
        entropy_gradient=entropy_gradient,
    )
    loss = (logprobs * on_logprobs).sum() + (entropy * on_entropy).sum()
    found = torch.autograd.grad(loss, (states, weight))

    expected_logprobs, expected_entropy = naive(states, weight, targets, temperature)
    expected = (expected_logprobs * on_logprobs).sum() + (expected_entropy * on_entropy).sum()
    assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-12)
    assert_close(entropy, expected_entropy, rtol=0, atol=1e-12)
    assert_close(found, torch.autograd.grad(expected, (states, weight)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_what_a_gpu_compiles_is_the_same(temperature, entropy_gradient, monkeypatch):
    """Uncompiled here: that it can be compiled is tested where types are not checked, and on a GPU."""

    def found():
        states, weight, targets = example()
        logprobs, entropy = token_logprobs(
            states,
            weight,
            targets,
            temperature=temperature,
            byte_budget=3 * VOCABULARY * 4,
            entropy_gradient=entropy_gradient,
        )
        loss = (logprobs * torch.linspace(-1, 2, TOKENS)).sum()
        if entropy_gradient:
            loss = loss + (entropy * torch.linspace(0.5, -1, TOKENS)).sum()
        return logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, (states, weight))

    plain = found()
    monkeypatch.setattr(module, "_PLAIN", module._Passes(read_once, gradient_once, normalises=False))
    assert_close(found(), plain, rtol=0, atol=1e-12)


def test_rare_words_are_no_trouble_to_one_pass():
    # exp(−1000) is 0: its part of the entropy is 0, and its log-prob is what it is.
    logits = torch.tensor([[0.0, -1000.0], [1000.0, 1000.0]])
    logprobs, entropy, normaliser = read_once(logits, torch.tensor([1, 0]), 1.0)
    assert_close(logprobs, torch.tensor([-1000.0, -math.log(2)]))
    assert_close(entropy, torch.tensor([0.0, math.log(2)]))
    assert_close(normaliser, torch.tensor([0.0, 1000 + math.log(2)]))


def test_the_chunk_is_the_devices_choice_unless_given(monkeypatch):
    sizes = []

    def watching(left, right):
        sizes.append(len(left))
        return left @ right

    monkeypatch.setattr("proximo.models.logprobs.project", watching)
    monkeypatch.setattr("proximo.models.logprobs.ELSEWHERE", 5 * VOCABULARY * 4)
    states, weight, targets = example()
    token_logprobs(states, weight, targets, temperature=1.0)
    assert sizes == [5, 2]


def test_gradients_agree_with_finite_differences():
    states, weight, targets = example(seed=1)

    def both(states, weight):
        return token_logprobs(states, weight, targets, temperature=0.8, byte_budget=1, entropy_gradient=True)

    assert torch.autograd.gradcheck(both, (states, weight))


def test_entropy_has_no_gradient_unless_asked():
    states, weight, targets = example()
    logprobs, entropy = token_logprobs(states, weight, targets, temperature=1.0, byte_budget=2**20)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_a_frozen_side_gets_no_gradient():
    states, weight, targets = example()
    logprobs, _ = token_logprobs(states, weight.detach(), targets, temperature=1.0, byte_budget=1)
    (found,) = torch.autograd.grad(logprobs.sum(), states)
    (expected,) = torch.autograd.grad(naive(states, weight, targets, 1.0)[0].sum(), states)
    assert_close(found, expected)


def test_never_holds_all_logits(monkeypatch):
    sizes = []

    def watching(left, right):
        sizes.append(left.shape[0] * right.shape[1])
        return left @ right

    monkeypatch.setattr("proximo.models.logprobs.project", watching)
    states, weight, targets = example()
    token_logprobs(states, weight, targets, temperature=1.0, byte_budget=2 * VOCABULARY * 4)
    assert sizes == [2 * VOCABULARY, 2 * VOCABULARY, 2 * VOCABULARY, VOCABULARY]


def test_no_tokens_at_all():
    states, weight, targets = example()
    logprobs, entropy = token_logprobs(states[:0], weight, targets[:0], temperature=1.0, byte_budget=2**20)
    assert logprobs.shape == entropy.shape == (0,)
    assert torch.autograd.grad(logprobs.sum(), weight)[0].count_nonzero() == 0


def test_half_precision_is_summed_in_float32():
    # 256 + 1 is not a bfloat16 number: rounded logits would tie, and the log-prob be log(1/2).
    states, weight = torch.tensor([[1.0, 1.0]]), torch.tensor([[256.0, 1.0], [256.0, 0.0]])
    halves = states.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(*halves, torch.tensor([1]), temperature=1.0, byte_budget=2**20)
    assert logprobs.dtype == torch.float32
    assert_close(logprobs, torch.tensor([-math.log(1 + math.e)], dtype=torch.float32))
    found = torch.autograd.grad(logprobs.sum(), halves)
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_project_keeps_the_precision_it_is_given(dtype):
    assert project(torch.ones(2, 3, dtype=dtype), torch.ones(3, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_has_no_logprobs(temperature):
    states, weight, targets = example()
    with pytest.raises(ValueError, match="temperature is"):
        token_logprobs(states, weight, targets, temperature=temperature, byte_budget=2**20)
