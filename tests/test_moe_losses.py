"""Balance losses, z-loss and bias update against published implementations: every value of data/moe_losses.json.

The values were made with HuggingFace transformers 5.24.0 and torch 2.13.0 (CPU), and by the papers' formulas in
float64; each part of the file states its convention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from references import pooled_balance
from torch import Tensor

from ablate.feed_forward._balance import (
    balance,
    bias_step,
    choices,
    communication_balance,
    device_balance,
    sequence_balance,
    z_loss,
)
from ablate.feed_forward._routing import Routing

ORACLE = json.loads((Path(__file__).parent / "data" / "moe_losses.json").read_text(encoding="utf-8"))
LOGITS = torch.tensor(ORACLE["inputs"]["router_logits"], dtype=torch.float64)  # (layers, B, T, E)
MASK = torch.tensor(ORACLE["inputs"]["attention_mask"]).bool()
MIXTRAL = ORACLE["A_hf_mixtral_load_balancing_loss_func"]["values"]
SWITCH = ORACLE["B_switch_eq4"]
SWITCH_BY_SEQUENCE = ORACLE["C_hf_switch_load_balancing_loss_func"]
Z_LOSS = ORACLE["D_st_moe_z_loss"]
V3 = ORACLE["E_deepseek_v3_sequence_wise"]
V2 = ORACLE["E2_deepseek_v2"]
BIAS = ORACLE["F_aux_loss_free_bias_update"]
ENDS = ORACLE["G_identities"]
LAYERS = [0, 1, 2]


def near(value: Any, rel: float = 1e-12) -> Any:
    return pytest.approx(value, rel=rel, abs=0)


def of_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Probabilities, and who is chosen by them."""
    return logits.softmax(-1), choices(logits.topk(top_k).indices, logits.shape[-1])


def fractions(loss: Callable[[Tensor], Tensor], probabilities: Tensor) -> list[float]:
    """What the loss multiplies the mean probabilities with: its derivative by them, since it is linear in them."""
    leaf = probabilities.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    return gradient.sum(-2).tolist()


# --- HuggingFace's Mixtral form: pooled over layers, balanced at top_k ------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_pooled_form_is_huggingface_s(top_k: int) -> None:
    values = MIXTRAL[f"top_{top_k}"]
    whole, masked = pooled_balance(LOGITS, top_k).item(), pooled_balance(LOGITS, top_k, MASK).item()
    assert whole == near(values["formula_float64_all_layers"])
    assert masked == near(values["formula_float64_with_attention_mask"])
    assert whole == near(values["hf_all_layers"], rel=1e-5)
    assert masked == near(values["hf_with_attention_mask"], rel=1e-5)
    assert whole / top_k == near(values["normalised_so_that_balanced_is_1_all_layers"])


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_pooled_form_in_float32_is_huggingface_s_to_its_precision(top_k: int) -> None:
    values = MIXTRAL[f"top_{top_k}"]
    assert pooled_balance(LOGITS.float(), top_k).item() == near(values["hf_all_layers"], rel=1e-5)
    assert pooled_balance(LOGITS.float(), top_k, MASK).item() == near(values["hf_with_attention_mask"], rel=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_pooled_form_is_not_the_mean_of_the_layers(top_k: int) -> None:
    values = MIXTRAL[f"top_{top_k}"]
    layers = [pooled_balance(layer[None], top_k).item() for layer in LOGITS]
    assert layers == near(values["formula_float64_per_layer"])
    assert sum(layers) / 3 == near(values["mean_of_per_layer_losses"])
    assert sum(layers) / 3 > 1.1 * values["formula_float64_all_layers"]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_pooled_form_s_parts(top_k: int) -> None:
    values, (probabilities, selected) = MIXTRAL[f"top_{top_k}"], of_softmax(LOGITS.flatten(0, 2), top_k)
    found = fractions(lambda p: balance(p, selected), probabilities)
    assert [top_k / 8 * f for f in found] == near(values["f"])
    assert probabilities.mean(0).tolist() == near(values["P"])


# --- Switch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_switch(layer: int) -> None:
    values, (probabilities, selected) = SWITCH["values"][f"layer_{layer}"], of_softmax(LOGITS[layer].flatten(0, 1), 1)
    loss = balance(probabilities, selected).item()
    assert loss == near(values["N_sum_fP"])
    assert SWITCH["alpha"] * loss == near(values["loss_alpha_0_01"])
    assert [f / 8 for f in fractions(lambda p: balance(p, selected), probabilities)] == near(values["f"])
    assert probabilities.mean(0).tolist() == near(values["P"])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda logits: balance(*of_softmax(logits, 1)), SWITCH["gradient_layer0_of_N_sum_fP_wrt_logits"]),
        (z_loss, Z_LOSS["gradient_layer0_wrt_logits"]),
    ],
    ids=["switch", "z"],
)
def test_gradients(loss: Callable[[Tensor], Tensor], expected: list[list[float]]) -> None:
    logits = LOGITS[0].flatten(0, 1).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), atol=1e-16, rtol=1e-9)


