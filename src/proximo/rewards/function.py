"""Any Python function as a reward, with the signature that TRL's users already have."""

import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.types import Completion, Problem


class RewardFailed(UserWarning):
    """A reward function broke; its batch is unscored and the run goes on."""


@dataclass(frozen=True)
class PythonFunction:
    """Calls `f(prompts, completions, **columns)` and takes its list of floats; None means unscored.

    Columns are the data set's, the answer and the completions' token ids (`completion_ids`), as in TRL.
    Completions are strings, or lists of messages where the prompt is a conversation.
    """

    path: str
    """package.module:function, or path/to/file.py:function."""
    while_sampling: bool = False
    """Call it for each group as soon as it is sampled, on another thread, while decoding goes on: for functions that
    are slow. Otherwise once, with everything, on the main thread, which those need that set themselves a time limit
    by a signal, as math-verify does, and those that answer many completions at once."""

    needs_answer = False

    def __post_init__(self) -> None:
        place, _, function = self.path.rpartition(":")
        if not place or not function.isidentifier():
            raise ValueError(f"reward.path is {self.path!r}: give package.module:function or file.py:function")

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        function = load_function(self.path)
        try:
            scores = [
                math.nan if score is None else float(score) for score in function(**_columns(problems, completions))
            ]
            if len(scores) != len(completions):
                raise ValueError(f"it returned {len(scores)} scores for {len(completions)} completions")
        except Exception as error:  # the user's code may raise anything; one bad batch must not end a run
            unscored = f"{len(completions)} completions are unscored"
            warnings.warn(f"{self.path}: {type(error).__name__}: {error}; {unscored}", RewardFailed, stacklevel=2)
            return [math.nan] * len(completions)
        return scores

    def reference(self, problem: Problem) -> str | None:
        """None: only the function knows what it likes."""
        return None


@functools.cache
def load_function(path: str) -> Callable[..., Any]:
    """Import the module or file once and take the function from it."""
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ValueError(f"reward.path is {path!r}: {place} cannot be imported, {error!r}") from error
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"reward.path is {path!r}: {place} has no function {name}")
    return function


def _columns(problems: Sequence[Problem], completions: Sequence[Completion]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for problem in problems for name in problem.data)
    columns: dict[str, list[Any]] = {name: [problem.data.get(name) for problem in problems] for name in names}
    return columns | {
        "answer": [problem.answer for problem in problems],
        "prompts": [
            problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt) for problem in problems
        ],
        "completions": [
            completion.text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": completion.text}]
            for problem, completion in zip(problems, completions, strict=True)
        ],
        "completion_ids": [list(completion.tokens) for completion in completions],
    }
