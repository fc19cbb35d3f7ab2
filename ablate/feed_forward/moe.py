"""Mixture of experts: a router sends a token to `top_k` of `n_experts` (Shazeer et al., 2017, arXiv:1701.06538).

Scores are the softmax of the router's logits, or their sigmoid. The experts of a token are chosen by score, also within
the best groups of experts only (DeepSeek-AI, 2024, arXiv:2405.04434 and arXiv:2412.19437). Shared experts, which every
token meets, follow DeepSeekMoE (Dai et al., 2024, arXiv:2401.06066): they are one network, so many times as wide.

What keeps the experts' load even is `balance`:

- `loss`: that of Switch (Fedus et al., 2021, arXiv:2101.03961) on fractions of routed slots, over all tokens of a pass;
- `sequence`: that of DeepSeek-V3, over each sequence, on the best experts by score, also where groups forbid them
  (arXiv:2412.19437, equations 17-20);
- `device`: those of DeepSeek-V2, over each sequence, on the experts chosen within the groups, each of which is a device
  (arXiv:2405.04434, equations 23-31): of experts (`balance_loss`), of devices (`device_loss`) and of what is sent to
  them (`communication_loss`). With one group, whose two losses are constant, it is `sequence`;
- `bias`: no loss. A bias on the choice, in no weight, goes up by `balance_rate` after a step for an expert below the
  mean load and down for one above (Wang et al., 2024, arXiv:2408.15664). With a `balance_loss` above 0 the loss of
  `sequence` is added, as in DeepSeek-V3.

Balance losses are 1 when balanced, and n_experts / k when routing has collapsed on k experts, whatever top_k is; on
k devices that of devices is n_expert_groups / k, that of communication n_expert_groups / top_groups. A weight
multiplies each once, per layer, after that. The z-loss is the mean squared log-sum-exp of the router logits (Zoph et
al., 2022, arXiv:2202.08906).

No token is dropped, unless there is a `capacity_factor`: then, in training, an expert takes so many times its even
share of the tokens, in their order, and what is over passes it by, as in Switch. The other experts' weights stay.

With `accumulate` the balance losses are those of each piece, averaged: a product of two fractions of the tokens is not
linear in them, so that curves differ slightly with the number of pieces. The bias does not: loads are summed over the
pieces of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor

from ablate.choice import Identity, Problem, Rate, Real, SettingsError, Shape, Size, Whole
from ablate.feed_forward import soft_mixture
from ablate.feed_forward._experts import Balance, MixtureOfExperts, Weigh
from ablate.feed_forward._mixture import MixtureChoice
from ablate.feed_forward._routing import GroupScore, Routing, Score, router_logits
from ablate.feed_forward._same import drawn, noise

_RATE, _DEVICE, _SENT = 0.001, 0.05, 0.02  # of DeepSeek-V3, and V2
_OWN = {"balance_rate": ("bias", _RATE), "device_loss": ("device", _DEVICE), "communication_loss": ("device", _SENT)}


class Config(MixtureChoice):
    """Settings of the mixture."""

    top_k: Size = Field(2, description="routed experts that a token meets")
    n_shared_experts: Whole = Field(0, ge=0, description="experts that every token meets, as one so many times as wide")
    score: Score = Field("softmax", description="what makes scores of the router's logits")
    renormalize: bool = Field(True, description="whether the chosen experts' weights are made to sum to 1")
    routed_scaling: Real = Field(1.0, gt=0, description="what the chosen experts' weights are multiplied by after that")
    n_expert_groups: Size = Field(1, description="equal groups that the experts stand in, next to each other")
    top_groups: Size = Field(1, description="groups that a token's experts may come from, the best ones")
    group_score: GroupScore = Field("max", description="what a group is worth: its best score, or its two best summed")
    balance: Balance = Field("loss", description="what keeps the load even; see above")
    balance_loss: Real | None = Field(
        None,
        ge=0,
        description="weight of the balance loss (1 when balanced); unless given 0.01, 1e-4 with balance: sequence, "
        "0.003 with device, 0 with bias",
    )
    device_loss: Real = Field(_DEVICE, ge=0, description="weight of the devices' balance, with balance: device")
    communication_loss: Real = Field(_SENT, ge=0, description="weight of the communication's, with balance: device")
    balance_rate: Real = Field(_RATE, ge=0, description="step of the selection bias")
    z_loss: Real = Field(0.0, ge=0, description="weight of the router's z-loss")
    jitter: Rate = Field(0.0, description="router inputs are multiplied by 1 ± this in training")
    capacity_factor: Real | None = Field(
        None, gt=0, description="what an expert takes in training, in even shares of the tokens; all unless given"
    )
    weigh: Weigh = Field("output", description="whether weights are on the experts' outputs, or their inputs (Llama 4)")

    def resolve(self, shape: Shape) -> Self:
        """The experts' width and the loss's weight as numbers; what has no effect as if it were not given."""
        found = super().resolve(shape)
        for canonical in (_balancing, _groups, _capacity, _weights):
            found = found.model_copy(update=canonical(found))
        return found

    def problems(self, shape: Shape) -> Sequence[Problem]:
        """Experts that cannot be, or cannot be chosen."""
        return [*super().problems(shape), *self._unshared(shape), *(self._ungrouped() or self._unchosen())]

    def twin(self, shape: Shape) -> Self:
        """With few experts, grouped and chosen as before: 8 at most."""
        small = {"d_ff": None, "n_shared_experts": min(self.n_shared_experts, 2)}
        if self.n_experts > 8:
            groups = min(self.n_expert_groups, 4)
            top, size = max(1, min(self.top_groups, groups // 2)), 8 // groups
            few = groups * size if self.top_k == self.n_experts else min(self.top_k, 3, top * size)
            small |= {"n_experts": groups * size, "n_expert_groups": groups, "top_groups": top, "top_k": few}
        return self.model_copy(update=small).resolve(shape)

    def identities(self, shape: Shape) -> Iterator[Identity]:
        """Its two ends, and that sorting tokens by expert loses none."""
        yield "one expert is the network itself", lambda: self._of_one(shape)
        yield "all experts chosen is the dense mixture", lambda: self._of_all(shape)
        yield "a token gets what its experts say one by one", lambda: self._one_by_one(shape)
        yield "every choice of a real token reaches its expert or is counted as dropped", lambda: self._counted(shape)

    def build(self, shape: Shape) -> MixtureOfExperts:
        """The module."""
        given, one = self.resolve(shape), self.one_expert(shape)
        names = ("balance", "balance_loss", *_OWN, "z_loss", "jitter", "capacity_factor", "weigh")
        return MixtureOfExperts(
            shape.d_model,
            [one.build(shape) for _ in range(self.n_experts)],
            given.routing,
            self.one_expert(shape, self.n_shared_experts).build(shape) if self.n_shared_experts else None,
            **{name: getattr(given, name) for name in names},
        )

    @property
    def routing(self) -> Routing:
        """How experts are chosen."""
        grouped = (self.n_expert_groups, self.top_groups, self.group_score)
        return Routing(self.top_k, self.score, self.renormalize, self.routed_scaling, *grouped)

    def params(self, shape: Shape) -> int:
        """Router and all experts."""
        return self._params(shape, self.n_experts)

    def params_active(self, shape: Shape) -> int:
        """Router, chosen and shared experts."""
        return self._params(shape, self.top_k)

    def flops(self, shape: Shape) -> dict[str, float] | None:
        """The router, and those experts that a token meets."""
        parts = [self.one_expert(shape).flops(shape)] * self.top_k
        parts += [self.one_expert(shape, self.n_shared_experts).flops(shape)] if self.n_shared_experts else []
        terms = {"router": 2.0 * shape.d_model * self.n_experts}
        for part in parts:
            if part is None:
                return None
            terms |= {term: terms.get(term, 0.0) + flops for term, flops in part.items()}
        return terms

    def _params(self, shape: Shape, n_experts: int) -> int:
        n_shared = self.n_shared_experts
        shared = self.one_expert(shape, n_shared).params(shape) if n_shared else 0
        return shape.d_model * self.n_experts + n_experts * self.one_expert(shape).params(shape) + shared

    # --- What cannot work ---------------------------------------------------------------------------------------------

    def _unshared(self, shape: Shape) -> list[SettingsError]:
        if self.n_shared_experts < 2 or hasattr(self.one_expert(shape), "d_ff"):
            return []
        message = f"n_shared_experts {self.n_shared_experts} needs an expert with a width d_ff; {self.expert} has none"
        return [SettingsError((), message, "share one expert, or choose another")]

    def _ungrouped(self) -> list[SettingsError]:
        n, groups = self.n_experts, self.n_expert_groups
        if n % groups:
            cure = f"choose a divisor of n_experts, such as {max(d for d in range(1, groups + 1) if n % d == 0)}"
            return [SettingsError((), f"n_experts {n} is not divisible by n_expert_groups {groups}", cure)]
        if self.top_groups > groups:
            message = f"top_groups {self.top_groups} is more than n_expert_groups {groups}"
            return [SettingsError((), message, f"choose top_groups from 1 to {groups}")]
        if self.group_score == "top2" and n == groups > 1:
            message = f"group_score top2 needs two experts a group; {groups} groups of {n} experts have one"
            return [SettingsError((), message, "choose fewer groups, or group_score: max")]
        return []

    def _unchosen(self) -> list[SettingsError]:
        within = self.n_experts // self.n_expert_groups * self.top_groups
        if self.top_k <= within:
            return []
        where = "n_experts" if within == self.n_experts else f"top_groups {self.top_groups} hold together:"
        message = f"top_k {self.top_k} is more than {where} {within}"
        raised = "n_experts" if within == self.n_experts else "top_groups"
        return [SettingsError((), message, f"choose top_k from 1 to {within}, or raise {raised}")]

    # --- What must be equal -------------------------------------------------------------------------------------------

    def _plain(self, **changes: Any) -> Self:
        """A copy that only weighs, and weighs outputs."""
        ungrouped = {"n_expert_groups": 1, "top_groups": 1, "group_score": "max"}
        plain = {"n_shared_experts": 0, "routed_scaling": 1.0, "weigh": "output", "balance": "none"}
        return self.model_copy(update={**ungrouped, **plain, **changes})

    @torch.no_grad()
    def _of_one(self, shape: Shape) -> tuple[Tensor, Tensor]:
        mixture = drawn(self._plain(n_experts=1, top_k=1, renormalize=True).build(shape))
        alone, x = drawn(self.one_expert(shape).build(shape)), noise(shape)
        mixture.experts[0].load_state_dict(alone.state_dict())
        return mixture(x), alone(x)

    @torch.no_grad()
    def _of_all(self, shape: Shape) -> tuple[Tensor, Tensor]:
        dense = soft_mixture.Config(n_experts=self.n_experts, expert=self.expert, d_ff=self.d_ff)
        mixture, x = drawn(self._plain(top_k=self.n_experts, score="softmax").build(shape)), noise(shape)
        other = drawn(dense.build(shape))
        other.load_state_dict(mixture.state_dict())
        return mixture(x), other(x)

    @torch.no_grad()
    def _one_by_one(self, shape: Shape) -> tuple[Tensor, Tensor]:
        mixture, x = drawn(self.build(shape)), noise(shape)
        scores = mixture.routing.scores(router_logits(mixture.router, x))
        weights, chosen = mixture.routing.choose(scores, mixture.selection_bias)
        out = torch.zeros_like(x) if mixture.shared is None else mixture.shared(x)
        for index, expert in enumerate(mixture.experts):
            weight = torch.where(chosen == index, weights, 0).sum(-1, keepdim=True)
            said = expert(weight * x) if self.weigh == "input" else weight * expert(x)
            out = out + (weight > 0) * said
        return mixture(x), out

    @torch.no_grad()
    def _counted(self, shape: Shape) -> tuple[Tensor, Tensor]:
        mixture, x = drawn(self.build(shape)).train(), noise(shape)
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        mask[1, 3:] = False
        reached: list[int] = []
        for expert in mixture.experts:
            expert.register_forward_pre_hook(lambda _, inputs: reached.append(len(inputs[0])))
        mixture(x, mask)
        made, padding = self.top_k * mask.sum().double(), self.top_k * (~mask).sum()
        return sum(reached) - padding + mixture.metrics()["dropped_fraction"] * made, made


def _groups(given: Config) -> dict[str, Any]:
    """No groups where they forbid nothing: the best experts of all lie in the best groups anyway."""
    n, groups, top = given.n_experts, given.n_expert_groups, given.top_groups
    by_best = given.group_score == "max" and given.top_k <= top
    idle = n % groups == 0 and top <= groups and (top == groups or by_best)
    if given.balance == "device":
        return {"group_score": "max"} if idle else {}  # they are in the losses, whatever they forbid
    return {"n_expert_groups": 1, "top_groups": 1, "group_score": "max"} if idle else {}


def _balancing(given: Config) -> dict[str, Any]:
    """Weights as numbers; `none` where nothing is balanced, or all experts are always chosen."""
    balance, usual = given.balance, {"loss": 0.01, "sequence": 1e-4, "device": 0.003, "bias": 0.0, "none": 0.0}
    weight = usual[balance] if given.balance_loss is None else given.balance_loss
    if balance == "device" and given.n_expert_groups == 1:
        balance = "sequence"
    of_devices = balance == "device" and (given.device_loss or given.communication_loss)
    if given.top_k == given.n_experts or not (weight or of_devices or balance == "bias"):
        balance = "none"
    own = {name: getattr(given, name) if balance == owner else usual for name, (owner, usual) in _OWN.items()}
    return {"balance": balance, "balance_loss": 0.0 if balance == "none" else weight, **own}


def _capacity(given: Config) -> dict[str, Any]:
    """No limit where all tokens may choose the same expert without reaching it."""
    reached = given.capacity_factor is not None and given.capacity_factor * given.top_k < given.n_experts
    return {} if reached else {"capacity_factor": None}


def _weights(given: Config) -> dict[str, Any]:
    """What makes no difference to weights that are 1, or sum to 1, whatever the router says."""
    found: dict[str, Any] = {}
    if given.score == "softmax" and given.top_k == given.n_experts:
        found["renormalize"] = True
    if given.top_k == 1 and (given.renormalize or "renormalize" in found):
        found |= {"weigh": "output"} if given.routed_scaling == 1 else {}
        found |= {"score": "softmax"} if given.balance == "none" and given.n_expert_groups == 1 else {}
        found |= {"jitter": 0.0} if given.n_experts == 1 and not given.z_loss else {}
    return found
