"""Direct preference optimisation: train a policy on ranked completions, without a reward model or sampling."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proximo.config import toml
from proximo.config.unions import check_kinds
from proximo.data import DataFile, Mistakes
from proximo.learner.ranks import Ranks
from proximo.losses.pairwise import Dpo, Ipo, ranked_pairs
from proximo.models import Precision, load_model, load_tokenizer, pick_device, pick_dtype, score_rows
from proximo.models.adapters.lora import Lora, add_lora
from proximo.models.adapters.quantized import check_quantization
from proximo.models.adapters.starting import base_for, check_adapter
from proximo.models.compiling import allow_compiling
from proximo.models.loading import skeleton
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.shipped import resolve
from proximo.models.stop_tokens import declared_ends
from proximo.runs.session import RunSession
from proximo.supervised.encoding import Encoded, EncodedRows, Prepared, prepare, rankings_reader
from proximo.supervised.fitting import FitOptions, Fitted, fit_session
from proximo.supervised.kept_checkpoints import KeptCheckpoints
from proximo.supervised.overview import Overview, check_speaks
from proximo.supervised.reference import (
    Reference,
    compute_reference,
    micro_batched,
    read_reference,
    summed_logprobs,
    weights_fingerprint,
    write_reference,
)
from proximo.supervised.snapshots import once, refuse_other_items
from proximo.supervised.stage_model import (
    HoldsStages,
    StageModel,
    check_held,
    loading_place,
    stage_model,
    starting_path,
)
from proximo.types.tensor_types import Float

METRICS = ("loss", "accuracy", "margin", "chosen_reward", "chosen_logprob")
"""Held-out metrics of which one value is better than another."""


@dataclass(frozen=True)
class DpoConfig:
    """Config of a DPO run: everything that determines its results."""

    data: DataFile
    """Ranked completions: chosen and rejected, or a list with the best first."""
    model: str = "tiny-arithmetic"
    """Model to start from: a folder, a run folder, a hub id or a model name."""
    adapter: Lora | None = None
    """Adapter that is trained in the place of the model's own weights. None: the model itself is trained."""
    reference: str | None = None
    """Reference model. None: the model that training starts from."""
    reference_logprobs: str | None = None
    """Path of an earlier run's reference.parquet (same data, same reference). None: computed before training."""
    loss: Dpo | Ipo = field(default_factory=Dpo)
    fit: FitOptions = field(default_factory=lambda: FitOptions(learning_rate=1e-6))
    prompt_column: str | None = None
    """Column with the prompt. None: prompt, or what chosen and rejected begin with."""
    chosen_column: str | None = None
    """Column with the preferred completion, or the whole conversation. None: chosen."""
    rejected_column: str | None = None
    """Column with the other one. None: rejected."""
    ranking_column: str | None = None
    """Column with several completions in the place of these, the best first. None: ranking."""
    checkpoints: KeptCheckpoints | None = None
    """Checkpoints that are kept on the way. None: the best weights alone, at the end."""
    device: str = "auto"
    """Torch device of the model. `auto`: a GPU if there is one, else the CPU."""
    dtype: Precision = "auto"
    """Data type of the weights. `auto`: float32 on a CPU, bfloat16 with float32 master weights on a GPU."""
    compile: bool = True
    """Compile the model's layers on a GPU (takes some seconds once). Has no effect on a CPU."""
    seed: int = 0
    """Random seed of the run."""
    ranks: Ranks | None = None
    """Processes that hold the model in shards between them. None: one process holds all of it."""

    def __post_init__(self) -> None:
        check_kinds(self)
        check_held(self.ranks, self.fit, self.adapter)


def dpo(
    config: DpoConfig,
    folder: Path,
    say: Callable[[str], None],
    session: RunSession | None = None,
    ranks: HoldsStages | None = None,
) -> Fitted:
    """Check the data, compute the reference log-probs once, then train with one model in memory. `ranks` holds that
    model on several processes.

    Example: dpo(DpoConfig(DataFile("pairs.jsonl"), model="runs/sft"), Path("runs/dpo"), print)
    """
    result = once(folder, toml.dumps(config), session, lambda taken: _dpo(config, taken, say, ranks))
    return Fitted.from_dict(result, folder)


