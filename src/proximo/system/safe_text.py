"""Text from models and files, made safe to print: no control of the terminal, no direction changes, no floods."""

import unicodedata

JOINERS = "\u200c\u200d"
"""Invisible but harmless characters that many scripts and emoji need."""

MAX_SHOWN = 10_000
"""Maximum characters of a message."""


def visible(text: str, max_length: int | None = None) -> str:
    """The text with control and direction characters escaped, cut to `max_length`.

    Example: visible("\\x1b[31mred") == "\\\\x1b[31mred"
    """
    rest = 0 if max_length is None else max(len(text) - max_length, 0)
    shown = text if rest == 0 else text[:max_length]
    # Nearly all text is printed as it is.
    if not shown.replace("\n", "").isprintable():
        shown = "".join(character if _is_printed(character) else _spelled(character) for character in shown)
    return f"{shown}{_more(rest)}" if rest else shown


def quoted(value: object, max_length: int = 200) -> str:
    """A value from a model or a file, quoted in one line."""
    if isinstance(value, str) and len(value) > max_length:
        return f"{visible(repr(value[:max_length]))}{_more(len(value) - max_length)}"
    return visible(repr(value), max_length if not isinstance(value, str) else None)


def counted(number: int, what: str) -> str:
    """Example: counted(1, "step") == "1 step"; counted(2, "step") == "2 steps"."""
    return f"{number} {what}{'s' * (number != 1)}"


def _more(rest: int) -> str:
    return f"… ({counted(rest, 'more character')})"


def _is_printed(character: str) -> bool:
    return character in f"\n\t{JOINERS}" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()
