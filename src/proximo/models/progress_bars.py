"""Transformers' progress bars while models are read and written: for people at a terminal, not for pipes and logs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def bars_for_terminals() -> Iterator[None]:
    """Switch the bars off where stderr is no terminal; afterwards they are as they were."""
    from transformers.utils import logging

    is_terminal, shown = False, logging.is_progress_bar_enabled()
    with suppress(AttributeError, ValueError):  # there is no stderr, or it is closed
        is_terminal = sys.stderr.isatty()
    if is_terminal or not shown:
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
