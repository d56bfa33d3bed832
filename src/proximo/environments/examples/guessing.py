"""Guessing games: without its hints a policy can only guess blindly."""

import re
from typing import Any

from proximo.environments import Done, Environment, Observation


class NumberGuessing(Environment):
    """Guess the problem's answer, a number: each wrong guess is told `higher` or `lower`, or without hints `no`."""

    def __init__(self, tries: int = 3, hints: bool = True) -> None:
        self.tries, self.hints = tries, hints
        self.secret = 0

    def reset(self, problem: dict[str, Any]) -> None:
        self.secret = int(problem["answer"])

    def step(self, reply: str) -> Observation | Done:
        self.tries -= 1
        number = re.search(r"\d{1,9}", reply)
        guess = int(number[0]) if number else None
        if guess == self.secret or not self.tries:
            return Done(float(guess == self.secret))
        if guess is None:
            return Observation("Give a number.")
        hint = "higher" if guess < self.secret else "lower"
        return Observation(hint if self.hints else "no")


class WordGuessing(Environment):
    """Guess the problem's answer, a word: of each letter a wrong guess is told whether it is right, as in `+-+`;
    without hints it is told `no`."""

    def __init__(self, tries: int = 3, hints: bool = True) -> None:
        self.tries, self.hints = tries, hints
        self.secret = ""

    def reset(self, problem: dict[str, Any]) -> None:
        self.secret = str(problem["answer"])

    def step(self, reply: str) -> Observation | Done:
        self.tries -= 1
        guess = reply.strip()[: len(self.secret)]
        if guess == self.secret or not self.tries:
            return Done(float(guess == self.secret))
        letters = zip(guess.ljust(len(self.secret)), self.secret, strict=True)
        hint = "".join("+" if guessed == right else "-" for guessed, right in letters)
        return Observation(hint if self.hints else "no")
