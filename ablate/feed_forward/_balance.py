"""How evenly a router spreads tokens over experts: the field's balance losses, z-loss and bias update, as functions.

Losses are 1 when balanced and E/k when all tokens choose the same k experts, whatever K is: the normalisation of Switch
and DeepSeek. That of HuggingFace's Mixtral, OLMoE and Qwen is K times as much.

Everywhere E is the number of experts, K the experts a token chooses; `probabilities` `(…, T, E)` sum to 1 over the
experts; `selected` `(…, T, E)` is True where a token chose an expert; `real` `(…, T)` is False for tokens that count
nowhere (None: all count). Losses are before any coefficient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choices(chosen: Tensor, n_experts: int) -> Tensor:
    """Indices `(…, K)` as `selected` `(…, E)`."""
    nothing = torch.zeros(*chosen.shape[:-1], n_experts, dtype=torch.bool, device=chosen.device)
    return nothing.scatter(-1, chosen, True)


def balance(probabilities: Tensor, selected: Tensor, real: Tensor | None = None) -> Tensor:
    """E · Σ f·P over each group of T tokens, `(…)`; 0 where no token is real.

    f is an expert's fraction of the choices made, not differentiated, P its mean probability: equations 4-6 of Switch
    (Fedus et al., 2021, arXiv:2101.03961) where K is 1, and the expert-level loss, equations 23-25, of DeepSeek-V2
    (DeepSeek-AI, 2024, arXiv:2405.04434), there over a sequence.
    """
    probabilities, selected, n_real = _of_real(probabilities, selected, real)
    slots = selected.sum(-2)
    fractions = slots / slots.sum(-1, keepdim=True).clamp(min=1)
    return slots.shape[-1] * (fractions * probabilities.sum(-2) / n_real).sum(-1)


def sequence_balance(probabilities: Tensor, selected: Tensor, real: Tensor | None = None) -> Tensor:
    """`balance` of each sequence of `(B, T, E)`, averaged.

    Equations 17-20 of DeepSeek-V3 (DeepSeek-AI, 2024, arXiv:2412.19437), where probabilities are sigmoid scores over
    their sum and `selected` are the K best of those scores, whatever bias or group decided in the end. With softmax and
    K = 1 it is HuggingFace's loss of Switch.
    """
    return over_sequences(balance(probabilities, selected, real), real)


def over_sequences(losses: Tensor, real: Tensor | None = None) -> Tensor:
    """The mean of the losses `(B,)` of sequences, over those with a real token."""
    return losses.sum() / (len(losses) if real is None else real.any(-1).sum().clamp(min=1))


def device_balance(probabilities: Tensor, selected: Tensor, n_groups: int, real: Tensor | None = None) -> Tensor:
    """`balance` of groups of experts, each on a device: equations 26-28 of DeepSeek-V2 (arXiv:2405.04434)."""
    probabilities, selected = (each.unflatten(-1, (n_groups, -1)).sum(-1) for each in (probabilities, selected))
    return balance(probabilities, selected, real)


def communication_balance(
    probabilities: Tensor, selected: Tensor, n_groups: int, top_groups: int, real: Tensor | None = None
) -> Tensor:
    """How evenly tokens are sent to devices, of which each may use `top_groups`: equations 29-31 of DeepSeek-V2.

    1 when tokens use all that they may and spread evenly (DeepSeek-AI, 2024, arXiv:2405.04434).
    """
    sent = selected.unflatten(-1, (n_groups, -1)).any(-1)
    probabilities, sent, n_real = _of_real(probabilities.unflatten(-1, (n_groups, -1)).sum(-1), sent, real)
    return n_groups / top_groups * (sent.sum(-2) / n_real * probabilities.sum(-2) / n_real).sum(-1)


def z_loss(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Mean squared log-sum-exp of router logits `(…, E)` over all tokens (Zoph et al., 2022, arXiv:2202.08906).

    (ln E)² where all logits are 0.
    """
    squares = logits.logsumexp(-1).square()
    return squares.mean() if real is None else (squares * real).sum() / real.sum().clamp(min=1)


def bias_step(load: Tensor, rate: float) -> Tensor:
    """What is added to the selection bias after a step in which experts were chosen `load` `(E,)` times (integers).

    An expert above the mean goes down by `rate`, one below it up, one at it stays (Wang et al., 2024,
    arXiv:2408.15664).
    """
    return rate * (load.sum() - len(load) * load).sign()


def _of_real(probabilities: Tensor, selected: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Both with zeros for what does not count, and how many tokens `(…, 1)` do: at least 1."""
    selected = selected.to(probabilities.dtype)
    if real is None:
        return probabilities, selected, probabilities.shape[-2]
    counted = real.unsqueeze(-1).to(probabilities.dtype)
    return probabilities * counted, selected * counted, counted.sum(-2).clamp(min=1)
