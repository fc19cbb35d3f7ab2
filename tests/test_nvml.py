"""NVML on machines that are made up: the right GPU is asked, each missing answer is survived, slices are told."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ablate.profiling import device, memory, utilisation
from ablate.profiling.device import datasheet_flops, gpu_uuid
from ablate.profiling.energy import EnergyMeter
from ablate.profiling.lacking import lacking
from ablate.profiling.nvml import Gpu, driver_version
from ablate.profiling.surroundings import Surroundings
from ablate.profiling.watch import Watch
from ablate.settings import TrainSettings

CUDA = torch.device("cuda")
WHOLE, SLICE = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class Driver(types.ModuleType):
    """NVML of a machine with two GPUs. It numbers them by their place: 0 is the idle neighbour, CUDA's 0 is its 1.

    The second has a slice, whose handle is answered with what is the whole GPU's.
    """

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.handles = {"GPU-idle": 0, "GPU-busy": 1, "MIG-slice": 1}
        self.sliced = False
        self.millijoules = [9_000_000, 1_000]

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.handles:
            raise NVMLError_NotFound("Not Found")
        return self.handles[uuid]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(self.sliced), 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self.millijoules[handle]

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {(0, 1): 210, (1, 1): 1410}[handle, kind]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return {(0, 0): 31, (1, 0): 67}[handle, sensor]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return [0x1, 0x4][handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return [0x1, 0x8][handle]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The machine, seen from a process that computes on the busy GPU."""
    module = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    on(monkeypatch, "busy", WHOLE)
    return module


