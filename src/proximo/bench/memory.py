"""How much memory was in use at most since it was last asked to forget."""

import gc
from pathlib import Path

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif FORGET.exists():
        FORGET.write_text("5")  # Linux: the highest resident size starts anew from the present one


def peak_bytes(device: str) -> int:
    """Of tensors on a GPU; on a CPU of the whole process, 0 where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    highest = next((line for line in lines if line.startswith("VmHWM:")), None)
    return 0 if highest is None else int(highest.split()[1]) * 1024


def used_bytes(device: str) -> int:
    """In use now."""
    reset_peak(device)
    return peak_bytes(device)


def release(device: str) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
