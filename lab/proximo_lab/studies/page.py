"""The page of a study: claim, verdict, figure, tables with intervals, what was fixed before the runs, and the command.

The same runs give the same bytes, except for the line with the seconds and the table of contrasts by seconds.
"""

from collections.abc import Iterable, Mapping, Sequence

from proximo.losses.intervals import half_width
from proximo.rl.evaluate import known_mean, wilson
from proximo_lab.studies.figure import has_gaps
from proximo_lab.studies.finding import ContrastResult, Findings
from proximo_lab.studies.record import job
from proximo_lab.studies.running import with_rate
from proximo_lab.studies.study import Measure, Study, design_hash
from proximo_lab.studies.wording import label, plain_words


def page(findings: Findings, rates: Mapping[str, float], command: str = "", known: int = 0) -> str:
    """Markdown; `rates` are the learning rates of the arms, `command` repeats the study if its own does not, and
    `known` of its runs were done when its design was stored."""
    study = findings.study
    first = findings.contrasts[0]
    parts = [
        f"# {study.title}",
        *_pilot(study),
        f"> {study.claim}\n>\n> Source: {plain_words(study.source)}. The wording was not compared with the paper's "
        "text.",
        f"**Verdict: {headline(findings, first)}**",
        f"{_sentence(first)}{_incomplete(findings)}",
        f"![{study.figure} of each arm]({study.label}.svg)",
        f"{_curve(study)} over the steps: means over {len(study.seeds)} seeds, with 95 % intervals as bands."
        + (" At some steps fewer seeds have a number." if has_gaps(findings) else "")
        + (f" {len(study.drawn)} of {len(study.arms)} arms; a table below has all." if study.drawn else ""),
        f"{study.question} Arms of a seed share prompts and random numbers; differences are paired by seed, intervals "
        f"are Student's t over the seeds{_of_shares(study)}. What counts was fixed before the runs"
        + (f", except for {study.later}." if study.later else "."),
        "## Contrasts",
        table(_CONTRASTS, [_row(findings, each) for each in findings.contrasts]),
        "## Controls",
        _controls(findings),
        "## All arms",
        "Means over the seeds ± half of their 95 % intervals"
        + ("; shares with the whole interval." if _has_shares(study) else "."),
        _arms(findings, rates),
        *_timed(findings),
        *_edges(study, rates),
        "## What was fixed" + ("" if study.later else " before the runs"),
        _fixed(study, known),
        "## Caveats",
        "\n".join(f"- {each}" for each in study.caveats),
        *_afterwards(study),
        f"What would change the verdict: {study.change}",
        "## How to repeat it",
        f"```text\n{command or study.command}\n```",
        _seconds(findings, rates),
    ]
    shown = (part if part.startswith("> ") else plain_words(part) for part in parts)  # a quotation stays as it is
    return "\n\n".join(shown) + "\n"


def _curve(study: Study) -> str:
    return f"Held-out `{study.curve}`" if study.held_out else f"`{study.curve}`"


def _afterwards(study: Study) -> list[str]:
    noticed = "\n".join(f"- {each}" for each in study.afterwards)
    return ["## Noticed after the design was fixed", noticed] if noticed else []


def headline(findings: Findings, of: ContrastResult) -> str:
    """The verdict in words, with a pilot's marked as such.

    Example: "not detectable at this size: the smallest effect we could have seen is 0.031 nats a token"
    """
    text = _words(findings, of)
    if findings.study.is_pilot:
        return f"only a pilot: {text}"
    limits = findings.study.limits if of is findings.contrasts[0] and findings.verdict(of) != "no verdict" else ""
    return f"{text}, {limits}" if limits else text


def _words(findings: Findings, of: ContrastResult) -> str:
    word, visible = findings.verdict(of), of.difference.visible
    if word == "not detectable at this size" and not of.has_room:
        return f"{word}: with {_plain(of.against)} in the other arm there is no room for an effect that counts"
    if word == "not detectable at this size":
        there = "there is a difference, which may be less than what counts; " if of.difference.excludes_0 else ""
        return f"{word}: {there}the smallest effect we could have seen is {_plain(visible)} {of.contrast.measure.unit}"
    if word != "no verdict":
        return label(word)
    if not findings.is_complete:
        runs = len(findings.study.arms) * len(findings.study.seeds)
        return f"{word} yet: {len(findings.records)} of {runs} runs are done"
    if not of.difference.is_known:
        return f"{word}: fewer than two seeds have a difference"
    failed = "; ".join(each.contrast.what for each in findings.failed)
    return f"{word}: a control did not come out as it must ({failed})"


_CONTRASTS = (
    "what is claimed",
    "measure",
    "mean",
    "the other's",
    "difference",
    "95 % interval",
    "counts from",
    "smallest visible",
    "seeds",
    "verdict",
)


def _row(findings: Findings, each: ContrastResult) -> list[str]:
    contrast, measured = each.contrast, each.difference
    # What is measured between two runs is no number of each of them.
    of_each = contrast.against is None or contrast.measure.between is None
    word = findings.verdict(each)
    return [
        f"{contrast.what} ({' against '.join(f'`{arm}`' for arm in contrast.arms)})",
        f"{contrast.measure.name}, {contrast.measure.unit}",
        _plain(each.arm) if of_each else "–",
        _plain(each.against) if of_each else "–",
        signed(measured.mean),
        _interval(each),
        signed(contrast.counts),
        _plain(measured.visible),
        str(len(measured.values)),
        f"{word} (no room)" if word == "not detectable at this size" and not each.has_room else label(word),
    ]


def _controls(findings: Findings) -> str:
    rows = []
    for kind, every in (("must show it", findings.positive), ("must show nothing", findings.negative)):
        for each in every:
            row = _row(findings, each)
            rows.append([kind, *row[:7], row[8], "failed" if each in findings.failed else "as it must"])
    return table(("control", *_CONTRASTS[:7], "seeds", "came out"), rows)


