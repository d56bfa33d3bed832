"""Time that the page takes to open a large step: `python -m proximo_lab.experiments.large_step [ROWS] [TOKENS]
[ROUNDS]`.

A run with one step of ROWS x TOKENS tokens (512 x 4,096) is made and served by `proximo view`, and a headless chromium
opens it. Read in the browser: milliseconds from the navigation until the step's outline, its groups and the first
completion's tokens are drawn, and from the key that switches the channel until it is seen. Read of the server: its
processor time for the step and the most memory it ever held. A round has a server and a browser of its own.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from proximo.algorithms import GRPO
from proximo.config import toml
from proximo.learner.guard import Update
from proximo.losses.advantage_inputs import advantages
from proximo.models.tokens.spelling import Spelling
from proximo.rl.config import RunConfig
from proximo.runs.log import RunLog
from proximo.runs.rollouts import rollout_table
from proximo.types import Completion, Grade, Group, Problem, Rollout
from proximo.types.batches import Batch, Stats

SIBLINGS = 16
WORDS = 5000
CHANNELS = 8
"""Keys 1 to 8 switch the channel."""
WATCH = """() => {
  const first = (name, wanted) => {
    if (!window.drawn[name] && document.querySelector(wanted)) window.drawn[name] = performance.now();
  };
  window.drawn = {};
  new MutationObserver(() => {
    first("outline", "table.groups");
    first("groups", ".abouts .words > *");
    first("tokens", ".sibling .token");
  }).observe(document, { childList: true, subtree: true });
}"""
SWITCH = """(key) => new Promise((done) => {
  const [reader, token] = [document.querySelector(".reader"), document.querySelector(".sibling .token")];
  const [start, before, found] = [performance.now(), reader.dataset.shown, {}];
  new MutationObserver((_, watch) => {
    watch.disconnect();
    requestAnimationFrame(() => setTimeout(() => (found.seen = performance.now() - start)));
  }).observe(token, { attributes: true });
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const look = () => (found.seen && reader.dataset.shown !== before
    ? done([found.seen, performance.now() - start]) : setTimeout(look, 1));
  look();
})"""
"""Milliseconds until the first completion is seen in other colours, and until all are painted."""


class Words(Spelling):
    """Spells each token as a word of its own."""

    def __init__(self) -> None:
        self._words = [f" {number:x}" for number in range(WORDS)]

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        return [self._words[token] for token in tokens]


def main(rows: int, tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "runs" / "large", rows, tokens)
        rounds_opened = [opened(Path(folder)) for _ in range(rounds)]
    for name in rounds_opened[0]:
        values = [opened_once[name] for opened_once in rounds_opened]
        print(f"{name:40} {statistics.median(values):8.0f}   ({', '.join(f'{value:.0f}' for value in values)})")


def write(folder: Path, rows: int, tokens: int) -> None:
    """A run with one step in the types that training stores, clipped here and there."""
    draw = torch.Generator().manual_seed(0)
    group = torch.arange(rows) // SIBLINGS
    ids = torch.randint(WORDS, (rows, tokens), generator=draw)
    mask, old = torch.ones(rows, tokens, dtype=torch.bool), -torch.rand(rows, tokens, generator=draw)
    rewards = torch.randint(2, (rows,), generator=draw).double()
    credit, _ = advantages(GRPO, rewards=rewards, group=group, mask=mask)
    spelling = Words()
    rollouts = [_rollout(row, float(reward), spelling) for row, reward in zip(ids.tolist(), rewards, strict=True)]
    batch = Batch(
        prompts=tuple((0,) for _ in range(rows // SIBLINGS)),
        tokens=ids,
        lengths=torch.full((rows,), tokens),
        sampled=mask,
        mask=mask,
        group=group,
        outcome=rewards,
        rewards=rewards,
        truncated=torch.zeros(rows, dtype=torch.bool),
        version=torch.zeros(rows, dtype=torch.long),
        rollout_logprobs=old,
        rollout_entropy=torch.rand(rows, tokens, generator=draw),
        old_logprobs=old,
        ref_logprobs=old + 0.1 * torch.randn(rows, tokens, generator=draw),
        advantages=credit.float().expand(rows, tokens).contiguous(),
        groups=tuple(
            Group(
                Problem(f"sum-{number}", f"{number} + 1 =", "2"),
                (0,),
                tuple(rollouts[number * SIBLINGS : (number + 1) * SIBLINGS]),
            )
            for number in range(rows // SIBLINGS)
        ),
        sibling=torch.arange(rows) % SIBLINGS,
    )
    now = old + 0.1 * torch.randn(rows, tokens, generator=draw)
    update = Update(
        stats=Stats(totals={"policy_loss": torch.zeros(()), "loss": torch.zeros(())}),
        gradient_norm=1.0,
        value_gradient_norm=None,
        first_gap=None,
        rows=torch.arange(rows),
        logprobs=now,
        old_logprobs=old,
        entropy=torch.rand(rows, tokens, generator=draw),
        version=0,
    )
    log = RunLog(folder)
    log.start(toml.dumps(RunConfig(algorithm=GRPO)), {"format": 2, "argv": ["proximo", "train"]})
    kept = rows // SIBLINGS
    log.rollouts(0, rollout_table(batch, spelling, trained=torch.arange(rows), kept_groups=kept, updates=[update]))
    log.metrics(0, {"reward": float(rewards.mean())})


def _rollout(tokens: list[int], reward: float, spelling: Spelling) -> Rollout:
    text = "".join(spelling(tokens))
    return Rollout(Completion(tuple(tokens), (-0.5,) * len(tokens), text, "stop"), Grade(reward, {}))


def launched(driver: Any) -> Any:
    """A browser of this machine."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    return driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])


