"""Every choice in every family that it is allowed in learns: fifty steps on a cycle of tokens make the loss fall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from references import CHOICES, FAMILIES, reasons, spell, tiny

from ablate.model import build
from ablate.objectives import objective_of
from ablate.settings import TrainSettings
from ablate.train import Learner

STEPS, PERIOD = 50, 8
EACH = [{"position": "none", slot: name} if slot == "attention" else {slot: name} for slot, name in CHOICES]
ALL = [{"family": family, **one} for family in FAMILIES for one in EACH]


@pytest.mark.parametrize("variant", [variant for variant in ALL if not reasons(variant)], ids=spell)
def test_fifty_steps_make_the_loss_fall(variant: dict[str, Any]) -> None:
    settings = tiny(n_layers=1, init_std=0.05, **variant)
    recipe = TrainSettings(steps=STEPS, seq_len=12, lr=5e-3).resolve(12)
    learner, objective = Learner.of(build(settings).train(), recipe), objective_of(settings, PERIOD)
    random = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        windows = (np.arange(13) + random.integers(PERIOD, size=(8, 1))) % PERIOD
        draw = lambda n: random.integers(2**63, size=(8, n), dtype=np.uint64)  # noqa: E731
        losses.append(float(learner.update(objective.batch(windows, draw), recipe.lr)["loss"]))
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
