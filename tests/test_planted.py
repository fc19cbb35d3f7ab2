"""What was planted is found: whole runs with real children, of variants whose differences are known beforehand."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

import ablate
from ablate.cli import main

SLEEPS = '''\
"""A network that takes its time in training."""

import time

from pydantic import Field
from torch import nn

from ablate.feed_forward import relu


class Sleepy(nn.Module):
    def __init__(self, network, seconds):
        super().__init__()
        self.network, self.seconds = network, seconds

    def forward(self, x, mask=None):
        time.sleep(self.seconds * self.training)
        return self.network(x, mask)


class Config(relu.Config):
    milliseconds: int = Field(60, description="what a pass takes in training")

    def build(self, shape):
        return Sleepy(super().build(shape), self.milliseconds / 1e3)
'''

FILE = """\
name: NAME
question: Is it found?
baseline: {n_layers: 1, n_heads: 2, max_seq_len: 16, CHANGES}
variants: {VARIANTS}
seeds: 1
data: {name: random_tokens, vocab_size: 11, train_tokens: 4000, validation_tokens: 100}
train: {steps: 8, batch_tokens: 32, lr: 1e-3, threads: 1}
"""

BASELINE = "d_model: 16, feed_forward: FOLDER/sleeps.py"
SLOWER = "feed_forward: {milliseconds: 120}"
LARGER = "d_model: 256, feed_forward: {name: gelu, d_ff: 4096}"
MEASURED = (
    "decode_bandwidth_share",
    "mfu",
    "mfu_datasheet",
    "energy_joules_per_token",
    "other_load_cores",
    "device_clock_mhz_p50",
    "device_temperature_celsius_max",
    "throttle_reasons",
)
EXACT = ["peak_live_bytes", "parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes"]


@dataclass
class Done:
    """The rows by variant in the order in which they ran, and what was said in warning."""

    trials: pd.DataFrame
    warnings: list[str]


def run(folder: Path, name: str, baseline: str, **variants: str) -> Done:
    text = FILE.replace("VARIANTS", ", ".join(f"{name}: {{{changes}}}" for name, changes in variants.items()))
    text = text.replace("NAME", name).replace("CHANGES", baseline).replace("FOLDER", str(folder))
    (folder / "planted.yaml").write_text(text, encoding="utf-8")
    places = ["--results", str(folder / "results"), "--reports", str(folder / "reports"), "--workers", "1"]
    done, warnings = Done(pd.DataFrame(), []), logging.Handler(logging.WARNING)
    warnings.emit = lambda record: done.warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ablate").addHandler(warnings)
    try:
        ended = CliRunner().invoke(main, ["run", str(folder / "planted.yaml"), *places])
    finally:
        logging.getLogger("ablate").removeHandler(warnings)
    assert ended.exit_code == 0, ended.output
    done.trials = ablate.load(folder / "results" / name).trials.sort_values("started_at").set_index("variant")
    assert set(done.trials["status"]) == {"ok"}
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Done]:
    """Variants in two orders, and one of them alone, on a machine without a GPU."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "sleeps.py").write_text(SLEEPS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        return [
            run(folder, "one", BASELINE, slower=SLOWER, larger=LARGER),
            run(folder, "other", BASELINE, larger=LARGER, slower=SLOWER),
            run(folder, "alone", LARGER),
        ]


def test_a_variant_that_is_twice_as_slow_is_reported_twice_as_slow(runs: list[Done]) -> None:
    for done in runs[:2]:
        slower, baseline = done.trials.loc["slower"], done.trials.loc["baseline"]
        for column in ("step_seconds_p50", "forward_seconds_p50"):
            assert 1.7 < slower[column] / baseline[column] < 2.4, column
        assert slower["step_seconds_p10"] >= 0.12, "no step is shorter than its sleep"
        assert slower["train_tokens_per_second_p50"] == pytest.approx(32 / slower["step_seconds_p50"], rel=0.3)


def test_memory_of_a_variant_does_not_depend_on_its_place_in_the_grid(runs: list[Done]) -> None:
    first, second, alone = (done.trials for done in runs)
    assert list(first.index) == ["baseline", "slower", "larger"]
    assert list(second.index) == ["baseline", "larger", "slower"]
    for other in (second, alone.rename(index={"baseline": "larger"})):
        for name in other.index:
            assert other.loc[name, EXACT].to_dict() == first.loc[name, EXACT].to_dict(), name
            assert other.loc[name, "peak_rss_bytes"] == pytest.approx(first.loc[name, "peak_rss_bytes"], rel=0.05)
    assert first.loc["larger", "peak_rss_bytes"] > 1.1 * first.loc["baseline", "peak_rss_bytes"], "it would be seen"


def test_without_a_gpu_all_runs_and_what_is_null_is_told_once_with_its_reason(runs: list[Done]) -> None:
    for done in runs:
        (warning,) = (each for each in done.warnings if each.startswith("not measured here"))
        assert all(each.startswith(("not measured here", "MLflow", "imports your own code")) for each in done.warnings)
        found = warning.removeprefix("not measured here: ").split("; ")
        told = {column: why for column, _, why in (each.partition(" ") for each in found)}
        assert set(told) == {column for column in MEASURED if done.trials[column].isna().any()}
        assert "mfu_datasheet" in told
        assert all(re.fullmatch(r"\(.+\)", why) for why in told.values())
        for column in ("gpu_uuid", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"):
            assert done.trials[column].isna().all(), column
        assert "mfu" in told or (done.trials["mfu"] > 0).all()
