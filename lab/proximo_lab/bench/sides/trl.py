# pyright: reportMissingImports=false
"""The peer: TRL's GRPOTrainer with its own loop, on the same prompts, lengths, rewards and weights as ours."""

import logging
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from proximo.planning.workloads import Workload
from proximo_lab.bench.memory import peak_bytes, release, reset_peak
from proximo_lab.bench.sides.ours import LEARNING_RATE
from proximo_lab.bench.sides.turns import Rounds
from proximo_lab.bench.timing import TOTAL, Clock, Watch

MISSING = 'TRL is not installed, so only our side is measured; for the others: pip install "trl==1.16.0"'


def is_there() -> bool:
    return find_spec("trl") is not None


@dataclass(frozen=True)
class Settings:
    """Settings of the trainer that users choose."""

    name: str
    checkpointing: bool
    """True if layers recompute activations in the backward pass: less memory, more time."""
    full_weights: bool
    """True for float32 weights under autocast on a GPU. Else bf16 throughout, faster but small updates are lost."""
    rows: int
    """Rows per micro-batch of the backward pass; the rollout is one batch."""
    cache: str | None = None
    """Cache implementation of `generate`; a static one is compiled."""
    compiles: bool = False
    """True if the model is compiled for training."""


DEFAULT = Settings("TRL default", checkpointing=True, full_weights=True, rows=8)
"""TRL's defaults; on a CPU in float32, because bf16 there takes a hundred times as long."""


def best(workload: Workload) -> Settings:
    return Settings("TRL best", checkpointing=False, full_weights=False, rows=workload.peer_rows)


def static(workload: Workload) -> Settings:
    return replace(best(workload), name="TRL static", cache="static")


def compiled(workload: Workload) -> Settings:
    return replace(best(workload), name="TRL compiled", compiles=True)


class _Shared:
    """Accelerate's process-wide state, swapped because each trainer has its own precision and accumulation."""

    def __init__(self) -> None:
        from accelerate.state import AcceleratorState, GradientState

        self._places: list[dict[str, Any]] = [AcceleratorState._shared_state, GradientState._shared_state]
        self._kept: list[dict[str, Any]] = [{}, {}]
        self.restore()
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]

    def keep(self) -> None:
        self._kept = [dict(tensors) for tensors in self._places]

    def restore(self) -> None:
        for tensors, kept in zip(self._places, self._kept, strict=True):
            tensors.clear()
            tensors.update(kept)


def _pausing() -> Any:
    """A callback that pauses its `rounds` after each step."""
    from transformers import TrainerCallback  # here: it imports the compiler, which takes a second

    class Pausing(TrainerCallback):
        rounds: Rounds | None = None

        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert self.rounds is not None
            self.rounds.pause()

    return Pausing()


