"""Growth of a text in a tokenizer: what it replaces is a program of the model's authors."""

from collections.abc import Iterator, Mapping
from typing import Any

PARTS = ("normalizer", "pre_tokenizer", "decoder")
"""Parts of tokenizer.json that change a text, each a list of changes inside one another."""
FACTORS = {"ByteLevel": 2, "Precompiled": 32}
"""Characters that a change makes of one, at most, where its fields do not say so."""
MAX_GROWTH = 1024
"""Real tokenizers have 64 at most, for texts of the rarest characters."""
MAX_PADDING = 1 << 20
"""Tokens to which a text may be filled up."""


def growing(config: Mapping[str, Any]) -> Iterator[str]:
    """Parts of a tokenizer.json that make texts too long: each step may double a text, and sixty steps are a line.

    Example: [*growing({"normalizer": {"type": "Prepend", "prepend": "_"}})] == []
    """
    for part in PARTS:
        if _growth(config.get(part)) > MAX_GROWTH:
            yield f"its {part} makes a text more than {MAX_GROWTH:,} times as long: use another tokenizer"
    padding = config.get("padding")
    strategy = padding.get("strategy") if isinstance(padding, Mapping) else None
    length = strategy.get("Fixed") if isinstance(strategy, Mapping) else None
    if isinstance(length, int) and length > MAX_PADDING:
        yield f"its padding fills texts up to {length:.3g} tokens: use another tokenizer"


def _growth(part: Any) -> int:
    """Characters that a part makes of one, at most; no more than is needed to refuse it is counted."""
    growth, waiting = 1, [part]
    while waiting and growth <= MAX_GROWTH:
        each = waiting.pop()
        if isinstance(each, dict):
            growth *= _factor(each)
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return growth


def _factor(change: Mapping[str, Any]) -> int:
    texts = [change.get("prepend"), change.get("content") if "pattern" in change else None]
    known = FACTORS.get(str(change.get("type")), 1)
    return max([known, *(len(text) for text in texts if isinstance(text, str))])
