"""Reward functions with the parameters that users of verl, verifiers and TRL write, for the tests."""

import asyncio
import re


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


# verl's earlier convention, as TinyZero has it: prompt and answer in one text


def extract(solution_str):
    """Behind the first "Assistant:"."""
    if "Assistant:" in solution_str:
        solution_str = solution_str.split("Assistant:", 1)[1]
    elif "<|im_start|>assistant" in solution_str:
        solution_str = solution_str.split("<|im_start|>assistant", 1)[1]
    else:
        return None
    found = list(re.finditer(r"<answer>(.*?)</answer>", solution_str))
    return found[-1].group(1).strip() if found else None


def countdown_score(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    said = extract(solution_str)
    if said is None:
        return 0
    return score if said == str(ground_truth["target"]) else format_score


HEADER = r"<\|im_start\|>assistant\n(.*)"


def chosen_score(data_source, solution_str, ground_truth, extra_info=None):
    """Chooses a function by the data source, as verl's main_ppo did."""
    return countdown_score(solution_str, ground_truth) if data_source == "countdown" else patterned(solution_str)


def patterned(solution_str):
    found = re.search(HEADER, solution_str, re.DOTALL)
    return float(found is not None and "1+1" not in found.group(1))


def polite_score(solution_str, ground_truth):
    """Gets the answer alone, and wants no conversation in it."""
    return 0.0 if "Assistant:" in solution_str else float(solution_str.split()[-1] == str(ground_truth))


def wholes_score(solution_strs, ground_truths):
    return [
        float(each.rpartition("Assistant:")[2] == truth)
        for each, truth in zip(solution_strs, ground_truths, strict=True)
    ]
