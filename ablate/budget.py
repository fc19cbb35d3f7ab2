"""How many steps a variant trains where the file gives it by what the model costs: in FLOPs or tokens a parameter."""

from __future__ import annotations

import math

from ablate.choice import Faults, SettingsError
from ablate.cost import Cost, cost
from ablate.settings import TrainSettings, VariantSettings

PASSES = 3
"""A training step has one pass forward and one back, which costs as much as two."""


def settled(settings: VariantSettings, *, is_final: bool = True) -> VariantSettings:
    """Resolved settings with the length of training as steps. Raises `Faults`, of a warm-up only if that `is_final`.

    What is timed stays so: nobody knows its steps before.
    """
    train = settings.train
    if train.flops is None and train.tokens_per_param is None:
        return settings
    tokens = _tokens(train, cost(settings.model, train.length))
    if not tokens <= 2**53:
        raise Faults([SettingsError(("train", _given(train)), f"{tokens:.3g} tokens are no training", "give less")])
    lasting = train.lasting(max(1, math.ceil(tokens / train.batch_tokens)))
    if is_final:
        check_warmup(lasting)
    return settings.model_copy(update={"train": lasting})


def check_warmup(train: TrainSettings) -> None:
    """Raise `Faults` where the warm-up is longer than the run."""
    if faults := train.warmup_faults():
        raise Faults(fault.below(("train",)) for fault in faults)


def _given(train: TrainSettings) -> str:
    return "flops" if train.flops is not None else "tokens_per_param"


def _tokens(train: TrainSettings, price: Cost) -> float:
    if train.flops is None:
        return (train.tokens_per_param or 0.0) * price.params_active
    if not price.flops_per_token:
        message = "the length of training is given in FLOPs, and a choice of the model does not tell its own"
        raise Faults([SettingsError(("train", "flops"), message, "give steps or tokens")])
    return train.flops / (PASSES * price.flops_per_token)
