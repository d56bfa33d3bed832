"""Secrets stay out of what is written down: passwords in addresses, and what the environment keeps as key or token."""

import os
import re
from collections.abc import Mapping, Sequence

MASK = "***"

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^/\s?#\"']+@")
"""An address with a user's name or password before its host; the password may hold an @."""
_QUESTION = re.compile(
    r"(?P<name>[?&][\w-]{0,40}(?:token|key|secret|password|passwd|auth|signature)[\w-]{0,40}=)[^&\s#\"']+",
    re.IGNORECASE,
)
"""A part of an address's question whose name says what it is."""
_BEARER = re.compile(r"(?P<name>\bBearer\s{1,3})[\w.~+/=-]{16,}", re.IGNORECASE)
_TELLING = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH|(?:^|_)PASS(?:_|$)|_PWD$", re.IGNORECASE
)
_PLACES = re.compile(r"(?:SOCK|SOCKET|FILE|PATH|DIR|HOME)$", re.IGNORECASE)
"""Names of where a secret is kept."""
_SHORTEST = 8
"""Characters of a secret: shorter values, such as `1` or `true`, are settings and occur everywhere."""
_SHAPED = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})"
)
"""Keys that are known by how they begin."""


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text without its secrets.

    Example: masked("https://me:word@host/x") == "https://***@host/x"
    """
    for secret in _secrets(os.environ if environment is None else environment):
        text = text.replace(secret, MASK)
    text = _ADDRESS.sub(rf"\g<scheme>{MASK}@", text)
    for named in (_QUESTION, _BEARER):
        text = named.sub(rf"\g<name>{MASK}", text)
    return _SHAPED.sub(MASK, text)


def without_secrets(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """A command line as it may be kept: each argument masked, and what follows a flag such as --api-key."""
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
    """`--judge.api-key`, and not `--training.token-budget`: its last word says so."""
    words = re.split(r"[-_]", flag.rpartition(".")[2].removeprefix("--").lower())
    return flag.startswith("--") and words[-1] in ("key", "token", "secret", "password", "credentials")


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Longest first: one may hold another. A path to a secret is none."""
    found = {
        value
        for name, value in environment.items()
        if _TELLING.search(name) and len(value) >= _SHORTEST and not _is_path(name, value)
    }
    return sorted(found, key=lambda value: (-len(value), value))


def _is_path(name: str, value: str) -> bool:
    """A slash alone does not make it one: keys begin with it, too."""
    if not value.startswith(("/", "~")):
        return False
    return _PLACES.search(name) is not None or os.path.exists(os.path.expanduser(value))
