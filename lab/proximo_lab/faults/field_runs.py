"""Runs in which each field of a config that is not the algorithm's matters, and a value that must tell."""

import json
from dataclasses import replace
from pathlib import Path

from proximo.algorithms import DAPO, DISTILL, GRPO, ONLINE_DPO, PPO, RFT, SAPO
from proximo.data.mixing import Ptx
from proximo.environments.kinds import MultiTurn
from proximo.losses import RouterBalance, SoftOverlong
from proximo.losses.pieces.advantages import GroupCentred
from proximo.losses.pieces.credit import ProcessNormalized
from proximo.models import load_model, load_tokenizer, tiny_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.reward_models import load_reward_model
from proximo.models.shipped import resolve
from proximo.models.tiny import tiny_moe
from proximo.models.values import OwnLayers, OwnModel, TrunkHead
from proximo.processes.sandbox import Limits
from proximo.rewards import ExactMatch, FormatReward, MathVerify, PythonFunction
from proximo.rl.config import AheadOptions, EvaluationOptions, ValueOptions
from proximo.rl.reward_config import RewardMix, RewardModel, WeightedRule
from proximo.rl.schedules import Constant
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import Arithmetic, Chain, Code, Countdown, Echo, File, Guessing, Gym, Sorting
from proximo_lab.faults.field_prompts import prompt_trials
from proximo_lab.faults.field_table import STRONG, Trial, algorithm_trials, lagging, lively, several
from proximo_lab.faults.runs import rows_file, small


def trials(folder: Path) -> list[Trial]:
    """All there are."""
    return [
        *algorithm_trials(),
        *_runs(folder),
        *_tasks(folder),
        *prompt_trials(folder),
        *_mixtures(folder),
        *_algorithms(folder),
    ]


def _runs(folder: Path) -> list[Trial]:
    grpo, ppo = lively(GRPO), lively(PPO, value=ValueOptions(TrunkHead()))
    dapo = replace(small(DAPO, steps=3), training=replace(STRONG, group_size=2, refill_rounds=3))
    longer = replace(small(GRPO, steps=3), training=replace(STRONG, warmup_steps=3, reset_reference_every=2))
    evaluated = small(GRPO, steps=4)
    still = replace(evaluated, training=replace(STRONG, learning_rate=1e-12), evaluation=EvaluationOptions(4, every=1))
    collapsing = replace(
        small(GRPO, steps=5), training=replace(STRONG, learning_rate=0.1), evaluation=EvaluationOptions(4, every=1)
    )
    spiky = replace(lively(GRPO), training=replace(STRONG, minibatches=3, epochs=8, skip_spikes=1.001, max_skipped=99))
    return [
        *several(grpo, "training", groups=4, group_size=3, minibatches=1, epochs=1, learning_rate=1e-5,
                  weight_decay=0.5, adam_beta1=0.5, adam_beta2=0.5, adam_epsilon=0.01, max_gradient_norm=0.01),
        *several(grpo, "training", adam_moments="8bit", learning_rate_schedule="linear"),
        Trial(grpo, "schedules", {"sampling.temperature": Constant(0.5)}),
        *several(longer, "training", warmup_steps=0, reset_reference_every=None),
        *several(dapo, "training", refill="same_prompt", refill_rounds=1, refill_tokens=1),
        *several(spiky, "training", skip_spikes=None, max_skipped=1),
        Trial(grpo, "training.freeze", ("embed",)),
        Trial(grpo, "adapter", Lora(4)),
        *several(lively(GRPO, adapter=Lora(4)), "adapter", rank=2, alpha=1, targets=("q_proj",), quantize_base="int8"),
        *several(grpo, "sampling", temperature=0.7, max_tokens=2, stop=("1",)),
        *several(lagging(), "sampler", precision="float16", lag=0),
        Trial(grpo, "ahead", AheadOptions(1)),
        Trial(replace(grpo, ahead=AheadOptions(1), steps=4), "ahead.staleness", 2),
        *several(ppo, "value", form=OwnLayers(1), learning_rate=0.1, pretrain_steps=1),
        Trial(lively(PPO, value=ValueOptions(TrunkHead())), "value.form.trains_trunk", False),
        Trial(lively(PPO, value=ValueOptions(OwnLayers(1))), "value.form.layers", 2),
        Trial(lively(PPO, value=ValueOptions(OwnModel())), "value.form.path", str(_other_model(folder))),
        *several(evaluated, "evaluation", problems=5, every=2, samples=2),
        Trial(still, "evaluation.patience", 1),
        Trial(collapsing, "stop_on", "collapse"),
        *several(evaluated, "checkpoints", every=3, keep=1),
        Trial(replace(small(GRPO, steps=6), checkpoints=replace(evaluated.checkpoints, every=6, keep=1)),
              "checkpoints.keep_best", False),
        *several(grpo, "", algorithm=SAPO, model=str(_other_model(folder)), dtype="bfloat16", steps=3, seed=4,
                  max_generated_tokens=1),
        *several(grpo, "", sampler=Mismatched("bfloat16"), sampling=replace(grpo.sampling, max_tokens=3),
                  training=replace(STRONG, epochs=1), evaluation=replace(grpo.evaluation, problems=2),
                  checkpoints=replace(grpo.checkpoints, every=2), task=Echo(held_out=4), rewards=RewardMix(task=2.0)),
        Trial(ppo, "value", ValueOptions(OwnModel())),
    ]  # fmt: skip


