"""The sandbox: harmless programs run in it as anywhere, hostile ones do not get out, and without it none is run."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from proximo.processes.sandbox import (
    Calls,
    Limits,
    NoSandbox,
    Sandbox,
    SandboxFailed,
    SandboxJob,
    filtering,
    isolation,
    missing_mechanisms,
    running,
)
from proximo.processes.sandbox.protocol import send
from tests import ROOT
from tests.processes.sandbox.captivity import World, gets_out_bare, left_behind, needs_sandbox, tried
from tests.processes.sandbox.payloads import KERNEL, PAYLOADS, Payload

LIMITS = Limits(seconds=1.5, cpu_seconds=1, memory_mb=256, scratch_mb=8)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")


@pytest.fixture(scope="module")
def sandbox():
    try:
        sandbox = Sandbox(LIMITS, workers=4)
    except NoSandbox as missing:
        pytest.skip(f"not run: {missing}")
    yield sandbox
    sandbox.close()
    assert not left_behind()


# Harmless programs


ORDINARY = {
    "threads": "import threading\nt = [threading.Thread(target=print, args=(i,)) for i in range(8)]\n"
    "[(x.start(), x.join()) for x in t]",
    "executor": "from concurrent.futures import ThreadPoolExecutor as T\nprint(list(T(4).map(abs, [-1, -2])))",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 7\nprint(asyncio.run(f()))",
    "files": "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n"
    "    p = os.path.join(d, 'a')\n    open(p, 'w').write('x')\n    os.rename(p, p + 'b')\n    print(os.listdir(d))",
    "database": "import sqlite3\nc = sqlite3.connect('x.db')\nc.execute('create table t (a)')\n"
    "c.execute('insert into t values (3)')\nc.commit()\nprint(c.execute('select a from t').fetchall())",
    "zones": "import datetime as d, zoneinfo\nprint(d.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Paris')))",
    "dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass A:\n    x: int\nprint(A(3))",
    "typing": "import typing\nclass A:\n    x: 'int'\nprint(typing.get_type_hints(A))",
    "random": "import random, os, uuid\nprint(len(os.urandom(9)), 0 <= random.random() < 1, bool(uuid.uuid4()))",
    "imports": "import bz2, csv, ctypes, decimal, email, hashlib, lzma, mmap, pickle, queue, ssl, unittest, zlib\n"
    "print(mmap.mmap(-1, 10)[:1])",
    "recursion": "import sys\nsys.setrecursionlimit(50000)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(40000))",
    "signals": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('late'))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()\nsignal.raise_signal(signal.SIGALRM)",
    "exit functions": "import atexit\natexit.register(print, 'end')\nprint('begin')",
    "numbers": "from fractions import Fraction\nprint(Fraction(1, 3) + 1, 2 ** 200, round(2.5), 1e-7)",
    "pickled main": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__, __name__)",
    "argv": "import sys\nprint(sys.argv, sys.stdin.isatty())",
}


@pytest.mark.slow("starts the sandbox")
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_say_what_they_say_anywhere(sandbox: Sandbox, name: str, tmp_path: Path):
    script = tmp_path / "program.py"
    script.write_text(ORDINARY[name])
    environment = {"PYTHONHASHSEED": "0", "TZ": "UTC"}
    command = [sys.executable, "-S", "program.py"]
    bare = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, stdin=subprocess.DEVNULL)
    result = sandbox.run(SandboxJob(ORDINARY[name]))
    assert bare.returncode == 0, bare.stderr
    assert result.stdout == bare.stdout, result.stderr
    assert result.finished


@pytest.mark.slow("starts the sandbox")
def test_input_and_output(sandbox: Sandbox):
    result = sandbox.run(SandboxJob("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", stdin="abc\nπü\n"))
    assert result.stdout.decode() == "cba\nüπ\n"
    assert result.stderr == b""
    large = "x" * 500_000
    assert sandbox.run(SandboxJob("print(len(input()))", stdin=large)).stdout == b"500000\n"
    assert len(sandbox.run(SandboxJob(f"print('y' * {LIMITS.output_kb * 1024 - 1})")).stdout) == LIMITS.output_kb * 1024


@pytest.mark.slow("starts the sandbox")
@pytest.mark.parametrize(
    ("program", "ended", "code"),
    [
        ("", "exit", 0),
        ("import sys; sys.exit(7)", "exit", 7),
        ("import sys; sys.exit('no')", "exit", 1),
        ("1 / 0", "exit", 1),
        ("syntax error", "exit", 1),
        ("import os; os.abort()", "signal", None),
        ("import os; os._exit(300)", "exit", 300 % 256),
        ("import sys; sys.stdout.close()", "exit", None),
        ("import threading; threading.Thread(target=lambda: 1 / 0).start()", "exit", 0),
    ],
)
def test_endings(sandbox: Sandbox, program: str, ended: str, code: int | None):
    result = sandbox.run(SandboxJob(program))
    assert result.ended == ended
    assert code is None or result.code == code


@pytest.mark.slow("starts the sandbox")
def test_calls(sandbox: Sandbox):
    program = "def f(a, b=2):\n    a.append(b)\n    return {'a': tuple(a), 1: None}\nprint('loaded')"
    result, nonce = sandbox.run_marked(SandboxJob(program, calls=Calls("f", ("[[1]]", '{"a": [], "b": 0.5}'))))
    assert [json.loads(line) for line in result.answers.splitlines()] == [
        [nonce, 0, {"a": [1, 2], "1": None}],
        [nonce, 1, {"a": [0.5], "1": None}],
    ]
    assert sandbox.run_marked(SandboxJob(program, calls=Calls("f", ("[[1]]",))))[1] != nonce


@pytest.mark.slow("starts the sandbox")
def test_programs_leave_nothing_for_the_next(sandbox: Sandbox):
    program = "import os, random\nprint(os.listdir('.'), random.random())\nopen('left', 'w').write('x')\nrandom.seed(1)"
    first, second = sandbox.run(SandboxJob(program)), sandbox.run(SandboxJob(program))
    assert first.stdout.startswith(b"[] ")
    assert first.stdout == second.stdout  # chance too is the same for every program


@pytest.mark.slow("starts the sandbox")
def test_a_server_never_holds_what_its_programs_were_asked(sandbox: Sandbox):
    """So a program, which begins as its server's copy, cannot find the programs before it."""
    secret = secrets.token_hex(32)
    one = Sandbox(LIMITS, workers=1)
    try:
        assert secret in one.run(SandboxJob(f"print('{secret}')")).stdout.decode()
        server = one._free.get()
        one._free.put(server)
        assert server._process is not None
        try:
            memory = memory_of(server._process.pid)
        except OSError as error:
            pytest.skip(f"not run: {error}")
        assert b"proximo.processes.sandbox.supervisor" in memory  # it is the right memory
        assert secret.encode() not in memory
    finally:
        one.close()


