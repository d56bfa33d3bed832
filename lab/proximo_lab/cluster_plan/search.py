"""The plan of a run on many GPUs: how to split them between learner ranks and engines, and what each split gives."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proximo.planning.cards import DeviceCard
from proximo.planning.holdings import Holding, holdings
from proximo.planning.memory import StepSize
from proximo.planning.plan import Switch, planned_dtype
from proximo.planning.ranks import RankCount, RankMemory, RankTime, rank_memory, rank_time
from proximo.rl.config import RunConfig
from proximo_lab.cluster_plan.hardware import Engine, smallest_engine
from proximo_lab.cluster_plan.lengths import Lengths, other_tails
from proximo_lab.cluster_plan.outcome import Outcome
from proximo_lab.cluster_plan.rules import aggregate, between, in_flight
from proximo_lab.cluster_plan.simulate import Learner, Work, groups_needed, simulate
from proximo_lab.cluster_plan.timings import PREDICTED, Timings

RULES = {"in_flight": in_flight, "between": between, "aggregate": aggregate}
"""Rules by when weights change: under running requests, between steps, or under requests without a hard bound."""
SPLITS = 9
"""Splits that are tried at first; then those around the best."""
MAX_STALENESS = 64
"""Steps that engines may be ahead in a plan; the time of a simulation grows with them."""
MEASURED = 4
"""Steps that are measured, after those in which the engines fill."""


@dataclass(frozen=True)
class Cluster:
    """The GPUs that a run is planned for."""

    card: DeviceCard
    gpus: int
    per_node: int = 8
    network: float = 50e9
    """Bytes per second between nodes, for each GPU."""
    engine_gpus: int | None = None
    """GPUs of an engine; None: the fewest that hold the model."""

    def __post_init__(self) -> None:
        if self.gpus < 2:
            raise ValueError(f"gpus is {self.gpus}: give at least 2, one to learn and one to sample")
        if self.per_node < 1:
            raise ValueError(f"gpus_per_node is {self.per_node}: give at least 1")
        if not 0 < self.network < math.inf:
            raise ValueError(f"network is {self.network:g}: give bytes per second, above 0")
        if self.engine_gpus is not None and self.engine_gpus < 1:
            raise ValueError(f"engine_gpus is {self.engine_gpus}: give at least 1")

    @property
    def unit(self) -> int:
        """GPUs that a split moves: whole nodes where there are several."""
        return self.per_node if self.gpus >= 2 * self.per_node else 1


@dataclass(frozen=True)
class Point:
    """A split with a staleness, and what was simulated."""

    ranks: RankCount
    engines: int
    engine_gpus: int
    slots: int
    staleness: int
    idle: int
    """GPUs that are left over: they make no engine."""
    memory: RankMemory
    time: RankTime
    outcome: Outcome = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.outcome.seconds

    @property
    def sampling(self) -> int:
        """GPUs of the engines."""
        return self.engines * self.engine_gpus

    def flags(self, switch: Switch) -> str:
        """The flags of `proximo train` that make this split."""
        ranks = [("ranks", self.ranks.number), ("ranks.shard", self.ranks.shard % self.ranks.number)]
        engines = [("sampler.type", "Fleet"), ("sampler.engines", self.engines)]
        wide = [("sampler.tensor-parallel", self.engine_gpus if self.engine_gpus > 1 else 0)]
        in_flight = "in_flight" if self.staleness and switch != "between" else 0
        ahead = [("ahead.staleness", self.staleness), ("ahead.switch", in_flight)]
        return " ".join(f"--{name} {value}" for name, value in [*ranks, *engines, *wide, *ahead] if value)

    @property
    def used(self) -> float:
        """Share of all GPUs' time in which a learner rank trains or an engine decodes."""
        busy = self.ranks.number * self.outcome.learner_busy + self.sampling * self.outcome.engines_busy
        return busy / (self.ranks.number + self.sampling + self.idle)


ENOUGH = 1.05
"""Seconds of a split over those of the fastest, up to which a smaller staleness is preferred."""


