"""Lines for a person, on stderr."""

import sys
from collections.abc import Callable
from contextlib import suppress

from proximo.system.safe_text import MAX_SHOWN, visible
from proximo.system.secrets import masked

Say = Callable[[str], None]


def say(message: str) -> None:
    """Print on stderr, without secrets and without what would steer the terminal: messages quote models and files."""
    with suppress(OSError):  # a closed stderr is no reason to stop
        print(visible(masked(message), MAX_SHOWN), file=sys.stderr, flush=True)


def keep_quiet(message: str) -> None:
    """Print nothing, in the place of `say`."""
