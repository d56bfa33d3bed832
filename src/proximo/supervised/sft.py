"""Supervised fine-tuning on the completions of a file, or on a task's reference answers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proximo.config import toml
from proximo.config.unions import check_kinds
from proximo.data import DataFile, Example, Mistakes, read_examples
from proximo.data.examples import Columns
from proximo.data.splits import ReadsItems
from proximo.learner.ranks import Ranks
from proximo.losses.pieces.extras import supervised_loss
from proximo.losses.pieces.weights import TokenMean
from proximo.models import (
    Precision,
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    score_rows,
    tiny_model,
    tiny_tokenizer,
    with_precision,
)
from proximo.models.adapters.lora import Lora, add_lora
from proximo.models.adapters.quantized import check_quantization, quantize
from proximo.models.adapters.starting import base_for, check_adapter
from proximo.models.compiling import allow_compiling
from proximo.models.devices import placed
from proximo.models.loading import skeleton
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.shipped import resolve
from proximo.models.stop_tokens import declared_ends
from proximo.runs.session import RunSession
from proximo.supervised.encoding import Encoded, EncodedRows, Limit, Prepared, encode, prepare, to_rows
from proximo.supervised.fitting import FitOptions, Fitted, fit_session
from proximo.supervised.kept_checkpoints import KeptCheckpoints
from proximo.supervised.overview import Overview, check_speaks
from proximo.supervised.snapshots import once, refuse_other_items
from proximo.supervised.stage_model import (
    HoldsStages,
    StageModel,
    check_held,
    loading_place,
    stage_model,
    starting_path,
)
from proximo.tasks import Arithmetic, Split, Task, TaskOptions
from proximo.types.tensor_types import Float

METRICS = ("loss", "perplexity")
"""Held-out metrics."""


@dataclass(frozen=True)
class References:
    """A task's problems with their reference answers; the task's held-out problems are held out here too."""

    task: TaskOptions = field(default_factory=Arithmetic)
    examples: int = 10_000
    """Problems per epoch; if the task has fewer, all of them."""
    max_tokens: int = 2048
    """Maximum tokens of prompt and answer together."""

    def __post_init__(self) -> None:
        if self.examples < 1 or self.max_tokens < 2:
            raise ValueError(
                f"data.examples is {self.examples}, data.max_tokens {self.max_tokens}: give at least 1 and 2"
            )


@dataclass(frozen=True)
class SftConfig:
    """Config of a fine-tuning: everything that determines the model's weights."""

    data: DataFile | References = field(default_factory=References)
    """Examples to train on: a file, or a task's reference answers."""
    model: str | None = None
    """Model to start from: a folder, a run folder or a hub id. None: a new tiny model (ASCII only)."""
    adapter: Lora | None = None
    """Adapter that is trained in the place of the model's own weights. None: the model itself is trained."""
    fit: FitOptions = field(default_factory=FitOptions)
    prompt_column: str | None = None
    """Column with the prompt of a file. None: recognised, as are messages, ShareGPT's and Alpaca's columns."""
    completion_column: str | None = None
    """Column with the completion to learn. None: recognised."""
    messages_column: str | None = None
    """Column with whole conversations, whose replies are learned. None: recognised."""
    text_column: str | None = None
    """Column with plain texts, learned whole. None: recognised, where the rows have nothing else to learn."""
    dynamic: bool = False
    """Use dynamic fine-tuning (DFT): each token's loss times its own probability, held constant."""
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
        if self.adapter is not None and self.model is None:
            raise ValueError("adapter is given, but no model that it would be an adapter of: give model, too")
        if (self.prompt_column is None) != (self.completion_column is None):
            raise ValueError("of prompt_column and completion_column one is given: give both, or none of them")
        named = [
            name for name in ("prompt_column", "messages_column", "text_column") if getattr(self, name) is not None
        ]
        if named and isinstance(self.data, References):
            raise ValueError(f"{named[0]} is given, and data is a task: it names a column of a file")
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are given, which are read in different ways: give one of them")


