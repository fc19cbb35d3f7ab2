"""How weights are drawn before training.

Each matrix has a generator of its own, seeded by the trial's seed and the parameter's name: what two variants have in
common starts from the same numbers, whatever else differs.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from ablate.linear import PackedLinear


def initialise(model: nn.Module, init: str, std: float, seed: int) -> None:
    """Draw every linear map and embedding of `model` anew; biases become 0, other parameters stay as they were built.

    `normal` draws from N(0, std²); `xavier` uniformly within ±√(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010).
    """
    done: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or id(module.weight) in done:
            continue
        done.add(id(module.weight))
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        for part in _parts(module):
            _draw(part, init, std, generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def _parts(module: nn.Linear | nn.Embedding) -> tuple[Tensor, ...]:
    if isinstance(module, PackedLinear):
        return tuple(torch.split(module.weight.detach(), list(module.parts)))
    return (module.weight.detach(),)


def _draw(weight: Tensor, init: str, std: float, generator: torch.Generator) -> None:
    """Fill `weight` in place; drawn on the CPU, so that every device starts alike."""
    drawn = torch.empty(weight.shape, dtype=torch.float32)
    if init == "normal":
        drawn.normal_(0.0, std, generator=generator)
    else:
        bound = math.sqrt(6 / sum(weight.shape))
        drawn.uniform_(-bound, bound, generator=generator)
    weight.copy_(drawn)
