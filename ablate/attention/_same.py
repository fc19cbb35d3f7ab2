"""Whether two attention choices are the same function: for the identities that they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ablate.attention import AttentionChoice
from ablate.choice import Shape
from ablate.position import Position


def outputs(
    one: AttentionChoice, other: AttentionChoice, shape: Shape, *, cached: bool = False
) -> tuple[Tensor, Tensor]:
    """What both make of the same random tokens with the same random weights, in float64; `cached` after some others."""
    generator = torch.Generator().manual_seed(0)
    alone = replace(shape, attention_dropout=0.0)
    first, second = (choice.resolve(alone).build(alone).double().eval() for choice in (one, other))
    weights = {
        name: torch.randn(weight.shape, generator=generator, dtype=torch.float64) / max(weight.shape) ** 0.5
        for name, weight in first.state_dict().items()
    }
    first.load_state_dict(weights)
    second.load_state_dict(weights)
    x = torch.randn(2, 6, shape.d_model, generator=generator, dtype=torch.float64)
    return _mixed(first, x, cached), _mixed(second, x, cached)


@torch.no_grad()
def _mixed(module: Any, x: Tensor, cached: bool) -> Tensor:
    cache = module.new_cache(len(x), x.shape[1], x.dtype, x.device) if cached else None
    parts = x.split([x.shape[1] - 2, 1, 1], dim=1) if cached else [x]
    starts = [0, x.shape[1] - 2, x.shape[1] - 1]
    mixed = [module(part, Position(), start, None, cache) for part, start in zip(parts, starts, strict=False)]
    return torch.cat(mixed, dim=1)
