"""A webhook is told how a run ends; it costs the run nothing, and its address is nowhere."""

import json
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import proximo
from proximo.cli import main
from proximo.runs import webhook
from proximo.runs.notifying import notified, shareable, tell, took
from proximo.runs.session import RunSession, open_session
from proximo.runs.signals import Stopped
from proximo.runs.webhook import VARIABLE, Webhook, webhook_at
from proximo.system.secrets import MASK, masked, without_secrets
from tests.runs.webhook_server import WebhookServer, hang, serving


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "RANK", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


def at(address: str) -> Webhook:
    found = webhook_at(address)
    assert found is not None
    return found


def attempt(folder: Path, server: WebhookServer, work: Callable[[RunSession], Any]) -> list[str]:
    """What is said of an attempt at a run."""
    said: list[str] = []
    with open_session(folder, 'model = "m"\n') as session, notified(session, at(server.address), said.append):
        session.start()
        work(session)
    return said


def fail(error: BaseException) -> Callable[[RunSession], None]:
    def work(_: RunSession) -> None:
        raise error

    return work


# What is told


def result(**more: Any) -> dict[str, Any]:
    before = {"accuracy": 0.25, "outcome": 0.25, "problems": 8}
    after = {"accuracy": 0.5, "outcome": 0.5, "problems": 8}
    return {"before": before, "after": after, "checkpoint": "step-000040", "seconds": 3725.0, **more}


