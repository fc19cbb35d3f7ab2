"""Several projections of the same input as one matrix product."""

from __future__ import annotations

from torch import Tensor, nn


class PackedLinear(nn.Linear):
    """`(…, D)` to several tensors `(…, parts[i])`, in one product.

    One call instead of three is what makes small models fast. Initialisation treats each part as a matrix of its own
    (`ablate.init`), so packing changes no distribution.
    """

    def __init__(self, d_in: int, parts: tuple[int, ...], bias: bool = False) -> None:
        super().__init__(d_in, sum(parts), bias=bias)
        self.parts = parts

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections of `x`."""
        return self(x).split(self.parts, dim=-1)  # type: ignore[no-any-return]
