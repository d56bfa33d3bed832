"""Writes the guides' tables from what they list, the rules and metrics of health, the words of the command line and
what `proximo plan` predicts: `make pages`."""

import re
from collections.abc import Iterable
from pathlib import Path

from proximo.config.vocabulary import WORDS, Foreign, foreign_names
from proximo.runs.health import RULES
from proximo.runs.metric_docs import MEANINGS

GUIDES = Path(__file__).resolve().parent / "guides"
KINDS = ("train", "sft", "dpo")
"""Columns of the table of words: kinds of configs."""


def health(page: str) -> str:
    """The guide of health with the rows of each table as they are today."""
    rules = (f"| `{rule.name}` | {rule.severity} | {rule.when} | {rule.why} | {rule.remedy} |" for rule in RULES)
    page = with_rows(page, "| rule | | when | why | first |", rules)
    for section, names in MEANINGS.items():
        page = with_rows(page, f"**{section}**", (f"| `{name}` | {words} |" for name, words in names.items()))
    return page


def command_line(page: str) -> str:
    """The guide of the command line with the words, and with the names that other libraries have for them."""
    words = (
        f"| {', '.join(f'`{flag}`' for flag in word.flags)} | {word.meaning} | "
        + " | ".join(f"`{field}`" if (field := word.fields.get(kind)) else "" for kind in KINDS)
        + " |"
        for word in WORDS
    )
    page = with_rows(page, f"| word | | {' | '.join(KINDS)} |", words)
    return with_rows(
        page, "| elsewhere | here |", (f"| {_names(names)} | {_ours(it)} |" for it, names in foreign_names())
    )


def memory(page: str) -> str:
    """The guide of memory with what each model takes on each card."""
    from hardware_table import MODELS, hardware  # torch, which the other tables do without

    head = "| model | trained | needs at least, GiB | RTX4090 (24 GB) | L40S (48 GB) | A100-80 | H200 |"
    return with_rows(page, head, (row for model in MODELS for row in hardware(model)))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ours(answer: Foreign) -> str:
    remark = answer.remark.replace("`", "")
    return f"`--{answer.ours.replace('_', '-')}`{remark and ', ' + remark}" if answer.ours else remark


def with_rows(page: str, head: str, rows: Iterable[str]) -> str:
    """The page with these rows in the first table behind `head`."""
    before, found, after = page.partition(f"{head}\n")
    if not found:
        raise ValueError(f"the guide has no line {head!r}: write it above a table's head")
    text = "".join(f"{row}\n" for row in rows)
    return before + found + re.sub(r"(\|[-|]+\|\n)(\|.*\n)*", lambda match: match[1] + text, after, count=1)


PAGES = {"health.md": health, "command-line.md": command_line, "memory.md": memory}

if __name__ == "__main__":
    for name, written in PAGES.items():
        (GUIDES / name).write_text(written((GUIDES / name).read_text()))
