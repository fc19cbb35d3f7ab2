"""The report's first page: the question, and one sentence for each contrast with the baseline."""

from __future__ import annotations

from collections.abc import Iterator

from ablate.interleaved import Rounds
from ablate.metrics import METRICS, Metric
from ablate.report import effects, ladder, tuning
from ablate.report.comparison import (
    BUDGET,
    CACHE,
    LOSS,
    UNEQUAL,
    budget_change,
    difference_pairs,
    has_other_budget,
    outcome_text,
)
from ablate.report.contrasts import what_would_decide
from ablate.report.evidence import ONLY_PROFILED, Evidence, Variant, without_training
from ablate.report.text import count_of, escape, interval, list_of, mean_and_sd, ratio, relative_interval
from ablate.report.timing import WITHHELD
from ablate.stats import summarize

SPEED = METRICS["train_tokens_per_second"]
MOST_SENTENCES = 24
NO_VERDICT = "no verdict"
OUTCOMES = ("better", "worse", "no clear difference", NO_VERDICT)


def title(evidence: Evidence) -> str:
    """The experiment's name, its question, and what is still missing."""
    parts = [f"# {escape(evidence.experiment.get('name') or evidence.results.folder.name)}"]
    question = evidence.experiment.get("question")
    if question:
        parts.append(f"> {escape(question)}")
    if said := tuning.progress(evidence):
        parts.append(f"**{said}**")
    if evidence.unfinished:
        are = "is" if evidence.unfinished == 1 else "are"
        total = count_of(evidence.planned, "trial")
        parts.append(f"**{evidence.unfinished:,} of {total} {are} not finished: all below is provisional.**")
    return "\n\n".join(parts)


def summary(evidence: Evidence) -> str:
    """What was found, in sentences that name the difference, its interval, the verdict and the cost."""
    if not evidence.rows:
        return "## Summary\n\nNo result yet: no trial has finished."
    if not any(variant.by_seed(LOSS.column) for variant in evidence.variants) and not _is_profiled(evidence):
        return "## Summary\n\nNo valid result: no trial ended ok with a finite validation loss."
    return "## Summary\n\n" + "\n".join(f"- {sentence}" for sentence in _sentences(evidence))


def _is_profiled(evidence: Evidence) -> bool:
    return any(variant.outcomes[ONLY_PROFILED] for variant in evidence.variants)


def _sentences(evidence: Evidence) -> Iterator[str]:
    baseline = evidence.baseline
    others = [each for each in evidence.variants if not each.is_baseline]
    if baseline is None:
        yield "There is no baseline among these results, so that nothing can be compared with it."
        return
    yield from _in_short(others, baseline)
    yield _baseline_sentence(baseline)
    yield from effects.sentences(evidence)
    yield from filter(None, [ladder.sentence(evidence)])
    shown = others if len(others) <= MOST_SENTENCES else _clearest(others, baseline)
    for each in shown:
        yield _contrast(each, baseline, evidence.rounds)
    if len(shown) < len(others):
        yield f"{count_of(len(others) - len(shown), 'more variant')}: see the tables."


def _clearest(others: list[Variant], baseline: Variant) -> list[Variant]:
    clear = [each for each in others if each.against(baseline, LOSS).is_clear]
    return clear[:MOST_SENTENCES]


def _in_short(others: list[Variant], baseline: Variant) -> Iterator[str]:
    """Who is better, who is worse, and who is neither, before the sentence on each; one variant has its sentence."""
    found: dict[str, list[str]] = {}
    for each in others:
        mark = f" {UNEQUAL}" if has_other_budget(each, baseline) else ""
        found.setdefault(_outcome(each, baseline), []).append(each.name + mark)
    if len(others) < 2 or not found.keys() - {NO_VERDICT}:
        return
    listed = "; ".join(f"**{word}**: {list_of(found[word])}" for word in OUTCOMES if word in found)
    is_unequal = any(has_other_budget(each, baseline) for each in others)
    yield f"In short, against the baseline, {listed}." + (f" ({UNEQUAL} not at equal budget)" if is_unequal else "")


def _outcome(variant: Variant, baseline: Variant) -> str:
    verdict = variant.against(baseline, LOSS).verdict.removesuffix(" (after Holm)")
    return verdict if verdict in OUTCOMES else NO_VERDICT


