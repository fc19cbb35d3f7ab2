"""What `nox -s reproduce` compares: everything but what times, speeds and memory may change."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ablate.schema import TRIALS

_FILE = Path(__file__).parent.parent / "tools" / "compare_results.py"


def test_only_measures_of_time_speed_and_memory_may_differ() -> None:
    spec = importlib.util.spec_from_file_location("compare_results", _FILE)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    may_differ = {column for column in TRIALS.names if not tool._must_agree(column)}
    assert may_differ == {
        *("attempts", "started_at", "wall_seconds", "trials_at_once", "startup_seconds", "eval_seconds"),
        *("train_tokens_per_second", "train_tokens_per_second_p10", "train_tokens_per_second_p50"),
        *("train_tokens_per_second_p90", "step_seconds_p10", "step_seconds_p50", "step_seconds_p90"),
        *(
            f"{part}_seconds_p{share}"
            for part in ("data", "forward", "backward", "optimizer")
            for share in (10, 50, 90)
        ),
        *(f"window_tokens_per_second_p{share}" for share in (10, 50, 90)),
        *("mfu", "hfu", "mfu_datasheet", "matmul_peak_flops", "decode_energy_joules_per_token"),
        *("other_load_cores", "device_clock_mhz_p50", "device_clock_mhz_min"),
        *("device_temperature_celsius_max", "throttle_reasons"),
        *("compile_seconds", "prefill_tokens_per_second", "prefill_seconds_p50"),
        *("decode_tokens_per_second", "decode_seconds_per_token_p50", "energy_joules_per_token"),
        *("time_to_first_token_seconds_p50", "decode_bandwidth_share"),
        *("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes", "device_used_bytes"),
        *("git_commit", "git_dirty", "profile_conditions"),
    }