def sft(
    config: SftConfig,
    folder: Path,
    say: Callable[[str], None],
    session: RunSession | None = None,
    ranks: HoldsStages | None = None,
) -> Fitted:
    """Fine-tune into a run folder; data that cannot be used is refused before the model loads. `ranks` holds the model
    on several processes.

    Example: sft(SftConfig(DataFile("chats.jsonl"), model="runs/base"), Path("runs/sft"), print)
    """
    result = once(folder, toml.dumps(config), session, lambda taken: _sft(config, taken, say, ranks))
    return Fitted.from_dict(result, folder)


def _sft(
    config: SftConfig, session: RunSession, say: Callable[[str], None], ranks: HoldsStages | None
) -> dict[str, Any]:
    """Train; the result is a `Fitted` as a dict, as it is stored."""
    overview = sft_overview(config)
    tokenizer, data = overview.tokenizer, overview.data
    refuse_other_items(session, data.train)
    overview.tell(say, session.folder)
    model, held = open_model(config, ranks, session.folder)
    stage = Supervised(model, data.train, data.held_out, token_budget=config.fit.token_budget, dynamic=config.dynamic)

    def report() -> None:
        data.report(session.log, say)

    fitted = fit_session(session, stage, held, config, tokenizer, say, report, ranks)
    return replace(fitted, skipped=len(data.mistakes)).to_dict()


def sft_overview(config: SftConfig) -> Overview:
    """Refuse whatever a fine-tuning refuses before it loads weights; tell the rest."""
    path, device = None if config.model is None else resolve(config.model), pick_device(config.device)
    if path is not None and config.adapter is not None:
        check_adapter(path, config.adapter)
        check_quantization(config.adapter.quantize_base, device)
    tokenizer = tiny_tokenizer() if path is None else load_tokenizer(path)
    data = _prepared(config, tokenizer, frozenset() if path is None else declared_ends(path))
    if path is not None:
        check_speaks(path)
    shape = tiny_model() if path is None else skeleton(path)
    loss = "-log p of each completion token, the mean over all of a step; the prompt's have none"
    if config.dynamic:
        loss = f"{loss}; each times its own p, held constant (DFT)"
    return Overview(config, tokenizer, data, data_name(config.data), shape, loss, METRICS).check()


def data_name(data: DataFile | References) -> str:
    """Data in words."""
    return data.path if isinstance(data, DataFile) else f"reference answers of {type(data.task).__name__}"


def open_model(
    config: SftConfig, ranks: HoldsStages | None, folder: Path | None = None
) -> tuple[PreTrainedModel, StageModel]:
    """The model that is trained, with its adapter if it has one, and how it is held; `folder` is the run's."""
    path, device = starting_path(config, folder, ranks), pick_device(config.device)
    base = None if path is None or config.adapter is None else base_for(path)
    quantization = None if base is None or config.adapter is None else config.adapter.quantize_base
    check_quantization(quantization, device)
    dtype = pick_dtype(config.dtype, device)
    held = torch.float32 if ranks is None else None  # of shards, as the files have it
    model = tiny_model(seed=config.seed) if path is None else load_model(path, dtype=held)
    allow_compiling(model, config.compile)
    if ranks is None:
        model = with_precision(model, dtype)
    if quantization is not None:
        quantize(model, quantization, device)
    placed(model, loading_place(device, ranks))
    if config.adapter is not None and base is not None:
        add_lora(model, config.adapter, base=base, seed=config.seed)
    return model, stage_model(model, config.fit, config.seed, dtype, ranks)


def sft_without_data(config: SftConfig, ranks: HoldsStages) -> "Supervised":
    """The stage of a process that computes micro-batches for another one."""
    model, budget = open_model(config, ranks)[0], config.fit.token_budget
    return Supervised(model, [], [], token_budget=budget, dynamic=config.dynamic)


WeightedRows = tuple[EncodedRows, Float[Tensor, "B T"]]
"""A micro-batch, and the weight of each of its tokens in the mean over all tokens of the step."""