def _dpo(
    config: DpoConfig, session: RunSession, say: Callable[[str], None], ranks: HoldsStages | None
) -> dict[str, Any]:
    """Train; the result is a `Fitted` as a dict, as it is stored."""
    overview = dpo_overview(config)
    tokenizer, data = overview.tokenizer, overview.data
    refuse_other_items(session, data.train)
    overview.tell(say, session.folder)
    path = starting_path(config, session.folder, ranks) or config.model
    reference_path = path if config.reference in (None, config.model) else resolve(config.reference)
    known = _known(config, data)
    shared, batch, budget = reference_path == path, config.fit.batch, config.fit.token_budget
    model = _loaded(config, reference_path, ranks if shared else None, trained=shared)
    weights = weights_fingerprint(model, None if ranks is None else _dtype(config))
    if known is not None and known.weights != weights:
        raise ValueError(
            f"reference_logprobs is {config.reference_logprobs!r}: it was computed by another model than "
            f"{reference_path!r}; leave it out to compute it again"
        )
    if known is None and (ranks is None or not shared):
        known = compute_reference(partial(summed_logprobs, model), data, weights, batch, budget)
    if not shared:
        del model  # before the next one is loaded, so that only one model is in memory at a time
        model = _loaded(config, path, ranks, trained=True)
    held = _held(config, model, path, ranks)
    if known is None:  # ranks share the passes; a new adapter adds 0
        assert ranks is not None
        known = compute_reference(ranks.scored, data, weights, batch, budget)
    reference = known

    def report() -> None:
        data.report(session.log, say)
        write_reference(session.folder / "reference.parquet", reference, data)

    stage = Preferences(model, data, reference, config.loss, config.fit)
    fitted = fit_session(session, stage, held, config, tokenizer, say, report, ranks)
    return replace(fitted, skipped=len(data.mistakes)).to_dict()


def dpo_overview(config: DpoConfig) -> Overview:
    """Refuse whatever DPO refuses before it loads weights; tell the rest."""
    path, reference_path = resolve(config.model), resolve(config.reference or config.model)
    if config.adapter is not None:
        check_adapter(path, config.adapter)
        check_quantization(config.adapter.quantize_base, pick_device(config.device))
    tokenizer = load_tokenizer(path)
    data = prepare(config.data, rankings_reader(config), tokenizer, declared_ends(path))
    check_speaks(path)
    _check_reference(config, reference_path, tokenizer, data)
    _known(config, data)
    return Overview(config, tokenizer, data, config.data.path, skeleton(path), _loss(config), METRICS).check()


def _check_reference(config: DpoConfig, path: str, tokenizer: PreTrainedTokenizerBase, data: Prepared) -> None:
    """Refuse a reference that does not read the model's tokens, or not as many."""
    if config.reference is None:
        return
    check_speaks(path)
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"reference is {config.reference!r}, model {config.model!r}: their vocabularies differ, so their "
            "log-probs cannot be compared; use a reference with the model's own tokenizer"
        )
    data.check_room(skeleton(path))


def _known(config: DpoConfig, data: Prepared) -> Reference | None:
    """Log-probs of the reference from an earlier run, where the config names them."""
    return None if config.reference_logprobs is None else read_reference(config.reference_logprobs, data)


def _loss(config: DpoConfig) -> str:
    """The loss in words."""
    of = "the model they begin with" if config.reference is None else config.reference
    ratios = "log p - log p of the reference, per token" if config.loss.averages else "log p - log p of the reference"
    margin = f"the chosen minus the rejected completion's {ratios}"
    return f"{type(config.loss).__name__} with beta {config.loss.beta:g} of the margin, {margin}; the reference: {of}"


def _dtype(config: DpoConfig) -> torch.dtype:
    return pick_dtype(config.dtype, pick_device(config.device))


def _loaded(config: DpoConfig, path: str, ranks: HoldsStages | None, *, trained: bool) -> PreTrainedModel:
    """A whole model; only the one that is trained may be quantised."""
    quantization = None if config.adapter is None or not trained else config.adapter.quantize_base
    dtype, device = None if ranks else _dtype(config), loading_place(pick_device(config.device), ranks)
    model = load_model(path, device=device, dtype=dtype, quantization=quantization)
    allow_compiling(model, config.compile)
    return model


