"""Tells a webhook how an attempt at a run ends: finished, ended early, stopped or failed, in two lines.

The lines have no prompts, completions, paths or addresses. A webhook that does not work costs a run three seconds and
a warning.
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proximo.runs.checkpoints import step_of
from proximo.runs.session import RunSession, ending
from proximo.runs.webhook import Webhook
from proximo.system.safe_text import counted, visible
from proximo.system.secrets import masked

Say = Callable[[str], None]
MAX_NAME, MAX_LINE = 100, 300
"""Characters of a run folder's name and of an error's line."""
SIGNALLED = 128
"""Exit status above which a signal ended the process."""
_ADDRESS = re.compile(r"\b[A-Za-z][\w+.-]*://[^\s'\"`]+")
_QUOTED = re.compile(r"(?<!\w)(['\"])(?=\S).*?\1(?!\w)")
_PATH = re.compile(r"(?<![\w:/.~])(?:~|\.{1,2})?(?:/[^\s'\"`/,;:()\]]+)+/?")
_RAISED = re.compile(r"\b((?:\w+\.)*\w+(?:Error|Exception)): .*")
"""Error of a user's own code within a message; what follows may quote a completion."""
_ENDS = re.compile(r"^the run ends here(?:, as [^:]*)?: ")
"""Opening of the reason why a run ended early."""


@contextmanager
def notified(session: RunSession, webhook: Webhook | None, say: Say) -> Iterator[None]:
    """Tell a webhook how the block ends, in which the run of this folder is trained. Of several ranks the first tells;
    one that ends for others to be started again does not."""
    if webhook is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    start = time.monotonic()
    try:
        yield
    except BaseException as error:
        if not _is_restarted(error):
            _tell_end(webhook, session, error, time.monotonic() - start, say)
        raise
    _tell_end(webhook, session, None, time.monotonic() - start, say)


def tell(webhook: Webhook | None, folder: Path, what: str, say: Say) -> None:
    """Tell a webhook what became of the run in a folder; a warning, if it cannot be told."""
    if webhook is None:
        return
    name = visible(folder.absolute().name, MAX_NAME)
    if (complaint := webhook.post(f"Proximo: {name}", f"{name}: {what}")) is not None:
        say(f"warning: {webhook.host} was not told how the run ended: {complaint}")


def _tell_end(webhook: Webhook, session: RunSession, error: BaseException | None, seconds: float, say: Say) -> None:
    try:
        ended = _finished(session.result or {}, seconds) if error is None else _broken_off(session, error, seconds)
        tell(webhook, session.folder, ended, say)
    except Exception as fault:  # no message is worth a run
        say(f"warning: {webhook.host} was not told how the run ended: {type(fault).__name__}")


def _is_restarted(error: BaseException) -> bool:
    """True for a rank that lost the others, or ran out of memory: the launcher starts all again, or tells the end."""
    status = error.code if isinstance(error, SystemExit) and "RANK" in os.environ else None
    return isinstance(status, int) and 0 < status < SIGNALLED


# What the lines say


def _finished(result: Mapping[str, Any], seconds: float) -> str:
    """The lines about a run with a result, of training or of a stage."""
    steps = result.get("steps")
    if steps is None and (last := result.get("last") or result.get("checkpoint")):
        steps = step_of(Path(last))
    done = "" if steps is None else f" after {counted(steps, 'step')}"
    done += f" in {took(result.get('seconds', seconds))}"
    because = _ENDS.sub("", result.get("ended", ""))
    if result.get("stopped_early"):
        because = f"held-out loss was best after step {result['best_step']}"
    how = f"ended early{done}: {shareable(because)}" if because else f"finished{done}"
    return "\n".join([how, *_held_out(result)])


def _held_out(result: Mapping[str, Any]) -> Iterator[str]:
    """The line about the held-out score, if there is one."""
    before, after = result.get("before") or {}, result.get("after") or result.get("best") or {}
    scores = [each.get("outcome", 0.0) for each in (before, after)]
    if "accuracy" in before and before.get("problems") and not any(map(math.isnan, scores)):
        shares = all(each["outcome"] == each["accuracy"] for each in (before, after))
        name, form = ("accuracy", ".1%") if shares else ("outcome", ".3f")
        yield f"held-out {'accuracy' if shares else 'task score'} {before[name]:{form}} → {after[name]:{form}}"
    elif "loss" in before and "loss" in after:
        yield f"held-out loss {before['loss']:.4g} → {after['loss']:.4g}"


def _broken_off(session: RunSession, error: BaseException, seconds: float) -> str:
    """The lines about a run that a signal or an error ended."""
    how = _failed(error) if isinstance(error, Exception) else ending(error)
    if not session.started:
        return f"did not begin: {how}"
    return f"{how}\nafter {took(seconds)}; `proximo resume` goes on {session.resumes}"


def _failed(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    line = shareable(next(iter(str(error).strip().splitlines()), "") or type(error).__name__)
    return f"failed: {kind}{line}"


def shareable(line: str) -> str:
    """A line without what is nobody else's: quoted values, addresses, folders, secrets.

    Example: shareable("cannot read '12 + 5' in /home/me/data/a.jsonl") == "cannot read … in a.jsonl"
    """
    for pattern, instead in ((_RAISED, r"\1"), (_ADDRESS, "…"), (_QUOTED, "…")):
        line = pattern.sub(instead, line)
    line = _PATH.sub(lambda path: Path(path[0]).name, line)
    return visible(masked(line), MAX_LINE)


def took(seconds: float) -> str:
    """Example: took(3720) == "1 h 2 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
