# pyright: reportMissingImports=false
"""Environments behind a server of verifiers: it plays the episodes, and asks the policy for its replies."""

import asyncio
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from proximo.environments import Done, Environment, Observation
from proximo.environments.adapters.verifiers import messages_of, tasks_of

Message = Mapping[str, Any]
START_SECONDS = 60.0
"""Time for a server that is being started to answer."""
NO_TOOLS = {"error": {"message": "the policy is offered no tools: play with a harness that has none, such as null"}}


class VerifiersServer(Environment):
    """A run on the server at an address, with one agent. The server asks for completions at an address that it is told,
    which is one of the episode's own process: a request is what there is to reply to, and a reply its answer.

    Requests that offer tools are refused: play with a harness that has none, such as `null`.
    """

    own_errors = (Exception,)  # a server that fails says no more than that

    def __init__(self, address: str = "tcp://127.0.0.1:5000") -> None:
        self._address = address
        self._known: list[tuple[str, str]] = []

    @classmethod
    def before_episodes(cls, **_: Any) -> None:
        import verifiers.v1.configs.client
        import verifiers.v1.serve
        import verifiers.v1.types  # noqa: F401

    async def reset(self, problem: dict[str, Any]) -> None:
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.serve import EnvClient
        from verifiers.v1.types import SamplingConfig

        loop, self._asked = asyncio.get_running_loop(), asyncio.Queue[Sequence[Message]]()
        self._endpoint = _Endpoint(lambda asked: loop.call_soon_threadsafe(self._asked.put_nowait, asked))
        client = EvalClientConfig(base_url=self._endpoint.url, api_key_var="PROXIMO_HAS_NO_KEY")
        server = EnvClient(self._address)
        if not await server.health(START_SECONDS):
            raise RuntimeError(f"no server of verifiers answers at {self._address}: start one with serve_env")
        run = server.run(client=client, model="policy", sampling=SamplingConfig(), task_data=problem["task_data"])
        self._run = asyncio.create_task(run)
        await self._next()
        if self._known != [(message["role"], message["content"]) for message in problem["prompt"]]:
            raise ValueError(f"the server asks {str(self._known)[:200]}, which is not the prompt: give served_rows()")

    async def step(self, reply: str) -> Observation | Done:
        self._known.append(("assistant", reply))
        self._endpoint.replies.put(reply)
        return await self._next()

    async def _next(self) -> Observation | Done:
        """Wait for what the server asks next, or for the end."""
        asked = asyncio.create_task(self._asked.get())
        await asyncio.wait((asked, self._run), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return Done(_reward(self._run.result()))
        messages = [(message["role"], _text(message.get("content"))) for message in asked.result()]
        past = len(self._known)
        if messages[:past] != self._known:
            raise ValueError("the server's messages do not begin with those before: it rewrites what was said")
        self._known = messages
        return Observation("\n\n".join(text for _, text in messages[past:]))


def served_rows(taskset: str, count: int, *, first: int = 0, environment: str = "", **options: Any) -> list[Any]:
    """Rows of data for tasks of a taskset, with all that a server needs of them; `options` are the taskset's."""
    tasks = tasks_of(taskset, count, first, environment, options)
    return [{"prompt": messages_of(task), "task_data": task.data.model_dump(mode="json")} for task in tasks]


def _reward(episode: Any) -> float:
    """Reward of the episode's only trace."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or len(episode.traces) != 1:
        raise RuntimeError(f"the server's episode has {len(episode.traces)} traces and failed: {str(errors)[:300]}")
    return float(episode.traces[0].reward)


def _text(content: Any) -> str:
    """A message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


class _Endpoint:
    """Chat completions at an address of this process: requests are handed on, and wait for their reply."""

    def __init__(self, hand_on: Callable[[Sequence[Message]], Any]) -> None:
        self.replies: queue.Queue[str] = queue.Queue()
        replies = self.replies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if body.get("tools"):
                    return self._send(400, "application/json", json.dumps(NO_TOOLS))
                hand_on(body["messages"])
                reply = replies.get()
                if body.get("stream"):
                    return self._send(200, "text/event-stream", _stream(reply))
                return self._send(200, "application/json", json.dumps(_completion(reply, "message")))

            def _send(self, status: int, kind: str, text: str) -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def _completion(reply: str, part: str) -> dict[str, Any]:
    """A reply in the form of OpenAI's API: `part` is `message`, or `delta` in a stream."""
    choice = {"index": 0, part: {"role": "assistant", "content": reply}, "finish_reason": "stop"}
    return {
        "id": "reply",
        "object": "chat.completion" if part == "message" else "chat.completion.chunk",
        "created": int(time.time()),
        "model": "policy",
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _stream(reply: str) -> str:
    """The whole reply as one event."""
    return f"data: {json.dumps(_completion(reply, 'delta'))}\n\ndata: [DONE]\n\n"
