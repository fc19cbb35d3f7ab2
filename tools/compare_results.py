"""Compare two results folders of one experiment: everything but times, speeds and memory must be equal to the last bit.

Usage: python tools/compare_results.py FIRST SECOND. Exit status 1 where something differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from ablate.results import Results, load

_MAY_DIFFER = ("_seconds", "_per_second", "_bytes", "_at", "_p10", "_p50", "_p90", "_joules_per_token")
_EXACT_BYTES = (
    *("kv_cache_bytes_measured", "kv_cache_bytes_allocated", "kv_cache_bytes_held", "peak_live_bytes"),
    *("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes"),
)
_OWN = (
    *("attempts", "git_commit", "git_dirty", "trials_at_once", "mfu", "hfu", "mfu_datasheet", "matmul_peak_flops"),
    *("other_load_cores", "device_clock_mhz_min", "device_temperature_celsius_max", "throttle_reasons"),
    *("decode_bandwidth_share", "profile_conditions"),
)


def differences(first: Results, second: Results) -> list[str]:
    """What differs, one line each."""
    if list(first.trials["trial_id"]) != list(second.trials["trial_id"]):
        return ["the two folders hold different trials"]
    found = [
        f"trials: {column} differs"
        for column in first.trials.columns
        if _must_agree(column) and not _same(first.trials[column], second.trials[column])
    ]
    curves = [results.curves.sort_values(["trial_id", "split", "metric", "step"]) for results in (first, second)]
    if not curves[0].reset_index(drop=True).equals(curves[1].reset_index(drop=True)):
        found.append("curves differ")
    return found


def _must_agree(column: str) -> bool:
    return column in _EXACT_BYTES or not (column in _OWN or column.endswith(_MAY_DIFFER))


def _same(first: pd.Series, second: pd.Series) -> bool:
    return bool(first.reset_index(drop=True).equals(second.reset_index(drop=True)))


def main(first: Path, second: Path) -> int:
    """Print what differs, or what was compared."""
    one, other = load(first), load(second)
    found = differences(one, other)
    compared = [column for column in one.trials.columns if _must_agree(column)]
    print("\n".join(found) or f"equal to the last bit: {len(one.curves)} points of curves, {len(one.trials)} trials, ")
    if not found:
        print("columns: " + ", ".join(compared))
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    sys.exit(main(**vars(parser.parse_args())))
