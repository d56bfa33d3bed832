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

from proximo.machine import Machine
from proximo.training.learner import Update
from proximo.types import Batch, Group, Message


class RunLog:
    """Writes a run folder. Rows are appended and flushed one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def fresh(cls, folder: Path) -> "RunLog":
        """Of a folder that holds no run yet; nothing is written before `start`."""
        if (folder / "metrics.jsonl").exists():
            raise ValueError(f"--run {folder}: there is a run in this folder already; choose another name or remove it")
        return cls(folder)

    def start(self, config_toml: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(config_toml)
        facts = {
            "argv": sys.argv,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "processor": platform.machine(),
            "machine": Machine.current().to_dict(),
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
        path.parent.mkdir(exist_ok=True)
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

    assert batch.sibling is not None, "an assembled batch knows its groups"
    groups = [batch.groups[number] for number in batch.group.tolist()]
    rollouts = [group.rollouts[number] for group, number in zip(groups, batch.sibling.tolist(), strict=True)]
    columns = {
        "group": batch.group.tolist(),
        "problem": [group.problem.id for group in groups],
        "messages": pa.array([_messages(group.problem.prompt) for group in groups], pa.string()),
        "prompt_tokens": [list(group.prompt_tokens) for group in groups],
        "prompt": [_text(group, tokenizer) for group in groups],
        "tokens": ragged(batch.tokens),
        "text": [rollout.completion.text for rollout in rollouts],
        "mask": ragged(batch.mask),
        "outcome": batch.outcome.tolist(),
        "reward": batch.rewards.tolist(),
        "parts": pa.array([dict(rollout.grade.parts) for rollout in rollouts], pa.map_(pa.string(), pa.float64())),
        "truncated": batch.truncated.tolist(),
        "rollout_logprobs": ragged(batch.rollout_logprobs),
        "old_logprobs": ragged(batch.old_logprobs),
        "current_logprobs": ragged(current),
        "minibatch": minibatch.tolist(),
        "ref_logprobs": ragged(batch.ref_logprobs),
        "values": ragged(batch.values),
        "returns": ragged(batch.returns),
        "advantages": ragged(batch.advantages),
        **_route_columns(batch),
    }
    return pa.table({name: column for name, column in columns.items() if column is not None})


def _route_columns(batch: Batch) -> dict[str, pa.Array]:
    """Replayed experts in one flat list, [tokens, route_layers, route_experts]; -1 where the router decided."""
    if batch.routes is None:
        return {}
    lengths, (layers, chosen) = batch.lengths.tolist(), batch.routes.shape[2:]
    rows = [row[:length].flatten().tolist() for row, length in zip(batch.routes.cpu(), lengths, strict=True)]
    prompts = [batch.prompt_routes[number].flatten().tolist() for number in batch.group.tolist()]
    return {
        "routes": pa.array(rows, pa.list_(pa.int16())),
        "prompt_routes": pa.array(prompts, pa.list_(pa.int16())),
        "route_layers": pa.array([layers] * len(rows), pa.int16()),
        "route_experts": pa.array([chosen] * len(rows), pa.int16()),
    }


def _messages(prompt: str | Sequence[Message]) -> str | None:
    return None if isinstance(prompt, str) else json.dumps([dict(message) for message in prompt], ensure_ascii=False)


def _text(group: Group, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text as it was given; a conversation as the chat template renders it."""
    prompt = group.problem.prompt
    text = prompt if isinstance(prompt, str) else tokenizer.decode(list(group.prompt_tokens))
    assert isinstance(text, str)
    return text


def _plain(value: object) -> object:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str | None:
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine: the run does not need it
        return None
    return result.stdout.strip() or None
