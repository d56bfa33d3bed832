"""Runs in which each field matters that decides which prompts a run draws and how they are asked."""

import json
from dataclasses import replace
from pathlib import Path

from proximo.algorithms import GRPO
from proximo.models import load_model, load_tokenizer
from proximo.models.shipped import resolve
from proximo.rl.config import Curriculum
from proximo.tasks import Echo, File, Mixture, Sorting, Source
from proximo_lab.faults.field_table import STRONG, Trial, lively, several
from proximo_lab.faults.runs import rows_file, small

HELD_OUT = 0.3


def prompt_trials(folder: Path) -> list[Trial]:
    rows = str(rows_file(folder))
    file = lively(GRPO, task=File(rows, held_out=HELD_OUT))
    rated = lively(GRPO, task=File(str(_rated(folder)), held_out=HELD_OUT))
    chat = lively(GRPO, task=File(rows, held_out=HELD_OUT, chat=True), model=str(_with_thinking(folder)))
    repeated = small(GRPO, steps=9, task=File(rows, held_out=HELD_OUT), training=STRONG)
    following = replace(repeated, training=replace(STRONG, curriculum=Curriculum()))
    echo, sorting = Source("echo", Echo(held_out=4)), Source("sorting", Sorting(held_out=4))
    mixture = lively(GRPO, task=Mixture((echo, sorting)))
    return [
        *several(file, "task", chat=True, system="add", template="{prompt} "),
        Trial(rated, "task.keep_pass_rate", (0.0, 0.5)),
        Trial(chat, "task.chat_template_kwargs", {"thinking": True}),
        Trial(repeated, "training.curriculum", Curriculum(floor=0.01)),
        *several(following, "training.curriculum", floor=1.0, newest=1.0),
        Trial(mixture, "task.sources", (echo,)),
        *several(mixture, "task.sources.0", name="other", task=Echo(length=2, held_out=4), weight=3.0),
    ]


def _rated(folder: Path) -> Path:
    """The sums with a measured pass rate, high for every second one."""
    path = folder / "rated.jsonl"
    rows = [json.loads(line) for line in rows_file(folder).read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"pass_rate": 0.25 + number % 2 / 2}) + "\n"
                            for number, row in enumerate(rows)))  # fmt: skip
    return path


def _with_thinking(folder: Path) -> Path:
    """The shipped model with a chat template that reads an argument."""
    path = folder / "with-thinking"
    if not path.exists():
        load_model(resolve("tiny-arithmetic")).save_pretrained(path)
        tokenizer = load_tokenizer(resolve("tiny-arithmetic"))
        tokenizer.chat_template = "{{ messages[0]['content'] }}{% if thinking %}{{ ' ' }}{% endif %}"
        tokenizer.save_pretrained(path)
    return path
