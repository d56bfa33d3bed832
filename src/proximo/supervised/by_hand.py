"""Rankings by a person: which completions are shown, in which order, and what was answered. Without torch.

What is ranked is a row of the file, written at once; what cannot be told apart is a row of a file beside it. Both
together say what is not asked again, so that a person may stop at any time.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from proximo.data.rankings import Ranking, as_list, ranking_of, ranking_row, read_rankings
from proximo.data.rows import Mistakes, Prompt, Row, first_rows, read_completion, read_prompt, read_rows
from proximo.data.splits import prompt_key, stable_hash
from proximo.runs.files import RECORD, ROLLOUTS
from proximo.supervised.stored_groups import group_files, groups_in, prompt_of, step_range
from proximo.system.lines import MAX_ROW, JsonLines, to_row
from proximo.system.opening import appending, check_file, make_folder, open_file, without_links
from proximo.system.slow_work import told_while_slow

MAX_SHOWN = 9
"""Maximum completions side by side: each has a digit."""
BEFORE_OTHERS = 1 << 20
"""Bytes of a file that are read for a first question."""
BEGINNING = b'{"prompt": '
"""First bytes of each row that is written here."""


@dataclass(frozen=True)
class RankConfig:
    source: str
    """A run folder of `proximo train`, or a file of prompts with their completions."""
    out: str
    """The .jsonl file that rankings are appended to."""
    completions: int = 2
    """Completions shown at a time."""
    per_prompt: int = 1
    """Times that each group of completions is asked about, each time with others of them."""
    steps: str = ":"
    """Range of a run's steps A:B, from A up to but not including B; either may be left out."""
    seed: int = 0
    """Random seed of the order of prompts and completions."""

    def __post_init__(self) -> None:
        if not self.out.endswith(".jsonl"):
            raise ValueError(f"out is {self.out!r}: give a name that ends with .jsonl")
        if not 2 <= self.completions <= MAX_SHOWN:
            raise ValueError(f"completions is {self.completions}: give 2 to {MAX_SHOWN}")
        if self.per_prompt < 1:
            raise ValueError(f"per_prompt is {self.per_prompt}: give at least 1")
        step_range(self.steps)


@dataclass(frozen=True)
class RankingQuestion:
    prompt: Prompt
    completions: tuple[str, ...]
    """Completions in the order in which they are shown; all different."""

    @property
    def key(self) -> tuple[str, ...]:
        """Prompt and completions, in whatever order these are shown."""
        return (prompt_key(self.prompt), *sorted(self.completions))


# Questions


def questions(config: RankConfig) -> list[RankingQuestion]:
    """All that there is to rank, in an order that depends on the seed and not on scores or places in a file; ValueError
    where there is nothing."""
    source = without_links(config.source)
    if not source.exists():
        raise ValueError(f"source is {config.source!r}: there is no run folder and no file of this name")
    is_run = (source / RECORD).exists() or (source / ROLLOUTS).exists()
    asked = _ordered(_stored(config) if is_run else _rows(str(source)), config)
    if not asked:
        raise ValueError(f"source is {config.source!r}: no prompt in it has two different completions to rank")
    return asked


def first_questions(config: RankConfig) -> list[RankingQuestion]:
    """Questions of the beginning of a large file, of which one can be asked while the others are read; none where there
    is no such file, or anything is wrong with it."""
    try:
        return _ordered(map(_row, first_rows(config.source, BEFORE_OTHERS)), config)
    except (OSError, ValueError):  # refused when all is read
        return []


def _ordered(groups: Iterable[tuple[Prompt, Sequence[str]]], config: RankConfig) -> list[RankingQuestion]:
    """Questions about groups of completions, each once, in an order that depends on the seed and on their texts."""
    once = {each.key: each for prompt, completions in groups for each in _asked(prompt, completions, config)}
    return [once[key] for key in sorted(once, key=lambda key: stable_hash(config.seed, *key))]


def _asked(prompt: Prompt, completions: Sequence[str], config: RankConfig) -> Iterator[RankingQuestion]:
    """Shuffle the completions and take as many at a time as are shown: each is shown once."""
    different = sorted(set(completions))
    Random(stable_hash(config.seed, prompt_key(prompt), *different)).shuffle(different)
    starts = range(0, len(different), config.completions)
    for start in starts[: config.per_prompt]:
        if len(shown := different[start : start + config.completions]) > 1:
            yield RankingQuestion(prompt, tuple(shown))


