"""Single keys of a terminal, read as they are pressed."""

import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LEFT, RIGHT, BACKSPACE, ENTER = "left", "right", "backspace", "enter"
NAMES = {b"\x1b[D": LEFT, b"\x1b[C": RIGHT, b"\x1bOD": LEFT, b"\x1bOC": RIGHT}
NAMES |= {b"\x7f": BACKSPACE, b"\x08": BACKSPACE, b"\n": ENTER, b"\r": ENTER}
ENDED = re.compile(rb"\x1b([^\[O]|O.|\[[^@-~]*[@-~])", re.DOTALL)
"""All that a key sends which is more than a character."""
WAIT = 0.05
"""Seconds within which the next byte of such a key follows."""


def are_there() -> bool:
    """Tell whether a person sits at a terminal, to read and to type."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def single_keys() -> Iterator[None]:
    """A terminal that hands over each key at once and does not print it; as before afterwards. Keys that were typed
    before count."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        yield
    finally:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def pressed() -> str | None:
    """The next key: a character, or a name of NAMES; None at the end of the input."""
    terminal = sys.stdin.fileno()
    data = os.read(terminal, 1)
    while data.startswith(b"\x1b") and not ENDED.fullmatch(data) and select.select([terminal], [], [], WAIT)[0]:
        data += os.read(terminal, 1)
    return NAMES.get(data, data.decode(errors="replace")) if data not in (b"", b"\x04") else None
