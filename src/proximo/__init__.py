"""Proximo trains language models by reinforcement learning; each algorithm is one value.

    import proximo

    run = proximo.train("path/to/model", data="problems.jsonl", run="runs/mine")   # the same call again resumes
    run.metrics(); run.rollouts(step=12); run.plot("outcome"); run.model, run.tokenizer
    run = proximo.open_run("runs/mine")                     # running, killed or finished

Train
    train(model, run, data=...) reinforcement learning; rewards=[f], steps=N, on_step=f(step, metrics). What else a run
                                needs is chosen for model and data, and said
    train(config, run)          the same from a whole config
    sft(data, run)              fine-tune on completions
    reward_model(data, run)     a model that scores, from ranked completions
    dpo(data, run)              learn from ranked completions directly
    fork(run, at=N, ...)        continue a run from a checkpoint with something changed, in a folder of its own
    merge(adapter, out)         write the whole model of a LoRA adapter
    export(run, to, out)        write a model for other programs: folder, adapter, GGUF or the hub
    compare(configs, run=...)   configs times seeds on equal terms, and which differences are more than noise; or a run
                                and its forks, from where they part

Plan
    plan(config, gpu)           memory and seconds of a step on a GPU, predicted before any weights; what would fit

Look
    open_run(path)              metrics, rollouts, events, findings, charts and the lens of a run
    evaluate(model, task)       held-out accuracy with its interval
    track(run, to)              send a run to wandb, trackio, tensorboard or mlflow

Configs
    RunConfig                   a run; TrainingOptions, SamplingOptions, EvaluationOptions, CheckpointOptions,
                                ValueOptions, Lora, RewardMix, RewardModel and WeightedRule are its parts
    SftConfig, DpoConfig, RewardModelConfig, DataFile, FitOptions
    presets                     configs that are known to work: presets.ARITHMETIC, presets.FIVE, with_algorithm
    tasks, rewards              where problems come from, and how answers are judged
    config_for(model, data=...) the config that train chooses for a model and data, to look at or to change
    linear, cosine, constant, piecewise   schedules of numbers that change while training: train(schedules={...})
    task_of(data)               the task of a file, a hub id, a Dataset or a list of dictionaries

Algorithms and the maths
    PPO, GRPO, DAPO, GSPO, SAPO values of Algorithm; dataclasses.replace makes a new one
    policy_loss, advantages     an algorithm's loss and advantages on your own tensors

Importing proximo is light: torch and all else load with the first name that needs them. Each function has an example
in its own help, and docs/guides/python.md goes through them.
"""

import importlib as _importlib
import typing as _typing

from proximo.system.version import __version__

if _typing.TYPE_CHECKING:
    from proximo import rewards, tasks
    from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm, UnusualChoice
    from proximo.api.comparing import compare
    from proximo.api.evaluate import evaluate
    from proximo.api.export.export import Exported, export
    from proximo.api.export.merging import Merged, merge
    from proximo.api.forking import fork
    from proximo.api.planning import plan
    from proximo.api.run import OpenedRun, TrainedRun, open_run
    from proximo.api.stages import dpo, reward_model, sft
    from proximo.api.training import config_for, task_of, train
    from proximo.data import DataFile
    from proximo.environments import Done, Environment, Observation
    from proximo.environments.kinds import MultiTurn
    from proximo.losses.advantage_inputs import advantages
    from proximo.losses.objective import policy_loss
    from proximo.models.adapters.lora import Lora
    from proximo.recipes import presets
    from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
    from proximo.rl.result import RunResult
    from proximo.rl.reward_config import RewardMix, RewardModel, WeightedRule
    from proximo.rl.schedules import constant, cosine, linear, piecewise
    from proximo.runs.options import CheckpointOptions
    from proximo.runs.records import Evaluation
    from proximo.runs.tracking.sending import Sent, track
    from proximo.samplers.sampler import SamplingOptions
    from proximo.supervised.dpo import DpoConfig
    from proximo.supervised.fitting import FitOptions, Fitted
    from proximo.supervised.reward_model import RewardModelConfig
    from proximo.supervised.sft import SftConfig
    from proximo.types.batches import Stats

