"""LoRA: base plus adapter in every pass, exact gradients, and a reference that is the same model without it."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

from proximo import presets
from proximo.algorithms import GRPO, PPO
from proximo.api.training import train
from proximo.learner.learner import Learner
from proximo.learner.lora import LoraPolicy
from proximo.learner.options import LearnerOptions
from proximo.learner.passes import Passes
from proximo.losses import KlLoss
from proximo.models import score, tiny_model, tiny_moe, tiny_tokenizer, with_precision
from proximo.models.adapters.lora import Lora, adapter_off, adapter_parameters, add_lora, merge
from proximo.models.adapters.targets import names_for_peft, target_layers
from proximo.models.compiling import checkpoint_layers
from proximo.models.packing.attention import NAME, hidden_states
from proximo.models.values import OwnLayers, TrunkHead, value_model
from proximo.rl.assemble import assemble, to_batch
from proximo.rl.config import EvaluationOptions
from proximo.samplers.embedded import EmbeddedSampler, cuda_graphs
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Request
from tests.learner.test_moe import small_moe
from tests.learner.test_values import groups
from tests.models.test_scoring import FAMILIES, build, ragged, scored

RANK, ALPHA = 3, 7
LORA = Lora(rank=RANK, alpha=ALPHA)


def small():
    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1)


@torch.no_grad()
def stirred(model: nn.Module, scale: float = 0.3) -> None:
    """An adapter that changes something: its B starts at 0."""
    random = torch.Generator().manual_seed(8)
    for name, parameter in adapter_parameters(model).items():
        if name.endswith("lora_B.weight"):
            parameter.copy_(scale * torch.randn(parameter.shape, generator=random))


def adapted(model, scale: float = 0.3):
    """The model with an adapter, and a plain one whose weights are written here as W + (alpha / rank) B A."""
    plain = copy.deepcopy(model)
    add_lora(model, LORA, base="base", seed=4)
    stirred(model, scale)
    known = adapter_parameters(model)
    with torch.no_grad():
        for name, module in plain.named_modules():
            first, second = (known.get(f"base_model.model.{name}.lora_{each}.weight") for each in "AB")
            if first is not None and second is not None:
                module.weight += ALPHA / RANK * second @ first
    return model, plain


def test_a_sampler_gets_the_weights_of_a_plain_model():
    policy, tied = LoraPolicy(build("qwen2", torch.float32), LORA, base="base", seed=4), build("qwen2", torch.float32)
    names = [name for name, _ in tied.named_parameters()]
    for scale in (0.0, 0.3):
        stirred(policy.model, scale)
        before = {name: each.clone() for name, each in policy.model.state_dict().items()}
        _, plain = adapted(build("qwen2", torch.float32), scale)
        found = dict(policy.weights())
        assert list(found) == names
        for name, expected in plain.named_parameters():
            assert found[name].dtype == expected.dtype
            assert_close(found[name], expected.detach(), rtol=0, atol=1e-6)
        assert all(torch.equal(each, before[name]) for name, each in policy.model.state_dict().items())
    assert not all(torch.equal(found[name], each) for name, each in tied.named_parameters())


# Passes


def test_an_adapter_that_is_new_changes_nothing():
    model, rows = build("qwen3", torch.float32), ragged()
    with torch.no_grad():
        before = scored(model, rows).logprobs
        state = torch.get_rng_state()
        add_lora(model, LORA, base="base", seed=0)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(scored(model, rows).logprobs, before)
        stirred(model)
        assert (scored(model, rows).logprobs - before).abs().max() > 1e-2
        with adapter_off(model):
            assert torch.equal(scored(model, rows).logprobs, before)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == [
        name for name, _ in model.named_parameters() if ".lora_" in name
    ]


def test_the_first_a_is_drawn_with_the_seed_alone():
    drawn = []
    for seed, dtype in ((0, torch.float32), (0, torch.float64), (1, torch.float32)):
        model = small()
        torch.set_default_dtype(dtype)
        add_lora(model, LORA, base="base", seed=seed)
        drawn.append(adapter_parameters(model)["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"])
    torch.set_default_dtype(torch.float64)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    bound = 1 / math.sqrt(32)
    assert drawn[0].abs().max() <= bound
    assert drawn[0].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)


def weighted(model, rows, layout) -> tuple[Tensor, Tensor]:
    scores = scored(model, rows, layout=layout, temperature=0.8, entropy_gradient=True)
    weights = torch.linspace(-1, 1, scores.logprobs.numel(), dtype=model.dtype).view_as(scores.logprobs)
    return scores.logprobs.detach(), (scores.logprobs * weights).sum() + (scores.entropy * weights**2).sum()


def expected_gradients(plain, rows, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """dL/dA = s Bᵀ dL/dW and dL/dB = s dL/dW Aᵀ, from the gradient of the merged weights."""
    _, loss = weighted(plain, rows, "padded")
    loss.backward()
    found = {}
    for name in known:
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        first, second = (known[f"base_model.model.{module}.lora_{each}.weight"].detach() for each in "AB")
        gradient = plain.get_submodule(module).weight.grad
        found[name] = ALPHA / RANK * (second.T @ gradient if side == "lora_A" else gradient @ first.T)
    return found


@pytest.mark.slow("trains with adapters")
@pytest.mark.parametrize("family", [*FAMILIES, "moe"])
@pytest.mark.parametrize("layout", ["packed", "padded", "checkpointed", "offloaded"])
def test_gradients_are_those_of_the_merged_weights(family, layout):
    """In float32; computed another way, by the chain rule from a model without an adapter."""
    model, plain = adapted(small_moe() if family == "moe" else build(family, torch.float32), 0.1)
    if layout in ("checkpointed", "offloaded"):
        model.set_attn_implementation(NAME)  # as a loaded model has it, in the backward pass too
        checkpoint_layers(model, 2, offload=layout == "offloaded")
    logprobs, loss = weighted(model, ragged(), "padded" if layout == "padded" else "packed")
    loss.backward()
    known = adapter_parameters(model)
    for name, expected in expected_gradients(plain, ragged(), dict(known)).items():
        found = known[name].grad
        assert found is not None
        assert expected.norm() > 1e-6
        assert float((found - expected).norm() / expected.norm()) < 1e-5, name
    assert (logprobs - weighted(plain, ragged(), "padded")[0]).abs().max() < 1e-5
    assert all(each.grad is None for name, each in model.named_parameters() if ".lora_" not in name)


@pytest.mark.parametrize("make", [small, small_moe], ids=["dense", "moe"])
def test_the_sampler_reads_base_and_adapter(make):
    model, plain = adapted(make())
    requests, options = [Request(0, (17, 12, 9), 4), Request(1, (11,), 3)], SamplingOptions(max_tokens=12)
    found, expected = (
        EmbeddedSampler(each, tiny_tokenizer(), slots=4).sample(requests, options, seed=0, step=0)
        for each in (model, plain)
    )
    completions = [(number, each) for number, siblings in enumerate(found) for each in siblings]
    assert [each.tokens for _, each in completions] == [each.tokens for siblings in expected for each in siblings]
    tokens, logprobs = (
        pad_sequence([torch.tensor(getattr(each, name)) for _, each in completions], batch_first=True)
        for name in ("tokens", "logprobs")
    )
    lengths = torch.tensor([len(each.tokens) for _, each in completions])
    group = torch.tensor([number for number, _ in completions])
    with torch.no_grad():
        scores = score(
            model, prompts=[each.prompt_tokens for each in requests], tokens=tokens, lengths=lengths, group=group
        ).logprobs
    assert (scores - logprobs).abs().max() < 1e-5


class Causal:
    """Attention of whole rows, without a cache."""

    def layer(self, number: int) -> "Causal":
        return self

    def read(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True).transpose(
            1, 2
        )


@pytest.mark.slow("trains with adapters")
def test_all_layers_with_an_adapter_compile_as_one_graph():
    """As on a GPU, with nothing left to Python: one graph with the adapter and one without it, however often."""
    model, _ = adapted(small())
    torch._dynamo.reset()
    compiled = torch.compile(cuda_graphs._layer, fullgraph=True, backend="eager")
    tokens, positions = torch.tensor([[3, 9, 4]]), torch.arange(3)[None]
    before, counts = counters["stats"]["unique_graphs"], []
    with torch.no_grad():
        for off in (False, True, False, True):
            with adapter_off(model) if off else nullcontext():
                found = hidden_states(model, tokens, positions, Causal(), compiled)
                counts.append(counters["stats"]["unique_graphs"] - before)
                assert_close(found, hidden_states(model, tokens, positions, Causal()), rtol=0, atol=1e-6)
    assert counts == [1, 2, 2, 2]


def test_merged_weights_are_a_plain_model():
    model, plain = adapted(small())
    assert merge(model) < 1e-5
    assert type(model.get_submodule("model.layers.0.self_attn.q_proj")) is nn.Linear
    assert all(each.requires_grad for each in model.parameters())
    found, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert_close(found[name], parameter, rtol=0, atol=1e-6)


def last_parts(model, targets=()) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in target_layers(model, targets)})


def test_targets_choose_the_layers():
    assert last_parts(small()) == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    # Experts of a mixture are no linear layers: only its attention has an adapter.
    assert last_parts(tiny_moe()) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    model = small()
    add_lora(model, Lora(targets=("layers.1.self_attn.q_proj", "down_proj")), base="base", seed=0)
    layers = {name.rsplit(".", 2)[0].removeprefix("base_model.model.model.") for name in adapter_parameters(model)}
    assert layers == {"layers.1.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj"}
    named = names_for_peft(model, sorted(f"model.{name}" for name in layers))
    assert named == {"target_modules": ["down_proj", "model.layers.1.self_attn.q_proj"], "target_parameters": None}
    for target in ("lm_head", "embed_tokens", "proj"):
        with pytest.raises(ValueError, match=rf"adapter.targets has '{target}', which no linear layer is called"):
            target_layers(small(), (target,))


# The policy


def learner(model, algorithm=GRPO, **changes) -> Learner:
    options = replace(LearnerOptions(groups=2, minibatches=1, learning_rate=1e-2), **changes)
    policy = LoraPolicy(model, LORA, base="base", seed=0)
    return Learner(policy, algorithm, options, temperature=1.0, seed=0)


def updated(trained: Learner) -> None:
    trained.update(assemble(groups(), [], trained, 8).batch, fresh=True)


def logprobs(model) -> Tensor:
    return Passes(1.0, 1000).without_gradient(model, to_batch(groups())).logprobs


def test_only_the_adapter_is_trained_and_the_reference_is_the_base():
    model = small()
    base = copy.deepcopy(model)
    trained = learner(model, replace(GRPO, kl=KlLoss(0.1)))
    batch = to_batch(groups())
    assert torch.equal(trained.policy.reference_logprobs(trained.passes, batch), logprobs(model))
    updated(trained)
    updated(trained)
    assert (logprobs(model) - logprobs(base)).abs().max() > 1e-2
    assert torch.equal(trained.policy.reference_logprobs(trained.passes, batch), logprobs(base))
    weights = {name.replace(".base_layer", ""): each for name, each in model.named_parameters() if "lora" not in name}
    assert weights.keys() == dict(base.named_parameters()).keys()
    for name, parameter in base.named_parameters():
        assert torch.equal(weights[name], parameter)
    assert isinstance(trained.policy, LoraPolicy)
    moments = trained.policy.tensors()["optimizer"]
    assert {name.rpartition(".")[0] for name in moments} == {n for n, _ in model.named_parameters() if "lora" in n}


def test_a_reset_reference_stays_what_the_policy_was():
    trained = learner(small(), replace(GRPO, kl=KlLoss(0.1)))
    updated(trained)
    trained.policy.reset_reference()
    then = logprobs(trained.model)
    pointers = [each.data_ptr() for each in trained.model.parameters()]
    updated(trained)
    assert (logprobs(trained.model) - then).abs().max() > 1e-3
    batch = to_batch(groups())
    assert torch.equal(trained.policy.reference_logprobs(trained.passes, batch), then)
    assert [each.data_ptr() for each in trained.model.parameters()] == pointers  # captured steps read them there


def test_an_update_does_not_depend_on_its_micro_batches():
    """In float64: in float32 an element that is a difference of large ones differs by more than one part in 10⁴ on
    some processors."""
    gradients = []
    for budget in (1, 10_000):
        trained = learner(small().double(), token_budget=budget, max_gradient_norm=math.inf)
        stirred(trained.model)
        updated(trained)
        gradients.append([each.grad for each in adapter_parameters(trained.model).values()])
    for one, many in zip(*gradients, strict=True):
        assert_close(one, many, rtol=0, atol=1e-5 * float(many.abs().max()))


def test_half_precision_keeps_the_adapter_in_float32():
    model = with_precision(small(), torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight.clone()
    trained = learner(model, replace(GRPO, kl=KlLoss(0.1)), learning_rate=1e-5)
    stirred(model)
    before = [each.detach().clone() for each in adapter_parameters(model).values()]
    assert {each.dtype for each in before} == {torch.float32}
    updated(trained)
    after = list(adapter_parameters(model).values())
    # 1e-5 is far below what bfloat16 could add to A, and it arrives.
    assert any(0 < (new - old).abs().max() < 2e-5 for new, old in zip(after, before, strict=True) if old.any())
    assert torch.equal(model.model.layers[0].mlp.up_proj.base_layer.weight, weight)


@pytest.mark.parametrize("form", [TrunkHead(), OwnLayers(1)], ids=["head", "layers"])
def test_a_value_model_has_no_adapter_of_its_own(form):
    """It is built first, as a run builds it; a head on the trunk then moves the adapter."""
    model = small()
    value = value_model(form, model)
    options = LearnerOptions(groups=2, minibatches=1, learning_rate=1e-2)
    policy = LoraPolicy(model, LORA, base="base", seed=0)
    trained = Learner(policy, PPO, options, temperature=1.0, seed=0, value=value)
    before = [each.detach().clone() for _, each in value.named_parameters()]
    assert not any("lora" in name for name, _ in value.named_parameters())
    updated(trained)
    assert any(not torch.equal(each, old) for (_, each), old in zip(value.named_parameters(), before, strict=True))
    assert all(each.grad is None for name, each in model.named_parameters() if "lora" not in name)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"adapter.rank is 0: give at least 1"):
        Lora(rank=0)
    with pytest.raises(ValueError, match=r"adapter.alpha is -1: give at least 1"):
        Lora(alpha=-1)


@pytest.mark.slow("trains with adapters")
@pytest.mark.usefixtures("ordinary_precision")
def test_the_demo_learns_with_an_adapter(tmp_path):
    """From 24 % to 82 % in four steps, where this was written."""
    demo = presets.ARITHMETIC
    training = replace(demo.training, groups=24, learning_rate=3e-3, warmup_steps=0)
    config = replace(
        demo, adapter=Lora(rank=8, alpha=16), steps=4, training=training, evaluation=EvaluationOptions(problems=100)
    )
    result = train(replace(config, device="cpu"), tmp_path / "run", quiet=True)
    assert result.before.accuracy < 0.4
    assert result.after.accuracy > 0.6
