"""Words that a reader sees, for words that results and hashed designs store."""

import re

LABELS = {
    "holds here": "reproduced",
    "does not hold here": "not reproduced",
    "contrary": "opposite effect",
    "exact": "proven",
    "exactly wrong": "proven false",
}
"""Labels of stored verdicts; the others are shown as they are."""
WORDS = (
    (r"retelling of\b", "blog post on"),
    (r"retellings of\b", "blog posts on"),
    (r"retelling\b", "blog post"),
    (r"dead groups\b", "no-signal groups"),
    (r"Dead groups\b", "No-signal groups"),
    (r"(?<![`/])\boutcome(s?)\b(?!`)", r"task score\1"),
)
"""Words of designs, which were hashed before the runs. In backticks stands the name of a metric, which stays."""


def label(verdict: str) -> str:
    """The words for a stored verdict.

    Example: label("holds here") == "reproduced"
    """
    return LABELS.get(verdict, verdict)


def plain_words(text: str) -> str:
    """Text of a stored design in today's words.

    Example: plain_words("a retelling of GRPO") == "a blog post on GRPO"
    """
    for stored, shown in WORDS:
        text = re.sub(stored, shown, text)
    return text
