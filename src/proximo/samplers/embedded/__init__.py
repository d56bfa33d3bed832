"""The embedded engine: a sampler that decodes with the policy's own module, in this process."""

from proximo.samplers.embedded.sampler import Embedded, EmbeddedSampler, local_sampler

__all__ = ["Embedded", "EmbeddedSampler", "local_sampler"]
