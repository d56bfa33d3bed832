"""One vLLM server as an engine. All that we know of vLLM 0.32's interface is here, in receiving.py, plugin.py
and servers/command.py."""

import json
import socket
import threading
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from proximo.processes.server import Running, ServerLost
from proximo.samplers.engines.command import RETURN_ROUTES, Command
from proximo.samplers.engines.engine import Draw, EngineLost, Generated, Health, PauseMode, Span
from proximo.samplers.sampler import SamplingOptions
from proximo.types.tensor_types import Int

SPOKEN = "0.32."
"""Versions of vLLM whose interface this is; the side that sends weights changed between 0.22 and 0.32."""
GENERATE = "/inference/v1/generate"
LOAD_ADAPTER = "/v1/load_lora_adapter"
POLL_SECONDS = 0.5
"""Pause between two looks at a server that starts."""
NEUTRAL = {
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": [],
    "ignore_eos": False,
}
"""Sent with every request: a server's own defaults would change the distribution, and log-probs by nats."""


class VllmEngine:
    """A vLLM server, started here or somewhere else.

    It must have been started with the flags of `building.py`; one that lacks them is refused when it is first asked.
    """

    repeats = False

    def __init__(
        self,
        name: str,
        ends: frozenset[int],
        *,
        url: str = "",
        command: Command | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        """`ends` are tokens that end a completion. `url` is that of a server that is running; else `command` starts
        one. `layers` are those whose routes are asked for; none: no routes are."""
        self._name, self._ends, self._command, self._layers = name, sorted(ends), command, list(layers)
        parts = urlsplit(url)
        self._address, self._is_https = parts.netloc, parts.scheme == "https"
        self._server: Running | None = None
        self._open: set[HTTPConnection] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._adapter: tuple[str, int] | None = None
        """Name and version of the adapter that requests are for; None: weights are pushed whole."""

    @property
    def name(self) -> str:
        return self._name

    def start(self, deadline: float) -> None:
        until = time.monotonic() + deadline
        if self._command is not None:
            try:
                self._server, self._address = self._command.start(deadline)
            except ServerLost as lost:
                raise EngineLost(str(lost)) from lost
        while True:
            if self._server is not None and not self._server.is_running:
                raise EngineLost(f"{self._name} ended while it started: {self._server.last_lines()}")
            try:
                self.check_version()
                return
            except ValueError as error:
                raise EngineLost(str(error)) from error
            except EngineLost as lost:
                reason = str(lost) if self._server is None else self._server.last_lines()
            if self._stopped or time.monotonic() > until:
                remedy = "" if self._server is not None else "; start it, or correct sampler.urls"
                raise EngineLost(
                    f"{self._name} at {self._address} was not there within {deadline:g} s (sampler.deadline): "
                    f"{reason}{remedy}"
                )
            time.sleep(POLL_SECONDS)

    def check_version(self) -> None:
        """EngineLost where it does not answer yet; ValueError where it is no server that we know."""
        status, text = self._answer("GET", "/version", None, POLL_SECONDS * 10)
        shown = text.decode(errors="replace")[:100]
        if status >= 500:  # what stands before a server that still starts
            raise EngineLost(f"{self._name}: /version was answered with {status}: {shown}")
        try:
            spoken = str(json.loads(text)["version"]) if status == 200 else ""
        except (ValueError, KeyError, TypeError):
            spoken = ""
        if not spoken:
            raise ValueError(f"{self._name} at {self._address} is no vLLM server: it answers {status}: {shown}")
        if not spoken.startswith(SPOKEN):
            raise ValueError(f"{self._name} at {self._address} runs vLLM {spoken}: use {SPOKEN}x, which is known here")

    # Generating

    def generate(
        self, prompt: tuple[int, ...], options: SamplingOptions, draw: Draw, prefix: tuple[int, ...] = ()
    ) -> Generated:
        assert draw.start == len(prefix)
        return self._generate(prompt + prefix, options, draw, None)

    def _generate(
        self, tokens: tuple[int, ...], options: SamplingOptions, draw: Draw, deadline: float | None
    ) -> Generated:
        parameters = NEUTRAL | {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k or 0,
            "min_p": options.min_p,
            "max_tokens": options.max_tokens - draw.start,
            "seed": draw.number,
            "logprobs": 0,
            "n": 1,
            "stop": list(options.stop),
            "stop_token_ids": self._ends,
        }
        body = {"token_ids": list(tokens), "sampling_params": parameters}
        if (adapter := self._adapter) is not None:
            body["model"] = adapter[0]
        choice = self._ask("POST", GENERATE, body, deadline)["choices"][0]
        drawn = tuple(choice["token_ids"] or ())
        spans = tuple(
            Span(_number(each["version"]), each["start"], each["end"]) for each in choice["weight_versions"] or ()
        )
        if adapter is not None:  # the server knows versions of whole weights; a request keeps its adapter until it ends
            spans = (Span(adapter[1], 0, len(drawn)),)
        return Generated(
            drawn,
            tuple(each["logprob"] for each in (choice["logprobs"] or {}).get("content") or ()),
            choice["finish_reason"],
            spans or (Span(_number(None), 0, len(drawn)),),
            self._routes(choice, len(tokens) + len(drawn) - 1) if self._layers else None,
        )

    def _routes(self, choice: Mapping[str, Any], read: int) -> Int[Tensor, "N L K"] | None:
        """The experts of all tokens that were read; None where an interrupted request does not say them."""
        packed = choice.get("routed_experts")
        if packed is None:
            if choice["finish_reason"] == "abort":
                return None
            raise EngineLost(
                f"{self._name} does not say which experts tokens went to: start it with {RETURN_ROUTES}, on a GPU, or "
                'use routing_replay = "old_policy"'
            )
        try:
            rows = torch.from_numpy(_table(packed).astype(np.int16))
        except ValueError as error:
            raise EngineLost(f"{self._name} says experts that cannot be read: {error}") from error
        if rows.ndim != 3 or len(rows) != read or rows.shape[1] <= max(self._layers):
            raise EngineLost(
                f"{self._name} says the experts of a table of {tuple(rows.shape)}, for {read} tokens that were read "
                f"and {max(self._layers) + 1} layers"
            )
        return rows[:, self._layers]

    def alive(self, deadline: float) -> Health:
        begun = time.monotonic()
        try:
            self._generate((0,), SamplingOptions(max_tokens=1), Draw(0, 0, 0, 0), deadline)
        except EngineLost as lost:
            return Health(False, time.monotonic() - begun, str(lost))
        return Health(True, time.monotonic() - begun)

    def pause(self, mode: PauseMode, deadline: float) -> None:
        # With clear_cache=false even new requests would read keys and values of the old weights.
        self._ask("POST", f"/pause?mode={mode}&clear_cache=true", {}, deadline)

    def resume(self, deadline: float) -> None:
        self._ask("POST", "/resume", {}, deadline)

    # Weights

    def workers(self) -> int:
        return self._ask("GET", "/get_world_size", None, None)["world_size"]

    def join(self, info: Mapping[str, Any], deadline: float) -> None:
        self._ask("POST", "/init_weight_transfer_engine", {"init_info": dict(info)}, deadline)

    def begin_update(self, deadline: float) -> None:
        self._ask("POST", "/start_weight_update", {}, deadline)

    def update(self, info: Mapping[str, Any], deadline: float) -> None:
        self._ask("POST", "/update_weights", {"update_info": dict(info)}, deadline)

    def finish_update(self, version: int, deadline: float) -> None:
        self._ask("POST", "/finish_weight_update", {"weight_version": str(version)}, deadline)

    def check_adapters(self, deadline: float) -> None:
        """EngineLost where the server takes no adapters."""
        status, _ = self._answer("POST", LOAD_ADAPTER, {}, deadline)
        if status == 404:
            raise EngineLost(
                f"{self._name} was started without --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, which "
                'sampler.sync = "adapter" needs: start it with both, or use "folder" or "gloo"'
            )

    def load_adapter(self, folder: str, version: int, deadline: float) -> None:
        """Take a new adapter under a name of its own, so that nothing cached for the one before is read."""
        before, name = self._adapter, f"policy-{version}-{uuid4().hex[:8]}"
        self._ask("POST", LOAD_ADAPTER, {"lora_name": name, "lora_path": folder}, deadline)
        self._adapter = name, version
        if before is not None:
            self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": before[0]}, deadline)

    def version(self) -> int | None:
        if self._adapter is not None:
            return self._adapter[1]
        answer = self._ask("GET", "/weight_info", None, None)["weight_version"]
        return int(answer) if answer is not None and answer.isdecimal() else None

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            waiting = list(self._open)
        for each in waiting:
            with suppress(OSError):
                if each.sock is not None:
                    each.sock.shutdown(socket.SHUT_RDWR)
        if self._server is not None:
            self._server.kill()

    # HTTP

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float | None) -> Any:
        """The answer; EngineLost where it is another one than 200."""
        status, text = self._answer(method, path, body, deadline)
        reply = text.decode(errors="replace")[:300]
        if status == 400 and path == GENERATE:  # any engine would refuse it, so this one is not to blame
            raise ValueError(f"vLLM refuses what it is asked to sample: {reply}")
        if status != 200:
            raise EngineLost(f"{self._name}: {path} was answered with {status}: {reply}")
        try:
            return json.loads(text) if text else None
        except ValueError:  # some routes answer in words
            return reply

    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float | None
    ) -> tuple[int, bytes]:
        """Status and text of an answer."""
        data = None if body is None else json.dumps(body)
        connect = (HTTPSConnection if self._is_https else HTTPConnection)(self._address, timeout=deadline)
        with self._lock:
            if self._stopped:
                raise EngineLost(f"{self._name} was stopped")
            self._open.add(connect)
        try:
            connect.request(method, path, data, _JSON)
            answer = connect.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException, ValueError) as error:  # http.client takes a chunk of fewer than no bytes
            raise EngineLost(f"{self._name}: {path} failed, {type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self._open.discard(connect)
            connect.close()


_JSON = {"content-type": "application/json"}


def _table(packed: str) -> np.ndarray:
    """An array of numbers in numpy's format; nothing else that the format can hold is read."""
    file = BytesIO(b64decode(packed))
    npy.read_magic(file)
    shape, is_fortran, kind = npy.read_array_header_1_0(file)
    if kind.kind not in "iu":
        raise ValueError(f"they are {kind}, not whole numbers")
    return np.frombuffer(file.read(), kind).reshape(shape, order="F" if is_fortran else "C")


def _number(version: str | None) -> int:
    """A version as a number; −1 for weights that were never pushed."""
    return int(version) if version is not None and version.isdecimal() else -1
