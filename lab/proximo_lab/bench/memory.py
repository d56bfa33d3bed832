"""Peak memory since the last reset."""

import gc
from pathlib import Path

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif FORGET.exists():
        FORGET.write_text("5")  # Linux: resets the peak resident size


def peak_bytes(device: str) -> int:
    """Peak memory of tensors on a GPU, or of the whole process on a CPU; 0 if the system does not report it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    highest = next((line for line in lines if line.startswith("VmHWM:")), None)
    return 0 if highest is None else int(highest.split()[1]) * 1024


def used_bytes(device: str) -> int:
    """Memory in use now."""
    reset_peak(device)
    return peak_bytes(device)


def release(device: str) -> None:
    """Free memory that is no longer referenced."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
