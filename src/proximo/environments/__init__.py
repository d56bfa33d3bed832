"""What stands between a task's problems and the sampler: one question and one answer, or several turns."""

from proximo.environments.protocol import Ask, Environment, Question, play
from proximo.environments.single_turn import SingleTurn

__all__ = ["Ask", "Environment", "EnvironmentOptions", "Question", "SingleTurn", "play"]

EnvironmentOptions = SingleTurn | Environment
"""What a run's config may name: an environment of this package, or any class that is one."""
