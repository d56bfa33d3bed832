"""Many clients at once: each is answered, and no connection is reset."""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from proximo.insight.page import connections
from proximo.serving import server
from proximo.serving.queue import CompletionJob
from proximo.serving.server import application, bind
from tests.waiting import wait_until


@contextmanager
def running(engine, reader, *, most: int | None = None, header_seconds: float = 5.0) -> Iterator[int]:
    """The port of a server in a thread, with so many connections at once."""
    made = bind("127.0.0.1", 0)
    port = made.getsockname()[1]
    app = application(engine, reader, port=port, token=None)
    uvicorn = server.server(app, header_seconds=header_seconds)
    if most is not None:
        uvicorn._crowd.most = most  # pyright: ignore
    thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [made]})
    thread.start()
    try:
        yield port
    finally:
        uvicorn.should_exit = True
        thread.join(timeout=60)


def request(port: int, path: str = "/v1/completions", body: str = "") -> bytes:
    body = body or '{"model": "m", "prompt": "1+2=", "max_tokens": 1}'
    head = f"Host: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if path == "/v1/models":
        return f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()
    return f"POST {path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def asked_together(port: int, number: int, path: str = "/v1/completions") -> Counter[str]:
    """Status lines of so many clients: all connect, and then all ask."""

    async def ask(connected: asyncio.Barrier) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await connected.wait()
        writer.write(request(port, path))
        answer = (await reader.read()).decode()
        writer.close()
        status, _, rest = answer.partition("\r\n")
        assert ("retry-after" in rest.lower()) == (" 429 " in status or " 503 " in status)
        return status.split()[1]

    async def run() -> Counter[str]:
        connected = asyncio.Barrier(number)
        return Counter(await asyncio.gather(*(ask(connected) for _ in range(number))))

    return asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.slow("waits for many clients")
def test_two_hundred_clients_at_once_are_answered(engine, reader, monkeypatch):
    monkeypatch.setattr(server, "MAX_WAITING", 40)
    with running(engine, reader) as port:
        assert asked_together(port, 200, "/v1/models") == {"200": 200}
        found = asked_together(port, 200)
    assert found["200"] + found["429"] == 200
    assert found["200"] >= 40


@pytest.mark.scale
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_a_thousand_clients_at_once_are_answered(engine, reader, path):
    connections.allow_connections()
    with running(engine, reader) as port:
        found = asked_together(port, 1000, path)
    assert found["200"] + found["429"] == 1000
    assert found["200"] >= 500


def test_more_clients_than_file_descriptors_wait_or_are_told_so(engine, reader, monkeypatch):
    """Those that connected and do not ask yet hold all places, until others wait for these."""
    monkeypatch.setattr(connections, "CROWDED_SECONDS", 0.2)
    with running(engine, reader, most=8) as port:
        found = asked_together(port, 40, "/v1/models")
    assert found["200"] + found["503"] == 40
    assert found["200"] >= 8


def read_whole(line: socket.socket) -> bytes:
    return b"".join(iter(lambda: line.recv(1 << 16), b""))


@pytest.mark.slow("waits for slow clients")
def test_slow_clients_end_with_408_and_harm_no_other(engine, reader, monkeypatch):
    monkeypatch.setattr(server, "BODY_SECONDS", 0.3)
    slow = socket.create_connection
    with running(engine, reader, header_seconds=0.3) as port, slow(("127.0.0.1", port)) as header:
        header.sendall(b"GET /v1/models HT")
        with slow(("127.0.0.1", port)) as body:
            body.sendall(request(port)[:-5])
            assert asked_together(port, 5) == {"200": 5}
            assert read_whole(body).startswith(b"HTTP/1.1 408 ")
        assert read_whole(header).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        header.sendall(b"TP/1.1\r\n")  # it is still there, and not reset


