"""bfloat16, where it can be tested without a GPU: choosing it, training in it, and checking a setup in it."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from proximo.algorithms import GRPO, GSPO, PPO
from proximo.config import toml
from proximo.learner.rounding import BFLOAT16, FLOAT16, FLOAT32, bounds_of
from proximo.losses.pieces.extras import EntropyBonus
from proximo.models import (
    compiling,
    frozen_copy,
    load_model,
    pick_dtype,
    score,
    tiny_model,
    tiny_tokenizer,
    with_precision,
)
from proximo.models.compiling import allow_compiling, checkpoint_layers, compiles
from proximo.models.packing.attention import body
from proximo.models.packing.packed import Bucket
from proximo.models.shipped import resolve
from proximo.models.values import OwnLayers, OwnModel, TrunkHead
from proximo.recipes.selfcheck.selfcheck import packed_is_padded, sampler_is_learner, selfcheck
from proximo.rl.assemble import to_batch
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from tests.policies import plain as policy_of
from tests.recipes.selfcheck.test_selfcheck import CONFIG, random_groups

TOKENIZER = tiny_tokenizer()
SMALL = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}


def test_auto_is_float32_on_a_cpu():
    assert pick_dtype("auto", "cpu") == torch.float32
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16
    assert pick_dtype("float32", "cuda") == torch.float32


def test_auto_is_bfloat16_on_a_gpu_that_computes_in_it(monkeypatch):
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: supported)  # noqa: B023
        assert pick_dtype("auto", "cuda:1") == expected


def test_rounding_the_weights_leaves_rotary_frequencies_alone():
    model = with_precision(tiny_model(**SMALL), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_nothing_is_compiled_on_a_cpu_or_where_that_is_switched_off(monkeypatch):
    model, other = tiny_model(**SMALL), tiny_model(**SMALL)
    assert not compiles(model)
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    assert compiles(model)
    allow_compiling(model, False)
    assert not compiles(model)
    assert not compiles(frozen_copy(model))
    assert compiles(other)  # the choice is a model's, not the process's


def test_checkpointed_layers_run_again_in_eval_mode_too():
    model, calls = tiny_model(**SMALL), []
    rows = {"prompts": [[5, 6]], "tokens": torch.tensor([[7, 8, 9]]), "lengths": torch.tensor([3])}
    layer = body(model).get_submodule("layers.1")
    layer.register_forward_pre_hook(lambda *_: calls.append("layer"))

    def gradient() -> list[torch.Tensor]:
        model.zero_grad()
        score(model, **rows, group=torch.tensor([0])).logprobs.sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradient()
    assert (model.training, calls) == (False, ["layer"])
    checkpoint_layers(model, 2)
    again = gradient()
    assert calls == ["layer"] * 3
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    with torch.no_grad():
        score(model, **rows, group=torch.tensor([0]))
    assert calls == ["layer"] * 4
    checkpoint_layers(model, 0)
    gradient()
    assert calls == ["layer"] * 5


# A run


def run_config(folder, **changes) -> RunConfig:
    tiny_model(**SMALL).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return replace(
        RunConfig(
            model=str(folder),
            dtype="bfloat16",
            task=Arithmetic(held_out=4),
            sampling=SamplingOptions(max_tokens=4),
            training=TrainingOptions(groups=2, group_size=4, minibatches=2, learning_rate=1e-3),
            evaluation=EvaluationOptions(problems=4),
            steps=2,
        ),
        **changes,
    )


VALUES = {
    "a head": ValueOptions(TrunkHead()),
    "layers": ValueOptions(OwnLayers(1)),
    "a model": ValueOptions(OwnModel()),
}


@pytest.mark.slow("trains runs")
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_run_in_half_precision(value, tmp_path):
    # The bonus is there to be learned from: nothing that a random model says is right.
    algorithm = replace(PPO, extra=(PPO.extras[0], EntropyBonus(0.1)))
    config = run_config(tmp_path / "model", algorithm=algorithm, value=value)
    assert toml.loads(toml.dumps(config), RunConfig) == config
    run = Run(config, tmp_path / "run", ProgressLines())
    parameters = list(run.model.parameters())
    before = [(each.data_ptr(), each.detach().clone()) for each in parameters]
    outcome = train(run)
    assert {each.dtype for each in parameters} == {torch.bfloat16}
    assert [each.data_ptr() for each in parameters] == [address for address, _ in before]
    assert any(not torch.equal(each, old) for each, (_, old) in zip(parameters, before, strict=True))
    # The policy is its masters, rounded.
    masters = policy_of(run.learner).optimizer.held(0)
    assert all(torch.equal(each, master.bfloat16()) for each, master in zip(parameters, masters, strict=True))
    assert load_model(str(outcome.checkpoint), dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_frozen_copies_and_switches_follow_the_config(tmp_path, monkeypatch):
    plain = Run(run_config(tmp_path / "model", compile=False, dtype="float32"), tmp_path / "run", ProgressLines())
    assert plain.model.dtype == torch.float32
    run = Run(run_config(tmp_path / "model", algorithm=GRPO), tmp_path / "run", ProgressLines())
    reference = policy_of(run.learner).reference
    assert reference is not None
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    assert [compiles(each) for each in (plain.model, run.model, reference)] == [False, True, True]
    assert reference.dtype == torch.bfloat16


# The self-check


@pytest.mark.slow("checks whole setups")
@pytest.mark.parametrize("algorithm", [GRPO, GSPO, PPO])
def test_a_sound_setup_passes_in_half_precision_and_is_left_as_it_was(algorithm):
    model = with_precision(tiny_model(**SMALL), torch.bfloat16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = replace(CONFIG, algorithm=algorithm, dtype="bfloat16")
    checks = list(selfcheck(config, model, TOKENIZER))
    assert [check.name for check in checks if not check.ok] == []
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    # Nobody listens any more: a gradient stays where torch puts it.
    score(
        model, prompts=[[5]], tokens=torch.tensor([[6]]), lengths=torch.tensor([1]), group=torch.tensor([0])
    ).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bounds_are_those_of_the_precision():
    model = tiny_model(**SMALL)
    assert bounds_of(model) is FLOAT32
    assert bounds_of(with_precision(model, torch.bfloat16)) is BFLOAT16
    assert bounds_of(with_precision(model, torch.float16)) is FLOAT16


def test_a_gate_narrower_than_rounding_is_no_fault_in_half_precision():
    """The sampler is off by 1e-3 in every token: far under bfloat16's bounds, and three times GSPO's gate."""
    model = tiny_model(**SMALL)
    batch = _batch_with_gap(model, 1e-3)
    [_, _, full] = sampler_is_learner(model, batch, GSPO, 1.0)
    assert not full.ok
    half = with_precision(model, torch.bfloat16)
    batch = _batch_with_gap(half, 1e-3)
    [largest, mean, ratio] = sampler_is_learner(half, batch, GSPO, 1.0)
    assert largest.ok
    assert mean.ok
    assert ratio.ok
    assert "a separate pass" in ratio.detail
    # A wide gate takes the sampler's word, and says so as before.
    [_, _, wide] = sampler_is_learner(half, batch, GRPO, 1.0)
    assert "a separate pass" not in wide.detail
    # Beyond rounding it is a fault in any precision.
    [_, mean, ratio] = sampler_is_learner(half, _batch_with_gap(half, 1e-2), GSPO, 1.0)
    assert not mean.ok
    assert not ratio.ok


def _batch_with_gap(model, gap: float):
    batch = to_batch(random_groups(model))
    with torch.no_grad():
        logprobs = score(
            model, prompts=batch.prompts, tokens=batch.tokens, lengths=batch.lengths, group=batch.group
        ).logprobs
    return replace(batch, rollout_logprobs=logprobs + gap)


def test_half_precision_still_finds_a_mask_that_is_off(monkeypatch):
    model = with_precision(tiny_model(**SMALL), torch.bfloat16)
    batch = to_batch(random_groups(model))
    assert all(check.ok for check in packed_is_padded(model, batch, 1.0))
    real = Bucket.read

    def blind(self, *rest):
        off = self.mask if self.mask is None else self.mask & (torch.arange(self.mask.shape[3]) > 0)
        return real(replace(self, mask=off), *rest)

    monkeypatch.setattr(Bucket, "read", blind)
    assert not all(check.ok for check in packed_is_padded(model, batch, 1.0))


def test_one_function_is_compiled_more_often_than_torch_allows():
    assert compiling.VARIANTS > 8  # torch's own limit


def test_a_model_that_does_not_fit_its_device_is_told_with_a_remedy(monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", fails)
    with pytest.raises(ValueError, match=r"out of memory \(CUDA .* GiB\): the weights do not fit on cpu; end other"):
        load_model(str(resolve("tiny-arithmetic")))