def opened(home: Path) -> dict[str, float]:
    """Milliseconds and MB of one server and one browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, served(home) as (address, process):
        measured = {"server's imports, processor ms": _processor(process), "server's imports, MB": _memory(process)}
        browser = launched(driver)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.add_init_script(f"({WATCH})()")
        page.goto(f"{address}&run=large")
        page.wait_for_load_state("networkidle")
        before = _processor(process)
        for name, state in (("a step", "step=0"), ("a step and a group", "step=0&group=3")):
            page.goto("about:blank")
            page.goto(f"{address}&run=large&{state}")
            wanted = "tokens" if "group" in state else "groups"
            drawn = _until(page, "(wanted) => window.drawn[wanted] && window.drawn", wanted)
            page.wait_for_load_state("networkidle")
            measured |= {f"{name}: {part} drawn, ms": value for part, value in drawn.items()}
            measured[f"{name}: server's processor ms"] = _processor(process) - before
            before = _processor(process)
        switched = [page.evaluate(SWITCH, str(key)) for key in (*range(1, CHANNELS + 1), *range(1, CHANNELS + 1))]
        for name, values in zip(("seen", "all painted"), zip(*switched, strict=True), strict=True):
            measured |= {
                f"channel {name}, median ms": statistics.median(values),
                f"channel {name}, most ms": max(values),
            }
        browser.close()
        return measured | {"server, most MB": _memory(process, "VmHWM"), "server at rest, MB": _memory(process)}


def _until(page: Any, script: str, argument: str) -> Any:
    """Wait for a script's value, once that is something: the page's policy forbids playwright's own waiting."""
    while not (value := page.evaluate(script, argument)):
        page.wait_for_timeout(20)
    return value


@contextmanager
def served(home: Path, runs: str = "runs") -> Iterator[tuple[str, int]]:
    """The address of `proximo view`, and its process."""
    command = [sys.executable, "-m", "proximo.cli", "view", runs, "--no-browser"]
    process = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"http\S+", process.stdout.readline())
        assert match, "proximo view prints its address first"
        yield match[0], process.pid
    finally:
        process.terminate()
        process.wait()


def _processor(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(process: int, which: str = "VmRSS") -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:")) / 1000


if __name__ == "__main__":
    main(*(int(each) for each in [*sys.argv[1:], *("512", "4096", "3")[len(sys.argv) - 1 :]]))