class Trl:
    """A trainer at the start of a step. Run either its whole loop or `generate` alone, not both."""

    def __init__(self, workload: Workload, settings: Settings, *, device: str, clock: Clock) -> None:
        from trl import GRPOTrainer

        self._shared = _Shared()
        set_verbosity_error()
        disable_progress_bar()
        logging.getLogger("trl").setLevel(logging.ERROR)
        self.workload, self.settings, self.device, self.clock = workload, settings, device, clock
        self.watch = Watch(device, clock)
        self.fixed = True
        """Whether completions are given rather than generated."""
        self.generating = False
        """Whether it was generating when it last failed."""
        self.gradient_norm: Any = None
        self.losses: list[Any] = []
        self._texts = [workload.text(prompt) for prompt in workload.prompts()]
        pausing, on_gpu = _pausing(), torch.device(device).type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = workload.shape.model(attention="sdpa", dtype=dtype, device=device)
        if settings.full_weights:
            model = model.float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer: Any = GRPOTrainer(
                model=model,
                reward_funcs=self._rewards,
                args=self._arguments(on_gpu),
                train_dataset=_dataset(self._texts),
                processing_class=workload.shape.tokenizer(),
                callbacks=[pausing],
            )
        self._shared.keep()
        if settings.cache is not None:
            self.trainer.generation_config.disable_compile = False  # TRL has no field for it
        self._rounds = pausing.rounds = Rounds(self.trainer.train)
        self._listen()

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Settings, for the JSON file."""
        return vars(self.settings)

    @property
    def peaks(self) -> Mapping[str, int]:
        return self.watch.peaks

    def _arguments(self, on_gpu: bool) -> Any:
        from trl import GRPOConfig

        rows = self.workload.even_part(self.settings.rows)
        return GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=self.workload.rows // rows,
            num_generations=self.workload.siblings,
            max_completion_length=self.workload.longest,
            gradient_checkpointing=self.settings.checkpointing,
            cache_implementation=self.settings.cache,
            torch_compile=self.settings.compiles,
            bf16=on_gpu and self.settings.full_weights,
            use_cpu=not on_gpu,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            shuffle_dataset=False,
            max_steps=1_000_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=on_gpu,
        )

    def _listen(self) -> None:
        """Record what the trainer computes, without waiting for a device."""
        trainer = self.trainer
        generate, single_turn = trainer._generate, trainer._generate_single_turn
        compute_loss, clip = trainer.compute_loss, trainer.accelerator.clip_grad_norm_

        def timed(prompts: list[str]) -> Any:
            self.generating = True
            with self.watch.phase("rollout"):
                output = generate(prompts)
            self.generating = False
            reset_peak(self.device)
            return output

        def given(prompt_ids: list[list[int]], *rest: Any, **named: Any) -> Any:
            return self._completions(prompt_ids) if self.fixed else single_turn(prompt_ids, *rest, **named)

        def heard(*inputs: Any, **named: Any) -> Any:
            loss = compute_loss(*inputs, **named)
            self.losses.append(loss.detach())
            return loss

        def clipped(*inputs: Any, **named: Any) -> Any:
            self.gradient_norm = clip(*inputs, **named)
            return self.gradient_norm

        trainer._generate, trainer._generate_single_turn = timed, given
        trainer.compute_loss, trainer.accelerator.clip_grad_norm_ = heard, clipped

    # Turns

    def step(self) -> Mapping[str, float]:
        """One optimizer step of the trainer's own loop."""
        self.losses = []
        self._shared.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = self.clock()
            self._rounds.resume()
            total = self.clock() - start
        self._shared.keep()
        seconds = self.watch.taken()
        self.watch.peaks["train"] = max(self.watch.peaks.get("train", 0), peak_bytes(self.device))
        return seconds | {"train": total - seconds["rollout"], TOTAL: total}

    def training(self) -> Mapping[str, float]:
        """The same on fixed completions, without the rollout."""
        self.fixed = True
        return {"train": self.step()["train"]}

    def rollout(self) -> Mapping[str, float]:
        """The trainer's generation, outside its loop, since compiled graphs belong to one thread."""
        self.fixed = False
        self._shared.restore()
        self.trainer.model.train()
        prompts = [text for text in self._texts for _ in range(self.workload.siblings)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, completions, *_ = self.trainer._generate(prompts)
        assert [len(tokens) for tokens in completions] == self.workload.lengths
        return self.watch.taken()

    def loss_and_norm(self) -> tuple[float, float]:
        """Loss and gradient norm of the last step."""
        return float(sum(self.losses)), float(self.gradient_norm)

    def close(self) -> None:
        self._rounds.stop()
        del self.trainer, self._rounds
        release(self.device)

    # What it is given

    def _completions(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], None]:
        known = dict(zip(self.workload.prompts(), self.workload.completions(), strict=True))
        left = {prompt: iter(siblings) for prompt, siblings in known.items()}
        return [list(next(left[tuple(ids)])) for ids in prompt_ids], None

    def _rewards(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """Siblings are told apart by their order."""
        known = zip(self._texts, self.workload.rewards(), strict=True)
        left = {text: iter(rewards) for text, rewards in known}
        return [next(left[prompt]) for prompt in prompts]


def _dataset(texts: list[str]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": texts})
