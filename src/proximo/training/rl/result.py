"""The result of a finished run, and how it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from proximo.storage.opening import as_written, inside
from proximo.tasks import Task
from proximo.training.records import Answered, Evaluation
from proximo.training.runfolder.checkpoints import CHECKPOINTS
from proximo.training.runfolder.files import RESULT
from proximo.training.runfolder.plain_rollouts import plain_answer, read_answers


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

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint.name,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "examples": [[plain_answer(before), plain_answer(after)] for before, after in self.examples],
            "generated_tokens": self.generated_tokens,
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], folder: Path, task: Task, seed: int) -> "RunResult":
        """Read the result of the run in this folder; the task gives its problems again."""
        with as_written(folder / RESULT):
            before, after = (read_answers([pair[side] for pair in facts["examples"]], task, seed) for side in (0, 1))
            return cls(
                before=Evaluation(**facts["before"]),
                after=Evaluation(**facts["after"]),
                examples=list(zip(before, after, strict=True)),
                checkpoint=inside(folder / CHECKPOINTS, facts["checkpoint"]),
                generated_tokens=facts["generated_tokens"],
                seconds=facts["seconds"],
            )


def paired(before: Sequence[Answered], after: Sequence[Answered]) -> list[tuple[Answered, Answered]]:
    """Pairs of answers by problem; problems with only one, because evaluation.problems was changed, are left out."""
    later = {answer.problem.id: answer for answer in after}
    return [(answer, later[answer.problem.id]) for answer in before if answer.problem.id in later]
