"""`proximo view` without a browser: who is let in, what is answered about run folders in any state, the command."""

import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proximo.algorithms import DAPO, GRPO
from proximo.cli import main
from proximo.insight.page import overview, server
from proximo.insight.page.files import KINDS, page_files
from proximo.insight.page.guarding import POLICY
from proximo.insight.page.overview import Runs, about
from proximo.losses import Clip
from proximo.rl.config import EvaluationOptions
from tests.insight.page.browser import Served, append, served, until, write_run

CANARY = "canary-of-a-run"
STATIC = Path(server.__file__).parent / "static"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    write_run(root / "runs" / "a", [{"step": 0, "outcome": 0.5}], events=[{"step": 0, "kind": CANARY}])
    write_run(root / "secret", events=[{"step": 0, "kind": CANARY}])
    with served(root / "runs") as made:
        yield made


def asked(page: Served, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One answer to a GET with the token."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    try:
        connection.request("GET", path, headers={"X-Proximo-Token": page.token, **headers})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def data(page: Served, path: str) -> dict:
    status, _, body = asked(page, path)
    assert status == 200, body
    return json.loads(body)


def raw(page: Served, request: str) -> tuple[int, str]:
    """Status and all that came back, for a request that no library would send. % is the port."""
    text = request.replace("%", str(page.port)).replace("TOKEN", f"X-Proximo-Token: {page.token}")
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as line:
        line.sendall(text.replace("\n", "\r\n").encode() + b"\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: line.recv(1 << 16), b"")).decode()
    return int(answer.split()[1]), answer


def is_closed(line: socket.socket) -> bool:
    """By the other end, which may have something to say first; TimeoutError where it is not."""
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_connections_that_ask_for_nothing_are_closed_and_leave_room_for_the_owner(tmp_path):
    """Twice as many as are served at once: none of them knows the token, or ends its headers."""
    write_run(tmp_path / "a", [{"step": 0, "outcome": 0.5}])
    with served(tmp_path, header_seconds=0.5) as page, contextlib.ExitStack() as until:
        lines = [
            until.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=20)) for _ in range(200)
        ]
        for line in lines:
            with contextlib.suppress(ConnectionError):  # those that are closed already
                line.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert [run["name"] for run in data(page, "/api/runs")["runs"]] == ["a"]
        assert all(map(is_closed, lines))


@pytest.mark.slow("waits for connections")
def test_a_connection_that_asks_again_is_kept_until_it_stops_in_the_middle(tmp_path):
    with served(tmp_path, header_seconds=2.0) as page:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
        connection.connect()
        line = connection.sock
        for _ in range(2):
            connection.request("GET", "/none")
            answer = connection.getresponse()
            assert (answer.status, connection.sock) == (401, line)
            answer.read()
        line.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert is_closed(line)
        connection.close()


EVENTS = "/api/rows?run=a&file=events"
GOOD = f"GET {EVENTS} HTTP/1.1\nHost: 127.0.0.1:%\nTOKEN"


def test_what_is_asked_for_properly_is_answered(page):
    """Without these the refusals below would prove nothing."""
    assert CANARY in raw(page, GOOD)[1]
    assert CANARY in raw(page, GOOD.replace("127.0.0.1:%", "localhost:%"))[1]
    assert CANARY in raw(page, f"{GOOD}\nOrigin: http://127.0.0.1:%\nSec-Fetch-Site: same-origin")[1]
    status, answer = raw(page, GOOD.replace("GET", "HEAD"))
    assert status == 200
    assert CANARY not in answer
    for path, kind in {"/": "text/html", "/static/app.js": "text/javascript", "/static/style.css": "text/css"}.items():
        status, answer = raw(page, f"GET {path} HTTP/1.1\nHost: 127.0.0.1:%\nSec-Fetch-Site: none")
        assert status == 200
        assert f"content-type: {kind}" in answer


def with_host(host: str) -> str:
    return f"GET {EVENTS} HTTP/1.1\nHost: {host}\nTOKEN"


def with_headers(*lines: str) -> str:
    return "\n".join([f"GET {EVENTS} HTTP/1.1\nHost: 127.0.0.1:%", *lines])


def with_method(method: str) -> str:
    return GOOD.replace("GET", method, 1)


def with_path(path: str) -> str:
    return GOOD.replace(EVENTS, path)


