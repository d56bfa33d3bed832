"""`proximo.train`: reinforcement learning from a config, or from a model and data, into a run folder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from proximo.algorithms import Algorithm, explain
from proximo.api.folders import PathLike, attempted, folder_for, suit_session
from proximo.api.messages import Say, keep_quiet, say
from proximo.api.progress import ObservedProgress, OnStep, Silent
from proximo.api.rewards import Rewards, is_scored, with_rewards
from proximo.api.run import TrainedRun, algorithm_of
from proximo.api.threads import as_found, on_processes, on_ranks
from proximo.api.validate import refuse_kind, refuse_values
from proximo.config import toml
from proximo.data.given import paths_of
from proximo.environments.given import Tool, given_environment
from proximo.environments.kinds import EnvironmentOptions
from proximo.models import load_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.compiling import compiles
from proximo.models.shipped import resolve
from proximo.recipes.defaults import START, Default, defaults_for, listed, traits_of, with_defaults
from proximo.recipes.presets import ARITHMETIC, with_algorithm, with_values
from proximo.rewards import ExactMatch
from proximo.rl import train as loop
from proximo.rl.config import RunConfig
from proximo.rl.plugin_errors import name_user_code
from proximo.rl.preflight.prompts import check_prompts
from proximo.rl.progress import Progress, ProgressLines
from proximo.rl.result import RunResult, refuse_fewer_steps
from proximo.rl.run import Run
from proximo.runs.checkpoints import step_of
from proximo.runs.session import RunSession
from proximo.runs.tracking.processes import tracked
from proximo.runs.tracking.trackers import check_names
from proximo.tasks import Task, TaskOptions
from proximo.tasks.sources.mixture import with_reward
from proximo.tasks.sources.opening import open_data
from proximo.tasks.sources.recognising import Chosen

KEPT = Path("runs") / "data"
"""Folder for rows that were given in Python."""
CONFIG = "a RunConfig, such as replace(proximo.presets.ARITHMETIC, steps=20)"
"""Description of a config, for errors."""
STARTING_CONFIG = replace(START, task=ARITHMETIC.task)
"""Config from which that for a model and data starts: a model alone is trained on the demo's task."""
CHANGED = "`proximo.config_for` gives the config, and `dataclasses.replace` changes it"
"""Advice on changing what was chosen, for a person."""
COMPILING = "compiling for this GPU: the first evaluation and the first update take up to a minute longer than others"


def train(
    config: RunConfig | str | Path,
    run: PathLike | None = None,
    *,
    data: Any = None,
    evaluation_data: Any = (),
    rewards: "Rewards | None" = None,
    environment: Any = None,
    tools: "Sequence[Tool]" = (),
    max_turns: int | None = None,
    algorithm: Algorithm | str | None = None,
    steps: int | None = None,
    on_step: "OnStep | None" = None,
    resume: bool = True,
    allow_change: Sequence[str] = (),
    accept_lost_rows: bool = False,
    track: str | Sequence[str] = (),
    quiet: bool = False,
) -> TrainedRun:
    """Train a model by reinforcement learning; what `proximo train` does. Returns the run: its result, metrics,
    rollouts, charts, model and tokenizer.

    A model and data are enough: everything else is chosen for them, as on the command line, and lines on stderr say
    what and why. The same call with the same folder resumes a run that ended early, with the same numbers as if it had
    not; a finished run returns its result at once. Ctrl-C saves the run and raises KeyboardInterrupt. ValueError says
    in one line what cannot be run, before a model is loaded where possible.

    config            a model: a folder, a hub id or the name of a model that ships with Proximo. Or a RunConfig:
                      everything that decides the run's numbers; `proximo.recipes.presets` has some that work
    run               the run folder; None: runs/ALGORITHM-DATE
    data, evaluation_data   what to train and evaluate on: as `proximo.task_of` takes it, or a task. It takes the place
                      of a RunConfig's task, and has to be given for a model
    rewards           what is rewarded, in the place of the task's verdict: functions as TRL, verl or verifiers call
                      them, each alone or as (f, weight). One that a module or file holds runs in a process of its
                      own; a lambda or a notebook's function runs in this process, and a resume needs it again
    environment       a class with reset(problem) and step(reply), which answers replies and rewards them, its path
                      file.py:Name, or a value such as proximo.MultiTurn(...)
    tools, max_turns  functions that the policy may call, or their paths; replies of an episode at most
    algorithm         a name, such as "dapo", or a value, such as proximo.DAPO; None: GRPO, or the RunConfig's
    steps             training steps; None: by the size of the data, or the RunConfig's
    on_step           called as on_step(step, metrics) after each step; True ends the run there, saved, evaluated and
                      finished. The same call with allow_change=["steps"] does the other steps
    resume            False: refuse a folder that is not empty
    allow_change      fields that may differ from how the run in the folder began, such as ["steps"]
    accept_lost_rows  resume although metrics.jsonl or ledger.jsonl has lost rows
    track             one or several that get the run while it runs: wandb, trackio, tensorboard, mlflow or file.py:Name
    quiet             no lines on stderr

    Example:
        run = proximo.train("path/to/model", "runs/mine", data="gsm8k.jsonl", algorithm="dapo", steps=200)
        print(run.before.accuracy, run.after.accuracy, run.checkpoint, run.metrics().column("outcome"))
        proximo.train(replace(proximo.presets.ARITHMETIC, algorithm=proximo.DAPO, steps=20), "runs/demo")
    """
    refuse_kind("config", config, (RunConfig, str, Path), f"a model's folder or name, or {CONFIG}")
    base = config if isinstance(config, RunConfig) else _starting_config(config, data)
    played = given_environment(environment, tools, max_turns)
    base = _given(base, data, evaluation_data, rewards, algorithm, steps, quiet, played)
    chosen = () if isinstance(config, RunConfig) else defaults_for(base, traits_of(base))
    options = {"resume": resume, "allow_change": allow_change, "accept_lost": accept_lost_rows, "track": track}
    return train_in(run, with_defaults(base, chosen), chosen, on_step, quiet, **options)


