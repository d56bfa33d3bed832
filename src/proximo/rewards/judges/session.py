"""One run's conversation with a judge: limits, retries, what was already judged, and what to do if the server dies.

A reply that cannot be read is asked for again, and then its completion is unscored. A server that cannot be reached is
waited for: that changes no number. If it stays away the run ends before its next update, and a resume repeats the step
with the verdicts that were written.
"""

import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from proximo.processes.failures import Failure, GraderFailed, plain
from proximo.processes.pool import Threads
from proximo.rewards.judges.asking import Reply, TooLate, Unreachable, request
from proximo.rewards.judges.cache import Verdicts, key_of
from proximo.rewards.judges.usage import Usage
from proximo.rewards.judges.verdicts import AGAIN, Message, Scale, form, read, schema
from proximo.rewards.protocol import Waiting

REFUSED = (400, 422)
"""Statuses of a server that does not take a field of the request, or its prompt."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts; each pause is twice the last."""
REPORT_AFTER = 5.0
"""Seconds without a server after which a message says what is waited for."""
MAX_TOKENS = 1 << 30
"""Tokens of one request, above which a server's count is none: a number of a thousand digits ends what adds it."""
FORMS = ("json_schema", "json_object", "")
"""Ways to have a server keep the reply to a form: the first that it takes. Empty: not at all."""


@dataclass(frozen=True)
class JudgeLimits:
    """Limits of asking a judge: requests at once, seconds, retries and patience."""

    at_once: int
    seconds: float
    retries: int
    patience: float


@dataclass(frozen=True)
class JudgeEndpoint:
    """A server of a judge, its model and the options of requests."""

    url: str
    model: str
    key: str
    """API key; empty: none."""
    max_tokens: int
    options: Mapping[str, Any]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def hidden(self, text: str) -> str:
        """The text on one line, without the key."""
        return plain(text.replace(self.key, "***") if self.key else text, 300)


