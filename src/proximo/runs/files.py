"""Names of the files in a run folder; without torch, for readers that need none."""

import re
from pathlib import Path

from proximo.system.opening import names, refuse_foreign

METRICS, EVENTS, TIMINGS, ROLLOUTS = "metrics.jsonl", "events.jsonl", "timings.jsonl", "rollouts"
TIMELINE = "timeline.jsonl"
"""Time line of the learner, ranks and engines, a row for each step."""
LEDGER = "ledger.jsonl"
NUMBERS, LOGS = (METRICS, LEDGER), (METRICS, LEDGER, EVENTS, TIMINGS, TIMELINE)
"""The logs that a run's numbers are in, which a resume cuts back; and all logs."""
TRACEBACK = "traceback.txt"
"""Traceback of the error that ended the last attempt."""
EVIDENCE = "evidence"
"""Folder with evidence of skipped updates; see evidence.py."""
VERDICTS = "verdicts"
"""Folder with the verdicts of judges, by what they were asked; see proximo/rewards/judges."""
RESULT = "result.json"
TRACKING = "tracking"
"""Folder of the experiment trackers: positions, logs and local data of each; see proximo/runs/tracking."""
CHECKPOINTS, POINTS = "checkpoints", "resume"
"""Folders with the checkpoints of a run, and with the resume points of a stage that trains on files."""
BASE = "base"
"""Folder with the whole model under a new adapter, where training started from an adapter."""
LOCK, CONFIG, RECORD, REPORT = "lock", "config.toml", "run.json", "report.html"
PROFILE, TRACE = "profile.json", "trace.json.gz"
"""Seconds of the parts of some steps, and a trace of one, where they were asked for; see step_profile.py."""
FILES = (LOCK, CONFIG, RECORD, REPORT, RESULT, TRACEBACK, PROFILE, TRACE, *LOGS)
FOLDERS = (CHECKPOINTS, POINTS, ROLLOUTS, EVIDENCE, VERDICTS, BASE)


def stored_steps(run: Path) -> list[int]:
    """Steps with stored rollouts, in order."""
    matches = (re.fullmatch(r"step-([0-9]{1,18})\.parquet", name) for name in names(run / ROLLOUTS))
    return sorted(int(match[1]) for match in matches if match)


def refuse_foreign_files(run: Path) -> None:
    """UnsafeFile if anything that a run reads or writes is a link, a pipe or a device. Files of the user's own next to
    these do not count, and what trackers keep for themselves may link to each other."""
    for name in (*FILES, *FOLDERS):
        refuse_foreign(run / name)
    for name in names(run / TRACKING):
        refuse_foreign(run / TRACKING / name, own_links=True)
