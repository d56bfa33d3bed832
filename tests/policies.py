"""What tests look at inside a learner's policy."""

from proximo.learner.learner import Learner
from proximo.learner.policy import PlainPolicy


def plain(learner: Learner) -> PlainPolicy:
    """The learner's policy, which is a whole model in memory."""
    assert isinstance(learner.policy, PlainPolicy)
    return learner.policy
