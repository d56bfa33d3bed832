"""`proximo.train`: reinforcement learning from a config, or from a model and data, into a run folder."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Unpack

from proximo.algorithms import Algorithm, explain
from proximo.api.banners import Opening, planned, run_banner
from proximo.api.endings import run_ending
from proximo.api.folders import PathLike, attempted, folder_for, suit_session
from proximo.api.messages import Say, keep_quiet, say
from proximo.api.progress import Log, ObservedProgress, OnStep, Silent, progress_here
from proximo.api.rehearsing import DryTrain, tell_lines
from proximo.api.rewards import Rewards, is_scored, with_rewards
from proximo.api.run import TrainedRun, algorithm_of
from proximo.api.settings import Settings, as_lora, measured, refuse_unknown, scheduled, with_settings
from proximo.api.threads import as_found, on_processes, on_ranks
from proximo.api.validate import refuse_kind, refuse_values
from proximo.config import toml
from proximo.config.vocabulary import field_of
from proximo.data.given import KEPT, paths_of
from proximo.environments.given import Tool, given_environment
from proximo.environments.kinds import EnvironmentOptions
from proximo.models import load_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.compiling import compiles
from proximo.models.shipped import resolve
from proximo.recipes.defaults import START, Default, as_begun, defaults_for, kept, listed, traits_of, with_defaults
from proximo.recipes.presets import ARITHMETIC, with_algorithm, with_values
from proximo.rewards import ExactMatch
from proximo.rewards.metrics import Given
from proximo.rl import train as loop
from proximo.rl.config import RunConfig, steps_of
from proximo.rl.plugin_errors import name_user_code
from proximo.rl.preflight.calibration import Calibration
from proximo.rl.preflight.preflight import Preflight, preflight
from proximo.rl.preflight.prompts import check_prompts
from proximo.rl.progress import Progress
from proximo.rl.result import RunResult, refuse_fewer_steps
from proximo.rl.run import Run
from proximo.rl.schedules import Changing
from proximo.runs.checkpoints import step_of
from proximo.runs.notifying import notified
from proximo.runs.session import RunSession
from proximo.runs.tracking.processes import tracked
from proximo.runs.tracking.trackers import check_names
from proximo.runs.webhook import Webhook, webhook_at
from proximo.system.opening import read_text
from proximo.system.slow_work import slow_work_told
from proximo.tasks import Task, TaskOptions
from proximo.tasks.sources.mixture import with_reward
from proximo.tasks.sources.opening import open_data
from proximo.tasks.sources.recognising import Chosen

CONFIG = "a RunConfig, such as replace(proximo.presets.ARITHMETIC, steps=20)"
"""Description of a config, for errors."""
Model = RunConfig | str | Path
"""A whole config, or a model whose config is chosen: its folder, hub id or name."""
Fields = Mapping[str, Any]
"""Values by the names of the config's fields."""
Schedules = Mapping[str, Changing]
"""Schedules by the fields or words that follow them."""
Track = str | Sequence[str]
"""Names of one or several trackers."""
Tools = Sequence[Tool]
"""Functions that the policy may call."""
Metrics = Given | Sequence[Given]
"""One or several functions that measure each step."""
STARTING_CONFIG = replace(START, task=ARITHMETIC.task)
"""Config from which that for a model and data starts: a model alone is trained on the demo's task."""
CHANGED = "`proximo.config_for` gives the config, and `dataclasses.replace` changes it"
"""Advice on changing what was chosen, for a person."""
COMPILING = "compiling for this GPU: the first evaluation and the first update take up to a minute longer than others"


