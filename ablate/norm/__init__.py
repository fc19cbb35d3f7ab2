"""The `norm` slot: what brings activations to one scale. One file a choice; modules map `(…, D)` to `(…, D)`."""

from __future__ import annotations

from torch import nn

from ablate.choice import Choice


class NormChoice(Choice):
    """Settings, module and cost of one normalisation."""

    def build(self, d_model: int) -> nn.Module:
        """The module over the last dimension."""
        raise NotImplementedError(f"norm '{self.name}' has no build(d_model)")

    def params(self, d_model: int) -> int:
        """Parameters of one module."""
        from ablate.meta import count_parameters

        return count_parameters(lambda: self.build(d_model))


Base = NormChoice
