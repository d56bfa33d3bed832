"""Reward functions with the parameters that users of verl, verifiers and TRL write, for the tests."""

import asyncio


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = float(solution_str == ground_truth)
    return {"score": found, "acc": found} if data_source == "dict" else found + (extra_info or {})["index"]


def batch_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(said == truth) for said, truth in zip(solution_strs, ground_truths, strict=True)]


def exact(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


async def informed(completion, info, state):
    await asyncio.sleep(0)
    return len(completion[-1]["content"]) / info["length"] + (state["answer"] == "2")


def grouped(completions, answers):
    return [float(len(each)) for each in completions]


async def slow_trl(prompts, completions, log_extra, trainer_state=None, **columns):
    await asyncio.sleep(0)
    log_extra("seen", columns["kind"])
    return [None if kind == "neither" else 1.0 for kind in columns["kind"]]


def parsed(completion, parser):
    return 1.0


def mixed(completions, solution_str):
    return 1.0


def neither(text, truth):
    return 1.0


class Rubric:
    """As verifiers has it: functions, weights and objects that functions may name."""

    def __init__(self, funcs, weights):
        self.funcs, self.weights, self.class_objects = funcs, weights, {"parser": "a parser"}


rubric = Rubric([exact, parsed, grouped], [1.0, 0.5, 0.25])
