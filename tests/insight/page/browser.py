"""Pages as people see them: a server over a folder of runs, and a headless chromium that looks at it.

Where there is no browser the tests that need one are skipped, and the session says so in one line; where CI=true they
fail instead.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Nothing of proximo's up here: this is a plugin of conftest.py's, imported before shapes are checked.

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "no chromium on this machine"

VIEWPORT = {"width": 1300, "height": 850}
PHONE = {"width": 390, "height": 844}


@dataclass(frozen=True)
class Served:
    port: int
    token: str = "a-secret"

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def address(self, **state: str) -> str:
        """With the token, as it is printed."""
        return f"{self.origin}/#" + "&".join(
            f"{name}={value}" for name, value in {"token": self.token, **state}.items()
        )


@contextmanager
def served(root: Path, **options: Any) -> Iterator[Served]:
    """The page of a folder, from a thread of this process."""
    from proximo.insight.page.server import bind, server

    socket = bind(0)
    made = Served(socket.getsockname()[1])
    running = server(root, token=made.token, port=made.port, **options)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        until(lambda: running.started)
        yield made
    finally:
        running.should_exit = True
        thread.join()
        socket.close()


@dataclass
class Window:
    """A page in the browser, what it asked for, and what went wrong in it."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    servers: ExitStack = field(default_factory=ExitStack)
    deaf: ExitStack = field(default_factory=ExitStack)
    """Takes the listeners away."""

    def listen(self, event: str, heard: Callable[[Any], object]) -> None:
        """For as long as the window is open: its tab is another test's afterwards."""
        self.page.on(event, heard)
        self.deaf.callback(self.page.remove_listener, event, heard)

    def serve(self, root: Path) -> Served:
        """A folder of its own, for as long as the window is open."""
        return self.servers.enter_context(served(root))

    def charts(self) -> dict[str, Any]:
        """What is drawn, by the name of the chart."""
        return self.page.evaluate("() => window.proximo.charts")

    def until(self, script: str, argument: object = None) -> Any:
        """What a script says, once that is something. Playwright's own waiting would need a policy that lets strings
        become scripts."""
        return until(lambda: self.page.evaluate(script, argument))


def until(condition, seconds: float = 20.0) -> Any:
    """Its value, once it has one."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def chromium():
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(chromium) -> Iterator[Any]:
    """Shared by a file's windows: a context of its own costs each of them more than a second of processor time."""
    made = chromium.new_context(viewport=VIEWPORT)
    yield made
    made.close()


@pytest.fixture
def window(context) -> Iterator[Window]:
    """One as if it were new, which must not complain. Tests of a file share its tab: a page takes a new one twice as
    much processor time to show."""
    page = context.pages[0] if context.pages else context.new_page()
    with _window(page) as made:
        yield made
        if page.url.startswith("http"):
            page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    for other in context.pages[1:]:
        other.close()
    page.mouse.move(0, 0)
    page.emulate_media(color_scheme="light")
    if page.viewport_size != VIEWPORT:
        page.set_viewport_size(VIEWPORT)


@pytest.fixture
def clocked(chromium) -> Iterator[Window]:
    """A new one, whose clock a test can put forward. Playwright's clock is a whole context's, so it has its own."""
    context = chromium.new_context(viewport=VIEWPORT)
    context.clock.install()
    with _window(context.new_page()) as made:
        yield made
    context.close()


@contextmanager
def _window(page: Any) -> Iterator[Window]:
    made = Window(page)
    page.set_default_timeout(20_000)
    made.listen("request", lambda request: made.requests.append(request.url))
    made.listen("pageerror", lambda error: made.errors.append(str(error)))
    made.listen("console", lambda said: made.errors.append(said.text) if said.type == "error" else None)
    yield made
    made.deaf.close()
    page.goto("about:blank")  # which asks its server for nothing
    made.servers.close()
    assert made.errors == [], made.errors


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever needs the browser is slow."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow("starts a browser"))


def pytest_terminal_summary(terminalreporter) -> None:
    """One line for all that were skipped."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of pages were skipped: {MISSING} (apt install chromium)")


def write_run(
    folder: Path,
    metrics: Sequence[Mapping[str, object]] = (),
    *,
    timings: Sequence[Mapping[str, object]] = (),
    events: Sequence[Mapping[str, object]] = (),
    state: str = "stopped",
    **changes: Any,
) -> Path:
    """A run's folder without a run; `changes` are of its config."""
    from proximo.algorithms import GRPO
    from proximo.config import toml
    from proximo.rl.config import RunConfig

    folder.mkdir(parents=True)
    facts = {
        "format": 2,
        "argv": ["proximo", "train"],
        "torch": "2.0",
        "attempts": [{"number": 1, "started": "2026-01-01 00:00:00"}],
    }
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "config.toml").write_text(toml.dumps(RunConfig(**{"algorithm": GRPO, **changes})))
    for name, rows in (("metrics", metrics), ("timings", timings), ("events", events)):
        append(folder, name, *rows)
    if state == "running":
        (folder / "lock").touch()
    elif state == "finished":
        (folder / "result.json").write_text("{}")
    return folder


def append(folder: Path, name: str, *rows: Mapping[str, object]) -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
