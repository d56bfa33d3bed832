"""Data with a known true reward: demonstrations with sorting mistakes, and rankings by the reward plus noise."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random

from proximo.data import stable_hash
from proximo.models import load_model, load_tokenizer, pick_device, pick_dtype, problem_tokens
from proximo.models.shipped import resolve
from proximo.recipes.pipeline.config import DEMONSTRATIONS, RANKINGS, SFT, PipelineConfig
from proximo.rl.build import MAX_SLOTS
from proximo.samplers.embedded import local_sampler
from proximo.system.folders import write_file
from proximo.tasks import Sorting
from proximo.types import Completion, Problem, Request


def write_demonstrations(config: PipelineConfig, folder: Path) -> None:
    problems = (config.task.problem(index, "train", config.seed) for index in range(config.demonstrations.count))
    _write(
        folder / DEMONSTRATIONS,
        (
            {"prompt": problem.prompt, "completion": carelessly_sorted(problem, config, number)}
            for number, problem in enumerate(problems)
        ),
    )


def carelessly_sorted(problem: Problem, config: PipelineConfig, number: int) -> str:
    """The problem's letters, sorted by noisy positions in the alphabet."""
    random = Random(stable_hash("demonstration", config.seed, number))
    places = {
        letter: config.task.alphabet.index(letter) + random.gauss(0, config.demonstrations.spread)
        for letter in str(problem.answer)
    }
    return "".join(sorted(places, key=lambda letter: places[letter]))


@dataclass(frozen=True)
class Ranked:
    """Counts of the ranked completions, and how well the rankings agree with the true reward."""

    rankings: int
    generated_tokens: int
    agreement: float
    """Share of pairs ranked in the order of their true rewards; pairs of equal true reward are not counted."""


def write_rankings(config: PipelineConfig, folder: Path) -> Ranked:
    """Sample from the fine-tuned model on further prompts, and rank the completions."""
    options, count = config.rankings, config.demonstrations.count
    problems = [config.task.problem(count + index, "train", config.seed) for index in range(options.prompts)]
    path = resolve(str(folder / SFT))
    tokenizer = load_tokenizer(path)
    device = pick_device(config.device)
    model = load_model(path, device=device, dtype=pick_dtype("auto", device))
    sampler = local_sampler(model, tokenizer, slots=MAX_SLOTS)
    requests = [
        Request(number, problem_tokens(tokenizer, problem), options.samples) for number, problem in enumerate(problems)
    ]
    answers = sampler.sample(requests, config.sampling, seed=config.seed, step=0)
    ranked = list(rankings(problems, answers, config))
    if not ranked:
        raise ValueError(
            "rankings: no prompt has two different completions that end; raise rankings.samples or sft.epochs"
        )
    _write(
        folder / RANKINGS,
        ({"prompt": problem.prompt, "ranking": [text for text, _ in ranking]} for problem, ranking in ranked),
    )
    return Ranked(
        rankings=len(ranked),
        generated_tokens=sum(completion.num_sampled for siblings in answers for completion in siblings),
        agreement=agreement([true for _, true in ranking] for _, ranking in ranked),
    )


def rankings(
    problems: Sequence[Problem], answers: Sequence[tuple[Completion, ...]], config: PipelineConfig
) -> Iterator[tuple[Problem, list[tuple[str, float]]]]:
    """Texts with their true rewards, the preferred first; truncated and empty completions are left out."""
    for problem, siblings in zip(problems, answers, strict=True):
        texts = dict.fromkeys(each.text for each in siblings if each.finish == "stop" and each.text.strip())
        true = {text: true_reward(config.task, problem, text) for text in texts}
        random = Random(stable_hash("ranking", config.seed, problem.id))
        # Gumbel noise: of any two, the better wins with Bradley-Terry odds, e^(difference / noise).
        seen = {text: reward + config.rankings.noise * _gumbel(random) for text, reward in true.items()}
        if len(seen) > 1:
            yield problem, [(text, true[text]) for text in sorted(seen, key=lambda text: -seen[text])]


def true_reward(task: Sorting, problem: Problem, text: str) -> float:
    [grade] = task.grade([problem], [Completion(tokens=(), logprobs=(), text=text, finish="stop")])
    return grade.outcome


def _gumbel(random: Random) -> float:
    return -math.log(random.expovariate(1.0))


def agreement(rewards: Iterable[Sequence[float]]) -> float:
    """The share of pairs whose true rewards are in ranked order; NaN if none differ."""
    pairs = [pair for ranking in rewards for pair in combinations(ranking, 2) if pair[0] != pair[1]]
    return sum(better > worse for better, worse in pairs) / len(pairs) if pairs else math.nan


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
