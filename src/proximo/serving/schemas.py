"""Fields of a request's body, each checked; what a client asks and this server does not do is refused by name."""

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from proximo.serving.errors import Refusal
from proximo.system.safe_text import quoted, visible

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0, 0.0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "metadata": (None, {}),
    "parallel_tool_calls": (None, True),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
}
"""Parameters of OpenAI's API that are accepted only with values that ask for nothing."""

IGNORED = ("user",)
"""Parameters that would change nothing: for whom a request is."""


def parsed(data: bytes) -> object:
    """The JSON of a body. What other readers of JSON do not know, NaN and halves of surrogate pairs, is refused."""
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text for a tokenizer
        return body
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the request is not JSON: {visible(str(error), 200)}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


class Body:
    """The fields of a JSON object; reading a field checks it."""

    def __init__(self, values: object, known: Collection[str]) -> None:
        if not isinstance(values, dict):
            raise Refusal("the body is no JSON object: give one")
        self._values: Mapping[str, Any] = values
        for name, value in values.items():
            if name in known:
                continue
            if name in IGNORED:
                if not isinstance(value, str | None):
                    raise Refusal(f"{name} is {quoted(value, 40)}: give a text", name)
                continue
            if name not in NEUTRAL:
                shown = visible(name, 100)
                raise Refusal(f"{shown}: there is no such parameter here; leave it out", shown, "unknown_parameter")
            if not any(type(value) is type(each) and value == each for each in NEUTRAL[name]):  # False is no number
                raise Refusal(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")

    def value(self, name: str) -> Any:
        return self._values.get(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        # A whole number may have hundreds of digits, and is compared as it is.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Refusal(f"{name} is {quoted(value, 40)}: give a number from {low:g} to {high:g}", name)
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Refusal(f"{name} is {quoted(value, 40)}: give a whole number from {low} to {high}", name)
        return value

    def switch(self, name: str) -> bool:
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise Refusal(f"{name} is {quoted(value, 40)}: give true or false", name)

    def strings(self, name: str, limit: int) -> tuple[str, ...]:
        """A text, or a list of up to `limit` texts, none of them empty."""
        value = self._values.get(name)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
            raise Refusal(f"{name} is {quoted(value)}: give a text or a list of texts, none of them empty", name)
        if len(texts) > limit:
            raise Refusal(f"{name} has {len(texts)} texts: give {limit} at most", name)
        return tuple(texts)
