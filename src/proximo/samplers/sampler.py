"""Interface of samplers, and how a run gets them; the engines are in the other files here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from proximo.config.unions import check_kinds
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.sampled import SampledPolicy
from proximo.samplers.in_progress import BegunRequests
from proximo.system.timeline import Interval
from proximo.types import Completion, Request

__all__ = [
    "GrowingSampler",
    "More",
    "RunSamplers",
    "SampledPolicy",
    "Sampler",
    "SamplerEvent",
    "SamplerFactory",
    "SamplingOptions",
    "Snapshot",
    "Stream",
    "WeightHistory",
    "build_samplers",
    "gathered",
    "streamed",
    "takes_more",
]

Stream = Iterator[tuple[int, tuple[Completion, ...]]]
"""The number of each request, or problem, and its completions, as they end."""


COLDEST = 1e-10
"""Lowest temperature above 0: divided by less, logits may be beyond what float32 holds."""


@dataclass(frozen=True)
class SamplingOptions:
    """Options of how tokens are drawn and when a completion ends.

    Example: SamplingOptions(temperature=0.7, top_p=0.95, max_tokens=512, stop=("</answer>",))
    """

    temperature: float = 1.0
    """Sampling temperature, by which logits are divided. 0: greedy, the most likely token, whose log-prob is then 0."""
    top_p: float = 1.0
    """Probability mass of the smallest set of most likely tokens to draw from (nucleus sampling). 1: all tokens.
    Refused in training, where ratios need the whole distribution; for evaluation, chat and serving."""
    top_k: int | None = None
    """Number of most likely tokens to draw from. None: all tokens. Refused in training, as `top_p`."""
    min_p: float = 0.0
    """Smallest probability to draw from, as a share of the most likely token's. 0: all tokens. Refused in training,
    as `top_p`."""
    max_tokens: int = 256
    """Maximum tokens of a completion; one that has not ended by then is cut."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; its text is cut before them, its tokens are not.
    The text has no special tokens, so that a stop string is found even if such a token splits it."""

    def __post_init__(self) -> None:
        check_kinds(self, "sampling.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: give 0 (greedy) or a positive number")
        if 0 < self.temperature < COLDEST:
            raise ValueError(f"temperature is {self.temperature}: give 0 (greedy) or at least {COLDEST:g}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a mass above 0, at most 1 (1 keeps every token)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: give at least 1, or None to keep every token")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: give a share from 0 to 1 (0 keeps every token)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: give at least 1")
        if "" in self.stop:
            raise ValueError(f"stop is {self.stop}: an empty string would end every completion, leave it out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True where top_p, top_k or min_p cut the distribution.

        The log-probs of a completion are then under the cut distribution, which the learner does not compute.
        """
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


@runtime_checkable
class Sampler(Protocol):
    """Anything that completes prompts: a model of this process, or an engine that keeps weights of its own."""

    @property
    def repeats(self) -> bool:
        """True if equal calls give equal completions, to the bit. A resumed run then repeats the steps since its last
        checkpoint exactly; where this is False the run says so when it starts and when it is resumed."""
        ...

    def refresh(self, policy: SampledPolicy, version: int) -> int:
        """Take the policy's weights, which have seen `version` updates; return the version it samples with from now on.

        A run calls this before every training step and before every evaluation. A sampler that decodes with
        `policy.model` has nothing to do; an engine loads `policy.weights()`, unless it already has this version.
        """
        ...

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Stream:
        """The number of each request and its completions, as soon as all of them have ended: in any order, but in
        the same one for equal calls. Between two of them the model and torch's modes are as the caller left them.

        The random number behind a token depends on (seed, step, request.key, request.turn, sample, position) and on
        nothing else, so two requests of a call that share a key and a turn share their draws. `step` is an index: 0
        for the first training step, −1 for evaluations. `version` is what `refresh` returned; completions carry it.
        """
        ...


More = Callable[[], Sequence[Request]]
"""Requests that came since the last call; they are numbered on behind those before them."""


class GrowingSampler(Sampler, Protocol):
    """A sampler that takes requests while it samples: `takes_more` is True."""

    @property
    def takes_more(self) -> bool: ...

    def stream(
        self,
        requests: Sequence[Request],
        options: SamplingOptions,
        *,
        seed: int,
        step: int,
        version: int = 0,
        more: More = tuple,
    ) -> Stream:
        """The same as every sampler's. `more` is called between two of the completions that are yielded, and once
        before the stream ends."""
        ...


def takes_more(sampler: Sampler) -> TypeGuard[GrowingSampler]:
    """Tell whether a sampler takes requests while it samples; others are called again."""
    return bool(getattr(sampler, "takes_more", False))