class JudgeSession:
    """Asks about completions, many at once."""

    def __init__(
        self, server: JudgeEndpoint, limits: JudgeLimits, scale: Scale, verdicts: Verdicts | None, usage: Usage
    ) -> None:
        """`verdicts`: None asks anew about what was judged before."""
        self.server, self.limits, self.scale, self.verdicts, self._usage = server, limits, scale, verdicts, usage
        self._threads = Threads(limits.at_once)
        self._asked: dict[str, Waiting[float | Failure]] = {}
        self._lock = threading.Lock()
        self._chances = random.Random(0)
        self._form, self._renamed = 0, False
        self._gone: str | None = None
        self._reported = False

    def begin(self, messages: Sequence[Message]) -> Waiting[float | Failure]:
        """Begin to ask for a score of the scale, or why there is none. What is asked twice is judged once."""
        if self.verdicts is None:
            return self._threads.begin(lambda: self._judged(messages, ""))
        question = {"url": self.server.url, "model": self.server.model, "messages": list(messages)}
        key = key_of(question | {"max_tokens": self.server.max_tokens, "options": dict(self.server.options)})
        with self._lock:
            known, waiting = self.verdicts.get(key), self._asked.get(key)
            if known is not None and self.scale[0] <= known <= self.scale[1]:  # a file may hold any number
                self._usage.add(cached=1)
                return lambda: known
            if waiting is None:
                waiting = self._asked[key] = self._threads.begin(lambda: self._judged(messages, key))
            else:
                self._usage.add(cached=1)
        return waiting

    def close(self) -> None:
        self._threads.close()

    def _judged(self, messages: Sequence[Message], key: str) -> float | Failure:
        try:
            return self._attempts(list(messages), key)
        finally:
            with self._lock:
                self._asked.pop(key, None)

    def _attempts(self, messages: list[Message], key: str) -> float | Failure:
        """Ask until there is a score, or the retries are used up."""
        asked, failure = messages, Failure("reply", "it was not asked")
        for attempt in range(self.limits.retries + 1):
            self._usage.add(retries=int(attempt > 0))
            start = time.monotonic()
            answer = self._answer(asked)
            if isinstance(answer, Failure):
                failure = answer
                if answer.fatal:  # the same again would be refused again
                    break
                continue
            verdict, seconds = self._verdict(answer), time.monotonic() - start
            content = _content(answer.json) or ""
            if not isinstance(verdict, Failure):
                self._keep(key, verdict, content, answer.json, seconds)
                return verdict
            self._count(answer.json, seconds)
            failure = verdict
            again = AGAIN.format(form=form(self.scale))
            asked = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": again}]
        return failure

    def _verdict(self, answer: Reply) -> float | Failure:
        """The score in a server's 200. A reply that was cut off has none: what it holds may be a thought."""
        if _choice(answer.json).get("finish_reason") == "length":
            limit = f"{self.server.max_tokens} tokens"
            return Failure("length", f"the judge's reply was cut off after {limit}: raise reward.max_tokens")
        content, (low, high) = _content(answer.json), self.scale
        score = None if content is None else read(content)
        if score is not None and low <= score <= high:
            return score
        quoted = plain(content if content is not None else answer.text, 200)
        kind = "reply" if score is None else "out of range"
        return Failure(kind, f"the judge's reply has no score from {low:g} to {high:g}: {quoted!r}")

    # One reply

    def _answer(self, messages: Sequence[Message]) -> Reply | Failure:
        """Wait for a server's 200 while it is busy or away; returns that, or why there is none."""
        until, pause, level = time.monotonic() + self.limits.patience, FIRST_PAUSE, self._form
        renamed, away = self._renamed, ""
        while self._gone is None:
            try:
                reply = self._post(messages, level, renamed=renamed)
            except TooLate as error:
                advice = "lower reward.at_once or raise reward.seconds"
                return Failure("time", f"{error}: {advice} if the judge is slow")
            except Unreachable as error:
                reply, away = None, str(error)
            if reply is not None and reply.status == 200:
                self._form, self._renamed, self._reported = level, renamed, False
                return reply
            if reply is not None and reply.status in REFUSED and not renamed and b"max_completion_tokens" in reply.body:
                renamed = True
                continue
            if reply is not None and reply.status in REFUSED and level + 1 < len(FORMS):
                level += 1
                continue
            if reply is not None and not _is_busy(reply.status):
                return self._refused(reply)
            rest = until - time.monotonic()
            if rest <= 0:
                return self._given_up(reply, away)
            if reply is None and self.limits.patience - rest > REPORT_AFTER:
                self._report(away)
            wanted = max(
                _seconds(reply.retry_after) if reply is not None else 0.0, pause * self._chances.uniform(1, 1.5)
            )
            self._usage.add(waits=1)
            time.sleep(min(wanted, max(rest, 0.01)))
            pause = min(2 * pause, LONGEST_PAUSE)
        raise GraderFailed(self._gone or "")

    def _post(self, messages: Sequence[Message], level: int, *, renamed: bool) -> Reply:
        limit = "max_completion_tokens" if renamed else "max_tokens"
        body: dict[str, Any] = {"model": self.server.model, "messages": list(messages), limit: self.server.max_tokens}
        if not renamed:  # models that have the other name take no temperature
            body["temperature"] = 0.0
        if FORMS[level] == "json_schema":
            shape = {"name": "verdict", "strict": True, "schema": schema(self.scale)}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        elif FORMS[level]:
            body["response_format"] = {"type": FORMS[level]}
        body |= self.server.options
        return request("POST", f"{self.server.url}/chat/completions", body, self.server.headers, self.limits.seconds)

    def _refused(self, reply: Reply) -> Failure:
        message = f"the judge's server answered {reply.status}: {self.server.hidden(reply.text)}"
        if reply.status in (401, 403, 404):
            self._gone = f"{message}; correct reward.key_variable or reward.model, then run the same command again"
            raise GraderFailed(self._gone)
        return Failure(f"http {reply.status}", message, fatal=reply.status in REFUSED)

    def _given_up(self, reply: Reply | None, away: str) -> Failure:
        """Give up after all patience: a server that is there leaves a completion unscored, a gone one ends the run."""
        if reply is not None:
            message = f"the judge's server answered {reply.status} for {self.limits.patience:g} s"
            reason = f"{message}: {self.server.hidden(reply.text)}; lower reward.at_once if it is overloaded"
            return Failure(f"http {reply.status}", reason, fatal=True)
        self._gone = (
            f"the judge at {self.server.url} could not be reached for {self.limits.patience:g} s "
            f"({self.server.hidden(away)}): start it, then run the same command again; verdicts that it gave are kept"
        )
        raise GraderFailed(self._gone)

    def _report(self, away: str) -> None:
        if not self._reported:
            self._reported = True
            with suppress(OSError):  # stderr may be closed
                line = f"waiting for the judge at {self.server.url} ({self.server.hidden(away)})"
                print(f"{line}, up to {self.limits.patience:g} s", file=sys.stderr)

    # What it cost

    def _keep(self, key: str, score: float, content: str, reply: Any, seconds: float) -> None:
        more = self._count(reply, seconds)
        if self.verdicts is not None:
            self.verdicts.add(key, score, {**more, "reply": content})

    def _count(self, reply: Any, seconds: float) -> dict[str, float]:
        used = reply.get("usage") if isinstance(reply, dict) else None
        numbers = {
            name: used[name]
            for name in ("prompt_tokens", "completion_tokens")
            if isinstance(used, dict) and type(used.get(name)) is int and 0 <= used[name] <= MAX_TOKENS
        }
        self._usage.add(requests=1, seconds=seconds, **numbers)
        return {"seconds": round(seconds, 3), **numbers}


def _choice(reply: Any) -> dict[str, Any]:
    """The first choice of a chat completion; empty where the answer is not one."""
    with suppress(KeyError, IndexError, TypeError):
        choice = reply["choices"][0]
        return choice if isinstance(choice, dict) else {}
    return {}


def _content(reply: Any) -> str | None:
    """The text of a chat completion; None where the answer is not one."""
    message = _choice(reply).get("message")
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else None


def _is_busy(status: int) -> bool:
    """Tell whether the server, or what is in front of it, may do better later."""
    return status in (408, 429) or status >= 500


def _seconds(retry_after: str) -> float:
    """Seconds of the header Retry-After; a date counts as nothing."""
    try:
        return min(max(float(retry_after), 0.0), 3600.0)
    except ValueError:
        return 0.0
