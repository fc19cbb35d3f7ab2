"""Dense mixture: all experts on every token (Jacobs et al., 1991; as a layer Eigen et al., 2013, arXiv:1312.4314).

Each token gets the sum of all experts' outputs, weighted by the softmax of a router. It has the parameters of a mixture
and saves nothing: every token meets, and pays for, all of them. What "Soft MoE" mixes (arXiv:2308.00951) are tokens,
later ones among them; that is something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn

from ablate.choice import Identity, Shape
from ablate.feed_forward import value_path
from ablate.feed_forward._mixture import MixtureChoice
from ablate.feed_forward._routing import router_logits
from ablate.feed_forward._same import drawn, noise


class DenseMixture(nn.Module):
    """The sum of all experts' outputs by their weights, `(…, D)` to `(…, D)`; the router is float32 at least."""

    def __init__(self, d_model: int, experts: list[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Each token by itself."""
        weights = router_logits(self.router, x).softmax(-1).to(x.dtype).unbind(-1)
        out = torch.zeros_like(x)
        for weight, expert in zip(weights, self.experts, strict=True):
            out = out + weight.unsqueeze(-1) * expert(x)
        return out

    def value_path(self) -> list[Tensor]:
        """The experts' weights: the router says how much, not what."""
        return [weight for expert in self.experts for weight in value_path(expert)]


class Config(MixtureChoice):
    """Settings of the dense mixture."""

    def twin(self, shape: Shape) -> Self:
        """With few experts."""
        return super().twin(shape).model_copy(update={"n_experts": min(self.n_experts, 4)})

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """Weights that sum to 1."""
        yield "one expert is the network itself", lambda: self._of_equals(1, shape)
        yield "equal experts are one of them", lambda: self._of_equals(self.n_experts, shape)

    def build(self, shape: Shape) -> DenseMixture:
        """The module."""
        expert = self.one_expert(shape)
        return DenseMixture(shape.d_model, [expert.build(shape) for _ in range(self.n_experts)])

    def params(self, shape: Shape) -> int:
        """Router and experts."""
        return self.n_experts * (shape.d_model + self.one_expert(shape).params(shape))

    def flops(self, shape: Shape) -> dict[str, float] | None:
        """The router and all experts."""
        one = self.one_expert(shape).flops(shape)
        if one is None:
            return None
        experts = {term: self.n_experts * flops for term, flops in one.items()}
        return {"router": 2.0 * shape.d_model * self.n_experts, **experts}

    @torch.no_grad()
    def _of_equals(self, n_experts: int, shape: Shape) -> tuple[Tensor, Tensor]:
        mixture = drawn(self.model_copy(update={"n_experts": n_experts}).build(shape))
        alone, x = drawn(self.one_expert(shape).build(shape)), noise(shape)
        for expert in mixture.experts:
            expert.load_state_dict(alone.state_dict())
        return mixture(x), alone(x)