def streamed(
    sampler: Sampler,
    requests: Sequence[Request],
    options: SamplingOptions,
    *,
    seed: int,
    step: int,
    version: int,
    more: More | None,
) -> Stream:
    """The stream of a sampler, with requests that come meanwhile if there may be some."""
    if more is None:
        return sampler.stream(requests, options, seed=seed, step=step, version=version)
    assert takes_more(sampler), "others are called again"
    return sampler.stream(requests, options, seed=seed, step=step, version=version, more=more)


@dataclass(frozen=True)
class Snapshot:
    """A policy's weights after `version` updates."""

    version: int
    weights: list[Tensor]


class WeightHistory(Protocol):
    """Older weights that later steps sample with: a checkpoint has to hold them, because the policy has moved on."""

    def kept(self) -> Sequence[Snapshot]:
        """The snapshots to save, the oldest first."""
        ...

    def load(self, kept: Sequence[Snapshot]) -> None:
        """Put back what `kept` returned."""
        ...


@dataclass(frozen=True)
class SamplerEvent:
    """Event of a sampler, for the events of a run."""

    kind: str
    message: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    warns: bool = False
    """True if the user is told of it at once."""


@dataclass(frozen=True)
class RunSamplers:
    """The samplers of a run."""

    training: Sampler
    """Samples the rollouts that are trained on."""
    evaluation: Sampler
    """Samples held-out problems from the current policy; often the same object as `training`."""
    differs: bool = False
    """True if `training` differs from the policy on purpose. Otherwise a gap at the first step that rounding does not
    explain stops the run."""
    history: WeightHistory | None = None
    """Older weights of `training` that checkpoints hold; None where the policy's weights are enough."""
    close: Callable[[], None] = lambda: None
    """Ends what the samplers started, such as engines; called when the run ends, however it ends."""
    take_events: Callable[[], Sequence[SamplerEvent]] = tuple
    """Returns what happened since the last call."""
    take_intervals: Callable[[], Sequence[Interval]] = tuple
    """Returns what engines, or other processes, did since the last call, for the time line of a step."""
    drop: Callable[[int, int], None] | None = None
    """Gives up the requests of a step and a key. A sampler that has this is asked on several threads at a time, also
    while it is refreshed: completions continue with the new weights. None: it does one thing at a time."""
    begun: BegunRequests | None = None
    """Tokens of completions that have not ended, for checkpoints; None: a resumed run samples them from the start."""

    def __post_init__(self) -> None:
        sampler, history = ("repeats", "refresh", "stream"), () if self.history is None else ("kept", "load")
        for name, members in {"training": sampler, "evaluation": sampler, "history": history}.items():
            part = getattr(self, name)
            if missing := [member for member in members if not hasattr(part, member)]:
                raise ValueError(
                    f"RunSamplers.{name} is of {type(part).__name__}, which has no {' and no '.join(missing)}: it "
                    f"must have {', '.join(members)}"
                )


@runtime_checkable
class SamplerFactory(Protocol):
    """The options of a sampler: a frozen dataclass that a config names and that builds the samplers of a run."""

    @property
    def copies(self) -> int:
        """Copies of the policy's weights that it keeps on the run's device, for the memory estimate."""
        ...

    def build(
        self, policy: SampledPolicy, tokenizer: PreTrainedTokenizerBase, *, slots: int, record_routes: bool
    ) -> RunSamplers:
        """The samplers for a policy. `slots` is the number of rows to decode at once. With `record_routes` the
        completions to train on carry the experts that each token went to; raise ValueError where that is not possible.
        """
        ...


@runtime_checkable
class CheckedFactory(Protocol):
    """A factory that can say before a run whether what it needs is there."""

    def check(self) -> list[str]:
        """Remarks on what the run will wait for; ValueError if it cannot sample, before any model is loaded."""
        ...


def build_samplers(
    factory: Any,
    policy: SampledPolicy,
    tokenizer: PreTrainedTokenizerBase,
    *,
    slots: int,
    record_routes: bool,
) -> RunSamplers:
    """The samplers that a run's `sampler`, a `SamplerFactory`, builds; ValueError where it builds something else."""
    made = factory.build(policy, tokenizer, slots=slots, record_routes=record_routes)
    if not isinstance(made, RunSamplers):
        raise ValueError(
            f"sampler {type(factory).__name__}.build returned {made!r}: it must return a "
            "proximo.samplers.sampler.RunSamplers"
        )
    return made


def gathered(stream: Iterable[tuple[int, tuple[Completion, ...]]], count: int) -> list[tuple[Completion, ...]]:
    """The completions of `count` requests, in the order of the requests."""
    completions = dict(stream)
    return [completions[number] for number in range(count)]
