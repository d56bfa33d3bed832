"""Access to the server. A local port is open to every program and to every web site that the user visits.

On the loopback address every local program may ask, as with other local servers; a web site may not: DNS rebinding is
recognised by the Host header, another page by its Origin. On any other address a token is required, as OpenAI's clients
send their key. The files of the chat page hold no data and are open; its script sends the token that the printed
address has after the #.
"""

import json
import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from proximo.insight.page.guarding import with_headers
from proximo.serving.errors import Refusal


class Guard:
    """Runs before everything else and decides on the raw request.

    `token` is None on the loopback address, where `port` names the hosts that are answered.
    """

    def __init__(self, inner: ASGIApp, *, port: int, token: str | None, open_paths: Collection[str]) -> None:
        self._inner, self._open = inner, frozenset(open_paths)
        self._key = None if token is None else f"Bearer {token}".encode()
        self._hosts = frozenset(f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost", "[::1]"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is started without a lifespan and without web sockets"
        guarded, refused = with_headers(send), self.refusal(scope)
        if refused is None:
            await self._inner(scope, receive, guarded)
            return
        body = json.dumps(refused.body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await guarded({"type": "http.response.start", "status": refused.status, "headers": headers})
        await guarded({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def refusal(self, scope: Scope) -> Refusal | None:
        """Reason to refuse a request; None to accept it."""
        hosts, origins, sites, keys = (
            [value for key, value in scope["headers"] if key == name]
            for name in (b"host", b"origin", b"sec-fetch-site", b"authorization")
        )
        if len(hosts) != 1 or (self._key is None and hosts[0] not in self._hosts):
            return Refusal("this server answers to 127.0.0.1 and localhost alone, at its port", status=403)
        if any(origin != b"http://" + hosts[0] for origin in origins):
            return Refusal("another web page may not use this server", status=403)
        if any(site not in (b"same-origin", b"none") for site in sites):
            return Refusal("another web page may not use this server: type or paste its address", status=403)
        if self._key is None or scope["path"] in self._open:
            return None
        if len(keys) != 1 or not secrets.compare_digest(keys[0], self._key):
            return Refusal("give the token that `proximo serve` printed as the API key", None, "invalid_api_key", 401)
        return None
