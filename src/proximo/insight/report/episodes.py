"""Episodes of several turns: replies, calls of tools, failures, earnings and seconds."""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from proximo.insight.charts.pages import number, table, text
from proximo.insight.folder import RunFolder
from proximo.insight.lens.turns import REPLY, counted, read_turns
from proximo.insight.reading import Row, is_number, real
from proximo.insight.report.run_details import RunDetails
from proximo.runs.rollout_files import read_columns
from proximo.system.safe_text import visible
from proximo.types import Turn

MAX_STEPS, MAX_REPLIES, MAX_REASONS = 20, 8, 5
"""Steps, replies of an episode and reasons of failures that are shown."""
MAX_TEXT = 200
"""Maximum characters of a reason."""


@dataclass(frozen=True)
class EpisodeStep:
    """The episodes of a step. Means are over its episodes."""

    step: int
    episodes: int
    replies: float
    """Mean number of turns of the policy."""
    most_replies: int
    calls: float
    """Mean number of calls of tools."""
    failed: float
    """Mean number of turns that failed."""
    earned: list[float | None]
    """Mean reward of the first reply, of the second and so on; None: such a reply earns nothing by itself."""
    seconds: float | None
    """Mean seconds from the start of an episode to its end; None: not logged."""
    slowest: float | None
    """Seconds of the longest."""
    reasons: dict[str, int]
    """Reasons of failures, with the number of each."""


def episode_steps(details: RunDetails) -> list[EpisodeStep]:
    """Some steps of the run, evenly spaced, the first and the last among them; empty if it has no turns."""
    steps = details.run.steps()
    apart = max(math.ceil((len(steps) - 1) / (MAX_STEPS - 1)), 1)
    spent = {row.get("step"): row for row in details.timings}
    shown = []
    for step in sorted({*steps[::apart], *steps[-1:]}):
        if episodes := [turns for turns in _turns(details.run, step) if turns]:
            shown.append(_counted(step, episodes, spent.get(step, {})))
        elif not shown:  # a run either has turns or not
            break
    return shown


def _turns(run: RunFolder, step: int) -> list[tuple[Turn, ...]]:
    """Turns from their column alone; empty if there are none, or the file is damaged, which doctor reports."""
    with suppress(OSError, ValueError):
        table = read_columns(run.step_file(step), ["turns"])
        texts = table.column("turns").to_pylist() if table.num_columns else []
        return read_turns(texts, [sys.maxsize] * len(texts))
    return []


def _counted(step: int, episodes: Sequence[Sequence[Turn]], times: Row) -> EpisodeStep:
    counts, many = [counted(turns) for turns in episodes], len(episodes)
    earned: dict[int, list[float]] = defaultdict(list)
    for turns in episodes:
        for index, turn in enumerate(turn for turn in turns if turn.role == REPLY):
            if turn.reward is not None and math.isfinite(turn.reward):
                earned[index].append(turn.reward)
    max_replies = max(each.replies for each in counts)
    return EpisodeStep(
        step=step,
        episodes=many,
        replies=sum(each.replies for each in counts) / many,
        most_replies=max_replies,
        calls=sum(each.calls for each in counts) / many,
        failed=sum(each.failed for each in counts) / many,
        earned=[sum(earned[index]) / len(earned[index]) if earned[index] else None for index in range(max_replies)],
        seconds=_mean_seconds(times),
        slowest=real(times.get("episode_slowest")) if is_number(times.get("episode_slowest")) else None,
        reasons=dict(Counter(turn.failed for turns in episodes for turn in turns if turn.failed).most_common()),
    )


def _mean_seconds(times: Row) -> float | None:
    """Mean seconds of the episodes that were played for a step."""
    count = times.get("episode_count")
    if not is_number(count) or not count or not is_number(times.get("episode_seconds")):
        return None
    return real(times["episode_seconds"]) / real(count)


def episodes(details: RunDetails) -> str:
    """The section of the page; empty where completions are single replies."""
    steps = episode_steps(details)
    if not steps:
        return ""
    heads = ["step", "episodes", "replies", "most", "calls", "failed", "seconds", "longest", "earned by reply 1, 2, …"]
    rows = [
        [
            each.step,
            each.episodes,
            number(each.replies),
            each.most_replies,
            number(each.calls),
            number(each.failed),
            number(each.seconds),
            number(each.slowest),
            _earned(each.earned),
        ]
        for each in steps
    ]
    reasons = sum((Counter(each.reasons) for each in steps), Counter[str]())
    lines = "".join(
        f"<li>{count:,} × <bdi>{text(visible(reason, MAX_TEXT))}</bdi></li>\n"
        for reason, count in reasons.most_common(MAX_REASONS)
    )
    note = '<p class="faint">Replies, calls of tools, failed turns and seconds are means of an episode.</p>'
    return f"{table(heads, rows)}{note}\n" + (f"<h3>What failed</h3>\n<ul>\n{lines}</ul>\n" if lines else "")


def _earned(rewards: Sequence[float | None]) -> str:
    shown = ", ".join("–" if each is None else number(each) for each in rewards[:MAX_REPLIES])
    if all(each is None for each in rewards):
        return "at the end"
    return shown + (", …" if len(rewards) > MAX_REPLIES else "")
