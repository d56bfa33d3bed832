"""The engine of this process passes the suite that any engine must pass."""

from collections.abc import Iterator

import pytest

from proximo.samplers.engines.embedded import EmbeddedEngine
from proximo.samplers.engines.sync import Folder
from tests.samplers.engines.conformance import Bench, EngineConformance, SmallPolicy


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    """Anew for each test: the last one ends its engine, and among several processes it may come first."""
    policy = SmallPolicy()
    engine, sync = EmbeddedEngine("engine-0", policy.model, policy.tokenizer), Folder(tmp_path)
    engine.start(30)
    sync.join(engine, 30)
    yield Bench(engine, sync, policy, 30)
    engine.stop()


class TestEmbedded(EngineConformance):
    pass