def test_a_client_that_takes_nothing_of_its_answers_is_given_up(engine, reader, monkeypatch):
    monkeypatch.setattr(connections, "STALLED_SECONDS", 0.2)

    def ask_again_and_again(line: socket.socket, port: int) -> None:
        while True:
            line.sendall(f"GET /chat.js HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * 100)

    with running(engine, reader) as port, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", port))
        with pytest.raises(ConnectionError):
            ask_again_and_again(line, port)


def exchanged(port: int, data: bytes) -> bytes:
    """What a client reads that sends all it has before it does."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(data)
        return read_whole(line)


@pytest.mark.slow("waits for many clients")
@pytest.mark.parametrize("length", ["Content-Length: 33554432", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 413), ("/v1/none", 404), ("/v1/models", 405)])
def test_who_is_refused_while_still_sending_reads_why(engine, reader, path, status, length):
    """A connection that is closed while something arrives is reset, and the client never sees the answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nConnection: close\r\n"
    body = b" " * (32 << 20)
    sent = body if "Length" in length else b"%x\r\n%s\r\n" % (len(body), body)
    with running(engine, reader) as port:
        answer = exchanged(port, f"{head % port}{length}\r\n\r\n".encode() + sent)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.endswith(b"}}")


def test_what_is_no_request_is_answered_before_the_connection_ends(engine, reader):
    with running(engine, reader) as port:
        for data in (b"\0" * (8 << 20), b"GET / HTTP/1.1\r\nX: " + b"a" * (8 << 20)):
            assert exchanged(port, data).startswith(b"HTTP/1.1 400 ")


@pytest.mark.slow("waits for many clients")
def test_a_body_in_chunks_of_a_byte_keeps_nobody_waiting(engine, reader):
    """Each chunk takes as long to parse as a request does."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
    with running(engine, reader) as port, socket.create_connection(("127.0.0.1", port)) as line:
        sent = f"{head % port}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * 200_000
        threading.Thread(target=line.sendall, args=(sent,)).start()
        time.sleep(0.2)
        worst = 0.0
        for _ in range(20):
            started = time.monotonic()
            assert asked_together(port, 1, "/v1/models") == {"200": 1}
            worst = max(worst, time.monotonic() - started)
    assert worst < 1  # 200,000 chunks take seconds


@pytest.mark.slow("waits for many clients")
@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_a_client_that_has_said_all_reads_its_answer(engine, reader, monkeypatch, seconds):
    """It had none: the end of what it sends was taken for its own end. `seconds`: until it is asked whether it is
    there, by an interim answer."""
    monkeypatch.setattr(connections, "LOOK_SECONDS", seconds)
    with running(engine, reader) as port:
        for more in ("", ', "stream": true'):
            body = f'{{"model": "m", "prompt": "1+2=", "max_tokens": 50{more}}}'
            with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
                line.sendall(request(port, body=body).replace(b"Connection: close\r\n", b""))
                line.shutdown(socket.SHUT_WR)
                interim, _, answer = read_whole(line).rpartition(b"HTTP/1.1 200 OK\r\n")
            assert interim == b"HTTP/1.1 100 \r\n\r\n" * (seconds == 0.0)
            assert b"text_completion" in answer


def test_a_request_that_ends_before_its_end_has_no_answer(engine, reader):
    with running(engine, reader) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(request(port)[:-5])
        line.shutdown(socket.SHUT_WR)
        assert read_whole(line) == b""


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_has_gone_is_seen_although_it_had_said_all(engine, reader, monkeypatch, is_stream):
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.1)
    jobs = list[CompletionJob]()
    monkeypatch.setattr(engine, "submit", jobs.append)
    body = f'{{"model": "m", "prompt": "1+2=", "max_tokens": 4000, "stream": {str(is_stream).lower()}}}'
    with running(engine, reader) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
            line.sendall(request(port, body=body))
            wait_until(lambda: jobs)
        wait_until(lambda: jobs[0].cancelled)