@dataclass(frozen=True)
class ClusterPlan:
    """Plan of a cluster; everything in it is predicted."""

    model: str
    parameters: int
    cluster: Cluster
    size: StepSize
    lengths: str
    switch: Switch
    push: float
    points: tuple[Point, ...]
    tails: tuple[tuple[str, Point], ...]
    """Results of the best split of each staleness if completions have a shorter or longer tail: the lengths, and the
    split."""
    timings: Timings

    def best(self, staleness: int) -> Point:
        """The split with the fewest seconds a step."""
        return min((each for each in self.points if each.staleness == staleness), key=lambda each: each.seconds)

    @property
    def preferred(self) -> Point:
        """The least stale of the best splits that is within 5 % of the fastest."""
        best = [self.best(staleness) for staleness in self.staleness]
        enough = ENOUGH * min(point.seconds for point in best)
        return next(point for point in best if point.seconds <= enough)

    @property
    def staleness(self) -> list[int]:
        return sorted({each.staleness for each in self.points})

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "gpus": self.cluster.gpus,
            "card": self.cluster.card.name,
            "lengths": self.lengths,
            "switch": self.switch,
            "push_seconds": self.push,
            "timings": self.timings.remark,
            "tails": [{"lengths": lengths, **_summary(each)} for lengths, each in self.tails],
            "points": [_summary(each) for each in self.points],
            "flags": self.preferred.flags(self.switch),
            "best": {str(each): _summary(self.best(each)) for each in self.staleness},
        }


def _summary(point: Point) -> dict[str, object]:
    outcome = point.outcome
    return {
        "staleness": point.staleness,
        "learners": point.ranks.number,
        "shard": point.ranks.shard,
        "engines": point.engines,
        "engine_gpus": point.engine_gpus,
        "seconds": point.seconds,
        "update_seconds": outcome.updating,
        "waiting_seconds": outcome.waiting,
        "learner_busy": outcome.learner_busy,
        "engines_busy": outcome.engines_busy,
        "live_per_engine": outcome.live_per_engine,
        "rank_bytes": point.memory.total,
        "ages": outcome.ages,
        "token_ages": outcome.token_ages,
        "oldest": outcome.oldest,
    }