REFUSED = [
    # Another name for this machine: a web site that points its own at 127.0.0.1
    *((with_host(host), 403) for host in ("evil.test", "evil.test:%", "127.0.0.1", "127.0.0.1:1", "localhost")),
    *(
        (with_host(host), 403)
        for host in ("localhost.evil.test:%", "evil.test#127.0.0.1:%", "a@127.0.0.1:%", "[::1]:%")
    ),
    *((with_host(host), 403) for host in ("0.0.0.0:%", "127.0.0.1:%/", "127.0.0.1:%?", "2130706433:%", "127.1:%", "")),
    (with_headers("Host: evil.test", "TOKEN"), 400),
    (f"GET {EVENTS} HTTP/1.0\nTOKEN", 403),
    # Another page
    *(
        (with_headers("TOKEN", f"Origin: {origin}"), 403)
        for origin in ("http://evil.test", "null", "http://127.0.0.1:1")
    ),
    *(
        (with_headers("TOKEN", f"Origin: {origin}"), 403)
        for origin in ("https://127.0.0.1:%", "http://localhost:%", "")
    ),
    (with_headers("TOKEN", "Origin: http://127.0.0.1:%", "Origin: http://evil.test"), 403),
    *(
        (with_headers("TOKEN", f"Sec-Fetch-Site: {site}"), 403)
        for site in ("cross-site", "same-site", "SAME-ORIGIN", "")
    ),
    ("GET / HTTP/1.1\nHost: 127.0.0.1:%\nOrigin: http://evil.test", 403),
    # Nobody, or somebody who guesses
    (with_headers(), 401),
    *((with_headers(f"X-Proximo-Token: {token}"), 401) for token in ("", "a", "a-secre", "a-secret2", "A-SECRET", "é")),
    (with_headers("Cookie: token=a-secret"), 401),
    (with_headers("Authorization: Bearer a-secret"), 401),
    (with_headers("TOKEN", "TOKEN"), 401),
    (f"GET {EVENTS}&token=a-secret HTTP/1.1\nHost: 127.0.0.1:%", 401),
    # Anything but reading
    *(
        (with_method(method), 405)
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "get")
    ),
    ("CONNECT 127.0.0.1:% HTTP/1.1\nHost: 127.0.0.1:%\nTOKEN", 405),
    (
        with_headers("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: a", "Sec-WebSocket-Version: 13"),
        401,
    ),
    # Ways around, and out
    *(
        (with_path(path), 404)
        for path in ("/api", "/api/", "/api/runs/", "//api/runs", "/API/runs", "/api/rows/../run")
    ),
    *(
        (with_path(path), 404)
        for path in ("/static/", "/static/vendor/NOTICE", "/static/../server.py", "/static/..%2fserver.py")
    ),
    *((with_path(path), 404) for path in ("/static/%2e%2e/server.py", "/static//app.js", "/runs/a/run.json", "/..")),
    (with_path(f"http://evil.test{EVENTS}"), 404),
    *(
        (with_path(EVENTS.replace("=a&", f"={run}&")), 404)
        for run in ("../secret", "a/../../secret", "%2e%2e%2fsecret")
    ),
    *((with_path(EVENTS.replace("=a&", f"={run}&")), 404) for run in ("", ".", "/", "a%00", "a/", "A", "..\\secret")),
]


@pytest.mark.parametrize(("request_text", "status"), REFUSED)
def test_nobody_else_is_answered(page, request_text, status):
    got, answer = raw(page, request_text)
    assert got == status, answer
    assert CANARY not in answer


def test_hostile_requests_were_enough():
    assert len(REFUSED) > 70
    assert len({text for text, _ in REFUSED}) == len(REFUSED)


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/run?run=none", "/nothing"])
def test_every_answer_carries_the_policy(page, path):
    for token in (page.token, "wrong"):
        _, headers, _ = asked(page, path, **{"X-Proximo-Token": token})
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


def test_only_this_machine_can_connect():
    with server.bind(0) as made:
        assert made.getsockname()[0] == "127.0.0.1"


# Run folders


def lines(folder: Path, **query: str) -> tuple[dict, list[str]]:
    head, *rest = overview.rows(overview.RunFolder(folder), query).decode().splitlines()
    return json.loads(head), rest


