"""The run's configuration, how to repeat it, and its files."""

import os
import shlex
from pathlib import Path

from proximo.algorithms import explain
from proximo.algorithms.explain import Card
from proximo.insight.charts.pages import Html, table, text
from proximo.insight.reading import is_number
from proximo.insight.report.run_details import RunDetails
from proximo.rl.config import RunConfig
from proximo.system.safe_text import visible

MAX_TEXT = 20_000
"""Maximum characters shown of config.toml."""
MAX_FILES = 200
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
VERSIONS = ("version", "source", "python", "torch", "transformers", "processor")


def configuration(details: RunDetails) -> str:
    """Differences from the named algorithm, other choices, and the whole file."""
    content = [_algorithm(*details.algorithm)] if details.algorithm is not None else []
    content += [f'<p class="warn">Unusual: {text(each)}</p>\n' for each in details.unusual]
    content += [_choices(details.config)] if details.config is not None else []
    content += [
        f'<p class="warn">type = {text(visible(name, 200))}, {text(visible(why, 500))}. The settings are shown as '
        "text.</p>\n"
        for name, why in details.unavailable.items()
    ]
    if details.run.config_text:
        whole = f"<pre>{text(visible(details.run.config_text, MAX_TEXT))}</pre>"
        content.append(
            f"<details{' open' * (details.config is None)}><summary>config.toml, whole</summary>{whole}</details>\n"
        )
    return "".join(content)


def _algorithm(card: Card, differences: list[tuple[str, str, str]]) -> str:
    name = f"{card.name.upper()}, {card.title}" if card.title.upper() != card.name.upper() else card.name.upper()
    if not differences:
        return f"<p>The algorithm is {text(name)} as it is named, in every choice.</p>\n"
    count = f"{len(differences)} choice{'s' * (len(differences) > 1)}"
    reasons = [
        [path, value, default, explain.source(card, path.partition(".")[0])] for path, value, default in differences
    ]
    head = ["choice", "this run", card.name.upper(), f"why {card.name.upper()} has it so"]
    return f"<p>The algorithm is {text(name)}, but for {count}:</p>\n{table(head, reasons)}"


def difference_lines(details: RunDetails) -> list[str]:
    """Example: ["gate.high is 0.2, DAPO's is 0.28"]."""
    if details.algorithm is None:
        return []
    card, differences = details.algorithm
    return [f"{path} is {value}, {card.name.upper()}'s is {default}" for path, value, default in differences]


def _choices(config: RunConfig) -> Html:
    training, limit = config.training, config.sampling.max_tokens
    rows = {
        "model": visible(config.model, 200),
        "task": visible(explain.choice(config.task), 500),
        "a step": f"{training.groups} prompts × {training.group_size} completions of at most {limit} tokens",
        "updates": f"{training.updates} a step, in {training.epochs} pass{'es' * (training.epochs > 1)} over its data",
        "learning rate": f"{training.learning_rate:g}",
        "temperature": f"{config.sampling.temperature:g}",
        "seed": str(config.seed),
    }
    return table(["", ""], rows.items())


def repeating(details: RunDetails) -> str:
    """The command that repeats the run, and the versions it ran with."""
    intro = "To get the same numbers again in another folder, run this where the first run was started:"
    content = [f"<p>{intro}</p>\n<pre>{text(again(details))}</pre>\n"]
    if started := ["proximo", *details.argv[1:]] if details.argv else []:
        content.append(f"<p>As it was started:</p>\n<pre>{text(visible(shlex.join(started), MAX_TEXT))}</pre>\n")
    changed = [name for attempt in details.attempts for name in attempt.get("changes") or {}]
    if changed:
        names = ", ".join(dict.fromkeys(str(name) for name in changed))
        content.append(f'<p class="warn">Changed on the way, and in the config as it is now: {text(names)}.</p>\n')
    machine = details.record.get("machine")
    versions = [f"{name} {details.record[name]}" for name in VERSIONS if details.record.get(name)]
    versions += (
        [f"{machine['threads']} CPU thread{'s' * (machine['threads'] != 1)}"]
        if isinstance(machine, dict) and is_number(machine.get("threads"))
        else []
    )
    content.append(f'<p class="faint">{text(" · ".join(versions))}</p>\n' if versions else "")
    return "".join(content)


def again(details: RunDetails) -> str:
    """The command, from the resolved config, since it is complete and presets may change."""
    folder = details.run.path
    folder = folder if folder.name not in ("", "..") else folder.resolve()  # "." has no name to add to
    if details.command:
        return shlex.join(["proximo", *details.command, str(folder / "config.toml"), "--run", f"{folder}-again"])
    return shlex.join(["proximo", *_without_run(details.argv[1:]), "--run", f"{folder}-again"])


def _without_run(argv: list[str]) -> list[str]:
    return [
        word
        for index, word in enumerate(argv)
        if word != "--run" and not word.startswith("--run=") and (index == 0 or argv[index - 1] != "--run")
    ]


def files(details: RunDetails) -> str:
    """The contents of the folder, one line per file or folder."""
    rows = []
    for path in sorted(details.run.path.iterdir())[:MAX_FILES]:
        # Unlike rglob, walk skips a folder that disappears meanwhile, as old checkpoints do.
        inside = [Path(at, name) for at, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
        rows.append([path.name + "/" * path.is_dir(), len(inside), size(sum(_bytes(each) for each in inside))])
    return table(["name", "files", "size"], rows)


def size(count: int) -> str:
    """Example: size(1_500_000) == "1.5 MB"."""
    unit, sign = next((each for each in UNITS if count >= each[0]), (1, "B"))
    return f"{count / unit:.3g} {sign}"


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed meanwhile by the running training
        return 0