def _baseline_sentence(baseline: Variant) -> str:
    loss = baseline.summary(LOSS.column)
    name = f"**{escape(baseline.name)}**"
    if without_training([baseline]):
        return f"{name} was only profiled: no loss can be compared with it."
    if not loss.n:
        return f"{name} has {_no_result(baseline)}: no variant can be compared with it."
    return f"{name}: {LOSS.label} {mean_and_sd(loss, LOSS)} {LOSS.unit} ({count_of(loss.n, 'seed')})."


def _contrast(variant: Variant, baseline: Variant, rounds: Rounds) -> str:
    costs = ", ".join(_costs(variant, baseline, rounds))
    return f"**{escape(variant.name)}**: {_loss_part(variant, baseline)}" + (f"; {costs}." if costs else ".")


def _loss_part(variant: Variant, baseline: Variant) -> str:
    loss, difference = variant.summary(LOSS.column), variant.against(baseline, LOSS)
    if not loss.n:
        return _no_result(variant)
    if difference.mean is None:
        why = f"of {variant.task}" if difference.verdict == "another task" else "no seed in common with the baseline"
        return f"{LOSS.label} {mean_and_sd(loss, LOSS)} {LOSS.unit}, {why}"
    if difference.verdict == "single seed":
        return f"{LOSS.label} {interval(difference, LOSS)} {LOSS.unit} on a single seed: no verdict"
    pairs = difference_pairs(difference, variant)
    seeds = count_of(difference.n, "seed") + (" in common" if pairs else "")
    said = f"{difference.verdict}{what_would_decide(difference)}"
    return f"{LOSS.label} {interval(difference, LOSS)} {LOSS.unit} over {seeds}: {said}"


def _no_result(variant: Variant) -> str:
    if not variant.rows:
        return "no result yet"
    if without_training([variant]):
        return ONLY_PROFILED
    why = "no finite loss" if variant.competes else outcome_text(variant)
    return f"no valid result ({why})"


def _costs(variant: Variant, baseline: Variant, rounds: Rounds) -> Iterator[str]:
    """The ratios to the baseline of what is paid: cache, size and speed."""
    for label, metric in (("KV cache", CACHE), ("parameters", METRICS["params_total"])):
        own, theirs = variant.exact(metric.column), baseline.exact(metric.column)
        if own is not None and theirs:
            yield f"{label} {ratio(own / theirs)}"
    speed = _interleaved(variant, baseline, rounds) or _speed_ratio(variant, baseline)
    if speed:
        yield speed
    if has_other_budget(variant, baseline):
        changes = ", ".join(_changes_of_budget(variant, baseline))
        yield f"not at equal budget ({changes})"


def _interleaved(variant: Variant, baseline: Variant, rounds: Rounds) -> str | None:
    """What the repeats say of a training step, as their own table does; None where they did not time it."""
    measured = rounds.against_baseline("step", variant.name)
    if rounds.baseline != baseline.name or measured.mean is None:
        return None
    said = rounds.verdict("step", variant.name)
    return f"a training step, interleaved, takes {relative_interval(measured)}: {'verdict ' * (said == WITHHELD)}{said}"


def _speed_ratio(variant: Variant, baseline: Variant) -> str | None:
    own, theirs = variant.by_seed(SPEED.column), baseline.by_seed(SPEED.column)
    common = sorted(own.keys() & theirs.keys())
    slow, fast = (summarize(each[seed] for seed in common).mean for each in (theirs, own))
    if not slow or fast is None:
        return None
    difference = variant.against(baseline, SPEED)
    if len(variant.extents | baseline.extents) > 1:
        return f"training tokens/s do not compare ({difference.verdict})"
    doubt = "" if difference.is_clear else f" ({difference.verdict})"
    if any(each.is_withheld(SPEED) for each in (variant, baseline)):
        doubt = " (no verdict)"
    return f"training tokens/s {ratio(fast / slow)}{doubt}"


def _changes_of_budget(variant: Variant, baseline: Variant) -> Iterator[str]:
    for metric in BUDGET:
        change = budget_change(variant, baseline, metric)
        if change is not None:
            yield f"{_short_label(metric)} {100 * change:+,.1f} %"


def _short_label(metric: Metric) -> str:
    return metric.label.replace("parameters, ", "") + (" parameters" if metric.column.startswith("params") else "")
