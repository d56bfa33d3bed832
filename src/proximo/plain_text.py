"""Text of models and of files, made safe to print: it cannot steer a terminal, turn the writing round or flood it."""

import unicodedata

JOINERS = "\u200c\u200d"
"""Invisible, but harmless, and many scripts and emoji are not readable without them."""

MAX_SHOWN = 10_000
"""Characters of one message to a person."""


def visible(text: str, most: int | None = None) -> str:
    """What would steer the terminal or turn the writing round is spelled out; beyond `most` characters it is cut.

    Example: visible("\\x1b[31mred") == "\\\\x1b[31mred"
    """
    rest = 0 if most is None else max(len(text) - most, 0)
    shown = text if rest == 0 else text[:most]
    # Nearly all text is printed as it is.
    if not shown.replace("\n", "").isprintable():
        shown = "".join(character if _is_printed(character) else _spelled(character) for character in shown)
    return f"{shown}… ({rest} more characters)" if rest else shown


def quoted(value: object, most: int = 200) -> str:
    """A value of a model's or a file's in one line."""
    return visible(repr(value[: most + 1] if isinstance(value, str) else value), most)


def _is_printed(character: str) -> bool:
    return character in f"\n\t{JOINERS}" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()
