"""`proximo rate`: how often a model solves each row of a data file."""

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from proximo.api.threads import open_model
from proximo.cli.arguments import asks_for_help, flag_names, refuse, refusing, say, take
from proximo.cli.data import take_task
from proximo.cli.flags import changed
from proximo.config import toml
from proximo.environments.kinds import SingleTurn
from proximo.models import load_tokenizer
from proximo.models.shipped import resolve
from proximo.recipes.pass_rates import PASS_RATE, Rated, rate, refuse_out
from proximo.rewards.grading import grading
from proximo.rl.preflight.calibration import calibrate
from proximo.rl.preflight.prompts import check_prompts
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import File, TaskOptions
from proximo.tasks.arithmetic import Arithmetic

HELP = f"""arguments of the command itself:
  DATA        file, pattern, folder or hub id, as in proximo train --data
  --model     model that is rated: a folder, run folder, checkpoint, hub id or model name
  --out FILE  .parquet or .jsonl file for the rows with a column {PASS_RATE}; the same command resumes one that was
              stopped
examples:
  proximo rate problems.jsonl --model tiny-arithmetic --samples 8 --out rated.parquet
  proximo train --model tiny-arithmetic --data rated.parquet --task.keep-pass-rate 0.1 0.9
"""


@dataclass(frozen=True)
class RateConfig:
    """Settings for rating the rows of a data file."""

    task: TaskOptions = field(default_factory=Arithmetic)
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=512))
    model: str = "tiny-arithmetic"
    """Model that is rated."""
    samples: int = 8
    """Completions per row."""
    device: str = "auto"
    """Torch device of the model. `auto`: a GPU if there is one, else the CPU."""
    seed: int = 0
    """Random seed of the samples."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: give at least 1")

    @property
    def environment(self) -> SingleTurn:
        """Rows of a file are questions with one answer."""
        return SingleTurn()


def run(arguments: list[str]) -> int:
    out = take(arguments, "--out")
    has_data = bool(arguments) and not arguments[0].startswith("-")
    if has_data:
        arguments[:1] = ["--data", arguments[0]]
    elif not asks_for_help(arguments):
        refuse("rate needs data: proximo rate DATA --model MODEL --out FILE")
    if "--model" not in flag_names(arguments) and not asks_for_help(arguments):
        refuse("rate needs a model: --model MODEL, a folder, a run folder or a hub id")
    default = RateConfig()
    task = take_task(arguments, default.model, held_out=1.0)
    config = changed(
        default if task is None else RateConfig(task=task),
        arguments,
        prog="proximo rate",
        usage="DATA --model MODEL --out FILE",
        description="Sample completions of each row, and write the share of them that is right.",
        help_more=HELP,
    )
    if out is None:
        refuse("rate needs --out FILE, for the rows with their pass rates")
    with refusing():
        _print(rated(config, Path(out)), out)
    return 0


def rated(config: RateConfig, out: Path) -> Rated:
    """The rows with their rates, written to `out`; ValueError where that cannot be done."""
    if not isinstance(config.task, File):
        raise ValueError("data are several sources: rate one at a time")
    refuse_out(out)
    path = resolve(config.model)
    check_prompts(config, path, load_tokenizer(path))
    settings = {"settings": hashlib.sha256(toml.dumps(config).encode()).hexdigest()[:16], "model": config.model}
    with grading() as active:
        for remark in calibrate(config.task, config.seed, split="held_out"):
            say(remark)
        model, tokenizer = open_model(config.model, config.device, "auto")
        model.requires_grad_(False)
        result = rate(
            config.task,
            local_sampler(model, tokenizer),
            tokenizer,
            config.sampling,
            out,
            samples=config.samples,
            seed=config.seed,
            settings=settings,
            progress=_tell,
        )
        for failures in active.failures.take():
            say(f"warning: {failures}")
    return result


def _tell(done: int, rows: int) -> None:
    print(f"rated {done} of {rows} rows", file=sys.stderr, flush=True)


def _print(result: Rated, out: str) -> None:
    rates = result.rates
    never, always = sum(each == 0 for each in rates), sum(each == 1 for each in rates)
    print(
        f"{len(result.rows)} rows: {never} never solved, {len(rates) - never - always} sometimes, {always} always, "
        f"{len(result.rows) - len(rates)} unscored"
    )
    print(f"written to {out}   (--task.keep-pass-rate 0.1 0.9 trains on those in between)")
