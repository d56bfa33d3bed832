# pyright: reportMissingImports=false
"""Environments of OpenEnv: behind a server, or served by each episode for itself."""

import json
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from proximo.environments import Done, Environment, Observation
from proximo.environments.seeded_start import check_start

START_SECONDS = 60.0
"""Time for a server of this process to listen."""


class OpenEnv(Environment):
    """An environment at an address, or the app of one. A reply is sent as one field of the action; of an observation
    one field is shown, or all of it as JSON.

    Every episode is a session of the server, which allows so many at once as its `max_concurrent_envs` says: start it
    for as many as are played. With `app` each episode has a server of its own, and needs one.
    """

    def __init__(
        self,
        url: str = "",
        action: str = "message",
        shown: str = "",
        app: str = "",
        options: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """`action`: field of the action that is the reply; `shown`: field of the observation, with dots for one that
        lies deeper, such as messages.-1.content; `app`: package.module:name of the environment's app, in the place of
        `url`; `options`: arguments of each reset besides the seed; `fields`: others of each action."""
        from openenv.core.generic_client import GenericEnvClient

        if bool(url) == bool(app):
            raise ValueError(f"url is {url!r} and app {app!r}: give the address of a server, or an app")
        self._action, self._shown, self._fields, self._options = action, shown, fields, dict(options or {})
        self._client = GenericEnvClient(base_url=url or _serving(app)).sync()

    @classmethod
    def before_episodes(cls, app: str = "", **_: Any) -> None:
        """Import the client, and the app with what serves it."""
        import openenv.core.generic_client  # noqa: F401

        if app:
            import_module("uvicorn.importer").import_from_string(app)

    def start(self, seed: int) -> str:
        """The first observation after a reset with this seed."""
        return self._text(self._client.reset(seed=seed, **self._options).observation)

    def reset(self, problem: dict[str, Any]) -> None:
        check_start(problem, self.start(int(problem["start"])))

    def step(self, reply: str) -> Observation | Done:
        result = self._client.step({**self._fields, self._action: reply})
        reward = float(result.reward or 0.0)
        return Done(reward) if result.done else Observation(self._text(result.observation), reward)

    def _text(self, seen: Any) -> str:
        for name in filter(None, self._shown.split(".")):
            if not isinstance(seen, Mapping | list):
                raise ValueError(f"shown is {self._shown!r}, but at {name!r} the observation is {str(seen)[:80]!r}")
            try:
                seen = seen[name] if isinstance(seen, Mapping) else seen[int(name)]
            except (LookupError, ValueError):
                has = ", ".join(seen) if isinstance(seen, Mapping) else f"{len(seen)} entries"
                raise ValueError(f"shown is {self._shown!r}, but the observation has {has}") from None
        return seen if isinstance(seen, str) else json.dumps(seen, default=str)


def _serving(path: str) -> str:
    """Serve an app in this process; returns the address."""
    import uvicorn
    from uvicorn.importer import import_from_string

    server = uvicorn.Server(uvicorn.Config(import_from_string(path), host="127.0.0.1", port=0, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    until = time.monotonic() + START_SECONDS
    while not server.started:
        if time.monotonic() > until:
            raise TimeoutError(f"app {path} was not served within {START_SECONDS:g} s")
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
