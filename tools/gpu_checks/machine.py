"""The device by itself: what `doctor` says of it, whether that is plausible, and whether its clock is right."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_checks.ledger import Failed, Late, Setup, Skipped, Stage, expect, on_cuda
from gpu_checks.runs import command

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]


def examined(setup: Setup) -> Facts:
    """What `doctor` says, and beside it what torch says of the same device."""
    import torch

    said = command(setup, "doctor", "--json", "--device", setup.device)
    if said.late or said.status:
        raise Late("out of time") if said.late else Failed(f"exit status {said.status}", said.err)
    facts: Facts = json.loads(said.out)
    facts |= {"cuda": torch.version.cuda, "torch_build": torch.__version__}
    if setup.device == "cuda":
        seen = torch.cuda.get_device_properties(0)
        facts |= {
            "uuid_by_torch": str(seen.uuid),
            "bus_by_torch": getattr(seen, "pci_bus_id", None),
            "bytes_by_torch": seen.total_memory,
            "capability": f"{seen.major}.{seen.minor}",
            "cudnn": torch.backends.cudnn.version(),
        }
    setup.write("machine.json", facts)
    return facts


def doctor_examines_the_device(facts: Facts) -> str:
    """`doctor` examines this device without a fault."""
    return expect(not facts["fault"] and facts["device_name"], facts["fault"] or facts["device_name"])


def the_uuid_is_torch_s(facts: Facts) -> str:
    """The UUID that is stored with rows is the one that torch computes on."""
    told = str(facts["gpu_uuid"])
    if told.startswith("MIG-"):
        raise Skipped("a slice of a GPU: torch tells the UUID of the whole")
    return expect(told == f"GPU-{facts['uuid_by_torch']}", "equal" if facts["uuid_by_torch"] in told else "different")


def nvml_finds_the_same_gpu(facts: Facts) -> str:
    """NVML, asked for that UUID, finds the GPU of the same place on the bus and of the same memory, by no index."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(facts["gpu_uuid"])
    whole, bus = pynvml.nvmlDeviceGetMemoryInfo(handle).total, pynvml.nvmlDeviceGetPciInfo(handle).bus
    alike = abs(whole / facts["bytes_by_torch"] - 1) < 0.1
    place = "unknown to torch" if facts["bus_by_torch"] is None else f"{facts['bus_by_torch']} by torch"
    told = f"bus {bus}, {place}; {whole / 2**30:.1f} GiB, {facts['bytes_by_torch'] / 2**30:.1f} by torch"
    return expect(alike and facts["bus_by_torch"] in (None, bus), told)


def the_driver_is_told(facts: Facts) -> str:
    """The driver's version is known."""
    return expect(facts["driver"], str(facts["driver"]))


def matrix_products_are_measured(facts: Facts) -> str:
    """The best rate of matrix products is measured in both precisions."""
    peaks = {name: peak.get("flops_per_second") or 0.0 for name, peak in facts["matmul"].items()}
    told = ", ".join(f"{name} {peak / 1e12:.3g} TFLOP/s" for name, peak in peaks.items())
    return expect(set(peaks) == {"fp32", "bf16"} and all(peak > 0 for peak in peaks.values()), told)


def matrix_products_fit_the_data_sheet(facts: Facts) -> str:
    """It is between 40 % and 105 % of what the maker promises."""
    promised = facts["datasheet_flops"]
    if not promised:
        raise Skipped("no data sheet of this GPU is known")
    shares = {name: facts["matmul"][name]["flops_per_second"] / flops for name, flops in promised.items()}
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return expect(all(0.4 <= share <= 1.05 for share in shares.values()), told)


def copies_are_measured(facts: Facts) -> str:
    """The memory bandwidth of a copy is measured, and of a plausible size (CPU: over 1 GB/s; GPU: 0.1 to 20 TB/s)."""
    copied = facts["copy_bytes_per_second"] or 0.0
    low, high = (1e11, 2e13) if facts["device"] == "cuda" else (1e9, 2e13)
    return expect(low < copied < high, f"{copied / 1e9:,.0f} GB/s")


def the_timer_is_fine_enough(facts: Facts) -> str:
    """The timer's smallest step is under 100 µs."""
    step = facts["timer_seconds"]
    return expect(step and step < 1e-4, "none seen" if not step else f"{step * 1e6:.2g} µs")


def energy_heat_and_clocks_can_be_read(facts: Facts) -> str:
    """NVML gives energy, clock, temperature and what holds the clocks back; or `doctor` says why not."""
    columns = {
        "energy_joules_per_token": facts["energy_source"],
        "device_clock_mhz_p50": facts["device_clock_mhz"],
        "device_temperature_celsius_max": facts["device_temperature_celsius"],
        "throttle_reasons": facts["throttle_reasons"],
    }
    null = [name for name, value in columns.items() if value is None]
    if null and all(name in facts["lacking"] for name in null):
        raise Skipped("; ".join(f"{name}: {facts['lacking'][name]}" for name in null))
    told = ", ".join(f"{name} {value}" for name, value in columns.items())
    return expect(not null and facts["energy_source"] == "nvml", told)


