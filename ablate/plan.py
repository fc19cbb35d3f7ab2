"""What an experiment would run and what each variant costs, reckoned without running anything."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ablate import search
from ablate.batches import check_corpus
from ablate.budget import PASSES
from ablate.choice import Faults, SettingsError
from ablate.cost import (
    Cost,
    cache_bytes,
    cache_bytes_by_devices,
    cache_bytes_per_token,
    cost,
    lengths,
    tokens_that_weigh_as_much,
    training_bytes,
)
from ablate.document import as_text, printable, told
from ablate.experiment import Experiment
from ablate.machine import available_threads
from ablate.meta import count_parameters
from ablate.model import Transformer
from ablate.objectives import task_of
from ablate.profiling import decode
from ablate.settings import LAYER_SLOTS
from ablate.variant import Variant

_SIZE_OF_A_STEP = ("train.batch_tokens", "train.accumulate")


@dataclass(frozen=True)
class VariantPlan:
    """A variant's costs. Times and memory are rough predictions, everything else is exact."""

    variant: Variant
    cost: Cost
    kv_cache_bytes_per_token: int | None
    kv_cache_bytes_by_devices: dict[int, int | None]
    kv_cache_equals_weights_at_tokens: int | None
    predicted_memory_bytes: int
    predicted_seconds: float | None

    @property
    def train_tokens(self) -> int | None:
        """Tokens of a training; None where its seconds are given, and nobody knows before."""
        train = self.variant.settings.train
        return None if train.planned_steps is None else train.planned_steps * train.batch_tokens

    @property
    def train_flops(self) -> float | None:
        """FLOPs of a training; None too where a choice does not tell its own."""
        forward, tokens = self.cost.flops_per_token, self.train_tokens
        return None if forward is None or tokens is None else PASSES * forward * tokens

    def facts(self) -> dict[str, Any]:
        """As `plan --json` and `experiment.json` give it."""
        return {
            "name": self.variant.name,
            "is_baseline": self.variant.is_baseline,
            "changes": self.variant.changes,
            "groups": self.variant.groups,
            "params_total": self.cost.params_total,
            "params_active": self.cost.params_active,
            "params_embedding": self.cost.params_embedding,
            "params_non_embedding": self.cost.params_non_embedding,
            "flops_per_token": self.cost.flops_per_token,
            "flops_terms": self.cost.flops,
            "kv_cache_bytes_per_token": self.kv_cache_bytes_per_token,
            "kv_cache_bytes_by_devices": {str(n): size for n, size in self.kv_cache_bytes_by_devices.items()},
            "kv_cache_equals_weights_at_tokens": self.kv_cache_equals_weights_at_tokens,
            "steps": self.variant.settings.train.planned_steps,
            "train_tokens": self.train_tokens,
            "train_flops": self.train_flops,
            "matched": self.variant.matched.facts() if self.variant.matched else None,
            "predicted_memory_bytes": self.predicted_memory_bytes,
            "predicted_seconds": self.predicted_seconds,
        }


def plan(experiment: Experiment, *, timed: bool = True) -> list[VariantPlan]:
    """The costs of every variant. `timed` multiplies matrices for a moment, to predict how long training would take."""
    rate = _matmul_flops_per_second() if timed else None
    return [_variant_plan(variant, rate) for variant in experiment.variants]


def _variant_plan(variant: Variant, rate: float | None) -> VariantPlan:
    model, train = variant.settings.model, variant.settings.train
    price = cost(model, train.length)
    return VariantPlan(
        variant=variant,
        cost=price,
        kv_cache_bytes_per_token=cache_bytes_per_token(model, train.precision),
        kv_cache_bytes_by_devices=cache_bytes_by_devices(model, train.precision),
        kv_cache_equals_weights_at_tokens=tokens_that_weigh_as_much(model, price.params_total, train.precision),
        predicted_memory_bytes=_memory_bytes(variant, price.params_total),
        predicted_seconds=train.seconds or _seconds(price, train.n_steps * train.batch_tokens, rate),
    )


