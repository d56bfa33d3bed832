"""A study is a value: a claim, the arms that test it, and what counts as an effect, all of it fixed before the runs."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from proximo.rl.config import RunConfig
from proximo_lab.studies.record import Course, Record, digest, essence


@dataclass(frozen=True)
class Measure:
    """A number of a run, or of a pair of runs with the same seed."""

    name: str
    unit: str
    what: str
    """Computation in a sentence: the part of the measure that is hashed with the study."""
    of: Callable[[Record], float]
    """The number of a run; NaN if it has none."""
    between: Callable[[Record, Record], float] | None = None
    """The difference between a run and another; None: the difference of their numbers."""
    grain: float = 0.0
    """1 where the number of a run is 1 or 0, it happened or not, such as a collapse: means are then shares of the
    seeds. 0 for any other."""

    def __post_init__(self) -> None:
        assert self.grain in (0.0, 1.0), f"{self.name}: grain {self.grain}"
        assert not (self.grain and self.between), f"{self.name}: shares are compared as shares"

    def difference(self, ours: Record, theirs: Record | None) -> float:
        """Difference between a run and another, or the run's own number."""
        if theirs is None:
            return self.of(ours)
        return self.of(ours) - self.of(theirs) if self.between is None else self.between(ours, theirs)


@dataclass(frozen=True)
class Arm:
    """A config under a name."""

    name: str
    config: RunConfig
    tuned: bool = False
    """True if its learning rate is tuned, if the study has a tuning."""
    course: Course | None = None
    """Course of its runs; None: train by the config."""


@dataclass(frozen=True)
class Contrast:
    """Two arms compared in one measure."""

    what: str
    """The statement that is tested."""
    arm: str
    against: str | None
    """The other arm; None: the arm's own numbers are compared with 0."""
    measure: Measure
    counts: float
    """Smallest difference, arm minus other, that counts as an effect; its sign is the direction that is claimed."""
    claims: tuple[int, ...] = ()
    """Rows of the atlas that it answers."""

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.arm,) if self.against is None else (self.arm, self.against)


