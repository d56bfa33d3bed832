"""Secrets stay out of what is written down: passwords in addresses, and what the environment keeps as key or token."""

import os
import re
from collections.abc import Mapping, Sequence

MASK = "***"

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s?#@\"']+@")
"""An address with a user's name or password before its host."""
_TELLING = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a secret: shorter values, such as `1` or `true`, are settings and occur everywhere."""
_SHAPED = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})"
)
"""Keys that are known by how they begin."""


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text without its secrets.

    Example: masked("https://me:word@host/x") == "https://***@host/x"
    """
    for secret in _secrets(os.environ if environment is None else environment):
        text = text.replace(secret, MASK)
    return _SHAPED.sub(MASK, _ADDRESS.sub(rf"\g<scheme>{MASK}@", text))


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
    found = {value for name, value in environment.items() if _TELLING.search(name) and len(value) >= _SHORTEST}
    found = {value for value in found if not value.startswith(("/", "~"))}
    return sorted(found, key=lambda value: (-len(value), value))