def train(
    model: "Model",
    run: "PathLike | None" = None,
    *,
    data: Any = None,
    evaluation_data: Any = (),
    reward: "Rewards | None" = None,
    rewards: "Rewards | None" = None,
    environment: Any = None,
    tools: "Tools" = (),
    max_turns: int | None = None,
    algorithm: "Algorithm | str | None" = None,
    steps: int | None = None,
    log: "Log | None" = None,
    on_step: "OnStep | None" = None,
    track: "Track" = (),
    notify: str | None = None,
    resume: bool = True,
    allow_change: "Sequence[str]" = (),
    accept_lost_rows: bool = False,
    quiet: bool = False,
    dry_run: bool = False,
    schedules: "Schedules | None" = None,
    metrics: "Metrics | None" = None,
    settings: "Fields | None" = None,
    **words: "Unpack[Settings]",
) -> "TrainedRun":
    """Train a model by reinforcement learning; what `proximo train` does. The same call with the same folder resumes.

    model, run        a folder, a hub id, a name that ships, or a whole RunConfig; the run folder, runs/ALGORITHM-DATE
    data, evaluation_data   a path, hub id, dicts, DataFrame, Dataset or task; without the latter a tenth is held out
    reward, rewards   f(prompts, completions, **columns), or as verl or verifiers call it; a list of f or (f, weight)
    environment       a class with reset(problem) and step(reply), or "file.py:Name"; tools, max_turns
    algorithm         "grpo", "dapo", ..., or a value such as proximo.DAPO
    steps, epochs     training steps, or passes over the data; by themselves by the size of the data
    words             learning_rate (lr), max_tokens, group_size, batch, temperature, kl, lora, system, template, chat,
                      warmup_steps, weight_decay, token_budget, seed, dtype: as flags in `proximo train --help`
    settings          any other field by its name: {"training.minibatches": 2}
    schedules         numbers that change: {"algorithm.gate.high": proximo.linear(0.28, 0.2)}, or f(step, steps)
    metrics           f(prompts, completions, **columns), or several, measure each step: a list of numbers, or a dict
    log, on_step      called after each step: log(metrics) with "step" among them, on_step(step, metrics); True ends it
    track, notify     wandb, trackio, tensorboard, mlflow, file.py:Name; a webhook ("": none, None: $PROXIMO_NOTIFY)
    resume, quiet, dry_run   False: refuse a folder that has files; no lines on stderr; only return those of `--dry-run`
    allow_change, accept_lost_rows   on resume: fields that differ from the run's, ["steps"]; go on with lost log rows

    Ctrl-C saves the run. ValueError says in a line what cannot be run, before a model is loaded where possible.

    Example:
        run = proximo.train("path/to/model", data="gsm8k.jsonl", reward=f, learning_rate=1e-6, epochs=3, log=print)
        print(run.before.accuracy, run.after.accuracy, run.checkpoint, run.metrics().column("outcome"))
    """
    played = given_environment(environment, tools, max_turns)
    with slow_work_told(keep_quiet if quiet else say):
        base = _started(train, words, model, data, settings, reward, rewards)
        base = _given(base, data, evaluation_data, _one_of(reward, rewards), algorithm, steps, quiet, words, played)
        config, chosen = _chosen(model, base, words, settings, steps, schedules, metrics)
        if dry_run:
            return tell_lines(_dry(config, run, chosen, track), quiet, log)
        options = {"resume": resume, "allow_change": allow_change, "accept_lost": accept_lost_rows, "track": track}
        return train_in(run, config, chosen, _observed(on_step, log), quiet, webhook=webhook_at(notify), **options)


def _dry(config: RunConfig, run: PathLike | None, chosen: Sequence[Default], track: str | Sequence[str]) -> list[str]:
    """Lines on what a run would do."""
    refuse_values(config)
    check_names([track] if isinstance(track, str) else track)
    opening = Opening(folder_for(run, explain.nearest(config.algorithm).name), chosen, CHANGED)
    with as_found(), name_user_code(config):
        return DryTrain.of(config, opening).lines


def _one_of(reward: "Rewards | None", rewards: "Rewards | None") -> "Rewards | None":
    if reward is not None and rewards is not None:
        raise ValueError("reward and rewards are both given, and mean the same: give one of them")
    return rewards if reward is None else reward


def _started(
    function: Callable[..., object],
    words: Settings,
    model: RunConfig | str | Path,
    data: Any,
    settings: Mapping[str, Any] | None,
    *functions: Rewards | None,
) -> RunConfig:
    """The config from which that of a model starts, with the rewards that settings name, where no functions are given:
    whether data need answers depends on them. `function` is whose arguments these are."""
    refuse_unknown(words, function)
    config = _starting_config(model, data)
    mix = {name: value for name, value in (settings or {}).items() if name.partition(".")[0] == "rewards"}
    return with_settings(config, {}, mix) if mix and not any(each is not None for each in functions) else config