def plan_cluster(
    config: RunConfig,
    cluster: Cluster,
    lengths: Lengths,
    *,
    prompt_tokens: int,
    staleness: Sequence[int] = (0, 1, 2, 4),
    switch: Switch = "in_flight",
    timings: Timings = PREDICTED,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> ClusterPlan:
    """Simulate splits of the GPUs for each staleness. ValueError if no split holds the model. `say` is told what is
    being waited for."""
    if max(staleness) > MAX_STALENESS:
        raise ValueError(f"staleness is {max(staleness)}: give at most {MAX_STALENESS} steps")
    full, small = holdings(config, planned_dtype(config.dtype, cluster.card), compiled=config.compile)
    holding = full if config.adapter is None else small
    run = _Planner(config, holding, cluster, lengths, prompt_tokens, switch, timings, seed)
    tried: dict[tuple[int, int], Point] = {}
    tails: dict[tuple[int, Lengths], Point] = {}
    choices = run.splits()
    for each in staleness:
        say(f"simulating staleness {each}, {len(choices)} splits of {cluster.gpus:,} GPUs")
        for learners in choices:
            tried[each, learners] = run.point(learners, each)
        best = min((point for (k, _), point in tried.items() if k == each), key=lambda point: point.seconds)
        for learners in run.around(best.ranks.number, choices):
            tried[each, learners] = run.point(learners, each)
            best = min(best, tried[each, learners], key=lambda point: point.seconds)
        tails |= {(each, tail): run.point(best.ranks.number, each, tail) for tail in other_tails(lengths)}
    points = tuple(tried[key] for key in sorted(tried))
    return ClusterPlan(
        config.model,
        holding.shape.parameters,
        cluster,
        run.size,
        str(lengths),
        switch,
        run.engine.push_seconds,
        points,
        tuple((str(tail), point) for (_, tail), point in tails.items()),
        timings,
    )


class _Planner:
    """Settings that all splits share."""

    def __init__(
        self,
        config: RunConfig,
        holding: Holding,
        cluster: Cluster,
        lengths: Lengths,
        prompt_tokens: int,
        switch: Switch,
        timings: Timings,
        seed: int,
    ) -> None:
        self.config, self.holding, self.cluster, self.timings = config, holding, cluster, timings
        self.size = StepSize.of(config, prompt_tokens)
        self.lengths, self.rule, self.seed = lengths, RULES[switch], seed
        width, longest = holding.dtype.itemsize, prompt_tokens + self.size.max_tokens
        if cluster.engine_gpus is None:
            self.engine = smallest_engine(holding.shape, width, cluster.card, cluster.per_node, longest)
        else:
            self.engine = Engine(holding.shape, width, cluster.card, cluster.engine_gpus, cluster.per_node)
        drawn = lengths.draw(self.size.groups, self.size.group_size, seed)
        self.one_step = [[int(each) for each in group] for group in drawn.tolist()]
        self.slots = self.engine.slots(prompt_tokens + float(drawn.mean()), longest)
        if not self.slots:
            raise ValueError(
                f"engine_gpus is {self.engine.gpus}: keys of one completion of {longest:,} tokens do not fit on "
                f"{self.engine.gpus} {cluster.card.name} next to the weights; give more"
            )
        self.work = Work(
            self.size.groups,
            self.size.group_size,
            prompt_tokens,
            push=self.engine.push_seconds,
            recompute=switch != "between",
        )

    def splits(self) -> list[int]:
        """Learner ranks that are tried: evenly over all that leave an engine, hold the weights and have work, since
        whole groups go to ranks."""
        unit, max_ranks = self.cluster.unit, self.cluster.gpus - self.engine.gpus
        possible = [ranks for ranks in range(unit, max_ranks + 1, unit) if self.ranks(ranks) is not None]
        useful = [ranks for ranks in possible if ranks - unit < self.size.update_groups]
        possible = useful or possible[:1]
        if not possible:
            everywhere = RankCount(max(max_ranks, 1), max(max_ranks, 1), self.cluster.per_node, self.cluster.network)
            needed = rank_memory(self.holding, self.size, self.cluster.card, everywhere).total
            raise ValueError(
                f"gpus is {self.cluster.gpus}: with one engine of {self.engine.gpus} the other {max(max_ranks, 0)} "
                f"cannot hold the learner (a rank would need {needed / 2**30:,.0f} GiB); give more GPUs, or larger ones"
            )
        count = min(SPLITS, len(possible))
        return [possible[int((number + 0.5) * len(possible) / count)] for number in range(count)]

    def around(self, best: int, tried: Sequence[int]) -> list[int]:
        """Splits half-way to the neighbours of the best."""
        index, unit = tried.index(best), self.cluster.unit
        middles = [(best + each) // 2 // unit * unit for each in (*tried[:index][-1:], *tried[index + 1 :][:1])]
        return [each for each in middles if each not in tried and each > 0 and self.ranks(each) is not None]

    def ranks(self, number: int) -> RankCount | None:
        """Sharded over as few nodes as hold it, so that little travels between nodes; None if it does not fit."""
        step = min(self.cluster.per_node, number)
        for shard in range(step, number + 1, step):
            if number % shard == 0:
                ranks = RankCount(number, shard, self.cluster.per_node, self.cluster.network)
                if rank_memory(self.holding, self.size, self.cluster.card, ranks).fits:
                    return ranks
        return None

    def point(self, learners: int, staleness: int, lengths: Lengths | None = None) -> Point:
        """A split, with the plan's own lengths or others."""
        ranks, card, rule = self.ranks(learners), self.cluster.card, self.rule(staleness)
        assert ranks is not None
        time = rank_time(self.config, self.holding, self.size, self.one_step, card, ranks)
        engines = (self.cluster.gpus - learners) // self.engine.gpus
        tokens = sum(map(sum, self.one_step)) + self.size.groups * self.size.prompt_tokens
        learner = Learner(time.optimizer, (time.total - time.optimizer) / tokens)
        first = staleness + 2
        groups = groups_needed(self.work, rule, first + MEASURED)
        drawn = (lengths or self.lengths).draw(groups, self.size.group_size, self.seed)
        outcome = simulate(
            self.timings.engines(self.engine.engines(engines, self.slots)),
            self.timings.learner(learner),
            self.work,
            rule,
            drawn,
            steps=first + MEASURED,
            first=first,
        )
        memory = rank_memory(self.holding, self.size, card, ranks)
        idle = self.cluster.gpus - learners - engines * self.engine.gpus
        return Point(ranks, engines, self.engine.gpus, self.slots, staleness, idle, memory, time, outcome)