def test_rows_are_handed_on_from_an_offset(tmp_path):
    run = write_run(tmp_path / "a", [{"step": 0}, {"step": 1}])
    assert lines(run, file="metrics") == ({"from": 0, "next": 24, "size": 24}, ['{"step": 0}', '{"step": 1}'])
    assert lines(run, file="metrics", **{"from": "12"}) == ({"from": 12, "next": 24, "size": 24}, ['{"step": 1}'])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # being written
    assert lines(run, file="metrics", **{"from": "24"}) == ({"from": 24, "next": 24, "size": 34}, [])
    (run / "metrics.jsonl").write_text('{"step": 0}\n')  # the run went on from an earlier step
    assert lines(run, file="metrics", **{"from": "24"}) == ({"from": 0, "next": 12, "size": 12}, ['{"step": 0}'])
    assert lines(run, file="events") == ({"from": 0, "next": 0, "size": 0}, [])


def test_an_answer_is_bounded_and_every_row_comes_once(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "PAGE", 100)
    run = write_run(tmp_path / "a", [{"step": step} for step in range(30)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write("x" * 250 + "\n")  # longer than a page
    append(run, "metrics", {"step": 30})
    found, offset = [], 0
    while True:
        head, rest = lines(run, file="metrics", **{"from": str(offset)})
        assert sum(len(each) + 1 for each in rest) <= 100
        found += [line for line in rest if line.startswith("{")]
        if head["next"] == offset:
            break
        offset = head["next"]
    assert [json.loads(line)["step"] for line in found] == list(range(31))
    assert offset == head["size"]


NO_ROWS = [
    {"file": "ledger"},
    {},
    {"file": "../run"},
    *({"file": "metrics", "from": at} for at in ("-1", "1e3", "9" * 40)),
]


@pytest.mark.parametrize("query", NO_ROWS)
def test_rows_of_something_else_are_refused(tmp_path, query):
    with pytest.raises(ValueError, match="file is|from is"):
        lines(write_run(tmp_path / "a"), **query)


def test_a_file_that_would_never_end_is_not_opened(tmp_path):
    run = write_run(tmp_path / "a")
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert lines(run, file="metrics")[1] == []
    assert Runs(tmp_path).listed()["runs"][0]["step"] is None


STAGES = {
    "sft": ("dynamic = false\n[fit]\nepochs = 1.0\n", {}),
    "dpo": ('[loss]\ntype = "Dpo"\nbeta = 0.1\n[fit]\nepochs = 1.0\n', {"held_out/accuracy": 0.75}),
    "reward-model": ("[loss]\ncentring = 0.0\n[fit]\nepochs = 1.0\n", {"held_out/accuracy": 0.75}),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_on_a_file_is_named_and_its_accuracy_is_one_of_pairs(stage, tmp_path):
    settings, more = STAGES[stage]
    rows = [{"step": 1, "loss": 0.5, "tokens": 9.0}, {"step": 1, "held_out/loss": 0.25, **more}]
    write_run(tmp_path / "a", rows, state="finished")
    (tmp_path / "a" / "config.toml").write_text(settings)
    runs = Runs(tmp_path)
    [listed] = runs.listed()["runs"]
    assert (listed["stage"], listed["outcome"], listed["held_out"]) == (stage, None, None)
    assert (listed["held_out_loss"], listed["held_out_pairs"]) == (0.25, more.get("held_out/accuracy"))
    told = about(runs.named("a"), {})
    assert told["stage"] == stage
    assert set(told["meanings"]) == {"loss", "tokens", "held_out/loss", *more}
    assert "pairs" in told["meanings"].get("held_out/accuracy", "pairs")


def test_the_list_says_how_far_runs_are(tmp_path):
    evaluation = {"step": 3, "held_out/accuracy": 0.75}
    odd = {"step": 10**20, "outcome": 1.0}
    rows = [{"step": 0, "outcome": 0.25}, {"step": 1, "outcome": 0.5}, evaluation, odd]
    write_run(tmp_path / "b" / "c", rows, steps=7)
    time.sleep(0.01)
    write_run(tmp_path / "a", state="running")
    time.sleep(0.01)
    write_run(tmp_path / "d", [{"step": 0, "loss": 2.0}], state="finished")
    (tmp_path / "d" / "config.toml").write_text("[fit]\nepochs = 1.0\n")
    (tmp_path / "no run").mkdir()
    d, a, c = Runs(tmp_path).listed()["runs"]
    assert (a["name"], a["state"], a["step"], a["algorithm"]) == ("a", "running", None, "grpo")
    assert (c["name"], c["state"], c["step"], c["steps"]) == ("b/c", "stopped", 1, 7)
    assert (c["outcome"], c["held_out"], c["started"]) == (0.5, 0.75, "2026-01-01 00:00:00")
    assert (d["name"], d["state"], d["step"], d["algorithm"]) == ("d", "finished", 0, None)
    [alone] = Runs(tmp_path / "a").listed()["runs"]
    assert alone["name"] == "a"


def test_the_list_follows_runs_and_reads_only_what_changed(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a", [{"step": 0, "outcome": 0.5}])
    runs, read = Runs(tmp_path), []
    monkeypatch.setattr(overview, "summary", lambda run, real=overview.summary: read.append(run.name) or real(run))
    assert runs.listed()["runs"][0]["step"] == 0
    assert runs.listed()["runs"][0]["step"] == 0
    assert read == ["a"]
    append(run, "metrics", {"step": 1, "outcome": 1.0})
    assert runs.listed()["runs"][0]["step"] == 1
    write_run(tmp_path / "b")
    runs._again = 0.0
    assert [each["name"] for each in runs.listed()["runs"]] == ["b", "a"]
    assert runs.named("b").name == "b"


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_run_that_is_removed_while_it_is_looked_for_leaves_the_others(tmp_path, monkeypatch, error):
    write_run(tmp_path / "a")
    runs = Runs(tmp_path)
    assert [each["name"] for each in runs.listed()["runs"]] == ["a"]

    def gone(root, load_code=False):
        raise error("no run")

    monkeypatch.setattr(overview, "find_runs", gone)
    runs._again = 0.0
    assert [each["name"] for each in runs.listed()["runs"]] == ["a"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml"])
def test_a_run_with_a_link_is_listed_with_what_is_wrong(tmp_path, name):
    """It is there, and was not removed meanwhile; the others are as they were."""
    runs = tmp_path / "runs"
    write_run(runs / "b", [{"step": 1, "outcome": 0.5}])
    file = write_run(runs / "a", [{"step": 1, "outcome": 0.5}]) / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    found = Runs(runs)
    listed = {each["name"]: each for each in found.listed()["runs"]}
    said = f"{file} is a symbolic link and is not followed: put the file itself there"
    assert listed["a"] == {"name": "a", "state": "stopped", "error": said}
    assert (listed["b"]["step"], "error" in listed["b"]) == (1, False)
    file.unlink()
    (tmp_path / "elsewhere").rename(file)  # with the time and the size it had
    assert {each["name"]: each.get("step") for each in found.listed()["runs"]} == {"a": 1, "b": 1}


def test_a_run_with_a_file_that_is_too_large_leaves_the_others(tmp_path):
    write_run(tmp_path / "b", [{"step": 1, "outcome": 0.5}])
    os.truncate(write_run(tmp_path / "a") / "config.toml", 257 << 20)  # a hole: it takes no room on the disk
    listed = {each["name"]: each for each in Runs(tmp_path).listed()["runs"]}
    assert "has 257 MiB, more than the 256 MiB" in listed["a"]["error"]
    assert listed["b"]["step"] == 1


BROKEN = {
    "run.json is a list": ("run.json", b"[1]"),
    "run.json is cut": ("run.json", b'{"attempts": ['),
    "attempts are a number": ("run.json", b'{"attempts": 3, "argv": 4, "machine": NaN}'),
    "attempts are words": ("run.json", b'{"attempts": ["x"]}'),
    "config is cut": ("config.toml", b"[algorithm"),
    "config is not text": ("config.toml", b"\xff\xfe\x00"),
    "config is of another version": ("config.toml", b"[algorithm]\nnovelty = 1\n"),
    "config is empty": ("config.toml", b""),
    "metrics are noise": ("metrics.jsonl", b"\x00\xff{\n[1]\n3\n\n"),
    "metrics have no steps": ("metrics.jsonl", b'{"outcome": 1}\n{}\n'),
    "metrics have words": ("metrics.jsonl", b'{"step": "x", "outcome": "y", "held_out/accuracy": []}\n'),
    "metrics have huge steps": ("metrics.jsonl", b'{"step": 1%s, "outcome": 1}\n' % (b"0" * 400)),
    "events have lists": ("events.jsonl", b'{"step": 0, "kind": "finding", "rule": ["x"]}\n'),
    "events are not ours": ("events.jsonl", b'{"kind": "finding"}\n{"kind": 3}\n{"step": NaN}\n'),
    "result is a number": ("result.json", b"3"),
    "result is of another kind": ("result.json", b'{"after": 3}'),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("broken")
    for number, (name, content) in enumerate(BROKEN.values()):
        events = [{"step": 0, "kind": "resumed", "message": "x"}]
        run = write_run(root / str(number), [{"step": 0, "outcome": 0.5}], events=events)
        (run / name).write_bytes(content)
    with served(root) as page:
        yield page


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_shown_as_far_as_it_goes(broken, case):
    run = str(list(BROKEN).index(case))
    assert run in [each["name"] for each in data(broken, "/api/runs")["runs"]]
    for path in (f"/api/run?run={run}", f"/api/health?run={run}"):
        data(broken, path)
    for file in ("metrics", "timings", "events"):
        assert asked(broken, f"/api/rows?run={run}&file={file}")[0] == 200


def test_a_run_says_what_it_is(tmp_path):
    changed = replace(GRPO, gate=Clip(0.2, 0.3))
    write_run(tmp_path / "a", algorithm=changed)
    write_run(tmp_path / "b", algorithm=DAPO, evaluation=EvaluationOptions(problems=5))
    runs = Runs(tmp_path)
    a, b = (overview.about(runs.named(name), {}) for name in "ab")
    assert a["algorithm"]["name"] == "grpo"
    assert len(a["algorithm"]["changes"]) == 1
    assert a["algorithm"]["changes"][0].startswith("gate.high is 0.3, not 0.2")
    assert b["algorithm"]["name"] == "dapo"
    assert b["algorithm"]["changes"] == []
    assert dict(b["algorithm"]["stages"])["gate"] == "Clip(low=0.2, high=0.28)"
    assert (b["settings"]["evaluation.problems"], b["cap"]) == ("5", 8)
    assert a["versions"] == {"torch": "2.0"}
    assert a["rollouts"] is False


def test_findings_of_the_rows_come_before_those_that_were_told(tmp_path):
    told = {"step": 1, "attempt": 1, "kind": "finding", "rule": "told-before", "severity": "warning", "message": "m"}
    dead = {"dead_groups": 1.0, "dead_solved": 0.0, "dead_rows": 1.0, "wasted_tokens": 0.0, "reward": 0.0}
    rows = [{"step": step, "outcome": 0.0, "sampled_tokens": 9, "completions": 8, **dead} for step in range(30)]
    run = write_run(tmp_path / "a", rows, events=[told, {**told, "kind": "resumed", "rule": "other"}])
    *found, last = overview.health(overview.RunFolder(run), {})["findings"]
    assert found
    assert set(found[0]) == {"rule", "severity", "step", "message", "remedy", "show", "over"}
    assert last == {
        "rule": "told-before",
        "severity": "warning",
        "step": 1,
        "message": "m",
        "remedy": None,
        "show": None,
        "over": None,
    }
    append(run, "events", {**told, "rule": found[0]["rule"]})
    assert len(overview.health(overview.RunFolder(run), {})["findings"]) == len(found) + 1


@pytest.mark.slow("waits for connections")
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "a", [{"step": 0}])

    def breaks(run, query):
        raise RuntimeError("one\x1b[31m\ntwo")

    monkeypatch.setitem(server.HANDLERS, "health", breaks)
    monkeypatch.setitem(server.HANDLERS, "run", lambda run, query: {"x": float("nan"), "y": [float("inf"), 1]})
    monkeypatch.setitem(server.HANDLERS, "steps", lambda run, query: {"x": "y" * (server.MAX_BYTES + 1)})
    with served(tmp_path) as page:
        status, _, body = asked(page, "/api/health?run=a")
        assert (status, json.loads(body)) == (
            500, {"error": "this is a mistake of Proximo's: RuntimeError: one\\x1b[31m"}
        )  # fmt: skip
        assert data(page, "/api/run?run=a") == {"x": None, "y": [None, 1]}
        assert asked(page, "/api/steps?run=a")[0] == 413
        assert json.loads(asked(page, "/api/rows?run=a&file=x")[2]) == {
            "error": "file is 'x': give one of metrics, timings, events"
        }
        monkeypatch.setattr(overview, "read_lines", lambda path, start: (_ for _ in ()).throw(OSError(5, "I/O error")))
        assert asked(page, "/api/rows?run=a&file=metrics")[0] == 404
        for name in run.iterdir():
            name.unlink()
        run.rmdir()
        assert asked(page, "/api/run?run=a")[0] in (200, 404)  # it was found a moment ago
    assert "\x1b" not in capsys.readouterr().err


def test_names_that_are_not_text(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff\xfe<b>"
    write_run(Path(os.fsdecode(folder)), [{"step": 0}])
    with served(tmp_path) as page:
        [run] = data(page, "/api/runs")["runs"]
        assert run["name"] == "\\xff\\xfe<b>"
        assert asked(page, "/api/run?run=%5Cxff%5Cxfe%3Cb%3E")[0] == 200


# What comes with the package


def test_vendored_files_are_what_the_notice_says():
    found = re.findall(r"^sha256 (\w{64})  (\S+)$", (STATIC / "vendor" / "NOTICE").read_text(), re.MULTILINE)
    assert [name for _, name in found] == ["uplot.js", "uplot.css"]
    for digest, name in found:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest


def test_the_page_fetches_nothing_and_makes_no_markup_of_text():
    ours = [path for path in STATIC.rglob("*") if path.parent.name != "vendor" and path.suffix in KINDS]
    assert {"app.js", "index.html", "view.css", "icon.svg"} <= {path.name for path in ours}
    for path in ours:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        outside = [each for each in re.findall(r"https?://[^\s\"']+", text) if "www.w3.org" not in each]
        assert outside == [], path
        if path.suffix != ".css":
            assert text.count("\n") <= 300, path
    files = page_files()
    asked = re.findall(r'(?:href|src)="([^"]+)"', files["/"][0].decode())
    assert asked == ["/static/icon.svg", "/page.css", "/page.js", "#"]
    script, styles = (files[f"/{name}"][0].decode() for name in ("page.js", "page.css"))
    for path in STATIC.rglob("*.js"):
        assert f"'/static/{path.relative_to(STATIC)}'" in script, f"{path} is never imported"
    for path in STATIC.rglob("*.css"):
        assert path.read_text() in styles, f"{path} is not named in index.html"


# The command


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["view", *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "start a run (proximo train)" in refused([], capsys)
    assert "there is no folder gone" in refused(["gone"], capsys)
    assert "--port 70000: give a number" in refused([".", "--port", "70000"], capsys)
    assert "takes no --host" in refused([".", "--host", "0.0.0.0"], capsys)
    assert "takes one folder, not 2" in refused([".", "."], capsys)
    with server.bind(0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port}: Address already in use" in refused([".", "--port", port], capsys)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("proximo.insight.page.")]:
        monkeypatch.delitem(sys.modules, name)
    assert 'pip install "proximo[view]"' in refused(["."], capsys)
    assert main(["view", "--help"]) == 0


@pytest.mark.parametrize("screen", [True, False])
def test_the_command_serves_until_it_is_interrupted(tmp_path, monkeypatch, capsys, screen):
    opened, said = [], []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("proximo.cli.commands.view._has_screen", lambda: screen)
    write_run(tmp_path / "a")

    def look() -> None:
        try:
            until(lambda: said.append(capsys.readouterr().out) or "Ctrl-C" in "".join(said))
            port, token = re.findall(r"http://127.0.0.1:(\d+)/#token=(\S+)", "".join(said))[0]
            page = Served(int(port), token)
            said.append(until(lambda: _listening(page) and data(page, "/api/runs"))["runs"][0]["name"])
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    looker = threading.Thread(target=look)
    looker.start()
    assert main(["view", str(tmp_path), *(["--no-browser"] if screen is False else [])]) == 0
    looker.join()
    assert said[-1] == "a"
    text = "".join(said)
    address = re.findall(r"http://\S+", text)[0]
    port = address.split(":")[2].split("/")[0]
    assert len(address.partition("token=")[2]) >= 32
    assert f"ssh -L {port}:127.0.0.1:{port} " in text
    assert opened == ([address] if screen else [])
    assert capsys.readouterr().err.strip() == ""


def _listening(page: Served) -> bool:
    try:
        socket.create_connection(("127.0.0.1", page.port), timeout=1).close()
    except OSError:
        return False
    return True
