"""Functions that measure completions, as a user's file has them."""

import time


def lengths(prompts, completions, **columns):
    """Of one completion it knows nothing."""
    return [float(len(text)) if text else None for text in completions]


def of_step(completions, rewards, answer, **_):
    return {"distinct": len(set(completions)) / len(completions), "right": [reward == 1 for reward in rewards]}


def per_answer(completion, answer, **kwargs):
    """In verifiers' form, which is called for each completion."""
    return float(completion == answer)


def failing(completions, **_):
    raise KeyError("a column")


def slow(completions, **_):
    time.sleep(60)


def short(completions, **_):
    return [1.0]


def text(completions, **_):
    return {"grade": "good"}


def odd_name(completions, **_):
    return {"a/b c": 1.0}


def leaving(completions, **_):
    raise SystemExit(3)


def endless(completions, **_):
    return {str(number): number for number in range(100_000)}


def unknown(completions, **_):
    return {"nan": float("nan"), "none": None, "one": 3}


def logging(completions, log_metric, **_):
    log_metric("length", sum(map(len, completions)) / len(completions))
    log_metric("odd name!", len(completions))
    for number in (1, 3):
        log_metric("step", number)
    log_metric("text", "not a number")
    log_metric("nothing", float("nan"))
    return [0.0 for _ in completions]


def logging_alone(completions, log_metric, **_):
    log_metric("alone", len(completions[0]))
    if len(completions) > 1:
        raise ValueError("only one by one")
    return [1.0]
