"""Samplers: inside this process with the learner's own weights, and engines in servers beside it."""

from importlib import import_module
from typing import Any

NAMES = ("RunSamplers", "SampledPolicy", "Sampler", "SamplerEvent", "SamplingOptions", "Stream", "gathered")
"""Names of sampler.py that users' files import from here; they load torch, and only when they are asked for."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(import_module("proximo.samplers.sampler"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
