"""Under which conditions the numbers came about, and what in them a careful reader must know."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Literal

from ablate.interleaved import Rounds
from ablate.metrics import METRICS, TIMED, Timing
from ablate.report import executed, tuning
from ablate.report.comparison import LOSS
from ablate.report.evidence import (
    ONLY_PROFILED,
    Evidence,
    Row,
    Variant,
    aa_of_machine,
    profiles_of,
    without_training,
)
from ablate.report.text import count_of, escape, list_of, plain, significant, text_table
from ablate.stats import MOST_HIDDEN, MOST_REPEATS, finite, repeats_needed

# Rows that differ in one of these are not measured, or not trained, under the same conditions.
SAME_FOR_ALL = {
    "device": "device",
    "gpu_uuid": "GPU",
    "threads": "number of threads",
    "precision": "precision",
    "matmul_peak_flops": "measured matmul peak (FLOP/s), which utilisation is of",
    "param_dtype": "dtype of the parameters",
    "compute_dtype": "dtype of the computation",
    "optimizer_state_dtype": "dtype of the optimizer's state",
    "deterministic": "determinism",
    "torch": "torch version",
    "python": "Python version",
    "ablate": "ablate version",
    "git_commit": "git commit",
    "git_dirty": "git state (dirty)",
    "corpus_sha256": "corpus",
}
# The same of what stands in a row only in other words.
SAME_WORDS_FOR_ALL: Mapping[str, Callable[[Row], str | None]] = {
    "attention kernels": executed.attention_kernels,
    "form of the optimizer": executed.optimizer,
    "compilation of training steps": executed.compilation,
}
# What a speed is turned into where the device's peaks and counters are known, by the speed.
MADE_OF = {
    "train_tokens_per_second": ("mfu", "hfu", "mfu_datasheet", "energy_joules_per_token"),
    "decode_tokens_per_second": ("decode_bandwidth_share", "decode_energy_joules_per_token"),
}
RECIPE = ("train.lr", "train.warmup_steps")
OTHER_LOAD = 0.5  # from so many busy cores on, speeds are those of a busy machine
UNLIKE_COMPANY = 0.3  # from this difference in trials at once on, speeds are not measured alike


# --- What ran ---------------------------------------------------------------------------------------------------------


def what_ran(evidence: Evidence, links: Mapping[str, str]) -> str:
    """Counts, seeds, recipe, data, machine and how to run it again."""
    lines = [f"- {label}: {text}" for label, text in _facts(evidence) if text]
    if evidence.command:
        lines.append(f"- Run again:\n\n  ```sh\n  {plain(evidence.command)}\n  ```")
    if links:
        listed = ", ".join(f"[{escape(label)}](<{_target(url)}>)" for label, url in links.items())
        lines.append(f"- MLflow (start `python -m ablate ui` first): {listed}")
    return "## What ran\n\n" + "\n".join(lines)


def _facts(evidence: Evidence) -> Iterator[tuple[str, str]]:
    document = evidence.experiment
    yield "Trials", _outcomes(evidence)
    yield "Plan", _plan(document.get("counts") or {})
    yield "Seeds", ", ".join(escape(seed) for seed in document.get("seeds") or [])
    tuned = tuning.settings(evidence)
    train = {key: value for key, value in (document.get("train") or {}).items() if f"train.{key}" not in tuned}
    yield "Recipe", _settings(train)
    yield "Tuned for each variant", list_of(tuned)
    yield "Data", _data(document.get("data") or {})
    yield "Machine", _machine(document.get("machine") or {}, evidence)
    yield "Software", _software(evidence)
    yield "Time", _time(evidence)
    yield "Not measured", _unmeasured(evidence)
    yield "Ignored files", "; ".join(escape(each) for each in evidence.results.skipped)


def _outcomes(evidence: Evidence) -> str:
    if tuning.is_under_way(evidence):
        to_come = (evidence.experiment.get("counts") or {}).get("trials") or 0
        return f"{count_of(to_come, 'trial')} to come when tuning is over"
    counts = sorted(evidence.outcomes.items(), key=lambda item: (item[0] != "ok", item[0]))
    listed = ", ".join(f"{number:,} {escape(word)}" for word, number in counts)
    refused = len(evidence.experiment.get("invalid") or [])
    more = f"; {count_of(refused, 'variant')} refused as invalid and not run" if refused else ""
    return (f"{evidence.planned:,} planned: {listed}" if listed else "none planned") + more


def _plan(counts: Mapping[str, Any]) -> str:
    words = ("raw", "excluded", "invalid", "merged", "planned")
    listed = [f"{escape(counts[word])} {word}" for word in words if counts.get(word) is not None]
    return "variants: " + ", ".join(listed) if listed else ""


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{escape(key)} {escape(_value(value))}" for key, value in settings.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, bool | Mapping | list):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _data(data: Mapping[str, Any]) -> str:
    parts = [escape(data["description"])] if data.get("description") else []
    for key, words in (("train_tokens", "training tokens"), ("validation_tokens", "validation tokens")):
        if data.get(key) is not None:
            parts.append(f"{data[key]:,} {words}")
    if data.get("sha256"):
        parts.append(f"sha256 {escape(str(data['sha256'])[:16])}")
    return "; ".join(parts)


def _machine(machine: Mapping[str, Any], evidence: Evidence) -> str:
    parts = [*_seen(evidence, "device"), *_seen(evidence, "device_name")]
    if threads := _seen(evidence, "threads"):
        parts.append(f"{' or '.join(threads)} {'thread' if threads == ['1'] else 'threads'} a trial")
    parts += _at_once(machine, evidence)
    if machine.get("memory_bytes"):
        parts.append(f"{machine['memory_bytes'] / 2**30:,.1f} GiB memory")
    parts += [escape(machine["os"])] if machine.get("os") else []
    return ", ".join(parts)


def _at_once(machine: Mapping[str, Any], evidence: Evidence) -> Iterator[str]:
    """As the rows tell it, or else the plan: what shares a machine with others is slower."""
    seen = evidence.range_of("trials_at_once") or (machine.get("workers") or 1,) * 2
    if seen[1] > 1:
        yield f"{' to '.join(dict.fromkeys(f'{each:.3g}' for each in seen))} trials at a time"


def _software(evidence: Evidence) -> str:
    """As the rows tell it: what the numbers were measured with, not what wrote this report."""
    names = (("python", "Python"), ("torch", "torch"), ("ablate", "ablate"))
    parts = [f"{label} {' and '.join(found)}" for column, label in names if (found := _seen(evidence, column))]
    commits = _seen(evidence, "git_commit")
    dirty = ", with uncommitted changes (dirty)" if _is_dirty(evidence) else ""
    parts.append(f"git commit {' and '.join(commits)}{dirty}" if commits else "git commit unknown")
    return ", ".join(parts) if evidence.rows else ""


def _seen(evidence: Evidence, column: str) -> list[str]:
    """The values of a column among the stored trials, each once."""
    return list(dict.fromkeys(escape(row[column]) for _, row in evidence.rows if row.get(column) is not None))


def _is_dirty(evidence: Evidence) -> bool:
    return any(row.get("git_dirty") for _, row in evidence.rows)


def _time(evidence: Evidence) -> str:
    known = [finite(row.get("wall_seconds")) for _, row in evidence.rows]
    seconds = sum(each for each in known if each is not None)
    return f"{significant(float(seconds), 3)} s in all trials together" if seconds else ""


def _unmeasured(evidence: Evidence) -> str:
    """What no trial has although all have what it is made of: this machine could not, or not then."""
    absent = [
        escape(METRICS[name].label)
        for base, names in MADE_OF.items()
        for name in names
        if evidence.range_of(base) and not evidence.range_of(name)
    ]
    why = "`python -m ablate doctor` tells what this machine lacks for it"
    return f"{'; '.join(absent)} ({why})" if absent else ""


def _target(url: str) -> str:
    return plain(url).replace("<", "%3C").replace(">", "%3E").replace(" ", "%20").replace("\\", "%5C")


# --- Read with care ---------------------------------------------------------------------------------------------------


def cautions(evidence: Evidence) -> str:
    """What limits the conclusions; empty where nothing does."""
    lines = [f"- {caution}" for caution in _cautions(evidence)]
    return "## Read with care\n\n" + "\n".join(lines) if lines else ""


def _cautions(evidence: Evidence) -> Iterator[str]:
    yield from _only_profiled(evidence)
    yield from _single_seed(evidence)
    if not without_training(evidence.variants):
        yield from _shared_recipe(evidence)
    yield from tuning.cautions(evidence)
    yield from _many_comparisons(evidence)
    yield from _corpus_passes(evidence)
    yield from _unlike_company(evidence)
    yield from _profiled_otherwise(evidence)
    yield from _profiled_in_other_ways(evidence)
    yield from _held_back(evidence)
    yield from _busy_machine(evidence)
    yield from _beyond_the_peak(evidence)
    yield from _withheld_timings(evidence)
    yield from executed.faults(evidence)
    for column, label in SAME_FOR_ALL.items():
        yield from _differing(evidence, label, itemgetter(column))
    for label, words in SAME_WORDS_FOR_ALL.items():
        yield from _differing(evidence, label, words)
    yield from _other_batches(evidence)
    yield from _other_objectives(evidence)
    if _is_dirty(evidence):
        yield "The code had changes that are not in its git commit."


def _only_profiled(evidence: Evidence) -> Iterator[str]:
    names = [each.name for each in evidence.variants if each.outcomes[ONLY_PROFILED]]
    if names:
        who = "All variants were" if len(names) == len(evidence.variants) else f"{list_of(names)}:"
        yield (
            f"{who} only profiled: there is no loss, and speed and memory of training are those of at most 20 "
            "steps at a learning rate of 0, with the weights as they were drawn."
        )


def _single_seed(evidence: Evidence) -> Iterator[str]:
    alone = [each.name for each in evidence.variants if 1 in (each.planned, each.summary(LOSS.column).n)]
    if alone:
        yield f"One seed only, so that no ± and no verdict is given: {list_of(alone)}."


def _shared_recipe(evidence: Evidence) -> Iterator[str]:
    if set(tuning.settings(evidence)) & set(RECIPE):
        return
    others = [each for each in evidence.variants if not each.is_baseline]
    sharing = [each.name for each in others if not any(key in each.changes for key in RECIPE)]
    if not sharing:
        return
    who = "All variants" if len(sharing) == len(others) else f"The baseline and {list_of(sharing)}"
    train = evidence.experiment.get("train") or {}
    known = [f"{name} {train[key]}" for key, name in (("lr", "lr"), ("warmup_steps", "warm-up steps")) if key in train]
    recipe = f" ({escape(', '.join(known))})" if known else ""
    yield (
        f"{who} share one learning rate and warm-up{recipe}, tuned for none of them: "
        "a lower loss may mean that the variant suits this recipe."
    )


def _many_comparisons(evidence: Evidence) -> Iterator[str]:
    baseline = evidence.baseline
    others = [each for each in evidence.variants if not each.is_baseline]
    contrasts = sum(each.against(baseline, LOSS).n > 1 for each in others) if baseline else 0
    if contrasts > 1:
        yield (
            f"{contrasts} variants are compared with one baseline. Verdicts on losses are corrected for that (Holm), "
            f"the 95 % intervals are not: about {significant(contrasts * 0.05, 2)} would exclude zero by chance."
        )


def _corpus_passes(evidence: Evidence) -> Iterator[str]:
    known = (finite(row.get("corpus_passes")) for _, row in evidence.rows)
    passes = sorted({round(each, 1) for each in known if each is not None and each > 1})
    if passes:
        upto = "up to " if len(passes) > 1 else ""
        yield f"The corpus was read {upto}{passes[-1]:g} times: training repeats its text."


def _unlike_company(evidence: Evidence) -> Iterator[str]:
    seen = evidence.range_of("trials_at_once")
    if seen and seen[1] - seen[0] > UNLIKE_COMPANY:
        yield (
            f"Speeds and times were measured with between {seen[0]:.1f} and {seen[1]:.1f} trials at once: "
            "compare them with care."
        )


_PROFILED_BY = {"torch": "torch", "device_name": "device", "gpu_uuid": "GPU", "git_commit": "commit of the code"}
"""What a profile that was measured later should have in common with the training beside it."""


def _profiled_otherwise(evidence: Evidence) -> Iterator[str]:
    """Profiles that were measured with something else than the training in the same row."""
    found: dict[str, dict[str, None]] = {}
    for variant, row in evidence.rows:
        of_profile = json.loads(row.get("profile_conditions") or "{}")
        for name, label in _PROFILED_BY.items():
            if of_profile.get(name) not in (None, row.get(name)) and row.get(name) is not None:
                found.setdefault(label, {})[variant.name] = None
    for label, names in found.items():
        yield (
            f"Prefill and decoding of {list_of(list(names))} were measured with another {label} than training: "
            "do not set them side by side."
        )


def _profiled_in_other_ways(evidence: Evidence) -> Iterator[str]:
    """Profiles of other batches, contexts or lengths than others: those of a file that was changed since."""
    found = profiles_of(evidence.variants)
    if len(found) > 1:
        ways = "; ".join(list_of(names, 4) for names in found.values())
        yield (
            f"Not all trials were profiled in the same way ({ways}), so that prefill, decoding, the measured cache and "
            "the largest steps do not compare: `profile` has changed since, and the next `run` measures the rest."
        )


def _held_back(evidence: Evidence) -> Iterator[str]:
    reasons: dict[str, None] = {}
    names: dict[str, None] = {}
    for variant, row in evidence.rows:
        for found in (moment.get("throttle_reasons") for moment in _moments(row)):
            if found is not None and found != "none":
                reasons |= dict.fromkeys(str(found).split(","))
                names[variant.name] = None
    if names:
        yield (
            f"The device was held back ({escape(', '.join(reasons))}) while these were measured: "
            f"{list_of(list(names))}. Compare speeds with care."
        )


def _busy_machine(evidence: Evidence) -> Iterator[str]:
    rows = [row for _, row in evidence.rows if row.get("status") == "ok"]
    loads = [finite(moment.get("other_load_cores")) for row in rows for moment in _moments(row)]
    most = max((load for load in loads if load is not None), default=0.0)
    if most > OTHER_LOAD:
        yield (
            f"Up to {most:.1f} cores were busy with something else while a trial was measured, trials beside it "
            "among that: compare speeds and times with care."
        )


def _moments(row: Row) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What went on around the training of a trial, and around its profile."""
    return row, json.loads(row.get("profile_conditions") or "{}")


