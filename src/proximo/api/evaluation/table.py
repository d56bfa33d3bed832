"""Several models in one table of text."""

import math
from collections.abc import Sequence

from proximo.api.evaluation.results import Estimate, ModelResult
from proximo.insight.compare.paired import Difference
from proximo.runs.records import Evaluation


def table(results: Sequence[ModelResult]) -> list[str]:
    """A line for each model, with 95 % intervals; differences are from the first model, on the same problems."""
    first = results[0]
    is_share = all(result.evaluation.is_share for result in results)
    samples = first.evaluation.k
    heads = ["model", "accuracy" if is_share else "outcome"]
    if samples:
        heads += [f"mean@{samples}", *(f"pass@{k}" for k in first.pass_at if k > 1)]
        heads += [f"maj@{samples}"] * any(result.majority is not None for result in results)
    heads += ["difference from the first", "better/worse", ""]
    lines = [heads]
    for result in results:
        cells = [result.model, _greedy(result.evaluation, is_share)]
        if samples:
            cells += [_of_mean(result.evaluation), *(_of(each) for k, each in result.pass_at.items() if k > 1)]
            cells += [_of(result.majority)] * (heads.count(f"maj@{samples}"))
        cells += ["", "", ""] if result is first else _difference(result.difference(first), is_share)
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def pass_line(result: ModelResult) -> str:
    """maj@k of one model, and pass@k of fewer completions than all, in a line; empty if nothing was sampled."""
    parts = [f"pass@{k} {_of(estimate)}" for k, estimate in result.pass_at.items() if 1 < k < result.evaluation.k]
    if result.majority is not None:
        parts.append(f"maj@{result.evaluation.k} {_of(result.majority)}")
    return ", ".join(parts)


def _greedy(evaluation: Evaluation, is_share: bool) -> str:
    if math.isnan(evaluation.outcome):
        return "unknown"
    if not is_share:
        return f"{evaluation.outcome:.3f}"
    return f"{evaluation.accuracy:.1%} ({evaluation.low:.1%} to {evaluation.high:.1%})"


def _of_mean(evaluation: Evaluation) -> str:
    assert evaluation.mean_at_k is not None
    assert evaluation.mean_half_width is not None
    return _of(Estimate(evaluation.mean_at_k, evaluation.mean_half_width))


def _of(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.mean):
        return "unknown"
    return f"{estimate.mean:.1%}" + ("" if math.isnan(estimate.half_width) else f" ± {estimate.half_width:.1%}")


def _difference(difference: Difference, is_share: bool) -> list[str]:
    if difference.interval is None:
        return ["unknown", "", ""]
    low, high = difference.interval
    if is_share:
        text = f"{100 * difference.difference:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
    else:
        text = f"{difference.difference:+.3f} ({low:+.3f} to {high:+.3f})"
    return [text, f"{difference.wins}/{difference.losses}", difference.verdict or ""]
