"""Packed scores and gradients equal the padded reference: our attention against transformers' own."""

import warnings
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from proximo.models import PaddedFallback, score, supports_packing, tiny_model
from proximo.models.packing.support import warn_of_fallback

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    # Large weights, so that attention is far from uniform and an error in it cannot hide.
    "initializer_range": 0.3,
}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SHAPE, no_rope_layers=[1, 0])),
}


def build(family: str, dtype: torch.dtype) -> PreTrainedModel:
    kind, config = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        # A copy: a model writes the attention that it is given into its config.
        model = kind._from_config(deepcopy(config), dtype=torch.float64).eval()
    return exact(model).to(dtype=dtype)  # pyright: ignore[reportCallIssue]


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' norms pass through float32; torch's own do not, so that float64 is float64 throughout."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            weight = module.get_parameter("weight")
            norm = nn.RMSNorm(len(weight), eps=1e-6, dtype=weight.dtype)
            norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
            model.set_submodule(name, norm)
    return model


@dataclass(frozen=True)
class Rows:
    prompts: list[list[int]]
    tokens: torch.Tensor
    lengths: torch.Tensor
    group: torch.Tensor

    def at(self, index: list[int]) -> "Rows":
        return Rows(self.prompts, self.tokens[index], self.lengths[index], self.group[index])


def ragged(lengths=(4, 0, 6, 1, 2, 5, 1), group=(2, 0, 1, 2, 0, 1, 3), prompt_lengths=(5, 1, 3, 2)) -> Rows:
    """Several groups in disorder, an empty completion, completions of one token, a prompt of one token."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 23, (length,), generator=generator).tolist() for length in prompt_lengths]
    tokens = torch.randint(2, 23, (len(lengths), max(lengths, default=0) + 1), generator=generator)
    return Rows(prompts, tokens, torch.tensor(lengths), torch.tensor(group))


def scored(model, rows: Rows, **options):
    return score(model, prompts=rows.prompts, tokens=rows.tokens, lengths=rows.lengths, group=rows.group, **options)


def gradients(model, rows: Rows, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a loss that weighs every token, entropy and state differently."""
    scores = scored(model, rows, temperature=0.8, entropy_gradient=True, **options)
    weights = torch.linspace(-1, 1, scores.logprobs.numel(), dtype=model.dtype).view_as(scores.logprobs)
    value = nn.Linear(scores.states.flat.shape[1], 1, bias=False, dtype=model.dtype)
    nn.init.ones_(value.weight)
    values = scores.states.aligned(value(scores.states.flat).squeeze(1))
    loss = (scores.logprobs * weights).sum() + (scores.entropy * weights.flip(0)).sum() + (values * weights**2).sum()
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def furthest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference, relative to each parameter's own gradient."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True) if b.norm() > 1e-9)


@pytest.mark.slow("compares many rows")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_packed_is_padded(family, dtype, tolerance):
    model, rows = build(family, dtype), ragged()
    assert supports_packing(model)
    packed, padded = scored(model, rows), scored(model, rows, layout="padded")
    assert packed.logprobs.dtype == dtype
    assert_close(packed.logprobs, padded.logprobs, rtol=tolerance, atol=tolerance)
    assert_close(packed.entropy, padded.entropy, rtol=tolerance, atol=tolerance)
    assert_close(packed.states.flat, padded.states.flat, rtol=tolerance, atol=tolerance)

    loss, found = gradients(model, rows)
    expected_loss, expected = gradients(model, rows, layout="padded")
    assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    assert furthest(found, expected) < tolerance


def test_rows_in_buckets_of_similar_length_are_the_padded_ones(monkeypatch):
    monkeypatch.setattr("proximo.models.packing.packed.SHORT", 1)
    model, rows = (
        exact(build("llama", torch.float64)),
        ragged(lengths=(9, 0, 20, 1, 2, 5, 1), prompt_lengths=(12, 1, 3, 5)),
    )
    loss, found = gradients(model, rows)
    expected_loss, expected = gradients(model, rows, layout="padded")
    assert_close(loss, expected_loss, rtol=1e-13, atol=1e-13)
    assert furthest(found, expected) < 1e-13


@torch.no_grad()
def test_logprobs_are_those_of_each_sequence_alone():
    model, rows = build("llama", torch.float64), ragged()
    found = scored(model, rows, temperature=0.5).logprobs
    for row, length in enumerate(rows.lengths.tolist()):
        prompt = rows.prompts[int(rows.group[row])]
        sequence = torch.tensor([prompt + rows.tokens[row, :length].tolist()])
        everything = (model(sequence).logits[0] / 0.5).log_softmax(-1)
        expected = [float(everything[len(prompt) + t - 1, rows.tokens[row, t]]) for t in range(length)]
        assert_close(found[row, :length], torch.tensor(expected), rtol=0, atol=1e-9)
        assert found[row, length:].count_nonzero() == 0


def test_order_of_rows_and_company_do_not_matter():
    model, rows = build("qwen3", torch.float64), ragged()
    together = scored(model, rows).logprobs
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 4], [1], [3, 0]):
        assert_close(scored(model, rows.at(order)).logprobs, together[order], rtol=0, atol=1e-9)


