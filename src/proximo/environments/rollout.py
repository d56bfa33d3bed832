"""The episodes of a round, turn by turn: all of them reply in one batch, and are answered at the same time."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from proximo.environments.append_turn import Extender
from proximo.environments.episode_pool import Answer, Host
from proximo.environments.episodes import Episode
from proximo.environments.protocol import Ask, Question
from proximo.environments.tool_calls import THOUGHT, Call, CallFormat, spoken
from proximo.processes.failures import LABELS, Failure, plain
from proximo.rewards.grading import note_failure
from proximo.rewards.judges.usage import Usage
from proximo.samplers.sampler import Stream, gathered
from proximo.types import MALFORMED, Problem, Turn

MAX_CALLS = 16
"""Calls of one reply that are made; the policy is told of the others."""
LOOK_BACK = 16
"""Tokens before a reply in which a template may have opened a thought."""


@dataclass(frozen=True)
class EpisodeBatch:
    """A round of episodes, with what is the same for all of them."""

    host: Host
    ask: Ask
    extend: Extender
    name: str
    """Name of the environment or the tools, for failures."""
    scores: bool
    """True if there is an environment, which rewards replies."""
    tools: tuple[str, ...]
    form: CallFormat
    max_turns: int
    max_turn_tokens: int | None
    lowest: float | None
    """Reward of an episode in which the policy causes an error. None: 0, or what the worst of its siblings earned."""
    times: Usage
    """Counts the episodes, their seconds from start to end, and those in which all waited for answers."""

    def rounds(self, questions: Sequence[Question], episodes: Sequence[Episode]) -> Stream:
        """Play a round; yields the completions of each question as soon as all of its episodes have ended."""
        began = time.perf_counter()
        self._start(episodes)
        self.times.add(answering=time.perf_counter() - began)
        waiting, live = list(range(len(questions))), list(episodes)
        while live:
            self._reply(questions, live)
            replied = time.perf_counter()
            self._answer([episode for episode in live if episode.finish is None])
            now, playing = time.perf_counter(), [episode for episode in live if episode.finish is None]
            self.times.add(answering=now - replied)
            for _ in range(len(live) - len(playing)):
                self.times.add(count=1, seconds=now - began)
            live = playing
            unfinished = {episode.group for episode in live}
            for group in [number for number in waiting if number not in unfinished]:
                waiting.remove(group)
                siblings = [episode for episode in episodes if episode.group == group]
                self._level(siblings)
                yield group, tuple(episode.completion() for episode in siblings)

    def _level(self, siblings: Sequence[Episode]) -> None:
        """Limit a failed episode's reward to that of the worst of its siblings, where no range is known."""
        if self.lowest is None:
            worst = min((episode.earned for episode in siblings if episode.earned <= 0), default=0.0)
            for episode in siblings:
                episode.earn_at_most(worst)

    # Starts

    def _start(self, episodes: Sequence[Episode]) -> None:
        """Start all episodes; siblings start as copies of one."""
        groups: dict[int, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        messages = [self._reset(siblings[0]) for siblings in groups.values()]
        started = self.host.start([len(siblings) for siblings in groups.values()], messages)
        for siblings, (numbers, answers) in zip(groups.values(), started, strict=True):
            for episode, number, answer in zip(siblings, numbers, answers, strict=True):
                episode.number = number
                if isinstance(answer, Failure):
                    episode.failed = self._noted("reset", answer)

    def _reset(self, episode: Episode) -> Mapping[str, Any]:
        problem = plain_problem(episode.question.problem)
        return {"do": "reset", "problem": problem, "seed": self._seed(episode.question.request.key)}

    def _seed(self, *position: int) -> int:
        """Seed of a position in the run, the same in a resumed run."""
        text = " ".join(map(str, (self.ask.seed, self.ask.step, *position)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])

    # Replies

    def _reply(self, questions: Sequence[Question], live: Sequence[Episode]) -> None:
        if any(episode.replies for episode in live):
            requests = [episode.request(self.max_turn_tokens) for episode in live]
            completions = [completion for (completion,) in gathered(self.ask(requests), len(requests))]
        else:  # all of them, and siblings share their prompt
            first = [replace(question.request, max_tokens=self.max_turn_tokens) for question in questions]
            completions = [completion for siblings in gathered(self.ask(first), len(first)) for completion in siblings]
        for episode, completion in zip(live, completions, strict=True):
            episode.reply(completion, 0.0 if self.scores else None)
            if episode.failed:
                episode.fail(episode.failed)

    # Answers

    def _answer(self, live: Sequence[Episode]) -> None:
        called = [(episode, self._calls(episode)) for episode in live]
        results: dict[int, list[tuple[Call, Answer]]] = {episode.number: [] for episode in live}
        for index, turn in enumerate(_each_in_turn(called)):  # an episode makes one call at a time
            right = [(episode, call) for episode, call in turn if not call.mistake]
            answers = iter(self.host.ask([(e.number, self._call_message(e, call, index)) for e, call in right]))
            for episode, call in turn:
                mistake = {"text": f"Error: {call.mistake}", "failed": MALFORMED}
                results[episode.number].append((call, mistake if call.mistake else next(answers)))
        for episode, calls in called:
            if calls:
                self._take_results(episode, results[episode.number])
        self._step([episode for episode, calls in called if not calls])

    def _calls(self, episode: Episode) -> list[Call]:
        """The tools that the newest reply calls."""
        if not self.tools:
            return []
        calls = self.form.calls(self._spoken(episode), self.tools)
        more = Call("", {}, f"only {MAX_CALLS} calls are made in one reply")
        return calls if len(calls) <= MAX_CALLS else [*calls[:MAX_CALLS], more]

    def _spoken(self, episode: Episode) -> str:
        """The newest reply as it was sampled, without thoughts and without the tokens that end it."""
        assert episode.last is not None
        tokens, before = list(episode.last.tokens), [*episode.question.request.prompt_tokens, *episode.tokens]
        before = before[: len(before) - len(tokens)]
        while tokens and tokens[-1] in self._special:
            tokens.pop()
        return spoken(self._text(tokens), thinking=self._text(before[-LOOK_BACK:]).rstrip().endswith(THOUGHT))

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that a model may end a reply with: a vocabulary has several."""
        added = self.ask.tokenizer.added_tokens_decoder
        return frozenset(self.ask.tokenizer.all_special_ids) | {token for token, its in added.items() if its.special}

    def _text(self, tokens: list[int]) -> str:
        text = self.ask.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _call_message(self, episode: Episode, call: Call, index: int) -> Mapping[str, Any]:
        """Message of the call with this index in its reply; each has random numbers of its own."""
        later = (index,) if index else ()
        seed = self._seed(episode.question.request.key, episode.sample, episode.replies, *later)
        return {"do": "call", "name": call.name, "arguments": dict(call.arguments), "seed": seed}

    def _step_message(self, episode: Episode) -> Mapping[str, Any]:
        assert episode.last is not None
        seed = self._seed(episode.question.request.key, episode.sample, episode.replies)
        return {"do": "step", "reply": episode.last.text, "seed": seed}

    def _take_results(self, episode: Episode, results: Sequence[tuple[Call, Answer]]) -> None:
        """Answer a reply with its tools' results or failures; a process that was killed ends an environment with it."""
        turns, was_killed = [], ""
        for call, answer in results:
            if isinstance(answer, Failure):
                was_killed = self._noted(call.name, answer)
                answer = {"text": f"Error: {answer.message}", "failed": answer.kind}
            turns.append(Turn("tool", answer["text"], 0, failed=str(answer.get("failed", ""))))
        if was_killed and self.scores:
            return episode.fail(was_killed)
        if was_killed:
            self.host.end([episode.number])
            [([episode.number], _)] = self.host.start([1], [self._reset(episode)])
        return self._continue(episode, turns)

    def _step(self, live: Sequence[Episode]) -> None:
        """Answer replies without calls: by the environment, or by the end where there is none."""
        if not self.scores:
            for episode in live:
                episode.finish = "stop"
            return
        answers = self.host.ask([(episode.number, self._step_message(episode)) for episode in live])
        for episode, answer in zip(live, answers, strict=True):
            if isinstance(answer, Failure):
                episode.fail(self._noted(f"step {episode.replies}", answer))
                continue
            if "error" in answer:
                error = Failure(plain(str(answer["error"]), 80), plain(str(answer.get("message"))), graded=True)
                episode.lose(self.lowest or 0.0, self._noted(f"step {episode.replies}", error))
                continue
            episode.earn(answer["reward"])
            if answer.get("done"):
                episode.finish = "stop"
            else:
                self._continue(episode, [Turn("user", answer["text"], 0)])

    def _continue(self, episode: Episode, turns: list[Turn]) -> None:
        if episode.replies >= self.max_turns:
            episode.finish = "length"
            return
        assert episode.last is not None
        messages, ending = [(turn.role, turn.text) for turn in turns], self.extend.ending(episode.last)
        tokens, texts = self.extend(episode.question.problem, episode.tokens[-1], messages, ending)
        episode.answer(tokens, [replace(turn, text=text) for turn, text in zip(turns, texts, strict=True)])

    def _noted(self, what: str, failure: Failure) -> str:
        """Count a failure; returns it in a line."""
        reason = f"{what}: {LABELS.get(failure.kind, failure.kind)}: {failure.message}"
        note_failure(self.name, replace(failure, message=f"{what}: {failure.message}"))
        return reason


def plain_problem(problem: Problem) -> dict[str, Any]:
    """A problem as environments get it: the data's columns, its id, prompt and answer."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
    return {**problem.data, "id": problem.id, "prompt": prompt, "answer": problem.answer}


def _each_in_turn(called: Sequence[tuple[Episode, list[Call]]]) -> Iterator[list[tuple[Episode, Call]]]:
    """The first call of each episode, then the second of each that has one, and so on."""
    for index in range(max((len(calls) for _, calls in called), default=0)):
        yield [(episode, calls[index]) for episode, calls in called if index < len(calls)]