def memory_of(pid: int) -> bytes:
    found = b""
    with open(f"/proc/{pid}/maps") as places, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for place in places:
            where, rights = place.split()[:2]
            start, end = (int(number, 16) for number in where.split("-"))
            if rights.startswith("rw"):
                memory.seek(start)
                found += memory.read(end - start)
    return found


# Hostile programs


@pytest.fixture(scope="module")
def outcomes(sandbox: Sandbox):
    """All payloads, several at a time: most of those that are slow only wait."""

    def outcome(payload: Payload):
        with World() as world:
            return tried(sandbox, payload, world)

    found = sandbox.each(outcome, PAYLOADS)
    assert not left_behind()
    return {payload.name: each for payload, each in zip(PAYLOADS, found, strict=True)}


def test_there_are_enough_payloads_and_all_differ():
    assert len(PAYLOADS) >= 80
    assert len({payload.name for payload in PAYLOADS}) == len(PAYLOADS)


@pytest.mark.slow("starts the sandbox")
@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda each: each.name)
def test_payloads_run_and_are_contained(outcomes, payload: Payload):
    outcome = outcomes[payload.name]
    assert outcome.ran, f"{payload.name} did not run: {outcome.detail}"
    assert outcome.contained, outcome.detail


@pytest.mark.slow("starts 48 programs without their cage")
@pytest.mark.parametrize("payload", [each for each in PAYLOADS if each.bare], ids=lambda each: each.name)
def test_payloads_get_out_where_nothing_holds_them(payload: Payload):
    """Else their being contained would say nothing."""
    with World() as world:
        if not gets_out_bare(payload, world):
            if payload in KERNEL or os.getuid() != 0:
                pytest.skip("not run: this machine refuses it to everybody")
            pytest.fail(f"{payload.name} fails by itself")


