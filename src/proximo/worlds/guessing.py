"""Guessing games: without its hints a policy can only guess blindly."""

import re
from typing import Any

from proximo.acting import Done, Environment, Observation


class NumberGuessing(Environment):
    """Guess the problem's answer, a number: each wrong guess is told `higher` or `lower`."""

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries
        self.secret = 0

    def reset(self, problem: dict[str, Any]) -> None:
        self.secret = int(problem["answer"])

    def step(self, reply: str) -> Observation | Done:
        self.tries -= 1
        found = re.search(r"\d{1,9}", reply)
        guess = int(found[0]) if found else None
        if guess == self.secret or not self.tries:
            return Done(float(guess == self.secret))
        if guess is None:
            return Observation("Give a number.")
        return Observation("higher" if guess < self.secret else "lower")


class WordGuessing(Environment):
    """Guess the problem's answer, a word: of each letter a wrong guess is told whether it is right, as in `+-+`."""

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries
        self.secret = ""

    def reset(self, problem: dict[str, Any]) -> None:
        self.secret = str(problem["answer"])

    def step(self, reply: str) -> Observation | Done:
        self.tries -= 1
        guess = reply.strip()[: len(self.secret)]
        if guess == self.secret or not self.tries:
            return Done(float(guess == self.secret))
        letters = zip(guess.ljust(len(self.secret)), self.secret, strict=True)
        return Observation("".join("+" if said == right else "-" for said, right in letters))
