"""What every command that writes a run folder shares: running the same command again resumes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from proximo.cli.flags import refuse, say, take, take_several
from proximo.door import folders
from proximo.tracking.named import check_names
from proximo.training.outside_errors import OutsideFailed
from proximo.training.runfolder.checkpoints import CHECKPOINTS
from proximo.training.runfolder.files import TRACEBACK
from proximo.training.runfolder.resume import Attempt
from proximo.training.runfolder.signals import Stopped

ACCEPT_LOST = "--accept-lost-rows"
"""The flag that resumes a run whose log has lost rows."""


def take_allowed(arguments: list[str]) -> list[str]:
    """The fields that --allow-change names, removed from the arguments."""
    allowed = []
    while (field := take(arguments, "--allow-change")) is not None:
        allowed.append(field.replace("-", "_"))
    return allowed


def take_trackers(arguments: list[str]) -> list[str]:
    """The trackers that --track names, removed from the arguments; one that cannot be used is refused."""
    names = take_several(arguments, "--track") or []
    try:
        check_names(names)
    except ValueError as error:
        refuse(f"--track: {error}")
    return names


@contextmanager
def taken(
    path: Path,
    config_toml: str,
    allowed: Sequence[str] | None,
    points: str | None = CHECKPOINTS,
    algorithm: str | None = None,
    accept_lost: bool = False,
) -> Iterator[Attempt]:
    """The run folder of a command, or a refusal: another process has it, or it holds another run."""
    with ExitStack() as until:
        try:
            attempt = until.enter_context(
                folders.taken(path, config_toml, allowed, points, algorithm=algorithm, accept_lost=accept_lost)
            )
        except ValueError as error:
            refuse(str(error))
        try:
            yield attempt
        except Stopped:
            say(f"stopped; {attempt.resume_hint}")
            raise


def report_failure(attempt: Attempt, error: Exception) -> None:
    """Of an attempt at a run; one that has not begun is refused."""
    if isinstance(error, ValueError) and not attempt.started:
        refuse(str(error))
    attempt.fail(error)
    trace = f", the traceback in {attempt.folder / TRACEBACK}" if isinstance(error, OutsideFailed) else ""
    say(f"error: {error}\nwhat was written so far is in {attempt.folder}{trace}; {attempt.resume_hint}")
