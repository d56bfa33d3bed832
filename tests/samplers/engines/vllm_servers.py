"""vLLM servers for tests: which Python has vLLM, and a plugin that plants a fault in it."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from proximo.samplers.engines.building import build_fleet
from proximo.samplers.engines.fleet import FleetSampler
from proximo.samplers.engines.options import Fleet
from proximo.samplers.engines.sync import Transport
from proximo.samplers.engines.vllm import VllmEngine
from tests.samplers.engines.conformance import SmallPolicy

DEADLINE = 900.0
"""Seconds for a server to start on a busy machine."""

PLUGIN = """
import os

def register():
    from proximo.samplers.engines import plugin
    whole = plugin.finish_reload

    def finish_reload(model, config):
        if not os.path.exists({flag!r}):
            return whole(model, config)
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        finalize_layerwise_reload(model, config)

    plugin.finish_reload = finish_reload
"""


def vllm_python() -> str:
    """Python with vLLM; skips the test where there is none."""
    if given := os.environ.get("PROXIMO_VLLM_PYTHON"):
        return given
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("PROXIMO_VLLM_PYTHON names no Python with vLLM")
    return sys.executable


def options(sync: Transport = "folder", **more) -> Fleet:
    return Fleet(
        sync=sync, python=vllm_python(), kv_cache_mb=64, deadline=DEADLINE, arguments=("--enforce-eager",), **more
    )


def one_engine(policy: SmallPolicy, sync: Transport) -> tuple[FleetSampler, VllmEngine]:
    """A server of this policy, which is not started yet, and the fleet that ends it."""
    fleet = build_fleet(options(sync), policy, policy.tokenizer, slots=8)
    [engine] = fleet.roster.missing()
    assert isinstance(engine, VllmEngine)
    return fleet, engine


def plant_fault(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Servers that start from now on leave a tied head as it was while the returned file exists."""
    flag, about = folder / "flag", folder / "planted-1.dist-info"
    about.mkdir(parents=True)
    (folder / "planted_fault.py").write_text(PLUGIN.format(flag=str(flag)))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = planted_fault:register\n")
    patch.setenv("PYTHONPATH", str(folder))
    return flag