def train_in(
    run: PathLike | None,
    config: RunConfig,
    chosen: Sequence[Default],
    on_step: OnStep | None,
    quiet: bool,
    *,
    allow_change: Sequence[str] | None,
    track: str | Sequence[str],
    resume: bool = True,
    accept_lost: bool = False,
) -> TrainedRun:
    """Train in a run folder, new or begun. `allow_change`: None where nothing may, nor be allowed to."""
    refuse_values(config)
    track = [track] if isinstance(track, str) else track
    check_names(track)
    observed = ObservedProgress(Silent() if quiet else ProgressLines(), on_step or (lambda step, metrics: None))
    folder = folder_for(run, explain.nearest(config.algorithm).name)
    elsewhere = on_processes(config, folder, on_step, resume, allow_change or (), accept_lost, track, quiet=quiet)
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
            opening=listed(chosen, CHANGED),
            track=track,
        )
    return TrainedRun(session.folder, result)


def config_for(
    model: str | Path,
    *,
    data: Any = None,
    evaluation_data: Any = (),
    rewards: "Rewards | None" = None,
    algorithm: Algorithm | str | None = None,
    steps: int | None = None,
    adapter: Lora | None = None,
    quiet: bool = False,
) -> RunConfig:
    """The config that `proximo.train` chooses for a model and data, to look at or to change before training.

    Lines on stderr say what was chosen and why. No weights are loaded.

    model       a folder, a hub id or the name of a model that ships with Proximo
    adapter     a LoRA adapter to train instead of the whole model; the learning rate is then ten times as high
    data, evaluation_data, rewards, algorithm, steps, quiet   as in `proximo.train`

    Example:
        config = proximo.config_for("tiny-arithmetic", data=proximo.tasks.Arithmetic(), steps=20, quiet=True)
        config = replace(config, sampling=replace(config.sampling, max_tokens=16))
    """
    refuse_kind("model", model, (str, Path), "a folder, a hub id, or the name of a model that ships with Proximo")
    if adapter is not None:
        refuse_kind("adapter", adapter, Lora, "a proximo.Lora, such as proximo.Lora(rank=8, alpha=16)")
    base = replace(_starting_config(model, data), adapter=adapter)
    base = _given(base, data, evaluation_data, rewards, algorithm, steps, quiet)
    chosen = defaults_for(base, traits_of(base))
    for line in () if quiet else listed(chosen, CHANGED):
        say(line)
    return with_defaults(base, chosen)


def _starting_config(model: str | Path, data: Any) -> RunConfig:
    """Config from which that of a model starts; data have to be given with it."""
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
        task = task_of(data, evaluation=evaluation_data, model=config.model, rewarded=rewarded, quiet=quiet)
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
    rewarded: bool = False,
    keep_in: PathLike = KEPT,
    quiet: bool = False,
) -> TaskOptions:
    """The task of your data, as `proximo train --data` makes it: its shape is recognised and said in a line.

    data            a file, pattern, folder or hub id, or several of them as a list, each PATH or PATH=WEIGHT; or rows:
                    a list of dictionaries, a dictionary of columns, a DataFrame, a Hugging Face Dataset, an Arrow table
    evaluation      data to evaluate on, likewise, each PATH or NAME=PATH; nothing of the others is held out then
    model           the model: questions are formatted with its chat template, if it has one. None: as text
    prompt_column, answer_columns, held_out, template   as in tasks.File, where they are not to be recognised
    rewarded        whether something else than the data's answers is rewarded, such as a function
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
        has_reward=rewarded,
    )
    chat = model is not None and load_tokenizer(resolve(model)).chat_template is not None
    opened = open_data(paths_of(data, Path(keep_in)), paths_of(evaluation, Path(keep_in)), chosen, chat=chat)
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
    opening: Sequence[str] = (),
    track: Sequence[str] = (),
) -> RunResult:
    """The rest of a run whose folder is taken; of a finished one its result. `more`: one that was ended before its
    last step does the others. `opening`: lines to say when a new run is not refused and begins."""
    has_steps_left = session.resume_from is not None and step_of(session.resume_from) < config.steps
    if session.result is not None and not (more and has_steps_left):
        return _kept(config, session, say)
    session.result = None
    suit_session(session, config.model, config.device, say)
    refuse_fewer_steps(config, session.resume_from)
    with tracked(session.folder, track, say):
        try:
            with name_user_code(config), on_ranks(config) as ranks:
                run = Run(config, session.folder, progress, ranks)
                for line in (*(opening if session.resume_from is None else ()), *run.grading.called()):
                    say(line)
                if compiles(run.model):
                    say(COMPILING)
                return loop.train(run, session, ends=ends)
        finally:
            progress.stop()


def _kept(config: RunConfig, session: RunSession, say: Say) -> RunResult:
    assert session.result is not None
    field = "steps" if config.max_generated_tokens is None else "max_generated_tokens"
    say(f"{session.folder}: this run is finished; more steps: `{field}=N` `allow_change=['{field}']`")
    path = resolve(config.model)
    check_prompts(config, path, load_tokenizer(path))  # what was left out of the data is left out again
    return RunResult.from_dict(session.result, session.folder, config.task, config.seed)
