"""Device and precision in which a model computes, as its user names them."""

from typing import Literal

import torch

from proximo.models.model_types import PreTrainedModel
from proximo.models.out_of_memory import explaining_memory
from proximo.models.torch_globals import guarded
from proximo.system.machine import settle_half_products

Precision = Literal["auto", "float32", "bfloat16", "float16"]


def pick_device(name: str) -> str:
    """Torch's name of a device. `auto`: a GPU if there is one, else the CPU."""
    has_gpu = torch.cuda.is_available()
    if name != "auto":
        return _checked_device(name, has_gpu=has_gpu)
    return "cuda" if has_gpu else "cpu"


def _checked_device(name: str, *, has_gpu: bool) -> str:
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}: torch knows no such device; give auto, cpu or cuda") from error
    if kind == "cuda" and not has_gpu:
        raise ValueError(f"device is {name!r}, but there is no GPU here that torch can use: give auto or cpu")
    if kind == "cuda" and (number := torch.device(name).index) is not None:
        count = torch.cuda.device_count()
        if number >= count:
            raise ValueError(f"device is {name!r}, but there are {count} GPUs here: count from cuda:0")
        torch.cuda.set_device(number)  # kernels and captured steps run where torch stands
    return name


def pick_dtype(name: Precision, device: str) -> torch.dtype:
    """Data type of the weights. `auto`: bfloat16 on a GPU that computes in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    halves = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if halves else torch.float32


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including what torch has reserved but does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def with_precision(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model with its weights rounded. Buffers stay: rotary frequencies in half precision would be others."""
    if dtype.itemsize == 2:
        with guarded():
            settle_half_products()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def placed(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model on its device; ValueError with a remedy where there is no room for its weights."""
    remedy = "end other programs there, or take another device, LoRA with a quantised base, or a smaller model"
    with explaining_memory(f"the weights do not fit on {device}; {remedy}"):
        return model.to(device=device)  # pyright: ignore[reportCallIssue]
