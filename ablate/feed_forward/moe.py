"""Mixture of experts: a router sends a token to `top_k` of `n_experts` (Shazeer et al., 2017, arXiv:1701.06538).

Softmax routing with the balance loss of Switch (Fedus et al., 2021, arXiv:2101.03961) on fractions of routed slots:
balanced routing gives 1, routing that collapsed on k experts n_experts / k, whatever top_k is. `balance_loss`
multiplies it once, per layer, after that. The z-loss is the mean squared log-sum-exp of the router logits (Zoph et
al., 2022, arXiv:2202.08906). Shared experts, which every token meets, follow DeepSeekMoE (Dai et al., 2024,
arXiv:2401.06066). No token is dropped.

With `accumulate` the balance loss is that of each piece, averaged: it is a product of two fractions of the tokens, not
linear in them, so that curves differ slightly with the number of pieces.
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ablate import registry
from ablate.choice import Rate, Real, SettingsError, Shape, Size, Whole
from ablate.feed_forward import FeedForwardChoice


class MixtureOfExperts(nn.Module):
    """The sum of the chosen experts' outputs by their weights, `(B, T, D)` to `(B, T, D)`.

    Router logits, softmax, choice and losses are float32 whatever the precision of the rest. Tokens where `mask` is
    False meet experts but count in no loss and no statistic.
    """

    def __init__(
        self,
        d_model: int,
        experts: list[nn.Module],
        shared: list[nn.Module],
        top_k: int,
        renormalize: bool = True,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        jitter: float = 0.0,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, len(experts), bias=False)
        self.experts, self.shared = nn.ModuleList(experts), nn.ModuleList(shared)
        self.top_k, self.renormalize = top_k, renormalize
        self.loss_weights, self.jitter = {"balance": balance_loss, "z": z_loss}, jitter
        self._losses: dict[str, Tensor] = {}
        self._counts = torch.zeros(0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Route each token and add up what its experts say."""
        tokens = x.flatten(0, -2)
        logits = self._logits(tokens)
        weights, chosen = self._choose(logits)
        self._observe(logits, chosen, mask)
        mixed = self._mix(tokens, weights.to(x.dtype), chosen)
        for expert in self.shared:
            mixed = mixed + expert(tokens)
        return mixed.view_as(x)

    def losses(self) -> dict[str, Tensor]:
        """The weighted auxiliary losses of the last forward pass in training mode; nothing before the first."""
        return {name: self.loss_weights[name] * loss for name, loss in self._losses.items()}

    def metrics(self) -> dict[str, float]:
        """Raw auxiliary losses, experts without a token, and the busiest expert's share, of the last training pass."""
        if not self._losses:
            return {}
        counts = self._counts
        return {
            "balance_loss_raw": self._losses["balance"].item(),
            "z_loss_raw": self._losses["z"].item(),
            "idle_experts": int((counts == 0).sum()),
            "busiest_expert_share": (counts.max() / counts.sum().clamp(min=1)).item(),
            "dropped_fraction": 0.0,
        }

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without the last pass's losses: they hold its graph, which cannot be copied."""
        return {**self.__dict__, "_losses": {}}

    def _logits(self, tokens: Tensor) -> Tensor:
        """Router logits `(N, E)` in float32, of inputs jittered in training."""
        with torch.autocast(tokens.device.type, enabled=False):
            wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            if self.training and self.jitter:
                wide = wide * torch.empty_like(wide).uniform_(1 - self.jitter, 1 + self.jitter)
            return F.linear(wide, self.router.weight.to(wide.dtype))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices `(N, top_k)` of each token's experts: softmax first, then the choice."""
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _observe(self, logits: Tensor, chosen: Tensor, mask: Tensor | None) -> None:
        """Keep the losses and counts of the real tokens."""
        if not self.training:
            return
        real = logits.new_ones(len(logits)) if mask is None else mask.flatten().to(logits.dtype)
        n_real, n_experts = real.sum().clamp(min=1), logits.shape[-1]
        slots = F.one_hot(chosen, n_experts).sum(1) * real[:, None]
        mean_probability = (logits.softmax(-1) * real[:, None]).sum(0) / n_real
        self._counts = slots.sum(0).detach()
        self._losses = {
            "balance": n_experts * (self._counts / (n_real * self.top_k) * mean_probability).sum(),
            "z": (logits.logsumexp(-1).square() * real).sum() / n_real,
        }

    def _mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Tokens sorted by expert, each expert on its own slice, then back to `(N, D)`, summed in a fixed order."""
        order = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        repeated = tokens.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, tokens.shape[-1])
        slices = repeated.index_select(0, order).split(sizes)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, slices, strict=True)])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        chosen_outputs: Tensor = out.index_select(0, back).unflatten(0, (-1, self.top_k))
        return (chosen_outputs * weights.unsqueeze(-1)).sum(1)


class Config(FeedForwardChoice):
    """Settings of the mixture."""

    n_experts: Size = Field(8, description="routed experts")
    top_k: Size = Field(2, description="routed experts that a token meets")
    n_shared_experts: Whole = Field(0, ge=0, description="experts that every token meets")
    expert: str = Field("swiglu", description="the feed_forward choice that an expert is")
    d_ff: Size | None = Field(None, description="width of one expert; that choice's own default unless given")
    renormalize: bool = Field(True, description="whether the chosen experts' weights are made to sum to 1")
    balance_loss: Real = Field(0.01, ge=0, description="weight of the balance loss (1 when balanced)")
    z_loss: Real = Field(0.0, ge=0, description="weight of the router's z-loss")
    jitter: Rate = Field(0.0, description="router inputs are multiplied by 1 ± this in training")

    def resolve(self, shape: Shape) -> Self:
        """The experts' width as a number."""
        return self.model_copy(update={"d_ff": getattr(self._expert(shape), "d_ff", self.d_ff)})

    def problems(self, shape: Shape) -> list[SettingsError]:
        """More chosen than there are."""
        message = f"top_k {self.top_k} is more than n_experts {self.n_experts}"
        cure = f"choose top_k from 1 to {self.n_experts}, or raise n_experts"
        return [SettingsError((), message, cure)] if self.top_k > self.n_experts else []

    def build(self, shape: Shape) -> MixtureOfExperts:
        """The module."""
        expert = self._expert(shape)
        return MixtureOfExperts(
            shape.d_model,
            [expert.build(shape) for _ in range(self.n_experts)],
            [expert.build(shape) for _ in range(self.n_shared_experts)],
            self.top_k,
            self.renormalize,
            self.balance_loss,
            self.z_loss,
            self.jitter,
        )

    def params(self, shape: Shape) -> int:
        """Router and all experts."""
        experts = self.n_experts + self.n_shared_experts
        return shape.d_model * self.n_experts + experts * self._expert(shape).params(shape)

    def params_active(self, shape: Shape) -> int:
        """Router, chosen and shared experts."""
        experts = self.top_k + self.n_shared_experts
        return shape.d_model * self.n_experts + experts * self._expert(shape).params(shape)

    def flops(self, shape: Shape) -> dict[str, float] | None:
        """The router, and those experts that a token meets."""
        experts = self._expert(shape).flops(shape)
        if experts is None:
            return None
        active = self.top_k + self.n_shared_experts
        return {"router": 2.0 * shape.d_model * self.n_experts, **{k: active * v for k, v in experts.items()}}

    def _expert(self, shape: Shape) -> FeedForwardChoice:
        """One expert's own settings."""
        raw: dict[str, Any] = {"name": self.expert} | ({"d_ff": self.d_ff} if self.d_ff else {})
        return cast(FeedForwardChoice, registry.configure("feed_forward", raw, ("expert",))).resolve(shape)
