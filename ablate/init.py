"""How weights are drawn before training.

Each matrix has a generator of its own, seeded by the trial's seed and the parameter's name: what two variants have in
common starts from the same numbers, whatever else differs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ablate.linear import PackedLinear


def initialise(model: nn.Module, init: str, std: float, seed: int) -> None:
    """Draw every linear map and embedding of `model` anew; biases become 0, other parameters stay as they were built.

    A module of another kind says by `matrices()` which of its tensors `(rows, columns)` are drawn alike. `normal`
    draws from N(0, std²); `xavier` uniformly within ±√(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010).
    """
    done: set[int] = set()
    for name, module in model.named_modules():
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        for matrix in _matrices(module):
            if matrix.data_ptr() not in done:
                done.add(matrix.data_ptr())
                _draw(matrix, init, std, generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def _matrices(module: nn.Module) -> Sequence[Tensor]:
    """Those that the module itself holds: what is tied is held by several."""
    if isinstance(module, PackedLinear):
        return torch.split(module.weight.detach(), list(module.parts))
    if isinstance(module, nn.Linear | nn.Embedding):
        return (module.weight.detach(),)
    found: Sequence[Tensor] = getattr(module, "matrices", tuple)()
    return found


def _draw(weight: Tensor, init: str, std: float, generator: torch.Generator) -> None:
    """Fill `weight` in place; drawn on the CPU, so that every device starts alike."""
    drawn = torch.empty(weight.shape, dtype=torch.float32)
    if init == "normal":
        drawn.normal_(0.0, std, generator=generator)
    else:
        bound = math.sqrt(6 / sum(weight.shape))
        drawn.uniform_(-bound, bound, generator=generator)
    weight.copy_(drawn)