def on(monkeypatch: pytest.MonkeyPatch, uuid: str, name: str, visible: str = "") -> None:
    """Torch says that its first GPU is this one."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def told() -> dict[str, Any]:
    """All that is read of the GPU in use."""
    around, meter = Surroundings(CUDA), EnergyMeter(CUDA)
    around.begin()
    around.sample()
    columns = around.columns()
    del columns["other_load_cores"]  # not the GPU's
    return columns | {"joules": meter.joules(), "driver": driver_version()}


ALL = {
    "device_clock_mhz_p50": 1410,
    "device_clock_mhz_min": 1410,
    "device_temperature_celsius_max": 67,
    "throttle_reasons": "sw_power_cap",
    "joules": 1.0,
    "driver": "570.1",
}


@pytest.mark.parametrize("visible", ["", "0", "1,0", "GPU-busy"])
def test_the_gpu_in_use_is_asked_whatever_number_it_has(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert told() == ALL
    on(monkeypatch, "idle", WHOLE, visible)
    assert told()["joules"] == 9_000.0


def refuse(*_: Any) -> None:
    raise NVMLError_NotSupported("Not Supported")


def lose(*_: Any) -> None:
    raise NVMLError_GpuIsLost("GPU is lost")


def break_down(*_: Any) -> None:
    raise OSError("libnvidia-ml.so: undefined symbol")


QUESTIONS = {
    "nvmlDeviceGetClockInfo": {"device_clock_mhz_p50", "device_clock_mhz_min"},
    "nvmlDeviceGetTemperature": {"device_temperature_celsius_max"},
    "nvmlDeviceGetTotalEnergyConsumption": {"joules"},
    "nvmlSystemGetDriverVersion": {"driver"},
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetCurrentClocksThrottleReasons": set(),
}


@pytest.mark.parametrize("failure", [refuse, lose, break_down])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_without_an_answer_leaves_its_own_columns_null_and_no_other(
    driver: Driver, question: str, failure: Callable[..., None]
) -> None:
    setattr(driver, question, failure)
    assert told() == ALL | dict.fromkeys(QUESTIONS[question])


def test_what_holds_clocks_back_has_an_older_name_and_may_have_none(driver: Driver) -> None:
    driver.nvmlDeviceGetCurrentClocksEventReasons = refuse  # type: ignore[method-assign]
    assert told()["throttle_reasons"] == "hw_slowdown"
    driver.nvmlDeviceGetCurrentClocksThrottleReasons = refuse  # type: ignore[method-assign]
    assert told() == ALL | {"throttle_reasons": None}


def test_bindings_that_speak_bytes_are_understood(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    by_text = driver.nvmlDeviceGetHandleByUUID

    def by_bytes(uuid: Any) -> int:
        if isinstance(uuid, str):
            raise TypeError("bytes or integer address expected instead of str instance")
        return by_text(uuid.decode())

    monkeypatch.setattr(driver, "nvmlDeviceGetHandleByUUID", by_bytes)
    monkeypatch.setattr(driver, "nvmlSystemGetDriverVersion", lambda: b"570.1")
    assert told() == ALL


def test_a_gpu_that_nvml_does_not_know_has_no_figures_and_says_why(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "elsewhere", WHOLE)
    assert told() == dict.fromkeys(ALL) | {"driver": "570.1"}
    assert Gpu(gpu_uuid(CUDA)).why == "NVMLError_NotFound: Not Found"
    assert "NVMLError_NotFound" in lacking(CUDA)["energy_joules_per_token"]


def test_a_build_of_torch_that_tells_no_uuid_has_no_figures(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace())
    assert gpu_uuid(CUDA) is None
    assert told() == dict.fromkeys(ALL) | {"driver": "570.1"}


# --- Slices of a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "name", "uuid"),
    [
        ("", WHOLE, "GPU-slice"),
        ("1", WHOLE, "GPU-slice"),
        ("GPU-sl", WHOLE, "GPU-slice"),  # CUDA takes a beginning of it too
        ("MIG-x-1, MIG-2", SLICE, "MIG-x-1"),
        (" MIG-GPU-5/1/0 ", SLICE, "MIG-GPU-5/1/0"),  # drivers before 470
        ("0", SLICE, "MIG-slice"),  # its first slice is what CUDA takes of a GPU that is cut
        ("", SLICE, "MIG-slice"),
    ],
)
def test_a_gpu_is_named_by_its_uuid_and_a_slice_by_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str, name: str, uuid: str
) -> None:
    on(monkeypatch, "slice", name, visible)
    assert gpu_uuid(CUDA) == uuid
    assert device.facts(CUDA, "bf16")["gpu_uuid"] == uuid


@pytest.mark.parametrize(("visible", "name"), [("MIG-slice", SLICE), ("0", SLICE), ("MIG-slice", WHOLE)])
def test_a_slice_has_neither_the_energy_nor_the_peak_of_the_whole_gpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str, name: str
) -> None:
    assert datasheet_flops(CUDA, "bf16") == 312e12, "the whole one has"
    on(monkeypatch, "slice", name, visible)
    assert told() == ALL | {"joules": None}
    assert "not for a slice" in str(EnergyMeter(CUDA).why)
    assert datasheet_flops(CUDA, "bf16") is None
    assert set(lacking(CUDA)) - {"other_load_cores"} == {"energy_joules_per_token", "mfu_datasheet"}
    shares = utilisation.columns(1e6, 1e6, 1e6, 2e13, datasheet_flops(CUDA, "bf16"))
    assert shares["mfu_datasheet"] is None
    assert shares["mfu"] == 0.05, "of the peak that the slice itself was measured to have"


def test_a_gpu_that_is_cut_counts_for_others_too(driver: Driver) -> None:
    driver.sliced = True
    assert told() == ALL | {"joules": None}


@pytest.mark.parametrize(
    ("name", "fp32", "bf16"),
    [
        ("NVIDIA H200", 67e12, 989e12),
        (WHOLE, 19.5e12, 312e12),
        ("NVIDIA H200 NVL", None, None),
        ("NVIDIA Unheard-of", None, None),
        ("NVIDIA H200 MIG 1g.18gb", None, None),
    ],
)
def test_a_gpu_without_an_entry_has_no_peak_and_never_another_one_s(
    monkeypatch: pytest.MonkeyPatch, name: str, fp32: float | None, bf16: float | None
) -> None:
    on(monkeypatch, "busy", name)
    assert datasheet_flops(CUDA, "fp32") == fp32
    assert datasheet_flops(CUDA, "bf16") == bf16
    assert datasheet_flops(CUDA, "int3") is None
    assert ("mfu_datasheet" in lacking(CUDA)) is (fp32 is None)


# --- Memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gigabytes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """In use of the idle GPU and of the busy one, by NVML; torch says 6 of 40."""
    used = [1.0, 10.0]
    answer = lambda handle: types.SimpleNamespace(total=40e9, free=0.0, used=used[handle] * 1e9)  # noqa: E731
    monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", answer, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (34 * 10**9, 40 * 10**9))
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 5)
    return used


def used_in_steps(gigabytes: list[float], monkeypatch: pytest.MonkeyPatch) -> float:
    """By the columns, where the device is used most in the second of three looks while steps were timed."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    around = Surroundings(CUDA)
    gigabytes[1] = 39.0
    around.sample()  # in warm-up
    around.begin()
    for gigabytes[1] in (10.0, 20.0, 15.0):
        around.sample()
        now[0] += 10.0
    gigabytes[1] = 39.0
    return (memory.peaks(CUDA, around.used_bytes)["device_used_bytes"] or 0) / 1e9


