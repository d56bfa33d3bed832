"""Commands `proximo study` and `python -m proximo_lab.studies`."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from proximo.models.devices import pick_device
from proximo.system.folders import write_file
from proximo.system.locks import FolderLock, Locked
from proximo.system.opening import make_folder, read_file, without_links
from proximo_lab.studies.atlas.page import PAGE, atlas
from proximo_lab.studies.designs import STUDIES
from proximo_lab.studies.figure import figure
from proximo_lab.studies.finding import Findings, findings
from proximo_lab.studies.folder import Laboratory, OtherDesign
from proximo_lab.studies.page import headline, page
from proximo_lab.studies.running import Amount, amount, chosen_rate, records, run
from proximo_lab.studies.study import Study
from proximo_lab.studies.wording import label, plain_words

Say = Callable[[str], None]
NOT_STARTED = "not started"
_OTHER_COMMAND = "proximo_lab.studies.command.conduct([study], out, processes=…, say=print), with the study's own file"
SHARING = 12
"""Runs that share a GPU, if nothing is asked for: each has compiled code and captured graphs of its own there."""


def named(name: str) -> Study:
    """The study of a name; ValueError if there is none."""
    for study in STUDIES:
        if study.name == name:
            return study
    raise ValueError(f"no study is called {name!r}; there are: {', '.join(study.name for study in STUDIES)}")


def on_device(name: str, device: str) -> Study:
    """The study of a name, with its runs on a device; ValueError if there is no such study or device."""
    if device not in ("auto", "cpu") and device.partition(":")[0] != "cuda":
        raise ValueError(f"--device {device}: runs of a study are computed on cpu or cuda")
    return named(name).on(pick_device(device))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def at_a_time(device: str) -> int:
    """Runs at a time, if nothing is asked for."""
    return cores() if pick_device(device) == "cpu" else min(cores(), SHARING)


def listed(out: Path, published: Mapping[str, str] | None = None) -> list[str]:
    """A line for each study: its name, title and state; and what all of them together need. `published` has verdicts
    of the project's own runs, for studies that were not started here. ValueError if `out` is no folder."""
    if any(part.is_file() for part in (out, *out.parents)):
        raise ValueError(f"{out} is no folder: give one with --out")
    lab, width = Laboratory(out), max(len(study.name) for study in STUDIES)
    known = {study.name: state(study, lab) for study in STUDIES}
    for name, verdict in (published or {}).items():
        if known[name] == NOT_STARTED:
            known[name] = f"{NOT_STARTED}; published: {label(verdict)}"
    lines = [f"{study.name:{width}}  {known[study.name]}  ({plain_words(study.title)})" for study in STUDIES]
    return [*lines, f"all together: {_words(amount(STUDIES, lab), cores())}"]


def state(study: Study, lab: Laboratory) -> str:
    """State of a study in a folder."""
    try:
        if lab.stored(study) is None:
            return NOT_STARTED
    except OtherDesign:
        return "stored with another design"
    except ValueError:
        return "its stored design is damaged"
    result = findings(study, records(study, lab))
    return headline(result, result.contrasts[0])


def conduct(
    studies: Sequence[Study], out: Path, *, processes: int, say: Say, minutes: float | None = None, dry: bool = False
) -> bool:
    """Do what is left of the studies and write their pages; whether all runs are done. ValueError if a stored design
    differs."""
    lab = Laboratory(out)
    for study in studies:
        lab.stored(study)
        say(f"{study.label}: {_words(amount([study], lab), processes)}")
    if len(studies) > 1:
        say(f"together: {_words(amount(studies, lab), processes)}")
    if dry:
        return False
    with _alone(out):
        complete = not run(studies, out, processes, say, minutes)
        for study in studies:
            result = conclude(study, lab)
            complete = complete and result.is_complete
            say(f"{study.label}: {headline(result, result.contrasts[0])}; {lab.folder / study.label}.md")
    return complete


def _alone(out: Path) -> FolderLock:
    try:
        return FolderLock(out)
    except Locked:
        raise ValueError(f"{out} is in use by another study command: wait for it, or give another --out") from None


def conclude(study: Study, lab: Laboratory) -> Findings:
    """Write the study's page and figure from the finished runs."""
    result = findings(study, records(study, lab))
    rates = {arm.name: rate for arm in study.arms if (rate := chosen_rate(study, arm, lab)) is not None}
    lab.conclude(study, result.to_dict())
    command = "" if study.name in {each.name for each in STUDIES} else _OTHER_COMMAND
    write_file(lab.folder / f"{study.label}.md", page(result, rates, command, lab.known(study)).encode())
    write_file(lab.folder / f"{study.label}.svg", figure(result).encode())
    return result


def publish(out: Path, folder: Path) -> None:
    """Copy the page, figure and findings of each finished study to a folder, and write the atlas there. ValueError
    before anything is copied if a stored design differs or cannot be read."""
    lab = Laboratory(out)
    started = [study for study in STUDIES if lab.stored(study) is not None]
    folder = without_links(folder)
    make_folder(folder)
    for study in started:
        if conclude(study, lab).is_complete:
            for suffix in (".md", ".svg", ".json"):
                write_file(folder / f"{study.name}{suffix}", read_file(out / f"{study.name}{suffix}"))
    write_file(folder / PAGE, atlas(folder).encode())


def _words(todo: Amount, processes: int) -> str:
    minutes = todo.seconds / 60 / processes
    time = f"{max(minutes, 1):.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    return f"{todo.runs} runs, {todo.left} left" + (
        f": about {time} with {processes} process{'es' if processes > 1 else ''}" if todo.left else ""
    )