def test_switch_by_sequence_is_huggingface_s() -> None:
    probabilities, selected = of_softmax(LOGITS[0], 1)
    assert sequence_balance(probabilities, selected).item() == near(
        SWITCH_BY_SEQUENCE["formula_float64_mean_over_sequences"]
    )
    assert sequence_balance(probabilities, selected).item() == near(SWITCH_BY_SEQUENCE["hf"], rel=1e-5)
    assert balance(probabilities, selected).tolist() == near(SWITCH_BY_SEQUENCE["per_sequence"])
    pooled = balance(probabilities.flatten(0, 1), selected.flatten(0, 1)).item()
    assert pooled == near(SWITCH_BY_SEQUENCE["pooled_over_batch"])
    assert pooled < 0.99 * SWITCH_BY_SEQUENCE["hf"]


# --- z-loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_the_z_loss(layer: int) -> None:
    values, loss = Z_LOSS["values"][f"layer_{layer}"], z_loss(LOGITS[layer]).item()
    assert (loss, loss) == near((values["formula"], values["hf"]))
    assert 1e-3 * loss == near(values["times_1e_3"])


def test_the_z_loss_leaves_padding_out() -> None:
    assert z_loss(LOGITS[0], MASK).item() == near(Z_LOSS["masked_layer0"])


# --- DeepSeek-V3 ------------------------------------------------------------------------------------------------------


def by_sigmoid(routing: str) -> tuple[Routing, Tensor | None]:
    """The routing of one part of the values, and its bias on the choice."""
    groups = (V3["n_group"], V3["topk_group"], "top2") if "group" in routing else (1, 1, "max")
    bias = None if "unbiased" in routing else torch.tensor(V3["e_score_correction_bias"], dtype=torch.float64)
    return Routing(V3["K_r"], "sigmoid", True, 1.0, *groups), bias


@pytest.mark.parametrize("name", V3["values"])
def test_deepseek_v3_s_loss_of_a_sequence(name: str) -> None:
    values, (routing, bias) = V3["values"][name], by_sigmoid(name)
    scores = routing.scores(LOGITS[0])
    probabilities, chosen = routing.probabilities(scores), routing.choose(scores, bias)[1]
    selected = choices(chosen, 8)
    assert sequence_balance(probabilities, selected).item() == near(values["mean_over_sequences_sum_fP"])
    for i, expected in enumerate(values["per_sequence"]):
        assert chosen[i].sort().values.tolist() == expected["selected"]
        loss = balance(probabilities[i], selected[i]).item()
        assert loss == near(expected["sum_fP"])
        assert V3["alpha"] * loss == near(expected["loss_alpha_1e_4"])
        found = fractions(lambda p, i=i: balance(p, selected[i]), probabilities[i])
        assert found == pytest.approx(expected["f"], rel=1e-12, abs=1e-12)
        assert probabilities[i].mean(0).tolist() == near(expected["P"])


# --- DeepSeek-V2 ------------------------------------------------------------------------------------------------------


def test_deepseek_v2_s_losses_of_experts_devices_and_communication() -> None:
    routing = Routing(3, "softmax", False, 1.0, 4, 2, "max")
    probabilities = routing.scores(LOGITS[0].flatten(0, 1))
    chosen = routing.choose(probabilities)[1]
    assert chosen.sort().values.tolist() == V2["selected"]
    selected = choices(chosen, 8)
    levels: dict[str, Callable[[Tensor], Tensor]] = {
        "expert_level": lambda p: balance(p, selected),
        "device_level": lambda p: device_balance(p, selected, 4),
        "communication": lambda p: communication_balance(p, selected, 4, 2),
    }
    for name, loss in levels.items():
        values = V2[name]
        size = 8 // len(values["f"])
        assert loss(probabilities).item() == near(values["sum_fP"])
        assert fractions(loss, probabilities)[::size] == near(values["f"])
        assert probabilities.mean(0).unflatten(0, (-1, size)).sum(-1).tolist() == near(values["P"])


# --- The selection bias -----------------------------------------------------------------------------------------------


