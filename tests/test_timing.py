"""What a child times when it is asked to: known answers under a clock of its own, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from references import Parent
from torch import nn

from ablate import timing, trial
from ablate.job import TimingJob
from ablate.profiling import surroundings
from ablate.profiling.clock import Clock
from ablate.schema import REPEATS
from ablate.settings import resolved, typed
from ablate.train import Learner
from ablate.trial import Reporter

MODEL = {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 16, "vocab_size": 16, "attention": "mqa"}
MODEL |= {"position": "rope", "feed_forward": "relu", "norm": "rms_norm", "block": "pre_norm"}
SECTIONS: dict[str, Any] = {
    "model": MODEL,
    "train": {"steps": 2, "batch_tokens": 64},
    "data": {"name": "random_tokens", "vocab_size": 16, "train_tokens": 2000, "validation_tokens": 200},
    "profile": {"prefill": {"tokens": [8]}, "decode": {"context": [8], "new_tokens": 5}},
}
CELLS = {"prefill": [1, 8], "decode": [1, 8, 5]}


pytestmark = pytest.mark.usefixtures("one_thread")


def job(cells: dict[str, list[int]] = CELLS, **train: Any) -> TimingJob:
    tree = {**SECTIONS, "train": SECTIONS["train"] | train}
    return TimingJob(resolved(typed(tree)).model_dump(mode="json"), 3, "cpu", 1, cells, "timing.log")


def performed(what: TimingJob) -> Parent:
    parent = Parent()
    timing.perform(what, Reporter(parent))
    return parent


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A clock that stands still but for what models do, and what that takes: a step, a pass of a prompt, a token."""
    now = [0.0]
    costs = {"step": 0.25, "prompt": 0.5, "token": 0.125}
    update, generated = Learner.update, timing.decode.Writer

    def slow_update(self: Learner, *given: Any) -> Any:
        now[0] += costs["step"]
        return update(self, *given)

    class SlowWriter(generated):
        def read(self) -> Any:
            now[0] += costs["prompt"]
            return super().read()

        def write(self, token: Any) -> Any:
            now[0] += costs["token"]
            return super().write(token)

    monkeypatch.setattr(timing, "clock_for", lambda _: Clock(lambda: now[0], lambda a, b: b - a))
    monkeypatch.setattr(timing, "GENERATION_SECONDS", 0.0)
    monkeypatch.setattr(Learner, "update", slow_update)
    monkeypatch.setattr(timing.decode, "Writer", SlowWriter)
    return costs


def test_times_are_those_of_a_step_a_prompt_and_a_further_token(ticks: dict[str, float]) -> None:
    parent = performed(job())
    assert parent.outcome == ("ok", "profile", "")
    values = parent.columns["values"]
    assert values == {
        "step_seconds_p50": ticks["step"],
        "prefill_seconds_p50": ticks["prompt"],
        "decode_seconds_per_token_p50": ticks["token"],
    }
    assert parent.columns["torch"] == torch.__version__
    assert parent.columns["other_load_cores"] >= 0
    assert set(parent.columns["samples"]) == set(values)
    assert parent.columns["samples"]["step_seconds_p50"] == 10
    assert parent.columns["samples"]["prefill_seconds_p50"] == timing.GENERATIONS
    assert parent.columns["compiled"] is False
    assert parent.columns["gpu_uuid"] is None
    assert set(parent.columns) - {"values", "samples"} < set(REPEATS.names)


@pytest.mark.parametrize(("seconds", "steps"), [(0.25, 10), (0.01, 100), (0.04, 30)])
def test_steps_go_on_until_there_are_enough_of_them(
    seconds: float, steps: int, ticks: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks["step"] = seconds
    seen: list[int] = []
    monkeypatch.setattr(timing, "median", lambda values: seen.append(len(list(values))) or seconds)
    performed(job(cells={}))
    assert seen[0] in (steps, steps + timing.STEPS), "with the rounding of a sum"


def test_what_goes_on_around_is_looked_at_from_the_first_timed_step_on(
    ticks: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "EVERY_SECONDS", 0.0)
    clocks = iter(range(1000, 2000))
    monkeypatch.setattr(surroundings, "cpu_clock_mhz", lambda: float(next(clocks)))
    monkeypatch.setattr(surroundings, "times_throttled", iter([3, 4]).__next__)
    told = performed(job({})).columns
    assert told["device_clock_mhz_p50"] == 1004.5, "ten timed steps, none of those that warm up"
    assert told["throttle_reasons"] == "container_quota"


class Counting(nn.Module):
    """Another graph for each pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, *given: Any, **named: Any) -> Any:
        self.passes += 1
        return self.model(*given, **named) * self.passes


def test_a_member_that_did_not_stay_compiled_says_so(ticks: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(model: Any, *_: Any) -> Any:
        return torch.compile(Counting(model), backend="eager", dynamic=False)

    monkeypatch.setattr(trial.compilation, "compiled", compiled)
    told = performed(job({}, compile=True)).columns
    assert told["compiled"] is False
    assert told["compile_fault"].startswith("recompile limit reached")


def test_where_it_ran_is_told_also_of_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "build", lambda *_: 1 / 0)
    parent = performed(job())
    assert parent.outcome[0] == "crashed"
    assert parent.columns["torch"] == torch.__version__


def test_only_what_is_asked_for_is_timed(ticks: dict[str, float]) -> None:
    assert set(performed(job({})).columns["values"]) == {"step_seconds_p50"}
    single = performed(job({"decode": [1, 8, 1]})).columns["values"]
    assert "decode_seconds_per_token_p50" not in single, "one token has no further one"


def test_a_model_of_bf16_is_timed_as_such(ticks: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: set[torch.dtype] = set()
    generate = timing.decode.generate

    def seen(model: Any, *given: Any) -> Any:
        dtypes.add(next(model.parameters()).dtype)
        return generate(model, *given)

    monkeypatch.setattr(timing.decode, "generate", seen)
    assert performed(job(precision="bf16")).outcome[0] == "ok"
    assert dtypes == {torch.bfloat16}


def test_it_ends_with_the_reason_of_what_went_wrong(ticks: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Learner, "update", short)
    parent = performed(job())
    assert parent.outcome[:2] == ("oom", "train")
    assert "values" not in parent.columns
