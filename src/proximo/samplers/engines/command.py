"""Start of vLLM 0.32 as an engine."""

import json

from proximo.processes.server import Running, Starts, start_here

RETURN_ROUTES = "--enable-return-routed-experts"
WITH_ROUTES = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""The part of vLLM that knows them, which needs Triton and so a GPU."""


class Command:
    """Command that starts a server: the arguments of vLLM, the environment, and where."""

    def __init__(
        self, python: str, arguments: list[str], environment: dict[str, str], starts: Starts = start_here
    ) -> None:
        self._command = [python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self._environment, self._starts = QUIET | environment, starts

    def start(self, deadline: float) -> tuple[Running, str]:
        """The server, and the address and port at which it will listen."""

        def listening(address: str, port: int) -> list[str]:
            return [*self._command, "--host", address, "--port", str(port)]

        return self._starts(listening, self._environment, deadline)


QUIET = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


WITH_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Lets adapters be loaded while a server runs."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""


def server_arguments(
    model: str,
    *,
    dtype: str,
    length: int | None,
    slots: int,
    sync: str,
    tensor_parallel: int,
    adapter_rank: int,
    returns_routes: bool,
) -> list[str]:
    """The flags that an engine needs; a server at a URL needs those that are marked, too. `adapter_rank` is that of
    the adapter that is pushed; 0: whole weights are."""
    if adapter_rank:
        rank = next((size for size in ADAPTER_RANKS if size >= adapter_rank), adapter_rank)
        arrives = ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", str(rank)]
    else:
        arrives = ["--weight-transfer-config", json.dumps({"backend": sync})]
    return [
        *("--model", model),
        *("--dtype", dtype),
        *("--max-model-len", "auto" if length is None else str(length)),
        *("--generation-config", "vllm"),  # needed: the model's own would change temperature and top_p
        *("--logprobs-mode", "processed_logprobs"),  # needed: of the distribution that is drawn from
        "--enable-scale-out",  # needed: tokens in, tokens out
        *arrives,  # needed
        *((RETURN_ROUTES,) if returns_routes else ()),  # needed for routing_replay = "sampler"
        *("--max-num-seqs", str(slots + 1)),  # one more, for the question whether it is alive
        *("--tensor-parallel-size", str(tensor_parallel)),
        *("--seed", "0"),
        "--disable-uvicorn-access-log",
    ]
