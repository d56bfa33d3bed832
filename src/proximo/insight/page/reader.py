"""Data for the page's reader: the summary of a step, the tokens of a group, the reason for a token's gradient.

Each response is bounded: a step is a few numbers per completion; tokens come one group at a time and at most BUDGET
per response. Their numbers are 32-bit floats in base 64, which the page unpacks quickly.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from proximo.algorithms import explain
from proximo.insight.folder import RunFolder, decoded
from proximo.insight.lens.explanations import why as words_of
from proximo.insight.lens.replay import FIVE, chosen, compared, own_name
from proximo.insight.lens.states import TokenState
from proximo.insight.lens.steps import StoredStep
from proximo.insight.lens.turns import place_in_words, starts, transcript
from proximo.insight.page.finding import found_in
from proximo.insight.page.lenses import Kept, Look, introduced, label, looked, named_pass, shown_algorithm, whole
from proximo.insight.page.outline import outline
from proximo.insight.page.summaries import summary
from proximo.runs.ledger import LEDGER
from proximo.runs.rollout_files import read_columns
from proximo.system.lines import plain, whole_lines
from proximo.system.opening import open_file
from proximo.types import Turn

BUDGET = 1 << 18
"""Maximum tokens per response."""
MAX_PIECE, MAX_PROMPT, TAIL = 400, 20_000, 80
"""Maximum characters of a token, of a prompt, and of a completion's end."""
MAX_PARTS, MAX_FOUND = 20, 40
"""Maximum parts of a reward; maximum steps listed for the same problem."""
AT_ONCE = 5
"""Algorithms that are compared at a time."""
UNKNOWN = "\ufffd"
"""Replacement for bytes that are not a character."""
_tables: Kept[list[dict[str, Any]]] = Kept(8)


