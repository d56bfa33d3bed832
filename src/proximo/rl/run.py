"""Everything a run holds in memory, built from its config."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from proximo.environments.kinds import played
from proximo.learner.memory import explaining_memory
from proximo.models.adapters.quantized import count_parameters
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.spelling import Spelling
from proximo.rewards.grading import Grading
from proximo.rl.async_sampling.in_flight import InFlight
from proximo.rl.async_sampling.one_step_ahead import Ahead
from proximo.rl.async_sampling.staleness import StaleWatch
from proximo.rl.build import HoldsOnRanks, build_learner
from proximo.rl.clip_range_check import BandWatch
from proximo.rl.clock import Timeline
from proximo.rl.collect import Collector
from proximo.rl.config import RunConfig
from proximo.rl.evaluate import evaluate
from proximo.rl.grader_failures import UnscoredWatch
from proximo.rl.mixed_reward import judged
from proximo.rl.preflight.calibration import calibrate
from proximo.rl.preflight.preflight import preflight
from proximo.rl.progress import Progress
from proximo.runs.files import METRICS
from proximo.runs.health import COLLAPSE, Watch
from proximo.runs.log import RunLog
from proximo.runs.records import Answered, Collected, DataCursor, Evaluation
from proximo.runs.signals import Stop
from proximo.samplers.sampler import Sampler, Snapshot
from proximo.system.lines import Lines
from proximo.tasks import Task

SAMPLE_LESS = (
    "use a smaller sampling.max_tokens, or decode fewer rows: a smaller training.groups or training.group_size"
)
"""Advice if sampling runs out of memory."""


class Run:
    """Everything a run holds in memory, built from its config."""

    def __init__(self, config: RunConfig, folder: Path, progress: Progress, ranks: HoldsOnRanks | None = None) -> None:
        """`ranks`: where the run is one of several processes, what holds the policy on all of them."""
        self.config, self.folder, self.progress = config, folder, progress
        checked = preflight(config)
        self.tokenizer: PreTrainedTokenizerBase = checked.tokenizer
        self.spelling = Spelling(self.tokenizer)
        self.left_out, self.waits_for = checked.left_out, checked.remarks
        self.task_played = played(config.task, config.environment, self.tokenizer)
        """The config's task with what its environment makes of it, before rewards are mixed."""
        self.task: Task = judged(
            self.task_played, config.rewards, self.tokenizer, config.dtype, compiled=config.compile
        )
        self.grading = Grading(folder, None if config.workers is None else config.workers.open())
        """Failures and worker processes of this run's graders."""
        with self.grading.active():
            self.remarks = [*calibrate(self.task, config.seed), *config.penalty_remarks]
        built = build_learner(config, checked.path, checked.device, self.tokenizer, ranks)
        self.model, self.teacher = built.model, built.teacher
        self._copy, self.samplers, self.learner = built.copy, built.samplers, built.learner
        self.watch, self.unscored = Watch(), UnscoredWatch(config.rewards.max_unscored, self.grading.failures)
        self.failed_episodes = UnscoredWatch(1.0, self.grading.failed)
        self.band, self.stale = BandWatch(config.algorithm), StaleWatch(config.ahead.staleness, config.algorithm)
        self.collector = Collector(
            task=self.task,
            sampler=self.samplers.training,
            tokenizer=self.tokenizer,
            sampling=config.sampling,
            training=config.training,
            keep=config.algorithm.keep,
            seed=config.seed,
            environment=config.environment,
        )
        self.timeline = Timeline()
        self.ahead: Ahead | None = None
        """Sampling of later steps while one is trained; None, like `in_flight`: not done."""
        self.in_flight: InFlight | None = None
        """Sampling of groups while weights change."""
        if self._copy is not None:
            staleness = config.ahead.staleness
            lanes = self.timeline.lanes
            self.ahead = Ahead(self._collect, self.model.device, staleness=staleness, steps=config.steps, lanes=lanes)
        elif config.ahead.staleness and (drop := self.samplers.drop) is not None:
            begun = self.samplers.begun
            self.in_flight = InFlight(self.collector, drop, config.ahead, steps=config.steps, begun=begun)
        self.log, self.stop = RunLog(folder), Stop()
        if ranks is not None:
            ranks.hold_signals(self.stop.held)

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of the policy's model, and how many of them are trained, for run.json."""
        trained = sum(each.numel() for each in self.model.parameters() if each.requires_grad)
        return {"policy": count_parameters(self.model), "trained": trained}

    def start_step(self, index: int, cursor: DataCursor) -> int:
        """Give the policy's weights to the sampler; returns the version of those that sample this step."""
        version = self.learner.version
        if self.ahead is not None and self._copy is not None:
            return self.ahead.start_step(self._copy.snapshot(version), cursor, index)
        sampled = self.samplers.training.refresh(self.learner.policy, version)
        return sampled if self.in_flight is None else self.in_flight.start_step(sampled, cursor, index)

    def collect(self, index: int, cursor: DataCursor, version: int) -> Collected:
        """Rollouts of the step that has begun, sampled by this version."""
        if self.ahead is not None:
            return replace(self.ahead.collect(), grading_seconds=0.0)  # nobody waited for grades alone
        if self.in_flight is not None:
            return self.in_flight.collect()
        return self.collector.collect(cursor, step=index, version=version)

    def _collect(self, cursor: DataCursor, step: int, weights: Snapshot) -> Collected:
        """Rollouts of a later step, on the thread that samples ahead."""
        return self.collector.collect(cursor, step=step, version=self._refresh(self.samplers.training, weights))

    def _refresh(self, sampler: Sampler, weights: Snapshot) -> int:
        """Give a snapshot to a sampler that works on a copy of the policy."""
        assert self._copy is not None
        self._copy.load(weights)
        return sampler.refresh(self._copy, weights.version)

    def close_ahead(self) -> None:
        """Stop sampling for later steps."""
        for each in filter(None, (self.ahead, self.in_flight)):
            each.close()

    def tell_of_sampler(self, step: int) -> None:
        """Log what happened to the samplers since the last call."""
        for each in self.samplers.take_events():
            self.log.event(step, each.kind, each.message, **each.numbers)
            if each.warns:
                self.progress.warned(step, each.message)

    def evaluate(self) -> tuple[Evaluation, list[Answered]]:
        if not self.config.evaluation.problems:
            return Evaluation.none(), []
        version, sampler = self.learner.version, self.samplers.evaluation
        with self.stop.anywhere(), explaining_memory(SAMPLE_LESS):
            if self.ahead is not None and self._copy is not None:
                weights = self._copy.snapshot(version)
                return self.ahead.now(lambda: self._evaluate(self._refresh(sampler, weights)))
            sampled = sampler.refresh(self.learner.policy, version)
            if self.in_flight is not None:
                return self.in_flight.now(lambda: self._evaluate(sampled))
            return self._evaluate(sampled)

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

    def tell_waits(self, step: int) -> None:
        """Say what is not there yet, and will be waited for."""
        for message in self.waits_for:
            self.log.event(step, "waiting", message)
            self.progress.warned(step, message)

    def tell_if_not_repeatable(self, step: int) -> None:
        """Warn, at the start and on every resume, if this run's sampler is not reproducible."""
        if not (self.samplers.training.repeats and self.samplers.evaluation.repeats):
            name = type(self.config.sampler).__name__
            message = (
                f"sampler {name} is not reproducible: the same config and seed may give other numbers, and steps "
                "that repeat after a resume may differ from those that were lost"
            )
            self.log.event(step, "not_repeatable", message)
            self.progress.warned(step, message)

    def note_times(self, step: int, collected: Collected, version: int) -> None:
        """Write when everything of a step happened; `version` is the policy's before its updates."""
        oldest = (min(each.completion.version for each in group.rollouts) for group in collected.groups)
        staleness = Counter(version - each for each in oldest)
        queue = {
            name: each for part in filter(None, (self.ahead, self.in_flight)) for name, each in part.queue().items()
        }
        self.log.timeline(step, self.timeline.row(self.samplers.take_intervals(), staleness=staleness, **queue))

    def tell_early_end(self, step: int, reason: str) -> None:
        """Report that the run ends before its last step."""
        self.log.event(step, "early_end", reason)
        self.progress.warned(step, reason)

    @property
    def collapse(self) -> str | None:
        """Why the run ends here, if it collapsed and `stop_on` says that it shall."""
        if self.config.stop_on is None:
            return None
        diverged = self.learner.guard.complaint
        found = next((each for each in self.watch.standing() if each.rule in COLLAPSE), None)
        if found is None and diverged is None:
            return None
        why = diverged if found is None else f"{found.rule}, {found.message}"
        return f'the run ends here, as stop_on is "{self.config.stop_on}": {why}'

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row of metrics, and report new findings."""
        self.log.metrics(step, metrics)
        for found in self.watch.look({"step": step, **metrics}):
            more = {"rule": found.rule, "severity": found.severity, "remedy": found.remedy, "show": found.show}
            self.log.event(found.step, "finding", found.message, **more)
            self.progress.warned(found.step, str(found))
        for kind, remark in (("narrow_band", self.band.look(metrics)), ("stale", self.stale.look(metrics))):
            if remark is not None:
                self.log.event(step, kind, remark)
                self.progress.warned(step, remark)

    def remember(self) -> None:
        """After a resume: feed the run's earlier rows to the watch, without reporting findings again."""
        for row in Lines(self.folder / METRICS).readable():
            self.watch.look(row)
            self.band.look(row)
            self.stale.look(row)
