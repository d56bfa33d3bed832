"""A server that speaks the part of vLLM 0.32's interface that a fleet uses, with the embedded engine behind it.

It lets the fleet's own client, processes and weight transfer be disturbed where vLLM is not installed. A file in the
folder FAULTS_PLANTED names a fault; the first server that finds it removes it and has the fault once.
"""

import argparse
import base64
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from torch import Tensor

from proximo.models import load_model, load_tokenizer
from proximo.models.routing import router_layers
from proximo.samplers.engines import embedded
from proximo.samplers.engines.command import RETURN_ROUTES
from proximo.samplers.engines.embedded import EmbeddedEngine
from proximo.samplers.engines.engine import Draw
from proximo.samplers.sampler import SamplingOptions

PLANTED = "FAULTS_PLANTED"
PACE = "FAULTS_PACE"
"""Environment variable with seconds for each token; without it, as fast as can be."""
DEADLINE = 60.0
MODULE = Path("vllm", "entrypoints", "openai", "api_server.py")
"""Module that a fleet starts."""


def install(folder: Path, code: str = "from proximo_lab.faults.engine_server import main\n\nmain()\n") -> Path:
    """A folder that, on the path of a Python, makes this server the one that a fleet starts."""
    target = folder / MODULE
    target.parent.mkdir(parents=True)
    target.write_text(code)
    return folder


ASKS_FOR_ONE = """import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as forks:
    forks.connect(os.environ["FAULTS_FORKS"])
    forks.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    forks.recv(1)
sys.exit(1)
"""
"""Another code for `install`: it begins at once, because `serve_forks` forks the server; each of them ends with the
other."""
FORKS = "FAULTS_FORKS"


def serve_forks(address: str) -> None:
    """Fork a server for each connection, from this process, which has imported everything; runs until it is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        while True:
            asked, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                words = json.loads(asked.makefile().readline())
                threading.Thread(target=lambda asked=asked: (asked.recv(1), os._exit(1)), daemon=True).start()
                sys.argv = ["server", *words]
                main()
                os._exit(0)
            asked.close()


def has_fault(name: str) -> bool:
    """Tell whether this server has a fault now; each is planted for one server."""
    try:
        (Path(os.environ[PLANTED]) / name).unlink()
    except FileNotFoundError:
        return False
    return True


class Loading(EmbeddedEngine):
    """Takes weights from a folder, and some of them only where a fault is planted."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        if pace := float(os.environ.get(PACE, "0")):
            sampler: Any = self._sampler
            stream = sampler.stream

            def slowly(*asked: Any, listener: Callable[[Any], bool], **more: Any) -> Any:
                def listen(partial: Any) -> bool:
                    time.sleep(pace)
                    return listener(partial)

                return stream(*asked, listener=listen, **more)

            sampler.stream = slowly

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(named)
        if has_fault("stale head"):  # says nothing of it
            pairs = [(name, weight) for name, weight in pairs if "embed" not in name]
        is_half = has_fault("half an update")
        super()._load(pairs[: len(pairs) // 2] if is_half else pairs)
        if is_half:
            raise RuntimeError("a tensor is missing")


class Server:
    """Answers for one engine."""

    def __init__(self, engine: EmbeddedEngine, layers: list[int]) -> None:
        self._engine, self._layers = engine, layers
        self._answers: dict[str, Callable[[Mapping[str, Any]], object]] = {
            "/version": lambda body: {"version": "0.32.0"},
            "/weight_info": lambda body: {"weight_version": str(engine.version())},
            "/inference/v1/generate": self._generate,
            "/pause": lambda body: engine.pause(body["mode"], DEADLINE),
            "/resume": lambda body: engine.resume(DEADLINE),
            "/init_weight_transfer_engine": lambda body: engine.join(body["init_info"], DEADLINE),
            "/start_weight_update": lambda body: engine.begin_update(DEADLINE),
            "/update_weights": lambda body: engine.update(body["update_info"], DEADLINE),
            "/finish_weight_update": lambda body: engine.finish_update(int(body["weight_version"]), DEADLINE),
        }

    def __call__(self, path: str, body: Mapping[str, Any]) -> object:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        return self._answers[parts.path]({**query, **body})

    def _generate(self, body: Mapping[str, Any]) -> object:
        asked = body["sampling_params"]
        options = SamplingOptions(asked["temperature"], max_tokens=asked["max_tokens"], stop=tuple(asked["stop"]))
        completion = self._engine.generate(tuple(body["token_ids"]), options, Draw(0, 0, asked["seed"], 0))
        choice = {
            "token_ids": list(completion.tokens),
            "logprobs": {"content": [{"logprob": each} for each in completion.logprobs]},
            "finish_reason": completion.finish,
            "weight_versions": [
                {"version": str(each.version), "start": each.start, "end": each.end} for each in completion.spans
            ],
            "routed_experts": None if completion.routes is None else self._packed(completion.routes),
        }
        return {"choices": [choice]}

    def _packed(self, routes: Tensor) -> str:
        """Pack routes as vLLM writes them: a row for each layer, those without experts too."""
        rows = np.zeros((len(routes), max(self._layers) + 1, routes.shape[2]), np.uint8)
        rows[:, self._layers] = routes.numpy()
        written = io.BytesIO()
        np.save(written, rows, allow_pickle=False)
        return base64.b64encode(written.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument(RETURN_ROUTES, action="store_true", dest="routes")
    given, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    with suppress(FileExistsError):  # the name that a model in one file has; another server may have made the link
        (Path(given.model) / "model.safetensors").hardlink_to(Path(given.model) / "model-00000.safetensors")
    model = load_model(given.model, dtype=torch.float32).requires_grad_(False)
    engine = Loading("server", model, load_tokenizer(given.model), record_routes=given.routes)
    answer = Server(engine, router_layers(model))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}"))

        def _answer(self, body: Mapping[str, Any]) -> None:
            try:
                code, text = 200, json.dumps(answer(self.path, body))
            except embedded.EngineLost as error:
                code, text = 500, str(error)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((given.host, given.port), Handler)
    (Path(os.environ[PLANTED]) / f"pid-{os.getpid()}").touch()
    server.serve_forever()
