"""Writes a bundle: the page's own files, joined, and the data of runs as scripts, since a page that is opened from disk
may not fetch anything."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from proximo.insight.folder import RunFolder
from proximo.insight.page.bundle.answers import algorithms_of, of_run, of_step, problems_of
from proximo.insight.page.files import SCRIPT, STATIC, STYLES, page_files
from proximo.insight.page.overview import Runs
from proximo.system.folders import new_folder
from proximo.system.lines import plain
from proximo.system.opening import make_folder, write_new

DEFAULT_STEPS = 8
"""Steps of each run that are stored if none are named."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
Choose = Callable[[Sequence[int]], Sequence[int]]
"""Chooses from the steps that a run has stored."""


def write_bundle(out: Path, folders: Sequence[Path], choose: Choose, *, load_code: bool = False) -> dict[str, Any]:
    """Write the page of all runs in these folders; returns what is in it. The folder must be new or empty, and has the
    whole page or nothing."""
    listed, runs = _listed_runs(folders, load_code)
    with new_folder(out) as folder:
        return _write_all(folder, listed, runs, choose)


def _write_all(
    out: Path,
    listed: dict[str, Any],
    runs: Mapping[str, tuple[RunFolder, Any]],
    choose: Choose,
) -> dict[str, Any]:
    data = out / "data"
    make_folder(data)
    index: dict[str, Any] = {
        "made": f"{datetime.now():%Y-%m-%d %H:%M}",
        "listed": listed,
        "runs": {},
    }
    for number, (name, (run, parting)) in enumerate(runs.items()):
        index["runs"][name] = _write_run(data, f"run-{number}", run, parting, choose)
    _write(data / "index.js", f"window.proximoBundle = {_json(index)};\n")
    _write_page(out)
    return index


def evenly(steps: Sequence[int]) -> list[int]:
    """Some of the steps, evenly spaced, the first and the last among them."""
    count = min(DEFAULT_STEPS, len(steps))
    places = [round(index * (len(steps) - 1) / max(count - 1, 1)) for index in range(count)]
    return [steps[index] for index in places]


def _listed_runs(folders: Sequence[Path], load_code: bool) -> tuple[dict[str, Any], dict[str, tuple[RunFolder, Any]]]:
    """The list of runs as the page shows it, and the runs by name, with where each parts from its parent. A name that
    two folders have gets its folder's."""
    shown, runs = [], {}
    for folder in folders:
        inside = Runs(folder, load_code=load_code)
        for each in inside.listed()["runs"]:
            name = each["name"]
            if name in runs:
                name = f"{folder.resolve().parent.name}/{name}"
            if name in runs:
                raise ValueError(f"two runs are called {name!r}: give the folder that both are in")
            runs[name] = (inside.named(each["name"]), inside.parting(each["name"]))
            shown.append(each | {"name": name})
    if not runs:
        raise ValueError(
            f"there are no runs in {', '.join(map(str, folders))}: give run folders, or one with runs in it"
        )
    return {"root": "a copy", "runs": shown}, runs


def _write_run(data: Path, file: str, run: RunFolder, parting: Mapping[str, Any], choose: Choose) -> dict[str, Any]:
    """Write a run's files; returns which steps are where. A run of another kind has no steps that can be read."""
    try:
        _ = run.config
        steps = list(choose(run.steps()))
    except (ValueError, OSError):
        steps = []
    places: dict[str, dict[str, str]] = {}
    stored: dict[int, dict[str, Any]] = {}
    left_out: dict[int, str] = {}
    for step in steps:
        try:
            names = algorithms_of(run, step)
            for name in names:
                answers = of_step(run, step, name)
                places.setdefault(str(step), {})[name] = _write_data(data, f"{file}-step-{step}-{name}", answers)
                if name == names[0]:
                    stored[step] = {"step": answers["step"], "groups": answers["groups"]}
        except ValueError as error:  # a damaged file
            left_out[step] = str(error)
    whole = of_run(run, list(stored)) | {"problems": problems_of(stored), "parting": parting}
    return {"file": _write_data(data, file, whole), "steps": places, "of": run.steps(), "damaged": left_out}


def _write_data(data: Path, name: str, value: Mapping[str, Any]) -> str:
    """Write a file with a value; its name has nothing of the run's own texts."""
    safe = re.sub(r"[^a-z0-9-]", "_", name)
    _write(data / f"{safe}.js", f"proximoBundle.take({json.dumps(safe)}, {_json(value)});\n")
    return safe


def _write_page(out: Path) -> None:
    """The page's own files: one script, one style sheet, and a page that names them."""
    files = page_files()
    for name in (SCRIPT, STYLES):
        write_new(out / name, files[f"/{name}"][0])
    write_new(out / "icon.svg", (STATIC / "icon.svg").read_bytes())
    page = re.sub(r'(href|src)="/(?:static/)?', r'\1="', files["/"][0].decode())
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    private = '<meta name="referrer" content="no-referrer">\n'
    script = f'<script defer src="{SCRIPT}">'
    page = page.replace("<title>", f"{policy}{private}<title>")
    _write(out / "index.html", page.replace(script, f'<script defer src="data/index.js"></script>\n{script}'))


def _json(value: Any) -> str:
    """JSON in ASCII, without characters that could end a script."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(plain(value), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _write(path: Path, text: str) -> None:
    write_new(path, text.encode())
