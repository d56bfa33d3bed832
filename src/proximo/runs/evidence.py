"""Evidence of a skipped update: a file with the rows that caused it, and a notice."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from proximo.learner.guard import Notice, Update
from proximo.runs.files import EVIDENCE
from proximo.system.folders import write_file
from proximo.system.opening import make_folder
from proximo.types.batches import Batch

COLUMNS = ("sampled", "mask", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns")


def skipped_updates(folder: Path, step: int, batch: Batch, updates: Sequence[Update]) -> list[Notice]:
    """Write a file under `evidence` for each skipped update of the step; returns a notice for each."""
    return [
        Notice(
            "skipped_update",
            f"update {number} was skipped, weights and optimizer are unchanged: {update.skipped.reason}; its rows are "
            f"in {write_evidence(folder, step, number, batch, update)}. If this repeats, lower training.learning_rate "
            "and look at those rows' rewards",
        )
        for number, update in enumerate(updates)
        if update.skipped is not None
    ]


def write_evidence(folder: Path, step: int, number: int, batch: Batch, update: Update) -> str:
    """Write the file; returns its path in the run folder. Numbers that are not finite are strings, as JSON has none."""
    skipped = update.skipped
    assert skipped is not None
    rows = [_row(batch, int(update.rows[row]), update.logprobs[row]) for row in skipped.rows.tolist()]
    content = {
        "step": step,
        "update": number,
        "reason": skipped.reason,
        "gradient_norm": _plain(update.gradient_norm),
        "value_gradient_norm": _plain(update.value_gradient_norm),
        "parameters": skipped.parameters,
        "stats": {name: _plain(value) for name, value in update.stats.floats().items()},
        "rows": rows,
    }
    name = f"{EVIDENCE}/step-{step:06d}-update-{number}.json"
    try:
        make_folder((folder / name).parent)
        write_file(folder / name, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:  # a full disk should not stop training
        return f"no file: it could not be written ({error})"
    return name


def _row(batch: Batch, row: int, logprobs: Tensor) -> dict[str, object]:
    length, group = int(batch.lengths[row]), int(batch.group[row])

    def listed(tensor: Tensor) -> list[object]:
        return [_plain(value) for value in tensor[:length].tolist()]

    known = {name: tensor for name in COLUMNS if (tensor := getattr(batch, name)) is not None}
    known_texts: dict[str, object] = {"problem": batch.groups[group].problem.id} if batch.groups else {}
    if batch.groups and batch.sibling is not None:
        known_texts["text"] = batch.groups[group].rollouts[int(batch.sibling[row])].completion.text
    return {
        "row": row,
        "group": group,
        **known_texts,
        "outcome": _plain(float(batch.outcome[row])),
        "reward": _plain(float(batch.rewards[row])),
        "prompt_tokens": list(batch.prompts[group]),
        "tokens": listed(batch.tokens[row]),
        "logprobs": listed(logprobs),
        **{name: listed(tensor[row]) for name, tensor in known.items()},
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
