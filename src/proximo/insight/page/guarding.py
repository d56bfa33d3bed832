"""Access control of the page. A local port is open to every program and every visited web site.

The printed address has a secret after the #, which browsers do not send; the page's own script sends it as a header.
A cookie would not do: browsers send those of 127.0.0.1 to every port. DNS rebinding is recognised by the Host header,
another page by its Origin; and only reading is possible.
"""

import json
import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN = b"x-proximo-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class PageGuard:
    """Runs before everything else and decides on the raw request, never on a reconstructed URL.

    `open_paths` are the files of the page itself, which contain no data.
    """

    def __init__(self, inner: ASGIApp, *, port: int, token: str, open_paths: Collection[str]) -> None:
        self._inner, self._token, self._open = inner, token.encode(), frozenset(open_paths)
        names = [f"127.0.0.1:{port}", f"localhost:{port}", *(["127.0.0.1", "localhost"] if port == 80 else [])]
        self._hosts = frozenset(name.encode() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http", "the server is started without a lifespan"
        guarded, refused = with_headers(send), self.refusal(scope)
        if refused is None:
            await self._inner(scope, receive, guarded)
        else:
            await _answer(*refused, guarded, with_body=scope["method"] != "HEAD")

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason of a refusal; None to accept."""
        hosts, origins, sites, tokens = (
            [value for key, value in scope["headers"] if key == name]
            for name in (b"host", b"origin", b"sec-fetch-site", TOKEN)
        )
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 403, "this page answers to 127.0.0.1 and localhost alone, at the port that was printed"
        if any(origin != b"http://" + hosts[0] for origin in origins):
            return 403, "another page may not read this one"
        if any(site not in (b"same-origin", b"none") for site in sites):
            return 403, "another page may not open this one: type or paste the address"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page only reads: GET and HEAD"
        if scope["path"] in self._open:
            return None
        if len(tokens) != 1 or not secrets.compare_digest(tokens[0], self._token):
            return 401, "open the address that `proximo view` printed: it carries this page's secret"
        return None


def with_headers(send: Send) -> Send:
    """Sends what `send` does, with the page's headers on every response."""

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
        await send(message)

    return guarded


async def _answer(status: int, reason: str, send: Send, *, with_body: bool) -> None:
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"allow", b"GET, HEAD")] if status == 405 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body if with_body else b""})
