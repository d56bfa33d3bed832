"""A pipeline's result as Markdown that reads well in a terminal."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from proximo.recipes.pipeline.result import PipelineResult, PolicyResult, RewardCurve
from proximo.rl.progress import sparkline

WIDTH = 40
"""Width of a curve, in characters."""


def report(result: PipelineResult) -> str:
    """A table of all policies, a sentence on where learned and true reward diverge, and the curves."""
    parts = ["# Learned and true reward", _table(result), _data(result)]
    parts += ["## Where they diverge", "\n".join(f"- {sentence(result, policy)}" for policy in result.trained)]
    curves = [(policy.name, policy.curve) for policy in result.policies if policy.curve is not None]
    parts += [
        "## By step",
        "```\n" + "\n".join(line for name, curve in curves for line in _lines(name, curve)) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _table(result: PipelineResult) -> str:
    head = ("policy", "learned reward", "true reward", "sorted", "fools judge", "KL, nats", "tokens", "seconds")
    rows = [
        (
            policy.name,
            f"{policy.measured.learned:.2f} ± {policy.measured.learned_half_width:.2f}",
            f"{policy.measured.true:.3f} ± {policy.measured.true_half_width:.3f}",
            f"{policy.measured.sorted_share:.1%}",
            f"{policy.measured.fooled_share:.1%}",
            f"{policy.measured.kl:.2f}",
            f"{policy.generated_tokens:,}",
            f"{policy.seconds:.0f}",
        )
        for policy in result.policies
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    ruler = tuple("-" * width for width in widths)
    return "\n".join(_row(cells, widths) for cells in (head, ruler, *rows))


def _row(cells: Sequence[str], widths: Iterable[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _data(result: PipelineResult) -> str:
    ranked = result.ranked
    accuracy = result.reward_model.get("accuracy")
    held_out = (
        "" if accuracy is None else f" The reward model orders {accuracy:.1%} of held-out pairs as they are ranked."
    )
    return (
        f"{ranked.rankings} rankings of {ranked.generated_tokens:,} sampled tokens, {ranked.agreement:.1%} of their "
        f"pairs in the order of the true reward.{held_out} KL is from sft, per completion. A completion fools the "
        f"judge if the reward model prefers it to the right answer. {sum(result.seconds.values()):.0f} s in all."
    )


def sentence(result: PipelineResult, policy: PolicyResult) -> str:
    """Sentence on what a policy gained by each reward, and whether they disagree."""
    learned, true = result.gains(policy)
    text = f"{policy.name}: learned {learned:+.2f}, true {true:+.3f}, {policy.measured.kl:.1f} nats from sft."
    if result.is_hacking(policy):
        text += " **Reward hacking**: the learned reward rose while the true one fell."
    elif policy.curve is not None and policy.curve.is_overoptimised:
        text += " **Over-optimised**: the true reward fell after its peak while the learned one went on rising."
    example = policy.measured.example
    if example is not None:
        text += (
            f" The judge gives {example.completion!r} after {example.prompt!r} {example.learned:.2f}, the right answer "
            f"{example.answer!r} {example.answer_learned:.2f}; their true rewards are {example.true:.2f} and 1."
        )
    return text


def _lines(name: str, curve: RewardCurve) -> Iterable[str]:
    """The curves: the learned reward between its own extremes, the true one between 0 and 1."""
    low, high = min(curve.learned), max(curve.learned)
    scaled = [(value - low) / (high - low or 1.0) for value in _thinned(curve.learned)]
    yield f"{name:<16} learned {sparkline(scaled, WIDTH)}  {curve.learned[0]:.2f} → {curve.learned[-1]:.2f}"
    step, highest = curve.peak
    numbers = f"{curve.true[0]:.3f} → {curve.true[-1]:.3f}, highest {highest:.3f} around step {step}"
    yield f"{'':<16} true    {sparkline(_thinned(curve.true), WIDTH)}  {numbers}"


def _thinned(values: Sequence[float]) -> list[float]:
    """Means of adjacent steps, so that a curve fits its width."""
    count = min(WIDTH, len(values))
    edges = [round(number * len(values) / count) for number in range(count + 1)]
    return [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
