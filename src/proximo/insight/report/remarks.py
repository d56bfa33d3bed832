"""Findings and events of the run."""

from urllib.parse import quote

from proximo.insight.charts.pages import table, text
from proximo.insight.report.run_details import RunDetails
from proximo.runs.health import ActiveFinding, Finding
from proximo.system.safe_text import visible

MAX_EVENTS = 300
"""Maximum characters shown of an event."""


def health(details: RunDetails) -> str:
    """Findings, each with a link to the rollouts that show it."""
    if not details.findings:
        if not details.training or details.config is None:  # rules apply to reinforcement learning only
            return ""
        return "<p>No rule of <code>proximo doctor</code> has anything to say about this run.</p>\n"
    cards = "".join(_finding(details, each) for each in details.findings)
    way = f"<code>proximo view <bdi>{text(details.run.path)}</bdi></code>"
    how = f"The rollouts behind a finding: {way}, with the text from # on behind the page's address."
    note = f'<p class="faint">{how}</p>\n'
    return cards + note


def _finding(details: RunDetails, active: ActiveFinding) -> str:
    finding, colour = active.finding, "bad" if active.finding.severity == "failing" else "warn"
    when = f" from step {finding.step} to {active.last}, then over" if active.is_over else f" since step {finding.step}"
    when = when if finding.show else ""  # damage to a file belongs to no step
    latest = f" At step {active.last}: {active.latest}." if active.latest != finding.message else ""
    return (
        f'<article class="finding"><p><span class="badge {colour}">{text(finding.severity)}</span> '
        f"<b>{text(finding.rule)}</b>{when}: {text(finding.message)}.{text(latest)}</p>"
        f"<p>First: {text(finding.remedy)}</p>"
        f'<p class="faint"><code>{text(link(details, finding))}</code></p></article>\n'
    )


def link(details: RunDetails, finding: Finding) -> str:
    """Address in `proximo view` that shows the finding."""
    where = f"&step={finding.step}&show={quote(finding.show, safe='')}" if finding.show else ""
    return f"#run={quote(details.run.name, safe='')}{where}"


def events(details: RunDetails) -> str:
    """Kinds of events with their counts and the last message of each."""
    counts = details.event_counts
    last = {str(event.get("kind", "")): event for event in details.events}
    rows = [
        [visible(kind, 60), counts[kind], event.get("step"), visible(str(event.get("message", "")), MAX_EVENTS)]
        for kind, event in list(last.items())[:MAX_EVENTS]
    ]
    return table(["kind", "times", "last at step", "last message"], rows) if rows else ""
