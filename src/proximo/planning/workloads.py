"""The work of both sides: prompts, lengths and rewards of completions. The same in every run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proximo.models.adapters.lora import Lora
from proximo.planning.published_shapes import (
    LLAMA_1B,
    QWEN_4B,
    QWEN_8B,
    QWEN_600M,
    QWEN_1700M,
    SMOLLM_135M,
    TINY,
    Shape,
    shape_of,
)


@dataclass(frozen=True)
class Tail:
    """Log-normal lengths with this mean, cut at `max_tokens`."""

    mean: int
    max_tokens: int
    sigma: float = 1.0

    def lengths(self, count: int) -> list[int]:
        """Quantiles of the distribution at equal steps, in a fixed shuffled order, so that no draw is lucky."""
        normal = torch.distributions.Normal(0.0, 1.0)
        steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        location = math.log(self.mean) - self.sigma**2 / 2
        lengths = (location + self.sigma * normal.icdf(steps)).exp().round().clamp(1, self.max_tokens)
        lengths[-1] = self.max_tokens
        return _shuffled(lengths.tolist())


@dataclass(frozen=True)
class Ends:
    """Completions that end at random: with probability about 1/mean at each token, or at `max_tokens`."""

    mean: int
    max_tokens: int

    def tokens(self, vocabulary: int) -> list[int]:
        """End tokens: a fixed draw of one in `mean` of the vocabulary, without padding. Random weights make all tokens
        about equally likely."""
        order = torch.randperm(vocabulary - 1, generator=torch.Generator().manual_seed(4))
        return sorted((1 + order[: max(1, round(vocabulary / self.mean))]).tolist())

    def lengths(self, count: int) -> list[int]:
        """Quantiles of the geometric distribution at equal steps, in a fixed shuffled order: the lengths of given (not
        sampled) completions."""
        steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        lengths = (torch.log1p(-steps) / math.log1p(-1 / self.mean)).ceil().clamp(1, self.max_tokens)
        return _shuffled(lengths.tolist())


def _shuffled(lengths: list[float]) -> list[int]:
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    return [int(lengths[index]) for index in order.tolist()]


@dataclass(frozen=True)
class Workload:
    """`groups` prompts of `prompt` tokens, `siblings` completions of each."""

    name: str
    shape: Shape
    groups: int
    siblings: int
    prompt: int
    completion: int | Tail | Ends
    peer_rows: int
    """Rows of TRL's micro-batch at its best settings: the first to be tried, halved while memory runs out."""
    adapter: Lora | None = None
    """The adapter that is trained in the place of the weights; None: all weights are trained."""

    @property
    def rows(self) -> int:
        return self.groups * self.siblings

    @property
    def lengths(self) -> list[int]:
        """Length of every completion, group by group; of the given ones if sampled completions end at random."""
        if isinstance(self.completion, int):
            return [self.completion] * self.rows
        return self.completion.lengths(self.rows)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def limit(self) -> int:
        """The sampler's limit."""
        return self.completion if isinstance(self.completion, int) else self.completion.max_tokens

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a completion; none if all reach the limit."""
        return self.completion.tokens(self.shape.vocabulary) if isinstance(self.completion, Ends) else []

    @property
    def even(self) -> bool:
        """True if all completions have the same length, so that the sampler's limit fixes it."""
        return len(set(self.lengths)) == 1

    @property
    def completion_tokens(self) -> int:
        return sum(self.lengths)

    def even_part(self, max_rows: int) -> int:
        """The largest number of rows up to `max_rows` that divides all rows."""
        return next(rows for rows in range(max_rows, 0, -1) if self.rows % rows == 0)

    def prompts(self) -> list[tuple[int, ...]]:
        """Prompts of random tokens, without the padding token."""
        random = torch.Generator().manual_seed(1)
        drawn = torch.randint(1, self.shape.vocabulary, (self.groups, self.prompt), generator=random)
        return [tuple(row) for row in drawn.tolist()]

    def completions(self) -> list[list[tuple[int, ...]]]:
        """Random completions of each prompt, to train on without sampling."""
        random = torch.Generator().manual_seed(2)
        rows = [
            tuple(torch.randint(1, self.shape.vocabulary, (length,), generator=random).tolist())
            for length in self.lengths
        ]
        return [rows[start : start + self.siblings] for start in range(0, self.rows, self.siblings)]

    def rewards(self) -> list[list[float]]:
        """Random rewards: they differ within each group, so every group has a gradient."""
        random = torch.Generator().manual_seed(3)
        return torch.rand(self.groups, self.siblings, dtype=torch.float64, generator=random).tolist()

    def text(self, prompt: Sequence[int]) -> str:
        """Text that the shape's tokenizer encodes as exactly these tokens."""
        return " ".join(f"t{token}" for token in prompt)


