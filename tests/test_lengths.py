"""Time and memory by the length of a sequence: planted growth is found, and nothing of the model changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from references import SMALL

from ablate.choice import Faults
from ablate.model import Transformer, build
from ablate.objectives import Batch, objective_of
from ablate.profiling import lengths
from ablate.profiling.clock import Clock, clock_for
from ablate.settings import VariantSettings, resolved, typed
from ablate.stats import power_law

MODEL = SMALL | {"n_layers": 1, "max_seq_len": 512, "vocab_size": 33}
STEADY = Clock(lambda: 0.0, lambda a, b: 1.0)


pytestmark = pytest.mark.usefixtures("one_thread")


def variant(model: dict[str, Any] | None = None, precision: str = "fp32", **profile: Any) -> VariantSettings:
    train = {"steps": 20, "batch_tokens": 1024, "precision": precision}
    data = {"name": "random_tokens", "vocab_size": 32}
    return resolved(typed({"model": MODEL | (model or {}), "train": train, "data": data, "profile": profile}))


def measured(settings: VariantSettings, model: Transformer, clock: Clock = STEADY, rounds: int = 2) -> list[Any]:
    objective = objective_of(settings.model, 32)

    def sequences(tokens: int) -> Batch:
        windows = np.resize(np.arange(32), (1, tokens + 1))
        return objective.batch(windows, lambda n: np.arange(n, dtype=np.uint64)[None] * np.uint64(7919))

    profile, recipe = settings.profile, settings.train
    return list(lengths.profile(model, model, recipe, profile.lengths, rounds, sequences, clock))


def points(rows: list[Any], metric: str) -> tuple[list[int], list[float]]:
    found = [(row["context"], row["value"]) for row in rows if row["metric"] == f"{metric}_p50"]
    return [context for context, _ in found], [value for _, value in found]


def test_times_that_grow_with_the_square_are_found() -> None:
    settings = variant(lengths=[16, 32, 64, 128])
    model, now = build(settings.model), [0.0]

    def pass_(_: Any, given: Any) -> None:
        now[0] += given[0].shape[1] ** 2

    model.embedding.register_forward_pre_hook(pass_)
    rows = measured(settings, model, Clock(lambda: now[0], lambda a, b: b - a))
    assert points(rows, "inference_seconds") == ([16, 32, 64, 128], [256, 1024, 4096, 16384])
    for metric in ("inference_seconds", "training_pass_seconds"):
        law = power_law(*points(rows, metric))
        assert law is not None
        assert (law.low, law.exponent, law.high, law.local) == pytest.approx((2, 2, 2, 2), abs=1e-9)


def test_the_first_round_is_a_warm_up_and_every_other_one_is_kept() -> None:
    settings = variant(lengths=[8, 16])
    shown = iter(range(1000))
    clock = Clock(lambda: next(shown) ** 2, lambda a, b: b - a)  # reading by reading it goes faster
    rows = measured(settings, build(settings.model), clock, rounds=3)
    for length, first in ((8, 8), (16, 12)):  # a round has four readings for each length in turn; the first is warm-up
        singles = [r for r in rows if (r["context"], r["metric"]) == (length, "inference_seconds")]
        assert [(r["sample"], r["value"]) for r in singles if r["sample"]] == [
            (n + 1, 2 * (first + 8 * n) + 1) for n in range(3)
        ]
        (middle,) = (r for r in rows if (r["context"], r["metric"]) == (length, "inference_seconds_p50"))
        assert middle["value"] == 2 * (first + 8) + 1
        assert middle["spread"] == pytest.approx(0.8 * 32)
    assert {(r["phase"], r["batch"]) for r in rows} == {("lengths", 1)}


def test_scores_that_are_kept_grow_memory_with_the_square_and_a_fused_kernel_does_not() -> None:
    laws = {}
    for kernel in ("math", "sdpa"):
        settings = variant({"attention": {"name": "mha", "kernel": kernel}}, lengths=[64, 128, 256, 512])
        rows = measured(settings, build(settings.model), rounds=1)
        laws[kernel] = power_law(*points(rows, "training_pass_bytes"))
    assert laws["math"].local > 1.6
    assert laws["sdpa"].local == pytest.approx(1.0, abs=0.05)
    assert laws["math"].exponent > laws["sdpa"].exponent + 0.3


def test_memory_is_what_a_pass_adds_to_weights_and_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(100, 100))
    weight.grad = torch.zeros(100, 100)
    model = torch.nn.Module()
    model.register_parameter("weight", weight)

    def work() -> None:
        row = torch.ones(100)  # 400 bytes
        (weight.detach() @ row).sum()  # 400 and 4 more

    assert lengths.peak_bytes(model, work) == 400 + 400 + 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder_decoder"])
def test_every_family_is_measured_and_left_as_it_was(family: str, precision: str) -> None:
    settings = variant({"family": family, "feed_forward": "moe"}, precision, lengths=[8, 16])
    model = build(settings.model).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    rows = measured(settings, model, clock_for(torch.device("cpu")))
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert len(rows) == 2 * 3 * (1 + 2)
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("given", "path", "said", "cure"),
    [
        ([8], ("lengths",), "one length, 8, shows no growth", "at least two"),
        ([8, 8], ("lengths",), "one length, 8, shows no growth", "at least two"),
        ([8, 513], ("lengths", 1), "a length of 513 tokens is more than max_seq_len 512", "raise max_seq_len"),
        ([1, 8], ("lengths", 0), "must be at least 2 (it is 1)", "write 2 or more"),
    ],
)
def test_lengths_that_show_no_growth_are_refused(given: list[int], path: tuple[Any, ...], said: str, cure: str) -> None:
    with pytest.raises(Faults) as caught:
        variant(lengths=given)
    (fault,) = caught.value.faults
    assert fault.path == ("profile", *path)
    assert said in fault.message
    assert cure in fault.cure


def test_without_lengths_there_is_nothing_to_refuse() -> None:
    assert variant(lengths=[]).profile.lengths == []
    assert variant(lengths=[8, "0.5k"]).profile.lengths == [8, 500]


def test_a_length_that_is_given_twice_is_measured_once() -> None:
    settings = variant(lengths=[16, 8, 16])
    assert points(measured(settings, build(settings.model)), "inference_seconds")[0] == [16, 8]
