"""Episodes of several turns on vLLM, in a file of their own: the small model of other files is none of vLLM's."""

from dataclasses import replace

import pytest

from proximo.algorithms import GRPO
from proximo.losses import TokenTruncated
from proximo.rl.config import AheadOptions
from tests.rl.test_episodes import config
from tests.samplers.engines.test_episodes import IN_FLIGHT, assert_episodes, rows
from tests.samplers.engines.test_run import events
from tests.samplers.engines.vllm_servers import options


@pytest.mark.scale
@pytest.mark.parametrize("ahead", [AheadOptions(), IN_FLIGHT], ids=["plain", "in flight"])
def test_vllm_plays_episodes(tmp_path, ahead):
    algorithm = replace(GRPO, correct=TokenTruncated())
    assert_episodes(rows(config(algorithm, sampler=options("folder"), ahead=ahead), tmp_path))
    assert all(each["gap"] <= 1e-5 for each in events(tmp_path, "push"))