def _chosen(
    model: "Model",
    base: RunConfig,
    words: Settings,
    settings: Mapping[str, Any] | None,
    steps: int | None,
    schedules: "Schedules | None",
    metrics: "Metrics | None",
) -> tuple[RunConfig, list[Default]]:
    """The config with what was given in the place of its own, and of what was chosen for its model and data; and the
    latter, as far as it stands; of a whole config nothing is chosen."""
    epochs, fields = words.get("epochs"), settings or {}
    if epochs is not None and steps is not None:
        raise ValueError("epochs and steps are both given: give one of them")
    base, chosen = with_settings(base, words, fields), []
    if not isinstance(model, RunConfig):
        chosen = defaults_for(base, traits_of(base), epochs)
        base = with_settings(with_defaults(base, chosen), words, fields)
    elif epochs is not None:
        base = replace(base, steps=steps_of(epochs, base))
    config = measured(scheduled(base, schedules), metrics)
    given = {*(field_of("train", word) for word in words), *fields, *["steps"] * (steps is not None)}
    return config, kept(config, chosen, [field for field in given if field])


def _observed(on_step: OnStep | None, log: Log | None) -> OnStep | None:
    """One function of the two that see each step."""
    if log is None:
        return on_step

    def both(step: int, metrics: dict[str, float]) -> object:
        log({"step": step, **metrics})
        return None if on_step is None else on_step(step, metrics)

    return both


def train_in(
    run: PathLike | None,
    config: RunConfig,
    chosen: Sequence[Default],
    on_step: OnStep | None,
    quiet: bool,
    *,
    allow_change: Sequence[str] | None,
    track: str | Sequence[str],
    webhook: Webhook | None,
    resume: bool = True,
    accept_lost: bool = False,
) -> TrainedRun:
    """Train in a run folder, new or begun. `allow_change`: None where nothing may, nor be allowed to."""
    refuse_values(config)
    track = [track] if isinstance(track, str) else track
    check_names(track)
    observed = ObservedProgress(Silent() if quiet else progress_here(), on_step or (lambda step, metrics: None))
    folder = folder_for(run, explain.nearest(config.algorithm).name)
    config = going_on(config, chosen, folder, allow_change)
    elsewhere = on_processes(
        config, folder, on_step, resume, allow_change or (), accept_lost, track, webhook, quiet=quiet
    )
    taking = attempted(
        folder,
        toml.dumps(config),
        resume=resume or elsewhere,
        allow_change=allow_change,
        accept_lost=accept_lost,
        algorithm=explain.named(config.algorithm),
    )
    with as_found(), taking as session:
        result = trained(
            config,
            session,
            observed,
            keep_quiet if quiet or elsewhere else say,
            more="steps" in (allow_change or ()),
            ends=lambda: observed.ended,
            opening=None if quiet or elsewhere else Opening(folder, chosen, CHANGED),
            track=track,
            webhook=webhook,
        )
    for line in () if quiet or elsewhere else run_ending(session.folder, result):
        say(line)
    return TrainedRun(session.folder, result)


def going_on(config: RunConfig, chosen: Sequence[Default], folder: Path, allowed: Sequence[str] | None) -> RunConfig:
    """The config for a folder: of a run that may go on for other steps, with what it chose by those it began with."""
    if "steps" not in (allowed or ()):
        return config
    try:
        began = tomllib.loads(read_text(folder / "config.toml"))
    except (OSError, ValueError):  # none, or one that is damaged, which is told of when the run is opened
        return config
    return as_begun(config, chosen, began)


