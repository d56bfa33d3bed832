"""The config of a pipeline; paths from stage to stage, which depend on its folder, are filled in here."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from proximo.algorithms import Algorithm
from proximo.data import DataFile
from proximo.losses.pairwise import BradleyTerry, Dpo, Ipo
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.reward_config import RewardMix, RewardModel
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.fitting import FitOptions
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from proximo.tasks import Sorting

DEMONSTRATIONS, RANKINGS = "demonstrations.jsonl", "rankings.jsonl"
SFT, REWARD_MODEL, DPO = "sft", "reward-model", "dpo"
"""Folders of the stages; each stage reads the earlier ones."""


@dataclass(frozen=True)
class DemonstrationOptions:
    """Demonstrations: answers with sorting mistakes."""

    count: int = 10_000
    """Number of demonstrations."""
    spread: float = 4.0
    """Standard deviation, in places of the alphabet, of the error in each letter's position; 0: no mistakes."""

    def __post_init__(self) -> None:
        if self.count < 2 or self.spread < 0:
            raise ValueError(
                f"demonstrations.count is {self.count}, demonstrations.spread {self.spread}: give at least 2 and 0"
            )


@dataclass(frozen=True)
class RankingOptions:
    """Completions of the fine-tuned model, ranked by their true reward with noise."""

    prompts: int = 2000
    """Number of prompts with ranked completions."""
    samples: int = 4
    """Completions per prompt; equal ones are ranked once."""
    noise: float = 0.1
    """Difference in true reward at which the better of two completions wins with odds e to 1; 0: no noise."""

    def __post_init__(self) -> None:
        if self.prompts < 2 or self.samples < 2 or self.noise < 0:
            raise ValueError(
                f"rankings.prompts is {self.prompts}, rankings.samples {self.samples}, rankings.noise {self.noise}: "
                "give at least 2, 2 and 0"
            )


@dataclass(frozen=True)
class RewardModelOptions:
    loss: BradleyTerry
    """Loss of the reward model. Without centring, only differences within a prompt are learned, and scores drift."""
    fit: FitOptions


@dataclass(frozen=True)
class ReinforcementOptions:
    """A run whose reward is the reward model's score alone."""

    algorithm: Algorithm
    training: TrainingOptions
    steps: int
    """Training steps."""
    value: ValueOptions | None = None
    """Options of the value model. None: the defaults, if the algorithm needs a value model."""


@dataclass(frozen=True)
class PreferenceOptions:
    """DPO on the rankings that the reward model was trained on."""

    loss: Dpo | Ipo
    fit: FitOptions


@dataclass(frozen=True)
class HeldOutOptions:
    """Held-out problems on which every model is measured at the end, at the sampling temperature."""

    problems: int = 200
    """Number of held-out problems, taken from the start of the task's held-out split."""
    samples: int = 4
    """Completions per problem."""

    def __post_init__(self) -> None:
        if self.problems < 2 or self.samples < 1:
            raise ValueError(
                f"held_out.problems is {self.problems}, held_out.samples {self.samples}: give at least 2 and 1"
            )


@dataclass(frozen=True)
class PipelineConfig:
    """Settings of a pipeline, all that determines its results."""

    sft: FitOptions
    reward_model: RewardModelOptions
    ppo: ReinforcementOptions
    grpo: ReinforcementOptions
    dpo: PreferenceOptions
    without_kl: bool = True
    """Train with GRPO once more without its KL term, to show what the KL prevents."""
    task: Sorting = field(default_factory=Sorting)
    demonstrations: DemonstrationOptions = DemonstrationOptions()
    rankings: RankingOptions = RankingOptions()
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=8))
    held_out: HeldOutOptions = HeldOutOptions()
    device: str = "auto"
    """Torch device of the models. `auto`: a GPU if there is one, else the CPU."""
    seed: int = 0
    """Random seed of all stages."""

    def __post_init__(self) -> None:
        if self.sampling.max_tokens <= self.task.length:
            raise ValueError(
                f"sampling.max_tokens is {self.sampling.max_tokens}: {self.task.length} letters and their end need "
                f"{self.task.length + 1}"
            )
        self.runs(Path())  # refuse an invalid run now

    @property
    def stages(self) -> list[str]:
        """Files and folders, in the order in which they are written."""
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
        """Configs of the reinforcement-learning runs, by folder name."""
        options = {"ppo": self.ppo, "grpo": self.grpo}
        if self.without_kl:
            free = replace(self.grpo.algorithm, kl=None)
            options["grpo-without-kl"] = replace(self.grpo, algorithm=free)
        return {name: self._run(each, folder) for name, each in options.items()}

    def rewards(self, folder: Path) -> RewardMix:
        """Reward mix: the learned reward is trained on, the true one only logged."""
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