def test_micro_batches_add_up_to_the_whole_gradient():
    model, rows = build("qwen2", torch.float64), ragged()

    def gradient(part: Rows) -> list[torch.Tensor]:
        return list(torch.autograd.grad(scored(model, part).logprobs.sum(), list(model.parameters())))

    parts = [gradient(rows.at([0, 3, 6])), gradient(rows.at([1, 4])), gradient(rows.at([2, 5]))]
    assert furthest([sum(three, torch.zeros(())) for three in zip(*parts, strict=True)], gradient(rows)) < 1e-9


def test_only_empty_completions_still_have_a_gradient_of_zero():
    model, rows = build("llama", torch.float32), ragged(lengths=(0, 0), group=(0, 1))
    scores = scored(model, rows)
    assert scores.states.flat.shape == (0, 16)
    scores.logprobs.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_the_model_keeps_its_attention():
    model, rows = build("llama", torch.float32), ragged()
    model.set_attn_implementation("eager")
    for layout in ("packed", "padded"):
        scored(model, rows, layout=layout)
        assert model.config._attn_implementation == "eager"


def test_states_are_what_predicts_each_token():
    model, rows = build("qwen3", torch.float64), ragged()
    scores = scored(model, rows)
    where = scores.states.where
    logprobs = (scores.states.flat @ model.lm_head.weight.T).log_softmax(-1)
    picked = logprobs.gather(-1, rows.tokens[where][:, None])[:, 0]
    assert_close(scores.logprobs[where], picked, rtol=0, atol=1e-12)
    assert where.sum(1).tolist() == rows.lengths.tolist()


def test_the_byte_budget_changes_nothing():
    model, rows = build("llama", torch.float64), ragged()
    _, small = gradients(model, rows, byte_budget=1)
    _, large = gradients(model, rows)
    assert furthest(small, large) < 1e-9


def switch_checkpoints_on(model: PreTrainedModel) -> None:
    """As a user of transformers does, which gave the switch another name in 5.23."""
    usual = "activation_checkpointing_enable"
    getattr(model, usual if hasattr(model, usual) else "gradient_checkpointing_enable")()


def test_gradient_checkpointing_changes_nothing():
    model, rows = tiny_model(hidden=32, layers=2, intermediate=48), ragged()
    _, expected = gradients(model, rows)
    switch_checkpoints_on(model)
    _, found = gradients(model.train(), rows)
    assert furthest(found, expected) < 1e-6


def test_entropy_has_no_gradient_unless_asked():
    for model in (build("llama", torch.float32), gemma()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PaddedFallback)
            assert not scored(model, ragged()).entropy.requires_grad
            assert scored(model, ragged(), entropy_gradient=True).entropy.requires_grad


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"prompts\[1\] has no tokens"):
        scored(build("llama", torch.float32), ragged(prompt_lengths=(5, 0, 3, 2)))


# Models outside the fast path


def gemma() -> PreTrainedModel:
    """Caps its logits, scales its queries and looks through a window: wrong in every respect for the fast path."""
    config = Gemma2Config(**SHAPE, head_dim=4, final_logit_softcapping=2.0, sliding_window=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Gemma2ForCausalLM._from_config(config, dtype=torch.float32).eval()


def test_an_unsupported_model_is_scored_with_its_own_logits_and_says_so_once():
    model, rows = gemma(), ragged()
    assert not supports_packing(model)
    warn_of_fallback.cache_clear()
    with pytest.warns(PaddedFallback, match="Gemma2ForCausalLM"):
        found = scored(model, rows, temperature=0.5)
    assert_close(scored(model, rows, temperature=0.5).logprobs, found.logprobs)  # a second warning would be an error
    row, prompt = 2, rows.prompts[1]
    everything = (model(torch.tensor([prompt + rows.tokens[row, :6].tolist()])).logits[0] / 0.5).log_softmax(-1)
    expected = everything[len(prompt) - 1 : -1].gather(-1, rows.tokens[row, :6, None])[:, 0]
    assert_close(found.logprobs[row, :6], expected, rtol=1e-5, atol=1e-5)
    everything = everything[len(prompt) - 1 : -1]
    assert_close(found.entropy[row, :6], -(everything.exp() * everything).sum(-1), rtol=1e-5, atol=1e-5)


def test_greedy_has_no_scores():
    for model in (build("llama", torch.float32), gemma()):
        with pytest.raises(ValueError, match="temperature is 0.0"):
            scored(model, ragged(), temperature=0.0, layout="padded")


def test_windows_and_biased_heads_are_outside():
    window = MistralForCausalLM._from_config(MistralConfig(**SHAPE, sliding_window=4), dtype=torch.float32)
    assert not supports_packing(window)
    some = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert not supports_packing(Qwen2ForCausalLM._from_config(some, dtype=torch.float32))
    model = build("llama", torch.float32)
    model.set_submodule("lm_head", nn.Linear(16, 23, bias=True))
    assert not supports_packing(model)
