"""Train reward models on ranked completions, so that preferred ones score higher."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proximo.config import toml
from proximo.config.unions import check_kinds
from proximo.data import DataFile
from proximo.learner.ranks import Ranks
from proximo.losses.arithmetic import at_least_float32
from proximo.losses.pairwise import BradleyTerry, calibration_error, pair_accuracy, ranked_pairs
from proximo.models import Precision, load_tokenizer, pick_device, pick_dtype
from proximo.models.adapters.lora import Lora, add_lora, import_peft
from proximo.models.adapters.quantized import check_quantization, quantize
from proximo.models.adapters.starting import base_for
from proximo.models.adapters.targets import target_layers
from proximo.models.compiling import allow_compiling
from proximo.models.model_types import PreTrainedModel
from proximo.models.reward_models import HEAD, completion_scores, load_reward_model, pad_token, reward_skeleton
from proximo.models.shipped import resolve
from proximo.models.stop_tokens import declared_ends
from proximo.runs.session import RunSession
from proximo.supervised.encoding import Encoded, EncodedRows, prepare, rankings_reader, to_rows
from proximo.supervised.fitting import FitOptions, Fitted, fit_session
from proximo.supervised.kept_checkpoints import KeptCheckpoints
from proximo.supervised.overview import Overview, check_files
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

METRICS = ("loss", "accuracy", "score_gap", "calibration")
"""Held-out metrics of which one value is better than another."""


@dataclass(frozen=True)
class RewardModelConfig:
    """Config of a reward model: everything that determines its weights."""

    data: DataFile
    """Ranked completions: chosen and rejected, or a list with the best first."""
    model: str = "tiny-arithmetic"
    """Model to start from: a folder, a run folder, a hub id or a model name.
    A policy gets a new score head; a reward model is trained further."""
    adapter: Lora | None = None
    """Adapter that is trained, with the score head, in the place of the model's own weights. None: the model itself is
    trained."""
    loss: BradleyTerry = field(default_factory=BradleyTerry)
    fit: FitOptions = field(default_factory=FitOptions)
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


def train_reward_model(
    config: RewardModelConfig,
    folder: Path,
    say: Callable[[str], None],
    session: RunSession | None = None,
    ranks: HoldsStages | None = None,
) -> Fitted:
    """Train into a run folder; data that cannot be used is refused before the model loads. `ranks` holds the model on
    several processes.

    Example: train_reward_model(RewardModelConfig(DataFile("pairs.jsonl"), "runs/sft"), Path("runs/judge"), print)
    """
    result = once(folder, toml.dumps(config), session, lambda taken: _trained(config, taken, say, ranks))
    return Fitted.from_dict(result, folder)


def _trained(
    config: RewardModelConfig, session: RunSession, say: Callable[[str], None], ranks: HoldsStages | None
) -> dict[str, Any]:
    """Train; the result is a `Fitted` as a dict, as it is stored."""
    overview = reward_model_overview(config)
    tokenizer, data = overview.tokenizer, overview.data
    refuse_other_items(session, data.train)
    overview.tell(say, session.folder)
    model, held = open_model(config, ranks, session.folder)
    if tokenizer.pad_token_id is None:  # padding with this tokenizer must use the token that the model ignores
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_token(model.config))
    stage = Judgement(model, data.train, data.held_out, config.loss, config.fit.token_budget)

    def report() -> None:
        data.report(session.log, say)

    fitted = fit_session(session, stage, held, config, tokenizer, say, report, ranks)
    return replace(fitted, skipped=len(data.mistakes)).to_dict()


def reward_model_overview(config: RewardModelConfig) -> Overview:
    """Refuse whatever the training of a reward model refuses before it loads weights; tell the rest."""
    path, device = resolve(config.model), pick_device(config.device)
    tokenizer = load_tokenizer(path)
    data = prepare(config.data, rankings_reader(config), tokenizer, declared_ends(path))
    check_files(path)
    shape = reward_skeleton(path)
    if config.adapter is not None:
        import_peft()
        target_layers(shape, config.adapter.targets)
        check_quantization(config.adapter.quantize_base, device)
    loss = "-log sigmoid(score of the chosen - score of the rejected completion - margin), the mean over all pairs"
    if config.loss.centring:
        loss = f"{loss}; plus {config.loss.centring:g} * (the sum of both scores) squared"
    return Overview(config, tokenizer, data, config.data.path, shape, loss, METRICS).check()


def open_model(
    config: RewardModelConfig, ranks: HoldsStages | None, folder: Path | None = None
) -> tuple[PreTrainedModel, StageModel]:
    """The model that is trained, and how it is held; `folder` is the run's."""
    path, device = starting_path(config, folder, ranks) or config.model, pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    held = dtype if ranks is None else torch.float32  # a new head is drawn in it
    model = load_reward_model(path, device=loading_place(device, ranks), dtype=held, seed=config.seed)
    if config.adapter is not None:
        if config.adapter.quantize_base is not None:
            quantize(model, config.adapter.quantize_base, device)
        add_lora(model, config.adapter, base=base_for(path), seed=config.seed)
        model.get_submodule(HEAD).requires_grad_(True)
    allow_compiling(model, config.compile)
    return model, stage_model(model, config.fit, config.seed, dtype, ranks)


