"""A language model behind an OpenAI-compatible server as a reward."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from proximo.processes.failures import Failure, Outcome
from proximo.rewards.grading import Grading, grading
from proximo.rewards.judges.asking import TooLate, Unreachable, request
from proximo.rewards.judges.cache import Verdicts
from proximo.rewards.judges.session import JudgeEndpoint, JudgeLimits, JudgeSession
from proximo.rewards.judges.verdicts import asked
from proximo.rewards.protocol import Waiting
from proximo.rewards.scoring import Answer, noted
from proximo.rewards.workers import check_at_once, check_seconds
from proximo.system.opening import make_folder, read_text, without_links
from proximo.system.secrets import masked
from proximo.types import Completion, Problem

CHECK_SECONDS = 20.0
"""Time for a server to say which models it has."""
RUBRIC_FILES = (".md", ".txt")
FOLDER = "verdicts"
"""Name of the folder of verdicts in a run's folder."""


@dataclass(frozen=True)
class Judge:
    """A language model that scores completions by a rubric, behind any server with OpenAI's chat completions.

    The judge sees prompt, answer and completion as JSON data, and replies with a reason and a score, which becomes a
    reward from 0 to 1. A completion that it does not score is unscored. Verdicts are kept on disk.
    """

    url: str
    """Address of the server up to its version: http://localhost:8000/v1 or https://api.openai.com/v1."""
    model: str
    """Name of the model on that server."""
    rubric: str
    """Rubric to judge by: a text, or the path of a .md or .txt file."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score that the judge may give; they become the rewards 0 and 1."""
    columns: tuple[str, ...] = ()
    """Columns of the data that the judge sees too, such as a rubric of each row."""
    key_variable: str = ""
    """Name of the environment variable with the API key, which no file holds. Empty: the server needs none."""
    at_once: int = 512
    """Maximum requests at the same time."""
    seconds: float = 120.0
    """Time limit of a request in seconds."""
    retries: int = 2
    """Further attempts after a reply without a score, a request that took too long or another error of HTTP."""
    patience: float = 300.0
    """Seconds to wait for a server that is busy, fails or cannot be reached. One that is gone for longer ends the run,
    which can be resumed without a loss."""
    max_tokens: int = 1024
    """Maximum tokens of a reply, with what a reasoning model thinks before it."""
    cache: bool | str = True
    """True: verdicts are kept in the run's folder. A path: a folder that several runs share."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Further fields of each request, such as reasoning_effort."""

    needs_answer = False
    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        _check_url(self.url)
        for name in ("model", "rubric"):
            if not getattr(self, name).strip():
                raise ValueError(f"reward.{name} is empty: give the judge a {name}")
        low, high = self.scale
        if not -1e6 <= low < high <= 1e6:
            raise ValueError(f"reward.scale is {self.scale}: give the lowest score and then the highest, such as 0, 10")
        check_at_once(self.at_once)
        check_seconds(self.seconds)
        if not 0 <= self.retries <= 100:
            raise ValueError(f"reward.retries is {self.retries}: give a number from 0 to 100")
        if not 0 <= self.patience <= 86_400:
            raise ValueError(f"reward.patience is {self.patience}: give seconds from 0 to 86400 (a day)")
        if self.max_tokens < 1:
            raise ValueError(f"reward.max_tokens is {self.max_tokens}: give at least 1, such as 1024")
        if self.cache == "":
            raise ValueError("reward.cache is empty: give true, false or a folder")

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        with grading():
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[float | None]]:
        """Ask about all completions, as many at a time as may be."""
        with grading() as active:
            session = active.shared(repr(self), lambda: self._session(active))
        rubric = self.rubric_text
        begun = [
            session.begin(asked(rubric, self.scale, self.columns, problem, completion))
            for problem, completion in zip(problems, completions, strict=True)
        ]

        def finish() -> list[float | None]:
            answer = Answer([self._reward(verdict()) for verdict in begun])
            self._tell(session)
            return noted(answer, completions, grader=f"Judge {self.model}")

        return finish

    def reference(self, problem: Problem) -> str | None:
        """Return None: only the judge knows what it likes."""
        return None

    @property
    def rubric_text(self) -> str:
        """The rubric, read from its file if it has one."""
        if not is_rubric_file(self.rubric):
            return self.rubric
        try:
            text = read_text(without_links(Path(self.rubric).expanduser()))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else "not UTF-8"
            raise ValueError(
                f"reward.rubric is {self.rubric!r}, which cannot be read ({reason}): give a text file"
            ) from None
        if not text.strip():
            raise ValueError(f"reward.rubric is {self.rubric!r}, which is empty: write down what to judge by")
        return text

    def check(self) -> None:
        """Refuse a judge that cannot be asked: no rubric, no key, no server, no such model."""
        server = self._server()
        _ = self.rubric_text
        try:
            reply = request(
                "GET", f"{self.url.rstrip('/')}/models", None, server.headers, min(self.seconds, CHECK_SECONDS)
            )
        except (TooLate, Unreachable) as error:
            reason = server.hidden(str(error))
            raise ValueError(
                f"reward.url is {self.url!r}, where no server answers ({reason}): start it, or correct it"
            ) from None
        if reply.status in (401, 403):
            raise ValueError(
                f"reward.key_variable is {self.key_variable!r}: the server at {self.url} answers {reply.status}, so it "
                "needs another key"
            )
        models = reply.json.get("data") if reply.status == 200 and isinstance(reply.json, dict) else None
        names = [model.get("id") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
        if names and self.model not in names:
            some = ", ".join(map(str, names[:5]))
            raise ValueError(
                f"reward.model is {self.model!r}, which the server at {self.url} does not have: give one of {some}"
            )

    def _server(self) -> JudgeEndpoint:
        key = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        if self.key_variable and not key:
            raise ValueError(
                f"reward.key_variable is {self.key_variable!r}, and the environment has no such variable: set it"
            )
        if not (key.isascii() and key.isprintable()):  # http.client would show the key in its error
            raise ValueError(
                f"reward.key_variable is {self.key_variable!r}, whose value has a line break or another character that "
                "no API key has: set it to one key"
            )
        return JudgeEndpoint(self.url.rstrip("/"), self.model, key, self.max_tokens, self.options)

    def _session(self, active: Grading) -> JudgeSession:
        self.check()
        verdicts = None
        if self.cache:
            folder = None if active.folder is None else active.folder / FOLDER
            verdicts = Verdicts(folder if self.cache is True else _made(Path(self.cache).expanduser()))
        limits = JudgeLimits(self.at_once, self.seconds, self.retries, self.patience)
        return JudgeSession(self._server(), limits, self.scale, verdicts, active.usage)

    def _reward(self, verdict: float | Failure) -> Outcome:
        low, high = self.scale
        return verdict if isinstance(verdict, Failure) else (verdict - low) / (high - low)

    def _tell(self, session: JudgeSession) -> None:
        """Report, once, that verdicts cannot be written."""
        if session.verdicts is not None and (complaint := session.verdicts.take_complaint()):
            with grading() as active:
                active.notices.append(f"{complaint}; a resume asks for them again")


def _made(folder: Path) -> Path:
    try:
        folder = without_links(folder)
        make_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"reward.cache is {str(folder)!r}: no folder can be made there, {reason}") from None
    return folder


def is_rubric_file(rubric: str) -> bool:
    """Tell whether a rubric is the path of a file, not a text."""
    return rubric.endswith(RUBRIC_FILES) and "\n" not in rubric


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
        parts = urlsplit("")
    if not is_whole or parts.query or parts.fragment:
        raise ValueError(f"reward.url is {masked(url)!r}: give an address like http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError(
            f"reward.url is {masked(url)!r}, with a password in it: put the key into an environment variable and name "
            "that in reward.key_variable"
        )
    if parts.path.rstrip("/").endswith("/completions"):
        raise ValueError(f"reward.url is {url!r}: leave out what follows the version, http://localhost:8000/v1")