def _beyond_the_peak(evidence: Evidence) -> Iterator[str]:
    """Trials that did more than their device is known to be able to do, so that their share of it is none."""
    names = [each.name for each in evidence.variants if any(map(_is_beyond_the_peak, each.rows))]
    if names:
        yield (
            f"{list_of(names)} trained faster than the measured matmul peak allows, so that no utilisation is given: "
            "the peak was measured on a busy machine, or is of another device (`ablate doctor` measures it anew)."
        )


def _is_beyond_the_peak(row: Row) -> bool:
    flops, speed = finite(row.get("train_flops_per_token_counted")), finite(row.get("train_tokens_per_second"))
    peak = finite(row.get("matmul_peak_flops"))
    return flops is not None and speed is not None and peak is not None and flops * speed > peak


def _withheld_timings(evidence: Evidence) -> Iterator[str]:
    """Timings without a verdict: those of which the baseline differs from itself, and those that nothing checked."""
    checks = {kind: _check(evidence, kind) for kind in TIMED if _is_timed(evidence, kind)}
    found = {said: ", ".join(kind for kind in checks if checks[kind] == said) for said in checks.values()}
    if "differs" in found:
        yield (
            f"The baseline timed against itself differs ({found['differs']}): verdicts on these times and speeds "
            "are withheld, none is marked as best. Time again on a quieter machine, with more rounds: "
            "`profile: {repeats: n}`."
        )
    if "coarse" in found:
        yield _coarse(evidence.rounds, found["coarse"])
    if "unknown" in found and evidence.rounds.rows:
        yield (
            f"No A/A check stands behind times and speeds ({found['unknown']}), so that none is marked as best: it "
            "takes two rounds or more in which the baseline was timed twice, `profile: {repeats: n}`."
        )
    elif "unknown" in found:
        yield (
            f"No A/A check stands behind times and speeds ({found['unknown']}), so that none is marked as best: "
            "ask for `profile: {repeats: n}`; for training alone `python -m ablate doctor --aa` before a run with "
            "`--workers 1` does too."
        )
    if evidence.rounds.rows:
        yield from _not_repeated(evidence)


