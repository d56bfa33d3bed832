"""Pictures of every page of `proximo view`, to look at: `python -m proximo_lab.experiments.pages RUNS OUT`.

Each page of the runs in the folder RUNS is taken at 1280 x 800 and on a phone, light and dark, into OUT. Printed: pages
that are wider than the screen, and errors in the browser's console; nothing if there are none.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from proximo.insight.folder import RunFolder
from proximo_lab.experiments.large_step import launched, served

SIZES = {"desk": (1280, 800), "phone": (390, 844)}
TABS = ("overview", "stability", "performance", "events", "config", "all")
SECONDS = 2.0
"""Seconds until a page is drawn."""


def main(runs: Path, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    out.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with sync_playwright() as driver, served(runs.parent, runs.name) as (address, _):
        browser = launched(driver)
        for name, state in pages(runs):
            for size, (width, height) in SIZES.items():
                for scheme in ("light", "dark"):
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                    page.on("console", lambda message, name=name: _hear(message, name, wrong))
                    page.goto(f"{address}&{urlencode(state)}")
                    page.wait_for_timeout(1000 * SECONDS)
                    if (wide := page.evaluate("() => document.documentElement.scrollWidth")) > width:
                        wrong.append(f"{name}, {size}: {wide} pixels wide")
                    page.screenshot(path=str(out / f"{name}-{size}-{scheme}.png"))
                    page.close()
        browser.close()
    print("\n".join(wrong), end="\n" if wrong else "")


def _hear(message: Any, name: str, wrong: list[str]) -> None:
    if message.type == "error":
        wrong.append(f"{name}: {message.text}")


def pages(runs: Path) -> Iterator[tuple[str, list[tuple[str, object]]]]:
    """The address of each page: those of all runs together, and of each run with rollouts its last step and a group."""
    folders = [RunFolder(path) for path in sorted(runs.iterdir()) if (path / "run.json").exists()]
    shown: list[tuple[str, object]] = [("run", run.name) for run in folders]
    for tab in TABS:
        yield tab, [*shown, ("tab", tab)]
    for run in folders:
        if steps := run.steps():
            step: list[tuple[str, object]] = [("run", run.name), ("step", steps[-1])]
            yield f"{run.name}-step", step
            yield f"{run.name}-group", [*step, ("group", 0), ("channel", "gradient")]
            yield f"{run.name}-lens", [*step, ("lens", "five")]


if __name__ == "__main__":
    main(*(Path(each).resolve() for each in sys.argv[1:3]))
