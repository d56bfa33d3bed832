"""A batch lives on the CPU, a model on its device: nothing mixes the two, and no micro-batch makes the host wait."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Qwen3ForSequenceClassification

from proximo.algorithms import CLIP_COV, DAPO, GRPO, GSPO, PPO, SAPO, VAPO, Algorithm
from proximo.data import Mistakes
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.losses import KlLoss, RouterBalance
from proximo.losses.pairwise import BradleyTerry, Dpo
from proximo.models import compiling, scoring, tiny_model, tiny_moe
from proximo.models.packing.attention import NAME
from proximo.models.reward_models import completion_scores
from proximo.models.values import OwnLayers, OwnModel, TrunkHead, ValueForm, value_model
from proximo.rl.assemble import assemble, to_batch
from proximo.samplers.embedded import decoding
from proximo.supervised.dpo import Preferences
from proximo.supervised.encoding import Encoded, Prepared
from proximo.supervised.fitting import FitOptions
from proximo.supervised.reference import compute_reference, summed_logprobs
from proximo.supervised.reward_model import Judgement
from proximo.supervised.sft import Supervised
from proximo.types import Completion, Grade, Group, Problem, Rollout
from tests.learner.two_devices import GPU, Mixed, TwoDevices


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The compiler knows nothing of this device."""
    for module in (compiling, decoding, scoring):
        monkeypatch.setattr(module, "compiles", lambda model: False)


def groups(number: int = 3) -> list[Group]:
    random = torch.Generator().manual_seed(number)

    def rollout(outcome: float) -> Rollout:
        tokens = torch.randint(3, 90, (int(torch.randint(1, 7, (), generator=random)),), generator=random).tolist()
        return Rollout(Completion(tuple(tokens), (-4.5,) * len(tokens), "", "stop"), Grade(outcome))

    return [
        Group(Problem(str(each), "", ""), (5, 6, 7 + each), (rollout(1.0), rollout(0.0), rollout(0.0)))
        for each in range(number)
    ]


# The device that is not there


def test_two_devices_do_not_mix():
    with TwoDevices() as devices:
        here, there = torch.ones(3), torch.ones(3).to(GPU)
        assert (here.device.type, there.device, (there + 1).device) == ("cpu", GPU, GPU)
        assert there.cpu().device.type == "cpu"
        assert torch.zeros(2, device=there.device).device == GPU
        for mixed in (
            lambda: here + there,
            lambda: torch.cat((here, there)),
            lambda: here[there.long()],
            lambda: there.index_select(0, here.long()),
        ):
            with pytest.raises(Mixed):
                mixed()
        assert there[torch.tensor([0, 2])].device == GPU  # torch allows this
        assert (there * torch.tensor(2.0)).device == GPU
        assert devices.waits == ["cpu"]
        there.sum().item()
        assert devices.waits == ["cpu", "item"]


def test_a_gradient_is_where_its_parameter_is():
    with TwoDevices() as devices:
        layer = torch.nn.Linear(2, 2)
        devices.move(layer)
        layer(torch.ones(1, 2).to(GPU)).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.device == GPU
        with pytest.raises(Mixed):
            layer(torch.ones(1, 2))


# The learner


@cache
def update(
    algorithm: Algorithm,
    form: ValueForm | None = None,
    *,
    there: bool,
    moe: bool = False,
    budget: int = 1000,
    replay=None,
):
    """One update of a learner; what it found, and how often the host waited for each. The same for all who ask."""
    size = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1}
    model = tiny_moe(**size, experts=4, intermediate=16) if moe else tiny_model(**size, intermediate=64)
    if moe:
        model.set_experts_implementation("eager")  # the other asks the GPU what it is
    settings = LearnerOptions(groups=3, minibatches=1, learning_rate=1e-2, token_budget=budget)
    with TwoDevices() if there else nullcontext(None) as devices:
        if devices is not None:
            devices.move(model)
        value = None if form is None else value_model(form, model)
        learner = Learner(PlainPolicy(model), algorithm, settings, temperature=0.9, seed=0, value=value, replay=replay)
        assembled = assemble(groups(), [], learner, 16)
        waits = [] if devices is None else devices.waits
        waits.clear()
        found = learner.update(assembled.batch, fresh=True)
        waits = list(waits)
        learner.measure_gap(assembled.batch, found.logprobs.nan_to_num(0.0))
        if learner.critic is not None:
            learner.update_value(assembled.batch)
        assert {tensor.device.type for tensor in vars(assembled.batch).values() if isinstance(tensor, Tensor)} == {
            "cpu"
        }
        assert found.logprobs.device.type == found.rows.device.type == "cpu"
        assert all(parameter.device.type == ("cuda" if there else "cpu") for parameter in model.parameters())
        return found.stats.floats(), found.logprobs, waits


