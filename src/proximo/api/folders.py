"""Taking a run folder: for a new run, or to resume the one that is there."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from proximo.api.messages import Say
from proximo.api.threads import suit_machine
from proximo.api.validate import refuse_used, unwritable
from proximo.runs.checkpoints import CHECKPOINTS
from proximo.runs.session import RunSession, open_session
from proximo.runs.signals import Stopped
from proximo.system.opening import without_links

PathLike = str | Path


def folder_for(run: PathLike | None, name: str) -> Path:
    """The folder that was given, or a new one: runs/NAME-DATE."""
    return without_links(Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}" if run is None else run)


@contextmanager
def taken(
    path: Path,
    config_toml: str,
    allowed: Sequence[str] | None,
    points: str | None = CHECKPOINTS,
    algorithm: str | None = None,
    accept_lost: bool = False,
) -> Iterator[RunSession]:
    """A run folder, or ValueError in one line: another process has it, it holds another run, or it cannot be
    written."""
    with ExitStack() as until:
        try:
            session = until.enter_context(
                open_session(
                    path, config_toml, points=points, allowed=allowed, algorithm=algorithm, accept_lost=accept_lost
                )
            )
        except OSError as error:
            raise unwritable(path, error) from error
        yield session


@contextmanager
def attempted(
    path: Path,
    config_toml: str,
    *,
    resume: bool,
    allow_change: Sequence[str] | None,
    accept_lost: bool,
    points: str = CHECKPOINTS,
    algorithm: str | None = None,
) -> Iterator[RunSession]:
    """Do as `taken`, for a call from Python: what ends a run early says how to go on; Ctrl-C is KeyboardInterrupt."""
    if not resume:
        refuse_used(path)
    try:
        with taken(path, config_toml, allow_change, points, algorithm, accept_lost) as session:
            try:
                yield session
            except Exception as error:
                if session.started:
                    error.add_note(f"what was written so far is in {path}; {session.resume_hint}")
                raise
    except Stopped as stopped:
        if stopped.signal == signal.SIGINT:
            raise KeyboardInterrupt(f"stopped and saved; the same call resumes {path}") from stopped
        raise


def suit_session(session: RunSession, model: str | None, device: str, say: Say) -> None:
    """The machine as the run began with it, so that a resume gives the same bits; and a line that says where from."""
    if session.machine is None:
        suit_machine(model, device)
        return
    session.machine.apply()
    say(session.remark or "")
    for message in session.damaged:
        say(f"warning: {message}; skipped")
    for message in (
        *([session.other_code] if session.other_code else []),
        *session.lost,
        *session.altered,
        *session.corrected,
    ):
        say(f"warning: {message}")
