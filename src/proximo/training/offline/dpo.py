"""Direct preference optimisation: train a policy on ranked completions, without a reward model or sampling."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo import toml
from proximo.data import DataFile, read_rankings
from proximo.maths.pairwise import Dpo, Ipo, ranked_pairs
from proximo.models import Precision, load_model, load_tokenizer, pick_device, pick_dtype, score_rows
from proximo.models.adapters.lora import Lora, add_lora
from proximo.models.adapters.quantized import check_quantization
from proximo.models.adapters.starting import base_for
from proximo.models.compiling import allow_compiling
from proximo.models.shipped import resolve
from proximo.tensor_types import Float
from proximo.training.offline.encoding import Encoded, EncodedRows, Prepared, prepare
from proximo.training.offline.fitting import FitOptions, Fitted, fit_attempt
from proximo.training.offline.reference import (
    Reference,
    Sums,
    compute_reference,
    micro_batched,
    read_reference,
    weights_fingerprint,
    write_reference,
)
from proximo.training.offline.snapshots import once
from proximo.training.runfolder.resume import Attempt


@dataclass(frozen=True)
class DpoConfig:
    """Everything that determines the results of a DPO run."""

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
    device: str = "auto"
    """Torch device of the model. `auto`: a GPU if there is one, else the CPU."""
    dtype: Precision = "auto"
    """Data type of the weights. `auto`: float32 on a CPU, bfloat16 with float32 master weights on a GPU."""
    compile: bool = True
    """Whether to compile the model's layers on a GPU (takes some seconds once). Has no effect on a CPU."""
    seed: int = 0
    """Random seed of the run."""


def dpo(config: DpoConfig, folder: Path, say: Callable[[str], None], attempt: Attempt | None = None) -> Fitted:
    """Check the data, compute the reference log-probs once, then train with one model in memory.

    Example: dpo(DpoConfig(DataFile("pairs.jsonl"), model="runs/sft"), Path("runs/dpo"), print)
    """
    result = once(folder, toml.dumps(config), attempt, lambda taken: _dpo(config, taken, say))
    return Fitted.from_dict(result, folder)


def _dpo(config: DpoConfig, attempt: Attempt, say: Callable[[str], None]) -> dict[str, Any]:
    """Train; the result is a `Fitted` as a dict, as it is stored."""
    path, device = resolve(config.model), pick_device(config.device)
    base = None if config.adapter is None else base_for(path)
    quantization = None if config.adapter is None else config.adapter.quantize_base
    check_quantization(quantization, device)
    dtype = pick_dtype(config.dtype, device)
    reference_path = path if config.reference is None else resolve(config.reference)
    tokenizer = load_tokenizer(path)
    if load_tokenizer(reference_path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"reference is {config.reference!r}, model {config.model!r}: their vocabularies differ, so their "
            "log-probs cannot be compared; use a reference with the model's own tokenizer"
        )
    data = prepare(config.data, read_rankings, tokenizer)
    stored = None if config.reference_logprobs is None else read_reference(config.reference_logprobs, data)
    shared = reference_path == path
    model = load_model(reference_path, device=device, dtype=dtype, quantization=quantization if shared else None)
    allow_compiling(model, config.compile)
    data.check_room(model)
    if stored is not None and stored.weights != weights_fingerprint(model):
        raise ValueError(
            f"reference_logprobs is {config.reference_logprobs!r}: it was computed by another model than "
            f"{reference_path!r}; leave it out to compute it again"
        )
    known = stored or compute_reference(model, data, config.fit.batch, config.fit.token_budget)

    def report() -> None:
        data.report(attempt.log, say)
        write_reference(attempt.folder / "reference.parquet", known, data)

    if not shared:
        del model  # before the next one is loaded, so that only one model is in memory at a time
        model = load_model(path, device=device, dtype=dtype, quantization=quantization)
        allow_compiling(model, config.compile)
        data.check_room(model)
    if config.adapter is not None and base is not None:
        add_lora(model, config.adapter, base=base, seed=config.seed)
    stage = Preferences(model, data, known, config.loss, config.fit)
    fitted = fit_attempt(attempt, stage, config.fit, tokenizer, config.seed, say, report)
    return replace(fitted, skipped=len(data.mistakes)).to_dict()


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

    def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        rankings, sums = [self.data.train[item] for item in items], [self.reference.train[item] for item in items]
        yield from self._losses(rankings, tuple(sums), len(items))

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        rankings, sums = self.data.held_out, self.reference.held_out
        totals: dict[str, float] = {}
        for loss, metrics in self._losses(rankings, sums, self.options.batch):
            for name, value in {"loss": loss, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _losses(
        self, rankings: Sequence[Encoded], sums: Sums, batch: int
    ) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        for numbers, rows in micro_batched(rankings, batch, self.options.token_budget):
            known = [value for number in rows.group.unique().tolist() for value in sums[numbers[number]]]
            yield self._loss(rows, known, 1 / len(rankings))

    def _loss(
        self, rows: EncodedRows, known: Sequence[float], share: float
    ) -> tuple[Float[Tensor, ""], Mapping[str, Tensor]]:
        """The loss of a micro-batch in which every prompt has this share of the step."""
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
