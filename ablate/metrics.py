"""What each reported number is: its name, unit, better direction, and whether it is exact or was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["lower", "higher"]

Timing = Literal["step", "prefill", "decode", "other"]
"""What a time or a speed comes of. What is timed in repeats has a name, and an A/A check; `other` has none."""

TIMED: dict[Timing, str] = {
    "step": "step_seconds_p50",
    "prefill": "prefill_seconds_p50",
    "decode": "decode_seconds_per_token_p50",
}
"""The metric that repeats have of each."""

ARROWS: dict[Direction | None, str] = {"lower": "↓", "higher": "↑", None: ""}

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One reported column. Nothing has a default: a direction that nobody stated is not a direction."""

    column: str
    label: str
    unit: str
    direction: Direction | None  # None: neither way is better, so that no value is ever marked as best
    timing: Timing | None  # a time, a speed or what is made of one, energy too: never best without an A/A check
    noisy: bool  # measured with spread; an exact value is the same for every seed
    scale: float  # the stored value divided by this is shown
    decimals: int | None  # None: four significant digits

    @property
    def heading(self) -> str:
        """The label with its direction and unit, as in `validation loss ↓ (nats/token)`."""
        arrow = ARROWS[self.direction]
        unit = f"({self.unit})" if self.unit else ""
        return " ".join(part for part in (self.label, arrow, unit) if part)


def _exact(column: str, label: str, unit: str) -> Metric:
    return Metric(
        column=column, label=label, unit=unit, direction="lower", timing=None, noisy=False, scale=1, decimals=0
    )


def _most(column: str, label: str, unit: str) -> Metric:
    return Metric(
        column=column, label=label, unit=unit, direction="higher", timing=None, noisy=False, scale=1, decimals=0
    )


def _loss(column: str, label: str, unit: str) -> Metric:
    return _noisy(column, label, unit, "lower", None, 1, 4)


def _speed(column: str, label: str) -> Metric:
    return _noisy(column, label, "tokens/s", "higher", _timing_of(column), 1, None)


def _time(column: str, label: str, unit: str, scale: float) -> Metric:
    return _noisy(column, label, unit, "lower", _timing_of(column), scale, None)


def _energy(column: str, label: str) -> Metric:
    # Power by time, and no repeats measure it.
    return _noisy(column, label, "J/token", "lower", "other", 1, None)


def _memory(column: str, label: str) -> Metric:
    return _noisy(column, label, "MiB", "lower", None, MIB, 1)


def _share(column: str, label: str) -> Metric:
    return _noisy(column, label, "%", "higher", _timing_of(column), 0.01, 1)


def _noisy(
    column: str,
    label: str,
    unit: str,
    direction: Direction,
    timing: Timing | None,
    scale: float,
    decimals: int | None,
) -> Metric:
    return Metric(
        column=column,
        label=label,
        unit=unit,
        direction=direction,
        timing=timing,
        noisy=True,
        scale=scale,
        decimals=decimals,
    )


_PARTS: dict[str, Timing] = {
    **dict.fromkeys(("train", "window", "step", "data", "forward", "backward", "optimizer", "mfu", "hfu"), "step"),
    **dict.fromkeys(("prefill", "time"), "prefill"),
    "decode": "decode",
}


def _timing_of(column: str) -> Timing:
    """By the first word of its name."""
    return _PARTS.get(column.partition("_")[0], "other")


_KNOWN = (
    Metric(
        column="kv_cache_equals_weights_at_tokens",
        label="KV cache as large as the weights at",
        unit="tokens",
        direction="higher",
        timing=None,
        noisy=False,
        scale=1,
        decimals=0,
    ),
    _most("largest_batch", "largest batch", "sequences"),
    _most("largest_length", "largest sequence", "tokens"),
    _loss("val_loss", "validation loss", "nats/token"),
    _loss("val_bits_per_byte", "validation", "bits/byte"),
    _loss("train_loss", "training loss", "nats/token"),
    _loss("best_val_loss", "best validation loss", "nats/token"),
    _exact("params_total", "parameters, total", ""),
    _exact("params_active", "parameters, active", ""),
    _exact("params_embedding", "parameters, embedding", ""),
    _exact("flops_per_token", "FLOPs", "per token"),
    _exact("kv_cache_bytes_per_token", "KV cache", "bytes per token"),
    _exact("kv_cache_bytes_measured", "KV cache measured", "bytes"),
    _exact("kv_cache_bytes_allocated", "KV cache allocated beyond", "bytes"),
    _exact("kv_cache_bytes_held", "KV cache in memory", "bytes"),
    _speed("train_tokens_per_second", "training"),
    _speed("window_tokens_per_second_p50", "training, windows, median"),
    _speed("prefill_tokens_per_second", "prefill"),
    _speed("decode_tokens_per_second", "decode"),
    _time("step_seconds_p50", "step, median", "ms", 1e-3),
    _time("data_seconds_p50", "data wait, median", "ms", 1e-3),
    _time("forward_seconds_p50", "forward, median", "ms", 1e-3),
    _time("backward_seconds_p50", "backward, median", "ms", 1e-3),
    _time("optimizer_seconds_p50", "optimizer, median", "ms", 1e-3),
    _time("prefill_seconds_p50", "prefill, median", "ms", 1e-3),
    _time("time_to_first_token_seconds_p50", "first token, median", "ms", 1e-3),
    _time("decode_seconds_per_token_p50", "decode, median", "ms/token", 1e-3),
    _time("inference_seconds_p50", "forward in inference, median", "ms", 1e-3),
    _time("training_pass_seconds_p50", "forward and backward, median", "ms", 1e-3),
    _time("compile_seconds", "compilation", "s", 1),
    _time("startup_seconds", "start-up", "s", 1),
    _time("eval_seconds", "evaluation", "s", 1),
    _time("wall_seconds", "wall time", "s", 1),
    _memory("peak_allocated_bytes", "peak allocated"),
    _memory("peak_reserved_bytes", "peak reserved"),
    _memory("peak_rss_bytes", "peak RSS"),
    _memory("device_used_bytes", "device used"),
    _memory("peak_live_bytes", "peak of live tensors"),
    _memory("parameter_bytes", "parameters"),
    _memory("gradient_bytes", "gradients"),
    _memory("optimizer_state_bytes", "optimizer state"),
    _memory("activation_bytes", "activations"),
    _memory("training_pass_bytes_p50", "memory of forward and backward"),
    _energy("energy_joules_per_token", "energy"),
    _energy("decode_energy_joules_per_token", "decode energy"),
    _share("decode_bandwidth_share", "decode, share of the copy's bandwidth"),
    _share("mfu", "model FLOPs utilisation"),
    _share("hfu", "hardware FLOPs utilisation"),
    _share("mfu_datasheet", "model FLOPs utilisation of the data sheet"),
)

LOSSES = frozenset(("val_loss", "val_bits_per_byte", "train_loss", "best_val_loss"))
"""What tells how well a task is done, and compares only within that task."""

METRICS: dict[str, Metric] = {metric.column: metric for metric in _KNOWN}


def metric_of(column: str) -> Metric:
    """The metric in `column`; one that nobody described keeps its name and has no direction, so it is never best."""
    if column in METRICS:
        return METRICS[column]
    decimals = 0 if column.endswith("_bytes") else None
    return Metric(
        column=column, label=column, unit="", direction=None, timing=None, noisy=True, scale=1, decimals=decimals
    )
