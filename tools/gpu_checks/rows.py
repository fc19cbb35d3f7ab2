"""What must hold of the rows of any experiment on a device, whatever its variants are."""

from __future__ import annotations

import json
import math
import re

import pandas as pd

from gpu_checks.ledger import Failed, Skipped, expect
from gpu_checks.runs import Ran

WARMUP_STEPS = 10
LEAST_SECONDS = 2.0
"""Of less an energy is null."""

FUSED = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn)_attention(?!_for_cpu)")


def told(values: pd.Series, style: str = "{:.3g}") -> str:
    """A figure of each variant."""
    return ", ".join(f"{name} {style.format(value)}" for name, value in values.items())


def every_trial_is_ok(ran: Ran) -> str:
    """Every variant trains, is measured, and ends as `ok`: its gates hold, counted FLOPs are those promised, cached and
    full logits agree, peaks hold weights and optimizer state.
    """
    return f"{len(ran.trials)} trials"


def it_ran_where_it_should(ran: Ran) -> str:
    """Every row names the device, and the GPU by the same UUID as `doctor` does."""
    rows = ran.every("device", "device_name")
    known = ran.setup.read("machine.json").get("gpu_uuid")
    wrong = set(rows["device"]) != {ran.setup.device}
    if known and set(ran.every("gpu_uuid")["gpu_uuid"]) != {known}:
        raise Failed("another GPU than doctor's")
    return expect(not wrong, ", ".join(sorted(set(rows["device_name"]))))


def losses_are_finite(ran: Ran) -> str:
    """Training and validation losses are finite, and no worse than guessing by far."""
    losses = ran.every("train_loss", "val_loss")
    sane = losses.map(lambda loss: math.isfinite(loss) and loss < 2 * math.log(256)).all().all()
    return expect(sane, f"val_loss {told(losses['val_loss'], '{:.4f}')}")


def steps_are_timed(ran: Ran) -> str:
    """Steps have percentiles that rise, and tokens a second that fit them within a factor of two."""
    rows = ran.every("step_seconds_p10", "step_seconds_p50", "step_seconds_p90", "train_tokens_per_second")
    rising = (rows["step_seconds_p10"] <= rows["step_seconds_p50"]) & (
        rows["step_seconds_p50"] <= rows["step_seconds_p90"]
    )
    tokens = ran.trials["tokens"].astype(float) / ran.trials["steps"].astype(float)
    fit = rows["train_tokens_per_second"] * rows["step_seconds_p50"] / tokens
    return expect(rising.all() and fit.between(0.5, 2).all(), f"{told(rows['step_seconds_p50'] * 1e3)} ms")


def parts_make_up_a_step(ran: Ran) -> str:
    """Data wait, forward, backward and optimizer together are 50 % to 105 % of a step."""
    names = [f"{part}_seconds_p50" for part in ("data", "forward", "backward", "optimizer")]
    rows = ran.every(*names, "step_seconds_p50")
    shares = rows[names].astype(float).sum(axis=1) / rows["step_seconds_p50"].astype(float)
    return expect(shares.between(0.5, 1.05).all(), told(shares, "{:.0%}"))