# --- The clock --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Seconds of some work by the device's clock, on the wall, and only to ask for it; and of four times the work."""

    by_clock: float
    on_the_wall: float
    to_ask: float
    four_times: float


def timed(setup: Setup) -> Timed:
    """Medians of five rounds of matrix products, alternating one and four times as many."""
    import torch

    device = torch.device(setup.device)
    size, products = (8192, 50) if setup.device == "cuda" else (256, 50)
    dtype = torch.bfloat16 if setup.device == "cuda" else torch.float32
    a = torch.randn(size, size, device=device).to(dtype)
    _round(device, a, products)
    once, four = zip(*((_round(device, a, products), _round(device, a, 4 * products)) for _ in range(5)), strict=True)
    clock, wall, asked = (statistics.median(column) for column in zip(*once, strict=True))
    return Timed(clock, wall, asked, statistics.median(each[0] for each in four))


def _round(device: torch.device, a: torch.Tensor, products: int) -> tuple[float, float, float]:
    import torch

    from ablate.profiling.clock import clock_for

    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock, out = clock_for(device), torch.empty_like(a)
    wait()
    begin = time.perf_counter()
    first = clock.mark()
    for _ in range(products):
        torch.mm(a, a, out=out)
    last = clock.mark()
    asked = time.perf_counter() - begin
    wait()
    wall = time.perf_counter() - begin
    return clock.seconds(first, last), wall, asked


def the_clock_agrees_with_the_wall(times: Timed) -> str:
    """The clock's seconds are those on the wall, with waiting on both sides, within 5 %."""
    told = f"{times.by_clock:.4f} s by the clock, {times.on_the_wall:.4f} s on the wall"
    return expect(abs(times.by_clock / times.on_the_wall - 1) < 0.05, told)


def asking_is_not_doing(times: Timed) -> str:
    """To ask for the work takes less than half of it: a clock that does not wait would be seen here."""
    return expect(times.to_ask < times.on_the_wall / 2, f"{times.to_ask / times.on_the_wall:.1%} of the time")


def four_times_the_work_takes_longer(times: Timed) -> str:
    """Four times the work takes 3 to 5 times as long."""
    ratio = times.four_times / times.by_clock
    return expect(3 < ratio < 5, f"{ratio:.2f} times")


# --- Steps ------------------------------------------------------------------------------------------------------------

STEP_TOKENS = 64
PAUSE_SECONDS = 0.02
LARGE, SMALL = 2**30, 2**26


def planted(setup: Setup) -> Facts:
    """What is told of steps that take more memory in warm-up than later, with pauses between them."""
    import torch

    from ablate.profiling.watch import Watch
    from ablate.settings import TrainSettings

    recipe, device = TrainSettings(steps=20, batch_tokens=STEP_TOKENS, seq_len=16), torch.device(setup.device)
    watch = Watch(recipe, device, time.perf_counter(), lambda _: None, lambda *_: None)
    for step in range(recipe.n_steps):
        with watch.step():
            torch.empty(LARGE if step < watch.warmup else SMALL, dtype=torch.uint8, device=device)
        time.sleep(PAUSE_SECONDS)
    return watch.columns()


def the_peak_is_without_warm_up(columns: Facts) -> str:
    """Where steps of the warm-up take 1 GiB and those that are timed 64 MiB, the peak allocated is 64 MiB, and what is
    reserved or in use of the device is no less.
    """
    peak, reserved, used = (columns[f"{name}_bytes"] for name in ("peak_allocated", "peak_reserved", "device_used"))
    told = f"{peak / 2**20:.0f}, {reserved / 2**20:.0f} and {used / 2**20:.0f} MiB"
    return expect(SMALL <= peak < 2 * SMALL and reserved >= peak and used >= peak, told)


def what_lies_between_steps_is_in_speeds_alone(columns: Facts) -> str:
    """Pauses of 20 ms between steps are in the tokens a second and in no step."""
    step, whole = columns["step_seconds_p50"], STEP_TOKENS / columns["window_tokens_per_second_p50"]
    return expect(
        step < PAUSE_SECONDS / 2 and whole > PAUSE_SECONDS * 0.8, f"{step * 1e3:.2f} and {whole * 1e3:.1f} ms"
    )


STAGES = [
    Stage(
        "machine",
        "What `doctor` says",
        50,
        examined,
        (
            doctor_examines_the_device,
            on_cuda(the_driver_is_told),
            on_cuda(the_uuid_is_torch_s),
            on_cuda(nvml_finds_the_same_gpu),
            matrix_products_are_measured,
            on_cuda(matrix_products_fit_the_data_sheet),
            copies_are_measured,
            the_timer_is_fine_enough,
            on_cuda(energy_heat_and_clocks_can_be_read),
        ),
    ),
    Stage(
        "clock",
        "The device's clock",
        15,
        timed,
        (the_clock_agrees_with_the_wall, on_cuda(asking_is_not_doing), on_cuda(four_times_the_work_takes_longer)),
    ),
    Stage(
        "watch",
        "What is planted in steps",
        15,
        planted,
        (on_cuda(the_peak_is_without_warm_up), what_lies_between_steps_is_in_speeds_alone),
    ),
]
