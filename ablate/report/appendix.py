"""What stands behind the comparisons: profiles, failures, every trial, and what each number means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ablate.metrics import METRICS, metric_of
from ablate.report.comparison import LOSS
from ablate.report.evidence import NOT_FINISHED, Evidence, Row, Variant, outcome_of, shown_outcome
from ablate.report.text import DOES_NOT_APPLY, NOT_MEASURED, escape, number, plain, table, text_table
from ablate.report.timing import CHANCE
from ablate.stats import MOST_HIDDEN, finite

LONGEST_REASON = 300

# Figures of modules that import torch stand here as they are; a test holds them to the code.
HIDDEN = f"{MOST_HIDDEN:.0%}".replace("%", " %")

DEFINITIONS = f"""## What the numbers mean

- validation loss: the sum over all validation tokens divided once by their number, in nats.
- bits/byte: the same sum in bits, divided by the bytes of the text; it compares tokenizers.
- ± : sample standard deviation over the seeds. n: seeds that ended ok with a finite loss.
- difference: variant minus baseline, paired by seed, with a 95 % t interval. An interval that holds zero is
  *no clear difference*; one that excludes zero, of a contrast whose p value after Holm over all variants is over 5 %,
  is *no clear difference (after Holm)*; a single seed has no interval and no verdict.
- further seeds would decide: so many more find a true difference as large as the one that was seen, with {CHANCE}; the
  noise is taken at the upper bound (80 %) of what the seeds so far tell.
- **bold**: an exact value that is the best, or all that share it; of measured values only one that is better than every
  other in the table by the paired t test, after Holm over these, and than the baseline after Holm over all variants.
  Times, speeds and energies of trials are never bold where there are interleaved repeats, which judge them, and else
  only the speed of training, where the machine's A/A check found no difference, would have found one of {HIDDEN}, and
  no trial had another one beside it. Measured figures of trained and of only profiled trials do not compete. ↓ lower
  is better, ↑ higher is better.
- n/a: not measured. —: does not apply. A word such as diverged or OOM: how the trials ended. Only ok trials compete.
- FLOPs per token: matrix products only, of one forward pass at the training length; causal attention counts
  (T+1)/2 keys a query, experts only where active, the output head is in, lookups are 0.
- KV cache, bytes per token: the slope of the cache's size at full length; 0 for a state of fixed size, and
  where nothing is decoded.
- tokens/s: all tokens of the timed steps divided by the time from the first to the end of the last, with what lies
  between steps; evaluation and compilation are left out. Windows: the same over at least 10 steps on end. Data wait,
  forward, backward and optimizer are parts of a step, which is timed alone.
- time against the baseline: the geometric mean over rounds of a variant's time by the baseline's, each round in fresh
  processes one after the other, with a 95 % t interval of the logarithms; its verdict is after Holm over all times of
  all variants. By ranks: a Mann-Whitney test of the same times, which decides nothing. A/A: the baseline at the end of
  a round by the baseline at its beginning; where that interval excludes equality, verdicts on this time are withheld.
  Seen with {CHANCE}: the slowdown that so many rounds find at this noise. An A/A check that finds so surely
  only more than {HIDDEN} is too coarse: a verdict has then only a variant whose whole interval lies beyond what the
  check finds, to either side, since so large an effect of the order in a round, or of chance, would have been seen.
- single values: every timed step, reading and generation is kept in `profiles` with its number (`sample`), up to
  10,000 a series; of a longer one every second, third, … value.
- compiled: whether training steps ran through torch.compile to the end, by its own record. Graph breaks: places where
  Python stands between compiled parts. Compilation: the time that it took, before the timed steps; parts that an
  earlier trial compiled come out of torch's cache in less. Kernels in training are those of the compiled step;
  evaluation, decoding, counted FLOPs and the split of memory are of the model as it is written, compiled or not.
- peak allocated, peak reserved: what tensors held on a GPU, what its allocator held. device used: the most that NVML
  saw in use of a GPU, by anybody, while the trial trained; of a slice of one, or without NVML, what the driver said
  after training. peak RSS: the largest resident memory of the trial's own process, from the start of its set-up:
  its gates, evaluation and all that it measures are in it.
- peak of live tensors: the most bytes that tensors held at once in a training step after training, as operators end.
  Activations: what its forward pass left for the backward pass, logits and loss among it.
- largest batch, largest sequence: the most sequences of the training length, and the most tokens of one sequence, with
  which a whole training step in one piece, optimizer state included, fits into the memory that was free before the
  trials, of which on a CPU a tenth is kept back. The step is of the model as it is written, never a compiled one.
  Exact below 16, else to an eighth: the figure did fit. ≥: not memory ended the search, but a step's time (20 s) or our
  upper end (65,536 sequences, 1,048,576 tokens).
- KV cache in memory: what stayed in memory after decoding in the first cell of the profile. On each of n devices: of a
  full-length sequence, where devices share the query heads and a key/value head is copied to all that read it.