def config_for(
    model: str | Path,
    *,
    data: Any = None,
    evaluation_data: Any = (),
    reward: "Rewards | None" = None,
    rewards: "Rewards | None" = None,
    environment: Any = None,
    tools: "Sequence[Tool]" = (),
    max_turns: int | None = None,
    algorithm: Algorithm | str | None = None,
    steps: int | None = None,
    adapter: Lora | None = None,
    quiet: bool = False,
    schedules: "Schedules | None" = None,
    metrics: "Metrics | None" = None,
    settings: "Fields | None" = None,
    **words: "Unpack[Settings]",
) -> RunConfig:
    """The config that `proximo.train` chooses for a model and data, to look at or to change before training.

    Lines on stderr say what was chosen and why. No weights are loaded.

    model       a folder, a hub id or the name of a model that ships with Proximo
    adapter     a LoRA adapter to train instead of the whole model, as `lora`; the learning rate is then ten times as
                high
    data, evaluation_data, reward, rewards, environment, tools, max_turns, algorithm, steps, settings, schedules,
    metrics, quiet and the words, such as learning_rate    as in `proximo.train`

    Example:
        config = proximo.config_for("tiny-arithmetic", data=proximo.tasks.Arithmetic(), steps=20, quiet=True)
        config = replace(config, sampling=replace(config.sampling, max_tokens=16))
    """
    refuse_kind("model", model, (str, Path), "a folder, a hub id, or the name of a model that ships with Proximo")
    base = _started(config_for, words, model, data, settings, reward, rewards)
    base = replace(base, adapter=as_lora(adapter))
    played = given_environment(environment, tools, max_turns)
    base = _given(base, data, evaluation_data, _one_of(reward, rewards), algorithm, steps, quiet, words, played)
    config, chosen = _chosen(model, base, words, settings, steps, schedules, metrics)
    for line in () if quiet else listed(chosen, CHANGED):
        say(line)
    return config


def _starting_config(model: RunConfig | str | Path, data: Any) -> RunConfig:
    """Config from which that of a model starts; data have to be given with it, unless it is a whole config."""
    refuse_kind("model", model, (RunConfig, str, Path), f"a model's folder or name, or {CONFIG}")
    if isinstance(model, RunConfig):
        return model
    if data is None:
        raise ValueError(
            f"data is not given: name what {model} is trained on, a file, rows, or a task such as "
            "proximo.tasks.Arithmetic()"
        )
    return replace(STARTING_CONFIG, model=str(model))


def _given(
    config: RunConfig,
    data: Any,
    evaluation_data: Any,
    rewards: Rewards | None,
    algorithm: Algorithm | str | None,
    steps: int | None,
    quiet: bool,
    words: Settings,
    environment: EnvironmentOptions | None = None,
) -> RunConfig:
    """The config with what else was given in the place of its own."""
    if environment is not None:
        config = replace(config, environment=environment)
    if algorithm is not None:
        refuse_kind("algorithm", algorithm, (Algorithm, str), "a name such as 'dapo', or a value such as proximo.DAPO")
        config = with_algorithm(config, algorithm_of(algorithm))
    if steps is not None:
        refuse_kind("steps", steps, Integral, "a whole number, such as 40")
        config = replace(config, steps=int(steps))
    if isinstance(data, Task):
        if evaluation_data:
            raise ValueError("evaluation_data is given, and data is a task, which has its own: leave one of them out")
        config = replace(config, task=data)
    elif data is not None:
        rewarded = rewards is not None or is_scored(config)
        asked = {"template": words.get("template", ""), "system": words.get("system", ""), "chat": words.get("chat")}
        asked |= {"rewarded": rewarded, "watched": config.rewards.only_watches}
        task = task_of(data, evaluation=evaluation_data, model=config.model, quiet=quiet, **asked)
        config = replace(config, task=with_reward(task, None) if rewarded and rewards is None else task)
    elif evaluation_data:
        raise ValueError("evaluation_data goes with data: give the data to train on too")
    return with_rewards(with_values(config), rewards)