def _is_timed(evidence: Evidence, kind: Timing) -> bool:
    ways = (metric.column for metric in METRICS.values() if metric.timing == kind)
    return kind in evidence.rounds.timings or any(evidence.range_of(column) for column in ways)


def _check(evidence: Evidence, kind: Timing) -> Literal["equal", "differs", "coarse", "unknown"]:
    """What stands behind the verdicts: the check of the repeats, or of training without them that of the machine."""
    if evidence.rounds.rows:
        check = evidence.rounds.against_itself(kind)
        if check.holds_equality:
            return "coarse" if check.is_coarse else "equal"
        return "differs" if check.is_clear else "unknown"
    of_machine = {aa_of_machine(variant.rows) for variant in _competing(evidence)} if kind == "step" else set()
    return next((said for said in ("differs", "unknown", "coarse", "equal") if said in of_machine), "unknown")


def _coarse(rounds: Rounds, kinds: str) -> str:
    bound = f"{MOST_HIDDEN * 100:.0f} %"
    if not rounds.rows:
        return (
            f"The A/A check of the machine is too coarse ({kinds}): it may have missed a difference of more than "
            f"{bound}, so that no time or speed is marked as best. Check with more rounds, on a quieter machine: "
            "`python -m ablate doctor --aa --repeats n`."
        )
    checks = [check for kind in TIMED if (check := rounds.against_itself(kind)).holds_equality and check.is_coarse]
    needed = [repeats_needed(each.sd, each.n, MOST_HIDDEN) for each in checks if each.sd is not None]
    enough = [each for each in needed if each is not None]
    rest = f"`profile: {{repeats: {max(enough)}}}`" if len(enough) == len(needed) else f"over {MOST_REPEATS:,} rounds"
    return (
        f"The A/A check of {count_of(max(each.n for each in checks), 'round')} is too coarse ({kinds}): it would miss "
        f"a difference of {bound}, so that only times far from the baseline's have a verdict. At this noise it takes "
        f"{rest}; on a quieter machine fewer."
    )


