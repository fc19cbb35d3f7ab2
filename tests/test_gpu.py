"""What only a CUDA device can show. `nox -s gpu` runs these; elsewhere each is skipped and says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import ablate
from ablate.cli import main
from ablate.results import Results

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: these checks need one"),
]

ROOT = Path(__file__).parent.parent


def run(folder: Path, *sets: str) -> Results:
    """The quickstart on the GPU, with few steps."""
    short = ("train.steps=20", "train.warmup_steps=2", "seeds=1", *sets)
    changes = [part for change in short for part in ("--set", change)]
    places = ["--results", str(folder / "results"), "--reports", str(folder / "reports"), "--device", "cuda"]
    done = CliRunner().invoke(main, ["run", str(ROOT / "experiments/quickstart.yaml"), *changes, *places])
    assert done.exit_code == 0, done.output
    return ablate.load(folder / "results/quickstart")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_quickstart_runs_and_measures(tmp_path: Path, precision: str) -> None:
    trials = run(tmp_path, f"train.precision={precision}").trials
    assert set(trials["status"]) == {"ok"}
    assert set(trials["device"]) == {"cuda"}
    told = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "gpu_uuid")
    for column in (*told, "mfu", "hfu", "matmul_peak_flops", "flops_per_token_counted"):
        assert trials[column].notna().all(), column
    assert (trials["peak_reserved_bytes"] >= trials["peak_allocated_bytes"]).all()
    assert (trials["peak_allocated_bytes"] >= 16 * trials["params_total"]).all(), "weights, gradients and Adam's state"
    width = {"fp32": 4, "bf16": 2}[precision]
    baseline = trials.set_index("variant").loc["baseline"]
    assert baseline["kv_cache_bytes_per_token"] == 2 * 3 * 64 * width


def test_memory_does_not_depend_on_the_place_in_the_grid(tmp_path: Path) -> None:
    first = run(tmp_path / "a", "variants={gqa: {attention: gqa}, moe: {feed_forward: moe}}").trials
    last = run(tmp_path / "b", "variants={moe: {feed_forward: moe}, gqa: {attention: gqa}}").trials
    allocated = [each.set_index("variant")["peak_allocated_bytes"].sort_index() for each in (first, last)]
    assert allocated[0].equals(allocated[1])


def test_out_of_memory_is_a_row_and_the_next_trial_starts_clean(tmp_path: Path) -> None:
    places = ["--results", str(tmp_path / "results"), "--reports", str(tmp_path / "reports"), "--device", "cuda"]
    variants = "variants={huge: {vocab_size: 2M, train: {batch_tokens: 65536}}, gqa: {attention: gqa}}"
    sets = [part for each in ("train.steps=3", "train.warmup_steps=0", "seeds=1", variants) for part in ("--set", each)]
    done = CliRunner().invoke(main, ["run", str(ROOT / "experiments/quickstart.yaml"), *sets, *places])
    assert done.exit_code == 1, done.output
    statuses = ablate.load(tmp_path / "results/quickstart").trials.set_index("variant")["status"].to_dict()
    assert statuses == {"baseline": "ok", "huge": "oom", "gqa": "ok"}


def test_the_flexible_kernel_trains_to_the_same_loss(tmp_path: Path) -> None:
    trials = run(tmp_path, "variants={flex: {attention: {name: mha, kernel: flex}}}").trials.set_index("variant")
    assert set(trials["status"]) == {"ok"}
    assert trials["val_loss"]["flex"] == pytest.approx(trials["val_loss"]["baseline"], rel=1e-3)
    assert "flex" in trials["kernels"]["flex"]
