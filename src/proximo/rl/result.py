"""The result of a finished run, and how it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from proximo.rl.evaluate import since_best
from proximo.runs.checkpoints import CHECKPOINTS, place
from proximo.runs.files import RESULT
from proximo.runs.records import Answered, Evaluation
from proximo.runs.rollout_json import plain_answer, read_answers
from proximo.runs.state import Best
from proximo.system.opening import as_written, inside
from proximo.tasks import Task

SURE = 2.5
"""Standard errors by which the last evaluation has to be below the best one, which was chosen from several."""


@dataclass(frozen=True)
class Better:
    """A checkpoint that is better than the run's last, by more than chance."""

    checkpoint: str
    """Name of its folder; empty where it is the model before training."""
    value: float
    """Its mean held-out outcome."""
    last: float
    """That of the last."""

    def __str__(self) -> str:
        what = f"{CHECKPOINTS}/{self.checkpoint}" if self.checkpoint else "the model before training"
        return f"{what}: held-out {self.value:.3f}, and the last has {self.last:.3f}, which is more than chance"


def better_than_last(best: Best, after: Evaluation, answers: Sequence[Answered], kept: bool) -> Better | None:
    """What is better than a run's last evaluation by more than chance, if that is kept or was there before."""
    change = since_best(best.answers, answers)
    if best.evaluation is None or not change or not (kept or best.step == 0):
        return None
    if not -change["held_out/since_best"] > SURE * change["held_out/since_best_error"]:
        return None
    return Better(place(Path(), best.step).name if best.step else "", best.evaluation.outcome, after.outcome)


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run."""

    before: Evaluation
    after: Evaluation
    examples: list[tuple[Answered, Answered]] = field(repr=False)
    """Answers to the same held-out problems before and after training."""
    checkpoint: Path
    generated_tokens: int
    seconds: float
    ended: str = ""
    """Why the run ended before its last step; empty if it did not."""
    last: Path | None = None
    """The newest checkpoint, where `checkpoint` is an earlier one because the run collapsed."""
    better: Better | None = None
    """A checkpoint with a better evaluation than `checkpoint`, by more than chance."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint.name,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "examples": [[plain_answer(before), plain_answer(after)] for before, after in self.examples],
            "generated_tokens": self.generated_tokens,
            "seconds": self.seconds,
            **({"ended": self.ended} if self.ended else {}),
            **({"last": self.last.name} if self.last else {}),
            **({"better": asdict(self.better)} if self.better else {}),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], folder: Path, task: Task, seed: int) -> "RunResult":
        """Read the result of the run in this folder; the task gives its problems again."""
        with as_written(folder / RESULT):
            before, after = (read_answers([pair[side] for pair in facts["examples"]], task, seed) for side in (0, 1))
            last, better = facts.get("last"), facts.get("better")
            return cls(
                before=Evaluation(**facts["before"]),
                after=Evaluation(**facts["after"]),
                examples=list(zip(before, after, strict=True)),
                checkpoint=inside(folder / CHECKPOINTS, facts["checkpoint"]),
                generated_tokens=facts["generated_tokens"],
                seconds=facts["seconds"],
                ended=facts.get("ended", ""),
                last=inside(folder / CHECKPOINTS, last) if last else None,
                better=Better(**better) if better else None,
            )


def paired(before: Sequence[Answered], after: Sequence[Answered]) -> list[tuple[Answered, Answered]]:
    """Pairs of answers by problem; problems with only one, because evaluation.problems was changed, are left out."""
    later = {answer.problem.id: answer for answer in after}
    return [(answer, later[answer.problem.id]) for answer in before if answer.problem.id in later]
