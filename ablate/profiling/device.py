"""Facts about the device that numbers were measured on."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from ablate.machine import processor

PEAK_FLOPS = {
    "NVIDIA H200": {"fp32": 67e12, "bf16": 989e12},
    "NVIDIA H100 80GB HBM3": {"fp32": 67e12, "bf16": 989e12},
    "NVIDIA H100 PCIe": {"fp32": 51e12, "bf16": 756e12},
    "NVIDIA A100-SXM4-40GB": {"fp32": 19.5e12, "bf16": 312e12},
    "NVIDIA A100-SXM4-80GB": {"fp32": 19.5e12, "bf16": 312e12},
    "NVIDIA A100-PCIE-40GB": {"fp32": 19.5e12, "bf16": 312e12},
    "NVIDIA A100 80GB PCIe": {"fp32": 19.5e12, "bf16": 312e12},
}
"""Dense FLOPs a second by the maker's data sheets. The whole name must match: a slice of a GPU has no entry."""


def device_name(device: torch.device) -> str:
    """The maker's name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor()


def gpu_uuid(device: torch.device) -> str | None:
    """What names this GPU everywhere, whatever number it has; for a slice of one the slice's own. None without a GPU.

    Torch tells a slice's UUID bare, like any other.
    """
    if device.type != "cuda":
        return None
    if (visible := _visible()).startswith("MIG-"):
        return visible
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"{'MIG' if _is_slice(device) else 'GPU'}-{uuid}"


def _visible() -> str:
    """The first device that CUDA is told to use, by its number or its UUID; empty where it is told nothing."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()


def _is_slice(device: torch.device) -> bool:
    """Whether it is a part of a GPU (MIG), which has no more than a part of its peak."""
    return _visible().startswith("MIG-") or " MIG " in device_name(device)


def datasheet_flops(device: torch.device, precision: str) -> float | None:
    """Dense FLOPs a second that the device's maker promises; None where that is not known."""
    if device.type != "cuda" or _is_slice(device):
        return None
    return PEAK_FLOPS.get(device_name(device), {}).get(precision)


def facts(device: torch.device, precision: str) -> dict[str, Any]:
    """Columns that say what was computed where, and in what precision: weights are float32 at any."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "gpu_uuid": gpu_uuid(device),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "param_dtype": "float32",
        "compute_dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
