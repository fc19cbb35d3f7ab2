"""The A/A check of a machine: one model timed against itself, so that every difference is noise, or a fault.

The model is a file's baseline, or a small one of its own. Each time is that of a fresh process, as in the repeats of an
experiment. What is found is kept beside the calibration, and stands behind the timings of later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ablate import calibration, child, rounds
from ablate.experiment import Experiment
from ablate.interleaved import Rounds
from ablate.machine import Resources
from ablate.metrics import TIMED
from ablate.rounds import Row
from ablate.stats import ALPHA, COARSEST, MOST_REPEATS, POWER, SOUGHT, Ratio, finite, repeats_needed, smallest_visible

OWN_MODEL = """\
name: built-in
baseline: {d_model: 128, n_layers: 2, n_heads: 4, max_seq_len: 256}
train: {steps: 100, seq_len: 128, batch_tokens: 1024}
profile: {prefill: {tokens: [128]}, decode: {context: [128], new_tokens: 32}}
"""


def own_experiment() -> Experiment:
    """The model that is timed where no file says which."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "built-in.yaml")
        file.write_text(OWN_MODEL, encoding="utf-8")
        return Experiment.from_file(file)


def check(
    experiment: Experiment,
    resources: Resources,
    repeats: int,
    stopped: Callable[[], bool],
    watcher: rounds.Watcher,
) -> dict[str, Any] | None:
    """What an experiment's baseline takes against itself, also kept for later; None where it was `stopped`."""
    with child.environment(resources.threads):
        child.warm_up(child.context(resources.device))
    threads = experiment.baseline.settings.train.threads or resources.threads
    known, why = calibration.calibrate(resources.device, threads, stopped=stopped)
    contrast = rounds.contrast([experiment.baseline], resources.device, resources.threads)
    with TemporaryDirectory() as folder:
        done = rounds.carry_out(contrast, range(repeats), Path(folder, "log"), stopped, watcher)
        rows = [row for _, found in done for row in found]
    if stopped():
        return None
    compared = max(1, len(experiment.variants) - 1)
    facts = {"model": experiment.name, "repeats": repeats, **_found(rows, compared)}
    if why is None and facts["figures"]:
        calibration.keep_aa(known, facts)
    machine = {"device": resources.device, "device_name": known.get("device_name"), "threads": threads}
    return {**machine, **facts, "fault": why}


def _found(rows: list[Row], variants: int) -> dict[str, Any]:
    timed = Rounds(rows)
    contrasts = variants * len(timed.timings)  # as they are judged in an experiment that compares so many
    figures = {TIMED[kind]: figure(timed.against_itself(kind), contrasts) for kind in timed.timings}
    loads = [load for row in rows if (load := finite(row["other_load_cores"])) is not None]
    failed = [f"{row['status']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "figures": figures,
        "contrasts": contrasts,
        "inside": bool(figures) and all(each["inside"] for each in figures.values()),
        "other_load_cores": max(loads, default=None),
        "failed": failed,
    }


def figure(check: Ratio, contrasts: int) -> dict[str, Any]:
    """One A/A check as plain data; what its rounds do not give is None. What could be seen, and what it takes to see
    more, is reckoned for a variant's time as one of so many `contrasts`.
    """
    sd, n = check.sd, check.n
    return {
        "ratio": check.mean,
        "ratio_low": check.low,
        "ratio_high": check.high,
        "sd": sd,
        "n": n,
        "inside": check.holds_equality,
        "smallest_visible": None if sd is None else smallest_visible(sd, n, ALPHA / contrasts),
        "repeats_needed": None if sd is None else repeats_needed(sd, n, contrasts=contrasts),
    }


HEADS = (
    "time",
    "against itself, 95 % interval",
    "difference",
    "noise (sd)",
    f"seen with {POWER * 100:.0f} %",
    f"rounds to see {SOUGHT * 100:.0f} %",
)


def lines(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The figures for people, under `HEADS`."""
    kinds = {metric: kind for kind, metric in TIMED.items()}
    return [(kinds[metric], *_line(each)) for metric, each in facts["figures"].items()]


def _line(each: Mapping[str, Any]) -> tuple[str, ...]:
    if each["sd"] is None:
        return ("n/a", "no interval", "n/a", "n/a", "n/a")
    low, mean, high = (100 * (each[name] - 1) for name in ("ratio_low", "ratio", "ratio_high"))
    return (
        f"{mean:+.2f} % [{low:+.2f}, {high:+.2f}]",
        "none seen" if each["inside"] else "DIFFERS",
        f"{100 * each['sd']:.2f} %",
        _visible(each["smallest_visible"]),
        f"{each['repeats_needed'] or f'none up to {MOST_REPEATS}'}",
    )


def _visible(share: float) -> str:
    return f"{100 * share:+.2f} %" if share <= COARSEST else f"over {100 * COARSEST:+.0f} %"


def verdict(facts: Mapping[str, Any]) -> str:
    """What the figures come to, and where they come from."""
    load = facts["other_load_cores"]
    busy = "" if load is None else f"; other programs kept up to {load:.1f} cores busy"
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    where = f"{facts['device']}: {facts['device_name'] or 'n/a'}, {threads}"
    said = [f"{where}; the baseline of {facts['model']}, {facts['repeats']} rounds of two processes{busy}"]
    said += [f"not timed: {why}" for why in dict.fromkeys(facts["failed"])]
    if facts["figures"] and not facts["inside"]:
        said.append("verdicts on times are not to be trusted here: quieten the machine, and check again")
    if facts["contrasts"] > 1:
        said.append(f"what is seen is reckoned for {facts['contrasts']} contrasts judged at once (after Holm)")
    coarse = [each["smallest_visible"] for each in facts["figures"].values() if each["smallest_visible"] is not None]
    if max(coarse, default=0.0) > SOUGHT:
        said.append(f"too noisy for so few rounds: a slowdown of {SOUGHT * 100:.0f} % would mostly go unseen")
    return "\n".join(said)
