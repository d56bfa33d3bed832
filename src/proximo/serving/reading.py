"""Reads requests in processes that the kernel ends when one takes too long.

A regular expression, a tokenizer or a chat template may hold Python's lock or never end, and a thread that does so can
neither be passed nor stopped. So `Asking` runs elsewhere: a first process loads it once and then waits; it forks the
processes that read, each when it is needed, in a few milliseconds. Their time is that of the processor, so that a busy
machine does not make requests too long.
"""

import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Literal

from proximo.serving.errors import Refusal
from proximo.serving.requests import Asking, CompletionQuery
from proximo.system.memory import limit_memory

SECONDS = 10.0
"""Seconds of the processor that reading a request may take."""
PATIENCE = 12
"""Multiple of that time that it may take by the clock."""
START_SECONDS = 300.0
"""Seconds for the first process to load what it needs."""
READERS = 8
"""Requests that are read at once: so many that never end leave others waiting for their time limit."""
MEMORY = 2 << 30
"""Bytes that reading a request may take."""
NICENESS = 5
"""Readers come after the server itself."""
READY = "ready"

Kind = Literal["chat", "text"]


class RequestReader:
    """Requests become queries, elsewhere. It starts with the first request, or with `start`; `close` ends it.

    Example: RequestReader(Asking(tokenizer, 4096, "a", 512)).read("text", b'{"model": "a", "prompt": "1+2="}')
    """

    def __init__(self, asking: Asking, *, seconds: float = SECONDS) -> None:
        self.asking, self.seconds = asking, seconds
        self.threads = ThreadPoolExecutor(READERS, "proximo-read")
        """Threads in which to call `read`, which waits."""
        self._lines: queue.LifoQueue[Connection] = queue.LifoQueue()
        """Connections to processes that are waiting."""
        self._first: subprocess.Popen[bytes] | None = None
        self._asked: socket.socket | None = None
        self._starting = threading.Lock()

    def read(self, kind: Kind, data: bytes) -> CompletionQuery:
        """Read what a request asks for; Refusal where that cannot be done, or cannot be found out in time."""
        line = self._line()
        try:
            line.send((kind, data))
            answer = line.recv() if line.poll(PATIENCE * self.seconds) else None
        except (EOFError, OSError):  # its process has ended
            answer = None
        if answer is None:
            line.close()
            raise Refusal(
                f"reading the request takes more than {self.seconds:g} s, or too much memory: send less; if it is "
                "short, the model's chat template or tokenizer does not end",
                code="request_too_expensive",
            )
        self._lines.put(line)
        if isinstance(answer, Refusal):
            raise answer
        assert isinstance(answer, CompletionQuery)
        return answer

    def start(self) -> None:
        """Start the first process, without waiting until it is ready."""
        if self._asked is not None:
            self._asked.close()
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            ForkingPickler(file).dump((self.asking, self.seconds))  # as a Connection sends: from us, to us
            file.seek(0)
            self._asked = ours
            self._first = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import fork; fork({theirs.fileno()})"],
                stdin=file,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def close(self) -> None:
        """End all processes."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self._first is None or self._asked is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._first.pid, signal.SIGKILL)
        self._first.wait()
        self._asked.close()
        while not self._lines.empty():
            self._lines.get().close()

    def _line(self) -> Connection:
        """A connection to a process that waits for a request."""
        with suppress(queue.Empty):
            return self._lines.get_nowait()
        line = self._new_line()
        with suppress(OSError, EOFError):
            if line.poll(START_SECONDS) and line.recv() == READY:
                return line
        line.close()
        raise Refusal("the process that reads requests does not start: look at the server's own messages", status=500)

    def _new_line(self) -> Connection:
        """A connection to a process that is being forked."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise Refusal(f"the server has no room for the request: {error.strerror}", status=503) from error
        with theirs, self._starting:
            if self._first is None or self._first.poll() is not None:
                self.start()
            assert self._asked is not None
            with suppress(OSError):  # it has ended, and so has the line
                socket.send_fds(self._asked, [b"."], [theirs.fileno()])
        return Connection(ours.detach())


def fork(descriptor: int) -> None:
    """The first process: for each socket that arrives, a process that answers there. They end with the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    asking, seconds = ForkingPickler.loads(sys.stdin.buffer.read())  # pyright: ignore[reportAttributeAccessIssue] (set when imported)
    with socket.socket(fileno=descriptor) as asked:
        while True:
            _, lines, _, _ = socket.recv_fds(asked, 1, 1)
            if not lines:
                os.killpg(0, signal.SIGKILL)
            if not os.fork():
                asked.close()
                with suppress(EOFError, OSError):
                    answer(Connection(lines[0]), asking, seconds)
                os._exit(0)
            os.close(lines[0])


def answer(line: Connection, asking: Asking, seconds: float) -> None:
    """Read one request after the other."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(MEMORY)
    line.send(READY)
    while True:
        kind, data = line.recv()
        # At its end, as on the alarm, the kernel ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(int(PATIENCE * seconds) + 1)
        line.send(_answered(asking, kind, data))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def _answered(asking: Asking, kind: Kind, data: bytes) -> CompletionQuery | Refusal:
    try:
        return asking.chat(data) if kind == "chat" else asking.text(data)
    except Refusal as refusal:
        return refusal
    except RecursionError:
        return Refusal("the request is nested too deeply")
    except MemoryError:
        return Refusal("the request takes too much memory: send less")
    except Exception as error:  # a tokenizer may raise anything
        return Refusal(f"the request cannot be read: {type(error).__name__}: {error}", status=500)
