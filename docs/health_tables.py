"""Writes the tables of docs/guides/health.md from the rules and the metrics themselves: `make pages`."""

import re
from collections.abc import Iterable
from pathlib import Path

from proximo.runs.health import RULES
from proximo.runs.metric_docs import MEANINGS

GUIDE = Path(__file__).resolve().parent / "guides" / "health.md"


def with_tables(page: str) -> str:
    """The page with the rows of each table as they are today."""
    rules = (f"| `{rule.name}` | {rule.severity} | {rule.when} | {rule.why} | {rule.remedy} |" for rule in RULES)
    page = with_rows(page, "| rule | | when | why | first |", rules)
    for section, names in MEANINGS.items():
        page = with_rows(page, f"**{section}**", (f"| `{name}` | {words} |" for name, words in names.items()))
    return page


def with_rows(page: str, head: str, rows: Iterable[str]) -> str:
    """The page with these rows in the first table behind `head`."""
    before, found, after = page.partition(f"{head}\n")
    if not found:
        raise ValueError(f"{GUIDE.name} has no line {head!r}: write it above a table's head")
    text = "".join(f"{row}\n" for row in rows)
    return before + found + re.sub(r"(\|[-|]+\|\n)(\|.*\n)*", lambda match: match[1] + text, after, count=1)


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text()))
