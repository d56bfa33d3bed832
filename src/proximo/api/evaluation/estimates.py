"""pass@k and maj@k of sampled completions."""

import math
from collections.abc import Sequence
from statistics import fmean


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k completions is correct, of `samples` of which `correct` are.

    The unbiased estimator 1 − C(n−c, k) / C(n, k), as a product of factors below 1 that cannot overflow.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} of {samples} completions with {correct} correct: give 1 ≤ k ≤ samples")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(samples - correct + 1, samples + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """1 if the most frequent answer is correct, else 0; the mean over the answers that are most frequent together.

    A completion without an answer (None) does not vote; 0 if none votes.
    """
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    top_count = max(map(len, votes.values()), default=0)
    return fmean(fmean(each) for each in votes.values() if len(each) == top_count) if votes else 0.0


def curve(samples: int) -> list[int]:
    """The k of pass@k that are reported: powers of two, and all completions."""
    return [*(k for k in (2**power for power in range(samples.bit_length())) if k < samples), samples]
