"""What a device can do at best, measured in a process of its own and stored once for each device and number of threads.

The peak of matrix products is the best rate over square matrices of several sizes, filled with random numbers (zeros
draw less power, so that a GPU clocks higher), in rounds of many products: what disturbs a round makes it slower, never
faster. It is what utilisation is measured against.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise, product
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil
import torch

from ablate.job import CalibrationJob
from ablate.profiling import kept
from ablate.profiling.clock import Clock, clock_for
from ablate.profiling.device import datasheet_flops, device_name, gpu_uuid
from ablate.profiling.energy import EnergyMeter
from ablate.profiling.lacking import lacking
from ablate.profiling.nvml import driver_version
from ablate.profiling.surroundings import Surroundings

SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 7
ROUND_SECONDS = 0.03
"""A round takes at least so long: enough for any timer."""

RATE_SECONDS = 0.5
LONGEST_SECONDS = 0.5
"""No larger matrices once one product would take longer."""

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""More than caches hold."""


@dataclass(frozen=True)
class Rate:
    """Work a second in the best round, and in the median one."""

    best: float
    median: float


def rate(call: Callable[[], Any], work: float, clock: Clock, seconds: float = RATE_SECONDS) -> Rate:
    """How fast `call`, which does so much `work`, goes again and again. The first call is not in it.

    Some rounds, fewer where they take more than so many `seconds`, but always two.
    """
    _seconds(call, 1, clock)
    calls = max(1, math.ceil(ROUND_SECONDS / max(1e-9, _seconds(call, 1, clock))))
    took: list[float] = []
    while len(took) < 2 or (len(took) < ROUNDS and sum(took) < seconds):
        took.append(max(1e-9, _seconds(call, calls, clock)))
    return Rate(work * calls / min(took), work * calls / median(took))


def _seconds(call: Callable[[], Any], calls: int, clock: Clock) -> float:
    begin = clock.mark()
    for _ in range(calls):
        call()
    return clock.seconds(begin, clock.mark())


def matmul_peak(device: torch.device, dtype: torch.dtype, clock: Clock) -> dict[str, float]:
    """FLOPs a second of the best size, that size, and the median round's, which is lower where something disturbs.

    The second matrix is tried as it lies and transposed, as a linear layer has it: in bf16 some processors are several
    times faster with one than with the other.
    """
    rates: dict[bool, float] = {}
    best: dict[str, float] = {}
    for size, turned in product(SIZES[device.type], (True, False)):
        work = 2.0 * size**3
        if turned in rates and work / rates[turned] > LONGEST_SECONDS:
            continue
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found = rate(partial(torch.mm, a, b.T if turned else b, out=torch.empty_like(a)), work, clock)
        if found.best > max(rates.values(), default=0.0):
            best = {"flops_per_second": found.best, "median_flops_per_second": found.median, "size": size}
        rates[turned] = max(found.best, rates.get(turned, 0.0))
    return best


def copy_bytes_per_second(device: torch.device, clock: Clock) -> float:
    """Bytes a second, read and written, of the copy of a buffer that no cache holds."""
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
    size = min(COPY_BYTES[device.type], free // 8)
    source = torch.zeros(size // 4, dtype=torch.float32, device=device).fill_(1.0)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2.0 * 4 * source.numel(), clock).best


def timer_seconds(clock: Clock, readings: int = 2000) -> float | None:
    """The smallest step that the timer of this device was seen to make."""
    marks = [clock.mark() for _ in range(readings)]
    steps = [clock.seconds(first, last) for first, last in pairwise(marks)]
    return min((step for step in steps if step > 0), default=None)


REST_SECONDS = 600.0
"""So long is a calibration of a busy machine good enough."""

IDENTITY = ("device", "device_name", "gpu_uuid", "threads", "cpus", "torch")


def identity(device: torch.device) -> dict[str, Any]:
    """What a calibration holds for."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "gpu_uuid": gpu_uuid(device),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
    }


def measure(device: torch.device) -> dict[str, Any]:
    """A calibration: what it holds for, and all that was measured. Some seconds."""
    clock, around = clock_for(device), Surroundings(device)
    around.begin()
    products = {}
    for name, dtype in DTYPES.items():
        products[name] = matmul_peak(device, dtype, clock)
        around.sample()
    return {
        **identity(device),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "matmul": products,
        "copy_bytes_per_second": copy_bytes_per_second(device, clock),
        "timer_seconds": timer_seconds(clock),
        **around.columns(),
    }


# --- Stored once a machine --------------------------------------------------------------------------------------------


def calibrated(device: torch.device, *, anew: bool) -> dict[str, Any]:
    """The kept calibration of this device, or else a new one, which is kept where that can be done.

    One that was made on a busy machine is made again, but not at once: where it stays busy, each run would wait for
    that. It never takes the place of a calmer one.
    """
    what = identity(device)
    known = kept.read("calibration", what)
    if known and not anew and not (kept.disturbance(known) and _age_seconds(known) > REST_SECONDS):
        return known
    found = measure(device)
    is_calmer = known is not None and kept.disturbance(known) < kept.disturbance(found)
    best = known if known and is_calmer else found
    kept.write("calibration", what, {**best, "tried_at": datetime.now(UTC).isoformat(timespec="seconds")})
    return found if anew else best


def _age_seconds(known: dict[str, Any]) -> float:
    """Since it was last tried; without end where that is not known, or lies ahead as after a jump of the clock."""
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(known["tried_at"])).total_seconds()
    except (KeyError, TypeError, ValueError):
        return math.inf
    return age if age >= 0 else math.inf


def keep_aa(found: dict[str, Any], facts: dict[str, Any]) -> None:
    """Keep what an A/A check found of the device that a calibration is of, in place of what an earlier one did."""
    what = {key: found.get(key) for key in IDENTITY}
    kept.write("aa", what, {**what, **facts})


def kept_aa(what: dict[str, Any]) -> dict[str, Any] | None:
    """What the last A/A check found of a device with this identity."""
    return kept.read("aa", what)


def main(job: CalibrationJob, connection: Connection) -> None:
    """Do `job` in this process, and tell the parent over `connection`, also what this machine has and lacks today."""
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    promised = {precision: datasheet_flops(device, precision) for precision in DTYPES}
    connection.send(
        (
            "columns",
            {
                **calibrated(device, anew=job.anew),
                "driver": driver_version(),
                "datasheet_flops": {name: flops for name, flops in promised.items() if flops is not None},
                "energy_source": EnergyMeter(device).source,
                "lacking": lacking(device),
                "aa": kept_aa(identity(device)),
            },
        )
    )
    connection.send(("outcome", "ok", None, None))
