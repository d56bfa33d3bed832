"""The stages of a pipeline, each run by its own function into its own folder."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from proximo.config import toml
from proximo.recipes.pipeline.config import DPO, RANKINGS, REWARD_MODEL, SFT, PipelineConfig
from proximo.recipes.pipeline.measure import Measuring
from proximo.recipes.pipeline.report import report
from proximo.recipes.pipeline.result import PipelineResult, PolicyResult, RewardCurve
from proximo.recipes.pipeline.running import Say, fitted, prefixed, reinforced
from proximo.recipes.pipeline.world import Ranked, write_demonstrations, write_rankings
from proximo.rl.clock import Clock
from proximo.rl.config import RunConfig
from proximo.runs.files import METRICS
from proximo.runs.session import RunSession, open_session
from proximo.supervised.dpo import dpo
from proximo.supervised.reward_model import train_reward_model
from proximo.supervised.sft import sft
from proximo.system.folders import write_file
from proximo.system.lines import JsonLines, plain
from proximo.system.opening import read_json


def pipeline(
    config: PipelineConfig, folder: Path, say: Say, session: RunSession | None = None, *, accept_lost: bool = False
) -> PipelineResult:
    """Run demonstrations, fine-tuning, rankings, reward model, then PPO, GRPO and DPO, and measure all of them.

    A stage that an earlier attempt has finished is not trained again. `accept_lost`: resume although a stage's log has
    lost rows.
    """
    with ExitStack() as until:
        session = session or until.enter_context(open_session(folder, toml.dumps(config), points=None, allowed=None))
        session.start()
        result = _chain(config, folder, say, accept_lost)
        write_file(folder / "results.json", (json.dumps(plain(asdict(result)), indent=2) + "\n").encode())
        write_file(folder / "report.md", report(result).encode())
        session.finish({"stages": config.stages})
        return result


def _chain(config: PipelineConfig, folder: Path, say: Say, accept_lost: bool) -> PipelineResult:
    done = _Done(folder, say)
    with done.phase("demonstrations"):
        write_demonstrations(config, folder)
    with done.phase(SFT):
        fitted(sft, config.sft_config(folder), folder / SFT, prefixed(SFT, say), accept_lost)
    with done.phase("rankings"):
        ranked = done.ranked if (folder / RANKINGS).exists() else None
        done.ranked = ranked = ranked or write_rankings(config, folder)
        say(f"rankings: {ranked.rankings}, {ranked.agreement:.0%} of their pairs in the order of the true reward")
    with done.phase(REWARD_MODEL):
        judged = config.reward_model_config(folder)
        stage_says = prefixed(REWARD_MODEL, say)
        judge = fitted(train_reward_model, judged, folder / REWARD_MODEL, stage_says, accept_lost)
    tokens, curves = {SFT: 0, DPO: 0}, {}
    for name, run in config.runs(folder).items():
        with done.phase(name):
            tokens[name], curves[name] = _reinforced(run, folder / name, prefixed(name, say), accept_lost)
    with done.phase(DPO):
        fitted(dpo, config.dpo_config(folder), folder / DPO, prefixed(DPO, say), accept_lost)
    with done.phase("measuring"):
        measure = Measuring(config, folder)
        measured = {name: measure(name) for name in (SFT, *curves, DPO)}
    return PipelineResult(
        folder=str(folder),
        ranked=ranked,
        reward_model=judge.best,
        policies=tuple(
            PolicyResult(name, each, tokens[name], done.seconds[name], curves.get(name))
            for name, each in measured.items()
        ),
        seconds=done.seconds,
    )


class _Done(Clock):
    """Finished stages and their durations, saved after each stage for a later attempt."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.file, self.ranked = folder / "stages.json", None
        super().__init__()
        try:
            known = read_json(self.file) if self.file.exists() else {"seconds": {}, "ranked": None}
            seconds = {str(name): float(seconds) for name, seconds in known["seconds"].items()}
            self.ranked = None if known["ranked"] is None else Ranked(**known["ranked"])
            self.seconds.update(seconds)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            say(f"warning: {self.file} cannot be read ({error}): the durations of finished stages are lost")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            yield
        known = {"seconds": self.seconds, "ranked": self.ranked and asdict(self.ranked)}
        write_file(self.file, (json.dumps(known) + "\n").encode())


def _reinforced(config: RunConfig, folder: Path, say: Say, accept_lost: bool) -> tuple[int, RewardCurve]:
    """Train; returns the number of generated tokens and the curves of both rewards."""
    outcome = reinforced(config, folder, say, accept_lost)
    rows = [row for row in JsonLines(folder / METRICS) if "sampled_tokens" in row]
    learned, true = (tuple(_known(row[name]) for row in rows) for name in ("reward", "outcome"))
    return outcome.generated_tokens, RewardCurve(learned, true)


def _known(value: float | None) -> float:
    """A metric; null stands for NaN."""
    return math.nan if value is None else value
