"""Memory of this process: numbers that are never mixed, each None where it cannot be had.

On a GPU, what tensors take (`peak_allocated_bytes`), what the allocator holds (`peak_reserved_bytes`) and what anybody
uses of the device (`device_used_bytes`). Everywhere the largest resident set (`peak_rss_bytes`), with the interpreter
and its libraries.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ablate.machine import available_bytes


def reset_peak_rss() -> None:
    """Let the peak of the resident set count from here on; where that cannot be done, it counts from the start."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peaks(device: torch.device, used_bytes: int | None = None) -> dict[str, int | None]:
    """The memory columns of this process up to now; `used_bytes` is what NVML saw in use of the device, if it did."""
    if device.type != "cuda":
        return {"peak_rss_bytes": peak_rss_bytes()}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "device_used_bytes": total - free if used_bytes is None else used_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def peak_rss_bytes() -> int | None:
    """The largest resident set of this process since the last reset."""
    if platform.system() == "Darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return status_bytes("VmHWM")


def status_bytes(field: str) -> int | None:
    """One of the sizes that Linux tells of this process (`VmHWM`, `VmData`); None elsewhere."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def allocator_facts(device: torch.device) -> dict[str, float]:
    """What explains that a model fitted or not: retries of the allocator, and what it holds by what tensors take."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    allocated = max(1, torch.cuda.max_memory_allocated(device))
    return {
        "allocator_retries": float(stats.get("num_alloc_retries", 0)),
        "reserved_per_allocated": torch.cuda.max_memory_reserved(device) / allocated,
    }


def implausible(columns: Mapping[str, Any]) -> Iterator[str]:
    """Why measured peaks cannot be right: each must hold at least the weights and what the optimizer keeps."""
    floor = columns["parameter_bytes"] + columns["optimizer_state_bytes"]
    for name in ("peak_allocated_bytes", "peak_rss_bytes", "peak_live_bytes"):
        peak = columns.get(name)
        # Beside a GPU the process's own memory holds neither.
        if peak is None or peak >= floor or (name == "peak_rss_bytes" and columns.get("peak_allocated_bytes")):
            continue
        yield f"{name} of {peak} is less than the {floor} bytes of weights and optimizer state"


# --- A limit ----------------------------------------------------------------------------------------------------------


def confine(device: torch.device, at_most: int | None) -> None:
    """The limit of a trial. Of a GPU it may take all where nothing is said: the driver itself keeps others' apart."""
    if device.type == "cpu" or at_most is not None:
        limit(device, at_most)


def limit(device: torch.device, at_most: int | None) -> int | None:
    """Let running out of the device's memory raise in this process, at `at_most` so many bytes more than it has.

    Returns what it may take; None where nothing can be limited.
    """
    if device.type != "cuda":
        return limit_to_available(at_most)
    free, total = torch.cuda.mem_get_info(device)
    left = free if at_most is None else min(free, at_most)
    torch.cuda.set_per_process_memory_fraction(left / total)  # of the current device: `cuda` alone has no index
    return left


def taken_bytes(device: torch.device) -> int:
    """The most that this process has had of the device's memory so far; 0 where nothing tells."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_rss_bytes() or 0


def limit_to_available(at_most: int | None = None) -> int | None:
    """Let running out of memory raise in this process, instead of taking the machine down. Only Linux can.

    It may take `at_most` so many bytes more than it has, also where the machine has more left. Returns how many.
    """
    used = status_bytes("VmData")
    if used is None:
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    left = available_bytes() if at_most is None else min(available_bytes(), at_most)
    allowed = min([used + left, *limits])
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    return allowed - used
