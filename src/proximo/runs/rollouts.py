"""The rollouts of a step, as one table: enough to inspect each token and to replay the step under any
algorithm.

A row is a completion. Lists of numbers are aligned with its tokens; values that change between passes over the data
are a list of such lists. Rows that did not train are included; their `state` says so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from proximo.learner.guard import Update
from proximo.models.tokens.spelling import Spelling
from proximo.system.lines import plain
from proximo.system.opening import replacing
from proximo.system.sealing import seal
from proximo.types import Message, Problem, Rollout
from proximo.types.batches import Batch
from proximo.types.tensor_types import Float, Int

FORMAT = 3
"""Format of the table. From 3 on the file has a checksum."""
METADATA_KEY = b"proximo"
"""Key in the table's metadata with facts that concern the whole step."""
MAX_ANSWER = 4000
"""Maximum characters of a stored expected answer; some are whole files."""


def rollout_table(
    batch: Batch,
    spelling: Spelling,
    *,
    trained: Int[Tensor, " M"],
    kept_groups: int,
    updates: Sequence[Update] = (),
    value_only: bool = False,
) -> pa.Table:
    """The table of all rows of a step. `trained` are the rows that updates index into; groups from `kept_groups` on
    were dropped; `value_only`: the updates trained only the value model."""
    assert batch.sibling is not None, "an assembled batch knows its groups"
    groups = [batch.groups[number] for number in batch.group.tolist()]
    rollouts = [group.rollouts[number] for group, number in zip(groups, batch.sibling.tolist(), strict=True)]
    ragged = Ragged(batch.lengths)
    numbers, logprobs, entropy = _passes(batch, trained, updates)
    columns: dict[str, Any] = {
        "group": batch.group.numpy(),
        "sibling": batch.sibling.numpy(),
        "state": _states(batch, trained, kept_groups),
        "problem": [group.problem.id for group in groups],
        "messages": pa.array([_messages(group.problem.prompt) for group in groups], pa.string()),
        "prompt_tokens": [list(group.prompt_tokens) for group in groups],
        "prompt": _prompts(batch, spelling),
        "answer": pa.array([_answer(group.problem) for group in groups], pa.string()),
        "tokens": ragged(batch.tokens),
        "pieces": [spelling(rollout.completion.tokens) for rollout in rollouts],
        "text": [rollout.completion.text for rollout in rollouts],
        "sampled": ragged(batch.sampled),
        "mask": ragged(batch.mask),
        "outcome": batch.outcome.numpy(),
        "reward": batch.rewards.numpy(),
        "parts": pa.array([dict(rollout.grade.parts) for rollout in rollouts], pa.map_(pa.string(), pa.float64())),
        "truncated": batch.truncated.numpy(),
        "version": batch.version.numpy(),
        "versions": _versions(rollouts),
        "rollout_logprobs": ragged(batch.rollout_logprobs),
        "rollout_entropy": ragged(batch.rollout_entropy),
        "old_logprobs": ragged(batch.old_logprobs),
        "updates": pa.array(numbers, pa.list_(pa.int32())),
        "current_logprobs": ragged.nested(logprobs, [len(each) for each in numbers]),
        "entropy": ragged.nested(entropy, [len(each) for each in numbers]),
        "ref_logprobs": ragged(batch.ref_logprobs),
        "teacher_logprobs": ragged(batch.teacher_logprobs),
        "values": ragged(batch.values),
        "returns": ragged(batch.returns),
        "advantages": ragged(batch.advantages),
        "turn_rewards": ragged(batch.turn_rewards),
        "step_rewards": ragged(batch.step_rewards),
        "turns": _turns(rollouts),
        **_route_columns(batch),
    }
    table = pa.table({name: column for name, column in columns.items() if column is not None})
    metadata = {"format": FORMAT, "updates": [_update_metadata(update, value_only) for update in updates]}
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata).encode()})


def write_rollouts(table: pa.Table, path: Path) -> None:
    """Write the table, with a checksum that readers verify."""
    with replacing(path) as file:
        pq.write_table(table, file)
    seal(path)


def _versions(rollouts: Sequence[Rollout]) -> pa.Array | None:
    """The version of each token; None unless some completion was sampled with several."""
    completions = [rollout.completion for rollout in rollouts]
    if not any(each.versions for each in completions):
        return None
    rows = [list(each.versions) or [each.version] * len(each.tokens) for each in completions]
    return pa.array(rows, pa.list_(pa.int64()))


