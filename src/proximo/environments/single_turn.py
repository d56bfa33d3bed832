"""The environment of a plain question."""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.environments.protocol import Ask, Question
from proximo.samplers.sampler import Stream


@dataclass(frozen=True)
class SingleTurn:
    """One question, one answer: each prompt is completed once per sample."""

    def play(self, questions: Sequence[Question], ask: Ask) -> Stream:
        return ask.growing([question.request for question in questions])
