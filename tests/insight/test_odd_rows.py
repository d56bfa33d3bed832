"""Rows of a stranger's run hold any JSON in any field: every reader answers, or says what is wrong in a ValueError."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

import proximo
from proximo.cli.commands.watch import drawn
from proximo.insight.doctor.checkup import check_up, summary
from proximo.insight.folder import RunFolder
from proximo.insight.page import overview, reader, timeline
from proximo.insight.report import gather, render
from proximo.insight.terminal import look
from proximo.runs.session import open_session
from proximo.runs.tracking.source import Position, RunSource

HUGE = 10**400
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([HUGE, -HUGE, 2**63, 2**64, 1e308, -1e308, 5e-324, 10**18, float("nan"), float("inf"), -0.0, 0.5]),
    st.sampled_from(["", "step-000002", "finding", "warning", "failing", "\ud800", "\x1b[31m", "a\nb", "9" * 20, "é"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "name", "1", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)
COMMON = ("step", "outcome", "reward", "sampled_tokens", "truncated", "attempt", "kind", "rule", "severity", "message")
NAMES: dict[str, tuple[str, ...]] = {
    "metrics.jsonl": (*COMMON, "held_out/outcome", "held_out/low", "held_out/problems", "loss", "kl", "rewards/a"),
    "events.jsonl": (*COMMON, "remedy", "show"),
    "timings.jsonl": ("step", "update", "rollout", "tokens", "attempt", "judge_cost"),
    "timeline.jsonl": ("step", "seconds", "intervals", "staleness", "ready", "waiting"),
    "run.json": (
        *("format", "identity", "attempts", "argv", "machine", "fingerprints", "functions", "version", "fork"),
        *("parameters", "algorithm", "config", "source"),
    ),
    "result.json": ("before", "after", "best", "examples", "checkpoint", "generated_tokens", "seconds", "policies"),
    "config.toml": (),
}
TABLES = {
    name: st.dictionaries(st.sampled_from(fields), VALUES, max_size=6) for name, fields in NAMES.items() if fields
}
FOLDERS = st.fixed_dictionaries(
    {name: st.lists(row, max_size=5) if name.endswith("l") else st.one_of(row, VALUES) for name, row in TABLES.items()}
)


def page(run: RunFolder) -> None:
    runs = overview.Runs(run.path.parent)
    json.dumps(runs.listed())
    for handler in (overview.about, overview.health, overview.rows, timeline.timeline, reader.steps):
        for query in ({}, {"file": "metrics"}, {"step": "1"}, {"problem": "1"}):
            tolerant(lambda handler=handler, query=query: handler(run, query))
    runs.parting(run.name)


def track(run: RunFolder) -> None:
    source = RunSource(run.path)
    for is_over in (False, True):
        list(source.items(Position(), is_over=is_over))
    source.summary()
    source.about(run.path / "tracking")


def opened(run: RunFolder) -> None:
    found = proximo.open_run(run.path)
    for read in (found.metrics, found.events, found.findings, lambda: found.result, lambda: repr(found)):
        tolerant(read)


def resume(run: RunFolder) -> None:
    with open_session(run.path, "steps = 3\n"):
        pass


READERS = {
    "report": lambda run: render(gather(run)).encode(),
    "doctor": lambda run: (check_up(run).to_dict(), summary(run.path)),
    "watch": lambda run: Console(file=io.StringIO()).print(drawn(look(run), 80)),
    "page": page,
    "track": track,
    "open_run": opened,
    "resume": resume,
}


def tolerant(read: Any) -> None:
    try:
        read()
    except UnicodeError:
        raise
    except (ValueError, OSError):
        return


def written(folder: Path, content: dict[str, Any]) -> RunFolder:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("steps = 3\n")
    for name, value in content.items():
        rows = value if name.endswith("l") else [value]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunFolder(folder)


def odd(**changes: Any) -> dict[str, Any]:
    usual = {"step": 1, "outcome": 0.5, "sampled_tokens": 9}
    rows = [usual, usual | {"step": 2}, {"step": 2, "held_out/outcome": 0.5, "held_out/accuracy": 0.5}]
    whole = {
        "metrics.jsonl": rows,
        "events.jsonl": [],
        "timings.jsonl": [{"step": 1, "update": 1.0}],
        "timeline.jsonl": [],
        "run.json": {"format": 2, "identity": "a", "attempts": [], "fingerprints": {}, "machine": {}},
        "result.json": {"before": {}, "after": {}, "seconds": 1.0, "generated_tokens": 9},
    }
    return {name: changes.get(name.partition(".")[0], value) for name, value in whole.items()}


@pytest.mark.slow("reads many odd rows")
@pytest.mark.parametrize("reader", READERS)
@given(content=FOLDERS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(content=odd(timings=[{"step": []}, {"step": {}, "update": 1}, {"step": HUGE}]))
@example(content=odd(run={"format": 2, "identity": [], "attempts": {}}))
@example(content=odd(run={"format": 2, "identity": "a", "attempts": [[], 1, {"from": [], "ended": HUGE}]}))
@example(content=odd(result={"seconds": HUGE, "generated_tokens": HUGE, "before": {"accuracy": HUGE, "a": []}}))
@example(content=odd(metrics=[{"step": 1, "outcome": HUGE}, {"step": 2, "outcome": [], "sampled_tokens": {}}]))
@example(
    content=odd(events=[{"kind": [], "step": HUGE, "message": {}}, {"kind": "finding", "rule": {}, "severity": []}])
)
@example(content=odd(timeline=[{"step": 1, "seconds": 1.0, "intervals": [1, [], {}], "staleness": {"a": HUGE}}]))
def test_every_reader_takes_any_value_in_any_field(reader, content, tmp_path):
    run = written(tmp_path / "run", content)
    tolerant(lambda: READERS[reader](run))
