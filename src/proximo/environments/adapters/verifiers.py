# pyright: reportMissingImports=false
"""Environments of verifiers (its `v1`): their own code runs each episode, with the policy as its agent."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from proximo.environments import Done, Environment, Observation

MODULES = ("", ".utils.loaders", ".trace", ".types", ".dialects", ".agent", ".graph")
Ask = Callable[[str], Awaitable[str]]
"""Function that hands what the environment says to the policy, and waits for its reply."""


class Verifiers(Environment):
    """An environment with one agent, which is asked in words: the episode's reward is that of its trace.

    Tool servers and programs of a harness are not run: the policy replies to the environment directly.
    """

    def __init__(self, taskset: str, environment: str = "", **options: Any) -> None:
        """`options`: further fields of the taskset's config."""
        self._environment = loaded(taskset, environment, options)
        if len(self._environment._agent_specs) != 1:
            raise ValueError(
                f"{taskset} has the agents {', '.join(self._environment._agent_specs)}: only one is played"
            )
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        self._replies: asyncio.Queue[str] = asyncio.Queue()

    @classmethod
    def before_episodes(cls, taskset: str, environment: str = "", **options: Any) -> None:
        """Import verifiers and the taskset's own module, which takes seconds."""
        import_all()
        _config(taskset, environment, options)

    async def reset(self, problem: dict[str, Any]) -> None:
        task = next(itertools.islice(self._environment.taskset, int(problem["task"]), None))
        if messages_of(task) != [dict(message) for message in problem["prompt"]]:
            raise ValueError(f"task {problem['task']} begins otherwise now: make its row anew with rows()")
        self._playing = asyncio.create_task(self._play(task))
        await self._next()  # which asks for the reply to the prompt

    async def step(self, reply: str) -> Observation | Done:
        self._replies.put_nowait(reply)
        return await self._next()

    async def _next(self) -> Observation | Done:
        """Wait for what the environment says next, or for the end."""
        message = asyncio.create_task(self._messages.get())
        await asyncio.wait((message, self._playing), return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            return Observation(message.result())
        message.cancel()
        return Done(self._playing.result())

    async def _play(self, task: Any) -> float:
        from verifiers.v1 import EnvInfo, Episode
        from verifiers.v1.trace import TraceTask

        its = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = Episode(env=EnvInfo(id=self._environment.config.env_id), task=its)
        [(name, config)] = self._environment._agent_specs.items()
        agents = _Agents({name: _Agent(name, config, its, self._ask, episode.traces)})
        await self._environment.setup(agents)
        await self._environment.run(task, agents)
        await self._environment.finalize(task, episode)
        return float(episode.traces[0].reward)

    async def _ask(self, text: str) -> str:
        self._messages.put_nowait(text)
        return await self._replies.get()


def rows(taskset: str, count: int, *, first: int = 0, environment: str = "", **options: Any) -> list[dict[str, Any]]:
    """Rows of data for tasks of a taskset, from the one with this index on; `options` are the taskset's."""
    tasks = tasks_of(taskset, count, first, environment, options)
    return [{"prompt": messages_of(task), "task": index} for index, task in enumerate(tasks, start=first)]


def tasks_of(taskset: str, count: int, first: int, environment: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield `count` tasks of a taskset, from the one with index `first` on."""
    return itertools.islice(loaded(taskset, environment, options).taskset, first, first + count)


def loaded(taskset: str, environment: str, options: Mapping[str, Any]) -> Any:
    from verifiers.v1.utils.loaders import load_environment

    return load_environment(_config(taskset, environment, options))


def _config(taskset: str, environment: str, options: Mapping[str, Any]) -> Any:
    from verifiers.v1.utils.loaders import resolve_env_config

    return resolve_env_config({"id": environment, "taskset": {"id": taskset, **options}})


def import_all() -> None:
    """Import the modules of verifiers that an episode needs."""
    for name in MODULES:
        import_module(f"verifiers.v1{name}")


def messages_of(task: Any) -> list[dict[str, Any]]:
    """A task's prompt as the policy is asked it."""
    from verifiers.v1.types import content_text

    system, prompt = task.data.system_prompt, task.data.prompt
    if prompt is None:
        raise ValueError("the task has no prompt: environments that speak first are not played")
    asked = (
        [("user", prompt)] if isinstance(prompt, str) else [(part.role, content_text(part.content)) for part in prompt]
    )
    return [{"role": role, "content": text} for role, text in [*([("system", system)] if system else []), *asked]]


class _Agents:
    """An environment's agents by name."""

    def __init__(self, agents: dict[str, "_Agent"]) -> None:
        self._agents = agents

    def __getattr__(self, name: str) -> "_Agent":
        return self._agents[name]


class _Agent:
    """The policy, in the place of verifiers' own agent."""

    def __init__(self, name: str, config: Any, task: Any, ask: Ask, completed: list[Any]) -> None:
        self.name, self.trainable = name, True
        self._config, self._task, self._ask, self._completed = config, task, ask, completed

    async def run(self, task: Any, **_: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator["_Conversation"]:
        from verifiers.v1.trace import AgentInfo, Trace

        agent = AgentInfo(config=self._config, name=self.name, trainable=self.trainable)
        trace = Trace(task=self._task, agent=agent)
        yield _Conversation(task, trace, self._ask)
        await task.score(trace)
        trace.is_completed = trace.ok = True
        self._completed.append(trace)


class _Conversation:
    """A conversation that an environment's `run` drives turn by turn."""

    def __init__(self, task: Any, trace: Any, ask: Ask) -> None:
        from verifiers.v1.dialects import parse_message

        self.trace, self._ask = trace, ask
        self._messages = [parse_message(message) for message in messages_of(task)]

    async def turn(self, message: Any = None) -> Any:
        from verifiers.v1.agent import Segment
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.graph import prepare_turn
        from verifiers.v1.types import AssistantMessage, Response, content_text

        given = [{"role": "user", "content": message}] if isinstance(message, str) else message or []
        new = [parse_message(entry) if isinstance(entry, dict) else entry for entry in given]
        self._messages += new
        reply = AssistantMessage(content=await self._ask("\n\n".join(content_text(entry.content) for entry in new)))
        response = Response(
            id=str(len(self._messages)), created=int(time.time()), model="policy", message=reply, finish_reason="stop"
        )
        prepare_turn(self.trace, list(self._messages)).commit(response)
        self._messages.append(reply)
        return Segment(messages=[reply])