# The servers

LIGHT = f"""
import sys, types
for name in ("proximo", "proximo.processes", "proximo.processes.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["{ROOT}/src/" + name.replace(".", "/")]
"""
"""The sandbox without the rest, which takes seconds to import."""


def test_a_server_that_hangs_or_dies_is_an_error_and_is_replaced():
    needs_sandbox()
    sandbox = Sandbox(LIMITS, workers=1)
    try:
        assert sandbox.run(SandboxJob("print(1)")).finished
        server = sandbox._free.get()
        sandbox._free.put(server)
        process = server._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailed, match="sandbox server"):
            sandbox.run(SandboxJob("print(2)"))
        assert sandbox.run(SandboxJob("print(3)")).stdout == b"3\n"
    finally:
        sandbox.close()
    assert not left_behind()


class Interrupted(BaseException):
    pass


def test_an_interrupted_run_answers_nobody_else():
    def stop(*_: object) -> None:
        raise Interrupted

    needs_sandbox()
    sandbox = Sandbox(LIMITS, workers=1)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        sandbox.run(SandboxJob("print(0)"))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            sandbox.run(SandboxJob("import time; time.sleep(1); print('first')"))
        assert sandbox.run(SandboxJob("print('second')")).stdout == b"second\n"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sandbox.close()
    assert not left_behind()


def test_an_answer_to_another_run_is_none():
    needs_sandbox()
    server = running.SandboxServer(LIMITS)
    try:
        server.start()
        server.run(SandboxJob("print(1)"), "one")
        assert server._connection is not None
        send(server._connection, {**asdict(SandboxJob("print('stale')")), "limits": asdict(LIMITS), "nonce": "another"})
        with pytest.raises(SandboxFailed, match="answered for another program"):
            server.run(SandboxJob("print('fresh')"), "two")
        assert server.run(SandboxJob("print('fresh')"), "three").stdout == b"fresh\n"
    finally:
        server.close()


def test_it_starts_where_the_standard_streams_are_closed(tmp_path: Path):
    needs_sandbox()
    said = tmp_path / "said"
    script = LIGHT + textwrap.dedent(f"""
        import os
        for number in range(3):
            os.close(number)
        from proximo.processes.sandbox.limits import SandboxJob, Limits
        from proximo.processes.sandbox.running import Sandbox
        try:
            sandbox = Sandbox(Limits(), workers=1)
            found = sandbox.run(SandboxJob("print(6 * 7)")).stdout
            sandbox.close()
        except BaseException as error:
            found = repr(error).encode()
        open({str(said)!r}, "wb").write(found)
    """)
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert said.read_bytes() == b"42\n"


@pytest.mark.slow("starts the sandbox")
def test_threads_do_not_use_up_the_address_space(sandbox: Sandbox):
    """Each with a heap of its own would reserve 64 MB: more than there is."""
    program = """
        import threading
        barrier = threading.Barrier(21)
        def work():
            kept = [bytes(2000) for _ in range(10)]
            barrier.wait(5)
        threads = [threading.Thread(target=work) for _ in range(20)]
        [thread.start() for thread in threads]
        barrier.wait(5)
        print(len(threads))
    """
    result = sandbox.run(SandboxJob(textwrap.dedent(program)))
    assert result.stdout == b"20\n", result.stderr


