"""Weights from GPU to GPU with vLLM's own sender. NOT TESTED: it needs at least two GPUs, and vLLM in this process."""

# pyright: reportMissingImports=false
from collections.abc import Mapping, Sequence
from typing import Any

from proximo.processes.server import free_port
from proximo.samplers.engines.engine import Engine, EngineLost
from proximo.samplers.engines.sync import Weights, in_parallel, own_address


class Nccl:
    """One NCCL group for each engine, in which this process is rank 0."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def join(self, engine: Engine, deadline: float) -> None:
        try:
            self._senders[engine.name] = _Sender(engine, deadline)
        except Exception as error:  # vLLM's, or NCCL's
            raise EngineLost(f"{engine.name} did not join over NCCL: {error}") from error

    def push(self, engines: Sequence[Engine], weights: Weights, version: int, deadline: float) -> dict[str, str]:
        failed: dict[str, str] = {}
        for each in engines:  # one after the other: they are sent from one device
            failed |= in_parallel([each], lambda engine: self._senders[engine.name].send(weights, version))
        return failed

    def leave(self, engine: Engine) -> None:
        self._senders.pop(engine.name, None)


class _Sender:
    """vLLM's sender to one engine; to vLLM it is the client that asks the engine to receive."""

    def __init__(self, engine: Engine, deadline: float) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self._engine, self._deadline, self._version = engine, deadline, 0
        self._weights: Weights = lambda: iter(())
        sender = self

        class SentWeights(WeightSource):
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in sender._weights()]

            def __iter__(self):
                for name, weight in sender._weights():  # those of ranks are in the host's memory
                    yield name, weight if weight.is_cuda else weight.cuda()

        info = NCCLTrainerInitInfo(own_address(), free_port(""), 1 + engine.workers(), rank=0)
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=self, source=SentWeights())

    def send(self, weights: Weights, version: int) -> None:
        self._weights, self._version = weights, version
        try:
            self._trainer.send_weights()
        except Exception as error:  # whatever it is, the engine has half an update
            raise EngineLost(f"{self._engine.name}: {error}") from error

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._engine.join(init_info, self._deadline)

    def start_weight_update(self) -> None:
        self._engine.begin_update(self._deadline)

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._engine.update(update_info, self._deadline)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_update(self._version, self._deadline)

    def shutdown_weight_transfer_engine(self) -> None:
        pass
