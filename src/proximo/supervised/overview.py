"""Overview of a stage before its weights are loaded: what it is about to do, checked and told in labelled lines."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from proximo.learner.footprint import machine_bytes, moments_on, parameter_bytes
from proximo.learner.policy import frozen_names
from proximo.models import free_bytes, pick_device, pick_dtype
from proximo.models.adapters.lora import adapter_size, head_parameters
from proximo.models.adapters.quantized import quantized_size
from proximo.models.adapters.starting import base_dtype, merging
from proximo.models.context_length import reach_of
from proximo.models.loading import has_score, read_config
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.safe_files import inspect
from proximo.models.shipped import resolve
from proximo.runs.banner import BannerLine, banner, folder_lines
from proximo.runs.files import BASE
from proximo.supervised.encoding import Encoded, Prepared
from proximo.supervised.schedule import FREEZE, LOWER, Schedule
from proximo.supervised.stage_model import StageOptions
from proximo.system.amounts import in_bytes, in_units
from proximo.system.safe_text import counted, visible

SHOWN = 600
"""Characters of an example's prompt, and of each of its completions, that are shown to a person."""


@dataclass(frozen=True)
class Weights:
    """Number of a model's weights, and how many of them are trained."""

    all: int
    trained: int
    bytes: int
    """Bytes of all of them, with the gradients and the optimizer of those that are trained."""