- model FLOPs utilisation (MFU): three times the FLOPs per token, by tokens/s, of the matmul peak that was measured on
  this device with the same threads and precision; of the data sheet: of the dense peak that the maker promises.
  hardware FLOPs utilisation (HFU): the same of the FLOPs that were executed, with what is computed twice.
- prefill and decoding, outside of the profile: of the first batch and the first length that the file has; of a further
  token, with the first number of new tokens that has one.
- first token: reading the prompt, measured in each cell of decoding anew. decode: the time of the n - 1 further tokens
  by n - 1. path: an attention that can read its cache in several ways is measured in each; outside of the profile the
  figures are those of the way that its settings choose.
- decode, share of the copy's bandwidth: the bytes that a step must read by its time, of what a bare copy on this device
  reads and writes a second. Those bytes are each weight that it computes with, once (experts only where active, of
  tables of embeddings the rows looked up, the output head in full), and the whole batch's cache after context + half of
  the new tokens. Over 100 % where the processor's own caches hold a part of it. n/a also where it is not known what a
  step reads: experts with several sequences at once, a decoder that reads another sequence.
- energy, J/token: what the device that computes drew, a GPU by NVML, a CPU with its memory by RAPL; only while no other
  trial ran beside. decode energy: that of a written token, without reading its prompt."""


# --- Profiles ---------------------------------------------------------------------------------------------------------

OWN_SECTION = {"lengths", "capacity"}
"""Phases that are shown elsewhere."""

CELL = ("batch", "context", "new_tokens", "path")
"""What names a cell of a phase; what no row of a phase has gets no column."""

MOST_METRICS = 6
"""So many beside what names a cell fit a screen."""

Place = tuple[int, *tuple[Any, ...]]
"""A variant's place, then what `CELL` says."""


def profiles(evidence: Evidence) -> str:
    """A table a phase: each variant in each cell of batch and context; empty where nothing was profiled."""
    phases = sorted(
        {str(row["phase"]) for rows in evidence.profiles.values() for row in rows} - OWN_SECTION,
        key=lambda phase: (_rank(phase), phase),
    )
    tables = [(phase, phase_table(evidence, phase)) for phase in phases]
    parts = [f"### {escape(phase)}\n\n{text}" for phase, text in tables if text]
    if not parts:
        return ""
    intro = (
        "Median over the trials that ended ok (n); in brackets the spread: within a trial (p90 - p10), or between the "
        "trials (largest - smallest) where that is wider. Of two middle trials the geometric mean, so that times and "
        "speeds tell the same."
    )
    return "\n\n".join(["## Profiles", intro, *parts])


def _rank(phase: str) -> int:
    known = ["train", "prefill", "decode"]
    return known.index(phase) if phase in known else len(known)


def phase_table(evidence: Evidence, phase: str) -> str:
    """Each variant in each cell; where that is too wide for a screen, several tables, times and speeds first."""
    cells = _cells(evidence, phase)
    metrics = list(dict.fromkeys(name for found in cells.values() for name in found))
    return "\n\n".join(_cells_table(evidence, cells, part) for part in _side_by_side(metrics))


def _cells(evidence: Evidence, phase: str) -> dict[Place, dict[str, list[Row]]]:
    """The rows of each cell by metric, in the order in which they are shown."""
    cells: dict[Place, dict[str, list[Row]]] = {}
    for place, variant in enumerate(evidence.variants):
        for row in profile_rows(evidence, variant, phase):
            at = cells.setdefault((place, *(row[name] for name in CELL)), {})
            at.setdefault(str(row["metric"]), []).append(row)
    return dict(sorted(cells.items(), key=lambda item: [(each is not None, each) for each in item[0]]))


def data(evidence: Evidence) -> list[dict[str, Any]]:
    """The profiles for machines: a cell of a phase each, with its figures."""
    return [
        {
            **{"variant": evidence.variants[cell[0]].name, "phase": phase, **dict(zip(CELL, cell[1:], strict=True))},
            "values": {name: figure for name, rows in found.items() if (figure := _figure(rows))},
        }
        for phase in sorted({str(row["phase"]) for rows in evidence.profiles.values() for row in rows})
        for cell, found in _cells(evidence, phase).items()
    ]


def _side_by_side(metrics: Sequence[str]) -> list[Sequence[str]]:
    if len(metrics) <= MOST_METRICS:
        return [metrics]
    timed = [name for name in metrics if metric_of(name).timing]
    kinds = (timed, [name for name in metrics if name not in timed])
    return [kind[i : i + MOST_METRICS] for kind in kinds for i in range(0, len(kind), MOST_METRICS)]


def _cells_table(evidence: Evidence, cells: Mapping[Place, Mapping[str, Sequence[Row]]], metrics: Sequence[str]) -> str:
    told = [i for i, name in enumerate(CELL, 1) if i < 3 or any(cell[i] is not None for cell in cells)]
    headings = [CELL[i - 1].replace("_", " ") for i in told]
    headers = ["variant", *headings, *(escape(metric_of(name).heading) for name in metrics), "n"]
    rows = [
        [
            escape(evidence.variants[cell[0]].name),
            *(_cell_name(cell[i]) for i in told),
            *(_profile_cell(found.get(name, []), name) for name in metrics),
            str(max(len(each) for each in found.values())),
        ]
        for cell, found in cells.items()
    ]
    return table(headers, rows)


