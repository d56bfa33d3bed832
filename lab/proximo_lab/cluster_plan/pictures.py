"""A plan for many GPUs as one self-contained HTML page with pictures."""

from collections.abc import Iterable

from proximo.insight.charts.drawing import CHARACTER, TOP, Series, drawing, line_chart, rule, words
from proximo.insight.charts.pages import Html, page, section, table, text
from proximo.planning.cards import GIB
from proximo_lab.cluster_plan.outcome import PUSH, Outcome
from proximo_lab.cluster_plan.search import ClusterPlan, Point

WIDE, ROW, CURVE = 820, 26, 90
"""Width of the picture of a step, the height of a line in it, and of its curve."""
SHOWN = 3
"""Steps in the picture of a step."""


def cluster_page(plan: ClusterPlan) -> str:
    """The whole document."""
    cluster, last = plan.cluster, plan.best(plan.staleness[-1])
    title = f"{plan.model} on {cluster.gpus:,} {cluster.card.name}"
    size = plan.size
    head = (
        f"<h1>{text(title)}</h1>\n<p>{size.groups:,} prompts × {size.group_size} completions a step; "
        f"{text(plan.lengths)}. Weights change {text(plan.switch.replace('_', ' '))}. Everything here is predicted: "
        f"{text(plan.timings.remark)}.</p>\n"
    )
    return page(
        title,
        [
            Html(head),
            section("Best split", _best_table(plan)),
            section("Seconds a step", '<div class="charts">', *_charts(plan), "</div>\n"),
            section(
                f"Steps with staleness {last.staleness}",
                f"<p>{last.ranks.number:,} learner ranks, {last.engines:,} engines of {last.engine_gpus}.</p>\n",
                gantt(last.outcome),
            ),
            section("Bytes of a learner rank", _memory_table(plan)),
        ],
    )


def _best_table(plan: ClusterPlan) -> Html:
    header = [
        "staleness",
        "learner ranks",
        "engines",
        "seconds a step",
        "learner busy",
        "engines busy",
        "tokens by age",
    ]
    return table(header, [_best_row(plan.best(each)) for each in plan.staleness])


def _best_row(point: Point) -> list[object]:
    outcome = point.outcome
    engines = f"{point.engines:,} × {point.engine_gpus}"
    busy = f"{outcome.learner_busy:.0%}", f"{outcome.engines_busy:.0%}"
    return [point.staleness, point.ranks.number, engines, point.seconds, *busy, ages(outcome)]


def ages(outcome: Outcome) -> str:
    """Shares of the trained tokens by age: `0: 12 %, 1: 88 %`."""
    return ", ".join(f"{age}: {share:.0%}" for age, share in outcome.token_ages.items())


def _charts(plan: ClusterPlan) -> Iterable[Html]:
    by_split = [
        Series(f"k = {staleness}", [(p.ranks.number, p.seconds) for p in plan.points if p.staleness == staleness])
        for staleness in plan.staleness
    ]
    yield line_chart("Seconds a step", by_split, x="ranks", unit="by learner ranks; the other GPUs sample")
    max_age = max(age for staleness in plan.staleness for age in plan.best(staleness).outcome.token_ages)
    shares = [
        Series(
            f"k = {staleness}",
            [(age, 100 * plan.best(staleness).outcome.token_ages.get(age, 0.0)) for age in range(max_age + 1)],
        )
        for staleness in plan.staleness
    ]
    yield line_chart("Staleness", shares, x="age", unit="% of trained tokens, by age in versions")
    if plan.tails:
        names = list(dict.fromkeys(lengths for lengths, _ in plan.tails))
        lines = [
            Series(_sigma(name), [(p.staleness, p.seconds) for lengths, p in plan.tails if lengths == name])
            for name in names
        ]
        yield line_chart("The length tail", lines, x="k", unit="seconds a step, by staleness")
        aged = [
            Series(
                _sigma(name), [(p.staleness, _mean_age(p.outcome)) for staleness, p in plan.tails if staleness == name]
            )
            for name in names
        ]
        yield line_chart("Age and tail", aged, x="k", unit="mean age of trained tokens, by staleness")


def _sigma(lengths: str) -> str:
    return lengths[lengths.index("sigma") :].partition(",")[0]


def _mean_age(outcome: Outcome) -> float:
    return sum(age * share for age, share in outcome.token_ages.items())


def gantt(outcome: Outcome, *, width: int = WIDE) -> Html:
    """The learner's updates and pushes, and the requests in flight, in the first steps that are measured."""
    start, end = outcome.start, outcome.ends[min(outcome.first + SHOWN, len(outcome.ends)) - 1]
    left, bottom = CHARACTER * 18, TOP + 2 * ROW + CURVE + 16
    height = bottom + 22

    def across(at: float) -> float:
        return left + (min(max(at, start), end) - start) / (end - start) * (width - left - 8)

    parts = [words(left - 8, TOP + 14, "update", "end"), words(left - 8, TOP + ROW + 14, "push", "end")]
    for span in outcome.spans:
        if span.end > start and span.start < end:
            top, colour = (TOP + ROW, "s2") if span.kind == PUSH else (TOP, "s1")
            x, length = across(span.start), max(across(span.end) - across(span.start), 1.0)
            what = f"step {span.step + 1}: {span.kind}, {span.seconds:,.1f} s"
            parts.append(
                f'<g class="{colour}"><rect class="bar" x="{x:.1f}" y="{top}" width="{length:.1f}" height="18" rx="2">'
                f"<title>{text(what)}</title></rect></g>\n"
            )
    curve = [(at, live) for at, live in outcome.live if start <= at <= end]
    max_live = max((live for _, live in curve), default=0) or 1
    points = " ".join(f"{across(at):.1f},{bottom - CURVE * live / max_live:.1f}" for at, live in curve)
    parts += [
        words(left - 8, bottom - CURVE + 10, "in flight", "end"),
        words(left - 8, bottom - CURVE + 24, f"up to {max_live:,.0f}", "end"),
        f'<g class="s3"><polyline class="line" points="{points}"/></g>\n',
        rule("axis", left, width - 8, bottom, bottom),
    ]
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        at = start + fraction * (end - start)
        parts.append(words(across(at) - 10 * fraction, bottom + 15, f"{at - start:,.0f} s"))
    for ended in outcome.ends:
        if start < ended < end:
            parts.append(rule("grid", across(ended), across(ended), TOP, bottom))
    return drawing("Learner and requests in flight", "a line where each update ends", width, height, parts)


def _memory_table(plan: ClusterPlan) -> Html:
    rows = [(name, *(f"{size / GIB:,.1f} GiB" for size in sizes)) for name, sizes in memory_rows(plan)]
    return table(["", *(f"k = {each}" for each in plan.staleness)], rows)


def memory_rows(plan: ClusterPlan) -> list[tuple[str, list[int]]]:
    """Bytes of a learner rank with the best split of each staleness."""
    memories = [plan.best(each).memory for each in plan.staleness]
    return [
        ("shards of weights, gradients, moments", [each.shards for each in memories]),
        ("layers in use", [each.gathered for each in memories]),
        ("embedding and head, gathered", [each.root for each in memories]),
        ("logits of a chunk, gradient of the head", [each.head for each in memories]),
        ("activations of a pass", [each.activations for each in memories]),
        ("all", [each.total for each in memories]),
        ("usable", [each.usable for each in memories]),
    ]
