"""Shared by the tables of times: our side compared with the peers, phase by phase."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from proximo.planning.roofline import Drawn
from proximo.planning.workloads import Workload
from proximo_lab.bench.report import Row, Verdict, short
from proximo_lab.bench.session import Failed, Session, Turn, seconds_of
from proximo_lab.bench.sides.numerics import Agreement, Learned, our_update
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.sides.trl import Settings, Trl
from proximo_lab.bench.sides.vllm import LogprobGap, Vllm
from proximo_lab.bench.timing import TOTAL, Phases, Ratio

GIB = 2**30
FIRST = "ours first s"
"""Column of the seconds of our first turn."""
ALONE = "ours alone: a peer would draw other lengths"
ADAPTED = "ours alone: peers are measured without adapters"
OF_LIMIT, OF_ARITHMETIC = "of the limit", "of the arithmetic"
"""Columns of the shares that a phase reached."""


@dataclass(frozen=True)
class Target:
    """Required speed-up over a peer in a phase."""

    phase: str
    factor: float
    peer: str = "TRL best"


@dataclass(frozen=True)
class Compared:
    """Times of our side and of the peers that succeeded."""

    ours: Phases
    first: Mapping[str, float]
    """Seconds of our first turn by phase, in which things are compiled and captured."""
    lengths: Sequence[Sequence[int]]
    """Lengths of our completions in each turn, group by group."""
    theirs: dict[str, Phases]
    failed: tuple[Failed, ...]
    alone: str
    """Reason why there are no peers. Empty otherwise."""
    refused: str
    """Reason why the row is refused: the sides compute different numbers. Empty otherwise."""
    details: dict[str, Any]

    def ratio(self, phase: str, peer: str) -> Ratio | None:
        """Time of the peer, as a multiple of ours."""
        return self.theirs[peer][phase] / self.ours[phase] if peer in self.theirs else None

    def verdicts(self, targets: Sequence[Target]) -> tuple[Verdict, ...]:
        ratios = [(target, self.ratio(target.phase, target.peer)) for target in targets]
        return tuple(
            Verdict(f"× {target.peer}", ratio.median, target.factor) for target, ratio in ratios if ratio is not None
        )

    def ratios(self, phase: str) -> dict[str, str]:
        """Time of each peer, as a multiple of ours."""
        ratios = {peer: self.theirs[peer][phase] / self.ours[phase] for peer in self.theirs}
        return {f"× {peer}": spread(ratio) for peer, ratio in ratios.items()}

    def figures(self, phase: str, unit: str, of: Callable[[float], float]) -> dict[str, str]:
        """A figure computed from each side's median seconds."""
        sides = {"ours": self.ours} | self.theirs
        return {f"{name} {unit}": short(of(phases[phase].median)) for name, phases in sides.items()}

    def turns(self, phase: str) -> Drawn:
        """The lengths and seconds of our turns."""
        return [*zip(self.lengths, self.ours[phase].seconds, strict=True)]

    def first_turn(self, phase: str) -> dict[str, str]:
        """Seconds of our first turn."""
        return {FIRST: short(sum(self.first.values()) if phase == TOTAL else self.first[phase])}

    def peak(self) -> dict[str, str]:
        """Peak memory of our side, if it was alone in memory."""
        peak = max(self.details["peaks"]["ours"].values(), default=0)
        return {} if self.theirs else {"ours GiB": f"{peak / GIB:.1f}"}

    @property
    def note(self) -> str:
        return self.refused or self.alone or "; ".join(f"{each.name} {each.why}" for each in self.failed)


