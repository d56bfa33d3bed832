"""A quantised base under an adapter: the same rounded weights in every pass, in files and in plans."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch import nn
from torch.testing import assert_close

import proximo
from proximo import presets
from proximo.cli import main
from proximo.models import load_model, tiny_model, tiny_tokenizer
from proximo.models.adapters import quantized
from proximo.models.adapters.files import QUANTIZATION, save_model
from proximo.models.adapters.lora import Lora, adapter_off, adapter_parameters, add_lora, merge, merged_weights
from proximo.models.adapters.quantized import (
    QuantizedLinear,
    check_quantization,
    count_parameters,
    dequantize,
    quantize,
    quantized_layers,
    quantized_size,
)
from proximo.models.values import OwnLayers, OwnModel, value_model
from proximo.rl.config import RunConfig
from proximo.rl.preflight.estimate import held_models
from proximo.samplers.embedded.fused import is_plain
from tests.learner.test_lora import expected_gradients, small, stirred, weighted
from tests.learner.test_moe import small_moe
from tests.models.test_adapters import PEFT_ASKS_BY_AN_OLD_NAME
from tests.models.test_scoring import build, ragged, scored

LORA = Lora(rank=3, alpha=7)


@pytest.fixture(params=["int8", "nf4"])
def kind(request):
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return request.param


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    small().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight)
    return made


# Layers


def test_int8_by_hand():
    """Each row in steps of its largest weight / 127; a row of zeros stays 0."""
    weight = torch.tensor([[1.27, -0.634, 0.016], [0.0, 0.0, 0.0]], dtype=torch.float32)
    layer = QuantizedLinear(linear(weight), "int8", torch.float32)
    assert layer.codes.tolist() == [[127, -63, 2], [0, 0, 0]]
    expected = torch.tensor([[1.27, -0.63, 0.02], [0.0, 0.0, 0.0]], dtype=torch.float32)
    assert_close(layer.weight, expected, rtol=0, atol=1e-7)


def test_nf4_is_that_of_bitsandbytes():
    """Blocks of 64 with a scale each, and the values that the format's paper lists."""
    pytest.importorskip("bitsandbytes")
    weight = torch.linspace(-2, 1, 128, dtype=torch.float32).view(2, 64)
    layer = QuantizedLinear(linear(weight), "nf4", torch.float32)
    assert layer.codes.numel() == 64
    assert_close(layer.scales.tolist(), [2.0, 1.0])
    listed = [-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0]
    listed += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1]
    found = layer.weight / layer.scales[:, None]
    nearest = (found.unsqueeze(-1) - torch.tensor(listed, dtype=torch.float32)).abs().amin(-1)
    assert nearest.max() < 1e-6
    assert len(found.unique()) > 12


def test_weights_are_rounded_to_the_runs_dtype_first(kind):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    found = QuantizedLinear(linear(weight), kind, torch.bfloat16)
    expected = QuantizedLinear(linear(weight.bfloat16()), kind, torch.bfloat16)
    assert torch.equal(found.weight, expected.weight)
    assert not torch.equal(found.scales, QuantizedLinear(linear(weight), kind, torch.float32).scales)


@pytest.mark.parametrize("family", ["qwen2", "moe"])
def test_gradients_are_those_of_the_rounded_weights(kind, family):
    """Those of the merged weights by the chain rule, with quantised weights made dense; qwen2 has biases."""
    model = small_moe() if family == "moe" else build(family, torch.float32)
    quantize(model, kind, "cpu")
    plain = copy.deepcopy(model)
    add_lora(model, LORA, base="base", seed=4)
    stirred(model, 0.1)
    known = {name: each.detach() for name, each in adapter_parameters(model).items()}
    dequantize(plain, torch.float32)
    with torch.no_grad():
        for name, module in plain.named_modules():
            first, second = (known.get(f"base_model.model.{name}.lora_{each}.weight") for each in "AB")
            if first is not None and second is not None:
                module.get_parameter("weight").add_(LORA.alpha / LORA.rank * second @ first)
    logprobs, loss = weighted(model, ragged(), "packed")
    loss.backward()
    for name, expected in expected_gradients(plain, ragged(), known).items():
        found = adapter_parameters(model)[name].grad
        assert found is not None
        assert float((found - expected).norm() / expected.norm()) < 1e-5, name
    assert (logprobs - weighted(plain, ragged(), "padded")[0]).abs().max() < 1e-5
    assert all(each.grad is None for name, each in model.named_parameters() if ".lora_" not in name)
    merge(model)
    assert not quantized_layers(model)
    assert (weighted(model, ragged(), "padded")[0] - logprobs).abs().max() < 1e-5


