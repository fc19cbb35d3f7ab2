"""The `feed_forward` slot: what works on each token alone. One file a choice.

A choice's module is called as `module(x, mask)` with `x` `(B, T, D)` and `mask` `(B, T)` bool or None (True where a
token is real). It may offer `losses()`, weighted and added to the training loss, `metrics()`, logged,
`after_step()`, and `value_path()`, the weights that values go through: every linear map's unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from ablate.choice import Choice, Problem, Shape


class FeedForwardChoice(Choice):
    """Settings, module and cost of one feed-forward network."""

    mixes: ClassVar[bool] = False
    """Whether it is made of other choices of this slot, and therefore cannot be one of theirs."""

    def problems(self, shape: Shape) -> Sequence[Problem]:
        """Why these (resolved) settings cannot work in this shape, one sentence each."""
        return []

    def build(self, shape: Shape) -> nn.Module:
        """The module. Weights are drawn later, by `ablate.init`."""
        raise NotImplementedError(f"feed_forward '{self.name}' has no build(shape)")

    def params(self, shape: Shape) -> int:
        """Parameters of one layer's module."""
        from ablate.meta import count_parameters

        return count_parameters(lambda: self.build(shape))

    def params_active(self, shape: Shape) -> int:
        """Parameters that one token meets."""
        return self.params(shape)

    def flops(self, shape: Shape) -> dict[str, float] | None:
        """FLOPs a token of one forward pass, by term: matrix products only. None where the choice does not say."""
        return None


def value_path(network: nn.Module) -> list[Tensor]:
    """The weights of a choice's module that values go through, `(rows, columns)` each, out of reach of autograd."""
    own: Callable[[], list[Tensor]] | None = getattr(network, "value_path", None)
    if own is not None:
        return own()
    return [module.weight.detach() for module in network.modules() if isinstance(module, nn.Linear)]


Base = FeedForwardChoice
