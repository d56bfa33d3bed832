"""Pass rates: how often a model solves each row of a data file. Resumable, and the same however often it is stopped."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.data import Mistakes, Row, read_rows
from proximo.environments.kinds import Ask, Question, SingleTurn, play
from proximo.models import problem_tokens
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.rl.grading import graded
from proximo.samplers.sampler import Sampler, SamplingOptions
from proximo.system.folders import whole_file, write_file
from proximo.system.lines import to_line, to_row
from proximo.system.opening import appending, read_file, remove, replacing, without_links
from proximo.system.safe_text import quoted
from proximo.tasks import File
from proximo.types import Problem, Request, Rollout

AT_ONCE = 32
"""Problems sampled together; after each such batch their rates are written."""
PASS_RATE, SCORED = "pass_rate", "pass_rate_samples"
"""Columns that are added: the share of a row's scored samples with a task score of at least 1, and their number."""
LARGEST = 4 << 30
"""Maximum bytes of a part that is continued."""
FORMATS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Rated:
    """The rows of a data file with their pass rates."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def rates(self) -> list[float]:
        return [row[PASS_RATE] for row in self.rows if row[PASS_RATE] is not None]


def rate(
    task: File,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingOptions,
    out: Path,
    *,
    samples: int,
    seed: int,
    settings: Mapping[str, Any],
    progress: Callable[[int, int], None] = lambda done, all: None,
) -> Rated:
    """Rate all rows of a file and write them, with their rates, to `out`. The task must hold out everything, so that
    its held-out problems are the file's rows in order.

    `settings` is what the rates depend on; a part that was rated with others is not continued. `progress` is called
    with the rows done so far and all of them.
    """
    rows = read_rows(task.path, Mistakes(), field="data")
    size = task.size("held_out")
    assert size == len(rows), "a file with bad rows is refused before"
    problems = [task.problem(index, "held_out", seed) for index in range(size)]
    out = without_links(out)
    part = out.with_name(f"{out.name}.part.jsonl")
    rated_rows = list(_so_far(part, settings, problems))
    ask = Ask(sampler, tokenizer, sampling, seed=seed, step=0, version=0)
    with appending(part) as file:
        if not rated_rows and not part.stat().st_size:
            file.write(to_line(settings))
        for start in range(len(rated_rows), size, AT_ONCE):
            batch = problems[start : start + AT_ONCE]
            questions = [
                Question(problem, Request(start + number, problem_tokens(tokenizer, problem), samples))
                for number, problem in enumerate(batch)
            ]
            rollouts = graded(task, batch, play(SingleTurn(), questions, ask)).rollouts
            for problem, siblings in zip(batch, rollouts, strict=True):
                share, scored = _share(siblings)
                rated_rows.append((share, scored))
                file.write(to_line({"problem": problem.id, PASS_RATE: share, SCORED: scored}))
            file.flush()
            progress(len(rated_rows), size)
    rated = Rated([_with(row, *each) for row, each in zip(rows, rated_rows, strict=True)])
    _write(out, rated.rows)
    remove(part)
    return rated


def refuse_out(out: Path) -> None:
    """Refuse a file that cannot hold the result."""
    if out.suffix not in FORMATS:
        raise ValueError(f"out is {str(out)!r}: give a {' or '.join(FORMATS)} file")
    if out.exists():
        raise ValueError(f"out is {str(out)!r}, which exists: give another name, or remove it")
    if not out.parent.is_dir():
        raise ValueError(f"out is {str(out)!r}: there is no folder {str(out.parent)!r}")


def _so_far(part: Path, settings: Mapping[str, Any], problems: Sequence[Problem]) -> Iterator[tuple[float | None, int]]:
    """Read what an earlier attempt rated; its last line may be cut off. ValueError where it was of something else."""
    lines = read_file(part, LARGEST).splitlines(keepends=True) if part.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if whole and to_row(whole[0]) != dict(settings):
        others = quoted(whole[0].decode(errors="replace").strip())
        raise ValueError(f"{part} was rated with other settings, {others}: use those, or remove it")
    write_file(part, b"".join(whole))
    for line, problem in zip(whole[1:], problems, strict=False):
        row = to_row(line) or {}
        share, scored = row.get(PASS_RATE), row.get(SCORED)
        if not isinstance(scored, int) or not isinstance(share, float | int | None):
            raise ValueError(f"{part} is damaged: remove it")
        if row.get("problem") != problem.id:
            other = quoted(row.get("problem"))
            raise ValueError(f"{part} was rated with other data, {other} in the place of {problem.id}: remove it")
        yield share, scored


def _share(siblings: Sequence[Rollout]) -> tuple[float | None, int]:
    """The share of scored completions that pass; None where none could be scored."""
    outcomes = [outcome for each in siblings if not math.isnan(outcome := each.grade.outcome)]
    return (sum(outcome >= 1 for outcome in outcomes) / len(outcomes) if outcomes else None), len(outcomes)


def _with(row: Row, share: float | None, scored: int) -> dict[str, Any]:
    return {**row.values, PASS_RATE: share, SCORED: scored}


def _write(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if out.suffix == ".jsonl":
        write_file(out, "".join(json.dumps(row, default=str) + "\n" for row in rows).encode())
        return
    # Imported late, because only this format needs it.
    import pyarrow
    import pyarrow.parquet as pq

    with whole_file(out) as partial, replacing(partial) as file:
        try:
            pq.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file)
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"out is {str(out)!r}: Parquet cannot hold these rows, {error}; give a .jsonl file"
            ) from None
