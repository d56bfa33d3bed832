"""Keeps secrets out of files: passwords in URLs, and keys and tokens from the environment."""

import os
import re
from collections.abc import Mapping, Sequence

MASK = "***"

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^/\s?#\"']+@")
"""A URL with a user name or password before its host; the password may contain an @."""
_QUESTION = re.compile(
    r"(?P<name>[?&][\w-]{0,40}(?:token|key|secret|password|passwd|auth|signature)[\w-]{0,40}=)[^&\s#\"']+",
    re.IGNORECASE,
)
"""A query parameter whose name says that it is a secret."""
_BEARER = re.compile(r"(?P<name>\bBearer\s{1,3})[\w.~+/=-]{16,}", re.IGNORECASE)
_TELLING = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH|(?:^|_)PASS(?:_|$)|_PWD$", re.IGNORECASE
)
_PLACES = re.compile(r"(?:SOCK|SOCKET|FILE|PATH|DIR|HOME)$", re.IGNORECASE)
"""Names of variables that hold secrets."""
_SHORTEST = 8
"""Minimum characters of a secret: shorter values, such as `1` or `true`, are settings and occur everywhere."""
_SHAPED = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})"
)
"""Keys recognised by their prefix."""


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with its secrets replaced.

    Example: masked("https://me:word@host/x") == "https://***@host/x"
    """
    for secret in _secrets(os.environ if environment is None else environment):
        text = text.replace(secret, MASK)
    text = _ADDRESS.sub(rf"\g<scheme>{MASK}@", text)
    for named in (_QUESTION, _BEARER):
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
    """Whether a flag's last word names a secret: `--judge.api-key`, but not `--training.token-budget`."""
    words = re.split(r"[-_]", flag.rpartition(".")[2].removeprefix("--").lower())
    return flag.startswith("--") and words[-1] in ("key", "token", "secret", "password", "credentials")


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Secrets in the environment, longest first, since one may contain another. A path to a secret is not one."""
    found = {
        value
        for name, value in environment.items()
        if _TELLING.search(name) and len(value) >= _SHORTEST and not _is_path(name, value)
    }
    return sorted(found, key=lambda value: (-len(value), value))


def _is_path(name: str, value: str) -> bool:
    """Whether a value is a path; a slash alone is no proof, since keys may begin with one."""
    if not value.startswith(("/", "~")):
        return False
    return _PLACES.search(name) is not None or os.path.exists(os.path.expanduser(value))