def _arms(findings: Findings, rates: Mapping[str, float]) -> str:
    study, rows = findings.study, []
    for arm in study.arms:
        runs = [findings.records[arm.name, seed] for seed in study.seeds if (arm.name, seed) in findings.records]
        cells = [_mean(each, [value for run in runs if (value := each.of(run)) == value]) for each in study.measures]
        rate = rates.get(arm.name)
        tuned = " (tuned)" if study.tuning is not None and arm.tuned else ""
        rows.append([arm.name, "–" if rate is None else f"{rate:g}{tuned}", *cells, str(len(runs))])
    header = ("arm", "learning rate", *(f"{each.name}, {each.unit}" for each in study.measures), "seeds")
    return table(header, rows)


def _timed(findings: Findings) -> list[str]:
    if not findings.timed:
        return []
    explanation = (
        "Seconds of the training steps, without evaluations, of runs on one thread each. They hang on the machine and "
        "on what else it does: another gives other numbers, and the study's verdict has no part of them."
    )
    return [
        "## By seconds",
        explanation,
        table(_CONTRASTS[:-1], [_row(findings, each)[:-1] for each in findings.timed]),
    ]


def _edges(study: Study, rates: Mapping[str, float]) -> list[str]:
    """Name tuned arms that took the first or last of the rates that were tried: their best may lie beyond."""
    if study.tuning is None:
        return []
    tuned = [arm.name for arm in study.arms if arm.tuned]
    edges = []
    for word, rate in (("highest", max(study.tuning.rates)), ("lowest", min(study.tuning.rates))):
        arms = [name for name in tuned if rates.get(name) == rate]
        who = "all tuned arms" if arms == tuned else ", ".join(f"`{name}`" for name in arms)
        edges += [f"the {word} for {who}"] if arms else []
    return (
        [f"Of the rates that were tried the best was {'; '.join(edges)}. One beyond it may be better."] if edges else []
    )


def _mean(measure: Measure, values: Sequence[float]) -> str:
    """The mean with its interval: of a share Wilson's, which cannot pass 0 and 1."""
    if not values:
        return "–"
    mean = _plain(known_mean(values))
    if not measure.grain:
        return f"{mean} ± {_plain(half_width(values))}"
    low, high = wilson(round(sum(values)), len(values))
    return f"{mean} ({_plain(low)} to {_plain(high)})"


def _has_shares(study: Study) -> bool:
    return any(each.grain for each in (*study.measures, *(one.measure for one in (*study.contrasts, *study.controls))))


def _of_shares(study: Study) -> str:
    return (
        ", and of shares of the seeds Newcombe's for paired shares, with Wilson's for each arm"
        if _has_shares(study)
        else ""
    )


def _fixed(study: Study, known: int) -> str:
    contrasts = (*study.contrasts, *study.controls, *study.timed)
    measures = {each.measure.name: each.measure.what for each in contrasts}
    measures |= {each.name: each.what for each in study.measures}
    config = study.arms[0].config
    when = f"stored when {known} of its runs were done" if known else "stored before the first run"
    if study.later:
        when = f"in which {study.later} came when results were known"
    lines = [
        f"- SHA-256 of the design, {when}: `{design_hash(study)}`",
        f"- seeds: {', '.join(map(str, study.seeds))}",
        f"- `{study.arms[0].name}`: {config.steps} steps, {config.training.groups} × {config.training.group_size} "
        f"completions and {config.training.updates} updates a step",
        f"- a collapse: {study.collapse}",
        *(f"- {name}: {what}" for name, what in measures.items()),
    ]
    if study.tuning is not None:
        rates = ", ".join(f"{rate:g}" for rate in study.tuning.rates)
        lines.append(
            f"- learning rates of tuned arms: the best of {rates} by {study.tuning.measure.name}, on the seeds "
            f"{', '.join(map(str, study.tuning.seeds))}"
        )
    return "\n".join(lines)


def _pilot(study: Study) -> list[str]:
    return ["**A pilot (`--quick`): few seeds and steps. A hint, no verdict on the claim.**"] if study.is_pilot else []


def _sentence(result: ContrastResult) -> str:
    contrast, measured = result.contrast, result.difference
    return (
        f"{contrast.what}: {signed(measured.mean)} {contrast.measure.unit} ({_interval(result)}) in "
        f"{contrast.measure.name}, {len(measured.values)} seeds; {signed(contrast.counts)} or more in this direction "
        "counts as an effect."
    )


def _incomplete(findings: Findings) -> str:
    return "" if findings.is_complete else " Not all runs are done: the numbers are those of the finished ones."


def _seconds(findings: Findings, rates: Mapping[str, float]) -> str:
    """Arms that are equal share their runs."""
    study, seconds = findings.study, dict[str, float]()
    for (name, seed), record in findings.records.items():
        arm = study.arm(name)
        rate = rates.get(name, arm.config.training.learning_rate)
        seconds[job(with_rate(arm.config, rate), seed, arm.course).name] = record.seconds
    where = f" of the CPU each and on {study.gpu} in float32" if study.gpu else " each"
    return f"{len(seconds)} runs on one thread{where}, {sum(seconds.values()):,.0f} seconds together, without tuning."


def _interval(result: ContrastResult) -> str:
    measured = result.difference
    return f"{signed(measured.low)} to {signed(measured.high)}" if measured.is_known else "–"


def signed(value: float) -> str:
    return "–" if value != value else f"{value:+.3g}".replace("-", "−")


def _plain(value: float) -> str:
    return "–" if value != value else f"{value:.3g}".replace("-", "−")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
