"""What only a CUDA device can show, stage by stage as `tools/gpu_check.py` does it; elsewhere skipped, and told why."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from gpu_checks.ledger import Setup, Stage
from gpu_checks.stages import STAGES

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: these checks need one"),
]

PATIENCE = 3
"""So many times a stage's limit: where nobody waits for all of them, none need be cut short."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_stage(stage: Stage, work: Path) -> None:
    """Later stages compare with what earlier ones left in the same folder."""
    setup = Setup("cuda", False, work, work / "reports", time.time() + PATIENCE * stage.seconds)
    failed = [found for found in stage.run(setup) if found.word in ("failed", "not run")]
    assert not failed, "\n".join(f"{each.says} {each.figure}\n{each.details}" for each in failed)