def memory_is_told(ran: Ran) -> str:
    """Peak allocated, peak reserved and device use are there; what is reserved is no less than what is allocated, and
    that no less than weights, gradients and Adam's state (16 bytes a parameter).
    """
    rows = ran.every("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "params_total")
    allocated = rows["peak_allocated_bytes"]
    holds = (rows["peak_reserved_bytes"] >= allocated).all() and (allocated >= 16 * rows["params_total"]).all()
    holds = holds and (rows["device_used_bytes"] >= allocated / 2).all()
    return expect(holds, f"allocated {told(allocated.astype(float) / 2**20, '{:.1f}')} MiB")


def live_tensors_are_within_what_is_allocated(ran: Ran) -> str:
    """The peak of live tensors, counted one by one, is at most 5 % over what the allocator says it gave out."""
    rows = ran.every("peak_live_bytes", "peak_allocated_bytes").astype(float)
    shares = rows["peak_live_bytes"] / rows["peak_allocated_bytes"]
    return expect((shares <= 1.05).all(), told(shares, "{:.0%}"))


def retries_are_recorded(ran: Ran) -> str:
    """How often the allocator had to try again stands in every profile, and is 0 where there is room."""
    retries = {name: ran.profile(name, "allocator_retries") for name in ran.names}
    return expect(set(retries.values()) == {0.0}, ", ".join(f"{name} {value}" for name, value in retries.items()))


def the_cache_is_one_size_in_three_ways(ran: Ran) -> str:
    """The KV cache by formula, by its live tensors, and by what the allocator was asked for is equal to the byte."""
    names = ("kv_cache_bytes_measured", "kv_cache_bytes_allocated", "kv_cache_bytes_held")
    rows = ran.every(*names, "kv_cache_bytes_per_token")
    settings = {name: json.loads(ran.row(name)["config"])["profile"]["decode"] for name in ran.names}
    tokens = pd.Series({name: each["context"][0] + new_tokens(each) for name, each in settings.items()})
    batch = pd.Series({name: each["batch"][0] for name, each in settings.items()})
    by_formula = rows["kv_cache_bytes_per_token"] * tokens * batch
    live, held = rows["kv_cache_bytes_measured"], rows["kv_cache_bytes_held"]
    holds = (by_formula == live).all() and (live + rows["kv_cache_bytes_allocated"] == held).all()
    figures = zip(ran.names, by_formula, live, held, strict=True)
    return expect(holds, ", ".join(f"{name} {a:,} = {b:,} = {c:,}" for name, a, b, c in figures))


def new_tokens(decode: dict[str, int | list[int]]) -> int:
    """Those of the first cell."""
    wanted = decode["new_tokens"]
    return wanted[0] if isinstance(wanted, list) else wanted


def decoding_is_timed(ran: Ran) -> str:
    """Prefill and decoding are timed in the precision that was asked for."""
    rows = ran.every(
        "prefill_tokens_per_second", "decode_seconds_per_token_p50", "decode_tokens_per_second", "precision"
    )
    seconds = rows["decode_seconds_per_token_p50"].astype(float) * 1e3
    return expect((seconds > 0).all(), f"{set(rows['precision'])}: {told(seconds)} ms a token".replace("'", ""))


def a_fused_attention_ran(ran: Ran) -> str:
    """The first variant's attention is one fused kernel, and its name is told."""
    names = str(ran.row(ran.names[0])["kernels"])
    found = sorted({match[0] for match in FUSED.finditer(names)})
    return expect(found, ", ".join(found) or names)


def utilisation_is_a_share(ran: Ran) -> str:
    """MFU and HFU are over 0 and at most 1 of the peak that was measured here."""
    if ran.trials["device"].eq("cpu").all() and ran.trials["matmul_peak_flops"].isna().all():
        raise Skipped("the CPUs were busy when their peak was measured")
    rows = ran.every("mfu", "hfu").astype(float)
    holds = ((rows > 0) & (rows <= 1)).all().all()
    return expect(holds, f"MFU {told(rows['mfu'], '{:.1%}')}; HFU {told(rows['hfu'], '{:.1%}')}")


def utilisation_by_the_data_sheet_is_a_share(ran: Ran) -> str:
    """MFU is over 0 and at most 1 of the peak that the maker promises."""
    if not ran.setup.read("machine.json").get("datasheet_flops"):
        raise Skipped("no data sheet of this GPU is known")
    shares = ran.every("mfu_datasheet")["mfu_datasheet"].astype(float)
    return expect(((shares > 0) & (shares <= 1)).all(), told(shares, "{:.1%}"))


def surroundings_are_told(ran: Ran) -> str:
    """Clock, temperature and what holds the clocks back stand beside the times; or `doctor` says why not."""
    names = ["device_clock_mhz_p50", "device_temperature_celsius_max", "throttle_reasons"]
    lacking = ran.setup.read("machine.json").get("lacking", {})
    there = [name for name in names if name not in lacking]
    if not there:
        raise Skipped("; ".join(f"{name}: {lacking[name]}" for name in names))
    row = ran.every(*there).iloc[0]
    return ", ".join(f"{name} {row[name]}" for name in there)


def energy_is_plausible(ran: Ran) -> str:
    """Joules a token by tokens a second are between 20 and 2000 watts, and null where steps were timed for less than
    two seconds; or `doctor` says why there are none.
    """
    lacking = ran.setup.read("machine.json").get("lacking", {})
    if "energy_joules_per_token" in lacking:
        raise Skipped(lacking["energy_joules_per_token"])
    rows = ran.every("train_tokens_per_second", "tokens", "steps").astype(float)
    rows[["energy_joules_per_token", "energy_source"]] = ran.trials[["energy_joules_per_token", "energy_source"]]
    timed = rows["tokens"] * (1 - WARMUP_STEPS / rows["steps"]) / rows["train_tokens_per_second"]
    long = rows[timed >= LEAST_SECONDS]
    null = rows.loc[timed < LEAST_SECONDS, "energy_joules_per_token"].isna().all()
    if not len(long):
        raise Failed("no variant was timed long enough")
    watts = (long["energy_joules_per_token"] * long["train_tokens_per_second"]).astype(float)
    holds = null and watts.between(20, 2000).all() and set(long["energy_source"]) == {"nvml"}
    return expect(holds, f"{told(watts)} W")


def the_report_is_written(ran: Ran) -> str:
    """The experiment's report is there."""
    report = ran.setup.reports / ran.results.folder.name / "report.md"
    return expect(report.is_file(), f"{ran.results.folder.name}/report.md")
