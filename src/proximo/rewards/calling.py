"""Calls of reward functions: as TRL, verl or verifiers calls them, known by their parameters.

Runs inside a worker too, which loads it by its file: it imports nothing heavy.
"""

import dis
import inspect
import itertools
import math
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from proximo.processes.worker import Junk

if TYPE_CHECKING:  # half of what a worker imports, and only `async def` needs it
    import asyncio

Columns = Mapping[str, Any]
"""Data of a call: prompts, completions, answers and the data's columns, each with one entry for each completion."""
Function = Callable[..., Any]

TRL = "TRL's f(prompts, completions, **columns)"
VERL = "verl's compute_score(data_source, solution_str, ground_truth, extra_info), once for each completion"
VERL_BATCH = "verl's compute_score(data_sources, solution_strs, ground_truths, extra_infos)"
VERL_WHOLE = "verl's earlier compute_score(solution_str, ground_truth), with prompt and answer in one text"
VERIFIERS = "verifiers' f(completion, answer, **kwargs), once for each completion"
RUBRIC = "verifiers' rubric, the weighted sum of its functions"
_MARKS = {
    TRL: ("prompts", "completions", "completion_ids"),
    VERL: ("solution_str",),
    VERL_BATCH: ("solution_strs",),
    VERIFIERS: ("completion", "state"),
}
"""Parameters that only one of them has."""
MAX_NAMES = 100
"""Metrics that one function may give."""
MAX_NAME = 80
"""Characters of a metric's name."""
_NO_NAME = re.compile(r"[^\w.-]")
_OF_VERIFIERS = ("prompt", "completion", "answer", "state", "info", "task")


@dataclass(frozen=True)
class Adapted:
    """A function with the way in which it is called."""

    function: Any
    form: str
    """Form of the call: one of those above."""
    headers: tuple[str, ...] = ()
    """Texts behind which an answer begins, of a function that takes texts with their prompts."""

    def __call__(self, columns: Columns, count: int) -> list[Any]:
        """A score for each completion, of any type."""
        return self.scored(columns, count, MetricLog())

    def scored(self, columns: Columns, count: int, log: "MetricLog") -> list[Any]:
        """A score for each completion, of any type; what the function gives to TRL's `log_metric` is in the log."""
        if self.form == RUBRIC:
            return _rubric(self.function, columns, count)
        if self.form == TRL:
            return listed(finished(self.function(**_for_trl(self.function, columns, log))), count)
        if self.form == VERL_BATCH:
            plural = {f"{name}s": [row.get(name) for row in _verl_rows(columns, count)] for name in _VERL}
            return [_score(item) for item in listed(finished(self.function(**accepted(self.function, plural))), count)]
        of_verl = self.form in (VERL, VERL_WHOLE)
        rows = _verl_rows(columns, count, self.headers) if of_verl else _verifiers_rows(columns, count)
        return [_score(item) for item in _each(self.function, rows)]

    def measured(self, columns: Columns, count: int) -> dict[str, list[Any]]:
        """Numbers of a step by their names: a list, of one for each completion, has the empty name; of a dict each
        entry is such a list, or one number of the whole step."""
        if self.form != TRL:
            return {"": self(columns, count)}
        log = MetricLog()
        result = finished(self.function(**_for_trl(self.function, columns, log)))
        logged = {name: [value] for name, value in log.means.items()}
        if not isinstance(result, Mapping):
            return {**logged, "": listed(result, count)}
        return logged | {
            str(name): _one_or_listed(item, count) for name, item in itertools.islice(result.items(), MAX_NAMES)
        }

    @property
    def described(self) -> str:
        """Form of the call, in words, with what has no effect here."""
        names, _ = _parameters(self.function) if self.form == TRL else (set[str](), False)
        unheard = "; what it gives to log_extra is not logged, what it gives to log_metric is"
        return f"{self.form}{unheard * ('log_extra' in names)}"


def adapted(function: Any) -> Adapted:
    """The function with its form; ValueError, in a line, where its parameters belong to several or to none."""
    if _is_rubric(function):
        return Adapted(function, RUBRIC)
    names, takes_any = _parameters(function)
    forms = [form for form, marks in _MARKS.items() if not names.isdisjoint(marks)]
    shown = ", ".join(sorted(names)) or "none"
    if len(forms) > 1:
        raise ValueError(f"its parameters ({shown}) are of {forms[0]} and of {forms[1]}: rename those of one")
    if not forms and not takes_any:
        raise ValueError(f"its signature ({shown}) is not recognised: give {TRL}, {VERL}, or {VERIFIERS}")
    form = forms[0] if forms else TRL
    if form in (VERL, VERL_BATCH) and (headers := _headers(function)):
        if form == VERL_BATCH:
            raise ValueError(
                f"it looks for {headers[0]!r} in solution_strs, which are answers without their prompts, unlike in "
                "verl's earlier convention: take each as it is"
            )
        return Adapted(function, VERL_WHOLE, headers)
    if form == VERIFIERS and "parser" in _required(function):
        raise ValueError("it needs a parser, which only a rubric gives: name the Rubric instead, file.py:rubric")
    return Adapted(function, form)


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Any) -> tuple[set[str], bool]:
    """The names of a function's parameters, and whether it takes any other keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have none
        return set(), True
    names = {parameter.name for parameter in parameters if parameter.kind not in _REST}
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _required(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.items()
    return {name for name, its in parameters if its.default is its.empty and its.kind not in _REST}


def accepted(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments, or those that a function without `**columns` names."""
    names, takes_any = _parameters(function)
    return {name: value for name, value in arguments.items() if takes_any or name in names}