def _stored(config: RankConfig) -> Iterator[tuple[Prompt, list[str]]]:
    """The groups of a run. Truncated and empty completions are left out, and what no data file may hold."""
    for path in group_files(config.source, config.steps):
        for group in groups_in(path):
            try:
                prompt = read_prompt(_listed(prompt_of(group[0])))
            except ValueError:
                continue
            yield prompt, [row["text"] for row in group if not row["truncated"] and _is_readable(row["text"])]


def _listed(prompt: Prompt) -> object:
    return prompt if isinstance(prompt, str) else list(prompt)


def _is_readable(text: object) -> bool:
    try:
        return bool(read_completion(text, "text"))
    except ValueError:
        return False


def _rows(path: str) -> list[tuple[Prompt, list[str]]]:
    """The rows of a file, with `completions`, or with what `read_rankings` reads."""
    mistakes, groups = Mistakes(), []
    rows = read_rows(path, mistakes, field="source")
    for row in told_while_slow(rows, f"rows of {path} read", len(rows)):
        try:
            groups.append(_row(row))
        except ValueError as error:
            mistakes.add(row.location, str(error))
    mistakes.refuse(f"source is {path!r}, with bad rows:")
    return groups


def _row(row: Row) -> tuple[Prompt, list[str]]:
    if not row.has("completions"):
        return _ranked_before(row)
    given = as_list(row["completions"])
    if not isinstance(given, list):
        raise ValueError("completions is no list: give the completions of the prompt as a list, in a table as JSON")
    texts = [read_completion(value, f"completions[{number}]") for number, value in enumerate(given)]
    return read_prompt(row["prompt"]), texts


def _ranked_before(row: Row) -> tuple[Prompt, list[str]]:
    if not row.has("ranking") and not row.has("chosen", "rejected"):
        raise ValueError(
            f"rank needs completions, and the columns are {', '.join(row.values) or 'none'}: give a run of train, or "
            "rows with a prompt and a list `completions`"
        )
    if row.has("ranking") and not row.has("prompt"):
        raise ValueError(f"no column 'prompt', only {', '.join(row.values)}: give the prompt of the ranking")
    ranking = ranking_of(row)
    return ranking.prompt, list(ranking.completions)


# Answers


class RankingFile:
    """The file of rankings, and beside it that of ties.

    Example: answers = RankingFile("pairs.jsonl"); answers.rank(question, [1, 0]); answers.take_back()
    """

    def __init__(self, out: str) -> None:
        path = without_links(out)
        make_folder(path.parent)
        self.rankings, self.ties = JsonLines(path), JsonLines(ties_file(path))
        for rows in (self.rankings, self.ties):
            if os.path.lexists(rows.path):
                check_file(rows.path)
        self._answered: dict[str, list[frozenset[str]]] = defaultdict(list)
        self._taken: list[tuple[JsonLines, int, int, str]] = []
        for rows in (self.rankings, self.ties):
            _end_last_row(rows)
        for prompt, completions in self._earlier():
            self._answered[prompt_key(prompt)].append(frozenset(completions))

    def _earlier(self) -> Iterator[tuple[Prompt, Sequence[str]]]:
        mistakes = Mistakes()
        if self.rankings.size:
            for ranking in read_rankings(str(self.rankings.path), mistakes, field="out"):
                yield ranking.prompt, ranking.completions
        mistakes.refuse(f"out is {str(self.rankings.path)!r}, with rows that are no rankings:")
        yield from _rows(str(self.ties.path)) if self.ties.size else ()

    def knows(self, question: RankingQuestion) -> bool:
        """Tell whether it was answered, now or earlier: completions of the prompt that are all among those shown."""
        shown = set(question.completions)
        return any(each <= shown for each in self._answered.get(prompt_key(question.prompt), ()))

    def rank(self, question: RankingQuestion, order: Sequence[int]) -> None:
        """Append the completions of these numbers, best first."""
        best = tuple(question.completions[number] for number in order)
        self._append(self.rankings, question, best, ranking_row(Ranking("", question.prompt, best)))

    def tie(self, question: RankingQuestion) -> None:
        """Note that no completion is better."""
        row = ranking_row(Ranking("", question.prompt, question.completions))
        kept = {"prompt": row["prompt"], "completions": list(question.completions)}
        self._append(self.ties, question, question.completions, kept)

    def _append(self, rows: JsonLines, question: RankingQuestion, texts: Sequence[str], row: dict[str, object]) -> None:
        before, key = rows.size, prompt_key(question.prompt)
        rows.append(row)
        self._answered[key].append(frozenset(texts))
        self._taken.append((rows, before, rows.size, key))

    def take_back(self) -> None:
        """Remove the newest answer of this session; ValueError if something else has written since."""
        rows, before, after, key = self._taken[-1]
        if rows.size != after:
            raise ValueError(f"{rows.path} was changed by something else: what it holds is left as it is")
        rows.cut(before)
        self._taken.pop()
        self._answered[key].pop()

    def sync(self) -> None:
        """Wait until all answers are on disk."""
        self.rankings.sync()
        self.ties.sync()


