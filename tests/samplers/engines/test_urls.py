"""Servers that a user names: what is said of those that are not there yet, and of those that are something else."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proximo.rl.config import RunConfig
from proximo.rl.preflight.preflight import preflight
from proximo.samplers.engines.building import _places, build_fleet
from proximo.samplers.engines.engine import EngineLost
from proximo.samplers.engines.options import Fleet
from proximo.samplers.engines.pool import FleetLost
from proximo.samplers.engines.vllm import VllmEngine
from tests.samplers.engines.conformance import SmallPolicy

NOWHERE = "http://127.0.0.1:9"


def test_an_answer_with_a_chunk_of_fewer_than_no_bytes_is_no_answer():
    """http.client raises a ValueError for it."""

    class Wrong(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Wrong) as found:
        threading.Thread(target=found.handle_request, daemon=True).start()
        engine = VllmEngine("engine-0", frozenset((1,)), url=f"http://127.0.0.1:{found.server_port}")
        with pytest.raises(EngineLost, match="/health failed, ValueError"):
            engine._ask("GET", "/health", None, 5.0)


@contextmanager
def server(status: int, said: str) -> Iterator[str]:
    """Answers everything in the same way."""

    class Same(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    found = HTTPServer(("127.0.0.1", 0), Same)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        found.shutdown()
        found.server_close()


@pytest.mark.slow("starts engines")
@pytest.mark.parametrize(
    ("status", "said", "message"),
    [
        (404, "no such page", "is no vLLM server: it answers 404: no such page"),
        (200, "<html>", "is no vLLM server: it answers 200: <html>"),
        (200, "[1]", "is no vLLM server: it answers 200"),
        (200, json.dumps({"version": "0.9.2"}), "runs vLLM 0.9.2: use 0.32.x, which is known here"),
    ],
)
def test_a_server_that_is_something_else_is_refused_before_a_model_is_loaded(status, said, message):
    with server(status, said) as url, pytest.raises(ValueError, match=f"sampler.urls: the server at .*{message}"):
        preflight(RunConfig(sampler=Fleet(urls=(url,))))


def test_a_server_that_is_not_there_yet_is_named_and_waited_for():
    with server(503, "starting") as busy, server(200, json.dumps({"version": "0.32.1"})) as ready:
        remarks = preflight(RunConfig(sampler=Fleet(urls=(NOWHERE, busy, ready), deadline=30.0))).remarks
    assert [line.partition(" in ")[0] for line in remarks] == [NOWHERE, busy]
    assert all("does not answer yet; the run waits 30 s" in line for line in remarks)
    assert "ConnectionRefusedError" in remarks[0]
    assert "503" in remarks[1]


@pytest.mark.slow("starts engines")
def test_a_server_that_never_comes_is_waited_for_once_and_named_with_its_remedy():
    policy = SmallPolicy()
    fleet = build_fleet(Fleet(urls=(NOWHERE,), deadline=2.0), policy, policy.tokenizer, slots=1)
    began = time.monotonic()
    try:
        with pytest.raises(FleetLost, match=r"127.0.0.1:9 was not there within 2 s .*refused.*correct sampler.urls"):
            fleet.refresh(policy, 0)
    finally:
        fleet.close()
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize(("ranks", "index", "shown"), [(1, 0, "1"), (1, 2, "0"), (2, 0, "2"), (2, 1, "2")])
@pytest.mark.parametrize("counted", ["LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"])
def test_an_engine_gets_a_gpu_that_no_rank_of_this_machine_has(monkeypatch, ranks, index, shown, counted):
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if ranks > 1:
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv(counted, str(ranks))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    policy: Any = SimpleNamespace(device=torch.device("cuda", index))
    assert _places(Fleet(), policy) == [{"CUDA_VISIBLE_DEVICES": shown}]
    with pytest.raises(ValueError, match=r"sampler.engines 3 × sampler.tensor_parallel 1.*use fewer"):
        _places(Fleet(engines=3), policy)
