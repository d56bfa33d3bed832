"""What tests look at inside a learner's policy."""

from proximo.training.learner.learner import Learner
from proximo.training.learner.policy import PlainPolicy


def plain(learner: Learner) -> PlainPolicy:
    """The learner's policy, which is a whole model in memory."""
    assert isinstance(learner.policy, PlainPolicy)
    return learner.policy
