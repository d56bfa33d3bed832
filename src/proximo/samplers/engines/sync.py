"""Ways of weights to engines: through a folder of safetensors, over gloo, or over NCCL.

Every transport pushes to all engines at once and says which of them failed. An engine whose update failed has weights
of two versions, so it stays paused and is replaced.
"""

# pyright: reportPrivateImportUsage=false
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from proximo.samplers.engines.buckets import BUCKET_BYTES, broadcast, gloo_group, open_store, packed, unpacked
from proximo.samplers.engines.engine import Engine, EngineLost

Transport = Literal["folder", "gloo", "nccl", "adapter"]
Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Gives name and value of every weight, anew for each call."""
FILE_BYTES = 1 << 31
"""Bytes of one file of weights."""


class WeightSync(Protocol):
    """Sends the policy's weights to engines."""

    def join(self, engine: Engine, deadline: float) -> None:
        """Connect to an engine that has started; EngineLost where that fails."""
        ...

    def push(self, engines: Sequence[Engine], weights: Weights, version: int, deadline: float) -> dict[str, str]:
        """Send the weights to paused engines. Returns why it failed, by the names of the engines that failed."""
        ...

    def leave(self, engine: Engine) -> None:
        """Forget an engine that is not used again."""
        ...


class Folder:
    """Writes safetensors to a folder that every engine can read: on one machine, or on a shared file system."""

    def __init__(self, root: Path) -> None:
        """`root` is the folder; each push has one of its own inside, which is removed when it has been read."""
        self._root = root

    def join(self, engine: Engine, deadline: float) -> None:
        engine.join({}, deadline)

    def push(self, engines: Sequence[Engine], weights: Weights, version: int, deadline: float) -> dict[str, str]:
        folder = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._root))
        write_weights(folder, weights())

        def load(engine: Engine) -> None:
            engine.begin_update(deadline)
            engine.update({"path": str(folder)}, deadline)
            engine.finish_update(version, deadline)

        try:
            return in_parallel(engines, load)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def leave(self, engine: Engine) -> None:
        pass


def write_weights(folder: Path, named: Iterator[tuple[str, Tensor]]) -> None:
    """Weights as safetensors, in files of bounded size."""
    for number, (layout, bucket) in enumerate(packed(named, FILE_BYTES)):
        save_file(dict(unpacked(layout, bucket)), folder / f"model-{number:05}.safetensors")


class Gloo:
    """Broadcasts buckets of weights over TCP, one group for each engine, so that a dead engine holds up no other."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroupGloo] = {}
        self._stores: dict[str, dist.TCPStore] = {}

    def join(self, engine: Engine, deadline: float) -> None:
        size, address = 1 + engine.workers(), own_address()
        store = open_store(address, size, deadline)
        info = {"address": address, "port": store.port, "first_rank": 1, "size": size, "deadline": deadline}
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(engine.join, info, deadline)
            try:
                self._groups[engine.name] = gloo_group(store, 0, size, deadline)
            except RuntimeError as error:  # the engine did not come
                raise EngineLost(f"{engine.name} did not join: {error}") from error
            finally:
                joined.result()
        self._stores[engine.name] = store

    def push(self, engines: Sequence[Engine], weights: Weights, version: int, deadline: float) -> dict[str, str]:
        failed = in_parallel(engines, lambda engine: engine.begin_update(deadline))
        for layout, bucket in packed(weights(), BUCKET_BYTES):

            def send(engine: Engine, layout=layout, bucket=bucket) -> None:
                with ThreadPoolExecutor(1) as pool:
                    received = pool.submit(engine.update, layout.info(), deadline)
                    try:
                        broadcast(self._groups[engine.name], bucket).wait()
                    except RuntimeError as error:
                        raise EngineLost(f"{engine.name}: {error}") from error
                    finally:
                        received.result()

            failed |= in_parallel([each for each in engines if each.name not in failed], send)
        left = [each for each in engines if each.name not in failed]
        return failed | in_parallel(left, lambda engine: engine.finish_update(version, deadline))

    def leave(self, engine: Engine) -> None:
        self._groups.pop(engine.name, None)
        self._stores.pop(engine.name, None)


def in_parallel(engines: Sequence[Engine], do: Callable[[Engine], object]) -> dict[str, str]:
    """Do something with all engines at once; the reasons of those that were lost, by name."""
    if not engines:
        return {}
    failed: dict[str, str] = {}
    pool = ThreadPoolExecutor(len(engines))
    try:
        for engine, future in [(each, pool.submit(do, each)) for each in engines]:
            try:
                future.result()
            except EngineLost as lost:
                failed[engine.name] = str(lost)
    except BaseException:  # a signal, say: then nothing waits until a deadline
        for engine in engines:
            engine.stop()
        raise
    finally:
        pool.shutdown()
    return failed


def own_address() -> str:
    """An address of this machine that other machines can reach, or the loopback where it has none."""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        with socket.create_server((address, 0)):  # a stale entry in the hosts file is no address of this machine
            return address
    return "127.0.0.1"
