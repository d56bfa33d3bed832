"""Probe after every push: does an engine compute the log-probs that the policy computes?

Versions and checksums are what an engine believes of itself. Tokens that it samples, scored by the learner, show what
it does: a head that was not reloaded, keys and values of older weights, or half an update move log-probs by 0.01 nats
and more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proximo.models.context_length import reach_of
from proximo.models.model_types import PreTrainedModel
from proximo.samplers.engines.engine import Draw, Engine, Generated
from proximo.samplers.sampler import SampledPolicy, SamplingOptions

PROMPTS = 4
"""Prompts of a probe, each sampled once."""
PROMPT_TOKENS = 160
"""Tokens of a prompt: longer than a block of vLLM's prefix cache (16, or 128 on a CPU), so that stale keys are read."""
ALLOWED = {torch.float32: (1e-5, 1e-3), torch.float64: (1e-5, 1e-3)}
"""Largest mean gap, and gap of a token, in nats. Measured with vLLM on a CPU: 2e-6 and 8e-5; stale weights: 2e-2."""
ALLOWED_IN_HALF = (2e-2, 1.0)
"""The same in bfloat16 and float16, whose kernels differ by rounding. Chosen with margin, not measured."""


@dataclass(frozen=True)
class Gap:
    """Differences between an engine's log-probs and the policy's."""

    tokens: int
    mean: float
    largest: float

    def __str__(self) -> str:
        return f"{self.mean:.1e} nats on average, {self.largest:.1e} at most, over {self.tokens} tokens"


class LogprobProbe:
    """Fixed prompts that engines continue and the policy scores. Equal in every probe, so that a prefix cache which
    outlives its weights is noticed."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self._options = SamplingOptions(max_tokens=max(tokens // PROMPTS, 1))
        reach = reach_of(model.config)
        room = PROMPT_TOKENS if reach is None else min(PROMPT_TOKENS, reach.tokens - self._options.max_tokens)
        if room < 1:
            raise ValueError(f"sampler.probe is {tokens}: a quarter of it exceeds the model's length, give fewer")
        random = torch.Generator().manual_seed(0)
        drawn = torch.randint(model.config.get_text_config().vocab_size, (PROMPTS, room), generator=random)
        self.prompts = [tuple(row) for row in drawn.tolist()]
        self.mean, self.largest = ALLOWED.get(model.dtype, ALLOWED_IN_HALF)

    def ask(self, engine: Engine, version: int) -> list[Generated]:
        """Answers of the engine; EngineLost where it gives none."""
        return [
            engine.generate(prompt, self._options, Draw(0, version, number, 0))
            for number, prompt in enumerate(self.prompts)
        ]

    def compare(self, policy: SampledPolicy, answers: Sequence[Generated]) -> Gap:
        """The engine's log-probs of its own tokens against the policy's."""
        lengths = torch.tensor([len(each.tokens) for each in answers])
        tokens = torch.zeros(len(answers), int(lengths.max()), dtype=torch.long)
        theirs = torch.zeros(tokens.shape, dtype=torch.float64)
        for row, each in enumerate(answers):
            tokens[row, : len(each.tokens)] = torch.tensor(each.tokens)
            theirs[row, : len(each.tokens)] = torch.tensor(each.logprobs, dtype=torch.float64)
        ours = policy.logprobs(self.prompts, tokens, lengths).double().cpu()
        there = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
        gaps = (ours - theirs).abs()[there]
        return Gap(len(gaps), float(gaps.mean()), float(gaps.max()))

    def passes(self, gap: Gap) -> bool:
        """False for NaN too."""
        return gap.mean <= self.mean and gap.largest <= self.largest
