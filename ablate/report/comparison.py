"""One comparison: variants that change the same settings, side by side with the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ablate.metrics import METRICS, Metric
from ablate.report.evidence import NOT_FINISHED, Evidence, Variant, profiles_of, without_training
from ablate.report.text import (
    DOES_NOT_APPLY,
    NOT_MEASURED,
    escape,
    interval,
    mean_and_sd,
    number,
    table,
)
from ablate.schema import PROFILED
from ablate.stats import Difference, corrected, summarize

LOSS = METRICS["val_loss"]
BITS = METRICS["val_bits_per_byte"]
# What a loss was bought with: columns that must stand beside it.
BUDGET = [METRICS[name] for name in ("params_total", "params_active", "flops_per_token")]
CACHE = METRICS["kv_cache_bytes_per_token"]
CACHE_HELD = [METRICS[name] for name in ("kv_cache_bytes_measured", "kv_cache_bytes_held")]
COSTS = {
    "Speed of training": ("train_tokens_per_second", "step_seconds_p50", "compile_seconds", "wall_seconds"),
    "Speed of inference": (
        "prefill_tokens_per_second",
        "time_to_first_token_seconds_p50",
        "decode_tokens_per_second",
        "decode_seconds_per_token_p50",
        "decode_bandwidth_share",
    ),
    "Utilisation and energy": (
        "mfu",
        "hfu",
        "mfu_datasheet",
        "energy_joules_per_token",
        "decode_energy_joules_per_token",
    ),
    "Memory": ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes", "device_used_bytes"),
}
"""What was measured, by topic: each is a table that fits a screen."""

MEMORY = [
    METRICS[name]
    for name in (
        "peak_live_bytes",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_state_bytes",
        "activation_bytes",
    )
]
CAPACITY = [METRICS[name] for name in ("largest_batch", "largest_length")]
EQUALS_WEIGHTS = METRICS["kv_cache_equals_weights_at_tokens"]

TOLERANCE = 0.02
UNEQUAL = "†"
FEWER = "‡"

Cell = Callable[[Variant], str]


@dataclass(frozen=True)
class Comparison:
    """The baseline and the variants that change the same top-level settings."""

    title: str
    baseline: Variant | None
    variants: Sequence[Variant]  # the baseline first, where there is one


def comparisons(evidence: Evidence) -> list[Comparison]:
    """One a group, in the order of the experiment; the baseline alone where nothing else was planned."""
    groups: dict[tuple[str, ...], list[Variant]] = {}
    for variant in evidence.variants:
        if not variant.is_baseline:
            groups.setdefault(variant.groups, []).append(variant)
    base = [] if evidence.baseline is None else [evidence.baseline]
    if not groups:
        return [Comparison("the baseline", evidence.baseline, base)] if base else []
    return [
        Comparison(" × ".join(group) or "variants", evidence.baseline, [*base, *members])
        for group, members in groups.items()
    ]


# --- What is best -----------------------------------------------------------------------------------------------------


def best(variants: Sequence[Variant], metric: Metric) -> set[str]:
    """The names whose value is bold: those that are best beyond doubt in the metric's stated direction."""
    if metric.direction is None or any(each.is_withheld(metric) for each in variants if each.competes):
        return set()
    if metric.column in PROFILED and len(profiles_of(variants)) > 1:
        return set()
    return _clear_winner(variants, metric) if metric.noisy else _exact_best(variants, metric)


def _exact_best(variants: Sequence[Variant], metric: Metric) -> set[str]:
    values = {each.name: each.exact(metric.column) for each in variants if each.competes}
    known = {name: value for name, value in values.items() if value is not None}
    if len(set(known.values())) < 2:
        return set()
    top = min(known.values()) if metric.direction == "lower" else max(known.values())
    return {name for name, value in known.items() if value == top}


def _clear_winner(variants: Sequence[Variant], metric: Metric) -> set[str]:
    sign = 1 if metric.direction == "lower" else -1
    means = [(each, each.summary(metric.column).mean) for each in variants]
    ranked = sorted(((sign * mean, each) for each, mean in means if mean is not None), key=lambda pair: pair[0])
    if len(ranked) < 2:
        return set()
    winner = ranked[0][1]
    rivals = corrected({each.name: winner.against(each, metric) for _, each in ranked[1:]})
    return {winner.name} if all(each.verdict == "better" for each in rivals.values()) else set()


# --- Unequal budgets --------------------------------------------------------------------------------------------------


