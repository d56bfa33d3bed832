"""`proximo.open_run`: what is in a run folder, as tables and charts."""

import warnings
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from proximo.algorithms import Algorithm, UnusualChoice, explain
from proximo.api.folders import PathLike
from proximo.api.plots import Plot, plot_of
from proximo.api.threads import as_found, transformers_model
from proximo.config import toml
from proximo.insight.charts.drawing import Series, line_chart
from proximo.insight.doctor.checkup import check_up
from proximo.insight.folder import RunFolder, State
from proximo.insight.lens.replay import ComparedAlgorithm, compared, own_name
from proximo.insight.reading import is_number
from proximo.insight.report.run_details import STAGES
from proximo.models import load_tokenizer
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.shipped import resolve
from proximo.rl.config import RunConfig
from proximo.rl.result import RunResult
from proximo.runs.files import EVENTS, METRICS
from proximo.runs.health import Finding
from proximo.runs.records import Answered, Evaluation
from proximo.runs.rollout_files import read_columns
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.fitting import Fitted
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from proximo.system.safe_text import counted
from proximo.tasks import Arithmetic

HELD_OUT = "held_out/"


def open_run(path: PathLike, *, load_code: bool = False) -> "OpenedRun":
    """Look at a run: its config, metrics, rollouts, findings and charts. Running, killed and finished runs alike.

    `path` is the run folder. Nothing is written to it, and what is asked for is read anew each time, so a run
    in progress can be watched. No code is executed, except by `config`, `algorithm` and `lens`, which load classes of
    your own that the config names, if you have run them with this run before; with `load_code` also what you have not.
    ValueError where the folder holds no run.

    Example:
        run = proximo.open_run("runs/mine")
        run.metrics().column("outcome")   # a pyarrow table; .to_pandas() where pandas is installed
        run.rollouts(step=12)             # every completion of a step, with its tokens
        run.plot("outcome")               # drawn by a notebook
    """
    return OpenedRun(RunFolder(Path(path)), load_code)


class OpenedRun:
    """A run folder, opened by `proximo.open_run`."""

    def __init__(self, folder: RunFolder, load_code: bool = False) -> None:
        self._folder, self._load_code = folder, load_code

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def state(self) -> State:
        """ "running", "finished" or "stopped"."""
        return self._folder.state

    @cached_property
    def config(self) -> RunConfig | SftConfig | RewardModelConfig | DpoConfig:
        """Config that the run was started with: `proximo.train(run.config, run.path)` resumes it. Classes of your own
        that it names are loaded, if you have run them with this run before, or permit it."""
        return _config(self._loading())

    @property
    def config_text(self) -> str:
        """config.toml as it is; nothing is loaded."""
        return self._folder.config_text

    @property
    def algorithm(self) -> Algorithm | None:
        """Algorithm of the run; None for a stage that learns from a file."""
        return self.config.algorithm if isinstance(self.config, RunConfig) else None

    @property
    def steps(self) -> list[int]:
        """Steps whose rollouts are stored."""
        return self._folder.steps()

    def metrics(self) -> pa.Table:
        """One row a step, in order; the columns held_out/… are filled where the run was evaluated, step 0 included.

        Example: run.metrics().to_pandas().set_index("step")["outcome"]
        """
        rows: dict[int, dict[str, Any]] = {}
        for row in self._folder.rows(METRICS):
            if is_number(row.get("step")):
                rows.setdefault(int(row["step"]), {}).update(row)
        # Training's columns first; the row of step 0 has held-out ones only.
        names = sorted(dict.fromkeys(chain.from_iterable(rows.values())), key=lambda name: name.startswith(HELD_OUT))
        ordered = [rows[step] for step in sorted(rows)]
        columns = {name: [_number(row.get(name)) for row in ordered] for name in names if name != "step"}
        steps = pa.array([int(row["step"]) for row in ordered], pa.int64())
        return pa.table({"step": steps} | {name: pa.array(values, pa.float64()) for name, values in columns.items()})

    def rollouts(self, step: int) -> pa.Table:
        """The rollouts of a step, a completion a row: prompt, text, tokens, outcome, reward, advantages and log-probs;
        those that did not train say so in `state`. ValueError where the step is not stored.

        Example: run.rollouts(step=12).select(["prompt", "text", "reward"]).to_pylist()[0]
        """
        self._folder.step(step)  # whole and of this version, or refused
        return read_columns(self._folder.step_file(step))

    def events(self) -> list[dict[str, Any]]:
        """Events of the run, in order: resumes, findings, unscored completions, changed fields."""
        return self._folder.rows(EVENTS)

    @property
    def result(self) -> RunResult | Fitted | None:
        """Result of the run or the stage; None where the run is not finished. Without the run's task, where
        that is a class of your own or its data are gone, there are no examples in it."""
        stored = self._folder.result
        if stored is None:
            return None
        if "examples" not in stored:
            return Fitted.from_dict(stored, self.path)
        try:
            config = self._folder.config
            return RunResult.from_dict(stored, self.path, config.task, config.seed)
        except (ValueError, OSError):
            return RunResult.from_dict(stored | {"examples": []}, self.path, Arithmetic(), 0)

    def findings(self) -> list[Finding]:
        """Faults that the run has now, worst first, each with its remedy; what `proximo doctor` says. Reads all files
        of the run."""
        return [active.finding for active in check_up(self._folder).standing]

    def plot(self, *metrics: str, title: str | None = None) -> Plot:
        """A chart of metrics over steps, the task score where none is named; held-out values are drawn next to those
        of training. ValueError where no step has such a metric.

        Example: run.plot("outcome"); run.plot("clip_low", "clip_high")
        """
        table, series = self.metrics(), []
        for metric in metrics or ("outcome",):
            curves = {name: _curve(table, name) for name in (metric, HELD_OUT + metric) if name in table.column_names}
            if not curves:
                raise ValueError(
                    f"{metric!r} is no metric of {self.path}; there are {', '.join(table.column_names[1:])}"
                )
            series += [Series(_line_name(name, metric, len(metrics) > 1), points) for name, points in curves.items()]
        named = title or ", ".join(metrics or ("outcome",))
        return plot_of(f"{named} of {self._folder.name}", line_chart(named, series))

    def lens(self, step: int, *algorithms: str | Algorithm) -> list[ComparedAlgorithm]:
        """Replays of a stored step under algorithms, the run's own first: losses, tokens blocked, gradients; what
        `proximo replay` prints. Algorithms are named as in `proximo explain --all`, or given as values.

        Example: own, sapo = run.lens(12, "sapo"); sapo.cosine
        """
        config = self._loading().config_at(step)
        named: dict[str, Algorithm] = {own_name(config): config.algorithm}
        for each in algorithms:
            name = _card(each).name if isinstance(each, str) else explain.named(each)
            named.setdefault(name, algorithm_of(each))
        return compared(self._folder.step(step), config, named)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model of the newest checkpoint, as transformers has it, loaded when it is first asked for. An adapter is
        merged into it.

        Example: run.model.generate(**run.tokenizer("12+13=", return_tensors="pt").to(run.model.device))
        """
        with as_found():
            return transformers_model(str(self.path))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the newest checkpoint."""
        return load_tokenizer(resolve(str(self.path)))

    def _loading(self) -> RunFolder:
        """The folder, with the code that its config names."""
        return RunFolder(self.path, load_code=self._load_code, own_code=True)

    def __repr__(self) -> str:
        try:
            config = _config(self._folder)
            kind = explain.named(config.algorithm) if isinstance(config, RunConfig) else "a stage"
        except (ValueError, OSError):
            kind = "; ".join(f"type = {name}, not loaded" for name in self._folder.unavailable) or "config not readable"
        done = self._folder.rows(METRICS)
        return f"<run {self.path}: {kind}, {self.state}, {counted(done[-1]['step'] if done else 0, 'step')}>"