def test_the_reference_is_the_quantised_base(kind):
    model = build("qwen3", torch.float32)
    with torch.no_grad():
        whole = scored(model, ragged()).logprobs
        quantize(model, kind, "cpu")
        before = scored(model, ragged()).logprobs
        add_lora(model, LORA, base="base", seed=0)
        stirred(model)
        assert not torch.equal(scored(model, ragged()).logprobs, before)
        with adapter_off(model):
            assert torch.equal(scored(model, ragged()).logprobs, before)
    assert 0 < (before - whole).abs().mean() < 0.2
    assert not any(is_plain(layer) for layer in model.model.layers)  # the fused sampler leaves it to the layers


def test_weights_for_a_sampler_elsewhere_are_those_of_the_merged_model(kind):
    model = small()
    quantize(model, kind, "cpu")
    add_lora(model, Lora(rank=3, alpha=7, targets=("q_proj", "down_proj")), base="", seed=0)
    with torch.no_grad():
        stirred(model)
    found = {name: weight.clone() for name, weight in merged_weights(model)}
    merge(model)
    dequantize(model, model.dtype)
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert_close(weight, expected[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.slow("compiles layers")
def test_a_layer_compiles_without_a_break(kind):
    """As on a GPU, where nothing of a layer may be left to Python; with and without gradient."""
    layer = QuantizedLinear(linear(torch.randn(6, 64, dtype=torch.float32)), kind, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = torch.randn(3, 64, dtype=torch.float32)
    assert torch.equal(compiled(inputs), layer(inputs))
    inputs.requires_grad_(True)
    found, expected = (torch.autograd.grad(run(inputs).square().sum(), inputs) for run in (compiled, layer))
    assert_close(found, expected)


@pytest.mark.parametrize("form", [OwnLayers(1), OwnModel()], ids=["layers", "model"])
def test_a_value_model_is_dense(form):
    model = small()
    quantize(model, "int8", "cpu")
    value = value_model(form, model)
    assert isinstance(value, nn.Module)
    assert not quantized_layers(value)
    assert any(each.requires_grad and each.ndim == 2 for each in value.parameters())
    name = "layers.0.mlp.up_proj" if isinstance(form, OwnLayers) else "layers.1.mlp.up_proj"
    copied = next(each for place, each in value.named_parameters() if place.endswith(f"{name}.weight"))
    [layer] = [each for place, each in quantized_layers(model) if place.endswith("layers.1.mlp.up_proj")]
    assert torch.equal(copied, layer.weight)


# Runs and files


@pytest.mark.slow("trains and reads adapters")
def test_the_checkpoint_of_a_run_is_the_same_policy(ordinary_precision, tmp_path: Path, capsys):
    demo = presets.ARITHMETIC
    config = replace(
        demo,
        adapter=Lora(rank=4, quantize_base="int8"),
        training=replace(demo.training, groups=4, minibatches=1, learning_rate=3e-3),
        evaluation=proximo.EvaluationOptions(problems=8),
        device="cpu",
        steps=2,
    )
    result = proximo.train(config, run=tmp_path / "run", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["sampler_gap"] for row in rows if "sampler_gap" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["parameters"]
    checkpoint = Path(result.checkpoint)
    assert json.loads((checkpoint / QUANTIZATION).read_text()) == {"quantization": "int8", "dtype": "float32"}
    model = load_model(str(checkpoint), keep_adapter=True)
    assert {each.kind for _, each in quantized_layers(model)} == {"int8"}
    assert facts["policy"] == count_parameters(model)
    # Merged, it is dense, and computes the same.
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "whole")]) == 0
    assert "those of the int8 base, made dense again, plus the adapter" in capsys.readouterr().out
    with torch.no_grad():
        found = [scored(each, ragged()).logprobs for each in (model, load_model(str(tmp_path / "whole")))]
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@PEFT_ASKS_BY_AN_OLD_NAME
def test_an_adapter_of_a_quantised_base_is_a_peft_folder(base: Path, tmp_path: Path):
    """peft reads it, on the base as it is unless its user quantises it, too."""
    model = load_model(str(base), quantization="int8")
    add_lora(model, LORA, base=str(base), seed=0)
    stirred(model)
    save_model(model, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        QUANTIZATION,
    ]
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    name = "model.layers.1.mlp.up_proj.lora_B.default.weight"
    assert torch.equal(loaded.base_model.model.get_parameter(name), model.get_parameter(name))
    (tmp_path / QUANTIZATION).write_text('{"quantization": "int3", "dtype": "float32"}')
    with pytest.raises(ValueError, match=r"holds .*int3.*, which this version cannot read"):
        load_model(str(tmp_path))


def test_bytes_are_counted_before_anything_is_loaded(kind):
    model = tiny_model(hidden=48, layers=2, heads=2, kv_heads=1, intermediate=80)
    weights, size = quantized_size(model, kind)
    total = count_parameters(model)
    quantize(model, kind, "cpu")
    layers = [each for _, each in quantized_layers(model)]
    assert weights == sum(each.weight.numel() for each in layers)
    assert size == sum(part.numel() * part.itemsize for each in layers for part in (each.codes, each.scales))
    assert count_parameters(model) == total
    assert size < (0.6 if kind == "nf4" else 1.1) * weights


def test_a_plan_counts_the_quantised_base():
    config = RunConfig(adapter=Lora(rank=4, quantize_base="nf4"))
    policy, adapter = held_models(config)
    plain, _ = held_models(replace(config, adapter=Lora(rank=4)))
    assert policy.parameters == plain.parameters
    saved = plain.bytes(torch.bfloat16) - policy.bytes(torch.bfloat16)
    assert saved == pytest.approx(policy.quantized * (2 - 0.5 - 4 / 64), rel=1e-3)
    assert adapter.quantized == 0
    found, without = (proximo.plan(each, "H200", prompt_tokens=8) for each in (config, replace(config, adapter=None)))
    assert found.lora.name == "LoRA rank 4 on nf4"
    assert found.lora.components[0].weights == policy.weight_bytes(torch.bfloat16)
    assert without.lora.components[0].weights == plain.weight_bytes(torch.bfloat16)
    assert found.full == without.full


# Refusals


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"adapter.quantize_base is 'nf4'.*pip install 'proximo\[qlora\]'"):
        check_quantization("nf4", "cpu")
    check_quantization("int8", "cpu")
    check_quantization(None, "cpu")
    config = replace(presets.ARITHMETIC, adapter=Lora(quantize_base="nf4"), device="cpu")
    with pytest.raises(ValueError, match="bitsandbytes"):
        proximo.train(config, run="unused", quiet=True)


def test_a_device_that_cannot_is_one_line(monkeypatch):
    pytest.importorskip("bitsandbytes")

    def fails(weight):
        raise RuntimeError("no kernel\nfor it")

    monkeypatch.setattr(quantized, "_nf4", fails)
    with pytest.raises(ValueError, match=r"bitsandbytes cannot do on cpu \(no kernel\): use int8$"):
        check_quantization("nf4", "cpu")