def _examples(folder: Path, answer: str) -> Path:
    """A file of two examples."""
    path = folder / f"examples-{answer}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": answer}) + "\n" for n in (1, 2)))
    return path


def _algorithms(folder: Path) -> list[Trial]:
    """Distillation, rejection sampling, online DPO, and the evaluation that ends a run."""
    taught = lively(DISTILL, teacher=str(_other_model(folder)))
    moved = _other_model(folder, 1.02)
    mixed = lively(GRPO, ptx=Ptx(str(_examples(folder, "5"))))
    once = replace(STRONG, minibatches=1, epochs=1)
    rft, dpo = small(RFT, training=once, steps=2), small(ONLINE_DPO, training=once, steps=2)
    short = replace(rft, sampling=replace(rft.sampling, max_tokens=2))
    evaluated = small(GRPO, steps=4, evaluation=EvaluationOptions(4, every=1, samples=2))
    return [
        Trial(taught, "teacher", str(moved)),
        *several(taught, "algorithm.advantage", coefficient=3.0, kl_discount=1.0, of=GroupCentred()),
        Trial(rft, "algorithm.keep.above", 2.0),
        Trial(short, "algorithm.keep.truncated", False),
        Trial(dpo, "algorithm.advantage.beta", 0.9),
        *several(mixed, "ptx", path=str(_examples(folder, "7")), coefficient=9.0, examples=1),
        Trial(mixed, "ptx", None),
        Trial(evaluated, "evaluation.target", 0.0),
        Trial(evaluated, "evaluation.metric", "pass_at_k"),
    ]


def _other_model(folder: Path, factor: float = 1.01) -> Path:
    """A folder with other weights of the shipped model's shape."""
    path = folder / f"other-model-{factor}"
    if not path.exists():
        model = load_model(resolve("tiny-arithmetic"))
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        model.save_pretrained(path)
        load_tokenizer(resolve("tiny-arithmetic")).save_pretrained(path)
    return path


def _tasks(folder: Path) -> list[Trial]:
    rows, programs, held = rows_file(folder), _programs(folder), 0.3
    more = folder / "more.jsonl"
    more.write_text(rows.read_text().replace('"prompt"', '"question"').replace('"answer"', '"truth"') + "{}\n")
    both = folder / "both.jsonl"
    both.write_text("".join(line[:-2] + ', "question": "1+1=", "truth": "2", "other": [1]}\n'
                            for line in rows.read_text().splitlines(keepends=True)))  # fmt: skip
    file = lively(GRPO, task=File(str(both), held_out=held))
    rule = f"{Path(__file__).with_name('gentle_reward.py')}"
    function = lively(GRPO, task=File(str(rows), held_out=held, reward=PythonFunction(f"{rule}:first")))
    overlong = replace(GRPO, shape=SoftOverlong(limit=4, cache=3))
    declared = PythonFunction(f"{rule}:first", reward_range=(0.0, 1.0))
    penalised = lively(overlong, task=File(str(rows), held_out=held, reward=declared))
    form = lively(GRPO, task=File(str(rows), held_out=held, reward=FormatReward("[0-4]+")))
    chain = {"model": "tiny-chain", "task": Chain(steps=(2, 4), held_out=8), "sampling": SamplingOptions(max_tokens=32)}
    process = replace(lively(GRPO, **chain), algorithm=replace(GRPO, advantage=ProcessNormalized()))
    code = lively(GRPO, task=Code(str(programs), held_out=0.5, limits=Limits(seconds=5.0), workers=1))
    return [
        *several(small(GRPO, steps=1), "task", operations=("-",), digits=1, terms=3, held_out=9, chat=True),
        Trial(small(GRPO, steps=1, model="tiny-length", task=Arithmetic(held_out=8, working=True),
                    sampling=SamplingOptions(max_tokens=64)), "task.working", False),
        *several(small(GRPO, steps=1, model="tiny-chain", task=Chain(held_out=8)), "task", steps=(1, 2), held_out=9),
        *several(process, "algorithm.advantage", ddof=0, epsilon=1.0),
        *several(small(GRPO, steps=1, task=Countdown(held_out=8)), "task", numbers=4, largest=9, highest_target=20,
                  held_out=9),
        *several(small(GRPO, steps=1, task=Echo(held_out=8)), "task", length=2, alphabet="stuvwxyz", held_out=9),
        *several(small(GRPO, steps=1, task=Sorting(held_out=8)), "task", length=3, alphabet="mnopqrstuvwx",
                  held_out=9),
        *several(small(GRPO, steps=1, task=Gym("chain_sum", held_out=8)), "task", name="basic_arithmetic",
                  config={"min_terms": 3, "max_terms": 3}, held_out=9),
        *several(file, "task", path=str(rows), prompt_column="question", answer_columns=("truth",), held_out=0.6,
                  reward=FormatReward("[0-4]+")),
        Trial(lively(GRPO, task=File(str(more), "question", ("truth",), held_out=held)), "task.skip_bad", True),
        Trial(lively(GRPO, task=File(str(_chatty(folder)), held_out=held)), "task.reward.last_number", True),
        Trial(form, "task.reward.pattern", "[5-9]+"),
        Trial(function, "task.reward.path", f"{rule}:second"),
        Trial(penalised, "task.reward.reward_range", (0.0, 10.0)),
        *several(code, "task", path=str(_programs(folder, "y")), prompt_column="again", tests_column="more",
                  held_out=0.25),
        Trial(lively(GRPO, task=Code(str(_bad_programs(folder)), held_out=0.5, workers=1)), "task.skip_bad", True),
        Trial(form, "task.reward", MathVerify()),
        *_turns(),
    ]  # fmt: skip


