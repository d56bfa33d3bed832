"""Completions next to each other. Model output is shown as safe text of bounded length."""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.insight.charts.pages import Html, number, table, text
from proximo.insight.reading import is_number
from proximo.insight.report.problems import Pair, ShownCompletion, ShownProblem, extremes
from proximo.insight.report.run_details import RunDetails
from proximo.system.safe_text import visible

MAX_TEXT, LINE, HALF = 2000, 110, 40
"""Maximum characters shown of a text; total characters of a problem's texts up to which they fit in a table row, and
up to which two such tables are shown next to each other."""
Answered = tuple[ShownProblem, Sequence[tuple[str, ShownCompletion]]]
"""A problem, and its completion under each name."""
CHANGED, UNCHANGED, ROLLOUTS = 4, 2, 3
"""Number shown of each kind."""


@dataclass(frozen=True)
class Block:
    title: str
    remark: str
    problems: Sequence[Answered]


def completions(details: RunDetails) -> str:
    return _blocks(_held_out(details.pairs)) + _rollouts(details)


def _blocks(blocks: Sequence[Block]) -> str:
    """Short texts are shown in tables, next to each other if there is room; long ones in cards."""
    blocks = [block for block in blocks if block.problems]
    widths = [_width(*each) for block in blocks for each in block.problems]
    short = all(width <= LINE for width in widths)
    kind = "blocks" if all(width <= HALF for width in widths) else "rows" if short else "cards"
    shown = "".join(
        f"<div><h3>{text(block.title)} <small>{text(block.remark)}</small></h3>\n"
        f"{_table(block.problems) if short else _cards(block.problems)}</div>\n"
        for block in blocks
    )
    return f'<div class="{kind}">\n{shown}</div>\n' if blocks else ""


def _held_out(pairs: Sequence[Pair]) -> list[Block]:
    """Held-out problems before and after, those that changed most first."""
    up = sorted((pair for pair in pairs if _gain(pair) > 0), key=_gain, reverse=True)
    down = sorted((pair for pair in pairs if _gain(pair) < 0), key=_gain)
    same = [pair for pair in pairs if _gain(pair) == 0]
    wrong = sorted((pair for pair in same if pair.after.outcome < 1), key=lambda pair: pair.after.outcome)
    kinds = [
        ("Became better", up, CHANGED),
        ("Became worse", down, CHANGED),
        ("Not right before, nor after", wrong, UNCHANGED),
        ("Right before and after", [pair for pair in same if pair.after.outcome >= 1], UNCHANGED),
    ]
    return [
        Block(
            title,
            f"{min(limit, len(members))} of {len(members)} held-out problems",
            [(pair.problem, [("before", pair.before), ("after", pair.after)]) for pair in members[:limit]],
        )
        for title, members, limit in kinds
    ]


def _gain(pair: Pair) -> float:
    return pair.after.outcome - pair.before.outcome


def _rollouts(details: RunDetails) -> str:
    """The best and the worst completions by reward, of the first and the last step."""
    blocks, complaints, steps = [], "", details.run.steps()
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        try:
            best, worst = extremes(details.run.step(step), ROLLOUTS)
        except ValueError as error:  # damaged, or of another version: show the rest of the page
            complaints += f'<p class="warn">Rollouts of step {step} cannot be shown: {text(error)}</p>\n'
            continue
        remark = f"in training, the {'first' if step == steps[0] else 'last'} step with rollouts"
        for title, rows in (("best", best), ("worst", worst)):
            problems = [(problem, [("completion", completion)]) for problem, completion in rows]
            blocks.append(Block(f"Step {step}, the {title}", remark, problems))
    return _blocks(blocks) + complaints


def _width(problem: ShownProblem, answers: Sequence[tuple[str, ShownCompletion]]) -> int:
    """Characters in a table row; a text of several lines does not fit."""
    texts = [problem.prompt or problem.id, problem.wanted, *(completion.text for _, completion in answers)]
    return LINE + 1 if any("\n" in each for each in texts) else sum(map(len, texts))


def _table(problems: Sequence[Answered]) -> str:
    names = [name for name, _ in problems[0][1]]
    has_wanted = any(problem.wanted for problem, _ in problems)
    rows = [
        [
            Html(_box("code", problem.prompt or problem.id)),
            *([Html(_box("code", problem.wanted) if problem.wanted else "")] if has_wanted else []),
            *(Html(f"{_box('code', completion.text)} {_verdict(completion)}") for _, completion in answers),
        ]
        for problem, answers in problems
    ]
    return table(["problem", *(["expected"] if has_wanted else []), *names], rows)


def _cards(problems: Sequence[Answered]) -> str:
    cards = []
    for problem, answers in problems:
        wanted = f'<p class="faint">expected {_box("code", problem.wanted, 200)}</p>' if problem.wanted else ""
        sides = "".join(
            f"<div><p><b>{text(name)}</b> {_verdict(completion)}</p>{_box('pre', completion.text)}</div>"
            for name, completion in answers
        )
        prompt = _box("pre", problem.prompt or problem.id)
        cards.append(f'<article class="card">{prompt}{wanted}<div class="sides">{sides}</div></article>\n')
    return f'<div class="cards">\n{"".join(cards)}</div>\n'


def _verdict(completion: ShownCompletion) -> str:
    right = "good" if completion.outcome >= 1 else "bad"
    notes = [
        f'<span class="{right}">task score {number(completion.outcome)}</span>'
        if is_number(completion.outcome)
        else "unscored"
    ]
    if is_number(completion.reward) and completion.reward != completion.outcome:
        notes.append(f"reward {number(completion.reward)}")
    notes += [f"{text(visible(part, 40))} {number(value)}" for part, value in completion.parts.items()]
    notes += [
        f"{completion.tokens} tokens",
        *(["truncated"] if completion.truncated else []),
        *([text(completion.note)] if completion.note else []),
    ]
    return f'<span class="verdict">{" · ".join(notes)}</span>'


def _box(tag: str, content: str, max_length: int = MAX_TEXT) -> str:
    """Text isolated so that right-to-left writing stays inside."""
    shown = text(visible(content, max_length)) if content else '<i class="faint">empty</i>'
    return f'<{tag} class="box"><bdi>{shown}</bdi></{tag}>'
