"""Parts shared by the commands that write a run folder: running the same command again resumes."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from proximo.api import folders
from proximo.api.validate import check_free
from proximo.cli.arguments import refuse, refusing, say, take, take_list, take_several
from proximo.config.trust.permission import is_everything_permitted
from proximo.learner.ranks import Ranks
from proximo.rl.plugin_errors import OutsideFailed
from proximo.runs.checkpoints import CHECKPOINTS
from proximo.runs.files import TRACEBACK
from proximo.runs.session import RunSession
from proximo.runs.signals import Stopped
from proximo.runs.tracking.trackers import check_names
from proximo.runs.webhook import Webhook, webhook_at

if TYPE_CHECKING:
    from proximo.rl.config import RunConfig
    from proximo.supervised.dpo import DpoConfig
    from proximo.supervised.reward_model import RewardModelConfig
    from proximo.supervised.sft import SftConfig

Config = TypeVar("Config", "RunConfig", "DpoConfig", "RewardModelConfig", "SftConfig")
ACCEPT_LOST = "--accept-lost-rows"
"""The flag that resumes a run whose log has lost rows."""
NOTIFY = "--notify"
"""The flag with the address of a webhook."""


def take_allowed(arguments: list[str]) -> list[str]:
    """The fields that --allow-change names, removed from the arguments."""
    allowed = list[str]()
    while (fields := take_list(arguments, "--allow-change", _is_field)) is not None:
        allowed += [field.replace("-", "_") for field in fields]
    return allowed


def _is_field(word: str) -> bool:
    """True for what may be another field's name, and is neither a file nor a preset."""
    from proximo.recipes.presets import PRESETS

    is_file = word.endswith(".toml") or Path(word).exists()
    return not is_file and word not in {each.name for each in PRESETS} and bool(re.fullmatch(r"[a-z][\w.-]*", word))


def take_trackers(arguments: list[str]) -> list[str]:
    """The trackers that --track names, removed from the arguments; one that cannot be used is refused."""
    names = take_several(arguments, "--track") or []
    with refusing(about="--track"):
        check_names(names)
    return names


def take_webhook(arguments: list[str]) -> Webhook | None:
    """The webhook that --notify gives, removed from the arguments, or that of the environment; an address that nothing
    can be posted to is refused."""
    address = None
    while (given := take(arguments, NOTIFY)) is not None:
        address = given
    with refusing():
        return webhook_at(address)


def take_ranks(arguments: list[str]) -> int | None:
    """The number that --ranks gives, removed from the arguments; without it, that of the group which torchrun or SLURM
    started this process for."""
    if (given := take(arguments, "--ranks")) is None:
        started = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
        return int(started) if started.isdecimal() and int(started) > 1 else None
    if not given.isdecimal() or not int(given):
        refuse(f"--ranks {given}: give the number of processes, at least 1")
    return int(given)


def with_ranks(config: Config, processes: int) -> Config:
    """The config for this number of processes."""
    with refusing():
        return replace(config, ranks=replace(config.ranks or Ranks(), processes=processes))


def launched(
    ranks: Ranks,
    arguments: list[str],
    folder: Path,
    follow: Callable[[], None],
    *,
    named: bool,
    webhook: Webhook | None,
) -> int | None:
    """Start the processes of a run, or follow as one of them: the exit status. None on rank 0, which trains.
    `arguments` are those of the whole command without the webhook's address, which is not for a list of processes;
    `named`: whether they name the run folder."""
    from proximo.distributed.launching import command_of, is_launched, launch, own_rank
    from proximo.distributed.on_ray import starting

    if not is_launched():
        if not ranks.processes:
            refuse("ranks.processes is 0: give the number of processes, as in --ranks 8")
        if ranks.processes == 1:
            return None
        given = [*arguments, *["--load-code"] * is_everything_permitted(), *([] if named else ["--run", str(folder)])]
        with refusing():
            check_free(folder)
            with starting(ranks) as start:
                return launch(command_of(given), ranks.processes, say, folder, webhook, start=start)
    if own_rank() == 0:
        return None
    with refusing(about=f"rank {own_rank()}"):  # rank 0 builds the same, and refuses it with the run folder at hand
        follow()
    return 0


@contextmanager
def taken(
    path: Path,
    config_toml: str,
    allowed: Sequence[str] | None,
    points: str | None = CHECKPOINTS,
    algorithm: str | None = None,
    accept_lost: bool = False,
) -> Iterator[RunSession]:
    """The run folder of a command, or a refusal: another process has it, or it holds another run."""
    with ExitStack() as until:
        with refusing():
            session = until.enter_context(
                folders.taken(path, config_toml, allowed, points, algorithm=algorithm, accept_lost=accept_lost)
            )
        try:
            yield session
        except Stopped:
            say(f"stopped; {session.resume_hint}")
            raise


def report_failure(session: RunSession, error: Exception) -> None:
    """Record a failed attempt at a run, and say so; one that has not begun is refused."""
    if isinstance(error, ValueError) and not session.started:
        refuse(str(error))
    session.fail(error)
    trace = f", the traceback in {session.folder / TRACEBACK}" if isinstance(error, OutsideFailed) else ""
    say(f"error: {error}\nwhat was written so far is in {session.folder}{trace}; {session.resume_hint}")
