"""Model text on a terminal and secrets in files: the one is shown inert, the other not at all."""

import io
import re
import sys

import pytest
from rich.console import Console

from proximo.api.endings import distinct
from proximo.cli import arguments, main
from proximo.cli.commands.train import LiveView
from proximo.rl.progress import ProgressLines
from proximo.runs.log import RunLog
from proximo.runs.records import Answered, Collected, DataCursor, Evaluation
from proximo.system.safe_text import quoted, visible
from proximo.system.secrets import masked, without_secrets
from proximo.types import Completion, Grade, Group, Problem, Rollout

HOSTILE = {
    "clear the screen": "\x1b[2J\x1b[H",
    "a title": "\x1b]0;owned\x07",
    "a link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "the clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "eight-bit controls": "\x9b31m\x90q\x9c",
    "backspaces": "rm -rf\x08\x08\x08\x08\x08\x08",
    "carriage return": "fail\rpass",
    "bells and NUL": "\x07\x00\x0b\x0c\x7f",
    "right to left": "\u202egnp.exe\u202c \u2066x\u2069 \u061c\u200f",
    "invisible": "\u200b\u2060\ufeff\u00ad\U000e0041",
    "half a pair": "\ud83d \udc00",
    "line separators": "\x85\u2028\u2029",
    "markup": "[/red][bold]x[/] [link=http://evil]y[/link] [@click=evil]z[/]",
}
STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_steers(case):
    text = HOSTILE[case]
    shown = visible(text)
    assert not STEERS.search(shown)
    assert (shown == text) == (not STEERS.search(text) and "\U000e0041" not in text)
    assert not STEERS.search(quoted(text))
    assert visible(shown) == shown


def test_what_is_spelled_out_by_hand():
    assert visible("a\x1b[31mb\x9b\u202e\0") == "a\\x1b[31mb\\x9b\\u202e\\x00"
    assert visible("two\nlines\tand é 数 👩\u200d🔬") == "two\nlines\tand é 数 👩\u200d🔬"


def test_long_text_is_cut():
    assert visible("abcdef", 4) == "abcd… (2 more characters)"
    assert visible("abcd", 4) == "abcd"
    assert len(visible("\x1b" * 10_000_000, 200)) < 1000
    assert len(quoted("x" * 10_000_000)) < 300
    assert quoted("\x1b'") == '"\\x1b\'"'
    assert quoted(3.5) == "3.5"
    assert quoted(None) == "None"


@pytest.mark.parametrize("case", HOSTILE)
def test_errors_quote_inertly(case, capsys):
    with pytest.raises(SystemExit):
        arguments.refuse(f"the prompt is {HOSTILE[case]}")
    assert not STEERS.search(capsys.readouterr().err)
    ProgressLines().warned(0, HOSTILE[case])
    assert not STEERS.search(capsys.readouterr().err)


@pytest.mark.parametrize("case", HOSTILE)
def test_the_live_view_shows_hostile_text_inertly(case):
    written = io.StringIO()
    view = LiveView()
    view.console = Console(file=written, force_terminal=True, width=40, color_system=None)
    view.live.console = view.console
    text = HOSTILE[case] + "x" * 5000
    problem = Problem(id=text, prompt=text, answer=text)
    rollout = Rollout(Completion((1,), (0.0,), text, "stop"), Grade(1.0))
    group = Group(problem, (1,), (rollout,))
    metrics = {"outcome": 0.0, "length": 0.0, "dead_groups": 0.0}
    view.start(1, Evaluation(0.0, 0.0, 0.0, problems=1, unscored=0, outcome=0.0, reward=0.0))
    collected = Collected((group,), dropped=(), cursor=DataCursor(), rounds=1, sampled_tokens=1)
    view.stepped(0, metrics, {"sample": 1.0}, collected)
    view.warned(0, text)
    view.stop()
    shown = written.getvalue()
    if "[/red]" in text:
        assert "[/red][bold]" in shown.replace("\n", "").replace("\r", "")
    # rich's own: colours, cursor, erased lines.
    ours = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", shown)
    assert not STEERS.search(ours)
    assert len(shown) < 30_000


