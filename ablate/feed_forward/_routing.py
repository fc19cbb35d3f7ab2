"""Which experts a token meets, and how much each of them says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


def router_logits(router: nn.Linear, x: Tensor, jitter: float = 0.0) -> Tensor:
    """Logits `(…, E)` of `x` `(…, D)`, in float32 at least, whatever the precision of the rest.

    Narrower logits tie, and tied experts are chosen by chance. With `jitter` inputs are multiplied by 1 ± so much.
    """
    with torch.autocast(x.device.type, enabled=False):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if jitter:
            wide = wide * torch.empty_like(wide).uniform_(1 - jitter, 1 + jitter)
        return F.linear(wide, router.weight.to(wide.dtype))


@dataclass(frozen=True)
class Routing:
    """The choice of `top_k` experts by their scores, within the best `top_groups` of `n_groups` groups of experts.

    A group is worth its best score (DeepSeek-V2, arXiv:2405.04434) or the sum of its two best (DeepSeek-V3,
    arXiv:2412.19437).
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = True
    scaling: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"

    def scores(self, logits: Tensor) -> Tensor:
        """`(…, E)`, each in (0, 1)."""
        return logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scores that sum to 1 over the experts: what balance losses are about."""
        return scores if self.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + _TINY)

    def choose(self, scores: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and indices `(…, top_k)` of each token's experts. A `bias` `(E,)` on the choice is in no weight."""
        wanted = scores if bias is None else scores + bias
        if self.n_groups > 1:
            wanted = self._of_best_groups(wanted)
        chosen = wanted.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if self.score == "softmax" else total + _TINY)
        return weights * self.scaling, chosen

    def _of_best_groups(self, wanted: Tensor) -> Tensor:
        """Scores in which the experts of all other groups stand at -∞: biased ones may be negative."""
        groups = wanted.unflatten(-1, (self.n_groups, -1))
        worth = groups.amax(-1) if self.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(self.top_groups, dim=-1).indices
        left_out = torch.ones_like(worth, dtype=torch.bool).scatter(-1, best, False)
        kept: Tensor = groups.masked_fill(left_out.unsqueeze(-1), -math.inf).flatten(-2)
        return kept


_TINY = 1e-20
"""As in DeepSeek-V3: all of a token's sigmoids may be 0."""


def within_capacity(chosen: Tensor, selected: Tensor, real: Tensor, factor: float) -> Tensor:
    """Which of the choices `(N, K)` an expert has room for, in the order of the tokens.

    An expert takes `factor` times its even share of the real tokens' choices, rounded up; other tokens take no room.
    """
    share = factor * chosen.shape[-1] * int(real.sum()) / selected.shape[-1]
    room = math.ceil(share - 1e-9)  # 1.1 · 50 / 5 is 11 and not 12
    place = (selected & real.unsqueeze(-1)).int().cumsum(0).gather(-1, chosen)
    return (place <= room) | ~real.unsqueeze(-1)
