"""Environments, which stand between a task's problems and the sampler: one question and answer, or several turns."""

from proximo.environments.grading import paying, played
from proximo.environments.multi_turn import MultiTurn
from proximo.environments.protocol import Acting, Ask, Interaction, Question, play
from proximo.environments.single_turn import SingleTurn
from proximo.environments.starts import Starts

__all__ = [
    "Acting",
    "Ask",
    "EnvironmentOptions",
    "Interaction",
    "MultiTurn",
    "Question",
    "SingleTurn",
    "Starts",
    "paying",
    "play",
    "played",
]

EnvironmentOptions = SingleTurn | MultiTurn | Interaction
"""Environments that a run's config may name: those of this package, and any class that has `play`."""
