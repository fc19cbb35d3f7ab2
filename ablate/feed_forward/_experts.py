"""The module of the mixture of experts: routes tokens, runs experts, keeps losses and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ablate.feed_forward import _balance, value_path
from ablate.feed_forward._routing import Routing, router_logits, within_capacity

Balance = Literal["loss", "sequence", "device", "bias", "none"]
Weigh = Literal["output", "input"]


class MixtureOfExperts(nn.Module):
    """The sum of the chosen experts' outputs by their weights, `(B, T, D)` to `(B, T, D)`.

    Router logits, scores, choice and losses are float32 at least, whatever the precision of the rest. Tokens where
    `mask` is False meet experts but count in no loss, no statistic, no load and no capacity.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        experts: Sequence[nn.Module],
        routing: Routing,
        shared: nn.Module | None = None,
        *,
        balance: Balance = "none",
        balance_loss: float = 0.0,
        device_loss: float = 0.0,
        communication_loss: float = 0.0,
        balance_rate: float = 0.001,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        weigh: Weigh = "output",
    ) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, len(experts), bias=False)
        self.experts, self.shared = nn.ModuleList(experts), shared
        self.register_buffer("selection_bias", torch.zeros(len(experts)) if balance == "bias" else None)
        self.routing, self.balance, self.balance_rate = routing, balance, balance_rate
        self.loss_weights = {"balance": balance_loss, "z": z_loss}
        if balance == "device":
            self.loss_weights |= {"device": device_loss, "communication": communication_loss}
        self.jitter, self.capacity_factor, self.weigh = jitter, capacity_factor, weigh
        self.path = ""  # in which the experts of the last pass took their tokens
        self._losses: dict[str, Tensor] = {}
        self._load = self._counts = torch.zeros(0)  # of the last training pass: as chosen, and without what is dropped
        self._step_load: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Route each token and add up what its experts say."""
        logits = router_logits(self.router, x, self.jitter if self.training else 0.0)
        scores = self.routing.scores(logits)
        weights, chosen = self.routing.choose(scores, self.selection_bias)
        kept = self._observe(logits, scores, chosen, mask) if self.training else None
        mixed = self._mix(x.flatten(0, -2), weights.to(x.dtype).flatten(0, -2), chosen.flatten(0, -2), kept).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)

    def losses(self) -> dict[str, Tensor]:
        """The weighted auxiliary losses of the last forward pass in training mode; nothing before the first."""
        return {name: self.loss_weights[name] * loss for name, loss in self._losses.items() if self.loss_weights[name]}

    def metrics(self) -> dict[str, float]:
        """Of the last training pass: raw auxiliary losses, and how the choices fell.

        That is experts that no token chose, the busiest one's share of the choices, and the share that was dropped.
        """
        if not self._losses:
            return {}
        made = self._load.sum().clamp(min=1)
        return {
            **{f"{name}_loss_raw": loss.item() for name, loss in self._losses.items()},
            "idle_experts": int((self._load == 0).sum()),
            "busiest_expert_share": (self._load.max() / made).item(),
            "dropped_fraction": ((self._load - self._counts).sum() / made).item(),
        }

    def value_path(self) -> list[Tensor]:
        """All experts' weights: the router says how much, not what."""
        experts = [*self.experts, *([] if self.shared is None else [self.shared])]
        return [weight for expert in experts for weight in value_path(expert)]

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the selection bias, if there is one, by the load of all training passes since the last step."""
        if self.selection_bias is not None and self._step_load is not None:
            self.selection_bias += _balance.bias_step(self._step_load, self.balance_rate)
            self._step_load = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without the last pass's losses: they hold its graph, which cannot be copied."""
        return {**self.__dict__, "_losses": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A cast to fewer than 32 bits leaves the selection bias out: its steps would be lost in rounding."""
        wide = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if wide is not None and self.selection_bias is not None and self.selection_bias.dtype.itemsize < 4:
            self.selection_bias = wide.to(self.selection_bias.device, torch.float32)
        return self

    def _observe(self, logits: Tensor, scores: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor | None:
        """Keep losses and counts of the real tokens. Returns which choices `(N, K)` there is room for, None for all."""
        selected, mask = _balance.choices(chosen, logits.shape[-1]), None if mask is None else mask.bool()
        self._losses = {**self._unbalanced(scores, selected, mask), "z": _balance.z_loss(logits, mask)}
        real = torch.ones_like(chosen[..., 0], dtype=torch.bool) if mask is None else mask
        chosen, selected, real = chosen.flatten(0, -2), selected.flatten(0, -2), real.flatten()
        self._load = self._counts = (selected & real.unsqueeze(-1)).sum(0)
        if self.selection_bias is not None:
            self._step_load = self._load if self._step_load is None else self._step_load + self._load
        if self.capacity_factor is None:
            return None
        kept = within_capacity(chosen, selected, real, self.capacity_factor)
        self._counts = (torch.zeros_like(selected).scatter(-1, chosen, kept) & real.unsqueeze(-1)).sum(0)
        return kept

    def _unbalanced(self, scores: Tensor, selected: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """The losses of `(B, T, E)` scores that are about balance, before their weights."""
        probabilities, top_k = self.routing.probabilities(scores), self.routing.top_k
        if self.balance == "device":
            return self._by_device(probabilities, selected, mask)
        if self.balance in ("sequence", "bias"):
            best = _balance.choices(scores.topk(top_k, dim=-1).indices, scores.shape[-1])
            return {"balance": _balance.sequence_balance(probabilities, best, mask)}
        real = None if mask is None else mask.flatten()
        return {"balance": _balance.balance(probabilities.flatten(0, -2), selected.flatten(0, -2), real)}

    def _by_device(self, probabilities: Tensor, selected: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """DeepSeek-V2's three, of what was chosen within the groups that it was limited to."""
        groups, top = self.routing.n_groups, self.routing.top_groups
        levels = {
            "balance": _balance.balance(probabilities, selected, mask),
            "device": _balance.device_balance(probabilities, selected, groups, mask),
            "communication": _balance.communication_balance(probabilities, selected, groups, top, mask),
        }
        return {level: _balance.over_sequences(losses, mask) for level, losses in levels.items()}

    def _mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor | None) -> Tensor:
        """Choices sorted by expert, each expert on its own slice, then back to `(N, D)`, summed in a fixed order.

        What is not kept comes after the last expert, and adds nothing. In training an expert without a token is run
        too: its gradient is 0, and not missing.
        """
        self.path = "expert by expert"
        n_experts, weights = len(self.experts), weights.unsqueeze(-1)
        goal = (chosen if kept is None else chosen.masked_fill(~kept, n_experts)).flatten()
        order, sizes = goal.argsort(stable=True), torch.bincount(goal, minlength=n_experts + 1).tolist()
        inputs = tokens.unsqueeze(1).expand(-1, chosen.shape[-1], -1)
        inputs = inputs * weights if self.weigh == "input" else inputs
        *slices, over = inputs.reshape(-1, tokens.shape[-1]).index_select(0, order).split(sizes)
        busy = [(expert, part) for expert, part in zip(self.experts, slices, strict=True) if self.training or len(part)]
        outputs = [expert(part) for expert, part in busy]
        outputs += [torch.zeros_like(over, dtype=outputs[0].dtype)]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        said = torch.cat(outputs).index_select(0, back).view(*chosen.shape, -1)
        return (said * weights if self.weigh == "output" else said).sum(1)
