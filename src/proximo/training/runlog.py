"""What a run leaves behind: open formats in one folder, which everything else reads.

Metrics hold no times, so that two runs of the same seed are the same bytes.
"""

import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from proximo.training.learner import Update
from proximo.types import Batch


class RunLog:
    """Writes a run folder. Rows are appended and flushed one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)

    def start(self, config_toml: str) -> None:
        (self.folder / "config.toml").write_text(config_toml)
        facts = {
            "argv": sys.argv,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        (self.folder / "run.json").write_text(json.dumps(facts, indent=2) + "\n")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", {"step": step, **values})

    def timings(self, step: int, seconds: Mapping[str, float]) -> None:
        self._append("timings.jsonl", {"step": step, **seconds})

    def event(self, step: int, kind: str, message: str) -> None:
        self._append("events.jsonl", {"step": step, "kind": kind, "message": message})

    def rollouts(self, step: int, batch: Batch, updates: Sequence[Update], tokenizer: PreTrainedTokenizerBase) -> None:
        """Every row trained, with enough to replay the step under any algorithm."""
        path = self.folder / "rollouts" / f"step-{step:06d}.parquet"
        temporary = path.with_suffix(".partial")
        minibatch = torch.full_like(batch.group, -1)
        current = torch.full_like(batch.old_logprobs, torch.nan)
        for number, update in enumerate(updates):  # of several epochs the last one stays
            minibatch[update.rows], current[update.rows] = number, update.logprobs
        pq.write_table(_table(batch, minibatch, current, tokenizer), temporary)
        temporary.rename(path)

    def _append(self, name: str, row: Mapping[str, object]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps({key: _plain(value) for key, value in row.items()}) + "\n")


def _table(
    batch: Batch, minibatch: torch.Tensor, current: torch.Tensor, tokenizer: PreTrainedTokenizerBase
) -> pa.Table:
    lengths = batch.lengths.tolist()

    def ragged(tensor: torch.Tensor | None) -> list[list] | None:
        return None if tensor is None else [row[:length] for row, length in zip(tensor.tolist(), lengths, strict=True)]

    tokens = ragged(batch.tokens)
    assert tokens is not None
    columns = {
        "group": batch.group.tolist(),
        "prompt_tokens": [list(batch.prompts[number]) for number in batch.group.tolist()],
        "prompt": [tokenizer.decode(list(batch.prompts[number])) for number in batch.group.tolist()],
        "tokens": tokens,
        "text": [tokenizer.decode(row) for row in tokens],
        "mask": ragged(batch.mask),
        "outcome": batch.outcome.tolist(),
        "reward": batch.rewards.tolist(),
        "truncated": batch.truncated.tolist(),
        "rollout_logprobs": ragged(batch.rollout_logprobs),
        "old_logprobs": ragged(batch.old_logprobs),
        "current_logprobs": ragged(current),
        "minibatch": minibatch.tolist(),
        "ref_logprobs": ragged(batch.ref_logprobs),
        "values": ragged(batch.values),
        "returns": ragged(batch.returns),
        "advantages": ragged(batch.advantages),
    }
    return pa.table({name: column for name, column in columns.items() if column is not None})


def _plain(value: object) -> object:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str | None:
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine: the run does not need it
        return None
    return result.stdout.strip() or None