@pytest.mark.slow("starts the sandbox")
def test_a_socket_pair_is_of_this_machine_alone(sandbox: Sandbox):
    program = """
        import socket
        ours, theirs = socket.socketpair()
        ours.send(b"x")
        for family in (socket.AF_INET, socket.AF_TIPC):
            try:
                socket.socketpair(family)
            except OSError as error:
                print(error.errno)
    """
    assert (
        sandbox.run(SandboxJob(textwrap.dedent(program))).stdout == b"1\n1\n"
    )  # refused by the filter, not the kernel


def test_a_user_that_is_not_mapped_is_named(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "setgroups", refuse)
    with pytest.raises(PermissionError, match="cannot become user 65534.*rootless.*subuid"):
        isolation.become_nobody()


@pytest.mark.parametrize("counts", [True, False])
def test_threads_are_counted_where_nobody_elses_are(counts: bool, monkeypatch):
    found = {}
    monkeypatch.setattr(isolation.resource, "getrlimit", lambda what: (5000, 5000))
    monkeypatch.setattr(isolation.resource, "setrlimit", lambda what, limits: found.setdefault(what, limits))
    isolation.set_limits(LIMITS, counts_threads=counts)
    assert found[isolation.resource.RLIMIT_NPROC] == ((32, 32) if counts else (5000, 5000))


def test_programs_die_with_the_trainer():
    script = LIGHT + textwrap.dedent("""
        import threading
        from proximo.processes.sandbox.limits import SandboxJob, Limits
        from proximo.processes.sandbox.running import Sandbox
        sandbox = Sandbox(Limits(seconds=300.0), workers=2)
        for number in range(2):
            job = SandboxJob("import time; time.sleep(300)")
            threading.Thread(target=sandbox.run, args=(job,), daemon=True).start()
        print("ready", flush=True)
        threading.Event().wait()
    """)
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 30
    while len(descendants(trainer.pid)) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)  # two servers, two keepers, two programs
    alive = descendants(trainer.pid)
    assert len(alive) == 6
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    while any(running_process(number) for number in alive) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [number for number in alive if running_process(number)]


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        found = [int(number) for child in children for number in child.read_text().split()]
    except OSError:
        return []
    return found + [deeper for number in found for deeper in descendants(number)]


