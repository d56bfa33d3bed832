"""Published measurements, and what the simulation says of the same setups, with the error of every row.

Two constants are fitted to two of verl's rows (the rollout on 128 H20, and 32:32), and the seconds of collecting are
the mean of four others. None of the four rows of its table of staleness enters a fit. What was not published and had
to be assumed stands in the remark of a table.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proximo.planning.cards import card
from proximo.planning.roofline import training
from proximo.planning.times import reached_arithmetic
from proximo_lab.cluster_plan.hardware import Engine
from proximo_lab.cluster_plan.lengths import Tailed
from proximo_lab.cluster_plan.pool import Engines
from proximo_lab.cluster_plan.rules import Rule, aggregate, in_flight
from proximo_lab.cluster_plan.simulate import Learner, Work, groups_needed, simulate

STEPS, FIRST = 14, 6


@dataclass(frozen=True)
class Model:
    """A published model, by its sizes."""

    parameters: int
    layers: int
    hidden: int
    matrices: int
    body: int
    head: int
    query_width: int
    kv_numbers: int
    """Numbers of one token's keys and values in all layers."""

    def kv_bytes(self, width: int) -> int:
        return self.kv_numbers * width


def dense(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool) -> Model:
    """A decoder with heads of 128."""
    matrices = layers * (hidden * (2 * heads + 2 * kv_heads) * 128 + 3 * hidden * inner)
    head = vocabulary * hidden
    parameters, keys = matrices + head * (1 if tied else 2), 2 * layers * kv_heads * 128
    return Model(parameters, layers, hidden, matrices, matrices, head, heads * 128, keys)


def qwen_7b() -> Model:
    """Qwen2.5-7B, also its Math and R1-Distill versions."""
    return dense(28, 3584, 18944, 28, 4, 152064, tied=False)


def qwen_1500m() -> Model:
    return dense(28, 1536, 8960, 12, 2, 151936, tied=False)


def qwen3_4b() -> Model:
    return dense(36, 2560, 9728, 32, 8, 151936, tied=True)


DEEPSEEK = Model(671_000_000_000, 61, 7168, 669_000_000_000, 36_000_000_000, 129280 * 7168, 128 * 192, 61 * 576)
"""DeepSeek-V3: 37 B active, head included; keys are compressed to 576 numbers in each layer."""


@dataclass(frozen=True)
class Row:
    """A published number, and what is predicted."""

    what: str
    published: float
    predicted: float
    fitted: bool = False
    """True if a constant was fitted to it."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Comparison:
    """A table of a source."""

    title: str
    source: str
    unit: str
    rows: tuple[Row, ...]
    remark: str


def comparisons() -> tuple[Comparison, ...]:
    return verl_staleness(), verl_others(), areal(), verl_671b(), prime_rl()


# verl, 7B on H20

VERL = "verl, docs/advance/fully_async.md (commit 1dda039)"
VERL_LENGTHS = Tailed(mean=1600, max_tokens=28 * 1024)
"""The mean is fitted to the 32:32 row; the tail is this project's usual one."""
VERL_PROMPT, VERL_GROUPS, VERL_GROUP_SIZE, VERL_ENGINE = 150, 512, 16, 4
"""Tokens of a prompt are assumed; an engine has 4 GPUs (gen_tp in verl's script of the 64:64 run)."""
COLLECTING = 25.1
"""Seconds of a step that verl's trainer waits although its groups are there: the mean of the `gen` column in the rows
outside the table of staleness in which training is the limit: 21.26 (16:16), 22.06 (30B), 30.88 and 26.32
(require_batches 1 and 2)."""
OTHER = 4.0
"""Seconds that are in no column: step - gen - update_actor, in each row of the table of staleness."""
PUSH_7B = 0.12
"""Seconds of a push of 7B, as published."""