def budget_change(variant: Variant, baseline: Variant | None, metric: Metric) -> float | None:
    """The relative difference to the baseline where it is over the tolerance, else None."""
    own, theirs = variant.exact(metric.column), baseline.exact(metric.column) if baseline else None
    if own is None or theirs is None or abs(own - theirs) <= TOLERANCE * theirs:
        return None
    return own / theirs - 1 if theirs else float("inf")


def has_other_budget(variant: Variant, baseline: Variant | None) -> bool:
    """Whether a loss of this variant stands against a baseline of another size or cost."""
    return any(budget_change(variant, baseline, metric) is not None for metric in BUDGET)


# --- Cells ------------------------------------------------------------------------------------------------------------


def outcome_text(variant: Variant) -> str:
    """How its trials ended: `diverged`, or `diverged (2), OOM (1)`."""
    counts = variant.outcomes
    if len(counts) == 1:
        return escape(next(iter(counts)))
    return ", ".join(f"{escape(word)} ({n})" for word, n in sorted(counts.items())) or NOT_FINISHED


def _bold(text: str, condition: bool) -> str:
    return f"**{text}**" if condition else text


def measured_cell(variant: Variant, metric: Metric, winners: set[str]) -> str:
    """Mean ± sd over the seeds that compete; where none does, how the trials ended."""
    if not variant.competes:
        return outcome_text(variant)
    summary = variant.summary(metric.column)
    text = _bold(mean_and_sd(summary, metric), variant.name in winners)
    return f"{text} (n={summary.n})" if summary.n not in (0, variant.seeds) else text


def exact_cell(variant: Variant, baseline: Variant | None, metric: Metric, winners: set[str]) -> str:
    """The exact value, known from the plan also where no trial ended well; marked where the budget is another."""
    value = variant.exact(metric.column)
    if value is None:
        return mean_and_sd(summarize(variant.by_seed(metric.column).values()), metric)
    text = _bold(number(value, metric), variant.name in winners)
    unequal = metric in BUDGET and budget_change(variant, baseline, metric) is not None
    return f"{text} {UNEQUAL}" if unequal else text


def seeds_cell(variant: Variant) -> str:
    """How many seeds stand behind the loss, marked where they are fewer than planned."""
    n = variant.summary(LOSS.column).n
    if n == variant.planned:
        return str(n)
    others = {word: count for word, count in variant.outcomes.items() if word != "ok"}
    if variant.outcomes["ok"] > n:
        others["without a finite loss"] = variant.outcomes["ok"] - n
    why = ", ".join(f"{count} {escape(word)}" for word, count in sorted(others.items()))
    return f"{n} of {variant.planned} {FEWER}" + (f" ({why})" if why else "")


def difference_cell(variant: Variant, baseline: Variant | None) -> str:
    """`+0.0120 [-0.0030, +0.0270] no clear difference`."""
    if variant.is_baseline:
        return DOES_NOT_APPLY
    if baseline is None:
        return NOT_MEASURED
    difference = variant.against(baseline, LOSS)
    if difference.mean is None:
        return difference.verdict if difference.verdict == "another task" else NOT_MEASURED
    pairs = difference_pairs(difference, variant)
    mark = f" {UNEQUAL}" if has_other_budget(variant, baseline) else ""
    return f"{interval(difference, LOSS)} {difference.verdict}{pairs}{mark}"


def difference_pairs(difference: Difference, variant: Variant) -> str:
    """Says how many seeds are compared where it is not all that the variant has."""
    return "" if difference.n == variant.summary(LOSS.column).n else f" (common seeds: {difference.n})"


# --- Tables -----------------------------------------------------------------------------------------------------------


def quality_table(comparison: Comparison) -> str:
    """Loss, its seeds and its difference to the baseline, beside its price; that alone without training."""
    variants, baseline = comparison.variants, comparison.baseline
    columns: list[tuple[str, Cell]] = [("variant", _name_cell)]
    if not without_training(variants):
        columns += [
            _measured_column(variants, LOSS),
            ("n", seeds_cell),
            ("difference to baseline, 95 % interval", lambda each: difference_cell(each, baseline)),
        ]
    if any(each.by_seed(BITS.column) for each in variants):
        columns.append(_measured_column(variants, BITS))
    columns += [_exact_column(variants, baseline, metric) for metric in (*BUDGET, CACHE) if _is_known(variants, metric)]
    return _table(variants, columns)


def tables_of(comparison: Comparison) -> dict[str, str]:
    """Each table by its topic; what nobody measured has none."""
    costs = {topic: cost_table(comparison, [METRICS[name] for name in names]) for topic, names in COSTS.items()}
    found = {
        "Loss and size": quality_table(comparison),
        **costs,
        "Memory of a training step": memory_table(comparison),
        "Largest steps that fit": capacity_table(comparison),
        "KV cache": cache_table(comparison),
    }
    return {topic: text for topic, text in found.items() if text}