def _held(config: DpoConfig, model: PreTrainedModel, path: str, ranks: HoldsStages | None) -> StageModel:
    """Hold the model in this process or on ranks; an adapter is added to it first, if there is one."""
    if config.adapter is not None:
        add_lora(model, config.adapter, base=base_for(path), seed=config.seed)
    return stage_model(model, config.fit, config.seed, _dtype(config), ranks)


def dpo_without_data(config: DpoConfig, ranks: HoldsStages) -> "Preferences":
    """The stage of a process that computes micro-batches for another one."""
    model = _loaded(config, path := resolve(config.model), ranks, trained=True)
    _held(config, model, path, ranks)
    return Preferences(model, Prepared([], [], Mistakes()), Reference((), (), "", ""), config.loss, config.fit)


class ScoredRankings(NamedTuple):
    """A micro-batch of rankings."""

    rows: EncodedRows
    known: list[float]
    """Log-prob of each row under the reference."""
    share: float
    """Weight of each ranking in the step."""


@dataclass(frozen=True)
class Preferences:
    """Rankings to train on; each prompt has equal weight, shared equally by all pairs of its completions.

    DPO compares log-probs summed over a completion's tokens, IPO their means, the form its authors confirmed.
    """

    model: PreTrainedModel
    data: Prepared
    reference: Reference
    loss: Dpo | Ipo
    options: FitOptions

    @property
    def size(self) -> int:
        return len(self.data.train)

    @property
    def train(self) -> Sequence[Encoded]:
        return self.data.train

    @property
    def kept(self) -> Sequence[Encoded]:
        return self.data.held_out

    def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        return map(self.part_loss, self.parts(items))

    def parts(self, items: Sequence[int], local: Sequence[int] | None = None) -> list[ScoredRankings]:
        chosen = items if local is None else [items[index] for index in local]
        rankings, sums = [self.train[item] for item in chosen], [self.reference.train[item] for item in chosen]
        return self._parts(rankings, sums, len(chosen), 1 / len(items))

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        return self.metrics([self.measured(part) for part in self.kept_parts()])

    def kept_parts(self, local: Sequence[int] | None = None) -> list[ScoredRankings]:
        chosen = range(len(self.kept)) if local is None else local
        rankings, sums = [self.kept[item] for item in chosen], [self.reference.held_out[item] for item in chosen]
        return self._parts(rankings, sums, self.options.batch, 1 / len(self.kept)) if self.kept else []

    def measured(self, part: ScoredRankings) -> dict[str, Tensor]:
        loss, metrics = self.part_loss(part)
        return {"loss": loss, **metrics}

    def metrics(self, measures: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        totals: dict[str, float] = {}
        for part in measures:
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _parts(
        self, rankings: Sequence[Encoded], sums: Sequence[Sequence[float]], batch: int, share: float
    ) -> list[ScoredRankings]:
        parts = []
        for numbers, rows in micro_batched(rankings, batch, self.options.token_budget):
            known = [value for number in rows.group.unique().tolist() for value in sums[numbers[number]]]
            parts.append(ScoredRankings(rows, known, share))
        return parts

    def part_loss(self, part: ScoredRankings) -> tuple[Float[Tensor, ""], Mapping[str, Tensor]]:
        """The loss of a micro-batch in which every prompt has the same share of the step."""
        rows, known, share = part
        logprobs = score_rows(self.model, rows).logprobs.sum(dim=1)
        lengths = rows.lengths.to(logprobs)
        size = lengths if self.loss.averages else torch.ones_like(lengths)
        ratio = logprobs - torch.tensor(known, dtype=logprobs.dtype, device=logprobs.device)
        pairs = ranked_pairs(rows.group).to(logprobs.device)
        weights = share * pairs.weights.to(logprobs)
        chosen, rejected = (ratio / size)[pairs.chosen], (ratio / size)[pairs.rejected]
        metrics = {
            "accuracy": chosen > rejected,
            "margin": self.loss.beta * (chosen - rejected),
            "chosen_reward": self.loss.beta * chosen,
            "rejected_reward": self.loss.beta * rejected,
            "chosen_logprob": (logprobs / size)[pairs.chosen],
            "rejected_logprob": (logprobs / size)[pairs.rejected],
            "drift": (ratio / lengths)[pairs.chosen],
        }
        loss = (self.loss(chosen, rejected) * weights).sum()
        return loss, {name: (value.detach() * weights).sum() for name, value in metrics.items()}
