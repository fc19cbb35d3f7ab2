"""Whether a variant is what it says, asked before its first step. A variant that is not gives no number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ablate.model import Transformer
from ablate.profiling.decode import TOLERANCE, copy_as


def leak(model: Transformer, tokens: Tensor) -> str | None:
    """How a causal model's earlier logits depend on later ones of the `tokens` `(B, T)`; None where they do not.

    A difference in float32 counts if float64 shows it too. Logits that are not finite tell nothing: training will.
    """
    if not model.settings.shape.causal or tokens.shape[1] < 2:
        return None
    if not _differs(_influence(model, tokens)) or not _differs(_influence(copy_as(model, torch.float64), tokens)):
        return None
    return "a later token changes the logits of earlier ones: the model sees what it is to predict"


def _differs(influence: float) -> bool:
    return math.isfinite(influence) and influence > TOLERANCE


@torch.inference_mode()
def _influence(model: Transformer, tokens: Tensor) -> float:
    """The largest change of any logit of the first half when the second half changes, in standard deviations."""
    was_training = model.training
    model.eval()
    half = tokens.shape[1] // 2
    changed = tokens.clone()
    changed[:, half:] = (changed[:, half:] + 1) % model.settings.shape.vocab_size
    before, after = model(tokens)[:, :half], model(changed)[:, :half]
    model.train(was_training)
    largest = (before - after).abs().max()
    return 0.0 if largest == 0 else float(largest / before.std())