def cost_table(comparison: Comparison, metrics: Sequence[Metric]) -> str:
    """What was measured of these; empty where nothing was."""
    measured = [metric for metric in metrics if any(each.by_seed(metric.column) for each in comparison.variants)]
    columns: list[tuple[str, Cell]] = [("variant", _name_cell)]
    columns += [_measured_column(comparison.variants, metric) for metric in measured]
    return _table(comparison.variants, columns) if measured else ""


def memory_table(comparison: Comparison) -> str:
    """What a training step held and for what; empty where nothing was measured."""
    known = [metric for metric in MEMORY if _is_known(comparison.variants, metric)]
    columns: list[tuple[str, Cell]] = [("variant", _name_cell)]
    columns += [_exact_column(comparison.variants, comparison.baseline, metric) for metric in known]
    return _table(comparison.variants, columns) if known else ""


def capacity_table(comparison: Comparison) -> str:
    """The largest training steps that fit; empty where none were sought."""
    sought = [metric for metric in CAPACITY if _is_known(comparison.variants, metric)]
    columns: list[tuple[str, Cell]] = [("variant", _name_cell), *map(_capacity_column, sought)]
    return _table(comparison.variants, columns) if sought else ""


def _capacity_column(metric: Metric) -> tuple[str, Cell]:
    """Of several searches the smallest result, with ≥ where something else than memory ended one."""

    def cell(variant: Variant) -> str:
        known = [row for row in variant.rows if row.get(metric.column) is not None]
        if not known:
            return NOT_MEASURED
        stopped = any(row.get(f"{metric.column}_limit") != "memory" for row in known)
        return ("≥ " if stopped else "") + number(min(row[metric.column] for row in known), metric)

    return metric.heading, cell


def cache_table(comparison: Comparison) -> str:
    """The cache after decoding, when it weighs as much as the model, each device's part; empty where nobody says."""
    variants, baseline = comparison.variants, comparison.baseline
    devices = list(dict.fromkeys(n for each in variants for n in each.facts.get("kv_cache_bytes_by_devices", {})))
    known = [metric for metric in CACHE_HELD if _is_known(variants, metric)] + [EQUALS_WEIGHTS] * bool(devices)
    columns: list[tuple[str, Cell]] = [("variant", _name_cell)]
    columns += [_exact_column(variants, baseline, metric) for metric in known]
    columns += [_device_column(n) for n in devices]
    return _table(variants, columns) if known else ""


def _device_column(devices: str) -> tuple[str, Cell]:
    def cell(variant: Variant) -> str:
        return number(variant.facts.get("kv_cache_bytes_by_devices", {}).get(devices), CACHE)

    return f"KV cache a device, {devices} of them (bytes)", cell


def _is_known(variants: Sequence[Variant], metric: Metric) -> bool:
    return any(each.exact(metric.column) is not None or each.by_seed(metric.column) for each in variants)


def _name_cell(variant: Variant) -> str:
    return escape(variant.name)


def _measured_column(variants: Sequence[Variant], metric: Metric) -> tuple[str, Cell]:
    winners = best(variants, metric)
    return metric.heading, lambda each: measured_cell(each, metric, winners)


def _exact_column(variants: Sequence[Variant], baseline: Variant | None, metric: Metric) -> tuple[str, Cell]:
    winners = best(variants, metric)
    return metric.heading, lambda each: exact_cell(each, baseline, metric, winners)


def _table(variants: Sequence[Variant], columns: Sequence[tuple[str, Cell]]) -> str:
    headers = [escape(heading) for heading, _ in columns]
    return table(headers, [[cell(each) for _, cell in columns] for each in variants])


def footnotes(comparison: Comparison) -> list[str]:
    """What the marks in the tables mean."""
    is_trained = not without_training(comparison.variants)
    notes = [
        "**Bold**: the best exact value (all that share it), or a measured one that is clearly better than every "
        "other in this table; no bold: no clear winner. Times, speeds and energies are those of trials: interleaved "
        "repeats judge them where there are any, else the speed of training may be bold, where an A/A check of the "
        "machine stands behind every trial. ±: sample standard deviation over seeds."
    ]
    if any(has_other_budget(each, comparison.baseline) for each in comparison.variants):
        unequal = ": the loss is not at equal budget" if is_trained else ""
        notes.append(f"{UNEQUAL} over 2 % away from the baseline's budget{unequal}.")
    if is_trained and any(each.seeds != each.planned for each in comparison.variants):
        notes.append(f"{FEWER} fewer seeds than planned stand behind this value.")
    return notes
