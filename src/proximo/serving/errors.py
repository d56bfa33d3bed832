"""Requests that are refused, as OpenAI's API says it."""

from dataclasses import dataclass
from typing import Any

RETRY_SECONDS = 2
"""Seconds after which a client may ask again that was refused for want of room."""


@dataclass
class Refusal(Exception):
    """A request that cannot be answered, with the parameter that is wrong."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
