"""LoRA on a GPU: compiled layers and captured steps read base and adapter, also after an update."""

import pytest
import torch
from tests.gpu.test_learner import apart, groups, model_on

from proximo.algorithms import GRPO
from proximo.learner.learner import Learner
from proximo.learner.lora import LoraPolicy
from proximo.learner.options import LearnerOptions
from proximo.models import score, tiny_tokenizer
from proximo.models.adapters.lora import Lora, adapter_parameters
from proximo.rl.assemble import assemble
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REQUESTS, OPTIONS = [Request(0, tuple(range(3, 40)), 6), Request(1, (5,), 6)], SamplingOptions(max_tokens=40)


def learner(device: str, dtype: torch.dtype) -> Learner:
    options = LearnerOptions(groups=3, minibatches=1, learning_rate=1e-2, token_budget=10_000)
    policy = LoraPolicy(model_on(device, dtype), Lora(rank=4), base="base", seed=0)
    return Learner(policy, GRPO, options, temperature=1.0, seed=0)


def updated(trained: Learner) -> None:
    trained.update(assemble(groups(), [], trained, 200).batch, fresh=True)


def gap(sampler: EmbeddedSampler, model) -> float:
    """Largest difference between the log-probs that the sampler recorded and the learner's."""
    found = sampler.sample(REQUESTS, OPTIONS, seed=0, step=0)
    rows = [(number, each) for number, siblings in enumerate(found) for each in siblings]
    lengths = torch.tensor([len(each.tokens) for _, each in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    recorded = torch.zeros(tokens.shape)
    for row, (_, each) in enumerate(rows):
        tokens[row, : len(each.tokens)] = torch.tensor(each.tokens)
        recorded[row, : len(each.tokens)] = torch.tensor(each.logprobs)
    group = torch.tensor([number for number, _ in rows])
    with torch.no_grad():
        prompts = [each.prompt_tokens for each in REQUESTS]
        scores = score(model, prompts=prompts, tokens=tokens, lengths=lengths, group=group).logprobs
    return float((scores.cpu() - recorded).abs().max())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_captured_steps_see_every_update_of_the_adapter(dtype, bound):
    trained = learner("cuda", dtype)
    sampler = EmbeddedSampler(trained.model, tiny_tokenizer(), slots=16)
    first = [sampler.sample(REQUESTS, OPTIONS, seed=0, step=0) for _ in range(3)]  # as it is, captured, replayed
    assert first[0] == first[1] == first[2]
    for _ in range(3):
        updated(trained)
    assert gap(sampler, trained.model) < bound
    assert sampler.sample(REQUESTS, OPTIONS, seed=0, step=0) != first[0]


def test_an_update_is_the_cpus():
    gradients, references = [], []
    for device in ("cpu", "cuda"):
        trained = learner(device, torch.float32)
        for _ in range(2):
            updated(trained)
        gradients.append([each.detach().cpu() for each in adapter_parameters(trained.model).values()])
        batch = assemble(groups(), [], trained, 200).batch
        references.append(trained.policy.reference_logprobs(trained.passes, batch))
    assert apart(gradients[1], gradients[0]) < 1e-2
    assert (references[1] - references[0]).abs().max() < 1e-3
