"""Starting the processes of a run, and starting them again."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from proximo import train
from proximo.api.planning import _fit_on_ranks
from proximo.cli import main
from proximo.distributed import launching
from proximo.distributed.launching import launch
from proximo.learner.ranks import Ranks
from proximo.planning.cards import DeviceCard
from proximo.planning.shapes import read_shape
from proximo.rl.config import RunConfig
from proximo.runs.webhook import VARIABLE, webhook_at
from proximo.samplers.embedded import Embedded
from proximo.samplers.engines.options import Fleet
from proximo.system.locks import FolderLock
from tests.runs.webhook_server import serving

SOURCE = Path(launching.__file__).parents[1]
BEGIN = "import os, pathlib, sys, time; rank = int(os.environ['RANK']); seen = pathlib.Path(sys.argv[1]); "


def started(code: str, seen: Path, ranks: int = 2, **options: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    return launch([sys.executable, "-c", BEGIN + code, str(seen)], ranks, said.append, **options), said


def test_each_process_knows_its_rank_and_rank_0_gives_the_status(tmp_path):
    code = (
        "(seen / str(rank)).write_text(os.environ['WORLD_SIZE'] + os.environ['LOCAL_RANK']); sys.exit(3 * (rank == 0))"
    )
    assert started(code, tmp_path, 3) == (3, [])
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"0": "30", "1": "31", "2": "32"}


def test_a_rank_that_dies_starts_all_of_them_again(tmp_path):
    code = (
        "tried = seen / str(rank); again = tried.exists(); tried.touch(); "
        "rank and not again and os.kill(os.getpid(), 9); sys.exit(0 if again else 75)"
    )
    status, said = started(code, tmp_path)
    assert status == 0
    assert said == ["rank 1 was ended by SIGKILL: all are started again from the newest checkpoint, 3 times at most"]


def test_a_rank_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "GRACE", 0.3)
    status, said = started("time.sleep(600 * rank); sys.exit(75)", tmp_path, restarts=0)
    assert (status, said) == (1, ["rank 1 hangs: the run has ended"])


def test_what_a_rank_refuses_is_refused_once(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "REFUSAL_GRACE", 0.3)
    code = "(seen / f'{rank}-{os.getpid()}').touch(); rank or time.sleep(600); sys.exit(2)"
    assert started(code, tmp_path) == (2, [])
    assert len(list(tmp_path.iterdir())) <= 2  # rank 0 may have been killed before it wrote


def test_a_run_that_is_asked_to_stop_before_it_listens_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "GRACE", 0.3)
    code = "rank or os.kill(int(os.environ['PROXIMO_LAUNCHER']), 15); time.sleep(600)"
    assert started(code, tmp_path) == (128 + 15, [])


def test_nothing_of_it_is_imported_by_a_run_of_one_process():
    importing = re.compile(r"^(?:from|import) proximo\.distributed", re.MULTILINE)
    others = [each for each in SOURCE.rglob("*.py") if SOURCE / "distributed" not in each.parents]
    assert not [each for each in others if importing.search(each.read_text())]


def test_train_joins_the_group_that_it_was_started_for(monkeypatch, capsys):
    """Without [ranks] each process would train a run of its own."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--dry-run"]) == 0
    assert "[ranks]\nprocesses = 3\n" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["train", "--dry-run"]) == 0
    assert "[ranks]" not in capsys.readouterr().out


