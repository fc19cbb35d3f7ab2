"""What cannot be measured on this machine, and why."""

from __future__ import annotations

import torch

from ablate.profiling.device import datasheet_flops
from ablate.profiling.energy import EnergyMeter
from ablate.profiling.surroundings import Surroundings

_UNREAD = {
    "other_load_cores": "the system does not tell its load",
    "device_clock_mhz_p50": "no clock can be read",
    "device_temperature_celsius_max": "no sensor can be read",
    "throttle_reasons": "nothing tells what holds this device back",
}


def lacking(device: torch.device) -> dict[str, str]:
    """Columns that are null here, each with the reason."""
    found: dict[str, str] = {}
    meter = EnergyMeter(device)
    if meter.source is None:
        found["energy_joules_per_token"] = meter.why or "no counter can be read"
    around = Surroundings(device)
    around.begin()
    around.sample()
    read = around.columns()
    found |= {name: why for name, why in _UNREAD.items() if read[name] is None}
    if datasheet_flops(device, "fp32") is None:
        found["mfu_datasheet"] = "no data sheet of this device is known"
    return found
