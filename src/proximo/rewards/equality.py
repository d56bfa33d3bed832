"""Equality of expressions. Runs inside a worker, as sympy may never finish; imports nothing of Proximo."""

import logging
import re
from decimal import Decimal

from math_verify import parse, verify

# It warns with every call that it has no time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


_POWER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w)", re.ASCII)
"""A number such as 1.5e6, which math-verify would read as a product with e."""


def equal(answers: list[str], texts: list[str]) -> list[float | None]:
    """1 where a text's final expression equals the answer, else 0; None where that cannot be decided."""
    return [_equal(answer, text) for answer, text in zip(answers, texts, strict=True)]


def _equal(answer: str, text: str) -> float | None:
    try:
        # No limits of its own, which are signals: the trainer waits only so long, and then kills.
        wanted = parse(_in_digits(answer), parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
        if not wanted:
            return None
        given = parse(_in_digits(text), parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
        return float(verify(wanted, given, timeout_seconds=None, raise_on_error=True))
    except Exception:  # sympy fails on strange input in every possible way, and none of them is a verdict
        return None


def _in_digits(text: str) -> str:
    """Numbers with an exponent written out: 1e5 as 100000."""
    return _POWER.sub(lambda match: f"{Decimal(match[0]):f}", text)