__all__ = [
    "DAPO",
    "GRPO",
    "GSPO",
    "PPO",
    "SAPO",
    "Algorithm",
    "CheckpointOptions",
    "DataFile",
    "Done",
    "DpoConfig",
    "Environment",
    "Evaluation",
    "EvaluationOptions",
    "Exported",
    "FitOptions",
    "Fitted",
    "Lora",
    "Merged",
    "MultiTurn",
    "Observation",
    "OpenedRun",
    "RewardMix",
    "RewardModel",
    "RewardModelConfig",
    "RunConfig",
    "RunResult",
    "SamplingOptions",
    "Sent",
    "SftConfig",
    "Stats",
    "TrainedRun",
    "TrainingOptions",
    "UnusualChoice",
    "ValueOptions",
    "WeightedRule",
    "__version__",
    "advantages",
    "compare",
    "config_for",
    "constant",
    "cosine",
    "dpo",
    "evaluate",
    "export",
    "fork",
    "linear",
    "merge",
    "open_run",
    "piecewise",
    "plan",
    "policy_loss",
    "presets",
    "reward_model",
    "rewards",
    "sft",
    "task_of",
    "tasks",
    "track",
    "train",
]

_ROOMS = {"presets": "recipes.presets", "rewards": "rewards", "tasks": "tasks"}
"""Modules that are names of the package themselves."""

_WHERE = {
    "algorithms": (
        "DAPO",
        "GRPO",
        "GSPO",
        "PPO",
        "SAPO",
        "Algorithm",
        "UnusualChoice",
    ),
    "api.comparing": ("compare",),
    "api.evaluate": ("evaluate",),
    "api.export.export": (
        "Exported",
        "export",
    ),
    "api.export.merging": (
        "Merged",
        "merge",
    ),
    "api.forking": ("fork",),
    "api.planning": ("plan",),
    "api.run": (
        "OpenedRun",
        "TrainedRun",
        "open_run",
    ),
    "api.stages": (
        "dpo",
        "reward_model",
        "sft",
    ),
    "api.training": (
        "config_for",
        "task_of",
        "train",
    ),
    "data": ("DataFile",),
    "environments": (
        "Done",
        "Environment",
        "Observation",
    ),
    "environments.kinds": ("MultiTurn",),
    "losses.advantage_inputs": ("advantages",),
    "losses.objective": ("policy_loss",),
    "models.adapters.lora": ("Lora",),
    "rl.config": (
        "EvaluationOptions",
        "RunConfig",
        "TrainingOptions",
        "ValueOptions",
    ),
    "rl.result": ("RunResult",),
    "rl.reward_config": (
        "RewardMix",
        "RewardModel",
        "WeightedRule",
    ),
    "rl.schedules": (
        "constant",
        "cosine",
        "linear",
        "piecewise",
    ),
    "runs.options": ("CheckpointOptions",),
    "runs.records": ("Evaluation",),
    "runs.tracking.sending": (
        "Sent",
        "track",
    ),
    "samplers.sampler": ("SamplingOptions",),
    "supervised.dpo": ("DpoConfig",),
    "supervised.fitting": (
        "FitOptions",
        "Fitted",
    ),
    "supervised.reward_model": ("RewardModelConfig",),
    "supervised.sft": ("SftConfig",),
    "types.batches": ("Stats",),
}


def __getattr__(name: str) -> "_typing.Any":
    """Names are imported when they are first asked for: torch takes seconds, and help needs none of it."""
    if name in _ROOMS:
        return _importlib.import_module(f"proximo.{_ROOMS[name]}")
    module = next((module for module, names in _WHERE.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"proximo.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