C_TINY = Workload("c-tiny", TINY, 2, 8, 64, 32, 16)
C_135M_64 = Workload("c-135m-64", SMOLLM_135M, 2, 8, 64, 32, 16)
C_135M_256 = Workload("c-135m-256", SMOLLM_135M, 2, 8, 256, 32, 16)
C_135M_TAIL = Workload("c-135m-tail", SMOLLM_135M, 2, 8, 128, Tail(32, 128), 16)
C_TINY_ENDS = Workload("c-tiny-ends", TINY, 2, 8, 64, Ends(16, 64), 16)
SMALL = Workload("small", QWEN_600M, 8, 8, 256, 256, 64)
MEDIUM = Workload("medium", QWEN_600M, 16, 16, 512, 512, 16)
MEDIUM_4B = Workload("medium-4b", QWEN_4B, 16, 16, 512, 512, 8)
SHARED = Workload("shared", QWEN_600M, 16, 16, 2048, 512, 8)
LONG_PROMPT = Workload("long-prompt", QWEN_600M, 8, 16, 4096, 256, 4)
TAIL = Workload("tail", QWEN_600M, 16, 8, 256, Tail(1024, 8192), 2)
ENDS_1000 = Workload("ends-1000", QWEN_600M, 16, 16, 512, Ends(1000, 4096), 2)
ENDS_2000 = Workload("ends-2000", QWEN_600M, 16, 16, 512, Ends(2000, 16384), 1)

ODD = Workload("odd", QWEN_600M, 12, 24, 300, 700, 16)
LLAMA = Workload("llama-1b", LLAMA_1B, 16, 16, 200, 600, 32)
QWEN_1700 = Workload("qwen-1.7b", QWEN_1700M, 32, 8, 384, 768, 16)
HEAD_96 = Workload("head-96", shape_of("16x1536x4096x16x16x96x32064"), 16, 16, 350, 450, 32)
HEAD_256 = Workload("head-256", shape_of("18x2048x16384x8x1x256x256000"), 8, 16, 350, 450, 16)
ENDS_4B = Workload("ends-4b", QWEN_4B, 8, 16, 512, Ends(2000, 4096), 1)
ENDS_4B_LONG = Workload("ends-4b-long", QWEN_4B, 4, 16, 512, Ends(2000, 8192), 1)
LORA_8B = Workload("lora-8b", QWEN_8B, 8, 16, 512, 512, 1, Lora())
LORA_8B_ENDS = Workload("lora-8b-ends", QWEN_8B, 4, 16, 512, Ends(2000, 16384), 1, Lora())
UNTUNED = (ODD, LLAMA, QWEN_1700, MEDIUM_4B, HEAD_96, HEAD_256, ENDS_4B, ENDS_4B_LONG, LORA_8B, LORA_8B_ENDS)
"""Sizes and lengths that nothing was tuned for."""
C_TINY_LORA = Workload("c-tiny-lora", TINY, 2, 8, 64, 32, 16, Lora())