CASES = {
    "PPO": (PPO, None),
    "PPO, own layers": (PPO, OwnLayers(1)),
    "PPO, own model": (PPO, OwnModel()),
    "PPO, detached": (PPO, TrunkHead(trains_trunk=False)),
    "VAPO": (VAPO, None),
    "GRPO": (GRPO, None),
    "GRPO with a reference": (replace(GRPO, kl=KlLoss()), None),
    "DAPO": (DAPO, None),
    "GSPO": (GSPO, None),
    "SAPO": (SAPO, None),
    "Clip-Cov": (CLIP_COV, None),
}


@pytest.mark.slow("compares devices")
@pytest.mark.parametrize(("algorithm", "form"), CASES.values(), ids=CASES)
def test_an_update_on_another_device_is_the_same(algorithm, form):
    here, there = update(algorithm, form, there=False), update(algorithm, form, there=True)
    assert here[0] == pytest.approx(there[0], nan_ok=True)
    assert_close(here[1], there[1], equal_nan=True)


@pytest.mark.slow("compares devices")
@pytest.mark.parametrize(("algorithm", "form"), CASES.values(), ids=CASES)
def test_more_micro_batches_make_the_host_wait_for_results_alone(algorithm, form):
    one = update(algorithm, form, there=True)[2]
    four = update(algorithm, form, there=True, budget=16)[2]  # a group of them in two

    # Each micro-batch's log-probs are fetched when all is done; nothing else may depend on how many there are.
    def others(waits: list[str]) -> list[str]:
        return sorted(each for each in waits if each != "cpu")

    assert others(four) == others(one)


@pytest.mark.parametrize("replay", [None, "old_policy"])
def test_experts_on_another_device(replay):
    algorithm = replace(GRPO, extra=RouterBalance(0.1))
    here, there = (update(algorithm, there=there, moe=True, replay=replay) for there in (False, True))
    assert here[0] == pytest.approx(there[0], nan_ok=True)


# The other stages

ITEMS = [Encoded(str(number), (5, 6 + number), ((7, 8, 9), (10, 11))) for number in range(3)]


@pytest.mark.slow("compares devices")
def test_fine_tuning_preferences_and_scores_on_another_device():
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
    with TwoDevices() as devices:
        devices.move(model)
        single = [replace(item, completions=item.completions[:1]) for item in ITEMS]
        stage = Supervised(model, single, single, token_budget=8)
        for loss, _ in stage.losses([0, 1, 2]):
            loss.backward()
        stage.held_out()
        data = Prepared(ITEMS, ITEMS, Mistakes())
        known = compute_reference(partial(summed_logprobs, model), data, "", batch=2, token_budget=8)
        preferences = Preferences(model, data, known, Dpo(), FitOptions(batch=2, token_budget=8))
        for loss, _ in preferences.losses([2, 0]):
            loss.backward()
        assert preferences.held_out()["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_reward_models_on_another_device():
    config = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64).config
    config.num_labels = 1
    model = Qwen3ForSequenceClassification._from_config(config, dtype=torch.float32, attn_implementation=NAME).eval()
    with TwoDevices() as devices:
        devices.move(model)
        batch = to_batch(groups())
        scores = completion_scores(
            model, prompts=batch.prompts, tokens=batch.tokens, lengths=batch.lengths, group=batch.group
        )
        assert scores.device == GPU
        stage = Judgement(model, ITEMS, ITEMS, BradleyTerry(), 8)
        for loss, _ in stage.losses([0, 2]):
            loss.backward()
        assert set(stage.held_out()) >= {"loss", "accuracy"}
