"""Findings and events of the run."""

from urllib.parse import quote

from proximo.insight.charts.pages import table, text
from proximo.insight.report.facts import Facts
from proximo.runs.health import Finding, Spell
from proximo.system.safe_text import visible

MAX_EVENTS = 300
"""Maximum characters shown of an event."""


def health(facts: Facts) -> str:
    """Findings, each with a link to the rollouts that show it."""
    if not facts.findings:
        if not facts.training or facts.config is None:  # rules apply to reinforcement learning only
            return ""
        return "<p>No rule of <code>proximo doctor</code> has anything to say about this run.</p>\n"
    cards = "".join(_finding(facts, each) for each in facts.findings)
    way = f"<code>proximo view <bdi>{text(facts.run.path)}</bdi></code>"
    how = f"The rollouts behind a finding: {way}, with the text from # on behind the page's address."
    note = f'<p class="faint">{how}</p>\n'
    return cards + note


def _finding(facts: Facts, spell: Spell) -> str:
    finding, colour = spell.finding, "bad" if spell.finding.severity == "failing" else "warn"
    when = f" from step {finding.step} to {spell.last}, then over" if spell.is_over else f" since step {finding.step}"
    when = when if finding.show else ""  # damage to a file belongs to no step
    latest = f" At step {spell.last}: {spell.latest}." if spell.latest != finding.message else ""
    return (
        f'<article class="finding"><p><span class="badge {colour}">{text(finding.severity)}</span> '
        f"<b>{text(finding.rule)}</b>{when}: {text(finding.message)}.{text(latest)}</p>"
        f"<p>First: {text(finding.remedy)}</p>"
        f'<p class="faint"><code>{text(link(facts, finding))}</code></p></article>\n'
    )


def link(facts: Facts, finding: Finding) -> str:
    """Address in `proximo view` that shows the finding."""
    where = f"&step={finding.step}&show={quote(finding.show, safe='')}" if finding.show else ""
    return f"#run={quote(facts.run.name, safe='')}{where}"


def events(facts: Facts) -> str:
    """Kinds of events with their counts and the last message of each."""
    counts = facts.event_counts
    last = {str(event.get("kind", "")): event for event in facts.events}
    rows = [
        [visible(kind, 60), counts[kind], event.get("step"), visible(str(event.get("message", "")), MAX_EVENTS)]
        for kind, event in list(last.items())[:MAX_EVENTS]
    ]
    return table(["kind", "times", "last at step", "last message"], rows) if rows else ""
