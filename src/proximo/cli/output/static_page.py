"""`proximo view --static`: the page as a folder of files."""

import re
from collections.abc import Sequence
from pathlib import Path

from proximo.cli.flags import refuse

MAX_STEPS = 10_000
"""Steps that a range may name."""


def write_static(out: Path, arguments: Sequence[str], steps: str | None, *, load_code: bool) -> int:
    """Write the page and say where it is; exit status 0."""
    if unknown := [each for each in arguments if each.startswith("-")]:
        refuse(f"proximo view --static takes no {unknown[0]}: proximo view --static OUT [RUN | DIR ...] [--steps LIST]")
    folders = [Path(each) for each in arguments or ["runs"]]
    if missing := [each for each in folders if not each.is_dir()]:
        refuse(f"there is no folder {missing[0]}: give run folders, or one with runs in it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        refuse(f"--static {out}: it is there already and not empty; give a new folder, or remove it")
    wanted = None if steps in (None, "all") else chosen_steps(steps)
    from proximo.insight.page.bundle.writing import evenly, write_bundle

    choose = list if steps == "all" else evenly if wanted is None else lambda there: [n for n in there if n in wanted]
    try:
        index = write_bundle(out, folders, choose, load_code=load_code)
    except (ValueError, OSError) as error:
        refuse(str(error))
    count = sum(len(each["steps"]) for each in index["runs"].values())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    runs = f"{len(index['runs'])} run{'s' * (len(index['runs']) != 1)}"
    print(f"{out / 'index.html'}: {runs}, rollouts of {count} step{'s' * (count != 1)}, {size / 1e6:.1f} MB")
    for name, each in index["runs"].items():
        if wanted is not None and not each["steps"]:
            there = f"it has {each['of'][0]} to {each['of'][-1]}" if each["of"] else "it has none"
            print(f"{name}: no rollouts of the steps {steps}; {there}")
        for step, reason in each["damaged"].items():
            print(f"{name}: step {step} is left out: {reason}")
    return 0


def chosen_steps(text: str) -> frozenset[int]:
    """Example: chosen_steps("1,5,10-12") == {1, 5, 10, 11, 12}"""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), re.ASCII)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last < first + MAX_STEPS:
            refuse(f"--steps {text}: give all, or numbers and ranges such as 1,5,10-20")
        found.update(range(first, last + 1))
    return frozenset(found)
