"""A webhook: an address that takes a POST with a short text. Whoever knows it may post there, so it is a secret: no
file has it, and messages name its host."""

import json
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from proximo.system.version import __version__

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

VARIABLE = "PROXIMO_NOTIFY"
"""Environment variable with the address, where none is given."""
LIMIT = 3.0
"""Seconds that a message may take; nobody waits longer."""
SLACK = ("hooks.slack.com", "hooks.slack-gov.com")
DISCORD = ("discord.com", "discordapp.com")
EXAMPLE = "give a whole one, such as https://ntfy.sh/TOPIC"


@dataclass(frozen=True)
class Webhook:
    """An address that was checked."""

    address: str = field(repr=False)
    host: str

    def post(self, title: str, text: str) -> str | None:
        """Send a text, and wait for that at most LIMIT seconds: the complaint, or None where it has arrived."""
        complaints = [f"no answer within {LIMIT:g} s"]

        def send() -> None:
            complaint = self._sent(title, text)
            complaints[:] = [] if complaint is None else [complaint]

        try:
            sender = threading.Thread(target=send, name="webhook", daemon=True)
            sender.start()
        except RuntimeError:
            return "no thread could be started"
        sender.join(LIMIT)
        return next(iter(complaints), None)

    def message(self, title: str, text: str) -> tuple[bytes, dict[str, str]]:
        """Body and headers as the host takes them: JSON for Slack and Discord, where no part of the text becomes a link
        or calls anyone; else the text, with the title as a header where it is plain ASCII."""
        if self.host in SLACK:
            escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return _json({"text": escaped})
        if self.host in DISCORD or self.host.endswith(tuple(f".{each}" for each in DISCORD)):
            return _json({"content": text, "allowed_mentions": {"parse": []}})
        titled = {"Title": title} if title.isascii() and title.isprintable() else {}
        return text.encode(errors="replace"), {"Content-Type": "text/plain; charset=utf-8", **titled}

    def _sent(self, title: str, text: str) -> str | None:
        from urllib.error import HTTPError  # 30 ms, which most commands do not need
        from urllib.request import Request

        try:
            body, headers = self.message(title, text)
            headers["User-Agent"] = f"Proximo/{__version__}"  # Discord refuses Python's own
            with _opener().open(Request(self.address, body, headers, method="POST"), timeout=LIMIT):
                return None
        except HTTPError as error:
            error.close()
            return f"it answered with the status {error.code}"
        except Exception as error:
            return _reason(error)


def _opener() -> "OpenerDirector":
    """HTTP and HTTPS, through the proxies of the environment; without what follows a redirect to another address."""
    from urllib import request

    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPErrorProcessor(),
        request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


def webhook_at(address: str | None) -> Webhook | None:
    """The webhook at an address; None: at that of the environment, if it has one. An empty address is none."""
    name, given = ("notify", address) if address is not None else (VARIABLE, os.environ.get(VARIABLE, ""))
    if not isinstance(given, str):
        raise TypeError(f"{name} is of the type {type(given).__name__}, not an address: {EXAMPLE}")
    if not given.strip():
        return None
    return Webhook(given.strip(), _host(name, given.strip()))


def _host(name: str, address: str) -> str:
    """The host of an address; ValueError, which never quotes more than that, where nothing can be posted to it."""
    try:
        parts = urlsplit(address)
        host, has_user, _ = parts.hostname or "", "@" in parts.netloc, parts.port
    except ValueError:
        raise ValueError(f"{name} is no address that can be read: {EXAMPLE}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{name} is no address of https or http{host and f', at {host!r}'}: {EXAMPLE}")
    if not address.isascii() or not address.isprintable() or " " in address:
        raise ValueError(f"{name} is an address with a space or a sign outside ASCII: write these as %20 and the like")
    if has_user:
        raise ValueError(f"{name} has a user or a password before the host {host}: leave them out; ntfy takes ?auth=")
    return host


def _json(message: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    return json.dumps(message).encode(), {"Content-Type": "application/json"}


def _reason(error: Exception) -> str:
    """The cause of a failure, without the address, which messages of libraries may quote."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, TimeoutError):
        return f"no answer within {LIMIT:g} s"
    return getattr(cause, "strerror", None) or type(error).__name__