def test_shards_without_a_number_of_processes_wait_for_one(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[ranks]\nshard = 4\n")
    assert main(["train", str(tmp_path / "run.toml"), "--ranks", "8", "--dry-run"]) == 0
    for flags, words in ((["--ranks", "6"], "ranks.shard is 4"), ([], "ranks.processes is 0")):
        with pytest.raises(SystemExit):
            main(["train", str(tmp_path / "run.toml"), *flags])
        assert words in capsys.readouterr().err


def test_every_option_of_ranks_is_a_flag(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    flags = "--ranks 4 --ranks.shard 2 --ranks.timeout 30 --ranks.cluster ray --ranks.address=10.0.0.1:6379"
    assert main(["train", *flags.split(), "--dry-run"]) == 0
    wanted = 'processes = 4\nshard = 2\ntimeout = 30.0\ncluster = "ray"\naddress = "10.0.0.1:6379"\n'
    assert f"[ranks]\n{wanted}" in capsys.readouterr().out
    (tmp_path / "run.toml").write_text("[ranks]\nshard = 4\n")
    assert main(["train", str(tmp_path / "run.toml"), "--ranks", "8", "--ranks.timeout", "30", "--dry-run"]) == 0
    assert "[ranks]\nprocesses = 8\nshard = 4\ntimeout = 30.0\n" in capsys.readouterr().out


def test_a_run_folder_that_cannot_be_used_is_refused_before_processes_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launching, "launch", lambda *_, **__: pytest.fail("processes were started"))
    (tmp_path / "file").touch()
    with FolderLock(tmp_path / "used"):
        for name, said in (("file", "nothing can be written there, Not a directory"), ("used", "is in use by process")):
            with pytest.raises(SystemExit, match="2"):
                main(["train", "--ranks", "2", "--run", str(tmp_path / name)])
            assert said in capsys.readouterr().err
        with pytest.raises(ValueError, match="is in use by process"):  # and so from Python
            train(RunConfig(ranks=Ranks(2)), run=tmp_path / "used", quiet=True)


@pytest.mark.parametrize(
    ("flags", "peak"),
    [
        ([], "fits on 4 ranks with weights in 4 shards: predicted peak"),
        (["--ranks.shard", "1"], "fits on 4 ranks with whole weights: predicted peak"),
    ],
)
def test_a_dry_run_says_whether_each_rank_holds_its_part(flags, peak, capsys):
    assert main(["train", "--ranks", "4", *flags, "--dry-run"]) == 0
    assert f"# memory, time   {peak}" in capsys.readouterr().out


@pytest.mark.slow("starts ranks")
def test_ranks_hold_less_each_and_need_no_copy_where_engines_sample():
    card, sizes = DeviceCard("any", memory=1000.0, bandwidth=1e12, arithmetic=1e14), {}
    for ranks in (2, 8):
        for name, sampler in (("own", Embedded()), ("engines", Fleet())):
            config = RunConfig(model="8B", ranks=Ranks(ranks), sampler=sampler)
            sizes[ranks, name] = _fit_on_ranks(config, Ranks(ranks), card, 512).peak
    weights = 2 * read_shape("8B").parameters
    for ranks in (2, 8):
        assert sizes[ranks, "own"] > sizes[ranks, "engines"]
    assert sizes[8, "engines"] < sizes[2, "engines"] - 6 * weights / 2


@pytest.mark.parametrize(
    ("memory", "ranks", "engines", "said"),
    [
        (80.0, Ranks(2), False, "GiB on each; it fits on 4 with ranks.shard = 0"),
        (80.0, Ranks(64, shard=1), False, "GiB on each; it fits on 64 with ranks.shard = 0"),
        (12.0, Ranks(2), False, "more ranks do not help, since each has a whole copy to sample with: use engines"),
        (12.0, Ranks(2), True, "GiB on each; it fits on 64 with ranks.shard = 0"),
    ],
)
def test_what_does_not_fit_is_told_what_would(memory, ranks, engines, said):
    card = DeviceCard("any", memory=memory, bandwidth=1e12, arithmetic=1e14)
    sampler = Fleet() if engines else Embedded()
    small = _fit_on_ranks(RunConfig(model="8B", sampler=sampler), ranks, card, 512)
    assert not small.fits
    assert small.lines[0].startswith(f"does not fit on {ranks.processes} ranks with ")
    assert said in small.lines[0]


def test_what_rank_0_has_alone_is_not_in_shards():
    card = DeviceCard("any", memory=1000.0, bandwidth=1e12, arithmetic=1e14)
    peaks = {}
    for teacher in (None, "14B"):
        config = RunConfig(model="0.6B", sampler=Fleet(), teacher=teacher)
        found = _fit_on_ranks(config, Ranks(8), card, 512)
        peaks[teacher] = found.peak
    assert peaks["14B"] - peaks[None] >= 2 * read_shape("14B").parameters
    assert "on rank 0" in found.lines[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"processes": -1}, "ranks.processes is -1"),
        ({"processes": 4, "shard": 3}, "ranks.shard is 3"),
        ({"timeout": 0.0}, "ranks.timeout is 0.0"),
    ],
)
def test_options_that_cannot_be(options, named):
    with pytest.raises(ValueError, match=named):
        Ranks(**options)


def test_rank_0_gets_the_webhook_and_the_launcher_tells_where_it_gives_up(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "https://ntfy.sh/not-this-one")
    code = f"(seen / str(rank)).write_text(os.environ[{VARIABLE!r}]); sys.exit(75 * (rank == 0))"
    with serving() as server:
        given = webhook_at(server.address)
        assert started(code, tmp_path, folder=tmp_path / "mine", webhook=given, restarts=0)[0] == 1
        assert (tmp_path / "0").read_text() == server.address
        assert server.texts == ["mine: failed: the ranks lost each other"]
        assert started(code, tmp_path, restarts=0)[0] == 1
        assert (tmp_path / "0").read_text() == ""
        assert len(server.posts) == 1