def compared(
    session: Session,
    workload: Workload,
    settings: Sequence[Settings],
    *,
    turn: Callable[[Ours | Trl], Callable[[], Mapping[str, float]]],
    first: Callable[[Trl], object] | None = None,
    samples: bool,
    learns: bool,
) -> Compared:
    """Measure both sides; only ours if completions end at random and are sampled, or if an adapter is trained.

    `turn` is the repeated work; `first` is a peer's first turn if different: it shows what fits into memory. If a turn
    `learns`, the first updates of both sides are compared before anything is timed; if it also `samples`, that comes
    first, as in a run. Of an engine that makes rollouts alone, log-probs are compared.
    """
    peers, failed = [], []
    alone = ALONE if samples and workload.end_tokens else ADAPTED if workload.adapter else ""
    settings = () if alone else settings
    with ExitStack() as stack:
        for each in settings:
            peer = session.opened(workload, each, first or (lambda peer: turn(peer)()))
            if isinstance(peer, Failed):
                session.say(f"  {peer.name}: {peer.why}")
                failed.append(peer)
            else:
                stack.callback(peer.close)
                peers.append(peer)
        ours = session.ours(workload)
        engines = [] if alone or learns else session.engines(ours)
        for engine in engines:
            stack.callback(engine.close)
        theirs = {peer.settings.name: turn(peer) for peer in peers} | {each.name: each.rollout for each in engines}
        sides = [Turn("ours", turn(ours)), *(Turn(name, work) for name, work in theirs.items())]
        if learns:
            opening, learned = _first_update(ours, samples=samples)
            numerics = {peer.settings.name: session.agreement(learned, peer) for peer in peers}
        else:
            opening, numerics = session.begin(sides[0]), {each.name: each.gap() for each in engines}
        differing = [f"ours and {name} differ: {each}" for name, each in numerics.items() if not each.holds]
        phases = [] if differing else session.measure(sides, begun=len(peers) if learns else len(sides))
        details = _details(ours, workload, [*peers, *engines], sides, phases, numerics) | {"first turn": opening}
    names = [side.name for side in sides[1:]]
    mine, others = (phases[0], dict(zip(names, phases[1:], strict=True))) if phases else ({}, {})
    steps = session.options.steps
    lengths = ours.drawn[-steps:] if samples and workload.end_tokens else [workload.lengths] * steps
    return Compared(mine, opening, lengths, others, tuple(failed), alone, "; ".join(differing), details)


def _first_update(ours: Ours, *, samples: bool) -> tuple[dict[str, float], Learned]:
    """Seconds of our first rollout and update, and what the update computed on the fixed completions."""
    first = dict(ours.rollout()) if samples else {}  # before the update: the learner plans with the remaining memory
    start = ours.clock()
    learned = our_update(ours)
    return first | {"train": ours.clock() - start}, learned


def _details(
    ours: Ours,
    workload: Workload,
    peers: Sequence[Trl | Vllm],
    sides: Sequence[Turn],
    phases: Sequence[Phases],
    numerics: Mapping[str, Agreement | LogprobGap],
) -> dict[str, Any]:
    return {
        "workload": described(workload),
        "settings": {peer.name: peer.metadata for peer in peers},
        "training": vars(ours.options),
        "seconds": {side.name: seconds_of(each) for side, each in zip(sides, phases, strict=False)},
        "drawn": [{"tokens": sum(lengths), "longest": max(lengths)} for lengths in ours.drawn],
        "pages": ours.sampler.pages,
        "peaks": {"ours": dict(ours.watch.peaks), **{peer.name: dict(peer.peaks) for peer in peers}},
        "numerics": {name: each.numbers for name, each in numerics.items()},
    }


def described(workload: Workload) -> dict[str, Any]:
    lengths = workload.lengths
    shape = {**vars(workload.shape), "family": workload.shape.family.__name__}
    return {
        **vars(replace(workload)),
        "shape": shape,
        "adapter": None if workload.adapter is None else vars(workload.adapter),
        "completion": {"tokens": sum(lengths), "longest": max(lengths), "limit": workload.limit, "rows": len(lengths)},
    }


def spread(ratio: Ratio) -> str:
    """The median, with the lowest and the highest turn."""
    return f"{short(ratio.median)} ({short(ratio.lowest)}–{short(ratio.highest)})"


def refused_row(name: str, comparison: Compared) -> Row:
    return Row(name, note=comparison.note, refused=True, details=comparison.details)
