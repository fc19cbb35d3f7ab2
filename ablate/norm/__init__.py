"""The `norm` slot: what brings activations to one scale. One file a choice; modules map `(…, D)` to `(…, D)`.

A module whose class says `reads_mask = True` is called as `module(x, mask)` with `mask` `(B, T)` bool or None, True
where a token is real: it looks beyond the token it normalises, and must leave padding out.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from ablate.choice import Choice


class NormChoice(Choice):
    """Settings, module and cost of one normalisation."""

    leaks_in_training: ClassVar[bool] = False
    """Whether in training, by design, a token's output depends on other tokens, also later ones."""

    def build(self, d_model: int) -> nn.Module:
        """The module over the last dimension."""
        raise NotImplementedError(f"norm '{self.name}' has no build(d_model)")

    def params(self, d_model: int) -> int:
        """Parameters of one module."""
        from ablate.meta import count_parameters

        return count_parameters(lambda: self.build(d_model))


Base = NormChoice