def test_device_use_is_the_most_that_nvml_saw_while_steps_were_timed(
    gigabytes: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert used_in_steps(gigabytes, monkeypatch) == 20.0


def test_the_memory_of_a_slice_is_what_torch_says(gigabytes: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "slice", SLICE, "MIG-slice")
    assert used_in_steps(gigabytes, monkeypatch) == 6.0


def test_without_nvml_device_use_is_what_torch_says(gigabytes: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert used_in_steps(gigabytes, monkeypatch) == 6.0


# --- Counters that fail on the way ------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as it is set."""
    moment = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: moment[0])
    return moment


def watched(
    driver: Driver,
    now: list[float],
    at_step: Callable[[int], None],
    *,
    at_evaluation: Callable[[], None],
    seconds: float = 0.125,
) -> dict[str, Any]:
    """20 steps of 64 tokens, 3 of them to warm up and 128 J each; after the 12th a long evaluation."""
    recipe = TrainSettings(steps=20, batch_tokens=64, seq_len=16, eval_every=10)
    # The process itself has no GPU: only the counter is one's.
    watch = Watch(recipe, torch.device("cpu"), 0.0, lambda _: None, lambda *_: None, EnergyMeter(CUDA))
    for step in range(1, 21):
        with watch.step():
            driver.millijoules[1] += 128_000
            now[0] += seconds
            at_step(step)
        if step == 12:
            with watch.evaluation():
                driver.millijoules[1] += 50_000_000
                now[0] += 100.0
                at_evaluation()
    columns = watch.columns()
    assert columns["train_tokens_per_second"] > 0, "the rest is measured whatever the counter does"
    return {name: columns[name] for name in ("energy_joules_per_token", "energy_source")}


NULL = {"energy_joules_per_token": None, "energy_source": None}


def test_joules_of_a_token_are_those_of_the_timed_steps(driver: Driver, now: list[float]) -> None:
    found = watched(driver, now, lambda _: None, at_evaluation=lambda: None)
    assert found == {"energy_joules_per_token": 128 / 64, "energy_source": "nvml"}


@pytest.mark.parametrize(("seconds", "known"), [(2.0 / 16, True), (2.0 / 18, False)])
def test_a_counter_that_is_renewed_ten_times_a_second_says_nothing_of_a_moment(
    driver: Driver, now: list[float], seconds: float, known: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    found = watched(driver, now, lambda _: None, at_evaluation=lambda: None, seconds=seconds)
    assert (found["energy_joules_per_token"] is not None) is (found["energy_source"] is not None) is known
    assert ("no energy: 1.89 s were measured, and nvml needs 2 s" in capfd.readouterr().out) is not known


def test_nvml_that_is_lost_for_good_leaves_null(driver: Driver, now: list[float]) -> None:
    def at(step: int) -> None:
        if step == 15:
            driver.nvmlDeviceGetTotalEnergyConsumption = lose  # type: ignore[method-assign]

    assert watched(driver, now, at, at_evaluation=lambda: None) == NULL


def test_nvml_that_is_lost_during_an_evaluation_charges_training_with_nothing_of_it(
    driver: Driver, now: list[float]
) -> None:
    answer = driver.nvmlDeviceGetTotalEnergyConsumption

    def at(step: int) -> None:
        driver.nvmlDeviceGetTotalEnergyConsumption = answer  # type: ignore[method-assign]

    def away() -> None:
        driver.nvmlDeviceGetTotalEnergyConsumption = lose  # type: ignore[method-assign]

    assert watched(driver, now, at, at_evaluation=away) == NULL


@pytest.mark.parametrize("before_evaluation", [True, False])
def test_a_counter_that_starts_anew_leaves_null(driver: Driver, now: list[float], before_evaluation: bool) -> None:
    def at(step: int) -> None:
        if step == (10 if before_evaluation else 15):
            driver.millijoules[1] = 0

    assert watched(driver, now, at, at_evaluation=lambda: None) == NULL


def test_a_counter_that_stands_still_is_null_and_not_0(driver: Driver, now: list[float]) -> None:
    driver.nvmlDeviceGetTotalEnergyConsumption = lambda _: 5_000  # type: ignore[method-assign]
    assert watched(driver, now, lambda _: None, at_evaluation=lambda: None) == NULL


def test_a_meter_that_started_anew_says_so_and_stays_silent(driver: Driver) -> None:
    meter = EnergyMeter(CUDA)
    driver.millijoules[1] = 8_000
    assert meter.joules() == 8.0
    driver.millijoules[1] = 2_000
    assert meter.joules() is None
    driver.millijoules[1] = 90_000
    assert (meter.joules(), meter.source) == (None, None)
    assert "started anew" in str(meter.why)


@pytest.mark.parametrize("answer", ["N/A", None, object(), [1], math.nan, math.inf, -1, b"5", True])
def test_an_answer_that_is_no_number_is_none(driver: Driver, monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    """Also of whether the GPU is cut in slices: what cannot be read is not taken for a yes."""
    questions = ("TotalEnergyConsumption", "ClockInfo", "Temperature", "MemoryInfo", "MigMode")
    for question in (*questions, "CurrentClocksEventReasons", "CurrentClocksThrottleReasons"):
        monkeypatch.setattr(driver, f"nvmlDeviceGet{question}", lambda *_: answer, raising=False)
    gpu = Gpu("GPU-busy")
    gpu.shared = False
    assert [gpu.joules(), gpu.used_bytes(), gpu.clock_mhz(), gpu.temperature_celsius(), gpu.held_back_by()] == [
        None
    ] * 5
    monkeypatch.setattr(driver, "nvmlSystemGetDriverVersion", lambda: answer)
    assert driver_version() in (None, "N/A", "5")
