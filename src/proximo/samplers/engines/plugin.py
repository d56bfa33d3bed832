"""Two ways for weights to reach vLLM's workers without NCCL; vLLM 0.32 loads this as a plugin, in every process.

Entry point `proximo` of the group `vllm.general_plugins`.
"""

# pyright: reportMissingImports=false
from typing import Any


def register() -> None:
    """Make the transports known to vLLM under the names `folder` and `gloo`."""
    from contextlib import suppress

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name in ("folder", "gloo"):
        with suppress(ValueError):  # some processes load their plugins twice
            WeightTransferEngineFactory.register_engine(
                name, "proximo.samplers.engines.receiving", f"{name.capitalize()}Receiver"
            )


def finish_reload(model: Any, model_config: Any) -> None:
    """End a layerwise reload, and repack the head on a CPU.

    vLLM's CPU build keeps a packed copy of every linear weight. Where the head is tied to the embedding it does not
    pack it again after a reload, and would go on with the old head.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.platforms import current_platform

    finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