def test_the_bias_update_over_all_steps() -> None:
    routing, bias = Routing(3, "sigmoid"), torch.zeros(8, dtype=torch.float64)
    scores = routing.scores(LOGITS[0].flatten(0, 1))
    told = {each["step"]: each for each in BIAS["steps"]}
    told |= {int(name.removeprefix("step_")): each for name, each in BIAS["later"].items()}
    for step in range(max(told) + 1):
        load = choices(routing.choose(scores, bias)[1], 8).sum(0)
        after = bias + bias_step(load, BIAS["gamma"])
        if step in told:
            expected = told[step]
            assert bias.tolist() == pytest.approx(expected["bias_before"], rel=1e-6, abs=1e-12)
            assert load.tolist() == expected["load"]
            assert (load.max() / load.double().mean() - 1).item() == near(expected["max_violation"])
            assert load.double().mean() == expected.get("mean_load", 9.0)
            assert after.tolist() == pytest.approx(expected.get("bias_after", after.tolist()), rel=1e-6, abs=1e-12)
        bias = after
    assert len(told) == 12


def test_an_expert_at_the_mean_stays() -> None:
    assert bias_step(torch.tensor([3, 0, 6, 3]), 0.5).tolist() == [0.0, 0.5, -0.5, 0.0]


# --- The documented ends ----------------------------------------------------------------------------------------------


def test_uniform_logits() -> None:
    flat = torch.zeros(3, 2, 12, 8, dtype=torch.float64)
    assert balance(*of_softmax(flat[0].flatten(0, 1), 1)).item() == near(ENDS["uniform_logits_N_sum_fP_any_f"])
    assert pooled_balance(flat, 2).item() == near(ENDS["hf_mixtral_uniform_logits_top2"])
    assert z_loss(flat).item() == near(ENDS["z_loss_zero_logits"])
    assert z_loss(flat + 1.5).item() == near((1.5 + math.log(8)) ** 2)


def turns(top_k: int) -> Tensor:
    """Logits `(8, 8)` of eight tokens that go round the experts, `top_k` next to each other."""
    return 50 * torch.stack([torch.eye(8).double()[(i + torch.arange(top_k)) % 8].sum(0) for i in range(8)])


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_1_when_balanced_and_experts_over_k_when_collapsed(top_k: int) -> None:
    ends = {"balanced": (turns(top_k), 1.0), "collapsed": (turns(top_k)[:1].expand(8, 8), 8 / top_k)}
    for logits, expected in ends.values():
        probabilities, selected = of_softmax(logits, top_k)
        assert balance(probabilities, selected).item() == near(expected, rel=1e-9)
        assert sequence_balance(probabilities[None], selected[None]).item() == near(expected, rel=1e-9)
        assert pooled_balance(logits[None, None], top_k).item() == near(top_k * expected, rel=1e-9)
    assert pooled_balance(50 * torch.eye(8)[:1].expand(1, 1, 9, 8), 1).item() == near(ENDS["hf_mixtral_collapsed_top1"])


@pytest.mark.parametrize(("tokens", "expected"), [(slice(0, 8, 2), 1.0), (slice(0, 1), 4.0)])
def test_the_ends_of_devices(tokens: slice, expected: float) -> None:
    probabilities, selected = of_softmax(turns(2)[tokens], 2)  # each token's two experts are one device's
    assert device_balance(probabilities, selected, 4).item() == near(expected, rel=1e-9)
    assert communication_balance(probabilities, selected, 4, 1).item() == near(expected, rel=1e-9)


# --- Padding ----------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "z": z_loss,
    "batch": lambda x, real: balance(
        *(each.flatten(0, 1) for each in of_softmax(x, 2)), None if real is None else real.flatten()
    ),
    "sequence": lambda x, real: sequence_balance(*of_softmax(x, 2), real),
    "pooled": lambda x, real: pooled_balance(x[None], 2, real),
    "device": lambda x, real: device_balance(*of_softmax(x, 2), 4, real).mean(),
    "communication": lambda x, real: communication_balance(*of_softmax(x, 2), 4, 2, real).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_nothing(name: str) -> None:
    loss, logits = LOSSES[name], LOGITS[0]
    padded = torch.cat([logits, LOGITS[1][:, :3]], 1)
    real = torch.arange(15).expand(2, 15) < 12
    assert loss(padded, real).item() == near(loss(logits, None).item())
    assert loss(padded, None).item() != near(loss(logits, None).item(), rel=1e-3)


def test_a_sequence_of_padding_alone_is_in_no_average() -> None:
    probabilities, selected = of_softmax(LOGITS[0], 2)
    real = torch.tensor([True, False])[:, None].expand(2, 12)
    assert sequence_balance(probabilities, selected, real).item() == near(balance(probabilities, selected)[0].item())


@pytest.mark.parametrize("name", LOSSES)
def test_padding_alone_gives_0_and_no_nan(name: str) -> None:
    assert LOSSES[name](LOGITS[0], torch.zeros_like(MASK)).item() == 0.0
