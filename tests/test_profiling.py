"""What is measured, against answers that are known."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from references import SMALL, to_measure
from torch import nn

from ablate import cost, registry
from ablate import train as trains
from ablate.batches import Batches
from ablate.cache import Cache
from ablate.model import Transformer, build
from ablate.objectives import objective_of
from ablate.profiling import clock, decode, device, flops, kernels, live, memory
from ablate.profiling.watch import Watch
from ablate.settings import resolved, typed
from ablate.train import Learner, state_of, train

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"family": "encoder", "vocab_size": 33},
    "encoder_decoder": {"family": "encoder_decoder", "vocab_size": 33, "encoder": {"n_layers": 3}},
}


def with_attention(name: str) -> dict[str, Any]:
    """And a position scheme that it can have."""
    rotates = "rotate" in registry.config_class("attention", name).offers
    return {"attention": name, "position": "rope" if rotates else "none"}


def prompts(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(32, (batch, tokens), generator=torch.Generator().manual_seed(1))


def fake(times: list[float]) -> clock.Clock:
    """A clock that shows these times one after the other."""
    shown = iter(times)
    return clock.Clock(lambda: next(shown), lambda a, b: b - a)


# --- Time -------------------------------------------------------------------------------------------------------------


def test_throughput_under_a_known_clock() -> None:
    timed = [100.0, 101.0, 200.0, 202.0, 300.0, 305.0]  # 1 s, 2 s and 5 s, and what lies between them
    timer = clock.StepTimer(warmup=1, clock=fake(timed))
    for _ in range(4):
        with timer.step():
            pass
    assert timer.seconds() == {"step": [1.0, 2.0, 5.0]}
    assert timer.whole_seconds() == [1.0, 101.0, 103.0]
    columns = clock.speeds(timer.seconds()["step"], timer.seconds()["step"], tokens=80)
    assert columns["train_tokens_per_second"] == 3 * 80 / 8  # not the mean of 80, 40 and 16
    assert columns["train_tokens_per_second_p50"] == 40
    assert columns["step_seconds_p50"] == 2
    assert columns["step_seconds_p10"] == pytest.approx(1.2)
    assert columns["step_seconds_p90"] == pytest.approx(4.4)
    assert columns["train_tokens_per_second_p10"] == pytest.approx(16 + 0.2 * 24)
    assert columns["train_tokens_per_second_p90"] == pytest.approx(40 + 0.8 * 40)


def test_warm_is_called_once_before_the_first_timed_step() -> None:
    steps: list[int] = []
    calls: list[int] = []
    timer = clock.StepTimer(2, clock.clock_for(CPU), lambda: calls.append(len(steps)))
    for step in range(5):
        with timer.step():
            steps.append(step)
    assert calls == [2]
    assert len(timer.seconds()["step"]) == 3


def test_no_step_is_lost_over_a_long_run() -> None:
    timer = clock.StepTimer(0, fake([float(i) for i in range(2 * 1000)]))
    for _ in range(1000):
        with timer.step():
            pass
    assert timer.seconds() == {"step": [1.0] * 1000}


def test_parts_of_a_step_under_a_known_clock() -> None:
    timer = clock.StepTimer(1, fake([0, 1, 2, 4, 5, 8, 20, 21, 100, 100, 101, 130]))
    with timer.step(), timer.part("forward"):
        pass  # not timed: the clock is not even read
    with timer.step():  # from 0 to 21
        with timer.part("forward"):  # from 1 to 2
            pass
        with timer.part("backward"):  # from 4 to 5
            pass
        with timer.part("forward"):  # from 8 to 20
            pass
    with timer.step(), timer.part("backward"):
        pass
    assert timer.seconds() == {"forward": [13.0, 0.0], "backward": [1.0, 1.0], "step": [21.0, 30.0]}


@pytest.mark.parametrize(
    ("steps", "lengths"), [(1, [1]), (9, [9]), (19, [19]), (20, [10, 10]), (25, [13, 12]), (35, [12, 12, 11])]
)
def test_windows_hold_every_step_once(steps: int, lengths: list[int]) -> None:
    seconds = [float(step) for step in range(1, steps + 1)]
    ends = np.cumsum(lengths)
    known = [80 * n / sum(range(end - n + 1, end + 1)) for n, end in zip(lengths, ends, strict=True)]
    assert clock.windows(seconds, 80) == pytest.approx(known)
    columns = clock.speeds([1.0] * steps, seconds, 80)
    assert columns["step_seconds_p90"] == 1.0, "of a step alone"
    assert columns["window_tokens_per_second_p50"] == pytest.approx(np.median(known))


def test_a_slower_variant_is_that_much_slower() -> None:
    times = ([factor * s for s in (1.0, 2.0, 4.0)] for factor in (1, 2))
    fast, slow = (clock.speeds(seconds, seconds, 80) for seconds in times)
    assert slow["train_tokens_per_second"] == fast["train_tokens_per_second"] / 2
    assert slow["window_tokens_per_second_p50"] == fast["window_tokens_per_second_p50"] / 2
    assert slow["step_seconds_p50"] == 2 * fast["step_seconds_p50"]


def test_all_samples_are_kept_up_to_a_number() -> None:
    rows = clock.samples("step_seconds", [5.0, 7.0], first=4)
    assert rows == [
        {"metric": "step_seconds", "value": 5.0, "spread": None, "sample": 4},
        {"metric": "step_seconds", "value": 7.0, "spread": None, "sample": 5},
    ]
    assert len(clock.samples("x", [0.0] * clock.MOST_SAMPLES)) == clock.MOST_SAMPLES
    thinned = [row["sample"] for row in clock.samples("x", [0.0] * (2 * clock.MOST_SAMPLES + 1))]
    assert thinned == list(range(1, 2 * clock.MOST_SAMPLES + 2, 3))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (4, 3), (20, 3), (50, 5), (1000, 10)])
def test_warmup_leaves_steps_to_time(steps: int, warmup: int) -> None:
    assert clock.warmup_steps(steps) == warmup


def test_nothing_timed_gives_no_speed() -> None:
    assert clock.speeds([], [], 80) == {}


def test_a_single_value_has_no_spread() -> None:
    assert clock.spread([3.0]) is None
    assert clock.spread([0.0, 10.0]) == pytest.approx(8.0)


def test_training_is_told_part_by_part_with_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    settings = to_measure()
    watch = Watch(settings.train, CPU, 0.0, lambda _: None, lambda *_: None)
    for step in range(1, 21):
        with watch.step():
            for part, seconds in {
                "data": 1.0,
                "forward": 2.0,
                "backward": 4.0,
                "optimizer": 1.0 + (step == 20),
            }.items():
                with watch.part(part):
                    now[0] += seconds
    columns = watch.columns()
    assert [columns[f"{part}_seconds_p50"] for part in ("data", "forward", "backward", "optimizer")] == [1, 2, 4, 1]
    assert columns["optimizer_seconds_p10"] == columns["optimizer_seconds_p90"] == 1
    assert columns["step_seconds_p90"] == 8
    assert columns["window_tokens_per_second_p50"] == 64 * 17 / (17 * 8 + 1)
    assert columns["compile_seconds"] is None
    rows = watch.rows()
    assert {row["metric"]: row["value"] for row in rows if row.get("sample") is None}["backward_seconds_p50"] == 4
    steps = {row["sample"]: row["value"] for row in rows if row["metric"] == "step_seconds"}
    assert steps == {step: 8.0 + (step == 20) for step in range(4, 21)}, "3 of 20 steps are warm-up"
    assert [row["sample"] for row in rows if row["metric"] == "window_tokens_per_second"] == [1]


def test_what_training_really_does_is_charged_to_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_train import batches_of, held_out_of

    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    def late(self: Batches, step: int) -> Any:
        takes(13.0 if step == 15 else 3.0)
        return fetch(self, step)

    def stepping(self: Learner, lr: float) -> torch.Tensor:
        takes(2.0)
        return step(self, lr)

    fetch, step = Batches.batch, Learner._step
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Batches, "batch", late)
    monkeypatch.setattr(Learner, "_step", stepping)
    settings = to_measure()
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"accumulate": 2})})
    model = build(settings.model)
    model.register_forward_pre_hook(lambda *_: takes(5.0 if model.training else 100.0))
    model.head.output.weight.register_hook(lambda _: takes(4.0))
    watch = Watch(settings.train, CPU, 0.0, lambda _: None, lambda *_: None)
    train(model, batches_of(settings), held_out_of(settings), settings.train, 0, watch)
    found = watch.timer.seconds()
    # 3 of 20 steps are warm-up; a step has two pieces, each with a forward and a backward pass
    assert found == {
        "data": [3.0] * 11 + [13.0] + [3.0] * 5,
        "forward": [10.0] * 17,
        "backward": [8.0] * 17,
        "optimizer": [2.0] * 17,
        "step": [23.0] * 11 + [33.0] + [23.0] * 5,
    }
    columns = watch.columns()
    assert columns["train_tokens_per_second"] == 64 * 17 / (17 * 23 + 10)
    assert (columns["data_seconds_p50"], columns["data_seconds_p90"], columns["step_seconds_p50"]) == (3, 3, 23)
    assert columns["startup_seconds"] == 0
    assert columns["eval_seconds"] == now[0] - (3 * 23 + 17 * 23 + 10), "all the rest of the time"
    assert columns["eval_seconds"] % 200 == 0
    assert columns["eval_seconds"] > 0


def test_who_watches_changes_no_number() -> None:
    from test_train import Notes, batches_of, held_out_of

    settings = to_measure({"dropout": 0.1, "feed_forward": "moe"})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"accumulate": 2})})
    points: list[Any] = []
    watch = Watch(settings.train, CPU, 0.0, lambda _: None, lambda *point: points.append(point))
    for observer in (Notes(), watch):
        model = build(settings.model)
        trained = train(model, batches_of(settings), held_out_of(settings), settings.train, 0, observer)
        points.append((trained.val_losses, [p.detach().clone() for p in model.parameters()]))
    (plain, weights), (watched, same) = points[0], points[-1]
    assert plain == watched
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert set(watch.timer.seconds()) == {"data", "forward", "backward", "optimizer", "step"}


def test_what_lies_between_steps_is_in_speeds_and_in_no_step_and_evaluation_in_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    settings, phases = to_measure(), []
    watch = Watch(settings.train, CPU, 0.0, phases.append, lambda *_: None)
    now[0] = 7.0
    for step in range(20):
        with watch.step():
            now[0] += 2.0
        now[0] += 5.0
        if step == 10:
            with watch.evaluation():
                now[0] += 11.0
            now[0] += 1.0
    columns = watch.columns()
    assert columns["train_tokens_per_second"] == 17 * 64 / (17 * 2 + 16 * 5 + 1), "17 of 20 steps, and between them"
    assert columns["window_tokens_per_second_p50"] == columns["train_tokens_per_second"], "which are one window"
    assert columns["train_tokens_per_second_p50"] == 64 / 7
    assert columns["step_seconds_p10"] == columns["step_seconds_p90"] == 2
    assert columns["eval_seconds"] == 11
    assert columns["startup_seconds"] == 7
    assert phases == ["evaluate", "train"]


def test_what_the_allocator_did_is_read_before_anything_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    retries = [1.0]
    monkeypatch.setattr(memory, "allocator_facts", lambda _: {"allocator_retries": retries[0]})
    watch = Watch(to_measure().train, CPU, 0.0, lambda _: None, lambda *_: None)
    watch.columns()
    retries[0] = 7.0  # a pass that is looked at operator by operator
    assert watch.rows() == [{"metric": "allocator_retries", "value": 1.0}]


def test_steps_alone_wait_for_the_device_as_often_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_train import Notes, batches_of, held_out_of

    settings, every = to_measure(), 3
    read: list[int] = []

    def seen(measures: Any) -> list[float]:
        held = list(measures)
        read.append(len(held))
        return values_of(held)

    values_of = trains.values_of
    monkeypatch.setattr(trains, "values_of", seen)
    monkeypatch.setattr(trains, "read_every", lambda _: every)
    train(build(settings.model), batches_of(settings), held_out_of(settings), settings.train, 0, Notes())
    trained = read.copy()
    read.clear()
    trains.exercise(build(settings.model), batches_of(settings), settings.train, 0, Notes())
    assert read == [3, 3, 3, 3, 3, 3, 2]
    assert sum(trained) == sum(read) == 20


# --- Decoding ---------------------------------------------------------------------------------------------------------


class Counting:
    """A model that counts up, with a clock that costs 10 for a prompt and 1 for a token after it."""

    def __init__(self) -> None:
        self.now, self.fed = 0.0, []
        self.settings = to_measure().model

    def new_cache(self, batch: int, tokens: int, source_tokens: int) -> Cache:
        assert source_tokens == 0
        return Cache((batch, 1, tokens, 2), dtype=torch.float32, device=CPU)

    def __call__(self, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        self.now += 10 if cache.length == 0 else 1
        self.fed.append(input_ids[0].tolist())
        cache.append(torch.zeros(*input_ids.shape, 2)[:, None])
        return nn.functional.one_hot(input_ids + 1, 100).float()

    def clock(self) -> clock.Clock:
        return clock.Clock(lambda: self.now, lambda a, b: b - a)


def test_prefill_and_decode_under_a_known_clock() -> None:
    model = Counting()
    run = decode.generate(model, torch.tensor([[3, 4], [3, 4]]), new_tokens=5, clock=model.clock())
    assert run.prefill_seconds == 10
    assert run.seconds_per_token == 1  # 4 further tokens in 4 seconds; the fifth is fed outside the time
    assert model.fed == [[3, 4], [5], [6], [7], [8], [9]]
    assert run.written_bytes == run.allocated_bytes == 2 * (2 + 5) * 2 * 4


def test_one_new_token_has_no_time_per_token() -> None:
    model = Counting()
    run = decode.generate(model, torch.tensor([[3, 4]]), new_tokens=1, clock=model.clock())
    assert run.seconds_per_token is None
    assert run.written_bytes == 3 * 2 * 4


def test_a_prompt_alone_is_decoded_by_nothing() -> None:
    model = Counting()
    run = decode.generate(model, torch.tensor([[3, 4]]), new_tokens=0, clock=model.clock())
    assert model.fed == [[3, 4]]
    assert run.seconds_per_token is None


def by_cell(found: decode.Profile) -> dict[tuple[str, int, int, str], float]:
    return {(r["phase"], r["batch"], r["context"], r["metric"]): r["value"] for r in found.rows}


def test_every_cell_is_measured_and_the_first_gives_the_columns() -> None:
    settings = to_measure(
        prefill={"batch": [1, 2], "tokens": [8]}, decode={"batch": [2, 1], "context": [8, 12], "new_tokens": 4}
    )
    ticks = [0.0]

    def tick() -> float:
        ticks[0] += 0.5
        return ticks[0]

    steady = clock.Clock(tick, lambda a, b: b - a)
    found = decode.profile(build(settings.model), settings.profile, "fp32", prompts, steady)
    values = by_cell(found)
    assert values["prefill", 2, 8, "prefill_tokens_per_second"] == 2 * 8 / 0.5
    assert values["decode", 2, 12, "decode_seconds_per_token_p50"] == pytest.approx(0.5 / 3)
    assert values["decode", 2, 12, "decode_tokens_per_second"] == pytest.approx(2 * 3 / 0.5)
    assert {cell[:3] for cell in values if cell[0] == "decode"} == {("decode", b, c) for b in (1, 2) for c in (8, 12)}
    assert found.columns["prefill_tokens_per_second"] == 1 * 8 / 0.5
    assert found.columns["decode_tokens_per_second"] == pytest.approx(2 * 3 / 0.5)
    assert found.columns["kv_cache_bytes_measured"] == cost.cache_bytes(settings.model, 2, 12, "fp32")
    figures = [row for row in found.rows if row.get("sample") is None]
    assert {row["spread"] for row in figures if "second" in row["metric"]} == {0.0}
    assert found.problems == []


@pytest.mark.parametrize("attention", registry.names("attention"))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_cache_holds_what_it_promised(attention: str, precision: str) -> None:
    settings = to_measure(with_attention(attention), decode={"context": [8], "new_tokens": 4}, rounds=1)
    model = build(settings.model)
    assert decode.cache_mismatch(model, settings.profile.decode, prompts) is None
    model = model if precision == "fp32" else decode.copy_as(model, torch.bfloat16)
    found = decode.profile(model, settings.profile, precision, prompts, clock.clock_for(CPU))
    assert found.problems == []
    assert found.columns["kv_cache_bytes_measured"] == cost.cache_bytes(settings.model, 1, 12, precision)


@pytest.mark.parametrize(
    "model",
    [
        FAMILIES["encoder_decoder"],
        FAMILIES["encoder_decoder"] | {"attention": "mla", "cross_attention": "gqa"},
        {"attention": {"name": "gqa", "window": 4}},
        {"layers": [{"first": 1, "attention": {"name": "gqa", "window": 4}}]},
    ],
)
def test_a_cache_holds_what_it_promised_of_sources_and_windows(model: dict[str, Any]) -> None:
    settings = to_measure(model, decode={"batch": [2], "context": [10], "new_tokens": 4}, rounds=1)
    built = build(settings.model)
    assert decode.cache_mismatch(built, settings.profile.decode, prompts) is None
    found = decode.profile(built, settings.profile, "fp32", prompts, clock.clock_for(CPU))
    assert found.problems == []
    room = (5, "fp32", 10) if settings.model.family == "encoder_decoder" else (14, "fp32")
    assert found.columns["kv_cache_bytes_measured"] == cost.cache_bytes(settings.model, 2, *room) > 0


def test_an_encoder_decoder_reads_its_source_once_and_starts_from_the_start_token() -> None:
    settings = to_measure(FAMILIES["encoder_decoder"]).model
    model, source = build(settings).eval(), prompts(2, 9)
    encoded: list[int] = []
    model.encoder.register_forward_hook(lambda *_: encoded.append(1))
    started: list[int] = []
    model.decoder.register_forward_hook(lambda _, given, __: started.append(given[1].tolist()))
    run = decode.generate(model, source, new_tokens=3, clock=clock.clock_for(CPU))
    assert len(encoded) == 1
    assert started[0] == [[32], [32]]
    assert len(started) == 1 + 3, "the start token, and every new one"
    assert run.written_bytes == cost.cache_bytes(settings, 2, 4, "fp32", 9)
    assert run.allocated_bytes == run.written_bytes


def test_a_source_that_is_read_again_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = to_measure(FAMILIES["encoder_decoder"], decode={"context": [8], "new_tokens": 4})
    model = build(settings.model)
    forward = type(model.decoder.layers[0].cross_attention).forward

    def forgetful(self: Any, x: Any, position: Any, start: int, mask: Any, cache: Any, memory: Any = None) -> Any:
        out = forward(self, x, position, start, mask, cache, memory)
        return out if memory is not None else 0 * out

    monkeypatch.setattr(type(model.decoder.layers[0].cross_attention), "forward", forgetful)
    assert decode.cache_mismatch(model, settings.profile.decode, prompts) is not None


@pytest.mark.parametrize("model", [FAMILIES["encoder"], {"attention": {"name": "mha", "causal": False}}])
def test_what_cannot_write_is_read_alone(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transformer, "new_cache", None)
    cells = {"prefill": {"batch": [1, 2], "tokens": [8]}, "decode": {"context": [8], "new_tokens": 4}}
    asked = to_measure(model, **cells)
    assert decode.refusal(asked.model)
    settings = decode.feasible(asked)
    assert settings.profile.decode is None
    assert settings.profile.prefill == asked.profile.prefill
    found = decode.profile(build(settings.model), settings.profile, "fp32", prompts, clock.clock_for(CPU))
    assert {cell[:3] for cell in by_cell(found)} == {("prefill", 1, 8), ("prefill", 2, 8)}
    assert set(found.columns) == {"prefill_tokens_per_second", "prefill_seconds_p50"}
    assert found.problems == []


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_what_can_write_does_all_that_is_asked(family: str) -> None:
    asked = to_measure(FAMILIES[family], decode={"context": [8], "new_tokens": 4})
    assert decode.refusal(asked.model) is None
    assert decode.feasible(asked) == asked


def test_the_first_round_is_warm_up_and_the_rest_give_median_and_spread() -> None:
    settings = to_measure(prefill={"tokens": [8]}, rounds=3)
    marks = [0.0, 100.0, 100.0, *(x for i, t in enumerate((1.0, 2.0, 4.0)) for x in (i * 10, i * 10 + t, i * 10 + t))]
    found = decode.profile(build(settings.model), settings.profile, "fp32", prompts, fake(marks))
    row = next(row for row in found.rows if row["metric"] == "prefill_seconds_p50")
    assert row["value"] == 2
    assert row["spread"] == pytest.approx(3.6 - 1.2)
    assert found.columns["prefill_tokens_per_second"] == 4


@pytest.mark.parametrize("model", [{}, FAMILIES["encoder_decoder"], {"attention": {"name": "gqa", "window": 4}}])
def test_memory_holds_what_the_cache_has_room_for(model: dict[str, Any]) -> None:
    settings = to_measure(model | {"feed_forward": "moe"})
    model = build(settings.model).eval()
    run = decode.generate(model, prompts(2, 10), 4, clock.clock_for(CPU))
    assert decode.held_bytes(model, prompts(2, 10), 4) == run.allocated_bytes > 0


def test_what_is_kept_beside_the_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = to_measure({"attention": "mla"}, decode={"context": [8], "new_tokens": 4}, rounds=1)
    model = build(settings.model)
    attention = type(model.decoder.layers[0].attention)
    expanded = attention._expanded

    def hoarding(self: Any, q: Any, entries: Any, *rest: Any) -> Any:
        if entries.shape[-2] > 1:
            self.expanded = self.kv_up(entries[:, 0, :, : self.rank])
        return expanded(self, q, entries, *rest)

    monkeypatch.setattr(attention, "_expanded", hoarding)
    found = decode.profile(model, settings.profile, "fp32", prompts, clock.clock_for(CPU))
    columns = found.columns
    expected = columns["kv_cache_bytes_measured"] + columns["kv_cache_bytes_allocated"]
    kept = 2 * 4 * (8 + 8) * 4  # a token: layers, heads, widths of k without position and of v, bytes
    assert columns["kv_cache_bytes_held"] == expected + 8 * kept
    assert found.problems == [
        f"{expected + tokens * kept} bytes stay in memory for 1 x 12 tokens (path {path}), "
        f"not the {expected} that the cache has room for"
        for path, tokens in (("absorbed", 8), ("expanded", 12 - 2))  # of two tokens it was there before
    ]


def test_a_broken_promise_is_told_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = to_measure(decode={"context": [8], "new_tokens": 4}, rounds=1)
    monkeypatch.setattr(cost, "cache_bytes", lambda *_: 100)
    model = build(settings.model)
    found = decode.profile(model, settings.profile, "fp32", prompts, clock.clock_for(CPU))
    assert len(found.problems) == 1
    assert "100" in found.problems[0]
    assert str(found.columns["kv_cache_bytes_measured"]) in found.problems[0]
    monkeypatch.setattr(cost, "cache_bytes", lambda *_: None)
    assert decode.profile(model, settings.profile, "fp32", prompts, clock.clock_for(CPU)).problems == []


def test_a_position_that_starts_anew_at_each_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = to_measure(decode={"context": [8], "new_tokens": 4})
    model = build(settings.model)
    scheme = type(model.decoder.positions[0])
    rotate = scheme.rotate
    monkeypatch.setattr(scheme, "rotate", lambda self, x, start: rotate(self, x, 0))
    wrong = decode.cache_mismatch(model, settings.profile.decode, prompts)
    assert wrong is not None
    assert "standard deviations" in wrong


@pytest.mark.parametrize(("exact", "mismatch"), [(1e-9, False), (0.5, True), (float("nan"), True)])
def test_a_difference_counts_if_float64_shows_it(monkeypatch: pytest.MonkeyPatch, exact: float, mismatch: bool) -> None:
    def difference(model: Transformer, *_: Any, **__: Any) -> float:
        return exact if model.head.output.weight.dtype == torch.float64 else 0.3

    monkeypatch.setattr(decode, "cache_difference", difference)
    settings = to_measure(decode={"context": [8], "new_tokens": 4})
    assert bool(decode.cache_mismatch(build(settings.model), settings.profile.decode, prompts)) is mismatch


def test_the_check_is_without_dropout_and_a_copy_stays_tied() -> None:
    settings = to_measure({"dropout": 0.5, "tie_embeddings": True}, decode={"context": [8], "new_tokens": 4})
    model = build(settings.model).train()
    assert decode.cache_difference(model, prompts(2, 12), 8) < decode.TOLERANCE
    copy = decode.copy_as(model, torch.bfloat16)
    assert copy.head.output.weight is copy.embedding.tokens.weight
    assert copy.head.output.weight.dtype == torch.bfloat16
    assert model.head.output.weight.dtype == torch.float32


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_live_bytes_are_those_of_storages_while_they_live() -> None:
    before = torch.zeros(250)  # 1000 bytes
    with live.LiveBytes() as counted:
        assert counted.now == 0
        a = before + 1
        assert counted.now == 2000, "what was there counts once it is used"
        assert counted.made == 1000
        b = a.view(10, 25)[2:]
        assert counted.now == 2000, "a view holds nothing of its own"
        c = b.double()
        assert counted.now == 2000 + 8 * 200
        del a, c
        assert counted.now == 2000, "the view keeps all of what it looks at"
        del b
        assert counted.now == 1000
        before.mul_(2)
    assert (counted.now, counted.peak) == (1000, 3600)


def test_what_backward_needs_lives_until_then() -> None:
    x = torch.ones(10, requires_grad=True)
    with live.LiveBytes([x]) as counted:
        y = x.exp().exp().sum()
        assert counted.now == 3 * 40 + 4, "both results of exp, which nobody but autograd holds"
        y.backward()
        assert counted.now == 40 + 4 + 40, "the leaf, the sum and a gradient"


def test_a_training_step_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)

    def step(part: Any) -> None:
        with part("data"):
            x = torch.ones(3, 4)
        for _ in range(2):  # cut in two pieces, of which one counts
            with part("forward"):
                loss = model(x).square().sum()
            with part("backward"):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = live.training_split(model, step)
    weights = 4 * (4 * 8 + 8 * 2)
    kept = 4 * (3 * 8 + 3 * 2 + 1)  # what relu gave, what is squared, and the loss
    state = 2 * weights + 2 * 4  # two moments, and a count of steps for each weight
    assert found.pop("peak_live_bytes") in range(2 * weights + state, 2 * weights + state + 3 * kept + 4 * 12)
    assert found == {"parameter_bytes": weights, "gradient_bytes": weights, "activation_bytes": kept}


def test_activations_grow_with_the_batch_and_nothing_else_does() -> None:
    one, two = (split_of(batch_tokens=tokens) for tokens in (64, 128))
    assert two["activation_bytes"] == pytest.approx(2 * one["activation_bytes"], rel=0.01)
    halved = split_of(batch_tokens=128, accumulate=2)
    assert halved["activation_bytes"] == pytest.approx(one["activation_bytes"], rel=0.01)
    for column in ("parameter_bytes", "gradient_bytes"):
        assert one[column] == two[column] == halved[column]


def split_of(**recipe: int) -> dict[str, int]:
    settings = to_measure({"tie_embeddings": True})
    recipe = settings.train.model_copy(update=recipe)
    corpus, model = settings.data.corpus(), build(settings.model)
    learner = Learner.of(model, recipe)
    batch = Batches.of(corpus, recipe, 0, objective_of(settings.model, corpus.vocab_size)).batch(1)
    with live.aside(model):
        found = live.training_split(model, lambda part: learner.update(batch, 0.0, part))
    weights = 4 * cost.cost(settings.model, 32).params_total
    assert found["parameter_bytes"] == found["gradient_bytes"] == weights, "a tied weight counts once"
    _, state = state_of(learner.optimizer)
    assert found["peak_live_bytes"] >= 2 * weights + state
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_measuring_memory_leaves_no_trace(optimizer: str) -> None:
    settings = resolved(
        typed(
            {
                "model": SMALL
                | {"norm": "batch_norm", "feed_forward": {"name": "moe", "balance": "bias"}, "dropout": 0.1},
                "train": {"steps": 1, "batch_tokens": 64, "optimizer": optimizer},
                "data": {"name": "random_tokens", "vocab_size": 32},
                "profile": {},
            }
        )
    )
    model = build(settings.model).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with live.aside(model):
        learner = Learner.of(model, settings.train)
        corpus = settings.data.corpus()
        batch = Batches.of(corpus, settings.train, 0, objective_of(settings.model, 32)).batch(1)
        live.training_split(model, lambda part: learner.update(batch, 0.0, part))
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
    assert all(p.grad is None for p in model.parameters())


def test_a_peak_below_weights_and_optimizer_state_is_an_error() -> None:
    known = {"parameter_bytes": 100, "optimizer_state_bytes": 50}
    fine = {"peak_allocated_bytes": None, "peak_rss_bytes": 150, "peak_live_bytes": 150}
    assert list(memory.implausible(known | fine)) == []
    for name in ("peak_allocated_bytes", "peak_rss_bytes", "peak_live_bytes"):
        assert list(memory.implausible(known | fine | {name: 149})) == [
            f"{name} of 149 is less than the 150 bytes of weights and optimizer state"
        ]
    assert list(memory.implausible(known | fine | {"peak_allocated_bytes": 150, "peak_rss_bytes": 10})) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process reset its peak")
def test_the_peak_counts_from_the_reset() -> None:
    size = 2**27
    block = np.ones(size, dtype=np.uint8)
    high = memory.peak_rss_bytes()
    del block
    memory.reset_peak_rss()
    low = memory.peak_rss_bytes()
    assert high is not None
    assert low is not None
    assert high - low > size // 2
    block = np.ones(size, dtype=np.uint8)
    again = memory.peaks(CPU)["peak_rss_bytes"]
    assert again is not None
    assert again - low > size // 2
    assert block.size == size


def test_a_cpu_has_no_gpu_columns_and_wakes_no_gpu() -> None:
    assert set(memory.peaks(CPU)) == {"peak_rss_bytes"}
    assert memory.allocator_facts(CPU) == {}
    assert device.gpu_uuid(CPU) is None
    assert device.datasheet_flops(CPU, "fp32") is None
    assert device.device_name(CPU)
    assert not torch.cuda.is_initialized()


# --- Kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_are_those_that_ran() -> None:
    model = build(to_measure({"feed_forward": "moe", "dropout": 0.1}).model)
    state = torch.get_rng_state()
    ran = kernels.training_kernels(model, {"input_ids": prompts(1, 16)}, "fp32")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert "mm" in ran
    plain = build(to_measure().model)
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert {flash, f"{flash}_backward"} <= set(kernels.training_kernels(plain, {"input_ids": prompts(1, 16)}, "fp32"))
    assert flash in kernels.decoding_kernels(plain, prompts(1, 16))
    both = build(to_measure(FAMILIES["encoder_decoder"]).model)
    inputs = {"input_ids": prompts(1, 16), "decoder_input_ids": prompts(1, 8)}
    assert {flash, f"{flash}_backward"} <= set(kernels.training_kernels(both, inputs, "fp32"))
    assert flash in kernels.decoding_kernels(both, prompts(1, 16))


@pytest.mark.parametrize("path", ["absorbed", "expanded"])
def test_the_way_in_which_a_latent_was_read_is_told(path: str) -> None:
    model = build(to_measure({"attention": {"name": "mla", "decode": path}}).model)
    ran = kernels.decoding_kernels(model, prompts(1, 16))
    assert [name for name in ran if name.startswith("path ")] == [f"path {path}"]
    assert not [name for name in kernels.decoding_kernels(build(to_measure().model), prompts(1, 16)) if "path" in name]


def test_asking_for_kernels_moves_no_running_statistics() -> None:
    model = build(to_measure({"norm": "batch_norm"}).model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kernels.training_kernels(model, {"input_ids": prompts(2, 16)}, "fp32")
    assert before
    assert [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])] == []


def test_dropout_on_attention_is_seen_to_take_another_path() -> None:
    model = build(to_measure({"dropout": {"attention": 0.1}}).model)
    assert "_scaled_dot_product_flash_attention_for_cpu" not in kernels.training_kernels(
        model, {"input_ids": prompts(1, 16)}, "fp32"
    )


# --- FLOPs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feed_forward", registry.names("feed_forward"))
@pytest.mark.parametrize("attention", registry.names("attention"))
def test_promised_flops_are_those_counted(attention: str, feed_forward: str) -> None:
    settings = to_measure(with_attention(attention) | {"feed_forward": feed_forward}).model
    model = build(settings).eval()
    with torch.no_grad():
        counted = flops.count_flops(lambda: model(prompts(2, 24)))
    promised = cost.cost(settings, 24, discount=False).flops_per_token
    assert promised is not None
    assert counted == pytest.approx(2 * 24 * promised, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [24, 25])
def test_flops_are_shared_among_the_tokens_that_a_family_processes(family: str, tokens: int) -> None:
    settings = to_measure(FAMILIES[family] | {"position": "none"}).model
    windows = np.random.default_rng(0).integers(0, 32, (2, tokens + 1))
    batch = objective_of(settings, 32).batch(windows, lambda n: np.zeros((2, n), dtype=np.uint64))
    inputs = {name: torch.from_numpy(array.copy()) for name, array in batch.inputs.items()}
    model = build(settings).eval()
    with torch.no_grad():
        counted = flops.count_flops(lambda: model(**inputs))
    assert [inputs[name].shape[1] for name in inputs] == list(cost.lengths(settings, tokens).values())
    assert counted == pytest.approx(2 * tokens * cost.cost(settings, tokens, discount=False).flops_per_token, rel=1e-3)


def test_backward_costs_twice_forward_and_attention_half_more() -> None:
    model = build(to_measure({"n_layers": 1}).model)
    tokens = prompts(1, 32)
    forward = flops.count_flops(lambda: model(tokens))
    both = flops.count_flops(lambda: model(tokens).sum().backward())
    attention = 2 * 2 * 32 * 32 * 32  # two products of 32 x 32 keys, all heads together 32 wide
    assert both == 3 * forward + attention // 2


def test_grouped_products_count() -> None:
    a, b = torch.randn(6, 16), torch.randn(2, 16, 8)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    assert flops.count_flops(lambda: nn.functional.grouped_mm(a, b, offs=offsets)) == 2 * 6 * 16 * 8
