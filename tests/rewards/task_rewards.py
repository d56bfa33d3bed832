"""Reward functions that each have one kind of problem, in a module that a worker imports in no time."""


def sums(prompts, completions, kind, **columns):
    return [float(text == "2") if each == "sum" else None for text, each in zip(completions, kind, strict=True)]


def words(prompts, completions, kind, **columns):
    return [float(len(text)) if each == "word" else None for text, each in zip(completions, kind, strict=True)]


def broken(prompts, completions, **columns):
    raise RuntimeError("no score today")


def neither(prompts, completions, **columns):
    return [None] * len(completions)