class Supervised:
    """−log π of the completion tokens, averaged over the tokens of each optimizer step; prompt tokens have no loss."""

    def __init__(
        self,
        model: PreTrainedModel,
        train: Sequence[Encoded],
        held_out: Sequence[Encoded],
        *,
        token_budget: int,
        dynamic: bool = False,
    ) -> None:
        self.model = model
        self.size = len(train)
        self.train, self.kept = train, held_out
        self._token_budget, self._dynamic = token_budget, dynamic

    def losses(self, items: Sequence[int]) -> Iterator[tuple[Tensor, Mapping[str, float | Tensor]]]:
        return map(self.part_loss, self.parts(items))

    def parts(self, items: Sequence[int], local: Sequence[int] | None = None) -> list[WeightedRows]:
        rows = to_rows([self.train[item] for item in items])
        weights = TokenMean()(rows.mask, rows.group)
        if local is not None:
            rows, weights = rows.at(torch.tensor(local)), weights[torch.tensor(local)]
        return [(rows.at(part), weights[part]) for part in rows.parts(self._token_budget)]

    def part_loss(self, part: WeightedRows) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        rows, weights = part
        losses = supervised_loss(self._logprobs(rows), self._dynamic)
        return (losses * weights.to(losses)).sum(), {"tokens": float(rows.mask.sum())}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        return self.metrics([self.measured(part) for part in self.kept_parts()])

    def kept_parts(self, local: Sequence[int] | None = None) -> list[EncodedRows]:
        kept = self.kept if local is None else [self.kept[number] for number in local]
        rows = to_rows(kept) if kept else None
        return [] if rows is None else [rows.at(part) for part in rows.parts(self._token_budget)]

    def measured(self, part: EncodedRows) -> Tensor:
        logprobs = self._logprobs(part).double()
        return (logprobs * part.mask.to(logprobs)).sum()

    def metrics(self, measures: Sequence[Tensor]) -> dict[str, float]:
        """The token mean of −log π, not the dynamic loss, which a model can lower by being unsure."""
        if not measures:
            return {}
        tokens = sum(item.learned for item in self.kept)
        loss = -float(torch.stack(list(measures)).sum()) / tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 80.0))}

    def _logprobs(self, rows: EncodedRows) -> Float[Tensor, "B T"]:
        return score_rows(self.model, rows).logprobs


def _prepared(config: SftConfig, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> Prepared:
    if isinstance(config.data, DataFile):
        return prepare(config.data, _reader(config, tokenizer), tokenizer, ends)
    data, mistakes = config.data, Mistakes()
    train = reference_examples(data.task, "train", data.examples, config.seed)
    held_out = reference_examples(data.task, "held_out", None, config.seed)
    limit = Limit(data.max_tokens)
    prepared = Prepared(
        encode(tokenizer, train, limit, mistakes, ends),
        encode(tokenizer, held_out, limit, mistakes, ends),
        mistakes,
    )
    mistakes.refuse(f"data.task is {data.task}, with references that cannot be used:")
    return prepared


def _reader(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> ReadsItems[Example]:
    """Reader of the file's rows, with the columns that the config names."""
    named = config.prompt_column, config.completion_column, config.messages_column, config.text_column
    columns = Columns(*(name or "" for name in named))
    return partial(read_examples, columns=columns, chat=tokenizer.chat_template is not None)


def reference_examples(task: Task, split: Split, count: int | None, seed: int) -> list[Example]:
    """The first `count` problems of a split with their reference answers; all of a split that has fewer."""
    known = [number for number in (count, task.size(split)) if number is not None]
    assert known, "a held-out split is finite"
    examples = []
    for index in range(min(known)):
        problem = task.problem(index, split, seed)
        answer = task.reference(problem)
        if answer is None:
            raise ValueError(
                f"data.task is {task}: it has no reference answer for {problem.id}, give completions in a file"
            )
        examples.append(Example(problem.id, problem.prompt, answer))
    return examples