def running_process(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Machines that have less


DENYING = """
import errno, struct, sys
from proximo.processes.sandbox import kernel
def step(code, value, yes=0, no=0):
    return struct.pack("=HBBI", code, yes, no, value)
code = step(0x20, 0)
for number in {numbers}:
    code += step(0x15, number, 0, 1) + step(6, 0x50000 | errno.EPERM)
kernel.no_new_privileges()
kernel.set_filter(code + step(6, 0x7FFF0000))
from proximo.processes.sandbox.limits import SandboxJob, Limits, NoSandbox
from proximo.processes.sandbox.running import Sandbox, missing_mechanisms
print(*missing_mechanisms(), sep="\\n")
try:
    sandbox = Sandbox(Limits(), workers=1)
except NoSandbox as refusal:
    print("refused", refusal, sep="\\n")
else:
    print("ran", sandbox.run(SandboxJob("print(6 * 7)")).stdout)
    sandbox.close()
"""
UNSHARE, MOUNT = ((272, 165) if os.uname().machine == "x86_64" else (97, 40)) if sys.platform == "linux" else (0, 0)
MOUNT_SETATTR, LANDLOCK = 442, 444


def on_a_machine_without(*numbers: int) -> str:
    script = LIGHT + DENYING.format(numbers=numbers)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_without_a_wall_around_files_it_refuses_and_says_what_is_missing():
    said = on_a_machine_without(UNSHARE, MOUNT, LANDLOCK)
    assert "refused" in said
    for missing in ("a root of its own is missing", "Landlock is missing", "namespaces is missing", "or Landlock is"):
        assert missing in said
    assert "ran" not in said.split()


@pytest.mark.slow("starts the sandbox")
def test_without_landlock_a_root_of_its_own_is_enough(sandbox: Sandbox):
    if sandbox.missing:
        pytest.skip(f"not run: this machine lacks {', '.join(sandbox.missing)}")
    said = on_a_machine_without(LANDLOCK)
    assert said.startswith("Landlock is missing")
    assert "ran b'42\\n'" in said


@pytest.mark.slow("starts the sandbox")
def test_without_namespaces_landlock_and_the_filter_hold_or_it_refuses(sandbox: Sandbox):
    """Refused where root's interpreter lies in a folder that nobody else may read."""
    said = on_a_machine_without(UNSHARE, MOUNT)
    assert "namespaces is missing" in said
    if "an interpreter that everybody can read is missing" in said:
        assert "refused" in said
    else:
        assert "ran b'42\\n'" in said


def test_bubblewrap_stands_in_for_a_root_of_its_own():
    if shutil.which("bwrap") is None:
        pytest.skip("not run: bubblewrap is not installed")
    said = on_a_machine_without(MOUNT_SETATTR, LANDLOCK)
    assert "a root of its own is missing" in said
    assert "ran b'42\\n'" in said


def test_elsewhere_it_refuses(monkeypatch):
    monkeypatch.setattr(running.platform, "machine", lambda: "riscv64")
    for attempt in (Sandbox, missing_mechanisms):
        with pytest.raises(NoSandbox, match="needs Linux on x86_64 or aarch64, and this is linux on riscv64"):
            attempt()


def test_a_program_that_could_get_out_is_a_reason_to_refuse(monkeypatch):
    """The probe runs for real: with an allowance too many it must see it."""
    from proximo.processes.sandbox import capabilities

    needs_sandbox()
    monkeypatch.setattr(capabilities, "_PROGRAM", capabilities._PROGRAM + "\ntried('add two numbers', lambda: 1 + 1)\n")
    with pytest.raises(NoSandbox, match="a program could add two numbers"):
        Sandbox(LIMITS, workers=1)
    monkeypatch.setattr(capabilities, "_PROGRAM", "raise SystemExit(3)")
    with pytest.raises(NoSandbox, match="a harmless program does not run: exit 3"):
        Sandbox(LIMITS, workers=1)


HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
"""The kernel's own tables; the generic one, which is aarch64's, is installed on every machine that has headers."""


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filters_tables_are_the_kernels(machine: str):
    header = Path("/usr/include") / HEADERS[machine]
    if not header.exists():
        pytest.skip(f"not run: {machine}'s headers are not installed")
    defined = [line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR")]
    text = {words[0]: words[1] for words in defined if len(words) == 2}

    def number(name: str) -> int:
        """Some are another name of a call that has one number on 32 and one on 64 bits."""
        value = text[name]
        return int(value) if value.isdigit() else number(value)

    ours = filtering._numbers(filtering._ALLOWED, machine) | filtering._numbers(filtering._DEPENDING, machine)
    assert ours == {name: number(f"__NR_{name}") for name in ours}
    refused = "execve execveat fork vfork unshare setns mount umount2 ptrace bpf keyctl perf_event_open userfaultfd"
    refused += " io_uring_setup socket connect bind listen accept clone3 memfd_create symlink link chmod setuid reboot"
    assert not ours.keys() & set(refused.split())


def test_a_place_that_was_lost_is_not_waited_for_in_vain(monkeypatch):
    needs_sandbox()
    monkeypatch.setattr(running, "MAX_WAIT", 0.05)
    sandbox = Sandbox(LIMITS, workers=1)
    lost = sandbox._free.get()
    try:
        with pytest.raises(SandboxFailed, match="no place in the sandbox became free in 0.05 seconds"):
            sandbox.run(SandboxJob("print(1)"))
    finally:
        sandbox._free.put(lost)
        sandbox.close()