def reward_model_without_data(config: RewardModelConfig, ranks: HoldsStages) -> "Judgement":
    """The stage of a process that computes micro-batches for another one."""
    return Judgement(open_model(config, ranks)[0], [], [], config.loss, config.fit.token_budget)


class RankedRows(NamedTuple):
    """A micro-batch of rankings."""

    rows: EncodedRows
    margins: Float[Tensor, " P"]
    """Margin of each ranking."""
    total: int
    """Rankings of the step."""


class Compared(NamedTuple):
    """The scores of some rankings, and all their pairs."""

    scores: Float[Tensor, " B"]
    losses: Float[Tensor, " N"]
    gaps: Float[Tensor, " N"]
    """Score of the chosen minus the rejected completion, without a gradient."""
    weights: Float[Tensor, " N"]
    """Weights of the pairs, which add up to 1 for each prompt."""


@dataclass(frozen=True)
class Judgement:
    """The mean loss over all pairs of each ranking; every ranking has equal weight, however long it is."""

    model: PreTrainedModel
    train: Sequence[Encoded]
    kept: Sequence[Encoded]
    """Held-out rankings."""
    loss: BradleyTerry
    token_budget: int

    @property
    def size(self) -> int:
        return len(self.train)

    def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        return map(self.part_loss, self.parts(items))

    def parts(self, items: Sequence[int], local: Sequence[int] | None = None) -> list[RankedRows]:
        chosen = items if local is None else [items[index] for index in local]
        return self._parts([self.train[item] for item in chosen], len(items))

    def part_loss(self, part: RankedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        measures = self.measured(part)
        weights = measures.weights / part.total
        return (
            (measures.losses * weights).sum(),
            {"accuracy": (pair_accuracy(measures.gaps) * weights).sum(), "score_gap": (measures.gaps * weights).sum()},
        )

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        return self.metrics([self.measured(part) for part in self.kept_parts()])

    def kept_parts(self, local: Sequence[int] | None = None) -> list[RankedRows]:
        kept = self.kept if local is None else [self.kept[number] for number in local]
        return self._parts(kept, len(self.kept)) if kept else []

    def metrics(self, measures: Sequence[Compared]) -> dict[str, float]:
        """Held-out metrics. Calibration is the distance of σ(gap) from the share of pairs ranked right; 0 is best."""
        if not measures:
            return {}
        scores = torch.cat([part.scores for part in measures])
        gaps = torch.cat([part.gaps for part in measures])
        weights = torch.cat([part.weights for part in measures]) / len(self.kept)
        losses = torch.cat([part.losses for part in measures])
        metrics = {
            "loss": (losses * weights).sum(),
            "accuracy": (pair_accuracy(gaps) * weights).sum(),
            "calibration": calibration_error(gaps, weights),
            "score_gap": (gaps * weights).sum(),
            "score_mean": scores.mean(),
            "score_std": scores.std(correction=0),
        }
        return {name: float(value) for name, value in metrics.items()}

    def _parts(self, items: Sequence[Encoded], count: int) -> list[RankedRows]:
        """Micro-batches of whole rankings."""
        rows = to_rows(items)
        margins = torch.tensor([item.margin or 0.0 for item in items])
        return [RankedRows(rows.at(part), margins, count) for part in rows.parts(self.token_budget)]

    def measured(self, part: RankedRows) -> Compared:
        rows = part.rows
        scores = at_least_float32(
            completion_scores(
                self.model, prompts=rows.prompts, tokens=rows.tokens, lengths=rows.lengths, group=rows.group
            )
        )
        pairs = ranked_pairs(rows.group).to(scores.device)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        margin = part.margins[rows.group].to(scores)[pairs.chosen]
        losses = self.loss(chosen, rejected, margin)
        return Compared(scores.detach(), losses, (chosen - rejected).detach().double(), pairs.weights)