class TrainedRun(OpenedRun):
    """A run that `proximo.train` has finished: its result, and all that `proximo.open_run` gives."""

    def __init__(self, path: Path, result: RunResult) -> None:
        super().__init__(RunFolder(path))
        self._result = result

    @property
    def result(self) -> RunResult:
        """Accuracies, examples, checkpoint and costs as one value; each is an attribute of the run too."""
        return self._result

    @property
    def before(self) -> Evaluation:
        """Held-out evaluation before training."""
        return self._result.before

    @property
    def after(self) -> Evaluation:
        """Held-out evaluation after training."""
        return self._result.after

    @property
    def examples(self) -> list[tuple[Answered, Answered]]:
        """Answers to the same held-out problems before and after training."""
        return self._result.examples

    @property
    def checkpoint(self) -> Path:
        """Folder of the trained model."""
        return self._result.checkpoint

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled in training."""
        return self._result.generated_tokens

    @property
    def seconds(self) -> float:
        """Seconds of training, over all attempts."""
        return self._result.seconds


def algorithm_of(given: str | Algorithm) -> Algorithm:
    """An algorithm as it is, or by its name as in `proximo explain --all`."""
    return given if isinstance(given, Algorithm) else _card(given).value


def _card(name: str) -> explain.Card:
    card = explain.card(name)
    if card is None:
        raise ValueError(f"no algorithm is called {name!r}; there are {', '.join(c.name for c in explain.CARDS)}")
    return card


def _config(folder: RunFolder) -> RunConfig | SftConfig | RewardModelConfig | DpoConfig:
    for kind, _ in STAGES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnusualChoice)
            try:
                return toml.loads(folder.config_text, kind, code=folder)
            except ValueError:  # another kind's
                continue
    return folder.config


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _curve(table: pa.Table, name: str) -> list[tuple[int, float]]:
    pairs = zip(table.column("step").to_pylist(), table.column(name).to_pylist(), strict=True)
    return [(step, value) for step, value in pairs if value is not None]


def _line_name(name: str, metric: str, several: bool) -> str:
    if several:
        return name.replace(HELD_OUT, "held-out ")
    return "training" if name == metric else "held-out"
