"""The learner on a GPU: the CPU's numbers in float32, close to them in bfloat16, compiled or not, never waiting."""

import math
from dataclasses import replace

import pytest
import torch
from tests.policies import plain
from torch import Tensor

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO
from proximo.learner.learner import Learner
from proximo.learner.memory import MAX_TOKENS
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.models import frozen_copy, score, tiny_model, with_precision
from proximo.models.compiling import allow_compiling, checkpoint_layers, checkpoints
from proximo.models.logprobs import token_logprobs
from proximo.models.values import OwnLayers, OwnModel, value_model
from proximo.rl.assemble import assemble
from proximo.types import Completion, Grade, Group, Problem, Rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def model_on(device: str, dtype: torch.dtype = torch.float32, layers: int = 3):
    model = with_precision(tiny_model(layers=layers), dtype)
    # Large weights, so that attention is far from uniform and an error in it cannot hide.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(6)
    return model.to(device=device)  # pyright: ignore[reportCallIssue]


def groups(number: int = 3) -> list[Group]:
    """Prompts from one token to two blocks, completions from one token to more than a block."""
    random = torch.Generator().manual_seed(number)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 90, (length,), generator=random).tolist())

    def rollout(length: int, outcome: float) -> Rollout:
        return Rollout(Completion(tokens(length), (-4.5,) * length, "", "stop"), Grade(outcome))

    sizes = [(1, (1, 150, 40)), (260, (3, 130, 1)), (129, (128, 2, 77)), (17, (5, 6, 7))]
    return [
        Group(
            Problem(str(each), "", ""),
            tokens(sizes[each][0]),
            tuple(rollout(length, float(place == 0)) for place, length in enumerate(sizes[each][1])),
        )
        for each in range(number)
    ]


