"""Fine-tuning, DPO and reward models on ranks: the numbers of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proximo.distributed.mesh import Mesh
from proximo.distributed.stages import dealt, smallest, with_idle
from proximo.learner.ranks import Ranks
from proximo.supervised.encoding import Encoded
from proximo.supervised.schedule import FitOptions
from proximo.supervised.sft import SftConfig, sft_overview
from tests.distributed import stage_cases
from tests.distributed.groups import start_group
from tests.rows import metrics_of

NORM, WEIGHTS = 1e-5, 5e-6
NAMES = ("sft", "chats", "dpo", "lora", "reward")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    mesh = Mesh.alone()
    yield mesh
    mesh.close()


def weights(folder: Path) -> torch.Tensor:
    [file] = folder.glob("checkpoints/*/*model.safetensors")
    return torch.cat([each.flatten().double() for _, each in sorted(load_file(file).items())])


@pytest.mark.slow("trains and resumes runs")
@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.parametrize("name", [*NAMES[:2], *(pytest.param(each, marks=pytest.mark.scale) for each in NAMES[2:])])
def test_one_rank_equals_none_and_resumes_exactly(mesh, tmp_path, name):
    config = stage_cases.configs(tmp_path)[name]
    stage_cases.run(config, tmp_path / "plain")
    stage_cases.conduct(config, tmp_path / "rank", mesh)
    stage_cases.interrupted(config, tmp_path / "resumed", mesh)
    for each in ("rank", "resumed"):
        assert (tmp_path / each / "metrics.jsonl").read_bytes() == (tmp_path / "plain" / "metrics.jsonl").read_bytes()
        assert torch.equal(weights(tmp_path / each), weights(tmp_path / "plain"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    start_group("tests.distributed.stage_cases", [str(folder)], folder)
    return folder


@pytest.mark.scale
@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_agree_with_one_process_and_resume(two_ranks, tmp_path, name):
    stage_cases.run(stage_cases.configs(tmp_path)[name], tmp_path / "plain")
    plain, found = metrics_of(tmp_path / "plain"), two_ranks / name
    assert (found / "resumed" / "metrics.jsonl").read_bytes() == (found / "ranks" / "metrics.jsonl").read_bytes()
    assert torch.equal(weights(found / "resumed"), weights(found / "ranks"))
    for ours in ("ranks", "alone"):
        rows = metrics_of(found / ours)
        assert [row["step"] for row in rows] == [row["step"] for row in plain]
        norms = [[row["gradient_norm"] for row in each if "gradient_norm" in row] for each in (rows, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=NORM)
        theirs = weights(tmp_path / "plain")
        assert float((weights(found / ours) - theirs).norm() / theirs.norm()) < WEIGHTS


def test_a_conversation_is_one_row_of_which_its_replies_are_trained(tmp_path):
    config = stage_cases.configs(tmp_path)["chats"]
    assert isinstance(config, SftConfig)
    rows = sft_overview(config).data.train
    assert {len(row.completions) for row in rows} == {1}
    assert len({row.learned for row in rows}) > 4
    assert sum(row.trained is not None for row in rows) > 4
    assert all(row.trained is None or row.learned < len(row.completions[0]) for row in rows)


def test_items_are_dealt_whole_and_every_rank_makes_equally_many_passes():
    items = [Encoded(str(size), (1,), ((2,) * size,)) for size in (4, 8, 3, 3)]
    assert dealt(items, 2) == [[1, 3], [0, 2]]
    assert dealt(items, 1) == [[0, 1, 2, 3]]
    assert smallest(items) == 2
    assert with_idle([["a", "b"], []], "idle") == [(["a", "b"], 0, "idle"), ([], 2, "idle")]


def test_what_ranks_cannot_hold_is_refused_with_the_config():
    with pytest.raises(ValueError, match="fit.adam_moments is '8bit': with ranks"):
        SftConfig(fit=FitOptions(adam_moments="8bit"), ranks=Ranks(2))