class Ragged:
    """Converts padded tensors to Arrow lists cut to each row's length, without a Python object per entry."""

    def __init__(self, lengths: Int[Tensor, " B"]) -> None:
        self._lengths = lengths

    def __call__(self, tensor: Tensor | None) -> pa.Array | None:
        return None if tensor is None else self._cut(tensor, self._lengths)

    def nested(self, tensor: Float[Tensor, "B E T"], counts: Sequence[int]) -> pa.Array:
        """The first `counts[row]` of each row's E lists."""
        has = torch.arange(tensor.shape[1]) < torch.tensor(counts).unsqueeze(1)
        inner = self._cut(tensor[has], self._lengths.unsqueeze(1).expand(-1, tensor.shape[1])[has])
        return pa.ListArray.from_arrays(_offsets(torch.tensor(counts)), inner)

    def _cut(self, tensor: Tensor, lengths: Int[Tensor, " R"]) -> pa.Array:
        inside = torch.arange(tensor.shape[1]) < lengths.unsqueeze(1)
        return pa.ListArray.from_arrays(_offsets(lengths), pa.array(tensor[inside].numpy()))


def _offsets(counts: Int[Tensor, " R"]) -> pa.Array:
    return pa.array(np.concatenate([[0], counts.cumsum(0).numpy()]).astype(np.int32))


def _passes(
    batch: Batch, trained: Int[Tensor, " M"], updates: Sequence[Update]
) -> tuple[list[list[int]], Float[Tensor, "B E T"], Float[Tensor, "B E T"]]:
    """Updates that each row was in, one per pass over the data, and its log-probs and entropy before each."""
    numbers: list[list[int]] = [[] for _ in range(len(batch))]
    for number, update in enumerate(updates):
        for row in trained[update.rows].tolist():
            numbers[row].append(number)
    max_passes = max(map(len, numbers), default=0)
    logprobs = batch.old_logprobs.new_full((len(batch), max_passes, batch.tokens.shape[1]), torch.nan)
    entropy = logprobs.clone()
    for number, update in enumerate(updates):
        rows = trained[update.rows]
        places = torch.tensor([numbers[row].index(number) for row in rows.tolist()], dtype=torch.long)
        logprobs[rows, places], entropy[rows, places] = update.logprobs, update.entropy
    return numbers, logprobs, entropy


def _states(batch: Batch, trained: Int[Tensor, " M"], kept_groups: int) -> list[str]:
    states = ["unscored" if unscored else "dropped" for unscored in batch.rewards.isnan().tolist()]
    for row in trained.tolist():
        states[row] = "trained"
    assert bool((batch.group[trained] < kept_groups).all()), "no row of a dropped group trains"
    return states


def _update_metadata(update: Update, value_only: bool) -> dict[str, object]:
    stats = update.stats.floats()
    return {
        "version": update.version,
        "skipped": update.skipped and update.skipped.reason,
        "value_only": value_only,
        "policy_loss": plain(stats.get("policy_loss")),
        "loss": plain(stats.get("loss")),
        "gradient_norm": plain(update.gradient_norm),
    }


def _route_columns(batch: Batch) -> Mapping[str, pa.Array]:
    """Replayed experts in one flat list, [tokens, route_layers, route_experts]; -1 where the router decided."""
    if batch.routes is None:
        return {}
    layers, chosen = batch.routes.shape[2:]
    rows = batch.routes.cpu().to(torch.int16).flatten(1)
    prompts = [batch.prompt_routes[number].cpu().to(torch.int16).flatten() for number in batch.group.tolist()]
    counts = torch.tensor([len(prompt) for prompt in prompts])
    return {
        "routes": Ragged(batch.lengths * layers * chosen)(rows),
        "prompt_routes": pa.ListArray.from_arrays(_offsets(counts), pa.array(torch.cat(prompts).numpy())),
        "route_layers": pa.array([layers] * len(rows), pa.int16()),
        "route_experts": pa.array([chosen] * len(rows), pa.int16()),
    }


def _turns(rollouts: Sequence[Rollout]) -> pa.Array | None:
    """Each row's turns as JSON; None where nothing has several."""
    if not any(rollout.completion.turns for rollout in rollouts):
        return None
    turns = [[asdict(turn) | {"reward": plain(turn.reward)} for turn in each.completion.turns] for each in rollouts]
    return pa.array([json.dumps(each, ensure_ascii=False) for each in turns], pa.string())


def _messages(prompt: str | Sequence[Message]) -> str | None:
    return None if isinstance(prompt, str) else json.dumps([dict(message) for message in prompt], ensure_ascii=False)


def _prompts(batch: Batch, spelling: Spelling) -> list[str]:
    """Each row's prompt: a text as given, a conversation as rendered by the chat template."""
    given = [group.problem.prompt for group in batch.groups]
    texts = [
        prompt if isinstance(prompt, str) else "".join(spelling(group.prompt_tokens))
        for prompt, group in zip(given, batch.groups, strict=True)
    ]
    return [texts[number] for number in batch.group.tolist()]


def _answer(problem: Problem) -> str | None:
    """The expected answer as text; None if the grader needs none."""
    answer = problem.answer
    if answer is None:
        return None
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return text[:MAX_ANSWER]