def _memory_bytes(variant: Variant, params_total: int) -> int:
    model, train = variant.settings.model, variant.settings.train
    return training_bytes(model, params_total, train.batch_tokens // train.length // train.accumulate, train.length)


def most_bytes(experiment: Experiment, plans: Sequence[VariantPlan]) -> int:
    """What one trial takes at most, as predicted: also at any point at which a variant may be tuned, where a step may
    be larger than the one that the file says.
    """
    found = [each.predicted_memory_bytes for each in plans]
    points = experiment.search.outermost(_SIZE_OF_A_STEP) if experiment.search else []
    for each, point in itertools.product(plans, points):
        with suppress(Faults):  # a grid does not grow to what cannot be
            found.append(_memory_bytes(search.at(each.variant, point), each.cost.params_total))
    return max(found)


def _seconds(price: Cost, tokens: int, rate: float | None) -> float | None:
    """Training's three passes at half of the speed of bare matrix products: right to a factor of two or three."""
    if rate is None or price.flops_per_token is None:
        return None
    return float(f"{PASSES * price.flops_per_token * tokens / (0.5 * rate):.2g}")


def _matmul_flops_per_second() -> float:
    """The best of some rounds: what else the machine does at the moment it does not do to a whole training."""
    import torch

    n, seconds = 512, []
    a = torch.ones(n, n)
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / max(1e-9, min(seconds))


def checked(experiment: Experiment, fatal: Mapping[str, str] = MappingProxyType({})) -> Experiment:
    """The experiment after what only building shows: data too short for a step, a model or a cost that fails.

    Every model is built once without memory, but those that are known to be `fatal`, by the variant's name, with what
    comes of it. What is wrong with the baseline or a named variant raises `FileFaults`; a combination is left out as
    invalid, with the reason.
    """
    found = {each.name: list(_faults(experiment, each, fatal.get(each.name))) for each in experiment.variants}
    alone = [fault for name, faults in found.items() if experiment.is_named(name) for fault in faults]
    if alone:
        raise told(experiment.found, Faults({fault.message: fault for fault in alone}.values()))
    return experiment.without({name: "; ".join(f.message for f in faults) for name, faults in found.items() if faults})


def check_device(experiment: Experiment, device: str) -> None:
    """Raises `FileFaults` where a choice of some variant cannot be trained on the device ("cpu", "cuda")."""
    found = {
        (variant.name, problem): SettingsError(("variants", variant.name), f"variant {variant.name}: {problem}")
        for variant in experiment.variants
        for stack in variant.settings.model.stacks
        for layer, _ in stack.distinct_layers()
        for slot in LAYER_SLOTS
        if (choice := getattr(layer, slot)) is not None and (problem := choice.device_problem(device))
    }
    if found:
        raise told(experiment.found, Faults(found.values()))


def _faults(experiment: Experiment, variant: Variant, fatal: str | None) -> Iterator[SettingsError]:
    try:
        check_corpus(experiment.corpus(variant), variant.settings.train)
    except SettingsError as fault:
        yield fault
    if min(lengths(variant.settings.model, variant.settings.train.length).values()) < 1:
        message = f"train.seq_len {variant.settings.train.length} leaves an encoder-decoder no source"
        yield SettingsError(("train", "seq_len"), message, "give at least 2")
    if (threads := variant.settings.train.threads or 1) > (most := available_threads()):
        message = f"train.threads {threads} is more than the {most} that this process may use"
        yield SettingsError(("train", "threads"), message, f"leave it out, or give at most {most}")
    yield from _tuning_faults(experiment, variant)
    if fatal:
        yield _unbuildable(variant, fatal)
        return
    thin = variant.settings.model.thinned()
    try:
        has = count_parameters(lambda: Transformer(thin))
        promised = cost(thin, variant.settings.train.length).params_total
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's own choice may raise whatever it likes
        yield _unbuildable(variant, f"{type(error).__name__}: {error}")
        return
    if promised != has:
        message = f"variant {variant.name} promises {promised:,} parameters, has {has:,} (each different layer once)"
        yield SettingsError(("variants", variant.name), message, "the fault is in params() of one of its choices")


def _tuning_faults(experiment: Experiment, variant: Variant) -> Iterator[SettingsError]:
    """Where the training split alone, of which tuning holds out a part as well, is too short at some point."""
    for point in experiment.search.first if experiment.search else []:
        tried = search.for_tuning(variant, point)
        try:
            check_corpus(tried.corpus, tried.settings.train)
        except SettingsError as fault:
            message = f"tuning, which holds out a part of the training split as well: {fault.message}"
            yield SettingsError((search.TUNE,), message, fault.cure)


def _unbuildable(variant: Variant, why: str) -> SettingsError:
    message = printable(f"variant {variant.name} cannot be built: {why}")
    return SettingsError(("variants", variant.name), message, "the fault is in the code of one of its choices")


def document(experiment: Experiment, plans: list[VariantPlan], machine: dict[str, Any], command: str) -> dict[str, Any]:
    """The content of `experiment.json`: what was planned, and which trial ids its names mean now."""
    trials = experiment.trials(machine["device"], machine["threads"])
    baseline = experiment.baseline
    corpus = experiment.corpus(baseline)
    return {
        "schema": 1,
        "name": experiment.name,
        "question": experiment.question,
        "file": as_text(experiment.file.replace("\\", "/").rpartition("/")[2]),
        "command": as_text(command),
        "resolved": experiment.source,
        "seeds": experiment.seeds,
        "match": experiment.match,
        "counts": experiment.counts,
        "design": experiment.design_facts(),
        "machine": machine,
        "data": {
            "description": corpus.description,
            "train_tokens": len(corpus.train),
            "validation_tokens": len(corpus.validation),
            "sha256": corpus.sha256,
        },
        "train": baseline.settings.train.model_dump(mode="json"),
        "profile": baseline.settings.profile.model_dump(mode="json"),
        "variants": [
            {
                **each.facts(),
                "task": task_of(each.variant.settings.model),
                "trials": {str(t.seed): t.trial_id for t in trials if t.variant is each.variant},
                "kv_cache_bytes_by_tokens": _cache_curve(each.variant),
                "config": each.variant.settings.model.model_dump(mode="json"),
                "notes": _notes(each.variant),
            }
            for each in plans
        ],
        "invalid": [{"variant": each.name, "reason": each.reason} for each in experiment.invalid],
        "claims": [each.document() for each in experiment.claims],
    }


def _cache_curve(variant: Variant) -> list[list[int]]:
    """Bytes of one sequence's cache at some lengths up to the longest."""
    model, longest = variant.settings.model, variant.settings.model.max_seq_len
    lengths = sorted({max(1, math.ceil(longest * i / 16)) for i in range(1, 17)})
    precision = variant.settings.train.precision
    sizes = [(tokens, cache_bytes(model, 1, tokens, precision)) for tokens in lengths]
    return [[tokens, size] for tokens, size in sizes if size is not None]


def _notes(variant: Variant) -> list[str]:
    stacks = variant.settings.model.stacks
    ends = {stack.name: "yes" if stack.last.block.final_norm else "no" for stack in stacks}
    found = [f"final norm{'' if len(ends) == 1 else f' of the {name}'}: {end}" for name, end in ends.items()]
    why = decode.refusal(variant.settings.model)
    return [*found, f"not decoded: {why}"] if why else found
