"""Fine-tune a new small model on examples in one or more stages, and store it as a folder of the package."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from proximo.config import toml
from proximo.data import Example, Mistakes
from proximo.runs.log import RunLog
from proximo.supervised.encoding import Limit, encode
from proximo.supervised.fitting import FitOptions, fit
from proximo.supervised.sft import Supervised

SEED = 1000
"""Seed of problems and their order: a run with a small seed never meets the same."""


@dataclass(frozen=True)
class Lesson:
    """One stage of fine-tuning."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    batch: int
    learning_rate: float
    epochs: float = 1.0


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    lessons: Sequence[Lesson],
    run: Path,
    out: Path,
) -> None:
    """Fine-tune on the lessons in turn, and copy the last checkpoint to `out`."""
    mistakes, checkpoint = Mistakes(), None
    for number, lesson in enumerate(lessons, start=1):
        rows = [encode(tokenizer, examples, Limit(256), mistakes) for examples in (lesson.train, lesson.held_out)]
        mistakes.refuse("examples that cannot be encoded:")
        chosen = {"batch": lesson.batch, "learning_rate": lesson.learning_rate, "epochs": lesson.epochs}
        options = FitOptions(**chosen, warmup_steps=20, evaluate_every=200)
        log = RunLog(run / f"stage-{number}")
        log.start(toml.dumps(options))
        stage = Supervised(model, rows[0], rows[1], token_budget=options.token_budget)
        say = partial(print, flush=True)
        checkpoint = fit(stage, options, tokenizer=tokenizer, log=log, seed=SEED, say=say).checkpoint
    assert checkpoint is not None
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("manifest.json"), dirs_exist_ok=True)