# TRL


def _for_trl(function: Any, columns: Columns, log: "MetricLog") -> dict[str, Any]:
    """The columns, and what TRL's trainer gives besides, to a function that names it: all but `log_metric` is without
    effect."""
    trainers = {"trainer_state": None, "environments": None, "log_extra": _nothing, "log_metric": log}
    names, _ = _parameters(function)
    return accepted(function, columns) | {n: value for n, value in trainers.items() if n in names and n not in columns}


class MetricLog:
    """TRL's `log_metric(name, value)`, for one call of a reward function."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def __call__(self, name: Any, value: Any) -> None:
        """Take a number by its name; what cannot be a metric's name is written as `_`, and what is no finite number is
        left out."""
        key, number = _NO_NAME.sub("_", str(name))[:MAX_NAME], to_number(value)
        if key and isinstance(number, float) and math.isfinite(number):
            if key in self._values or len(self._values) < MAX_NAMES:
                self._values.setdefault(key, []).append(number)

    @property
    def means(self) -> dict[str, float]:
        """The mean of each name's numbers."""
        return {name: math.fsum(each / len(values) for each in values) for name, values in self._values.items()}


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a trainer's log."""


# verl

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


_HEADER = re.compile(
    r"<\|im_start\|>\s*assistant|<\|start_header_id\|>\s*assistant\s*<\|end_header_id\|>|<\|assistant\|>"
    r"|<start_of_turn>\s*model|<.Assistant.>|\[/INST\]|###\s*(?:Response|Assistant):|\bassistant:",
    re.IGNORECASE,
)
"""Header before an answer in a text with its prompt."""
_TAKING = frozenset(
    ("split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex", "search", "match")
)
"""Methods by which a function takes what stands behind such a header."""
MAX_FUNCTIONS = 200
"""Functions of a user's, reachable from the one that is called, that are looked through."""


def _headers(function: Any) -> tuple[str, ...]:
    """Headers behind which the function, or one that it calls, looks for the answer: verl gave its functions the prompt
    and the answer in one text before it gave them the answer alone, with the same parameters."""
    headers: dict[str, None] = {}
    for called in _reachable(function):
        steps = _steps(called.__code__)
        if any(step.argval in _TAKING for step in steps if isinstance(step.argval, str)):
            texts = [_text_of(step, called) for index, step in enumerate(steps) if not _is_asked_for(steps, index)]
            headers |= {match[0]: None for text in texts for match in _HEADER.finditer(text.replace("\\", ""))}
    return tuple(headers)


def _steps(code: CodeType) -> list[dis.Instruction]:
    """The instructions of a function, those of functions inside it included."""
    inside = [step for constant in code.co_consts if isinstance(constant, CodeType) for step in _steps(constant)]
    return [*dis.get_instructions(code), *inside]


def _text_of(step: dis.Instruction, function: Any) -> str:
    """The text that an instruction loads, a literal or a name of the module; empty if it is none."""
    value = function.__globals__.get(step.argval) if step.opname == "LOAD_GLOBAL" else step.argval
    return value if isinstance(value, str) and step.opname.startswith(("LOAD_CONST", "LOAD_GLOBAL")) else ""


def _is_asked_for(steps: Sequence[dis.Instruction], index: int) -> bool:
    """Tell whether what is loaded is only looked for, `"Assistant:" in text`."""
    return any(step.opname == "CONTAINS_OP" for step in steps[index + 1 : index + 3])


def _reachable(function: Any) -> list[Any]:
    """A function and those that it names, in its module or in modules that it names."""
    waiting, seen = [function], []
    while waiting and len(seen) < MAX_FUNCTIONS:
        current = waiting.pop(0)
        while isinstance(current, partial):
            current = current.func
        current = inspect.unwrap(current) if inspect.isroutine(current) else type(current).__call__
        if not inspect.isfunction(current := getattr(current, "__func__", current)) or current in seen:
            continue
        seen.append(current)
        names = current.__code__.co_names
        for named in map(current.__globals__.get, names):
            of_module = [vars(named).get(name) for name in names] if inspect.ismodule(named) else [named]
            waiting += [member for member in of_module if inspect.isfunction(member)]
    return seen


