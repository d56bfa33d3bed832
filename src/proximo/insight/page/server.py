"""The page's server: it serves the page's files and /api, all known beforehand, and nothing else."""

import json
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from proximo.insight.folder import RunFolder
from proximo.insight.page import overview, reader, timeline
from proximo.insight.page.connections import HEADER_SECONDS, server_of
from proximo.insight.page.files import page_files
from proximo.insight.page.guarding import PageGuard
from proximo.insight.page.overview import Runs
from proximo.system.lines import plain
from proximo.system.safe_text import visible

MAX_BYTES = 64 << 20
"""Maximum bytes of one response."""
ROWS = "application/x-ndjson"

Handler = Callable[[RunFolder, Mapping[str, str]], "dict[str, Any] | bytes"]
HANDLERS: dict[str, Handler] = {
    "run": overview.about,
    "rows": overview.rows,
    "health": overview.health,
    "timeline": timeline.timeline,
    "steps": reader.steps,
    "step": reader.step,
    "group": reader.group,
    "why": reader.why,
    "lens": reader.lens,
}
"""Handlers of requests about one run."""


def application(root: Path, *, token: str, port: int, load_code: bool = False) -> ASGIApp:
    """The application that serves 127.0.0.1 at this port. `load_code`: whether classes of a user's own that configs
    name are loaded."""
    runs, files = Runs(root, load_code=load_code), page_files()

    def listed(request: Request) -> Response:
        return _answered(lambda: _json(runs.listed()))

    def asked(handler: Handler) -> Callable[[Request], Response]:
        return lambda request: _answered(lambda: _of_run(runs, handler, request.query_params))

    def parted(request: Request) -> Response:
        return _answered(lambda: _json(runs.parting(request.query_params.get("run", ""))))

    async def file(request: Request) -> Response:
        content, kind = files[request.scope["path"]]
        return Response(content, media_type=kind)

    routes = [Route("/api/runs", listed), Route("/api/parting", parted)]
    routes += [Route(f"/api/{name}", asked(handler)) for name, handler in HANDLERS.items()]
    routes += [Route(path, file) for path in files]
    inner = Starlette(routes=routes, exception_handlers={404: lambda request, error: _error(404, "nothing is here")})
    inner.router.redirect_slashes = False
    return PageGuard(inner, port=port, token=token, open_paths=files)


def bind(port: int) -> socket.socket:
    """A loopback socket; port 0 takes a free port. OSError if it is not available."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
    except OSError:
        made.close()
        raise
    return made


def server(
    root: Path,
    *,
    token: str,
    port: int,
    load_code: bool = False,
    header_seconds: float = HEADER_SECONDS,
) -> uvicorn.Server:
    """The server; `run(sockets=[...])` serves until interrupted."""
    page = application(root, token=token, port=port, load_code=load_code)
    return server_of(page, header_seconds=header_seconds, closing_seconds=1)


def _of_run(runs: Runs, handler: Handler, query: Mapping[str, str]) -> Response:
    answer = handler(runs.named(query.get("run", "")), query)
    return Response(answer, media_type=ROWS) if isinstance(answer, bytes) else _json(answer)


def _answered(answer: Callable[[], Response]) -> Response:
    """A response; an error in a run folder becomes one line on the page, and the server continues."""
    try:
        return answer()
    except LookupError as error:
        return _error(404, str(error.args[0]) if error.args else "nothing is here")
    except ValueError as error:
        return _error(400, str(error))
    except OSError as error:
        return _error(404, f"the run's folder cannot be read: {error.strerror or error}")
    except Exception as error:
        line = f"this is a mistake of Proximo's: {type(error).__name__}: {error}"
        print(f"error: {visible(line, 500)}", file=sys.stderr, flush=True)
        return _error(500, line)


def _error(status: int, reason: str) -> Response:
    return _json({"error": visible(reason.splitlines()[0] if reason else "", 500)}, status)


def _json(value: dict[str, Any], status: int = 200) -> Response:
    """A JSON response, without NaN and infinities."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(plain(value), allow_nan=False)
    if len(text) > MAX_BYTES:
        return _error(413, f"the answer has {len(text) >> 20} MiB: ask for less")
    return Response(text, status, media_type="application/json")