COLLAPSED = 'the run ends here, as stop_on is "collapse": held-out-fall, the held-out score fell from 0.5 to 0.1'
ENDINGS = {
    "finished": (result(), "finished after 40 steps in 1 h 2 min\nheld-out accuracy 25.0% → 50.0%"),
    "collapsed": (
        result(ended=COLLAPSED, last="step-000060"),
        "ended early after 60 steps in 1 h 2 min: held-out-fall, the held-out score fell from 0.5 to 0.1\n"
        "held-out accuracy 25.0% → 50.0%",
    ),
    "target": (
        result(ended="the run ends here: outcome 0.5 after step 40 reaches evaluation.target, 0.5"),
        "ended early after 40 steps in 1 h 2 min: outcome 0.5 after step 40 reaches evaluation.target, 0.5\n"
        "held-out accuracy 25.0% → 50.0%",
    ),
    "task scores": (
        result(after={"accuracy": 0.0, "outcome": 0.5, "problems": 8}),
        "finished after 40 steps in 1 h 2 min\nheld-out task score 0.250 → 0.500",
    ),
    "unscored": (
        result(after={"accuracy": 0.0, "outcome": float("nan"), "problems": 8}),
        "finished after 40 steps in 1 h 2 min",
    ),
    "a stage": (
        {"steps": 7, "before": {"loss": 2.0}, "best": {"loss": 1.5}, "stopped_early": False, "seconds": 40.0},
        "finished after 7 steps in 40 s\nheld-out loss 2 → 1.5",
    ),
    "a stage without patience": (
        {"steps": 7, "best_step": 3, "before": {}, "best": {}, "stopped_early": True, "seconds": 40.0},
        "ended early after 7 steps in 40 s: held-out loss was best after step 3",
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_result_is_told_with_its_scores(case: str, tmp_path: Path):
    stored, lines = ENDINGS[case]
    with serving() as server:
        assert attempt(tmp_path / "mine", server, lambda session: session.finish(stored)) == []
    [posted] = server.posts
    assert posted.text == f"mine: {lines}"
    assert posted.headers["Title"] == "Proximo: mine"
    assert posted.path == "/services/T0/s3cretTok3n?wait=true"


BROKEN = {
    "a signal": (Stopped(signal.SIGTERM), "stopped by SIGTERM"),
    "Ctrl-C twice": (KeyboardInterrupt(), "interrupted"),
    "exit": (SystemExit(3), "ended with the exit status 3"),
    "an error": (ValueError("3 updates in a row were skipped\nsecond line"), "failed: 3 updates in a row were skipped"),
    "a fault": (RuntimeError("CUDA out of memory"), "failed: RuntimeError: CUDA out of memory"),
    "no words": (RuntimeError(), "failed: RuntimeError: RuntimeError"),
    "a path": (OSError(28, "No space left on device", "/home/me/run"), "failed: [Errno 28] No space left on device: …"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_ends_a_run_is_told_and_raised(case: str, tmp_path: Path):
    error, told = BROKEN[case]
    with serving() as server, pytest.raises(type(error)):
        attempt(tmp_path / "mine", server, fail(error))
    assert server.texts == [f"mine: {told}\nafter 0 s; `proximo resume` goes on from the beginning"]


def test_a_run_that_did_not_begin_has_nothing_to_resume(tmp_path: Path):
    with (
        serving() as server,
        pytest.raises(ValueError, match="the model"),
        open_session(tmp_path / "mine", "") as session,
        notified(session, at(server.address), print),
    ):
        raise ValueError("the model is too long")
    assert server.texts == ["mine: did not begin: failed: the model is too long"]
    assert not (tmp_path / "mine").exists()


def test_only_the_first_rank_tells_and_none_that_is_started_again(tmp_path: Path, monkeypatch):
    with serving() as server:
        monkeypatch.setenv("RANK", "1")
        attempt(tmp_path / "mine", server, lambda session: None)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(SystemExit):
            attempt(tmp_path / "mine", server, fail(SystemExit(75)))
        assert server.posts == []
        with pytest.raises(SystemExit):
            attempt(tmp_path / "mine", server, fail(SystemExit(143)))
    assert len(server.posts) == 1


SHAREABLE = {
    "cannot read '12 + 5' in /home/me/data/a.jsonl": "cannot read … in a.jsonl",
    "`run=/work/runs/a`: it's the model's own": "`run=a`: it's the model's own",
    "~/models/x, ../../home/me/y and step 3/4 of held_out/loss": "x, y and step 3/4 of held_out/loss",
    "no answer from http://10.0.0.7:8000/v1": "no answer from …",
    "reward Mine raised ValueError: the answer is 12 (mine.py, line 3)": "reward Mine raised ValueError",
    "Authorization: Bearer abcdefghijklmnop1234": f"Authorization: Bearer {MASK}",
}


@pytest.mark.parametrize("line", SHAREABLE)
def test_lines_have_no_values_paths_or_secrets(line: str):
    assert shareable(line) == SHAREABLE[line]


def test_seconds_are_said_as_a_person_would():
    assert [took(each) for each in (0.4, 59, 61, 3600, 90061)] == ["0 s", "59 s", "1 min", "1 h 0 min", "25 h 1 min"]


# How it is told


def test_slack_and_discord_get_their_json_and_others_text():
    slack, discord, own = (at(f"https://{host}/x") for host in ("hooks.slack.com", "ptb.discord.com", "notdiscord.com"))
    body, headers = slack.message("run", "a <!channel> & b")
    assert json.loads(body) == {"text": "a &lt;!channel&gt; &amp; b"}
    assert headers == {"Content-Type": "application/json"}
    body, headers = discord.message("run", "@everyone")
    assert json.loads(body) == {"content": "@everyone", "allowed_mentions": {"parse": []}}
    body, headers = own.message("run", "1 → 2")
    assert body.decode() == "1 → 2"
    assert headers == {"Content-Type": "text/plain; charset=utf-8", "Title": "run"}
    for title in ("Übung", "a\r\nX-Evil: 1"):
        assert "Title" not in own.message(title, "x")[1]


BAD = {
    "ftp://example.com/s3cret": "of https or http, at 'example.com'",
    "file:///etc/s3cret": "of https or http",
    "hooks.slack.com/services/s3cret": "of https or http",
    "https:///s3cret": "of https or http",
    "https://[s3cret/x": "can be read",
    "https://example.com:s3cret/x": "can be read",
    "https://example.com/s3cret x": "write these as %20",
    "https://example.com/s3cret\nx": "can be read|write these as %20",
    "https://example.com/s3crét": "write these as %20",
    "https://me:s3cret@example.com/x": "a password before the host example.com",
}


@pytest.mark.parametrize("address", BAD)
def test_bad_addresses_are_refused_without_being_shown(address: str, monkeypatch):
    with pytest.raises(ValueError, match=BAD[address]) as refused:
        webhook_at(address)
    assert "s3cr" not in str(refused.value)
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(ValueError, match=VARIABLE):
        webhook_at(None)


def test_the_environment_is_read_where_no_address_is_given(monkeypatch):
    assert webhook_at(None) is None
    monkeypatch.setenv(VARIABLE, " https://ntfy.sh/mine\n")
    assert webhook_at(None) == Webhook("https://ntfy.sh/mine", "ntfy.sh")
    assert webhook_at("") is None
    with pytest.raises(TypeError, match="notify is of the type list"):
        webhook_at(["https://ntfy.sh/mine"])  # pyright: ignore[reportArgumentType]


# What a webhook cannot do


def redirect(request: BaseHTTPRequestHandler, server: WebhookServer) -> None:
    request.send_response(307)
    request.send_header("Location", f"http://localhost:{server.port}/elsewhere")
    request.send_header("Content-Length", "0")
    request.end_headers()


def refuse(request: BaseHTTPRequestHandler, _: WebhookServer) -> None:
    request.send_error(403, "s3cretTok3n is not known")


def babble(request: BaseHTTPRequestHandler, _: WebhookServer) -> None:
    request.wfile.write(b"\x00\xffs3cretTok3n" * 100 + b"\r\n\r\n")
    request.close_connection = True


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (redirect, "it answered with the status 307"),
        (refuse, "it answered with the status 403"),
        (babble, "BadStatusLine"),
        (hang, "no answer within 0.2 s"),
    ],
)
def test_a_webhook_that_does_not_work_costs_a_warning(answer, complaint: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(webhook, "LIMIT", 0.2 if answer is hang else 10.0)
    start = time.monotonic()
    with serving(answer) as server:
        said = attempt(tmp_path / "mine", server, lambda session: session.finish(result()))
        assert time.monotonic() - start < 10
    assert said == [f"warning: 127.0.0.1 was not told how the run ended: {complaint}"]
    assert len(server.posts) == 1


def test_a_webhook_that_is_not_there_costs_a_warning(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        said: list[str] = []
        tell(at(f"http://127.0.0.1:{free.getsockname()[1]}/s3cret"), tmp_path, "finished", said.append)
    assert said == ["warning: 127.0.0.1 was not told how the run ended: Connection refused"]


def test_a_result_that_cannot_be_told_costs_a_warning(tmp_path: Path):
    with serving() as server:
        [said] = attempt(tmp_path / "mine", server, lambda session: session.finish({"before": 1, "after": 2}))
    assert said == "warning: 127.0.0.1 was not told how the run ended: AttributeError"


# The address is nowhere


def test_an_address_is_masked_in_command_lines_and_messages():
    address = "https://ntfy.sh/my-topic"
    for flags in (["--notify", address], [f"--notify={address}"]):
        assert "my-topic" not in " ".join(without_secrets(["proximo", "train", *flags], {}))
    assert masked(f"see {address}", {VARIABLE: address}) == f"see {MASK}"
    assert "ntfy.sh/my-topic" not in repr(at(address))


SMALL = ("train", "arithmetic", "--steps", "1", "--evaluation.problems", "4", "--training.groups", "4")


@pytest.mark.slow("trains a run")
def test_a_run_tells_and_no_file_has_the_address(tmp_path: Path, monkeypatch, capsys):
    run = tmp_path / "mine"
    with serving() as server:
        command = [*SMALL, "--run", str(run), "--notify", server.address]
        monkeypatch.setattr("sys.argv", ["proximo", *command])
        assert main(command) == 0
        assert [text.splitlines()[0].partition(" in ")[0] for text in server.texts] == ["mine: finished after 1 step"]
        assert main(command) == 0
        assert len(server.posts) == 1, "it was finished already"
        monkeypatch.setenv(VARIABLE, server.address)
        assert main(["resume", str(run), "--steps", "2", "--allow-change", "steps"]) == 0
        assert server.texts[-1].startswith("mine: finished after 2 steps")
    printed = capsys.readouterr()
    assert "s3cretTok3n" not in printed.out + printed.err
    assert [path for path in run.rglob("*") if path.is_file() and b"s3cretTok3n" in path.read_bytes()] == []
    assert f"--notify {MASK}" in " ".join(json.loads((run / "run.json").read_text())["argv"])


def test_a_config_cannot_name_an_address(tmp_path: Path, capsys):
    (tmp_path / "other.toml").write_text('notify = "https://example.com/s3cret"\n')
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "other.toml"), "--model", "tiny-arithmetic"])
    error = capsys.readouterr().err
    assert "other.toml:1: notify belongs to the command, and to no config: give it as `--notify`" in error
    assert "s3cret" not in error


@pytest.mark.slow("trains a run")
def test_python_tells_of_runs_and_of_stages(tmp_path: Path):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(
        proximo.presets.ARITHMETIC,
        steps=2,
        training=replace(proximo.presets.ARITHMETIC.training, groups=4, group_size=4),
        evaluation=proximo.EvaluationOptions(problems=4),
    )

    def broken(step: int, metrics: dict[str, float]) -> None:
        raise KeyError("the prompt '1+1=' of a user")

    with serving() as server:
        proximo.sft(tmp_path / "data.jsonl", tmp_path / "a", model="tiny-arithmetic", notify=server.address, quiet=True)
        with pytest.raises(KeyError):
            proximo.train(config, tmp_path / "b", notify=server.address, on_step=broken, quiet=True)
    sft, failed = server.texts
    assert sft.startswith("a: finished after ")
    assert "\nheld-out loss " in sft
    first, second = failed.splitlines()
    assert first == "b: failed: KeyError: …"
    assert second.endswith("; `proximo resume` goes on from the beginning")
    with pytest.raises(ValueError, match="notify is no address of https or http"):
        proximo.train(config, tmp_path / "c", notify="ntfy.sh/mine")


def test_bad_commands_are_refused_before_a_model_loads(monkeypatch, capsys):
    for command in ("train", "fork", "sft", "dpo", "reward-model"):
        with pytest.raises(SystemExit) as refused:
            main([command, "--notify", "ftp://example.com/s3cret"])
        assert refused.value.code == 2
        assert "error: notify is no address of https or http" in (error := capsys.readouterr().err)
        assert "s3cret" not in error
    with pytest.raises(SystemExit):
        main(["train", "pipeline-demo", "--notify", "https://ntfy.sh/mine"])
    assert "--notify is for one run" in capsys.readouterr().err