def _end_last_row(rows: JsonLines) -> None:
    """Remove a last row that a crash cut off; end one that is whole, as an editor leaves it without a line feed. A line
    that was not begun here is somebody's text, and refused."""
    if not rows.size:
        return
    with open_file(rows.path) as file:
        file.seek(max(rows.size - MAX_ROW, 0))
        last = file.read().rpartition(b"\n")[2]
    if to_row(last) is not None:
        with appending(rows.path) as file:
            file.write(b"\n")
    elif last and last[: len(BEGINNING)] != BEGINNING[: len(last)]:
        raise ValueError(f"out is {str(rows.path)!r}: its last line is no ranking; give another file, or remove it")
    rows.repair()


def ties_file(out: Path) -> Path:
    """Example: ties_file(Path("pairs.jsonl")) == Path("pairs.ties.jsonl")."""
    return out.with_name(f"{out.stem}.ties.jsonl")


# A session


class RankingSession:
    """Goes through the questions that were not answered, forth and back.

    Example: session = RankingSession(questions(config), RankingFile(config.out)); session.rank([1, 0])
    """

    def __init__(
        self,
        asked: Sequence[RankingQuestion],
        answers: RankingFile,
        everything: Callable[[], Sequence[RankingQuestion]] | None = None,
    ) -> None:
        """Begin with the questions `asked`; `everything` gives all of them, once the first one is answered."""
        self._questions = [each for each in asked if not answers.knows(each)]
        self._answers, self._everything = answers, everything
        self._past: list[str] = []
        self.earlier = len(asked) - len(self._questions)
        """Number of questions that earlier sessions answered."""
        if not self._questions:
            self._complete()

    @property
    def is_complete(self) -> bool:
        """False as long as only some of the questions are known."""
        return self._everything is None

    def _complete(self) -> None:
        """Put all other questions behind those that were asked."""
        if self._everything is None:
            return
        everything, self._everything = self._everything(), None
        past = self._questions[: len(self._past)]
        known = {each.key for each in past}
        others = [each for each in everything if each.key not in known]
        self._questions = [*past, *(each for each in others if not self._answers.knows(each))]
        self.earlier = len(past) + len(others) - len(self._questions)

    @property
    def question(self) -> RankingQuestion | None:
        """The question that is asked now; None at the end."""
        if self._past:
            self._complete()
        return self._questions[len(self._past)] if self.left else None

    @property
    def left(self) -> int:
        return len(self._questions) - len(self._past)

    def count(self, kind: str) -> int:
        """The number of answers of this session: `ranked`, `tie` or `skipped`."""
        return self._past.count(kind)

    def rank(self, order: Sequence[int]) -> None:
        self._answers.rank(self._now(), order)
        self._past.append("ranked")

    def tie(self) -> None:
        self._answers.tie(self._now())
        self._past.append("tie")

    def skip(self) -> None:
        """Leave the question for another session."""
        self._past.append("skipped")

    def take_back(self) -> bool:
        """Ask the question before again, its answer removed; False if there is none before."""
        if not self._past:
            return False
        if self._past[-1] != "skipped":
            self._answers.take_back()
        self._past.pop()
        return True

    def _now(self) -> RankingQuestion:
        question = self.question
        assert question is not None, "there is a question to answer"
        return question
