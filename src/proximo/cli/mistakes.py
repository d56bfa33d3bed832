"""Mistakes on a command line that are answered before torch is imported: another library's commands and configs, a
model or data that are not named, and files that are not there."""

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from proximo.cli.arguments import flag_names, nearest, take, take_several
from proximo.cli.naming import named
from proximo.config.vocabulary import BY_NAME, STAGES, Foreign, foreign, kind_of

ALGORITHMS = (
    *("ppo", "grpo", "dapo", "gspo", "sapo", "gspo-token", "dr-grpo", "rloo", "reinforce-pp", "reinforce-pp-baseline"),
    *("cispo", "gmpo", "gpg", "bnpo", "vapo", "clip-cov", "kl-cov", "lite-ppo", "luspo", "vespo", "distill", "rft"),
    *("online-dpo", "gspo-product", "sapo-sequence"),
)
"""Names of algorithms, as `proximo explain` has them."""
PRESETS = (
    *("arithmetic", "ppo-arithmetic", "vapo-arithmetic", "smollm-arithmetic", "guessing", "calculator", "words"),
    *("python", "length", "chain", "chain-process", "moe-echo", "copy", "open-ended", "pipeline-demo"),
)
"""Names of presets, as recipes/presets.py has them."""
OF_PRESETS = ("train", "init", "selfcheck", "iterate", "plan")
"""Commands whose first argument is a preset or a .toml file."""
OF_OTHERS = (".yaml", ".yml", ".py")
"""Files that configure or are a run elsewhere."""
DATA = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
"""Suffixes of files of data."""
WITH_MODELS = ("eval", "chat", "serve")
"""Commands whose first argument is a model."""
WEIGHTS = Path(__file__).parents[1] / "models" / "weights"
LOCAL = ("/", "./", "../", "~", "runs/")
"""Beginnings of paths that are none of the hub's."""
OVERRIDE = re.compile(r"[+~]{0,2}([a-z_]\w*(?:\.\w+)+)=")
"""An override of Hydra, as verl's scripts have them: a.b.c=VALUE."""
DEMO_MODEL, DEMO_TASK = "tiny-arithmetic", "Arithmetic"


def no_such_command(command: str, commands: Sequence[str]) -> str:
    """Complaint about a command that is not there."""
    name = command.lower().replace("_", "-")
    if name in ALGORITHMS:
        return f"{command} is an algorithm, no command: proximo train --algorithm {name} --model MODEL --data DATA"
    return f"no command is called {command!r}{nearest(command, commands)}; there are: {', '.join(commands)}"


def mistake(command: str, arguments: Sequence[str]) -> str | None:
    """Complaint about what the arguments name; None where nothing is certainly wrong."""
    return next(_mistakes(command, arguments), None)


def _mistakes(command: str, arguments: Sequence[str]) -> Iterator[str]:
    first = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if kind_of(command) is not None and first.lower().endswith(OF_OTHERS):
        yield _of_others(command, first)
    if kind_of(command) == "train" and first.lower().endswith(DATA):
        yield f"{first} is data, and {command} takes it by a flag: proximo {command} --model MODEL --data {first}"
    yield from _overrides(command, arguments)
    if command in OF_PRESETS and first not in ("", *PRESETS) and not first.lower().endswith((".toml", *DATA)):
        yield no_such_preset(first, PRESETS)
    yield from _halves(command, first, arguments)
    for data in _data(command, first, arguments):
        if not _is_there(data):
            yield f"data {data!r}: there is no such file{nearest(Path(data).name, _beside(data))}"
    models = [first] * (command in WITH_MODELS) + [take(_copy(arguments, "--model"), "--model") or ""]
    for model in models:
        yield from _no_such_model(model)


def no_such_preset(name: str, presets: Sequence[str]) -> str:
    """Complaint about a name that is none of the presets."""
    if name.lower() in ALGORITHMS:
        return f"{name} is an algorithm, no preset: --algorithm {name.lower()}"
    if os.path.isfile(os.path.join(name, "run.json")):
        return f"{name} is a run's folder: proximo resume {name} goes on with it, --model {name} trains its model anew"
    if "/" in name or os.path.isdir(name):
        return f"{name} is no preset; a model is given by a flag: --model {name} --data DATA"
    return f"no preset is called {name!r}{nearest(name, presets)}; there are {', '.join(presets)}, or give a .toml file"