def verl_step(gpus: int, staleness: float, update: float, chunks: int = 4) -> float:
    """Seconds of a step with as many GPUs for sampling; the seconds of training are given."""
    engines = Engine(qwen_7b(), 2, card("H20"), VERL_ENGINE).engines(gpus // VERL_ENGINE, slots=1024)
    work = Work(VERL_GROUPS, VERL_GROUP_SIZE, VERL_PROMPT, push=PUSH_7B)
    learner = Learner(update + OTHER + COLLECTING, chunks=chunks)
    return _seconds(engines, learner, work, aggregate(staleness), VERL_LENGTHS)


def verl_rollout(gpus: int) -> float:
    """Seconds until all completions of a step have ended."""
    engines = Engine(qwen_7b(), 2, card("H20"), VERL_ENGINE).engines(gpus // VERL_ENGINE, slots=1024)
    work = Work(VERL_GROUPS, VERL_GROUP_SIZE, VERL_PROMPT)
    return _seconds(engines, Learner(0.0), work, in_flight(0), VERL_LENGTHS)


def verl_staleness() -> Comparison:
    rows = ((0.0, 231.34, 98.77), (0.1, 171.30, 109.12), (0.3, 146.11, 103.22), (0.5, 150.63, 113.16))
    return Comparison(
        "verl, Qwen2.5-Math-7B on 64:64 H20, staleness",
        f"{VERL}, 128-card Stale Ablation Experiment",
        "seconds a step",
        tuple(Row(f"θ {theta:g}", step, verl_step(64, theta, update)) for theta, step, update in rows),
        "Seconds of training are given (`update_actor`), so this is a test of waiting against staleness. "
        "Constants are fitted to other rows; these four were in view while that was done.",
    )


def verl_others() -> Comparison:
    rows = [
        Row("rollout on 128 GPUs, colocated", 177.85, verl_rollout(128), fitted=True),
        Row("rollout on 64 GPUs, colocated", 150.72, verl_rollout(64)),
        Row("rollout on 32 GPUs, colocated", 357.41, verl_rollout(32)),
        Row("32:32, θ 0.5", 189.26, verl_step(32, 0.5, 156.98), fitted=True),
        Row("16:16, θ 0.5", 294.77, verl_step(16, 0.5, 313.81), fitted=True),
        Row("64:64, θ 0.5, require_batches 1", 203.47, verl_step(64, 0.5, 181.08, chunks=16), fitted=True),
        Row("64:64, θ 0.5, require_batches 2", 158.72, verl_step(64, 0.5, 128.08, chunks=8), fitted=True),
        Row("64:64, θ 0.5, require_batches 4", 124.64, verl_step(64, 0.5, 95.06)),
    ]
    return Comparison(
        "verl, Qwen2.5-Math-7B on H20, other rows",
        f"{VERL}, Asynchronous Training on 7B Model and require_batches Ablation",
        "seconds",
        tuple(rows),
        "The published rows contradict each other: 64 GPUs sample faster than 128, 32 need more than twice as long as "
        "64, and the step of 16:16 is shorter than its own training. The last row is the setup of θ 0.5 above, which "
        "took 151 s there.",
    )


# AReaL, R1-Distill-Qwen on H800

AREAL_LENGTHS = Tailed(mean=7700, max_tokens=27 * 1024)
"""Lengths of which about 5 % are cut, if log-normal with this mean; fewer than 5 % were."""


def areal_speedup(model: Model, gpus: int, staleness: int) -> float:
    """Speed-up of a step with a quarter of the GPUs as learner, against all for both in turn."""
    h800, work = card("H800"), Work(512, 16, 200)
    engine = Engine(model, 2, h800, 1)
    slots = engine.slots(work.prompt_tokens + AREAL_LENGTHS.mean, AREAL_LENGTHS.max_tokens)
    together = Learner(0.0, _token_seconds(model, "H800", AREAL_LENGTHS.mean) / gpus)
    apart = Learner(0.0, together.per_token * 4)
    synchronous = _seconds(engine.engines(gpus, slots), together, work, in_flight(0), AREAL_LENGTHS)
    rule = aggregate(staleness)
    return synchronous / _seconds(engine.engines(gpus * 3 // 4, slots), apart, work, rule, AREAL_LENGTHS)


def areal() -> Comparison:
    return Comparison(
        "AReaL, R1-Distill-Qwen on H800, asynchronous against synchronous",
        "AReaL, blog/AReaL_v0_3.md (commit 4aef98d), Table 2: hours of 1,000 steps",
        "times faster",
        (
            Row("1.5B on 128 GPUs: 41.0 h against 14.8 h", 41.0 / 14.8, areal_speedup(qwen_1500m(), 128, 4)),
            Row("7B on 192 GPUs: 57.7 h against 25.4 h", 57.7 / 25.4, areal_speedup(qwen_7b(), 192, 4)),
        ),
        "Groups, completions and their limit are those of blog/AReaL_v0_2.md (512 × 16, 27k, below 5 % cut). Lengths, "
        "the split (3:1), one GPU an engine and η = 4 are assumed: they are not given with the hours.",
    )


# verl, DeepSeek 671B on 96 H20


def verl_671b() -> Comparison:
    h20, lengths, work = card("H20"), Tailed(mean=1960, max_tokens=8192), Work(96, 8, 200)
    engines = Engine(DEEPSEEK, 2, h20, 32).engines(3, slots=256)
    rollout = _seconds(engines, Learner(0.0), work, in_flight(0), lengths)
    tokens = work.groups * work.group_size * (lengths.mean + work.prompt_tokens)
    passes = (6 + 2 + 2) * 37e9 * tokens / (96 * h20.arithmetic * 0.19)  # training, old policy and reference
    return Comparison(
        "verl, DeepSeek 671B on 96 H20, colocated",
        "verl, docs/perf/dpsk.md (commit 1dda039), Benchmark; sizes from run_deepseek_v3_671b_megatron.sh",
        "seconds",
        (Row("rollout", 1050, rollout), Row("step", 1700, rollout + passes)),
        "96 × 8 completions of 1,960 tokens on average, engines of 32 GPUs over four nodes, training at the published "
        "share of arithmetic (0.19). The published run sampled without captured graphs, kept the optimizer on the host "
        "and moved all weights between the two engines; none of that is in the model, which is why it is far off.",
    )


# prime-rl, training


def prime_rl() -> Comparison:
    rows = (
        ("Qwen3-4B, 8 H200, 65,536 tokens", "H200", 65536, 17.75),
        ("Qwen3-4B, 8 H100, 65,536 tokens", "H100", 65536, 18.10),
        ("Qwen3-4B, 8 H200, 16,384 tokens", "H200", 16384, 4.78),
        ("Qwen3-4B, 8 H100, 16,384 tokens", "H100", 16384, 5.04),
    )
    return Comparison(
        "prime-rl, Qwen3-4B, a micro-batch with all layers run again",
        "prime-rl, benchmarks/results/BENCHMARKS.md (commit 559b447), RL Full",
        "seconds",
        tuple(
            Row(what, seconds, tokens * _token_seconds(qwen3_4b(), name, tokens, forwards=1))
            for what, name, tokens, seconds in rows
        ),
        "Held against the learner's arithmetic alone: traffic and the optimizer, which is on the host there by "
        "default, are left out. Seconds of whole steps are published for GLM-5 and INTELLECT-3 too, but not the "
        "lengths behind them: these are not compared.",
    )


def _token_seconds(model: Model, name: str, length: float, forwards: int = 1) -> float:
    """Seconds in which one GPU trains a token of a sequence of this length; `forwards` more passes without gradient."""
    gpu = card(name)
    work = training(1, 0, [int(length)])
    operations = work.hardware_operations(model)
    operations += forwards * (2 * model.body * work.tokens + 4 * model.layers * model.query_width * work.attended)
    return operations / int(length) / reached_arithmetic(model.hidden, gpu)


def _seconds(engines: Engines, learner: Learner, work: Work, rule: Rule, lengths: Tailed) -> float:
    drawn: np.ndarray = lengths.draw(groups_needed(work, rule, STEPS), work.group_size, seed=0)
    return simulate(engines, learner, work, rule, drawn, steps=STEPS, first=FIRST).seconds


# The page

BEGIN, END = "<!-- tables: python -m proximo_lab.cluster_plan.published docs/scale-simulation.md -->", "<!-- end -->"


def tables(comparisons_made: Sequence[Comparison]) -> str:
    """All comparisons as Markdown."""
    parts = []
    for comparison in comparisons_made:
        lines = [f"### {comparison.title}", "", f"Source: {comparison.source}. {comparison.remark}", ""]
        lines += [f"| {comparison.unit} | published | predicted | error | |", "|---|---|---|---|---|"]
        for row in comparison.rows:
            fitted = "fitted" if row.fitted else ""
            lines.append(f"| {row.what} | {row.published:.4g} | {row.predicted:.4g} | {row.error:+.1%} | {fitted} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write(page: Path) -> None:
    """Put the tables into a page, between the lines that mark them."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{tables(comparisons())}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