def _not_repeated(evidence: Evidence) -> Iterator[str]:
    if names := [each.name for each in _competing(evidence) if each.name not in evidence.rounds.members]:
        yield f"Not timed in interleaved repeats, so that no verdict on speed is given: {list_of(names)}."


def _competing(evidence: Evidence) -> list[Variant]:
    return [variant for variant in evidence.variants if variant.competes]


def _differing(evidence: Evidence, label: str, value_of: Callable[[Row], Any]) -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    for variant, row in evidence.rows:
        if row.get("status") == "ok" and (value := value_of(row)) is not None:  # only these are compared
            names = owners.setdefault(str(value), [])
            if variant.name not in names:
                names.append(variant.name)
    if len(owners) > 1:
        listed = "; ".join(f"{escape(value[:120])} ({list_of(names, 4)})" for value, names in owners.items())
        yield f"Not the same {label} in all trials, compare with care: {listed}."


def _other_batches(evidence: Evidence) -> Iterator[str]:
    hashes: dict[int, set[str]] = {}
    for _, row in evidence.rows:
        if row.get("batch_order_hash") is not None and row.get("seed") is not None:
            hashes.setdefault(int(row["seed"]), set()).add(str(row["batch_order_hash"]))
    seeds = [str(seed) for seed, found in sorted(hashes.items()) if len(found) > 1]
    if seeds:
        yield f"Not all variants of one seed saw the same batches (seed {', '.join(seeds)})."


def _other_objectives(evidence: Evidence) -> Iterator[str]:
    tasks = sorted({each.task for each in evidence.variants if each.task})
    if len(tasks) > 1:
        yield f"Not all are taught the same ({list_of(tasks)}): losses compare within one task alone."


# --- The variants -----------------------------------------------------------------------------------------------------


def variants_table(evidence: Evidence) -> str:
    """What each variant changes, and what it says about itself."""
    rows = [[escape(each.name), _changes(each), _notes(each), executed.lines(each.rows)] for each in evidence.variants]
    if not rows:
        return ""
    headers = ["variant", "changes to the baseline", "notes", "what ran"]
    return "## Variants\n\n" + text_table(headers, rows)


def _changes(variant: Variant) -> str:
    if variant.is_baseline:
        return "—"
    # One a line: side by side they make a table wider than any page.
    return "<br>".join(f"{escape(key)}: {escape(_value(value))}" for key, value in variant.changes.items())


def _notes(variant: Variant) -> str:
    return "<br>".join(escape(note) for note in variant.facts.get("notes") or [])
