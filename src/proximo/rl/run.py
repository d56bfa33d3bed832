"""The parts of a run in memory, built from its config."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from proximo.environments.kinds import played
from proximo.models.adapters.quantized import count_parameters
from proximo.models.adapters.starting import base_dtype, whole_base
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.out_of_memory import explaining_memory
from proximo.models.tokens.spelling import Spelling
from proximo.rewards.grading import Grading
from proximo.rewards.metrics import StepMeasures
from proximo.rl.build import HoldsOnRanks, build_learner, build_rollouts
from proximo.rl.clock import Timeline
from proximo.rl.config import RunConfig
from proximo.rl.evaluate import evaluate
from proximo.rl.mixed_reward import with_reward_models
from proximo.rl.monitor import Monitor
from proximo.rl.preflight.calibration import Calibration, calibration
from proximo.rl.preflight.preflight import Preflight, judge_remarks, preflight
from proximo.rl.profiling import Profiler
from proximo.rl.progress import Progress
from proximo.rl.rollouts import Collector, Rollouts
from proximo.runs.checkpointer import StatefulParts
from proximo.runs.files import BASE
from proximo.runs.log import RunLog
from proximo.runs.records import Answered, Evaluation
from proximo.runs.signals import Stop
from proximo.tasks import Task

SAMPLE_LESS = (
    "use a smaller sampling.max_tokens, or decode fewer rows: a smaller training.groups or training.group_size"
)
"""Advice if sampling runs out of memory."""


class Run:
    """A run in memory: its models, samplers, rollouts and monitor, built from its config."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        progress: Progress,
        ranks: HoldsOnRanks | None = None,
        *,
        checked: Preflight | None = None,
        profile: int = 0,
        calibrated: Callable[[Calibration], object] = lambda _: None,
    ) -> None:
        """`ranks`: where the run is one of several processes, what holds the policy on all of them. `checked`: what the
        preflight checks gave, where they were made. `calibrated` is called before the policy's weights are loaded.
        `profile`: number of steps whose time is measured."""
        self.config, self.folder, self.progress = config, folder, progress
        checked = checked or preflight(config)
        self.numbers = checked.numbers
        self.tokenizer: PreTrainedTokenizerBase = checked.tokenizer
        self.spelling = Spelling(self.tokenizer)
        self.left_out, self.waits_for = checked.left_out, checked.remarks
        self.task_played = played(config.task, config.environment, self.tokenizer)
        """The config's task with what its environment makes of it, before rewards are mixed."""
        self.task: Task = with_reward_models(
            self.task_played, config.rewards, self.tokenizer, config.dtype, compiled=config.compile
        )
        self.grading = Grading(folder, None if config.workers is None else config.workers.open())
        """Failures and worker processes of this run's graders."""
        self.measures = StepMeasures(config.metrics or (), self.grading)
        self.measures.check()
        with self.grading.active():
            graded = calibration(self.task, config.seed)
            self.remarks = [*graded.remarks, *config.penalty_remarks, *judge_remarks(config)]
        calibrated(graded)
        path = checked.path if config.adapter is None else self._whole_base(checked)
        built = build_learner(config, path, checked.device, self.tokenizer, ranks)
        self.model, self.teacher = built.model, built.teacher
        self.samplers, self.learner = built.samplers, built.learner
        self.collector = Collector(
            task=self.task,
            sampler=self.samplers.training,
            tokenizer=self.tokenizer,
            sampling=config.sampling,
            training=config.training,
            keep=config.algorithm.keep,
            seed=config.seed,
            environment=config.environment,
            sampling_at=self.numbers.sampling,
        )
        self.timeline, self.stop = Timeline(), Stop()
        self.profiler = Profiler(profile, torch.device(checked.device))
        self.rollouts: Rollouts = build_rollouts(config, built, self.collector, self.timeline.lanes)
        self.monitor = Monitor(config, RunLog(folder), progress, self.grading)
        if ranks is not None:
            ranks.hold_signals(self.stop.held)

    def _whole_base(self, checked: Preflight) -> str:
        """Path of the whole model under the run's adapter."""
        dtype = base_dtype(self.config.dtype, checked.device, sharded=self.config.ranks is not None)
        return whole_base(checked.path, self.folder / BASE, dtype)

    @property
    def parts(self) -> StatefulParts:
        """Parts of this run that have a state."""
        return StatefulParts(self.learner, self.rollouts, self.monitor.failures)

    @property
    def log(self) -> RunLog:
        return self.monitor.log

    @log.setter
    def log(self, log: RunLog) -> None:
        self.monitor.log = log

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hear signals and use graders and samplers; they are ended however the run ends."""
        with ExitStack() as until:
            until.callback(self.grading.close)
            until.callback(self.samplers.close)
            until.callback(lambda: self.profiler.close(self.log))
            until.enter_context(self.grading.active())
            until.enter_context(self.stop)
            until.callback(self.rollouts.close)
            yield

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of the policy's model, and how many of them are trained, for run.json."""
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        return {"policy": count_parameters(self.model), "trained": trained}

    def evaluate(self) -> tuple[Evaluation, list[Answered]]:
        if not self.config.evaluation.problems:
            return Evaluation.none(), []
        learner, sampler = self.learner, self.samplers.evaluation
        with self.stop.anywhere(), explaining_memory(SAMPLE_LESS):
            return self.rollouts.evaluate(sampler, learner.policy, learner.version, self._evaluate)

    def _evaluate(self, version: int) -> tuple[Evaluation, list[Answered]]:
        config = self.config
        return evaluate(
            self.task,
            self.samplers.evaluation,
            self.tokenizer,
            config.sampling,
            config.evaluation,
            config.seed,
            environment=config.environment,
            version=version,
        )

    @property
    def repeats(self) -> bool:
        """True if the same config and seed give the same numbers, as far as the samplers go."""
        return self.samplers.training.repeats and self.samplers.evaluation.repeats