@dataclass(frozen=True)
class Tuning:
    """Learning rates of which each tuned arm gets the best, on seeds that the study itself does not use."""

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    measure: Measure
    """Measure that is to be as large as possible."""


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    claim: str
    """The claim in its author's words, or close to them."""
    source: str
    question: str
    arms: tuple[Arm, ...]
    """Arms; the first is the baseline."""
    seeds: tuple[int, ...]
    contrasts: tuple[Contrast, ...]
    """Contrasts that answer the question; the first gives the study's verdict."""
    positive: tuple[Contrast, ...]
    """Controls that must show an effect; if one does not, the study could not have seen any and gives no verdict."""
    negative: tuple[Contrast, ...]
    """Controls that must show none; if one does, the study sees what is not there and gives no verdict."""
    measures: tuple[Measure, ...]
    """Measures of which the page has a table for all arms."""
    curve: str
    """Metric of the figure, over the steps."""
    caveats: tuple[str, ...]
    change: str
    """Observation that would change the verdict."""
    run_seconds: float
    """Seconds of one run on one core, roughly: for the estimate before the runs. Those of the package are means of the
    published runs, on the cores of one server."""
    tuning: Tuning | None = None
    timed: tuple[Contrast, ...] = ()
    """Contrasts by seconds, which hang on the machine: a table apart, no part of the verdict."""
    held_out: bool = False
    """True if the figure has the evaluations' numbers, in place of those of the training's own samples."""
    drawn: tuple[str, ...] = ()
    """Arms that the figure shows, no part of the hash; empty: all of them."""
    collapse: str = "not part of this study"
    """Definition of a collapse."""
    afterwards: tuple[str, ...] = ()
    """Remarks on what was noticed after the design was fixed; no part of the hash."""
    limits: str = ""
    """Part of the claim that the verdict leaves open, said beside it; no part of the hash."""
    later: str = ""
    """Part of the design that came when results were known; no part of the hash."""
    quick_seeds: int = 3
    quick_steps: int = 15
    is_pilot: bool = False

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name is {self.name!r}: its files are called so, give letters, digits, -, _ and .")
        if len(set(names)) < len(names):
            raise ValueError(f"study {self.name}: arms are called {', '.join(names)}: give each a name of its own")
        for contrast in (*self.contrasts, *self.controls, *self.timed):
            if unknown := set(contrast.arms) - set(names):
                raise ValueError(
                    f"study {self.name}: the contrast {contrast.what!r} has the arm {min(unknown)!r}: give one of "
                    f"{', '.join(names)}"
                )
            if not contrast.counts:
                raise ValueError(f"study {self.name}: counts of {contrast.what!r} is 0: give what counts as an effect")
        if unknown := set(self.drawn) - set(names):
            raise ValueError(f"study {self.name}: drawn has {min(unknown)!r}: give some of {', '.join(names)}")
        if self.tuning is not None and (both := set(self.tuning.seeds) & set(self.seeds)):
            raise ValueError(f"study {self.name}: seeds and tuning.seeds have {min(both)}: tune on other seeds")

    @property
    def controls(self) -> tuple[Contrast, ...]:
        return (*self.positive, *self.negative)

    @property
    def figure(self) -> str:
        """Name of the metric that the figure shows."""
        return f"held-out {self.curve}" if self.held_out else self.curve

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def label(self) -> str:
        """Name of its files."""
        return f"{self.name}{'-quick' * self.is_pilot}{'-' * bool(self.gpu)}{self.gpu.replace(':', '-')}"

    @property
    def gpu(self) -> str:
        """The device on which its runs are computed, if it is not the CPU."""
        device = self.arms[0].config.device
        return device if device.startswith("cuda") else ""

    @property
    def command(self) -> str:
        """Command that repeats it."""
        return f"proximo study {self.name}{' --quick' * self.is_pilot}{' --device ' * bool(self.gpu)}{self.gpu}"

    def on(self, device: str) -> "Study":
        """The same with its runs on a device, in float32 as on a CPU. On another one it is another design: their
        results are not mixed, and what was noticed in the one is not said of the other."""
        if device == self.arms[0].config.device:
            return self
        arms = (replace(arm, config=replace(arm.config, device=device, dtype="float32")) for arm in self.arms)
        return replace(self, arms=tuple(arms), afterwards=(), limits="", later="")

    def quick(self) -> "Study":
        """A pilot: few seeds and steps, the arms of the first contrast and the controls, no tuning."""
        contrasts = self.contrasts[:1]
        needed = {name for each in (*contrasts, *self.controls) for name in each.arms}
        arms = (replace(arm, config=_shorter(arm.config, self.quick_steps)) for arm in self.arms if arm.name in needed)
        first = self.arms[0].config.steps
        return replace(
            self,
            arms=tuple(arms),
            seeds=self.seeds[: self.quick_seeds],
            contrasts=contrasts,
            drawn=tuple(name for name in self.drawn if name in needed),
            tuning=None,
            timed=(),
            run_seconds=self.run_seconds * min(self.quick_steps / first, 1.0),
            is_pilot=True,
            limits="",
            later="",
        )


def _shorter(config: RunConfig, steps: int) -> RunConfig:
    steps = min(steps, config.steps)
    every, value = config.evaluation.every, config.value
    return replace(
        config,
        steps=steps,
        evaluation=replace(config.evaluation, every=None if every is None else min(every, steps)),
        value=None if value is None else replace(value, pretrain_steps=min(value.pretrain_steps, steps - 1)),
    )


def design(study: Study) -> dict[str, Any]:
    """Design of a study, all that is fixed before the runs, as plain values."""
    tuning = study.tuning
    return {
        "name": study.name,
        "title": study.title,
        "pilot": study.is_pilot,
        "claim": study.claim,
        "source": study.source,
        "question": study.question,
        "arms": {arm.name: _plain_arm(arm) for arm in study.arms},
        "seeds": list(study.seeds),
        "contrasts": [_plain(each) for each in study.contrasts],
        "positive controls": [_plain(each) for each in study.positive],
        "negative controls": [_plain(each) for each in study.negative],
        "tuning": None
        if tuning is None
        else {"rates": list(tuning.rates), "seeds": list(tuning.seeds), "measure": tuning.measure.what},
        "collapse": study.collapse,
        "caveats": list(study.caveats),
        **({"by seconds": [_plain(each) for each in study.timed]} if study.timed else {}),
    }


def design_hash(study: Study) -> str:
    """SHA-256 of the design as canonical JSON."""
    return digest(design(study))


def _plain_arm(arm: Arm) -> dict[str, Any]:
    course = {} if arm.course is None else {"course": essence(arm.course)}
    return {"config": essence(arm.config), "tuned": arm.tuned, **course}


def _plain(contrast: Contrast) -> dict[str, Any]:
    measure = contrast.measure
    return {
        "what": contrast.what,
        "arm": contrast.arm,
        "against": contrast.against,
        "measure": {"name": measure.name, "unit": measure.unit, "what": measure.what, "grain": measure.grain},
        "counts": contrast.counts,
    }
