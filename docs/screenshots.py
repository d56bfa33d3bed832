"""Makes the pictures of README and guides from real runs, into docs/images: `make screenshots`.

Each picture is what a page shows after the commands below. Some minutes on two cores, the runs included; `--runs DIR`
keeps them in a folder, see real_runs.py.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright
from real_runs import CODE, DEMO, folder_of_runs, make

from proximo.insight.folder import RunFolder
from proximo.insight.lens.lens import look
from proximo.insight.lens.states import TokenState
from proximo.runs.log import METRICS

IMAGES = Path(__file__).resolve().parent / "images"
LARGEST = 250_000
"""Bytes of a picture: pages are to be read on slow lines, too."""
SEEN, SCALES = {"width": 1280, "height": 860}, (1.5, 1.25, 1.0)
"""A window, and how many dots to a pixel: the first at which the picture is small enough."""
COMMANDS = (
    *DEMO,
    "train --algorithm sapo --steps 60 --evaluation.every 10 --run runs/sapo",
    *CODE,
    "compare --algorithms grpo,ppo,sapo --seeds 3 --tokens 25000 --run compared",
    "report runs/grpo",
)
PAGES = {"report": "runs/grpo/report.html", "compare": "compared/compare.html"}


def main() -> None:
    with folder_of_runs(__doc__) as (home, is_made):
        if is_made:
            make(home, COMMANDS)
        take(home)


def take(home: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        sys.exit("no chromium on this machine: apt install chromium")
    with sync_playwright() as driver, served(home, "runs") as address:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=browser_path, args=arguments)
        for name, path in PAGES.items():
            picture(browser, name, (home / path).as_uri(), "svg polyline")
        picture(browser, "overview", f"{address}&{urlencode([('run', 'grpo'), ('run', 'sapo')])}", "canvas")
        picture(browser, "reader", f"{address}&{urlencode(told(RunFolder(home / 'runs' / 'code')))}", ".token")
        browser.close()


@contextmanager
def served(home: Path, runs: str) -> Iterator[str]:
    """The address of `proximo view`, token included."""
    command = [sys.executable, "-m", "proximo.cli", "view", runs, "--no-browser"]
    process = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http\S+", process.stdout.readline())
        assert found, "proximo view prints its address first"
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def told(run: RunFolder) -> dict[str, Any]:
    """Where there is something to see: a token that the clip stopped, or else the strongest gradient, in the step that
    clipped most."""
    rows = [row for row in run.rows(METRICS) if row.get("step") in run.steps()]
    number = max(rows, key=lambda row: row.get("blocked") or 0.0)["step"]
    step = run.step(number)
    seen = look(step, run.config.algorithm, run.config)
    stopped = (seen.state == TokenState.HIGH) | (seen.state == TokenState.LOW)
    row, token = step.layout.token(int((seen.gradient.abs() + 1e6 * stopped).argmax()))
    place = {"step": number, "group": int(step.batch.group[row]), "row": row, "token": token}
    return {"run": run.name, **place, "channel": "gradient"}


def picture(browser: Any, name: str, address: str, wanted: str) -> None:
    """As soon as what is wanted is drawn and the page rests."""
    path = IMAGES / f"{name}.png"
    for scale in SCALES:
        page = browser.new_page(viewport=SEEN, device_scale_factor=scale)
        page.goto(address)
        page.locator(wanted).first.wait_for(state="attached")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(1500)
        page.screenshot(path=path)
        page.close()
        size = path.stat().st_size
        if size <= LARGEST:
            print(f"{path.relative_to(IMAGES.parents[1])}: {size:,} bytes")
            return
    sys.exit(f"{path} has more than {LARGEST:,} bytes at every scale")


if __name__ == "__main__":
    main()