def test_progress_outlives_its_reader(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    ProgressLines().warned(0, "nobody hears this")
    arguments.say("nor this")


# Secrets


ENVIRONMENT = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "hf_secretsecret", "DB_PASSWORD": "hunter2hunter2"}
ENVIRONMENT |= {"AWS_SECRET_ACCESS_KEY": "/begins/with+a+slash=", "DB_PASS": "opensesame", "COMPASS": "/home/somebody"}
ENVIRONMENT |= {"TOKENIZERS_PARALLELISM": "false", "HOME": "/home/somebody", "SSH_AUTH_SOCK": "/tmp/agent/socket"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:word@host/x?y=1", "https://***@host/x?y=1"),
        ("see (postgres://a:b@db:5432/t) and s3://key@bucket", "see (postgres://***@db:5432/t) and s3://***@bucket"),
        ("https://host/x@y mail me@host", "https://host/x@y mail me@host"),
        ("key=0123456789abcdef;", "key=***;"),
        ("hunter2hunter2", "***"),
        ("false in /home/somebody, /tmp/agent/socket", "false in /home/somebody, /tmp/agent/socket"),
        ("sk-proj-abcdefghijklmnop1234", "***"),
        ("ghp_" + "a" * 36, "***"),
        ("sk-learn and hf_hub", "sk-learn and hf_hub"),
        ("key /begins/with+a+slash=", "key ***"),
        ("word opensesame", "word ***"),
        ("https://u:p@ss@host/x", "https://***@host/x"),
        ("https://h/?a=1&token=abcdefgh12345678&b=2#c", "https://h/?a=1&token=***&b=2#c"),
        ("https://h/?X-Amz-Signature=abc&tokens", "https://h/?X-Amz-Signature=***&tokens"),
        ("github_pat_11ABCDEFG0123456789_abcdefghij", "***"),
        ("Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIi-1_0.abc=", "Authorization: Bearer ***"),
        ("the bearer of news, ?key", "the bearer of news, ?key"),
    ],
)  # fmt: skip
def test_secrets_by_hand(text, expected):
    assert masked(text, ENVIRONMENT) == expected
    assert masked(masked(text, ENVIRONMENT), ENVIRONMENT) == expected


def test_a_secrets_file_is_no_secret(tmp_path):
    (tmp_path / "credentials.json").touch()
    environment = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "credentials.json"), "TOKEN_FILE": "/not/there"}
    text = f"{tmp_path}/credentials.json and /not/there"
    assert masked(text, environment) == text


@pytest.mark.slow("masks megabytes")
@pytest.mark.parametrize("text", ["a", "a://", "://a", "?", "?token", "&key=", "Bearer ", "Bearer", "a@", "/", "hf_"])
def test_masking_takes_one_pass(text):
    """In steps that grow with the square of the length this would take hours."""
    masked(text * 200_000, {})


def test_events_keep_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "CANARY-CANARY-2")
    RunLog(tmp_path).event(0, "odd", "401 for https://me:CANARY1@host with CANARY-CANARY-2")
    written = (tmp_path / "events.jsonl").read_text()
    assert "401 for https://***@host with ***" in written
    assert "CANARY" not in written


def test_a_command_line_as_it_may_be_kept():
    arguments = ["proximo", "train", "--model", "https://u:p@host/m", "--judge.api-key", "abc", "--token=abc"]
    arguments += ["--sampling.max-tokens", "8", "--training.token-budget", "512", "x=hf_secretsecret"]
    assert without_secrets(arguments, ENVIRONMENT) == [
        *("proximo", "train", "--model", "https://***@host/m", "--judge.api-key", "***", "--token=***"),
        *("--sampling.max-tokens", "8", "--training.token-budget", "512", "x=***"),
    ]  # fmt: skip
    assert without_secrets(["train", "--steps", "3"], {}) == ["train", "--steps", "3"]


@pytest.mark.parametrize(
    "flag", [["--model", "https://me:CANARY1@host/m"], ["--model", "CANARY-CANARY-2"], ["--run", "CANARY-CANARY-2"]]
)
def test_secrets_reach_neither_disk_nor_terminal(flag, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "CANARY-CANARY-2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--task.type", "Arithmetic", "--model", "none-there", *flag])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "CANARY" not in printed.out + printed.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if b"CANARY" in path.read_bytes()]


@pytest.mark.slow("trains a run")
def test_a_run_folder_keeps_no_secret(tmp_path, monkeypatch, capsys):
    """Neither what the environment holds nor what the command line said of it."""
    monkeypatch.setenv("SOME_API_KEY", "CANARY-CANARY-2")
    flags = ["--steps", "1", "--training.groups", "1", "--training.minibatches", "1", "--training.group-size", "2"]
    flags += ["--task.held-out", "4", "--evaluation.problems", "2", "--run", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["proximo", "train", *flags, "https://me:CANARY1@host", "CANARY-CANARY-2"])
    assert main(["train", *flags]) == 0
    printed = capsys.readouterr()
    written = {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert b"https://***@host" in written["run.json"]  # it was there to be hidden
    assert not [name for name, data in written.items() if b"CANARY" in data]
    assert "CANARY" not in printed.out + printed.err


def test_answers_that_are_shown_are_to_distinct_problems():
    def answered(number: int, prompt: str) -> Answered:
        return Answered(Problem(f"p-{number}", prompt, "2"), Completion((), (), "2", "stop"), Grade(1.0))

    pairs = [(answered(n, prompt), answered(n, prompt)) for n, prompt in enumerate(["1+1=", "1+1=", "2+0=", "1+1="])]
    assert [before.problem.id for before, _ in distinct(pairs)] == ["p-0", "p-2"]
