"""The endpoint as a client sees it: answers in OpenAI's form, streams, refusals, and who may ask."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from proximo.serving import server
from proximo.serving.server import application

PORT = 8000


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The chunks of a stream, without its end."""
        *lines, end, empty = self.body.decode().split("\n\n")
        assert (end, empty) == ("data: [DONE]", "")
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def call(app, path: str, body: object = None, *, leaves: bool = False, **headers: str) -> Reply:
    """One request: a POST where there is a body. `leaves`: the client goes away as soon as it has asked."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"host": f"127.0.0.1:{PORT}", "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        asked = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if asked:
                return asked.pop()
            if not leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "GET" if body is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("127.0.0.1", PORT),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        await app(scope, receive, send)

    asyncio.run(run())
    start, *parts = sent
    return Reply(start["status"], dict(start["headers"]), b"".join(part.get("body", b"") for part in parts))


@pytest.fixture(scope="module")
def app(engine, reader):
    return application(engine, reader, port=PORT, token=None)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "1+2="}], "temperature": 0, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "1+2=", "temperature": 0, **more}


def test_models(app):
    [model] = call(app, "/v1/models").json["data"]
    assert (model["id"], model["chat"]) == ("m", True)


def test_a_message_whole_and_streamed(app):
    whole = call(app, "/v1/chat/completions", chat()).json
    [choice] = whole["choices"]
    assert (whole["object"], choice["message"]["role"], choice["finish_reason"]) == (
        "chat.completion",
        "assistant",
        "length",  # the server's limit
    )
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 6
    first, *parts, last, usage = call(
        app, "/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True})
    ).events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(parts) > 1
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == choice["message"]["content"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


def test_several_texts_with_several_completions_each(app):
    body = text(prompt=["1+2=", "3+4="], n=2, temperature=1, seed=3, max_tokens=5)
    found = call(app, "/v1/completions", body).json
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in found["choices"]]
    assert len(set(texts)) == 4
    assert texts == [choice["text"] for choice in call(app, "/v1/completions", body).json["choices"]]
    assert found["usage"]["completion_tokens"] == 20
    alone = call(app, "/v1/completions", {**body, "prompt": "1+2=", "n": 1}).json
    assert alone["choices"][0]["text"] == texts[0]
    assert alone["usage"]["prompt_tokens"] * 2 == found["usage"]["prompt_tokens"]


def test_logprobs_of_messages_and_texts(app):
    [choice] = call(app, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2)).json["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] <= 0 for each in content)  # it is greedy
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    streamed = call(app, "/v1/chat/completions", chat(logprobs=True, stream=True)).events
    parts = [part["choices"][0]["logprobs"] for part in streamed]
    assert [each["logprob"] for part in parts if part for each in part["content"]] == [
        each["logprob"] for each in content
    ]
    [choice] = call(app, "/v1/completions", text(echo=True, logprobs=1, max_tokens=0)).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("1+2=", "length")
    assert choice["logprobs"]["tokens"] == ["1", "+", "2", "="]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"][0] is choice["logprobs"]["top_logprobs"][0] is None
    # The text after an echo has the log-probs that it has alone.
    [both] = call(app, "/v1/completions", text(echo=True, logprobs=1, max_tokens=2)).json["choices"]
    [alone] = call(app, "/v1/completions", text(logprobs=1, max_tokens=2)).json["choices"]
    assert both["text"] == "1+2=" + alone["text"]
    assert both["logprobs"]["token_logprobs"][4:] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-5)


def test_stop_strings_and_tokens_as_prompts(app, served):
    _, tokenizer = served
    [whole] = call(app, "/v1/completions", text(max_tokens=9)).json["choices"]
    [cut] = call(app, "/v1/completions", text(max_tokens=9, stop=whole["text"][3:5])).json["choices"]
    assert (cut["text"], cut["finish_reason"]) == (whole["text"][: whole["text"].index(whole["text"][3:5])], "stop")
    ids = tokenizer.encode("1+2=", add_special_tokens=False)
    for prompt in (ids, [ids]):
        [same] = call(app, "/v1/completions", text(max_tokens=9, prompt=prompt)).json["choices"]
        assert same["text"] == whole["text"]
    # A special token is no part of the text; as a stop string it ends a completion all the same.
    assert call(app, "/v1/completions", text(stop=[tokenizer.eos_token])).status == 200


@pytest.mark.parametrize(
    ("change", "param", "why"),
    [
        ({"frobnicate": 1}, "frobnicate", "there is no such parameter here"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"temperature": -1}, "temperature", "from 0 to 100"),
        ({"temperature": True}, "temperature", "give a number"),
        ({"temperature": 10**400}, "temperature", "more characters): give a number from 0 to 100"),
        ({"temperature": 1e-320}, "temperature", "is 1e-320: give 0 (greedy) or at least 1e-10"),
        ({"temperature": "1"}, "temperature", "give a number"),
        ({"temperature": 1, "top_p": 1 + 1e-9}, "top_p", "from 0 to 1"),
        ({"temperature": 0, "min_p": -1}, "min_p", "from 0 to 1"),
        ({"top_k": 0}, "top_k", "from 1 to"),
        ({"seed": 2**63}, "seed", "give a whole number"),
        ({"seed": 1.0}, "seed", "give a whole number"),
        ({"n": True}, "n", "from 1 to 128"),
        ({"max_tokens": 1.0}, "max_tokens", "from 1 to"),
        ({"presence_penalty": False}, "presence_penalty", "not supported"),
        ({"logit_bias": {"5": 100}}, "logit_bias", "not supported"),
        ({"user": 3}, "user", "give a text"),
        ({"stop": ["x" * 9, 3]}, "stop", "give a text or a list of texts"),
        ({"stop": ["x"] * 17}, "stop", "give 16 at most"),
        ({"model": ["x" * 10**6]}, "model", "more characters): this server has 'm'"),
        ({"temperature": 1, "top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"max_tokens": 5000}, "max_tokens", "context is 4096"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "give one"),
        ({"n": 200}, "n", "from 1 to 128"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {}}, "stream_options", "needs stream"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "give a text"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "messages[0].tool_calls",
            "not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "type text"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(app, change, param, why):
    found = call(app, "/v1/chat/completions", chat(**change))
    assert found.status == (404 if param == "model" else 400)
    assert len(found.body) < 1000  # what is wrong may be megabytes
    assert found.json["error"]["param"] == param
    assert why in found.json["error"]["message"]
    assert found.json["error"]["type"] == "invalid_request_error"


def test_values_that_ask_for_nothing_are_accepted(app):
    neutral = {"presence_penalty": 0, "logit_bias": None, "tools": [], "response_format": {"type": "text"}, "user": "x"}
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
    body = chat(**neutral, messages=[{"role": "user", "content": parts}])
    assert (
        call(app, "/v1/chat/completions", body).json["choices"]
        == (call(app, "/v1/chat/completions", chat()).json["choices"])
    )


def test_other_refusals(app, engine, monkeypatch):
    for path, body, status in (
        ("/v1/chat/completions", chat(model="gpt"), 404),
        ("/v1/completions", text(prompt=[]), 400),
        ("/v1/completions", text(prompt=[10**6]), 400),
        ("/v1/completions", text(prompt=["a", 3]), 400),
        ("/v1/completions", text(stream=True, echo=True), 400),
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'{"temperature": NaN}', 400),
        ("/v1/completions", b'{"temperature": -Infinity}', 400),
        ("/v1/completions", b'{"n": ' + b"1" * 5000 + b"}", 400),
        ("/v1/completions", b'{"n": ' * 100_000, 400),
        ("/v1/completions", b"[" * 1_000_000, 400),
        ("/v1/completions", text(prompt=["a"] * 129), 400),
        ("/v1/completions", text(prompt="1" * 100_000), 400),
        ("/v1/completions", text(prompt=[1] * 100_000), 400),
        ("/v1/completions", text(prompt="\ud800"), 400),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "\ud800"}]), 400),
        ("/v1/completions", [], 400),
        ("/v1/embeddings", {}, 404),
        ("/v1/models", {}, 405),
    ):
        found = call(app, path, body)
        assert (found.status, bool(found.json["error"]["message"])) == (status, True), path
    assert call(app, "/v1/completions", text(), content_type="text/plain").status == 415
    monkeypatch.setattr(server, "MAX_BODY", 10)
    assert call(app, "/v1/completions", text()).status == 413
    monkeypatch.undo()
    for name in ("MAX_WAITING", "MAX_BODIES"):
        monkeypatch.setattr(server, name, 0)
        found = call(app, "/v1/completions", text())
        assert (found.status, found.headers[b"retry-after"]) == (429, b"2")
        monkeypatch.undo()


def test_a_failure_is_said_in_an_answer_and_in_a_stream(app, engine, monkeypatch):
    monkeypatch.setattr(engine._sampler, "stream", None)
    assert call(app, "/v1/completions", text()).status == 500
    *_, error = call(app, "/v1/chat/completions", chat(stream=True)).events
    assert error["error"]["type"] == "server_error"


def test_the_largest_seed_has_room_for_all_prompts(app):
    body = text(prompt=["1+2=", "3+4="], seed=2**63 - 1, temperature=1, max_tokens=4)
    assert call(app, "/v1/completions", body).status == 200


def test_nothing_is_computed_for_a_client_that_has_gone(app, engine, monkeypatch):
    jobs = []
    monkeypatch.setattr(engine, "submit", jobs.append)
    assert call(app, "/v1/completions", text(max_tokens=4000), leaves=True).status == 499
    assert [job.cancelled for job in jobs] == [True]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": f"localhost:{PORT}"}, 200),
        ({"origin": f"http://127.0.0.1:{PORT}", "sec_fetch_site": "same-origin"}, 200),
        ({"host": f"evil.example:{PORT}"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
    ],
)
def test_web_sites_may_not_ask(app, headers, status):
    assert call(app, "/v1/models", **headers).status == status


def test_other_addresses_need_the_token(engine, reader):
    app = application(engine, reader, port=PORT, token="secret")
    assert call(app, "/v1/models", host="machine:80", authorization="Bearer secret").status == 200
    for key in ("", "Bearer other", "secret"):
        assert call(app, "/v1/models", authorization=key).json["error"]["code"] == "invalid_api_key"
    assert call(app, "/v1/models").status == 401
    assert call(app, "/").status == 200  # the page itself holds no data
    assert call(app, "/v1/models", authorization="Bearer secret", origin="http://evil.example").status == 403


def test_the_page_is_served_with_a_strict_policy(app):
    page = call(app, "/")
    assert page.body.startswith(b"<!doctype html>")
    assert b"default-src 'none'" in page.headers[b"content-security-policy"]
    for name in ("/style.css", "/chat.css", "/chat.js"):
        assert name.encode() in page.body
        assert call(app, name).status == 200
        assert b"://" not in call(app, name).body  # nothing from elsewhere


def test_sockets():
    with server.bind("127.0.0.1", 0) as made:
        assert server.is_loopback(made)
        with pytest.raises(OSError, match="in use"):
            server.bind("127.0.0.1", made.getsockname()[1])
    with server.bind("0.0.0.0", 0) as made:
        assert not server.is_loopback(made)