def _of_others(command: str, name: str) -> str:
    """Answer to a recipe or script of another library."""
    what = "a script" if name.endswith(".py") else "a config of another library"
    return (
        f"{name} is {what}, and {command} takes a preset, data or a .toml file: `proximo init --model MODEL --data "
        "DATA` writes one; docs/tutorials/from-trl.md and from-verl.md say what each setting is called here"
    )


def _overrides(command: str, arguments: Sequence[str]) -> Iterator[str]:
    """Answer to overrides in Hydra's form, all in one."""
    kind, scheduled = kind_of(command), take_several(_copy(arguments, "--schedule"), "--schedule") or []
    names = [match[1] for each in arguments if each not in scheduled and (match := OVERRIDE.match(each))]
    answers = [(name, foreign(name, kind)) for name in names] if kind is not None else []
    if any(answer is not None for _, answer in answers):
        yield "\n  ".join(
            [
                "settings are flags here, `--NAME VALUE`; docs/tutorials/from-verl.md has the table",
                *(f"{name}: {_here(answer)}" for name, answer in answers),
            ]
        )


def _here(answer: Foreign | None) -> str:
    if answer is None:
        return "no setting of this name is known here"
    flag = BY_NAME[answer.ours].flag if answer.ours in BY_NAME else f"--{answer.ours.replace('_', '-')}"
    return answer.sentence(flag if answer.ours else "")


def half(source: str, given: set[str]) -> str | None:
    """Complaint about a model without data, or data without a model: the demo's would silently take its place."""
    if given == {"data"}:
        return f"{source} has data and no model: give --model MODEL; the demo's is --model {DEMO_MODEL}"
    if given == {"model"}:
        return (
            f"{source} has a model and no data: give --data DATA, or a task, --task.type NAME; the demo's is "
            f"--task.type {DEMO_TASK}"
        )
    return None


def no_model(stage: str) -> str:
    """Complaint about a stage that is to train no model."""
    new = "; --model None is a new tiny one" * (stage == "sft")
    return f"{stage} needs a model: --model MODEL, a folder, a run folder or a hub id{new}"


def _halves(command: str, first: str, arguments: Sequence[str]) -> Iterator[str]:
    flags = flag_names(arguments)
    if (
        command in ("train", "init", "selfcheck")
        and not first
        and (complaint := half(f"proximo {command}", named(arguments)))
    ):
        yield complaint
    has_data = bool(first) or any(each.startswith("--data") for each in flags)
    if command in STAGES and has_data and not first.endswith(".toml") and "--model" not in flags:
        yield no_model(command)


def _data(command: str, first: str, arguments: Sequence[str]) -> Iterator[str]:
    """The files of data that are named, without the weight or name that they are given with."""
    given = [first] * (command in STAGES)
    for flag in ("--data", "--eval-data"):
        given += take_several(_copy(arguments, flag), flag) or []
    yield from (each for each in given if each.lower().partition("=")[0].endswith(DATA))


def _copy(arguments: Sequence[str], flag: str) -> list[str]:
    """The arguments, none where the flag is the last and has no value, which is refused elsewhere."""
    return list(arguments) if list(arguments)[-1:] != [flag] else []


def _is_there(data: str) -> bool:
    """True if a file is there, or the name is a pattern or one of the hub's."""
    name, _, last = data.rpartition("=")
    return any(os.path.lexists(each) for each in (data, name, last) if each) or any(each in data for each in "*?[:@")


def _beside(path: str) -> list[str]:
    """The files of a folder in which another was looked for."""
    folder = os.path.dirname(path) or "."
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _no_such_model(model: str) -> Iterator[str]:
    if not model or os.path.lexists(model):
        return
    if model.startswith(LOCAL) or (model.count("/") > 1 and "://" not in model):
        yield f"there is no folder {model}{nearest(Path(model).name, _beside(model))}"
    shipped = _beside(str(WEIGHTS / "any"))
    if "/" not in model and model not in shipped and (close := get_close_matches(model.lower(), shipped, 1, 0.8)):
        yield f"no model is called {model!r}: did you mean {close[0]}, which ships with Proximo?"
