"""A pipeline as one value; what depends on its folder, the paths from stage to stage, is filled in here."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from proximo.algorithms import Algorithm
from proximo.data import DataFile
from proximo.maths.pairwise import BradleyTerry, Dpo, Ipo
from proximo.samplers import SamplingOptions
from proximo.tasks import Sorting
from proximo.training.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.training.offline.dpo import DpoConfig
from proximo.training.offline.fitting import FitOptions
from proximo.training.offline.reward_model import RewardModelConfig
from proximo.training.offline.sft import SftConfig
from proximo.training.reward_mix import RewardMix, RewardModel

DEMONSTRATIONS, RANKINGS = "demonstrations.jsonl", "rankings.jsonl"
SFT, REWARD_MODEL, DPO = "sft", "reward-model", "dpo"
"""Folders of the stages; each reads those before it."""


@dataclass(frozen=True)
class DemonstrationOptions:
    """Answers by someone who sorts carelessly."""

    count: int = 10_000
    spread: float = 4.0
    """Each letter's place in the alphabet is misjudged by about so many places, normally distributed; 0 never errs."""

    def __post_init__(self) -> None:
        if self.count < 2 or self.spread < 0:
            raise ValueError(
                f"demonstrations.count is {self.count}, demonstrations.spread {self.spread}: give at least 2 and 0"
            )


@dataclass(frozen=True)
class RankingOptions:
    """What the fine-tuned model says, ranked by someone who sees the true reward, but not quite clearly."""

    prompts: int = 2000
    samples: int = 4
    """Completions of each prompt; equal ones are ranked once."""
    noise: float = 0.1
    """Of two completions the one whose true reward is higher by this much wins with odds e to 1; 0 never errs."""

    def __post_init__(self) -> None:
        if self.prompts < 2 or self.samples < 2 or self.noise < 0:
            raise ValueError(
                f"rankings.prompts is {self.prompts}, rankings.samples {self.samples}, rankings.noise {self.noise}: "
                "give at least 2, 2 and 0"
            )


@dataclass(frozen=True)
class RewardModelOptions:
    loss: BradleyTerry
    """Without centring only differences within a prompt are learned, and scores of different prompts drift apart."""
    fit: FitOptions


@dataclass(frozen=True)
class ReinforcementOptions:
    """A run that is rewarded by the reward model alone."""

    algorithm: Algorithm
    training: TrainingOptions
    steps: int
    value: ValueOptions | None = None
    """The value model's options. None: the defaults, where the algorithm asks for a value model."""


@dataclass(frozen=True)
class PreferenceOptions:
    """DPO on the same rankings that the reward model learned from."""

    loss: Dpo | Ipo
    fit: FitOptions


@dataclass(frozen=True)
class HeldOutOptions:
    """What every model is measured on at the end, at the sampling temperature."""

    problems: int = 200
    """The first so many of the task's held-out split."""
    samples: int = 4
    """Completions of each."""

    def __post_init__(self) -> None:
        if self.problems < 2 or self.samples < 1:
            raise ValueError(
                f"held_out.problems is {self.problems}, held_out.samples {self.samples}: give at least 2 and 1"
            )


@dataclass(frozen=True)
class PipelineConfig:
    """Everything that decides a pipeline's numbers."""

    sft: FitOptions
    reward_model: RewardModelOptions
    ppo: ReinforcementOptions
    grpo: ReinforcementOptions
    dpo: PreferenceOptions
    without_kl: bool = True
    """Train with GRPO once more without its KL term, to see what that keeps the policy from."""
    task: Sorting = field(default_factory=Sorting)
    demonstrations: DemonstrationOptions = DemonstrationOptions()
    rankings: RankingOptions = RankingOptions()
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=8))
    held_out: HeldOutOptions = HeldOutOptions()
    device: str = "auto"
    """Where the models live, as torch names it. `auto`: a GPU where there is one, else the CPU."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling.max_tokens <= self.task.length:
            raise ValueError(
                f"sampling.max_tokens is {self.sampling.max_tokens}: {self.task.length} letters and their end need "
                f"{self.task.length + 1}"
            )
        self.runs(Path())  # what no run can mean fails now

    @property
    def stages(self) -> list[str]:
        """Files and folders, in the order in which they are made."""
        return [DEMONSTRATIONS, SFT, RANKINGS, REWARD_MODEL, *self.runs(Path()), DPO]

    def sft_config(self, folder: Path) -> SftConfig:
        return SftConfig(DataFile(str(folder / DEMONSTRATIONS)), fit=self.sft, device=self.device, seed=self.seed)

    def reward_model_config(self, folder: Path) -> RewardModelConfig:
        return RewardModelConfig(
            DataFile(str(folder / RANKINGS)),
            str(folder / SFT),
            loss=self.reward_model.loss,
            fit=self.reward_model.fit,
            device=self.device,
            seed=self.seed,
        )

    def dpo_config(self, folder: Path) -> DpoConfig:
        return DpoConfig(
            DataFile(str(folder / RANKINGS)),
            str(folder / SFT),
            loss=self.dpo.loss,
            fit=self.dpo.fit,
            device=self.device,
            seed=self.seed,
        )

    def runs(self, folder: Path) -> dict[str, RunConfig]:
        """Those by reinforcement learning, by the name of their folder."""
        options = {"ppo": self.ppo, "grpo": self.grpo}
        if self.without_kl:
            free = replace(self.grpo.algorithm, kl=None)
            options["grpo-without-kl"] = replace(self.grpo, algorithm=free)
        return {name: self._run(each, folder) for name, each in options.items()}

    def rewards(self, folder: Path) -> RewardMix:
        """What is learned is rewarded, what is true is watched."""
        judge = RewardModel(str(folder / REWARD_MODEL), device=self.device)
        return RewardMix(task=0.0, models=(judge,))

    def _run(self, options: ReinforcementOptions, folder: Path) -> RunConfig:
        return RunConfig(
            algorithm=options.algorithm,
            task=self.task,
            model=str(folder / SFT),
            device=self.device,
            sampling=self.sampling,
            training=options.training,
            rewards=self.rewards(folder),
            value=options.value,
            evaluation=EvaluationOptions(problems=self.held_out.problems),
            steps=options.steps,
            seed=self.seed,
        )
