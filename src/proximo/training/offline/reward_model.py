"""Train reward models on ranked completions, so that preferred ones score higher."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo import toml
from proximo.data import DataFile, read_rankings
from proximo.maths.arithmetic import at_least_float32
from proximo.maths.pairwise import BradleyTerry, calibration_error, pair_accuracy, ranked_pairs
from proximo.models import Precision, load_tokenizer, pick_device, pick_dtype
from proximo.models.compiling import allow_compiling
from proximo.models.reward_models import completion_scores, load_reward_model, pad_token
from proximo.models.shipped import resolve
from proximo.tensor_types import Float
from proximo.training.offline.encoding import Encoded, prepare, to_rows
from proximo.training.offline.fitting import FitOptions, Fitted, fit_attempt
from proximo.training.offline.snapshots import once
from proximo.training.runfolder.resume import Attempt


@dataclass(frozen=True)
class RewardModelConfig:
    """Everything that determines a reward model's weights."""

    data: DataFile
    """Ranked completions: chosen and rejected, or a list with the best first."""
    model: str = "tiny-arithmetic"
    """Model to start from: a folder, a run folder, a hub id or a model name.
    A policy gets a new score head; a reward model is trained further."""
    loss: BradleyTerry = field(default_factory=BradleyTerry)
    fit: FitOptions = field(default_factory=FitOptions)
    device: str = "auto"
    """Torch device of the model. `auto`: a GPU if there is one, else the CPU."""
    dtype: Precision = "auto"
    """Data type of the weights. `auto`: float32 on a CPU, bfloat16 with float32 master weights on a GPU."""
    compile: bool = True
    """Whether to compile the model's layers on a GPU (takes some seconds once). Has no effect on a CPU."""
    seed: int = 0
    """Random seed of the run."""


def train_reward_model(
    config: RewardModelConfig, folder: Path, say: Callable[[str], None], attempt: Attempt | None = None
) -> Fitted:
    """Train into a run folder; data that cannot be used is refused before the model loads.

    Example: train_reward_model(RewardModelConfig(DataFile("pairs.jsonl"), "runs/sft"), Path("runs/judge"), print)
    """
    result = once(folder, toml.dumps(config), attempt, lambda taken: _trained(config, taken, say))
    return Fitted.from_dict(result, folder)


def _trained(config: RewardModelConfig, attempt: Attempt, say: Callable[[str], None]) -> dict[str, Any]:
    """Train; the result is a `Fitted` as a dict, as it is stored."""
    path = resolve(config.model)
    tokenizer = load_tokenizer(path)
    data = prepare(config.data, read_rankings, tokenizer)
    device = pick_device(config.device)
    model = load_reward_model(path, device=device, dtype=pick_dtype(config.dtype, device), seed=config.seed)
    allow_compiling(model, config.compile)
    if tokenizer.pad_token_id is None:  # padding with this tokenizer must use the token that the model ignores
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_token(model.config))
    data.check_room(model)
    stage = Judgement(model, data.train, data.held_out, config.loss, config.fit.token_budget)
    fitted = fit_attempt(attempt, stage, config.fit, tokenizer, config.seed, say, lambda: data.report(attempt.log, say))
    return replace(fitted, skipped=len(data.mistakes)).to_dict()


@dataclass(frozen=True)
class Compared:
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
        for part in self._compared([self.train[item] for item in items]):
            weights = part.weights / len(items)
            yield (
                (part.losses * weights).sum(),
                {"accuracy": (pair_accuracy(part.gaps) * weights).sum(), "score_gap": (part.gaps * weights).sum()},
            )

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Held-out metrics. Calibration is the distance of σ(gap) from the share of pairs ranked right; 0 is best."""
        if not self.kept:
            return {}
        parts = list(self._compared(self.kept))
        scores = torch.cat([part.scores for part in parts])
        gaps = torch.cat([part.gaps for part in parts])
        weights = torch.cat([part.weights for part in parts]) / len(self.kept)
        losses = torch.cat([part.losses for part in parts])
        metrics = {
            "loss": (losses * weights).sum(),
            "accuracy": (pair_accuracy(gaps) * weights).sum(),
            "calibration": calibration_error(gaps, weights),
            "score_gap": (gaps * weights).sum(),
            "score_mean": scores.mean(),
            "score_std": scores.std(correction=0),
        }
        return {name: float(value) for name, value in metrics.items()}

    def _compared(self, items: Sequence[Encoded]) -> Iterator[Compared]:
        """Scores in micro-batches of whole rankings."""
        rows = to_rows(items)
        margins = torch.tensor([item.margin or 0.0 for item in items])
        for part in map(rows.at, rows.parts(self.token_budget)):
            scores = at_least_float32(
                completion_scores(
                    self.model, prompts=part.prompts, tokens=part.tokens, lengths=part.lengths, group=part.group
                )
            )
            pairs = ranked_pairs(part.group).to(scores.device)
            chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
            margin = margins[part.group].to(scores)[pairs.chosen]
            losses = self.loss(chosen, rejected, margin)
            yield Compared(scores.detach(), losses, (chosen - rejected).detach().double(), pairs.weights)
