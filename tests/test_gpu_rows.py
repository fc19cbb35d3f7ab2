"""The checks for a GPU, on rows that look like one's: right ones pass them all, and each fault is seen by its check."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from gpu_checks import again, grid, machine, quickstart
from gpu_checks.ledger import Finding, Setup, Stage
from gpu_checks.runs import Ran, Said

from ablate.results import Results

UUID = "GPU-12345678"
FACTS = {
    "fault": None,
    "device": "cuda",
    "device_name": "a GPU",
    "gpu_uuid": UUID,
    "uuid_by_torch": UUID.removeprefix("GPU-"),
    "driver": "580.1",
    "matmul": {"fp32": {"flops_per_second": 5e13}, "bf16": {"flops_per_second": 8e14}},
    "datasheet_flops": {"fp32": 67e12, "bf16": 989e12},
    "copy_bytes_per_second": 4.3e12,
    "timer_seconds": 5e-7,
    "energy_source": "nvml",
    "device_clock_mhz": 1980.0,
    "device_temperature_celsius": 40.0,
    "throttle_reasons": "none",
    "lacking": {},
}
FUSED = {"train": ["_scaled_dot_product_cudnn_attention", "mm"], "decode": ["mm"]}
CONFIG = {
    "model": {"n_layers": 3, "n_heads": 4, "attention": {"head_dim": 16}},
    "profile": {"decode": {"batch": [1], "context": [96], "new_tokens": 32}},
}
ROW: dict[str, Any] = {
    **{"status": "ok", "phase": "profile", "reason": "", "log": "logs/x.log", "config": json.dumps(CONFIG)},
    **{"device": "cuda", "device_name": "a GPU", "gpu_uuid": UUID, "precision": "bf16", "deterministic": False},
    **{"train_loss": 2.6, "val_loss": 2.5, "steps": 300, "tokens": 300 * 1024, "params_total": 1_000_000},
    **{"step_seconds_p10": 0.009, "step_seconds_p50": 0.01, "step_seconds_p90": 0.011},
    **{"train_tokens_per_second": 102_400.0, "energy_joules_per_token": 0.004, "energy_source": "nvml"},
    **{"data_seconds_p50": 1e-4, "forward_seconds_p50": 3e-3, "backward_seconds_p50": 5e-3},
    **{"optimizer_seconds_p50": 1e-3, "peak_live_bytes": 190_000_000, "device_used_bytes": 900_000_000},
    **{"peak_allocated_bytes": 200_000_000, "peak_reserved_bytes": 220_000_000},
    **{"kv_cache_bytes_per_token": 768, "kv_cache_bytes_measured": 98_304, "kv_cache_bytes_allocated": 0},
    **{"kv_cache_bytes_held": 98_304, "prefill_tokens_per_second": 1e5, "decode_tokens_per_second": 500.0},
    **{"decode_seconds_per_token_p50": 0.002, "decode_bandwidth_share": 0.3, "kernels": json.dumps(FUSED)},
    **{"mfu": 0.4, "hfu": 0.42, "mfu_datasheet": 0.3, "compile_seconds": None, "compiled": False},
    **{"compile_fault": None, "graph_breaks": None, "recompiles": None, "device_clock_mhz_p50": 1980.0},
    **{"device_temperature_celsius_max": 50.0, "throttle_reasons": "none", "largest_batch": 512},
    **{"largest_length": 8192, "largest_batch_limit": "memory", "largest_length_limit": "most"},
}
FP32 = {"precision": "fp32", "kv_cache_bytes_per_token": 1536}
FP32 |= dict.fromkeys(("kv_cache_bytes_measured", "kv_cache_bytes_held"), 196_608)
SLOW = {"step_seconds_p10": 0.035, "step_seconds_p50": 0.036, "step_seconds_p90": 0.037}
SLOW |= {"train_tokens_per_second": 28_000.0, "decode_seconds_per_token_p50": 0.007}
SLOW |= {"forward_seconds_p50": 0.012, "backward_seconds_p50": 0.02}
SMALL = {"kv_cache_bytes_per_token": 240, "kernels": json.dumps(FUSED | {"decode": ["mm", "path absorbed"]})}
SMALL |= dict.fromkeys(("kv_cache_bytes_measured", "kv_cache_bytes_held"), 240 * 128)
BRIEF = {"steps": 20, "tokens": 20 * 1024, "energy_joules_per_token": None, "energy_source": None}
COMPILED = {"compile_seconds": 20.0, "compiled": True, "graph_breaks": 0, "recompiles": 0}
FLEX = FP32 | {"kernels": json.dumps({"train": ["flex_attention"]})}

Variants = dict[str, dict[str, Any]]
RUNS: dict[str, Variants] = {
    "bf16": {"baseline": {}, "gqa": {}, "moe": {}},
    "eager": {"baseline": BRIEF, "mla": SMALL, "moe": {}, "deep": SLOW},
    "compiled": {"baseline": COMPILED, "moe": COMPILED},
    "others": {
        "baseline": {},
        "huge": {"status": "oom", "reason": "CUDA out of memory"},
        "moe": {},
        "fp32": FP32,
        "flex": FLEX,
        "steady": {"deterministic": True},
        "steady_again": {"deterministic": True},
    },
    "capacity": {"baseline": {}},
    "again": {"baseline": {}},
}
STAGES = [quickstart.FIRST, grid.FIRST, grid.COMPILED, quickstart.LATER, grid.CAPACITY, again.STAGE]


def whole(frame: pd.DataFrame) -> pd.DataFrame:
    """With whole numbers and truth values as they are loaded, missing or not."""
    kinds = {"compiled": "boolean", "deterministic": "boolean", "graph_breaks": "Int64", "recompiles": "Int64"}
    kinds |= {name: "Int64" for name, value in ROW.items() if type(value) is int}
    return frame.astype({name: kind for name, kind in kinds.items() if name in frame})


def ran(setup: Setup, name: str, variants: Variants) -> Ran:
    folder = setup.work / name
    folder.mkdir(exist_ok=True)
    plan = {"variants": [{"name": variant} for variant in variants]}
    (folder / "experiment.json").write_text(json.dumps(plan), encoding="utf-8")
    (setup.reports / name).mkdir(parents=True, exist_ok=True)
    (setup.reports / name / "report.md").touch()
    trials = [{**ROW, "variant": each, "trial_id": each, **changed} for each, changed in variants.items()]
    profiles = [{"trial_id": each, "metric": "allocator_retries", "value": 0.0} for each in variants]
    profiles += [
        {"trial_id": each, "phase": "lengths", "context": length, "metric": metric, "value": value * length}
        for each in variants
        for length in (128, 256, 512)
        for metric, value in {
            "training_pass_bytes_p50": variants[each].get("bytes_by_length", 1e5),
            "training_pass_seconds_p50": 1e-5,
        }.items()
    ]
    repeats = [
        {"place": 2 * n + again + 1, "round": n, "is_partner": bool(again), "metric": "step_seconds_p50"}
        | {"status": each.get("round_status", "ok"), "value": each.get("round_seconds", 0.01)}
        for each in variants.values()
        for n in range(2)
        for again in range(2)
    ]
    status = 0 if all({**ROW, **each}["status"] == "ok" for each in variants.values()) else 1
    tables = {"profiles": pd.DataFrame(profiles), "repeats": pd.DataFrame(repeats)}
    results = Results(folder, plan, whole(pd.DataFrame(trials)), pd.DataFrame(), **tables)
    return Ran(setup, Said(status, "", "", late=False), results)


Judge = Callable[..., list[Finding]]


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """What a stage says of rows that look right, or have the given faults: of a run, of a variant, columns."""
    setup = Setup("cuda", False, tmp_path, tmp_path / "reports", time.time() + 60)
    setup.write("machine.json", FACTS)

    def judged(stage: Stage, *faults: tuple[str, str, Mapping[str, Any]]) -> list[Finding]:
        runs = {name: {variant: dict(each) for variant, each in RUNS[name].items()} for name in RUNS}
        for run, variant, columns in faults:
            runs[run][variant] |= columns
        for module in (quickstart, grid, again):
            monkeypatch.setattr(module, "run", lambda setup, name, *_, **__: ran(setup, name, runs[name]))
        for module in (quickstart, grid):
            monkeypatch.setattr(module, "earlier", lambda setup, name, _: ran(setup, name, runs[name]))
        return list(stage.run(setup))

    return judged


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_right_rows_pass_every_check(stage: Stage, judged: Judge) -> None:
    found = judged(stage)
    assert [(each.check, each.figure) for each in found if each.word != "passed"] == []
    assert len(found) == len(stage.checks)
    assert all(each.figure for each in found)


FAULTS: list[tuple[Stage, str, str, dict[str, Any], str]] = [
    (quickstart.FIRST, "bf16", "moe", {"status": "crashed", "reason": "planted"}, "every_trial_is_ok"),
    (quickstart.FIRST, "bf16", "gqa", {"gpu_uuid": "GPU-other"}, "it_ran_where_it_should"),
    (quickstart.FIRST, "bf16", "gqa", {"device": "cpu"}, "it_ran_where_it_should"),
    (quickstart.FIRST, "bf16", "gqa", {"val_loss": float("nan")}, "losses_are_finite"),
    (quickstart.FIRST, "bf16", "gqa", {"train_loss": 40.0}, "losses_are_finite"),
    (quickstart.FIRST, "bf16", "gqa", {"step_seconds_p50": 0.02}, "steps_are_timed"),
    (quickstart.FIRST, "bf16", "gqa", {"train_tokens_per_second": 3e7}, "steps_are_timed"),
    (quickstart.FIRST, "bf16", "gqa", {"backward_seconds_p50": 0.02}, "parts_make_up_a_step"),
    (quickstart.FIRST, "bf16", "gqa", {"peak_allocated_bytes": 3_000_000}, "memory_is_told"),
    (quickstart.FIRST, "bf16", "gqa", {"peak_reserved_bytes": 100}, "memory_is_told"),
    (quickstart.FIRST, "bf16", "gqa", {"device_used_bytes": None}, "memory_is_told"),
    (quickstart.FIRST, "bf16", "baseline", {"kv_cache_bytes_per_token": 1536}, "the_cache_has_the_known_size"),
    (quickstart.FIRST, "bf16", "gqa", {"kv_cache_bytes_held": 98_305}, "the_cache_is_one_size_in_three_ways"),
    (quickstart.FIRST, "bf16", "gqa", {"kv_cache_bytes_measured": 1}, "the_cache_is_one_size_in_three_ways"),
    (quickstart.FIRST, "bf16", "gqa", {"decode_seconds_per_token_p50": None}, "decoding_is_timed"),
    (quickstart.FIRST, "bf16", "baseline", {"kernels": '{"train": ["bmm", "_softmax"]}'}, "a_fused_attention_ran"),
    (quickstart.FIRST, "bf16", "gqa", {"mfu": 1.04}, "utilisation_is_a_share"),
    (quickstart.FIRST, "bf16", "gqa", {"hfu": None}, "utilisation_is_a_share"),
    (quickstart.FIRST, "bf16", "gqa", {"throttle_reasons": None}, "surroundings_are_told"),
    (quickstart.FIRST, "bf16", "gqa", {"compile_seconds": 3.0}, "nothing_was_compiled"),
    (grid.FIRST, "eager", "deep", {"decode_seconds_per_token_p50": 0.002}, "four_times_the_layers_take_longer"),
    (grid.FIRST, "eager", "moe", {"peak_live_bytes": 300_000_000}, "live_tensors_are_within_what_is_allocated"),
    (grid.FIRST, "eager", "mla", {"kernels": '{"decode": ["mm"]}'}, "the_latent_is_read_as_it_lies"),
    (grid.FIRST, "eager", "moe", {"decode_bandwidth_share": 1.2}, "bandwidth_is_a_share"),
    (grid.FIRST, "eager", "moe", {"energy_joules_per_token": 4.0}, "energy_is_plausible"),
    (grid.FIRST, "eager", "moe", {"energy_joules_per_token": None}, "energy_is_plausible"),
    (grid.FIRST, "eager", "baseline", {"energy_joules_per_token": 0.004}, "energy_is_plausible"),
    (grid.FIRST, "eager", "moe", {"mfu_datasheet": 1.2}, "utilisation_by_the_data_sheet_is_a_share"),
    (grid.COMPILED, "compiled", "moe", {"status": "crashed"}, "every_compiled_trial_is_ok"),
    (grid.COMPILED, "compiled", "moe", {"compiled": False, "compile_fault": "limit"}, "the_rows_say_compiled"),
    (grid.COMPILED, "compiled", "moe", {"graph_breaks": None}, "the_rows_say_compiled"),
    (grid.COMPILED, "compiled", "moe", {"val_loss": 2.6}, "the_losses_are_those_of_eager"),
    (grid.COMPILED, "compiled", "moe", {"step_seconds_p90": 2.0}, "compile_time_is_in_no_step"),
    (grid.COMPILED, "compiled", "moe", {"step_seconds_p50": 0.02}, "the_steps_are_not_slower"),
    (grid.COMPILED, "compiled", "moe", {"mfu": 1.5}, "its_utilisation_is_a_share"),
    (quickstart.LATER, "others", "huge", {"status": "crashed"}, "a_lack_of_memory_is_a_row"),
    (quickstart.LATER, "others", "moe", {"status": "oom"}, "the_next_trials_are_ok"),
    (quickstart.LATER, "others", "moe", {"peak_allocated_bytes": 200_000_001}, "memory_does_not_depend_on_the_place"),
    (quickstart.LATER, "others", "moe", {"peak_reserved_bytes": 300_000_000}, "memory_does_not_depend_on_the_place"),
    (quickstart.LATER, "others", "fp32", {"kv_cache_bytes_per_token": 768}, "fp32_the_cache_has_the_known_size"),
    (quickstart.LATER, "others", "flex", {"val_loss": 2.51}, "the_flexible_kernel_trains_to_the_same_loss"),
    (quickstart.LATER, "others", "flex", {"kernels": "{}"}, "the_flexible_kernel_trains_to_the_same_loss"),
    (quickstart.LATER, "others", "steady", {"val_loss": 2.5000000001}, "the_same_bits_come_out"),
    (quickstart.LATER, "others", "steady", {"deterministic": False}, "the_same_bits_come_out"),
    (grid.CAPACITY, "capacity", "baseline", {"largest_batch": 0}, "the_largest_are_told"),
    (again.STAGE, "again", "baseline", {"bytes_by_length": -1.0}, "time_and_memory_grow"),
    (again.STAGE, "again", "baseline", {"round_status": "killed"}, "every_round_is_whole"),
    (again.STAGE, "again", "baseline", {"round_seconds": 1e-5}, "rounds_time_what_trials_do"),
]


@pytest.mark.parametrize(("stage", "run", "variant", "columns", "check"), FAULTS)
def test_each_fault_is_seen(
    stage: Stage, run: str, variant: str, columns: dict[str, Any], check: str, judged: Judge
) -> None:
    words = {each.check: each.word for each in judged(stage, (run, variant, columns))}
    assert words[check] == "failed"


@pytest.mark.parametrize(
    ("facts", "check", "word"),
    [
        ({}, "doctor_examines_the_device", "passed"),
        ({}, "energy_heat_and_clocks_can_be_read", "passed"),
        ({"fault": "planted"}, "doctor_examines_the_device", "failed"),
        ({"uuid_by_torch": "other"}, "the_uuid_is_torch_s", "failed"),
        ({"gpu_uuid": "MIG-1"}, "the_uuid_is_torch_s", "skipped"),
        ({"driver": None}, "the_driver_is_told", "failed"),
        ({"matmul": {"fp32": {}, "bf16": {}}}, "matrix_products_are_measured", "failed"),
        ({"datasheet_flops": {"bf16": 2e15}}, "matrix_products_fit_the_data_sheet", "passed"),
        ({"datasheet_flops": {"bf16": 7e14}}, "matrix_products_fit_the_data_sheet", "failed"),
        ({"datasheet_flops": {}}, "matrix_products_fit_the_data_sheet", "skipped"),
        ({"copy_bytes_per_second": 1e9}, "copies_are_measured", "failed"),
        ({"timer_seconds": None}, "the_timer_is_fine_enough", "failed"),
        ({"energy_source": None}, "energy_heat_and_clocks_can_be_read", "failed"),
        (
            {"energy_source": None, "lacking": {"energy_joules_per_token": "a slice"}},
            "energy_heat_and_clocks_can_be_read",
            "skipped",
        ),
    ],
)
def test_what_doctor_says_is_judged(facts: dict[str, Any], check: str, word: str, tmp_path: Path) -> None:
    checks = tuple(each for each in machine.STAGES[0].judges if each is not NVML)
    stage = Stage("machine", "", 1, lambda _: FACTS | facts, checks)
    found = {each.check: each.word for each in stage.run(Setup("cuda", False, tmp_path, tmp_path, 0))}
    assert found[check] == word


NVML = next(each for each in machine.STAGES[0].judges if getattr(each, "name", "") == "nvml_finds_the_same_gpu")


@pytest.mark.parametrize(
    ("times", "failed"),
    [
        (machine.Timed(1.0, 1.01, 0.01, 4.0), []),
        (machine.Timed(0.01, 1.0, 0.01, 0.04), ["the_clock_agrees_with_the_wall"]),
        (machine.Timed(1.0, 1.0, 0.99, 4.0), ["asking_is_not_doing"]),
        (machine.Timed(1.0, 1.0, 0.01, 1.1), ["four_times_the_work_takes_longer"]),
    ],
)
def test_a_wrong_clock_is_seen(times: machine.Timed, failed: list[str], tmp_path: Path) -> None:
    stage = Stage("clock", "", 1, lambda _: times, machine.STAGES[1].judges)
    found = stage.run(Setup("cuda", False, tmp_path, tmp_path, 0))
    assert [each.check for each in found if each.word != "passed"] == failed


PLANTED = {"peak_allocated_bytes": 2**26 + 512, "peak_reserved_bytes": 2**27, "device_used_bytes": 2**31}
PLANTED |= {"step_seconds_p50": 1e-4, "window_tokens_per_second_p50": 64 / 0.0201}
PEAK, SPEED = "the_peak_is_without_warm_up", "what_lies_between_steps_is_in_speeds_alone"


@pytest.mark.parametrize(
    ("columns", "failed"),
    [
        ({}, []),
        ({"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**30}, [PEAK]),
        ({"device_used_bytes": 1}, [PEAK]),
        ({"step_seconds_p50": 0.02}, [SPEED]),
        ({"window_tokens_per_second_p50": 64 / 1e-4}, [SPEED]),
    ],
)
def test_what_is_planted_in_steps_is_seen(columns: dict[str, Any], failed: list[str], tmp_path: Path) -> None:
    stage = Stage("watch", "", 1, lambda _: PLANTED | columns, machine.STAGES[2].judges)
    found = stage.run(Setup("cuda", False, tmp_path, tmp_path, 0))
    assert [each.check for each in found if each.word != "passed"] == failed


def test_pauses_are_planted_on_a_cpu_too(tmp_path: Path) -> None:
    found = {each.check: each.word for each in machine.STAGES[2].run(Setup("cpu", False, tmp_path, tmp_path, 0))}
    assert found == {PEAK: "skipped", SPEED: "passed"}


def test_every_stage_has_its_time() -> None:
    from gpu_checks.stages import STAGES as ALL

    assert sum(stage.seconds for stage in ALL) <= 480