def rows_of(some: list[Group]) -> dict:
    completions = [rollout.completion.tokens for group in some for rollout in group.rollouts]
    lengths = torch.tensor([len(each) for each in completions])
    tokens = torch.zeros(len(completions), int(lengths.max()), dtype=torch.long)
    for row, each in zip(tokens, completions, strict=True):
        row[: len(each)] = torch.tensor(each)
    group = torch.tensor([number for number, each in enumerate(some) for _ in each.rollouts])
    return {"prompts": [each.prompt_tokens for each in some], "tokens": tokens, "lengths": lengths, "group": group}


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative, over all tensors together."""
    gap = math.hypot(
        *(float((a.cpu().double() - b.cpu().double()).norm()) for a, b in zip(found, expected, strict=True))
    )
    return gap / math.hypot(*(float(b.cpu().double().norm()) for b in expected))


def updated(algorithm, device: str, dtype: torch.dtype = torch.float32, form=None, budget: int = 10_000):
    """One update without clipping: its statistics and its gradients."""
    model = model_on(device, dtype)
    options = LearnerOptions(
        groups=3, minibatches=1, learning_rate=1e-4, max_gradient_norm=math.inf, token_budget=budget
    )
    value = form and value_model(form, model)
    learner = Learner(PlainPolicy(model), algorithm, options, temperature=0.9, seed=0, value=value)
    batch = assemble(groups(), [], learner, 160).batch
    update = learner.update(batch, fresh=True)
    held = [*plain(learner).optimizer.held(0), *plain(learner).optimizer.held(1)]
    gradients = [each.grad for each in held if each.grad is not None]
    assert len(gradients) == len(held)
    return update.stats.floats(), gradients, update.logprobs


ALGORITHMS = {
    "PPO": (PPO, None),
    "PPO, own layers": (PPO, OwnLayers(1)),
    "PPO, own model": (PPO, OwnModel()),
    "GRPO": (GRPO, None),
    "DAPO": (DAPO, None),
    "GSPO": (GSPO, None),
    "SAPO": (SAPO, None),
}


@pytest.mark.parametrize(("algorithm", "form"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_an_update_is_the_cpus(algorithm, form):
    expected, gradients, logprobs = updated(algorithm, "cpu", form=form)
    # In parts: the budget cannot change the result either.
    for budget in (10_000, 1):
        found, theirs, same = updated(algorithm, "cuda", form=form, budget=budget)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert found["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
        assert apart(theirs, gradients) < 1e-5
        assert apart([same.nan_to_num(0.0)], [logprobs.nan_to_num(0.0)]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("algorithm", "form"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_an_update_repeats_itself_bit_for_bit(algorithm, form, dtype):
    _, gradients, logprobs = updated(algorithm, "cuda", dtype, form)
    for _ in range(3):
        _, again, same = updated(algorithm, "cuda", dtype, form)
        assert torch.equal(same.nan_to_num(0.0), logprobs.nan_to_num(0.0))
        assert all(map(torch.equal, again, gradients))


@pytest.mark.parametrize("algorithm", [PPO, GSPO], ids=["PPO", "GSPO"])
def test_an_update_in_bfloat16_is_close(algorithm):
    # The same rounded weights, computed in float32.
    model = with_precision(with_precision(model_on("cpu"), torch.bfloat16), torch.float32)
    rows = rows_of(groups())
    expected = gradients_of(model, rows)
    half = gradients_of(model_on("cuda", torch.bfloat16), rows)
    assert (half[0].cpu() - expected[0]).abs().mean() < 2e-2
    assert apart(half[1], expected[1]) < 0.1
    _, theirs, _ = updated(algorithm, "cuda", torch.bfloat16)
    assert {each.dtype for each in theirs} == {torch.float32}
    _, exact, _ = updated(algorithm, "cpu")
    assert apart(theirs, exact) < 0.3


def gradients_of(model, rows: dict, **more) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    scores = score(model, **rows, **more)
    weights = torch.linspace(-1, 2, scores.logprobs.numel(), dtype=torch.float32, device=scores.logprobs.device)
    (scores.logprobs.flatten() * weights).mean().backward()
    return scores.logprobs.detach(), [each.grad.clone() for each in model.parameters()]


def test_blocks_are_packed_is_padded():
    model, rows = model_on("cuda"), rows_of(groups(4))
    blocks = gradients_of(model, rows)
    padded = gradients_of(model, rows, layout="padded")
    allow_compiling(model, False)
    packed = gradients_of(model, rows)
    for other in (padded, packed):
        assert (blocks[0] - other[0]).abs().max() < 2e-5
        assert apart(blocks[1], other[1]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("number", "offload"), [(2, False), (3, False), (3, True)])
def test_checkpoints_change_nothing(dtype, number, offload):
    model, rows = model_on("cuda", dtype), rows_of(groups())
    plain = gradients_of(model, rows)
    checkpoint_layers(model, number, offload=offload)
    again = gradients_of(model, rows)
    assert torch.equal(plain[0], again[0])
    # Sums over queries of the same block may be taken in another order.
    assert apart(again[1], plain[1]) < (1e-6 if dtype == torch.float32 else 1e-2)
    allow_compiling(model, False)
    assert apart(gradients_of(model, rows)[1], plain[1]) < (1e-5 if dtype == torch.float32 else 0.1)


def test_each_checkpointed_layer_takes_less_memory():
    """Long rows, so that what layers keep is much more than gradients are."""
    model = model_on("cuda", layers=8)
    tokens = torch.randint(3, 90, (8, 1000), generator=torch.Generator().manual_seed(0))
    rows = {"prompts": [(5, 6, 7)], "tokens": tokens, "lengths": torch.full((8,), 1000), "group": torch.zeros(8).long()}

    def taken() -> int:
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        score(model, **rows).logprobs.mean().backward()
        return torch.cuda.max_memory_allocated() - before

    def peak(number: int, offload: bool = False) -> int:
        checkpoint_layers(model, number, offload=offload)
        taken()  # compiles
        return taken()

    whole, half, most, offloaded = peak(0), peak(4), peak(7), peak(8, offload=True)
    assert whole > half > most > offloaded, (whole, half, most, offloaded)


def test_other_sizes_and_copies_are_not_compiled_anew():
    model = model_on("cuda")
    gradients_of(model, rows_of(groups(2)))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients_of(model, rows_of(groups(3)))
    gradients_of(model, rows_of(groups(4)))
    gradients_of(frozen_copy(model).requires_grad_(True), rows_of(groups(4)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_never_waits_in_a_micro_batch(dtype):
    model, rows = model_on("cuda", dtype), rows_of(groups())
    gradients_of(model, rows)
    model.zero_grad()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        score(model, **rows).logprobs.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_stay_where_they_are_and_follow_their_masters():
    model = model_on("cuda", torch.bfloat16)
    options = LearnerOptions(groups=3, minibatches=1, learning_rate=1e-3)
    learner = Learner(PlainPolicy(model), replace(GRPO, kl=None), options, temperature=1.0, seed=0)
    before = [each.data_ptr() for each in model.parameters()]
    for _ in range(3):
        learner.start_step()
        for update in learner.updates(assemble(groups(), [], learner, 160).batch):
            assert math.isfinite(update.gradient_norm)
    assert [each.data_ptr() for each in model.parameters()] == before
    for each, master in zip(model.parameters(), plain(learner).optimizer.held(0), strict=True):
        assert torch.equal(each, master.bfloat16())
        assert each.grad is None
    assert learner.passes.is_planned
    assert learner.passes.token_budget <= MAX_TOKENS


def test_a_state_is_resumed_bit_for_bit():
    def learner_of(model) -> Learner:
        options = LearnerOptions(groups=3, minibatches=1, learning_rate=1e-3, token_budget=10_000)
        return Learner(PlainPolicy(model), replace(GRPO, kl=None), options, temperature=1.0, seed=0)

    def step(learner: Learner) -> None:
        batch = assemble(groups(), [], learner, 160).batch
        # Gradients given, not computed: a GPU's sums need not repeat themselves to the last bit.
        random = torch.Generator().manual_seed(learner.version)
        for master in plain(learner).optimizer.held(0):
            master.grad = torch.randn(master.shape, generator=random).to(master)
        plain(learner).optimizer.apply(1.0)
        assert len(batch)
        learner.policy.version += 1

    one = learner_of(model_on("cuda", torch.bfloat16))
    step(one)
    other = learner_of(frozen_copy(one.model).requires_grad_(True))
    plain(other).optimizer.load_state_dict(plain(one).optimizer.state_dict())
    other.policy.version = one.version
    for each in (one, other):
        step(each)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_memory_of_the_head_is_flat_in_tokens():
    weight = torch.randn(50_000, 64, device="cuda").bfloat16().requires_grad_()

    def peak(tokens: int) -> int:
        """Beyond inputs and gradients."""
        states = torch.randn(tokens, 64, device="cuda").bfloat16().requires_grad_()
        targets = torch.randint(50_000, (tokens,), device="cuda")
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        token_logprobs(states, weight, targets, temperature=1.0, byte_budget=2**24, kept_bytes=0)[0].sum().backward()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - held - states.numel() * 2 - weight.numel() * 2
        weight.grad = None
        return found

    peak(512)
    small, large = peak(2048), peak(16384)
    assert large < small + 2**22
    assert large < 2**24 * 3 + 3 * weight.numel() * 4


def test_logits_that_are_kept_change_no_bit():
    states, weight = (torch.randn(rows, 64, device="cuda").bfloat16().requires_grad_() for rows in (3000, 50_000))
    targets = torch.randint(50_000, (3000,), device="cuda")

    def found(kept_bytes: int) -> tuple[Tensor, ...]:
        logprobs, _ = token_logprobs(states, weight, targets, temperature=0.7, byte_budget=2**26, kept_bytes=kept_bytes)
        return logprobs, *torch.autograd.grad(logprobs.sum(), (states, weight))

    for one, other in zip(found(0), found(2**28), strict=True):
        assert torch.equal(one, other)


def test_a_budget_is_planned_for_what_is_free():
    model = model_on("cuda")
    options = LearnerOptions(groups=3, minibatches=1)
    learner = Learner(PlainPolicy(model), GRPO, options, temperature=1.0, seed=0)
    batch = assemble(groups(), [], learner, 160).batch
    learner.plan_memory(batch)
    assert learner.passes.token_budget == MAX_TOKENS
    assert not checkpoints(model)