def _turns() -> list[Trial]:
    """Trials of environments and tools."""
    guess = small(GRPO, steps=1, model="tiny-agent", task=Guessing(held_out=8), sampling=SamplingOptions(max_tokens=32))
    played = replace(guess, environment=MultiTurn("proximo.environments.examples:NumberGuessing", max_turn_tokens=4))
    return [
        *several(guess, "task", secret="word", held_out=9),
        Trial(guess, "environment", played.environment),
        *several(played, "environment", path="proximo.environments.examples:WordGuessing", arguments={"tries": 1},
                  tools=("proximo.environments.examples:calculate",), max_turns=1, max_turn_tokens=1,
                  max_answer_tokens=1),
        Trial(replace(played, algorithm=replace(GRPO, shape=SoftOverlong(limit=4, cache=3))),
              "environment.reward_range", (0.0, 10.0)),
    ]  # fmt: skip


def _chatty(folder: Path) -> Path:
    """Answers with words around them, which only the last number of is right."""
    path = folder / "chatty.jsonl"
    path.write_text(rows_file(folder).read_text().replace('"answer": "', '"answer": "it is '))
    return path


def _programs(folder: Path, name: str = "x") -> Path:
    path = folder / f"programs-{name}.jsonl"
    tests = [{"input": "1", "output": "1"}]
    rows = [
        {"prompt": f"print {name}{number}", "again": f"say {number}", "tests": tests, "more": tests * 2}
        for number in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _bad_programs(folder: Path) -> Path:
    path = folder / "bad-programs.jsonl"
    path.write_text(_programs(folder).read_text() + '{"prompt": "x"}\n')
    return path


def _mixtures(folder: Path) -> list[Trial]:
    """Rewards that are added up, and a mixture of experts."""
    judges = [folder / f"judge-{seed}" for seed in (1, 2)]
    for seed, judge in enumerate(judges):
        load_reward_model(str(_other_model(folder)), seed=seed).save_pretrained(judge)
        tiny_tokenizer().save_pretrained(judge)
    tiny_moe(hidden=32, layers=2, seed=3).save_pretrained(folder / "moe")
    tiny_tokenizer().save_pretrained(folder / "moe")
    rule = WeightedRule(FormatReward("[0-4]+"), 0.5)
    mixed = lively(GRPO, rewards=RewardMix(models=(RewardModel(str(judges[0])),), rules=(rule,)))
    moe = lively(replace(GRPO, extra=RouterBalance(0.1)), model=str(folder / "moe"), routing_replay="old_policy")
    moe = replace(moe, task=File(str(rows_file(folder)), held_out=0.3, reward=FormatReward("[a-z0-9]+.*")))
    noisy = replace(moe, sampler=Mismatched(router_noise=0.5))
    broken = File(str(rows_file(folder)), held_out=0.3, reward=PythonFunction(_gentle("breaks")))
    unscored = small(GRPO, steps=5, task=broken, rewards=RewardMix(max_unscored=0.01))
    return [
        *several(mixed, "rewards", task=3.0, models=(), rules=()),
        *several(mixed, "rewards.models.0", path=str(judges[1]), weight=4.0, mean=1.5, deviation=3.0),
        *several(mixed, "rewards.rules.0", reward=ExactMatch(), weight=3.0),
        Trial(unscored, "rewards.max_unscored", 1.0),
        Trial(moe, "algorithm.extra.coefficient", 5.0),
        *several(moe, "", routing_replay=None),
        Trial(noisy, "sampler.router_noise", 0.0),
    ]


def _gentle(name: str) -> str:
    return f"{Path(__file__).with_name('gentle_reward.py')}:{name}"
