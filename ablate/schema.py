"""What is stored: the columns of the four tables with their types, and the outcomes that a trial can have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 3
"""Since 3 a file holds a checksum of itself."""

RENAMED: Mapping[int, Mapping[str, str]] = {1: {"mfu": "mfu_datasheet"}}
"""Columns by the last version in which they had another name: what `mfu` was is another figure now."""

STATUSES = (
    "ok",
    "diverged",
    "oom",
    "timeout",
    "killed",
    "crashed",
    "interrupted",
    "invalid",
    "incomplete",
    "decode_mismatch",
    "gate_failed",
)

PROFILED = (
    *("prefill_tokens_per_second", "prefill_seconds_p50", "time_to_first_token_seconds_p50"),
    *("decode_tokens_per_second", "decode_seconds_per_token_p50", "decode_bandwidth_share"),
    *("decode_energy_joules_per_token", "kv_cache_bytes_measured", "kv_cache_bytes_allocated", "kv_cache_bytes_held"),
    *("largest_batch", "largest_batch_limit", "largest_length", "largest_length_limit", "profile_conditions"),
)
"""Columns of a profile: a new one leaves nothing of an older one."""

CONDITIONS = (
    *("torch", "python", "ablate", "git_commit", "git_dirty"),
    *("device_name", "gpu_uuid", "trials_at_once"),
)
"""Columns that say under what training was measured; those of its profile, which may be newer, are beside them."""

AA = ("aa_step_ratio_low", "aa_step_ratio_high")
"""Columns of the A/A check that stands behind the times of training."""

JSON_COLUMNS = ("config", "changes", "kernels", "module_metrics", "profile_conditions")


def _fields(arrow_type: Any, names: str) -> list[Any]:
    return [pa.field(name, arrow_type) for name in names.split()]


def _pandas_metadata(fields: Sequence[Any]) -> bytes:
    """Tells any pandas that reads the files to keep whole numbers whole, also where some are missing."""
    nullable = {pa.int64(): "Int64", pa.bool_(): "boolean"}
    columns = [
        {
            "name": each.name,
            "field_name": each.name,
            "pandas_type": nullable[each.type].lower().replace("boolean", "bool"),
            "numpy_type": nullable[each.type],
            "metadata": None,
        }
        for each in fields
        if each.type in nullable
    ]
    return json.dumps({"index_columns": [], "column_indexes": [], "columns": columns}).encode()


def _declare(table: str, fields: Sequence[Any]) -> Any:
    metadata = {
        b"schema_version": str(SCHEMA_VERSION).encode(),
        b"ablate_table": table.encode(),
        b"pandas": _pandas_metadata(fields),
    }
    return pa.schema(fields, metadata=metadata)


# Of a trial that went on from a checkpoint, times, speeds, energy and peaks of memory are those of the steps since;
# `wall_seconds`, `attempts` and `started_at` are of all attempts, and all else is as if it had never been cut.
TRIALS = _declare(
    "trials",
    [
        *_fields(pa.string(), "experiment variant trial_id profile_id"),
        *_fields(pa.int64(), "seed"),
        *_fields(pa.bool_(), "is_baseline is_for_tuning"),
        *_fields(pa.string(), "config changes status phase reason log"),
        *_fields(pa.int64(), "attempts"),
        *_fields(pa.timestamp("us", tz="UTC"), "started_at"),
        *_fields(pa.float64(), "wall_seconds trials_at_once startup_seconds eval_seconds"),
        *_fields(pa.int64(), "params_total params_active params_embedding"),
        *_fields(pa.float64(), "flops_per_token flops_per_token_counted"),
        *_fields(pa.float64(), "train_flops_per_token train_flops_per_token_counted"),
        *_fields(
            pa.int64(),
            "kv_cache_bytes_per_token kv_cache_bytes_measured kv_cache_bytes_allocated kv_cache_bytes_held",
        ),
        *_fields(pa.int64(), "steps tokens"),
        *_fields(pa.float64(), "val_loss val_bits_per_byte train_loss best_val_loss corpus_passes"),
        *_fields(pa.int64(), "diverged_step"),
        *_fields(pa.float64(), "train_tokens_per_second train_tokens_per_second_p10 train_tokens_per_second_p50"),
        *_fields(pa.float64(), "train_tokens_per_second_p90 step_seconds_p10 step_seconds_p50 step_seconds_p90"),
        *_fields(pa.float64(), "window_tokens_per_second_p10 window_tokens_per_second_p50"),
        *_fields(pa.float64(), "window_tokens_per_second_p90 data_seconds_p10 data_seconds_p50 data_seconds_p90"),
        *_fields(pa.float64(), "forward_seconds_p10 forward_seconds_p50 forward_seconds_p90"),
        *_fields(pa.float64(), "backward_seconds_p10 backward_seconds_p50 backward_seconds_p90"),
        *_fields(pa.float64(), "optimizer_seconds_p10 optimizer_seconds_p50 optimizer_seconds_p90"),
        *_fields(pa.float64(), "compile_seconds mfu hfu mfu_datasheet matmul_peak_flops"),
        *_fields(pa.bool_(), "compiled"),
        *_fields(pa.string(), "compile_fault"),
        *_fields(pa.int64(), "graph_breaks recompiles"),
        *_fields(pa.float64(), "prefill_tokens_per_second prefill_seconds_p50"),
        *_fields(pa.float64(), "time_to_first_token_seconds_p50 decode_bandwidth_share"),
        *_fields(pa.float64(), "decode_tokens_per_second decode_seconds_per_token_p50 energy_joules_per_token"),
        *_fields(pa.float64(), "decode_energy_joules_per_token"),
        *_fields(pa.string(), "energy_source"),
        *_fields(pa.float64(), "other_load_cores device_clock_mhz_p50 device_clock_mhz_min"),
        *_fields(pa.float64(), "device_temperature_celsius_max"),
        *_fields(pa.string(), "throttle_reasons"),
        *_fields(pa.float64(), "aa_step_ratio_low aa_step_ratio_high"),
        *_fields(pa.int64(), "peak_allocated_bytes peak_reserved_bytes peak_rss_bytes device_used_bytes"),
        *_fields(pa.int64(), "peak_live_bytes parameter_bytes gradient_bytes optimizer_state_bytes activation_bytes"),
        *_fields(pa.int64(), "largest_batch largest_length"),
        *_fields(pa.string(), "largest_batch_limit largest_length_limit"),
        *_fields(pa.string(), "device device_name gpu_uuid"),
        *_fields(pa.int64(), "threads"),
        *_fields(pa.string(), "precision param_dtype compute_dtype optimizer_state_dtype kernels module_metrics"),
        *_fields(pa.bool_(), "deterministic"),
        *_fields(pa.string(), "torch python ablate git_commit"),
        *_fields(pa.bool_(), "git_dirty"),
        *_fields(pa.string(), "profile_conditions"),
        *_fields(pa.string(), "batch_order_hash corpus_sha256"),
    ],
)

CURVES = _declare(
    "curves",
    [
        *_fields(pa.string(), "trial_id"),
        *_fields(pa.int64(), "step tokens"),
        *_fields(pa.string(), "split metric"),
        *_fields(pa.float64(), "value"),
    ],
)

PROFILES = _declare(
    "profiles",
    [
        *_fields(pa.string(), "trial_id phase"),
        *_fields(pa.int64(), "batch context new_tokens"),
        *_fields(pa.string(), "path"),  # which of several ways to the same result was taken
        *_fields(pa.string(), "metric"),
        *_fields(pa.float64(), "value spread"),
        *_fields(pa.int64(), "sample"),  # its number in a series of single values; null for a figure made of several
    ],
)

REPEATS = _declare(
    "repeats",
    [
        *_fields(pa.string(), "timing_id variant_id variant"),
        *_fields(pa.bool_(), "is_partner"),  # the baseline again: the other half of the A/A check
        *_fields(pa.int64(), "round place seed"),  # place: its number in the whole order, over all rounds
        *_fields(pa.timestamp("us", tz="UTC"), "started_at"),
        *_fields(pa.string(), "status reason metric"),
        *_fields(pa.float64(), "value"),  # a median
        *_fields(pa.int64(), "samples"),  # of so many steps, prompts or generations
        *_fields(pa.float64(), "other_load_cores device_clock_mhz_p50"),
        *_fields(pa.string(), "throttle_reasons"),
        *_fields(pa.bool_(), "compiled"),
        *_fields(pa.string(), "compile_fault"),
        *_fields(pa.string(), "device device_name gpu_uuid"),
        *_fields(pa.int64(), "threads"),
        *_fields(pa.string(), "torch"),
    ],
)

SCHEMAS: Mapping[str, Any] = {"trials": TRIALS, "curves": CURVES, "profiles": PROFILES, "repeats": REPEATS}

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "trials": ("trial_id", "variant", "seed", "status"),
    "curves": ("trial_id", "step", "split", "metric"),
    "profiles": ("trial_id", "phase", "metric"),
    "repeats": ("timing_id", "variant_id", "variant", "is_partner", "round", "place", "status"),
}
"""Columns without which a row is about nothing: a file with a null in one does not count."""
