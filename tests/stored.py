"""Run folders made by hand, through the loop's own writer: steps whose every number is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.config import toml
from proximo.insight.folder import RunFolder
from proximo.learner.guard import Update
from proximo.losses.advantage_inputs import advantages
from proximo.models.tokens.spelling import Spelling
from proximo.rl.config import RunConfig
from proximo.runs.ledger import Entry
from proximo.runs.log import RunLog
from proximo.runs.rollouts import rollout_table
from proximo.types import Completion, Grade, Group, Message, Problem, Rollout, Turn
from proximo.types.batches import Batch, Stats


class Written(Spelling):
    """Spells tokens as they were written: the number of a piece is its place among all of them."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def tokens(self, pieces: Sequence[str]) -> tuple[int, ...]:
        start = len(self.pieces)
        self.pieces.extend(pieces)
        return tuple(range(start, start + len(pieces)))

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        return [self.pieces[token] for token in tokens]


@dataclass(frozen=True)
class Said:
    """A completion: its pieces, what the old policy and the update's thought of them, and what it earned."""

    pieces: Sequence[str]
    reward: float = 0.0
    old: Sequence[float] = ()
    log_ratio: Sequence[float] = ()
    gap: Sequence[float] = ()
    """Old policy minus sampler."""
    reference: Sequence[float] = ()
    parts: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    end: str = ""
    """A special token behind the text."""
    turns: Sequence[Turn] = ()
    """Turns of an episode; answers are not sampled."""

    def sampled(self, length: int) -> list[bool]:
        """Which of its tokens the policy sampled."""
        return [
            not self.turns or next(turn.role for turn in self.turns if place < turn.end) == "assistant"
            for place in range(length)
        ]


@dataclass(frozen=True)
class Asked:
    """A group: what was asked, and what its siblings said. In one update, unless it was dropped."""

    said: Sequence[Said]
    prompt: str | tuple[Message, ...] = "1+1="
    answer: str = "2"
    problem: str = "sum-1"
    dropped: bool = False


def store(folder: Path, algorithm: Algorithm, groups: Sequence[Asked], *, step: int = 0, passes: int = 1) -> RunFolder:
    """One step of a run. Dropped groups come last; each pass over the data moves the policy once more as far."""
    written, config = Written(), replace(RunConfig(), algorithm=algorithm, steps=10)
    batch, moved = _batch(written, algorithm, groups)
    kept = sum(not group.dropped for group in groups)
    trained = ((batch.group < kept) & ~batch.rewards.isnan()).nonzero().squeeze(1)
    updates = [_update(batch, moved * (number + 1), trained, number) for number in range(passes)]
    log = RunLog(folder)
    if not (folder / "run.json").exists():
        log.start(toml.dumps(config), {"format": 2, "argv": ["proximo", "train"]})
    log.rollouts(step, rollout_table(batch, written, trained=trained, kept_groups=kept, updates=updates))
    log.ledger([Entry(place, group.problem, 0, step, "trained") for place, group in enumerate(groups)])
    log.metrics(step, {"reward": float(batch.rewards.nanmean())})
    return RunFolder(folder)


def _update(batch: Batch, moved: Tensor, trained: Tensor, number: int) -> Update:
    logprobs = (batch.old_logprobs + moved)[trained]
    return Update(
        stats=Stats(totals={"policy_loss": torch.zeros(()), "loss": torch.zeros(())}),
        gradient_norm=1.0,
        value_gradient_norm=None,
        first_gap=None,
        rows=torch.arange(len(trained)),
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs[trained],
        entropy=-logprobs,  # any number that can be told apart
        version=number,
    )


def _batch(written: Written, algorithm: Algorithm, groups: Sequence[Asked]) -> tuple[Batch, Tensor]:
    """The rows, and how far the policy had moved before the update."""
    said = [each for group in groups for each in group.said]
    ids = [written.tokens([*each.pieces, *([each.end] if each.end else [])]) for each in said]
    places = [(number, sibling) for number, group in enumerate(groups) for sibling in range(len(group.said))]
    lengths = torch.tensor([len(each) for each in ids])
    rewards = torch.tensor([each.reward for each in said], dtype=torch.float64)
    inside = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    mask = _padded([each.sampled(len(tokens)) for each, tokens in zip(said, ids, strict=True)], inside).bool()
    group = torch.tensor([number for number, _ in places])
    old = _padded([each.old or [-0.5] * len(each.pieces) for each in said], mask)
    credit, _ = advantages(replace(algorithm, shape=None), rewards=rewards, group=group, mask=mask)
    rollouts = {
        place: Rollout(
            Completion(
                tokens,
                (-0.5,) * len(tokens),
                each.turns[-1].text if each.turns else "".join(each.pieces),
                "length" if each.truncated else "stop",
                turns=tuple(each.turns),
            ),
            Grade(each.reward, each.parts),
        )
        for place, tokens, each in zip(places, ids, said, strict=True)
    }
    batch = Batch(
        prompts=tuple((0,) for _ in groups),
        tokens=_padded(ids, mask).long(),
        lengths=lengths,
        sampled=mask,
        mask=mask,
        group=group,
        outcome=rewards,
        rewards=rewards,
        truncated=torch.tensor([each.truncated for each in said]),
        version=torch.zeros(len(said), dtype=torch.long),
        rollout_logprobs=old - _padded([each.gap for each in said], mask),
        old_logprobs=old,
        advantages=credit.expand(mask.shape).contiguous(),
        ref_logprobs=_padded([each.reference for each in said], mask) if said[0].reference else None,
        groups=tuple(
            Group(
                Problem(asked.problem, asked.prompt, asked.answer),
                (0,),
                tuple(rollouts[number, sibling] for sibling in range(len(asked.said))),
            )
            for number, asked in enumerate(groups)
        ),
        sibling=torch.tensor([sibling for _, sibling in places]),
    )
    return batch, _padded([each.log_ratio for each in said], mask)


def _padded(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """0 behind what a row says."""
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for place, row in enumerate(rows):
        found[place, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return found


UNSCORED = math.nan