@dataclass(frozen=True)
class Overview:
    """A stage that has been checked and whose weights are not loaded yet."""

    config: StageOptions
    tokenizer: PreTrainedTokenizerBase
    data: Prepared
    source: str
    """The data, in words."""
    shape: PreTrainedModel
    """The model without its weights."""
    loss: str
    """The loss, in words."""
    metrics: Sequence[str]
    """Held-out metrics by which the best weights may be chosen."""

    @cached_property
    def weights(self) -> Weights:
        """Weights of the model, and of its adapter where it has one."""
        config, device = self.config, torch.device(pick_device(self.config.device))
        whole, dtype = sum(each.numel() for each in self.shape.parameters()), pick_dtype(config.dtype, device.type)
        moments = moments_on(config.fit.adam_moments, is_gpu=device.type == "cuda")
        per_weight = parameter_bytes(dtype, trained=True, moments=moments)
        if config.adapter is None:
            names = frozen_names(self.shape, config.fit.freeze, FREEZE)
            frozen = sum(each.numel() for name, each in self.shape.named_parameters() if name in names)
            held = int((whole - frozen) * per_weight + frozen * dtype.itemsize)
            return Weights(whole, whole - frozen, held)
        kind, head = config.adapter.quantize_base, head_parameters(self.shape).values()
        adapter = adapter_size(self.shape, config.adapter) + sum(each.numel() for each in head)
        codes, stored = (0, 0) if kind is None else quantized_size(self.shape, kind)
        return Weights(whole, adapter, int((whole - codes) * dtype.itemsize + stored + adapter * per_weight))

    def check(self) -> "Overview":
        """Refuse what neither the model nor the data can be trained with; the overview itself."""
        pick_device(self.config.device)
        self.data.check_room(self.shape)
        if (patience := self.config.fit.patience) is not None and not self.data.held_out:
            raise ValueError(f"fit.patience is {patience}, but no data is held out: leave it out, or hold some")
        if (metric := self.config.fit.metric) not in self.metrics:
            raise ValueError(f"fit.metric is {metric!r}: give one of {', '.join(self.metrics)}")
        frozen_names(self.shape, self.config.fit.freeze, FREEZE)
        return self

    @property
    def schedule(self) -> Schedule:
        return Schedule(len(self.data.train), self.config.fit, self.config.seed)

    def tell(self, say: Callable[[str], None], folder: Path | None = None) -> None:
        """Say all of it; with a run's `folder` also how to watch, stop and resume it."""
        for line in banner([*self._lines(folder or "RUN"), *([] if folder is None else folder_lines(folder))]):
            say(line)

    @property
    def lines(self) -> list[BannerLine]:
        return self._lines("RUN")

    def _lines(self, run: str | Path) -> list[BannerLine]:
        return [
            ("model", self._model),
            ("starts from", self._start(run)),
            ("device", self._device),
            ("trains", self._trained),
            ("loss", self.loss),
            ("data", f"{self.data.counts}; {self.source}"),
            ("left out", str(self.data.mistakes)),
            *self._example,
            ("lengths", self._lengths),
            ("steps", self._steps),
            ("learning rate", self._rate),
            ("evaluation", self._evaluation),
            ("memory", self._memory),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The same as values."""
        weights = {f"{name}_{'weights' * (name != 'bytes')}".rstrip("_"): n for name, n in asdict(self.weights).items()}
        rows = {"train": len(self.data.train), "held_out": len(self.data.held_out), "bad_rows": len(self.data.mistakes)}
        return {**weights, **rows, "steps": self.schedule.steps, "notes": dict(self.lines)}

    # The texts

    @property
    def _model(self) -> str:
        name = "a new tiny one" if self.config.model is None else self.config.model
        return f"{name}, {type(self.shape).__name__}, {in_units(self.weights.all)} parameters"

    def _start(self, run: str | Path) -> str:
        """Fate of an adapter that the stage starts from."""
        config = self.config
        if config.model is None:
            return ""
        dtype = base_dtype(config.dtype, pick_device(config.device), sharded=config.ranks is not None)
        return merging(resolve(config.model), config.adapter, f"{run}/{BASE}", dtype)

    @property
    def _device(self) -> str:
        device = pick_device(self.config.device)
        dtype = str(pick_dtype(self.config.dtype, torch.device(device).type)).removeprefix("torch.")
        return f"{device}, {dtype}{' with float32 master weights' * (dtype != 'float32')}"

    @property
    def _trained(self) -> str:
        weights, lora = self.weights, self.config.adapter
        share = f"{in_units(weights.trained)} weights, {weights.trained / weights.all:.2%}"
        if lora is not None:
            base = f" on a base in {lora.quantize_base}" if lora.quantize_base else ""
            head = " and the score head" if head_parameters(self.shape) else ""
            return f"a LoRA adapter of rank {lora.rank}{head}{base}: {share} of the model's number"
        return "all weights" if weights.trained == weights.all else f"{share} of the model"

    @property
    def _example(self) -> list[BannerLine]:
        """The first example as the model reads it, what is trained told apart from what is not."""
        if not self.data.train:
            return []
        first, last = self.data.train[0], len(self.data.train[0].completions) - 1
        prompt = f"{self._text(first.prompt)}\n({counted(len(first.prompt), 'token')}, not trained)"
        if not last:
            learned = "trained" if first.trained is None else f"{first.learned} of them trained: its replies"
            return [("prompt", prompt), ("completion", self._completion(first, 0, learned))]
        of = f" of {last + 1}" if last > 1 else ""
        return [
            ("prompt", prompt),
            ("chosen", self._completion(first, 0, f"the best{of}")),
            ("rejected", self._completion(first, last, f"the worst{of}")),
        ]

    def _completion(self, item: Encoded, number: int, remark: str) -> str:
        tokens = item.completions[number]
        return f"{self._text(tokens)}\n({counted(len(tokens), 'token')}, {remark})"

    def _text(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return visible(str(text), SHOWN)

    @property
    def _lengths(self) -> str:
        """Distribution of the rows' lengths, against what the model can read."""
        items = [*self.data.train, *self.data.held_out]
        rows = sorted(len(item.prompt) + len(text) for item in items for text in item.completions)
        if not rows:
            return ""
        trained = sum(item.learned for item in self.data.train)
        reach = reach_of(self.shape.config)
        context = "" if reach is None else f"; the model reads {reach.tokens}"
        limit = "" if self.data.limit is None else f", at most {self.data.limit.max_tokens} by data.max_tokens"
        many = f"{rows[0]} to {rows[-1]}, median {statistics.median_low(rows)}, 95 % within {rows[_at(rows, 0.95)]}"
        return f"{many} tokens with the prompt{limit}{context}; an epoch trains {trained:,} tokens"

    @property
    def _steps(self) -> str:
        fit, schedule = self.config.fit, self.schedule
        passes = fit.epochs if fit.steps is None else schedule.steps / schedule.epoch
        epochs = f"{passes:.3g} epoch{'s' * (passes != 1)} of {schedule.epoch}"
        kept, points = self.config.checkpoints, f"a resume point every {fit.save_every}"
        if kept is not None:
            points = f"{points}; a checkpoint every {kept.every}, {kept.keep} are kept beside the best"
        return f"{schedule.steps} ({epochs}), at most {fit.batch} rows each; {points}"

    @property
    def _rate(self) -> str:
        fit = self.config.fit
        warmup = min(fit.warmup_steps, self.schedule.steps // 2)
        after = {"constant": "then constant", "linear": "then linearly to 0", "cosine": "then as a cosine to 0"}
        return f"{fit.learning_rate:g} after {counted(warmup, 'step')} of warm-up, {after[fit.learning_rate_schedule]}"

    @property
    def _evaluation(self) -> str:
        every, patience = self.config.fit.evaluate_every, self.config.fit.patience
        if not self.data.held_out:
            return "nothing is held out: the last weights are kept"
        when = "after each epoch" if every is None else f"every {counted(every, 'step')}"
        direction = "lowest" if self.config.fit.metric in LOWER else "highest"
        until = "" if patience is None else f"; {counted(patience, 'evaluation')} without a better one end the run"
        kept = f"the weights with the {direction} {self.config.fit.metric} are kept"
        return f"on the held-out rows before, {when} and at the end; {kept}{until}"

    @property
    def _memory(self) -> str:
        device = torch.device(pick_device(self.config.device))
        there = free_bytes(device) if device.type == "cuda" else machine_bytes()
        verdict = "" if self.weights.bytes <= there else "; that does not fit"
        return (
            f"{in_bytes(self.weights.bytes)} of {in_bytes(there)} for weights, gradients and optimizer, and the "
            f"activations of {self.config.fit.token_budget:,} tokens at most{verdict}"
        )


def check_speaks(path: str) -> None:
    """Refuse a model that scores where one that generates text is needed, and weight files that are damaged, by
    headers alone."""
    if has_score(read_config(path)):
        raise ValueError(f"path {path!r} holds a reward model, which scores and cannot speak: give a causal model")
    check_files(path)


def check_files(path: str) -> None:
    """Check the headers of local weight files; those of the hub are checked when they are loaded."""
    if Path(path).is_dir():
        inspect(Path(path), weights=True)


def _at(values: Sequence[int], share: float) -> int:
    """Index of the value that this share of sorted values does not exceed."""
    return min(len(values) - 1, int(share * len(values)))
