"""Reward functions for runs that are compared with each other; read by a worker from this file."""


def first(completions, **_):
    return [float(text[:1] in "1357") for text in completions]


def second(completions, **_):
    return [float(text[:1] in "2468") for text in completions]


def breaks(completions, prompts, **_):
    """Fail for about a third of all completions, decided by what they say."""
    return [None if sum(map(ord, text)) % 3 == 0 else float(len(text) % 2) for text in completions]