def _cell_name(value: Any) -> str:
    if value is None:
        return DOES_NOT_APPLY
    return f"{value:,}" if isinstance(value, int) else escape(value)


def profile_rows(evidence: Evidence, variant: Variant, phase: str) -> Iterator[Row]:
    """What its trials that ended ok have of a phase."""
    for trial in variant.rows:
        if trial.get("status") == "ok":
            yield from (row for row in evidence.profiles.get(str(trial["trial_id"]), []) if row["phase"] == phase)


def _profile_cell(rows: Sequence[Row], name: str) -> str:
    if not (found := _figure(rows)):
        return NOT_MEASURED
    metric = metric_of(name)
    text = number(found["median"], metric)
    return f"{text} ({number(found['spread'], metric)})" if "spread" in found else text


def _figure(rows: Sequence[Row]) -> dict[str, float]:
    """The median of the trials and their spread, with their number; nothing where none has a value."""
    values = [value for row in rows if (value := finite(row["value"])) is not None]
    spreads = [spread for row in rows if (spread := finite(row["spread"])) is not None]
    if not values:
        return {}
    between = max(values) - min(values)
    told = {"spread": max(_median(spreads or [0.0]), between)} if spreads or between else {}
    return {"median": _median(values), **told, "n": len(values)}


def _median(values: Sequence[float]) -> float:
    """Whole numbers that agree stay whole."""
    if len(set(values)) == 1:
        return values[0]
    low, high = statistics.median_low(values), statistics.median_high(values)
    return math.sqrt(low * high) if low > 0 and low != high else (low + high) / 2


# --- Failures ---------------------------------------------------------------------------------------------------------


def failures(evidence: Evidence) -> str:
    """Every trial that did not end ok, and every variant that the plan refused."""
    rows = [_failure(variant, row) for variant, row in evidence.rows if row.get("status") != "ok"]
    parts = ["## Failures"]
    if rows:
        headers = ["variant", "seed", "outcome", "phase", "step", "reason", "log"]
        parts += [text_table(headers, rows), "Logs are in the folder of the results."]
    elif evidence.rows:
        parts.append("None: every trial that finished ended ok.")
    else:
        parts.append("No trial has finished.")
    invalid = [
        [escape(each.get("variant")), _reason(each.get("reason"))] for each in evidence.experiment.get("invalid") or []
    ]
    if invalid:
        parts += [
            "Variants that cannot be built and were not run:",
            text_table(["variant", "reason"], invalid),
        ]
    return "\n\n".join(parts)


def _failure(variant: Variant, row: Row) -> list[str]:
    step = row["diverged_step"] if row.get("diverged_step") is not None else row.get("steps")
    return [
        escape(variant.name),
        _text(row.get("seed")),
        escape(shown_outcome(str(row.get("status")))),
        _text(row.get("phase")),
        NOT_MEASURED if step is None else f"{step:,}",
        _reason(row.get("reason")),
        _text(row.get("log")),
    ]


def _text(value: Any) -> str:
    return NOT_MEASURED if value is None else escape(value)


def _reason(reason: Any) -> str:
    if reason is None:
        return NOT_MEASURED
    text = plain(reason)
    return escape(text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…")


# --- Every trial ------------------------------------------------------------------------------------------------------


def all_trials(evidence: Evidence) -> str:
    """The row of every planned trial, as it is stored."""
    rows = [line for variant in evidence.variants for line in sorted(_trial_lines(variant), key=_by_seed)]
    headers = [
        "variant",
        "seed",
        "trial",
        "outcome",
        LOSS.heading,
        METRICS["wall_seconds"].heading,
        "attempts",
    ]
    if not rows:
        return ""
    parts = [
        "## All trials",
        "<details>",
        "<summary>Show the table</summary>",
        text_table(headers, rows),
        "</details>",
    ]
    return "\n\n".join(parts)


def _by_seed(line: Sequence[str]) -> tuple[int, str]:
    seed = line[1]
    return (int(seed), "") if seed.isdecimal() else (-1, seed)


def _trial_lines(variant: Variant) -> Iterator[list[str]]:
    name = escape(variant.name)
    for row in variant.rows:
        outcome = escape(outcome_of(row))
        loss = number(row.get("val_loss"), LOSS)
        yield [
            name,
            _text(row.get("seed")),
            _text(row.get("trial_id")),
            outcome,
            outcome if loss == NOT_MEASURED and outcome != "ok" else loss,
            number(row.get("wall_seconds"), METRICS["wall_seconds"]),
            _text(row.get("attempts")),
        ]
    for seed in variant.unfinished:
        blank = [DOES_NOT_APPLY] * 3
        yield [name, escape(seed), escape(variant.trials[seed]), NOT_FINISHED, *blank]
