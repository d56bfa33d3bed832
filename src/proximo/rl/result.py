"""The end of a run: when it is, the run's result, and how that is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.evaluate import since_best
from proximo.runs.checkpointer import Checkpointer
from proximo.runs.checkpoints import CHECKPOINTS, checkpoint_path, step_of
from proximo.runs.files import METRICS, RESULT
from proximo.runs.records import Answered, Evaluation
from proximo.runs.rollout_json import plain_answer, read_answers
from proximo.runs.state import Best, RunState
from proximo.system.lines import JsonLines
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
    """Mean held-out task score of the checkpoint."""
    last: float
    """Mean held-out task score of the last checkpoint."""

    def __str__(self) -> str:
        what = f"{CHECKPOINTS}/{self.checkpoint}" if self.checkpoint else "the model before training"
        return f"{what}: held-out {self.value:.3f}, and the last has {self.last:.3f}, which is more than chance"


def better_than_last(best: Best, after: Evaluation, answers: Sequence[Answered], kept: bool) -> Better | None:
    """The best checkpoint, if it beats a run's last by more than chance, and is kept or was there before."""
    change = since_best(best.answers, answers)
    if best.evaluation is None or not change or not (kept or best.step == 0):
        return None
    if not -change["held_out/since_best"] > SURE * change["held_out/since_best_error"]:
        return None
    return Better(checkpoint_path(Path(), best.step).name if best.step else "", best.evaluation.outcome, after.outcome)


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
    """Reason why the run ended before its last step; empty if it did not."""
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
    def from_dict(cls, stored: Mapping[str, Any], folder: Path, task: Task, seed: int) -> "RunResult":
        """Read the result of the run in this folder; the task gives its problems again."""
        with as_written(folder / RESULT):
            before, after = (read_answers([pair[side] for pair in stored["examples"]], task, seed) for side in (0, 1))
            last, better = stored.get("last"), stored.get("better")
            return cls(
                before=Evaluation(**stored["before"]),
                after=Evaluation(**stored["after"]),
                examples=list(zip(before, after, strict=True)),
                checkpoint=inside(folder / CHECKPOINTS, stored["checkpoint"]),
                generated_tokens=stored["generated_tokens"],
                seconds=stored["seconds"],
                ended=stored.get("ended", ""),
                last=inside(folder / CHECKPOINTS, last) if last else None,
                better=Better(**better) if better else None,
            )


def result_of(
    state: RunState, best: Best, after: Evaluation, answers: Sequence[Answered], saved: Checkpointer, *, ended: str
) -> RunResult:
    """The result of a run that ends in this state; `best`: its best evaluation before the last one."""
    return RunResult(
        before=state.before,
        after=after,
        examples=paired(state.answers, answers),
        checkpoint=saved.path(state.step),
        generated_tokens=state.generated,
        seconds=saved.seconds,
        ended=ended,
        better=better_than_last(best, after, answers, saved.path(best.step).is_dir()),
    )


def at_best(result: RunResult, state: RunState, saved: Checkpointer) -> RunResult:
    """The result of a run that collapsed: its best checkpoint, or the last where none was evaluated or kept."""
    best = state.best
    if best is None or best.evaluation is None or not (point := saved.path(best.step)).is_dir():
        return result
    return replace(
        result,
        after=best.evaluation,
        examples=paired(state.answers, best.answers),
        checkpoint=point,
        last=None if point == result.checkpoint else result.checkpoint,
        better=result.better if result.better and not result.better.checkpoint else None,
    )


def paired(before: Sequence[Answered], after: Sequence[Answered]) -> list[tuple[Answered, Answered]]:
    """Pairs of answers by problem; problems with only one, because evaluation.problems was changed, are left out."""
    later = {answer.problem.id: answer for answer in after}
    return [(answer, later[answer.problem.id]) for answer in before if answer.problem.id in later]


# When a run ends


def is_last(config: RunConfig, state: RunState) -> bool:
    """Tell whether the run ends here: all steps are done, or all tokens are sampled."""
    limit = config.max_generated_tokens
    return state.step >= config.steps or (limit is not None and state.generated >= limit)


def early_end(options: EvaluationOptions, state: RunState) -> str | None:
    """Say why the run ends before its last step: evaluation.target is reached, or the last evaluations, as many as
    evaluation.patience, gave nothing better. None: it does not."""
    best = state.best
    if options.every is None or not state.evaluated or best is None:
        return None
    reached = f"{options.metric} {best.value:.3g} after step {best.step}"
    if options.target is not None and best.value >= options.target:
        return f"the run ends here: {reached} reaches evaluation.target, {options.target:g}"
    if options.patience is not None and state.step - best.step >= options.patience * options.every:
        return f"the run ends here: {options.patience} evaluations in a row found nothing better than {reached}"
    return None


def refuse_fewer_steps(config: RunConfig, point: Path | None) -> None:
    """Raise ValueError if the run should end before the checkpoint that it resumes from."""
    if point is None:
        return
    if step_of(point) > config.steps:
        raise ValueError(
            f"steps is {config.steps}, but {step_of(point)} are done: give at least as many, or use the checkpoint "
            f"{point} as it is"
        )
    if config.max_generated_tokens is not None and (before := _generated_before(point)) >= config.max_generated_tokens:
        raise ValueError(
            f"max_generated_tokens is {config.max_generated_tokens}, but {before} tokens were sampled before the last "
            f"of the {step_of(point)} steps that are done: give more than that, or use the checkpoint {point} as it is"
        )


def _generated_before(point: Path) -> int:
    """Tokens sampled before a checkpoint's last step: with a limit below that, the step would not have been made.
    Damaged rows are ignored, since resuming does not need them."""
    metrics, total = point.parents[1] / METRICS, 0
    for row in JsonLines(metrics).readable():
        step, tokens = row.get("step"), row.get("sampled_tokens")
        if isinstance(step, int) and isinstance(tokens, int) and step < step_of(point):
            total += tokens
    return total
