# pyright: reportMissingImports=false
"""Environments behind an OpenEnv server."""

import json
from collections.abc import Mapping
from typing import Any

from proximo.acting import Done, Environment, Observation
from proximo.acting.starting import check_start


class OpenEnv(Environment):
    """An environment at an address. A reply is sent as one field of the action; of an observation one field is shown,
    or all of it as JSON."""

    def __init__(self, url: str, action: str = "message", shown: str = "", **fields: Any) -> None:
        """`action`: field of the action that is the reply; `shown`: field of the observation; `fields`: others of each
        action."""
        from openenv.core.generic_client import GenericEnvClient

        self._action, self._shown, self._fields = action, shown, fields
        self._client = GenericEnvClient(base_url=url).sync()

    def start(self, seed: int) -> str:
        """The first observation after a reset with this seed."""
        return self._text(self._client.reset(seed=seed).observation)

    def reset(self, problem: dict[str, Any]) -> None:
        check_start(problem, self.start(int(problem["start"])))

    def step(self, reply: str) -> Observation | Done:
        result = self._client.step({**self._fields, self._action: reply})
        reward = float(result.reward or 0.0)
        return Done(reward) if result.done else Observation(self._text(result.observation), reward)

    def _text(self, seen: Any) -> str:
        if self._shown and isinstance(seen, Mapping):
            return str(seen[self._shown])
        return seen if isinstance(seen, str) else json.dumps(seen, default=str)
