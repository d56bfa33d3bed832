"""Keeps secrets out of files: passwords and tokens in URLs, keys and tokens from the environment, and what has the form
of a key wherever it stands. A hash in hexadecimal has none: those of commits, files and runs are there to be read."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

MASK = "***"

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^/\s?#\"']+@")
"""A URL with a user name or password before its host; the password may contain an @."""
_QUESTION = re.compile(
    r"(?P<name>[?&][\w-]{0,40}(?:token|key|secret|password|passwd|auth|signature)[\w-]{0,40}=)[^&\s#\"']+",
    re.IGNORECASE,
)
"""A query parameter whose name says that it is a secret."""
_BEARER = re.compile(r"(?P<name>\bBearer\s{1,3})[\w.~+/=-]{16,}", re.IGNORECASE)
_AUTHORIZATION = re.compile(r"(?P<name>\bAuthorization[\"']?\s?[:=]\s?[\"']?\w{1,20}\s)[\w.~+/=-]{8,}", re.IGNORECASE)
_HOOK = re.compile(
    r"(?P<name>\b(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|api\.telegram\.org|[\w-]{1,60}\.webhook\.office\.com"
    r"|chat\.googleapis\.com/v1/spaces)/)[^\s\"'<>]+",
    re.IGNORECASE,
)
"""An address that is a key itself: whoever knows its path may post there."""
_TELLING = re.compile(
    r"KEY|TOKEN|SECRET|NOTIFY|WEBHOOK|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH|(?:^|_)PASS(?:_|$)|_PWD$",
    re.IGNORECASE,
)
_PLACES = re.compile(r"(?:SOCK|SOCKET|FILE|PATH|DIR|HOME)$", re.IGNORECASE)
"""Names of variables that hold secrets."""
_SHORTEST = 8
"""Minimum characters of a secret: shorter values, such as `1` or `true`, are settings and occur everywhere."""
_SHAPED = re.compile(
    r"\b(?:sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|A[KS]IA[0-9A-Z]{16}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|npm_\w{30,}|pypi-[\w-]{30,}"
    r"|nvapi-[\w-]{16,}|gsk_\w{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]+)*)"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\w\s+/=:,\\-]*"
)
"""Keys recognised by their prefix, tokens of three parts that begin as JSON does (JWT), and private keys."""
_RANDOM = re.compile(r"(?<![A-Za-z0-9])(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=(?:[A-Za-z]*[0-9]){2})[A-Za-z0-9]{16,}")
"""Letters of both kinds and digits, as only a machine strings them together; numbers in hexadecimal are not."""
_TOKEN = re.compile(r"[\w.~+/=:-]{16,400}", re.ASCII)


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with its secrets replaced.

    Example: masked("https://me:word@host/x") == "https://***@host/x"
    """
    for secret in _secrets(os.environ if environment is None else environment):
        text = text.replace(secret, MASK)
    text = _ADDRESS.sub(rf"\g<scheme>{MASK}@", text)
    for named in (_QUESTION, _BEARER, _AUTHORIZATION, _HOOK):
        text = named.sub(rf"\g<name>{MASK}", text)
    return _SHAPED.sub(MASK, text)


def without_secrets(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """A command line that may be stored: each argument masked, and the values of flags such as --api-key."""
    kept, telling = [], False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if telling and not argument.startswith("--"):
            kept.append(MASK)
        elif value and _is_telling(flag):
            kept.append(f"{flag}{equals}{MASK}")
        else:
            kept.append(masked(argument, environment))
        telling = _is_telling(argument)
    return kept


def _is_telling(flag: str) -> bool:
    """Tell whether a flag's last word names a secret: `--judge.api-key`, but not `--training.token-budget`. The value
    of `--notify` is an address that is one."""
    words = re.split(r"[-_]", flag.rpartition(".")[2].removeprefix("--").lower())
    return flag.startswith("--") and words[-1] in ("key", "token", "secret", "password", "credentials", "notify")


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Secrets in the environment, longest first, since one may contain another. A path to a secret is not one. Of one
    with several lines each line is one: a message may have only the first."""
    parts = {part for name, value in environment.items() for part in _secret_parts(name, value)}
    return sorted(parts, key=lambda value: (-len(value), value))


def _secret_parts(name: str, value: str) -> Iterator[str]:
    """Secrets in a variable: its value if its name says so, else what looks like a key, also in an address."""
    if _is_path(name, value):
        return
    if _TELLING.search(name):
        yield from (part for part in {value, *map(str.strip, value.splitlines())} if len(part) >= _SHORTEST)
    if "://" in value:
        yield from (part for part in re.split(r"[/?&=#@:]", value) if _RANDOM.search(part))
    elif _TOKEN.fullmatch(value) and _RANDOM.search(value):
        yield value


def _is_path(name: str, value: str) -> bool:
    """Tell whether a value is a path; a slash alone is no proof, since keys may begin with one."""
    if not value.startswith(("/", "~")):
        return False
    return _PLACES.search(name) is not None or os.path.exists(os.path.expanduser(value))