def steps(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """The stored steps and the available algorithms; with `problem`, only the steps with that problem; with `find`, the
    completions that contain a text."""
    if "find" in query:
        return found_in(run, query["find"], whole(query, "from", 0))
    if "problem" in query:
        return {"found": _elsewhere(run, query["problem"])}
    names = chosen(run.config, [card.name for card in explain.CARDS])
    return {
        "steps": run.steps(),
        "own": own_name(run.config),
        "five": list(FIVE),
        "algorithms": [{"name": name, "label": label(name), "title": introduced(run, name)[0]} for name in names],
        "states": [state.name.lower() for state in TokenState],
    }


def step(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """Groups and completions of a step in a few numbers each; with `find`, only the rows that contain the text; with
    `outline`, what is known without computing anything."""
    if "outline" in query:
        return outline(run, whole(query, "step"))
    if "find" in query:
        return {"matches": _matches(run.step(whole(query, "step")), query["find"])}
    look = looked(run, query)
    known = summary(look)
    return {
        "step": look.step.number,
        "algorithm": shown_algorithm(look),
        "pass": look.number,
        "passes": look.step.passes,
        "value_only": look.step.is_value_only,
        "updates": list(look.step.metadata["updates"]),
        "ranges": known.ranges,
        "groups": known.groups,
        "rows": known.rows,
    }


def group(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """The tokens of a group's completions with all known values, from token `from` on; with `row`, of that one only."""
    look, number = looked(run, query), whole(query, "group")
    members = (look.step.batch.group == number).nonzero().squeeze(1).tolist()
    if not members:
        raise ValueError(f"group is {number}: step {look.step.number} has no such group")
    wanted = whole(query, "row", -1 if "row" not in query else None)
    if wanted >= 0 and wanted not in members:
        raise ValueError(f"row is {wanted}: it is not of group {number}")
    rows = [wanted] if wanted >= 0 else sorted(members, key=lambda row: look.step.sibling[row])
    start, span = whole(query, "from", 0), max(BUDGET // len(rows), 1)
    prompt = look.step.prompt[members[0]]
    light = summary(look).rows
    run_look = None if look.is_own else looked(run, query, as_run=True)
    return {
        "step": look.step.number,
        "group": number,
        "problem": look.step.problem[members[0]],
        "prompt": prompt[-MAX_PROMPT:],
        "prompt_cut": max(len(prompt) - MAX_PROMPT, 0),
        "messages": _messages(look.step.messages[members[0]]),
        "answer": look.step.answer[members[0]],
        "from": start,
        "rows": [light[row] | _tokens(look, run_look, row, slice(start, start + span)) for row in rows],
    }


def why(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """Words on a token's gradient under the algorithm, and under the run's own if different."""
    look, row, token = looked(run, query), whole(query, "row"), whole(query, "token")
    if row >= len(look.step.batch) or token >= int(look.step.batch.lengths[row]):
        raise ValueError(f"row {row}, token {token}: step {look.step.number} has no such token")
    answer = {"words": words_of(look.step, look.seen, row, token)}
    if turn := place_in_words(look.step.turns[row], token):
        answer["turn"] = turn
    if not look.is_own:
        run_look = looked(run, query, as_run=True)
        answer["own"] = words_of(run_look.step, run_look.seen, row, token)
    return answer


def lens(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """The step under the run's own algorithm and the five, one row each; with `all`, under every algorithm."""
    step, number = named_pass(run, query)
    names = tuple(card.name for card in explain.CARDS) if "all" in query else FIVE
    file = run.step_file(step.number)
    status = file.stat()
    key = (file, status.st_mtime_ns, status.st_size, number, names)
    table = _tables.get(None, key, lambda: _table(run, step, number, names))
    return {"step": step.number, "pass": number, "table": [row | {"label": label(row["name"])} for row in table]}


def _table(run: RunFolder, step: StoredStep, number: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows, computed for a few algorithms at a time, since each holds the numbers of a whole step several times."""
    by_name: dict[str, dict[str, Any]] = {}
    config = run.config_at(step.number)
    for start in range(0, len(names), AT_ONCE):
        algorithms = chosen(config, names[start : start + AT_ONCE])
        for row in compared(step, config, algorithms, number=number):
            by_name.setdefault(row.name, row.to_dict())
    return list(by_name.values())


def _tokens(look: Look, run_look: Look | None, row: int, stretch: slice) -> dict[str, Any]:
    """One completion's tokens with all known numbers."""
    step, stop = look.step, min(stretch.stop, int(look.step.batch.lengths[row]))
    stretch = slice(stretch.start, stop)
    first = int(step.layout.starts[row])
    places = slice(first + stretch.start, first + max(stretch.start, stop))
    arrays = look.tokens(places)
    if run_look is not None:
        arrays["own"] = run_look.seen.state[places]
    pieces = step.pieces[row]
    specials = _special_tokens(pieces, step.turns[row], step.text[row])
    return {
        "tail": step.text[row][-TAIL:],
        "parts": {name[:TAIL]: part for name, part in list(step.parts[row].items())[:MAX_PARTS]},
        "pieces": [_cut(piece) for piece in pieces[stretch]],
        "turns": _turns(step.turns[row]),
        "specials": [index - stretch.start for index in specials if stretch.start <= index < stop],
        "arrays": {name: packed(tensor) for name, tensor in arrays.items()},
    }


def _messages(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """A prompt's messages; none if they are longer than what is shown of a prompt."""
    if sum(len(each["text"]) for each in messages) > MAX_PROMPT:
        return []
    return [{"role": each["role"][:TAIL], "text": each["text"]} for each in messages]


def packed(tensor: Tensor) -> str:
    return base64.b64encode(tensor.detach().numpy().astype("<f4").tobytes()).decode()


def _cut(piece: str) -> str:
    return piece if len(piece) <= MAX_PIECE else f"{piece[:MAX_PIECE]}… ({len(piece) - MAX_PIECE:,} more characters)"


def _turns(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The turns of an episode, without their texts, which their tokens spell."""
    return [
        {
            "role": turn.role[:TAIL],
            "start": start,
            "end": turn.end,
            "reward": plain(turn.reward),
            "failed": _cut(turn.failed),
        }
        for start, turn in zip(starts(turns), turns, strict=True)
    ]


def _special_tokens(pieces: Sequence[str], turns: Sequence[Turn], text: str) -> list[int]:
    """Special tokens of a completion; turns are texts of their own, with the chat template's marks between them."""
    if not turns:
        return _specials(pieces, text)
    texts: dict[tuple[int, int], str] = {}
    for start, turn in zip(starts(turns), turns, strict=True):
        texts[start, turn.end] = texts.get((start, turn.end), "") + turn.text
    return [start + index for (start, end), text in texts.items() for index in _specials(pieces[start:end], text)]


def _specials(pieces: Sequence[str], text: str) -> list[int]:
    """Tokens that are not in the completion's text, such as end tokens. Parts of a character may be written differently
    there, so the next piece is searched as far ahead as the missed ones are long."""
    specials, position, missed = [], 0, 0
    for number, piece in enumerate(pieces):
        start = text.find(piece, position, position + missed + len(piece))
        if start >= 0:
            position, missed = start + len(piece), missed if piece == "" else 0
        elif position == 0 and text.startswith(piece.lstrip(" ")):
            position = len(piece.lstrip(" "))  # some tokenizers drop a space at the start of a text
        else:
            missed += len(piece)
            if UNKNOWN not in piece:
                specials.append(number)
    return specials


def _matches(step: StoredStep, wanted: str) -> list[int]:
    """Rows whose prompt or completion contains a text, ignoring case."""
    wanted = wanted.casefold()
    prompts = {prompt: wanted in prompt.casefold() for prompt in set(step.prompt)}
    texts = (transcript(turns) or text for turns, text in zip(step.turns, step.text, strict=True))
    return [
        row
        for row, (prompt, text) in enumerate(zip(step.prompt, texts, strict=True))
        if prompts[prompt] or wanted in text.casefold()
    ]


def _elsewhere(run: RunFolder, problem: str) -> list[dict[str, Any]]:
    """The steps at which a problem was answered, from the ledger, with the rewards of its completions."""
    groups = []
    for number in sorted(set(run.steps()) & set(_drawn(run, problem)))[-MAX_FOUND:]:
        for group_number, got in sorted(_rewards(run, number, problem).items()):
            scored = [reward for reward in got if math.isfinite(reward)]
            mean = sum(scored) / len(scored) if scored else None
            groups.append({"step": number, "group": group_number, "reward": mean, "rows": len(got)})
    return groups


def _drawn(run: RunFolder, problem: str) -> Iterator[int]:
    """The steps of a problem's rows in the ledger, without parsing all of its up to a million rows."""
    path, spelled = run.path / LEDGER, json.dumps(problem).encode()
    with suppress(FileNotFoundError), open_file(path) as file:
        for row in decoded(line for line in whole_lines(file) if line is not None and spelled in line):
            if row.get("problem") == problem and isinstance(row.get("step"), int):
                yield row["step"]


def _rewards(run: RunFolder, number: int, problem: str) -> dict[int, list[float]]:
    """Rewards by group, from a few columns of a step's file; empty if it is damaged, which its own page reports."""
    columns = ["problem", "group", "reward"]
    rewards: dict[int, list[float]] = {}
    with suppress(OSError, ValueError, pa.ArrowException):
        table = read_columns(run.step_file(number), columns)
        for row in table.filter(pc.field("problem") == problem).to_pylist():
            rewards.setdefault(row["group"], []).append(row["reward"])
    return rewards
