"""`proximo resume`: go on with a run that ended early, by the command that began it."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proximo.cli import run_command
from proximo.cli.arguments import refuse, refusing, take, take_number
from proximo.runs.files import RESULT
from proximo.runs.run_json import config_damage, read_record
from proximo.system.opening import read_text, without_links

USAGE = """usage: proximo resume RUN [--steps N] [--field VALUE ...]

Go on with a run that ended early, from its newest checkpoint and with its own config.

RUN is the folder of a run of train, fork, sft, dpo or reward-model. It does what repeating the run's command with the
same --run does, and takes that command's flags: --track NAME, --notify URL, --ranks N, --profile N,
--accept-lost-rows, --json. More --steps than a run had need no more than that, of a stage as long as it is not
finished; any other field that is to change is named, too: --allow-change FIELD. Code of your own that its config names
is loaded if you have run it with this run before, or with --load-code. Rounds, comparisons and pipelines resume by
repeating their command.

examples:
  proximo resume runs/a
  proximo resume runs/a --steps 300                          more steps than it had
  proximo resume runs/a --lr 1e-6 --allow-change training.learning_rate
"""


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        refuse("resume needs the folder of a run: proximo resume RUN")
    folder = without_links(arguments.pop(0))
    if (other := take(arguments, "--run")) is not None:
        refuse(f"--run {other}: resume goes on in {folder}; to begin another run there, proximo fork {folder}")
    tables = _tables(folder)
    command = _command(folder, tables)
    field = "steps" if command == "train" else "fit.steps"
    allowed = ["--allow-change", field] * _has_more_steps(folder, command, tables, arguments)
    return run_command(command, [str(folder / "config.toml"), *arguments, *allowed, "--run", str(folder)])


def _has_more_steps(folder: Path, command: str, tables: Mapping[str, Any], arguments: list[str]) -> bool:
    """True if the arguments give a run more steps than it had, which needs no permission."""
    steps = take_number(list(arguments), "--steps", int)
    if steps is None:
        return False
    with refusing():
        record = read_record(folder) or {}
    had = tables.get("steps") if command == "train" else record.get("steps")
    if command != "train" and (folder / RESULT).is_file():
        refuse(
            f"{folder} is finished, and what its optimizer held is gone: go on from its model by proximo {command} "
            f"DATA --model {folder} --run NEW"
        )
    return isinstance(had, int) and steps > had


def _tables(folder: Path) -> dict[str, Any]:
    """The config of a run, as its folder has it."""
    with refusing():
        record = read_record(folder) if folder.is_dir() else None
        if record is not None and (damage := config_damage(folder, record)):
            raise ValueError(f"{folder}: {damage}")
    if record is None:
        refuse(f"{folder} holds no run: give the folder of one, such as runs/demo")
    return tomllib.loads(read_text(folder / "config.toml"))  # as read_record has read it


def _command(folder: Path, tables: Mapping[str, Any]) -> str:
    """The command that began a run, by what its config has."""
    if "algorithm" in tables:
        return "train"
    if "dynamic" in tables:
        return "sft"
    if "fit" not in tables or not isinstance(loss := tables.get("loss"), dict):
        refuse(f"{folder} is no run of one model: repeat the command that began it, with the same --run")
    return "dpo" if "type" in loss else "reward-model"