def task_of(
    data: Any,
    *,
    evaluation: Any = (),
    model: str | None = None,
    prompt_column: str | None = None,
    answer_columns: Sequence[str] | None = None,
    held_out: float | str | None = None,
    template: str = "",
    system: str = "",
    chat: bool | None = None,
    rewarded: bool = False,
    watched: bool = False,
    keep_in: PathLike = KEPT,
    quiet: bool = False,
) -> TaskOptions:
    """The task of your data, as `proximo train --data` makes it: its shape is recognised and said in a line.

    data            a file, pattern, folder or hub id, or several of them as a list, each PATH or PATH=WEIGHT; or rows:
                    a list of dictionaries, a dictionary of columns, a DataFrame, a Hugging Face Dataset, an Arrow table
    evaluation      data to evaluate on, likewise, each PATH or NAME=PATH; nothing of the others is held out then
    model           the model: questions are formatted with its chat template, if it has one. None: as text
    prompt_column, answer_columns, held_out, template, system, chat   as in tasks.File, where they are not to be
                    recognised
    rewarded        whether something else than the data's answers is rewarded, such as a function
    watched         whether a reward model is rewarded: answers are graded where there are any, and only logged
    keep_in         folder in which rows are written, since a resume needs them
    quiet           no lines on stderr

    Example:
        task = proximo.task_of([{"question": "What is 7+5?", "answer": "#### 12"}] * 20, held_out=0.0, quiet=True)
    """
    chosen = Chosen(
        prompt_column=prompt_column,
        answer_columns=None if answer_columns is None else tuple(answer_columns),
        held_out=held_out,
        template=template,
        system=system,
        chat=chat,
        has_reward=rewarded,
        only_watched=watched,
    )
    templated = model is not None and load_tokenizer(resolve(model)).chat_template is not None
    opened = open_data(paths_of(data, Path(keep_in)), paths_of(evaluation, Path(keep_in)), chosen, chat=templated)
    for line in opened.lines:
        (keep_quiet if quiet else say)(line)
    # A reward stands where one has to be until what is rewarded takes its place.
    return with_reward(opened.task, ExactMatch()) if rewarded else opened.task


def trained(
    config: RunConfig,
    session: RunSession,
    progress: Progress,
    say: Say,
    *,
    more: bool = False,
    ends: Callable[[], bool] = lambda: False,
    opening: Opening | None = None,
    track: Sequence[str] = (),
    webhook: Webhook | None = None,
    profile: int = 0,
) -> RunResult:
    """The rest of a run whose folder is taken; of a finished one its result. `more`: one that was ended before its
    last step does the others. `opening`: what is known of a new run, for its banner; None: no banner.
    `profile`: steps whose time is measured."""
    has_steps_left = session.resume_from is not None and step_of(session.resume_from) < config.steps
    if session.result is not None and not (more and has_steps_left):
        return _kept(config, session, say)
    session.result = None
    suit_session(session, config.model, config.device, say)
    refuse_fewer_steps(config, session.resume_from)
    with tracked(session.folder, track, say), notified(session, webhook, say):
        try:
            with name_user_code(config), on_ranks(config) as ranks:
                checked = preflight(config)
                tells = _banner(config, checked, opening if session.resume_from is None else None, say)
                run = Run(config, session.folder, progress, ranks, checked=checked, profile=profile, calibrated=tells)
                for line in run.grading.called():
                    say(line)
                if compiles(run.model):
                    say(COMPILING)
                return loop.train(run, session, ends=ends)
        finally:
            progress.stop()


def _banner(
    config: RunConfig, checked: Preflight, opening: Opening | None, say: Say
) -> Callable[[Calibration], object]:
    """A function that says the banner once the grader is calibrated. What the run takes is predicted before any model
    is in memory."""
    if opening is None:
        return lambda calibration: None
    try:
        plan = planned(config, checked.tokenizer)
    except Exception as error:  # a run that cannot be predicted can be trained all the same
        say(f"memory and time are not predicted: {error}")
        return lambda calibration: None
    return lambda calibration: say("\n".join(run_banner(config, checked, plan, calibration, opening)))


def _kept(config: RunConfig, session: RunSession, say: Say) -> RunResult:
    assert session.result is not None
    field = "steps" if config.max_generated_tokens is None else "max_generated_tokens"
    more = f"proximo resume {session.folder} --steps N, or " if field == "steps" else ""
    say(f"{session.folder}: this run is finished; for more: {more}`{field}=N` with `allow_change=['{field}']`")
    path = resolve(config.model)
    check_prompts(config, path, load_tokenizer(path))  # what was left out of the data is left out again
    return RunResult.from_dict(session.result, session.folder, config.task, config.seed)
