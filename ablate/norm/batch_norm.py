"""Batch normalisation: each feature over all tokens of the batch (Ioffe and Szegedy, 2015, arXiv:1502.03167).

In language models these statistics vary so much from batch to batch that the running ones, which evaluation needs, do
not stand for them (PowerNorm, Shen et al., 2020, arXiv:2003.07845). In training a token's output also depends on the
tokens behind it: the training loss of a causal model leaks, the held-out loss does not.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.choice import Real
from ablate.norm import NormChoice


class BatchNorm(nn.Module):
    """(x - mean) / √(variance + eps) · w + b, mean and variance of each feature over the real tokens.

    Evaluation takes the running statistics; so does a batch of fewer than two real tokens, which has no variance, and
    it leaves them as they are.
    """

    reads_mask = True
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, d_model: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.register_buffer("running_mean", torch.zeros(d_model))
        self.register_buffer("running_var", torch.ones(d_model))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise `x` `(…, D)`; `mask` `(…)` is True where a token is real."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance = self._of_batch(wide, mask) if self.training else (self.running_mean, self.running_var)
        return ((wide - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias).to(x.dtype)

    def _of_batch(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of the batch. The running variance is unbiased, as in the paper."""
        rows = x.flatten(0, -2)
        real = rows.new_ones(len(rows), 1) if mask is None else mask.reshape(-1, 1).to(x.dtype)
        n = real.sum()
        mean = (rows * real).sum(0) / n.clamp(min=1)
        variance = ((rows - mean).square() * real).sum(0) / n.clamp(min=1)
        enough = n > 1
        known = torch.where(enough, mean, self.running_mean), torch.where(enough, variance, self.running_var)
        self._remember(mean, variance * n / (n - 1).clamp(min=1), enough)
        return known

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, enough: Tensor) -> None:
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            share = (self.momentum * enough).to(running.dtype)
            running.lerp_(new.to(running.dtype), share)


class Config(NormChoice):
    """Settings of batch normalisation."""

    leaks_in_training: ClassVar[bool] = True
    eps: Real = Field(1e-5, gt=0, lt=1, description="added to the variance, inside the root")
    momentum: Real = Field(0.1, gt=0, lt=1, description="share of a new batch in the running statistics")

    def build(self, d_model: int) -> BatchNorm:
        """The module."""
        return BatchNorm(d_model, self.eps, self.momentum)

    def params(self, d_model: int) -> int:
        """Scale and shift; the running statistics are no parameters."""
        return 2 * d_model
