"""Problems read from data files."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from proximo.data import Mistakes, Row, read_rows, read_splits
from proximo.data.rows import refuse_absent, shortened
from proximo.data.splits import AGAIN, chosen_again, prompt_key, refuse_empty
from proximo.system.safe_text import counted
from proximo.system.slow_work import told_while_slow
from proximo.tasks.draws import shuffled
from proximo.tasks.protocol import Complaints, Split
from proximo.types import Problem


class FileProblems:
    """The problems of a file, read at once so that all bad rows are known before training starts."""

    def __init__(
        self,
        path: str,
        held_out: float | str,
        skip_bad: bool,
        problem: Callable[[Row], Problem],
        keeps: Callable[[Problem], bool] = lambda problem: True,
        needed: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`problem` turns a row into a problem, or raises a ValueError that says what is wrong with it. `keeps` says
        which problems to train on. `needed` are columns by the config field that names them; a file must
        have one of each field."""
        self._path, self._held_out, self._skip_bad, self._make = path, held_out, skip_bad, problem
        self._needed = needed or {}
        mistakes = Mistakes()
        train, kept = read_splits(self._read, path, held_out, mistakes, field="task")
        self._refuse(mistakes)
        self._left_out = list(mistakes)
        self._splits: dict[Split, list[_Placed]] = {
            "train": [row for row in train if keeps(row.problem)],
            "held_out": kept,
        }
        self.not_kept = len(train) - self.size("train")
        """Rows of the training split that `keeps` left out."""
        self._held_out_again = chosen_again(kept, held_out)
        self._refuse_empty()

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def problem(self, index: int, split: Split, seed: int) -> Problem:
        rows = self._splits[split]
        # The held-out set keeps its order: evaluations look at the same problems for every seed.
        return rows[shuffled(index, len(rows), seed) if split == "train" else index % len(rows)].problem

    def check(self, complaints: Complaints) -> list[str]:
        """Refuse every problem with a complaint, all in one error. With skip_bad, drop them and return a line for
        every row left out for any reason."""
        mistakes = Mistakes()
        usable: dict[Split, list[_Placed]] = {"train": [], "held_out": []}
        for split, rows in self._splits.items():
            for row, what in zip(rows, complaints([row.problem for row in rows]), strict=True):
                if what is None:
                    usable[split].append(row)
                else:
                    mistakes.add(row.location, what)
        self._refuse(mistakes)
        self._splits = usable
        self._refuse_empty()
        return [*self._left_out, *mistakes]

    @property
    def again_line(self) -> str | None:
        """Number of rows that the second hash holds out; None if the first did."""
        count = self.size("held_out")
        return f"{self._path}: {counted(count, 'row')} held out {AGAIN}" if self._held_out_again else None

    @property
    def repeated_line(self) -> str | None:
        """Number of prompts that occur in several rows, with an example; None if none does."""
        rows = [row for split in self._splits.values() for row in split]
        counts = Counter(row.key for row in rows)
        repeated = [key for key, count in counts.items() if count > 1]
        if not repeated:
            return None
        answers = Counter(key for key, _ in {(row.key, json.dumps(row.problem.answer, default=str)) for row in rows})
        others = sum(answers[key] > 1 for key in repeated)
        first = [row for row in rows if row.key == repeated[0]]
        asked = first[0].problem.prompt
        shown = shortened(asked if isinstance(asked, str) else asked[-1]["content"])
        return (
            f"{self._path}: {len(repeated)} of {len(counts)} prompts occur more than once, {len(rows) - len(counts)} "
            f"rows more than prompts, such as {shown} in {first[0].location} and {first[1].location}"
            + (f"; {others} of them with different answers" if others else "")
        )

    def asked_in_training(self, keys: Collection[str]) -> list[Problem]:
        """Training problems whose prompts have one of these keys."""
        problems = (self.problem(index, "train", 0) for index in range(self.size("train")))
        return [problem for problem in problems if prompt_key(problem.prompt) in keys]

    @property
    def storage_words(self) -> str:
        """Place of the rows, and what of them was checked, for a person."""
        return "in memory, all checked"

    def _refuse(self, mistakes: Mistakes) -> None:
        refuse_bad(mistakes, self._path, self._skip_bad)

    def _refuse_empty(self) -> None:
        refuse_no_rows(self.size("train"), self.size("held_out"), self._path, self._held_out)

    def _read(self, path: str, mistakes: Mistakes, *, field: str) -> list["_Placed"]:
        problems, rows = [], read_rows(path, mistakes, field=field)
        for name, columns in self._needed.items() if rows else ():
            refuse_absent(rows, columns, f"{field} is {path!r}", name)
        for row in told_while_slow(rows, f"rows of {path} read", len(rows)):
            try:
                problem = self._make(row)
                problems.append(_Placed(row.location, problem, prompt_key(problem.prompt)))
            except ValueError as error:
                mistakes.add(row.location, str(error))
        return problems


def refuse_bad(mistakes: Mistakes, path: str, skip_bad: bool) -> None:
    """Refuse bad rows of a task's file, unless they are skipped."""
    if not skip_bad:
        mistakes.refuse(f"task.path is {path!r}, with bad rows (`task.skip_bad=True` leaves them out):")


def refuse_no_rows(train: int, kept: int, path: str, held_out: float | str) -> None:
    """Refuse a task's file with an empty split."""
    remedy = "a larger share or a file"  # with 0, evaluation has to be switched off too
    refuse_empty(train, kept, path, held_out, field="task", remedy=remedy)


@dataclass(frozen=True)
class _Placed:
    """A problem and the row it comes from."""

    location: str
    problem: Problem
    key: str
    """Key of the prompt."""