def _verl_rows(columns: Columns, count: int, headers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Arguments for each completion. A data source that the data lack is left out, and the function says so."""
    rows = []
    for number in range(count):
        row = {name: column[number] for name, column in columns.items()}
        rule = row.get("reward_model")
        truth = rule.get("ground_truth") if isinstance(rule, Mapping) else row.get("ground_truth")
        known = {"data_source": row["data_source"]} if row.get("data_source") is not None else {}
        text = _text(row["completions"])
        known["solution_str"] = _whole(row["prompts"], text, headers) if headers else text
        known["ground_truth"] = row.get("answer") if truth is None else truth
        known["extra_info"] = row.get("extra_info") or {}
        rows.append(known)
    return rows


def _whole(prompt: Any, answer: str, headers: Sequence[str]) -> str:
    """Prompt and answer in one text, with a header between them if the prompt has none."""
    asked = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
    if any(header in asked for header in headers):
        return asked + answer
    return f"{asked}\n{headers[0]}\n{answer}"


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _score(result: Any) -> Any:
    """Take the score out of a dictionary with further numbers, as verl's functions may return one."""
    if isinstance(result, Mapping):
        if "score" not in result:
            raise Junk(f"it returned {short(result)}, a dictionary without 'score'")
        return result["score"]
    return result


# verifiers


def _verifiers_rows(columns: Columns, count: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        row = {name: column[number] for name, column in columns.items()}
        row["prompt"], row["completion"] = row.pop("prompts"), row.pop("completions")
        row.pop("completion_ids", None)
        row.setdefault("info", {})
        row.setdefault("task", "default")
        row["state"] = {name: row.get(name) for name in _OF_VERIFIERS if name != "state"}
        rows.append(row)
    return rows


def _is_rubric(thing: Any) -> bool:
    """Tell whether it is a verifiers Rubric: an object with functions and as many weights."""
    return not inspect.isclass(thing) and all(
        isinstance(getattr(thing, name, None), list) for name in ("funcs", "weights")
    )


def _rubric(rubric: Any, columns: Columns, count: int) -> list[Any]:
    objects, rows = dict(getattr(rubric, "class_objects", {})), _verifiers_rows(columns, count)
    totals = [0.0] * count
    for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
        names, _ = _parameters(function)
        if names.isdisjoint(("prompts", "completions", "answers", "states", "tasks", "infos")):
            scores = _each(function, [row | objects for row in rows])
        else:
            plural = {f"{name}s": [row[name] for row in rows] for name in _OF_VERIFIERS} | objects
            scores = listed(finished(function(**accepted(function, plural))), count)
        totals = [total + weight * float(score) for total, score in zip(totals, scores, strict=True)]
    return totals


# Results


def _each(function: Function, rows: list[dict[str, Any]]) -> list[Any]:
    """The function's result for each row; those of an `async def` are awaited together."""
    results = [function(**accepted(function, row)) for row in rows]
    if not any(inspect.isawaitable(result) for result in results):
        return results

    async def together() -> list[Any]:
        import asyncio

        return list(await asyncio.gather(*results))

    return finished(together())


def finished(result: Any) -> Any:
    """The result of a call, awaited where the function is `async def`."""
    if not inspect.isawaitable(result):
        return result
    import asyncio

    async def awaited(each: Awaitable[Any]) -> tuple[Any, BaseException | None]:
        try:
            return await each, None
        except BaseException as error:  # raised again in the caller's thread: sys.exit would end the loop
            return None, error

    value, error = asyncio.run_coroutine_threadsafe(awaited(result), _loop()).result()
    if error is not None:
        raise error
    return value


_LOOPS: "dict[int, asyncio.AbstractEventLoop]" = {}
"""Event loop of this process, by its id: one that was forked off has none."""
_STARTING = threading.Lock()


def _loop() -> "asyncio.AbstractEventLoop":
    """The loop in which all `async def` functions of this process run, on a thread of its own: a client that a function
    keeps between its calls belongs to one loop, and several calls wait together. A notebook's own loop is another."""
    import asyncio

    with _STARTING:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
        return loop


def is_async(function: Any) -> bool:
    """Tell whether a function, an object that is called, or a partial of one, is `async def`."""
    while isinstance(function, partial):
        function = function.func
    called = type(function).__call__ if callable(function) else None
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def listed(result: Any, count: int) -> list[Any]:
    if result is None or isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        raise Junk(f"it returned {short(result)}, not a list of {count} numbers")
    scores = list(itertools.islice(result, count + 1))
    if len(scores) != count:
        number = "more" if len(scores) > count else str(len(scores))
        raise Junk(f"it returned {number} scores for {count} completions")
    return scores


def _one_or_listed(item: Any, count: int) -> list[Any]:
    """A number of the whole step as a list of its own."""
    return listed(item, count) if isinstance(item, Iterable) and not isinstance(item, str) else [item]


def to_number(score: Any) -> float | str | None:
    """A number, also of numpy or torch; None is the function's own word for unscored, a text says what else it was."""
    if score is None or isinstance(score, (str, bytes)):
        return score if score is None else short(score)
    try:
        return float(score)
    except BaseException:  # whatever it was, it is no number
        return short(score)


def short(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException:  # its own __repr__ may be what is broken
        text = ""
    return f"{type(value).__name__} {text[:100]}"
