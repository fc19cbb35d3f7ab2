"""Mixture of experts: what is chosen, what is computed, what is lost, what is counted, what is dropped."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ablate import registry
from ablate.choice import Shape
from ablate.feed_forward._gated import GatedFeedForward
from ablate.feed_forward._routing import Routing
from ablate.feed_forward.moe import Config, MixtureOfExperts
from ablate.init import initialise
from ablate.meta import on_meta

ORACLE = json.loads((Path(__file__).parent / "data" / "moe_losses.json").read_text(encoding="utf-8"))
LOGITS = torch.tensor(ORACLE["inputs"]["router_logits"], dtype=torch.float64)  # (layers, B, T, E), exact in bf16
MASK = torch.tensor(ORACLE["inputs"]["attention_mask"]).bool()
MIXTRAL = ORACLE["A_hf_mixtral_load_balancing_loss_func"]["values"]
SWITCH = ORACLE["B_switch_eq4"]
Z_LOSS = ORACLE["D_st_moe_z_loss"]
V3 = ORACLE["E_deepseek_v3_sequence_wise"]
V2 = ORACLE["E2_deepseek_v2"]
V3_BIAS = torch.tensor(V3["e_score_correction_bias"], dtype=torch.float64)
UPDATES = ORACLE["F_aux_loss_free_bias_update"]
SHAPE = Shape(d_model=8, n_layers=2, n_heads=2, max_seq_len=16, vocab_size=32)


def swiglu(width: int = 12) -> nn.Module:
    return GatedFeedForward(8, width, nn.functional.silu)


def router_of_logits(n_experts: int, routing: int | Routing = 2, **settings: Any) -> MixtureOfExperts:
    """A mixture whose inputs are its router logits, and whose experts return what they get."""
    experts: list[nn.Module] = [nn.Identity() for _ in range(n_experts)]
    routing = Routing(routing) if isinstance(routing, int) else routing
    module = MixtureOfExperts(n_experts, experts, routing, **settings).double().train()
    nn.init.eye_(module.router.weight)
    return module


def raw_losses(logits: Tensor, routing: int | Routing, mask: Any = None, **settings: Any) -> dict[str, Tensor]:
    module = router_of_logits(logits.shape[-1], routing, balance_loss=1.0, z_loss=1.0, **settings)
    module(logits, mask)
    return module.losses()


def small_mixture(n_experts: int = 4, routing: int | Routing = 2, n_shared: int = 0, **settings: Any) -> Any:
    routing = Routing(routing) if isinstance(routing, int) else routing
    shared = swiglu(12 * n_shared) if n_shared else None
    module = MixtureOfExperts(8, [swiglu() for _ in range(n_experts)], routing, shared, **settings)
    initialise(module, "normal", 0.5, seed=0)
    return module


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def configured(**settings: Any) -> Config:
    """With every default filled in."""
    found = registry.configure("feed_forward", {"name": "moe", **settings}).resolve(SHAPE)
    assert isinstance(found, Config)
    return found


# --- What is chosen ---------------------------------------------------------------------------------------------------


def chosen_one_by_one(routing: Routing, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Experts and their weights for one token, by sorting lists."""
    n = len(logits)
    powers = [math.exp(x) for x in logits]
    scores = [p / sum(powers) for p in powers] if routing.score == "softmax" else [p / (1 + p) for p in powers]
    wanted, size = [s + b for s, b in zip(scores, bias, strict=True)], n // routing.n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(routing.n_groups)]
    best = 1 if routing.group_score == "max" else 2
    groups.sort(key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[:best]))
    allowed = itertools.chain(*groups[: routing.top_groups])
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: routing.top_k]
    total = sum(scores[e] for e in chosen) if routing.renormalize else 1.0
    return {e: routing.scaling * scores[e] / total for e in chosen}


ROUTINGS = [
    Routing(1),
    Routing(2),
    Routing(3, renormalize=False),
    Routing(8),
    Routing(2, "sigmoid"),
    Routing(1, "sigmoid", renormalize=False),
    Routing(3, "sigmoid", scaling=2.5),
    Routing(3, "softmax", False, 16.0, 4, 2, "max"),
    Routing(3, "sigmoid", True, 2.5, 4, 2, "top2"),
    Routing(4, "softmax", True, 1.0, 2, 1, "top2"),
    Routing(2, "sigmoid", True, 1.0, 8, 3, "max"),
]


@pytest.mark.parametrize("bias", [0.0, 0.3, -2.0], ids=["unbiased", "biased", "negative"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_experts_and_weights_are_those_of_sorted_lists(routing: Routing, bias: float) -> None:
    lean = bias * noise(8, seed=2).double().abs()
    logits = torch.cat([LOGITS.flatten(0, 2), noise(20, 8).double()])
    weights, chosen = routing.choose(routing.scores(logits), lean if bias else None)
    for token, weight, experts in zip(logits.tolist(), weights.tolist(), chosen.tolist(), strict=True):
        expected = chosen_one_by_one(routing, token, lean.tolist())
        assert dict(zip(experts, weight, strict=True)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@torch.no_grad()
def test_the_mixture_is_the_loop_over_experts(routing: Routing) -> None:
    for n_shared, weigh in itertools.product((0, 2), ("output", "input")):
        module, x = small_mixture(8, routing, n_shared, weigh=weigh).double().eval(), noise(2, 4, 8).double()
        for b, t in itertools.product(range(2), range(4)):
            out = torch.zeros(8, dtype=torch.float64) if module.shared is None else module.shared(x[b, t])
            logits = (module.router.weight @ x[b, t]).tolist()
            for e, weight in chosen_one_by_one(routing, logits, [0.0] * 8).items():
                expert = module.experts[e]
                out = out + (expert(weight * x[b, t]) if weigh == "input" else weight * expert(x[b, t]))
            torch.testing.assert_close(module(x)[b, t], out, atol=1e-10, rtol=0)


def test_chosen_weights_sum_to_1_when_renormalized() -> None:
    x = noise(1, 9, 6).double()
    kept, shrunk = (router_of_logits(6, Routing(2, renormalize=on))(x) for on in (True, False))
    # experts are identities: what comes out is the sum of the weights, times x
    torch.testing.assert_close(kept, x, atol=1e-12, rtol=0)
    chosen_mass = x.softmax(-1).topk(2).values.sum(-1, keepdim=True)
    torch.testing.assert_close(shrunk, x * chosen_mass, atol=1e-12, rtol=0)


@torch.no_grad()
def test_renormalized_choice_equals_softmax_over_the_chosen_logits() -> None:
    module, x = small_mixture().double(), noise(1, 9, 8).double()
    logits, chosen = module.router(x[0]).topk(2)
    outputs = torch.stack([expert(x[0]) for expert in module.experts], 1)
    mine = outputs.gather(1, chosen[..., None].expand(-1, -1, 8))
    torch.testing.assert_close(module(x)[0], (logits.softmax(-1)[..., None] * mine).sum(1), atol=1e-12, rtol=0)


def test_sigmoids_that_are_all_0_give_no_nan() -> None:
    module = router_of_logits(4, Routing(2, "sigmoid"), balance="sequence", balance_loss=1.0)
    assert module(torch.full((1, 3, 4), -1e4).double()).isfinite().all()
    assert module.losses()["balance"].isfinite()


@pytest.mark.parametrize("routing", [Routing(2), Routing(2, "sigmoid")], ids=str)
def test_the_router_is_float32_under_bf16_autocast(routing: Routing) -> None:
    x = noise(4, 256, 8).bfloat16().float()
    module = small_mixture(16, routing, balance="sequence", balance_loss=1.0, z_loss=1.0).train()
    module(x)
    wide, counts = module.losses(), module._counts
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x.bfloat16())
    narrow = module.losses()
    assert out.dtype == torch.bfloat16
    assert torch.equal(module._counts, counts)
    assert {name: loss.item() for name, loss in narrow.items()} == {name: loss.item() for name, loss in wide.items()}
    assert narrow["balance"].dtype == narrow["z"].dtype == torch.float32


def test_jitter_works_in_training_alone() -> None:
    module, x = small_mixture(jitter=0.5), noise(1, 9, 8)
    torch.manual_seed(0)
    assert not torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


# --- What is lost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_balance_loss_is_the_published_one_on_fractions_of_slots(layer: int, top_k: int) -> None:
    expected = MIXTRAL[f"top_{top_k}"]["formula_float64_per_layer"][layer] / top_k
    assert raw_losses(LOGITS[layer], top_k)["balance"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_leaves_padding_out(top_k: int) -> None:
    pooled, mask, published = LOGITS.flatten(0, 1), MASK.repeat(3, 1), MIXTRAL[f"top_{top_k}"]
    whole, masked = (raw_losses(pooled, top_k, each)["balance"].item() for each in (None, mask))
    assert whole == pytest.approx(published["formula_float64_all_layers"] / top_k, rel=1e-12)
    assert masked == pytest.approx(published["formula_float64_with_attention_mask"] / top_k, rel=1e-12)


def test_the_loss_of_a_sequence_is_that_of_the_paper_whatever_the_choice_in_the_end() -> None:
    paper = V3["values"]["paper_topk_of_unbiased_scores"]["mean_over_sequences_sum_fP"]
    grouped = Routing(3, "sigmoid", True, 2.5, 4, 2, "top2")
    for routing, balance in itertools.product((Routing(3, "sigmoid"), grouped), ("sequence", "bias")):
        module = router_of_logits(8, routing, balance=balance, balance_loss=1.0)
        if module.selection_bias is not None:
            module.selection_bias.copy_(V3_BIAS)
        module(LOGITS[0])
        assert module.losses()["balance"].item() == pytest.approx(paper, rel=1e-12)
        assert module.metrics()["balance_loss_raw"] == pytest.approx(paper, rel=1e-12)


def test_the_losses_of_devices_are_those_of_the_paper_on_what_was_chosen_within_them() -> None:
    routing, whole = Routing(3, "softmax", False, 16.0, 4, 2, "max"), LOGITS[0].flatten(0, 1)[None]
    levels = {"balance": "expert_level", "device": "device_level", "communication": "communication"}
    paper = {name: V2[level]["sum_fP"] for name, level in levels.items()}
    assert [round(value, 4) for value in paper.values()] == [1.5993, 1.2253, 1.3379]
    weights = {"balance_loss": 0.003, "device_loss": 0.05, "communication_loss": 0.02}
    module = router_of_logits(8, routing, balance="device", **weights)
    module(whole)
    assert {name: module.metrics()[f"{name}_loss_raw"] for name in levels} == pytest.approx(paper, rel=1e-12)
    weighted = {name: weight * paper[name.removesuffix("_loss")] for name, weight in weights.items()}
    found = {f"{name}_loss": loss.item() for name, loss in module.losses().items()}
    assert found == pytest.approx(weighted, rel=1e-12)
    limitless = raw_losses(whole, routing, balance="sequence")["balance"].item()  # what groups forbid is counted there
    assert limitless != pytest.approx(paper["balance"], rel=0.01)


def test_the_losses_of_devices_are_those_of_each_sequence_averaged() -> None:
    routing = Routing(3, "softmax", False, 16.0, 4, 2, "max")
    settings: dict[str, Any] = {"balance": "device", "device_loss": 1.0, "communication_loss": 1.0}
    whole, *each = (raw_losses(part, routing, **settings) for part in (LOGITS[0], *LOGITS[0].split(1)))
    for name in ("balance", "device", "communication"):
        assert whole[name].item() == pytest.approx((each[0][name] + each[1][name]).item() / 2, rel=1e-12)
        assert each[0][name].item() != pytest.approx(each[1][name].item(), rel=0.01)


@pytest.mark.parametrize("name", ["device", "communication"])
def test_the_losses_of_devices_reach_the_router(name: str) -> None:
    module = small_mixture(8, Routing(2, n_groups=4, top_groups=3), balance="device", **{f"{name}_loss": 1.0}).train()
    module(noise(2, 9, 8))
    (loss,) = module.losses().values()
    loss.backward()
    assert module.router.weight.grad.abs().max() > 1e-4


def test_with_one_device_its_losses_say_nothing() -> None:
    settings: dict[str, Any] = {"balance": "device", "device_loss": 1.0, "communication_loss": 1.0}
    losses = raw_losses(LOGITS[0], 3, **settings)
    assert losses["device"].item() == losses["communication"].item() == pytest.approx(1.0, rel=1e-12)
    assert losses["balance"].item() == raw_losses(LOGITS[0], 3, balance="sequence")["balance"].item()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_z_loss_is_the_published_one(layer: int) -> None:
    expected = Z_LOSS["values"][f"layer_{layer}"]["formula"]
    assert raw_losses(LOGITS[layer], 2)["z"].item() == pytest.approx(expected, rel=1e-12)


def test_z_loss_leaves_padding_out() -> None:
    assert raw_losses(LOGITS[0], 2, MASK)["z"].item() == pytest.approx(Z_LOSS["masked_layer0"], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "top_k", "expected"),
    [
        ("balance", 1, SWITCH["gradient_layer0_of_N_sum_fP_wrt_logits"]),
        ("z", 2, Z_LOSS["gradient_layer0_wrt_logits"]),
    ],
)
def test_gradients_of_the_losses_are_the_published_ones(name: str, top_k: int, expected: list[list[float]]) -> None:
    logits = LOGITS[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(raw_losses(logits, top_k)[name], logits)
    torch.testing.assert_close(gradient, torch.tensor(expected).double().view_as(gradient), atol=1e-7, rtol=0)


@pytest.mark.parametrize("balance", ["loss", "sequence", "device"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balance_loss_is_1_when_balanced_and_experts_over_k_when_collapsed(
    top_k: int, score: Any, balance: str
) -> None:
    turns = torch.stack([torch.eye(8, dtype=torch.float64)[(i + torch.arange(top_k)) % 8].sum(0) for i in range(8)])
    for logits, expected in ((turns, 1), (turns[:1].expand(16, 8), 8 / top_k)):
        found = raw_losses(100 * logits[None] - 50, Routing(top_k, score), balance=balance)["balance"]
        assert found.item() == pytest.approx(expected, abs=1e-9)


def test_a_coefficient_multiplies_once() -> None:
    module = router_of_logits(8, 2, balance_loss=0.01, z_loss=0.001)
    module(LOGITS[0])
    raw = raw_losses(LOGITS[0], 2)
    assert {name: loss.item() for name, loss in module.losses().items()} == pytest.approx(
        {"balance": 0.01 * raw["balance"].item(), "z": 0.001 * raw["z"].item()}, rel=1e-12
    )
    assert module.metrics()["balance_loss_raw"] == pytest.approx(raw["balance"].item())
    assert module.metrics()["z_loss_raw"] == pytest.approx(raw["z"].item())


def test_a_loss_without_weight_is_told_and_not_added() -> None:
    module = router_of_logits(8, 2)
    module(LOGITS[0])
    assert module.losses() == {}
    assert module.metrics()["balance_loss_raw"] > 1


@pytest.mark.parametrize("coefficient", ["balance_loss", "z_loss"])
@pytest.mark.parametrize("balance", ["loss", "sequence"])
def test_a_coefficient_reaches_the_router(balance: str, coefficient: str) -> None:
    gradients = []
    for weight in (0.0, 0.1, 0.2):
        settings = {"balance": balance, coefficient: weight}
        module, x = small_mixture(**settings).double().train(), noise(2, 9, 8).double()
        (module(x).square().mean() + sum(module.losses().values())).backward()
        gradients.append(module.router.weight.grad)
    none, some, twice = gradients
    assert (some - none).abs().max() > 1e-4
    torch.testing.assert_close(twice - none, 2 * (some - none), atol=1e-12, rtol=0)


def test_padding_alone_gives_losses_of_zero_and_no_nan() -> None:
    losses = raw_losses(LOGITS[0], 2, torch.zeros(2, 12, dtype=torch.bool))
    assert [loss.item() for loss in losses.values()] == [0.0, 0.0]


def test_before_training_there_is_nothing_to_lose_and_nothing_to_report() -> None:
    module = small_mixture(balance_loss=1.0).eval()
    module(noise(1, 3, 8))
    assert module.losses() == {}
    assert module.metrics() == {}


def test_evaluation_leaves_the_losses_of_training_alone() -> None:
    module = small_mixture(balance_loss=1.0).train()
    module(noise(1, 9, 8))
    before = module.metrics()
    module.eval()(noise(1, 3, 8) + 1)
    assert module.metrics() == before


# --- The selection bias -----------------------------------------------------------------------------------------------


def by_bias(**settings: Any) -> MixtureOfExperts:
    return router_of_logits(8, Routing(3, "sigmoid"), balance="bias", balance_rate=UPDATES["gamma"], **settings)


def test_the_bias_moves_as_published() -> None:
    module = by_bias()
    assert module.selection_bias is not None
    for step in range(401):
        expected = UPDATES["steps"][step] if step < 8 else UPDATES["later"].get(f"step_{step}")
        module(LOGITS[0])
        if expected:
            assert module.selection_bias.tolist() == pytest.approx(expected["bias_before"], rel=1e-6, abs=1e-12)
            assert module._load.tolist() == expected["load"]
            share = (1 + expected["max_violation"]) / 8
            assert module.metrics()["busiest_expert_share"] == pytest.approx(share, rel=1e-6)
        module.after_step()


def test_the_bias_is_in_the_choice_and_in_no_weight_and_gets_no_gradient() -> None:
    module, x = by_bias(), LOGITS[0].clone().requires_grad_()
    module.selection_bias = torch.tensor([9.0] * 3 + [0.0] * 5).double()
    out = module(x)
    assert module._load.tolist() == [24] * 3 + [0] * 5
    torch.testing.assert_close(out, x, atol=1e-12, rtol=0)  # weights sum to 1
    module.routing = Routing(3, "sigmoid", renormalize=False)
    torch.testing.assert_close(module(x), x * x[..., :3].sigmoid().sum(-1, keepdim=True), atol=1e-12, rtol=0)
    assert not module.selection_bias.requires_grad
    assert module.losses() == {}


def test_the_bias_exists_where_it_balances_and_nowhere_else() -> None:
    assert [name for name, _ in small_mixture(balance="bias").named_buffers()] == ["selection_bias"]
    assert "selection_bias" not in dict(small_mixture(balance="bias").named_parameters())
    for balance in ("loss", "sequence", "device", "none"):
        module = small_mixture(balance=balance).train()
        module(noise(1, 5, 8))
        module.after_step()
        assert list(module.buffers()) == []
        assert "selection_bias" not in module.state_dict()


def test_accumulation_does_not_change_the_update() -> None:
    whole, pieces = by_bias(), by_bias()
    for step in range(6):
        batch = LOGITS[step % 3]
        whole(batch)
        for sequence in batch.split([5, 3, 4], dim=1):
            pieces(sequence)
            pieces.eval()(LOGITS[1])  # an evaluation in between is no load
            pieces.train()
        for module in (whole, pieces):
            module.after_step()
        assert torch.equal(whole.selection_bias, pieces.selection_bias)
    assert whole.selection_bias.any()
    last = by_bias()
    for step in range(6):
        last(LOGITS[step % 3][:, 8:])
        last.after_step()
    assert not torch.equal(last.selection_bias, whole.selection_bias)  # the pieces before it did count


def test_a_step_without_a_pass_moves_nothing() -> None:
    module = by_bias()
    module(LOGITS[0])
    module.after_step()
    moved = module.selection_bias.clone()
    module.after_step()
    module.eval()(LOGITS[1])
    module.after_step()
    assert torch.equal(module.selection_bias, moved)


def test_padding_is_no_load() -> None:
    padded, cut = by_bias(), by_bias()
    mask = torch.arange(12).expand(2, 12) < 7
    padded(torch.where(mask[..., None], LOGITS[0], torch.full_like(LOGITS[0], 5.0)), mask)
    cut(LOGITS[0][:, :7])
    for module in (padded, cut):
        module.after_step()
    assert torch.equal(padded.selection_bias, cut.selection_bias)


def test_the_bias_is_never_narrower_than_float32() -> None:
    module = small_mixture(balance="bias")
    values = torch.tensor([0.1, 1 / 3, -0.001, 7.0001])
    module.selection_bias.copy_(values)
    narrow = copy.deepcopy(module).bfloat16()
    assert narrow.router.weight.dtype == torch.bfloat16
    assert narrow.selection_bias.dtype == torch.float32
    assert torch.equal(narrow.selection_bias, values)
    wide = copy.deepcopy(narrow).double()
    assert wide.selection_bias.dtype == torch.float64
    assert torch.equal(wide.half().selection_bias, values)
    assert copy.deepcopy(module).to("meta", torch.bfloat16).selection_bias.is_meta
    narrow = copy.deepcopy(module).to(torch.bfloat16).train()
    narrow(noise(1, 9, 8).bfloat16())
    narrow.after_step()
    torch.testing.assert_close((narrow.selection_bias - values).abs(), torch.full((4,), 0.001), atol=1e-6, rtol=0)


def test_a_saved_bias_is_loaded() -> None:
    module, other = by_bias(), by_bias()
    module(LOGITS[0])
    module.after_step()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.selection_bias, module.selection_bias)
    assert other.selection_bias.any()


# --- What is counted and what is dropped ------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_every_real_token_is_counted_top_k_times_and_none_is_dropped(top_k: int) -> None:
    module = router_of_logits(8, top_k)
    module(LOGITS[0], MASK)
    assert module._counts.sum() == top_k * MASK.sum()
    assert module.metrics()["dropped_fraction"] == 0.0


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_an_expert_takes_its_share_in_the_order_of_the_tokens(top_k: int, factor: float) -> None:
    module = router_of_logits(8, Routing(top_k, renormalize=False), capacity_factor=factor)
    out, room, taken, expected = module(LOGITS[0], MASK), math.ceil(factor * top_k * 21 / 8), [0] * 8, []
    for logits, real in zip(LOGITS[0].flatten(0, 1), MASK.flatten(), strict=True):
        weights, kept = logits.softmax(-1), 0.0
        for e in logits.topk(top_k).indices.tolist():
            taken[e] += bool(real)
            kept += weights[e].item() * bool(not real or taken[e] <= room)
        expected.append(kept * logits)  # what is dropped adds nothing; the others' weights stay
    torch.testing.assert_close(out.flatten(0, 1), torch.stack(expected), atol=1e-12, rtol=0)
    assert module._load.tolist() == taken
    assert module._counts.tolist() == [min(each, room) for each in taken]
    dropped = module.metrics()["dropped_fraction"] * top_k * 21
    assert module._counts.sum() + dropped == pytest.approx(top_k * 21)
    assert (dropped > 0) == (max(taken) > room)


def test_capacity_does_not_stumble_over_rounding() -> None:
    logits = torch.zeros(1, 50, 5).double()
    logits[..., 0] = 9.0  # all 50 want the first expert, which takes 1.1 · 50 / 5 = 11: as a float a little more
    module = router_of_logits(5, 1, capacity_factor=1.1)
    assert 1.1 * 50 / 5 > 11
    module(logits)
    assert module._counts.tolist() == [11, 0, 0, 0, 0]


def test_capacity_binds_in_training_alone() -> None:
    module = router_of_logits(8, 2, capacity_factor=0.5)
    free = router_of_logits(8, 2).eval()(LOGITS[0])
    assert not torch.equal(module(LOGITS[0]), free)
    assert torch.equal(module.eval()(LOGITS[0]), free)


def test_the_balance_is_of_what_was_wanted_not_of_what_was_taken() -> None:
    settings = {"balance_loss": 1.0, "z_loss": 1.0}
    free, tight = (router_of_logits(8, 2, capacity_factor=factor, **settings) for factor in (None, 0.5))
    for module in (free, tight):
        module(LOGITS[0])
    assert {k: v.item() for k, v in free.losses().items()} == {k: v.item() for k, v in tight.losses().items()}
    assert free.metrics()["busiest_expert_share"] == tight.metrics()["busiest_expert_share"]
    assert tight.metrics()["dropped_fraction"] > 0.1


def test_a_dropped_token_gives_its_expert_no_gradient() -> None:
    module, x = small_mixture(2, 1, capacity_factor=0.5).train(), noise(1, 8, 8).abs()
    with torch.no_grad():
        module.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 8))
    x.requires_grad_()
    module(x).square().sum().backward()  # both choices are the first expert's, which takes 2 of 8
    assert [bool(token.any()) for token in x.grad[0]] == [True] * 2 + [False] * 6
    assert not any(p.grad.any() for p in module.experts[1].parameters())


@pytest.mark.parametrize("balance", ["loss", "sequence", "device", "bias"])
@pytest.mark.parametrize("factor", [None, 0.8])
@pytest.mark.parametrize("filler", [0.0, 100.0, -3.0])
def test_adding_padding_changes_no_statistic(filler: float, factor: float | None, balance: str) -> None:
    settings = {"balance": balance, "balance_loss": 0.1, "z_loss": 0.1, "capacity_factor": factor}
    module, x = small_mixture(**settings).train(), noise(2, 5, 8)
    out = module(x)
    losses, metrics = module.losses(), module.metrics()
    padded = torch.cat([torch.cat([x, torch.full((2, 3, 8), filler)], 1), torch.full((1, 8, 8), filler)])
    mask = torch.arange(8).expand(3, 8) < torch.tensor([5, 5, 0])[:, None]
    torch.testing.assert_close(module(padded, mask)[:2, :5], out, atol=1e-6, rtol=0)
    assert module.metrics() == pytest.approx(metrics, abs=1e-6)
    assert {k: v.item() for k, v in module.losses().items()} == pytest.approx(
        {k: v.item() for k, v in losses.items()}, rel=1e-6
    )


@pytest.mark.parametrize("settings", [{}, {"balance": "bias", "balance_loss": 0.1}, {"capacity_factor": 1.0}], ids=str)
def test_an_expert_without_tokens_trains_on(settings: dict[str, Any]) -> None:
    module, x = small_mixture(4, 1, **{"balance_loss": 0.1, **settings}).train(), noise(2, 5, 8).abs()
    with torch.no_grad():
        module.router.weight.copy_(torch.tensor([[1.0], [-1], [-2], [-3]]).expand(4, 8))
    (module(x).square().mean() + module.losses()["balance"]).backward()
    gradients = [[p.grad for p in expert.parameters()] for expert in module.experts]
    assert all(g is not None and g.any() for g in gradients[0])
    assert all(g is not None and not g.any() for idle in gradients[1:] for g in idle)
    assert module.metrics()["idle_experts"] == 3
    assert module.metrics()["busiest_expert_share"] == 1.0
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    module.after_step()
    assert all(p.isfinite().all() for p in [*module.parameters(), *module.buffers()])
    assert module.eval()(x).isfinite().all()


def test_a_trained_module_can_be_copied() -> None:
    module, x = small_mixture(balance="bias", balance_loss=0.1).train(), noise(2, 5, 8)
    (module(x).sum() + module.losses()["balance"]).backward()
    twin = copy.deepcopy(module)
    assert torch.equal(twin.eval()(x), module.eval()(x))
    twin.after_step()
    module.after_step()
    assert torch.equal(twin.selection_bias, module.selection_bias)
    assert twin.losses() == {}


# --- Settings ---------------------------------------------------------------------------------------------------------

V3_SETTINGS = {
    **{"n_experts": 256, "top_k": 8, "n_shared_experts": 1, "d_ff": 2048, "score": "sigmoid", "routed_scaling": 2.5},
    **{"n_expert_groups": 8, "top_groups": 4, "group_score": "top2", "balance": "bias", "balance_loss": 1e-4},
}
V2_SETTINGS = {
    **{"n_experts": 160, "top_k": 6, "n_shared_experts": 2, "d_ff": 1536, "renormalize": False, "routed_scaling": 16.0},
    **{"n_expert_groups": 8, "top_groups": 3, "balance": "device"},
}
SCOUT = {"n_experts": 16, "top_k": 1, "n_shared_experts": 1, "score": "sigmoid", "renormalize": False, "weigh": "input"}
PUBLISHED = {
    "v3": V3_SETTINGS,
    "v2": V2_SETTINGS,
    "scout": SCOUT,
    "mixtral": {"n_experts": 8, "top_k": 2},
    "olmoe": {"n_experts": 64, "top_k": 8, "renormalize": False},
    "switch": {"n_experts": 64, "top_k": 1, "renormalize": False, "expert": "relu", "capacity_factor": 1.25},
}


@pytest.mark.parametrize(
    "same",
    [
        ({"n_expert_groups": 4, "top_groups": 4, "group_score": "top2"}, {}),
        ({"n_expert_groups": 4, "top_groups": 2}, {}),  # a token's two best are in its two best groups
        ({"n_expert_groups": 8, "top_groups": 5}, {}),
        ({"group_score": "top2"}, {}),
        ({"balance": "none", "balance_loss": 0.5, "balance_rate": 0.1}, {"balance": "none"}),
        ({"balance_loss": 0.0}, {"balance": "none"}),
        ({"balance": "sequence", "balance_loss": 0.0}, {"balance": "none"}),
        ({"balance_rate": 0.5}, {}),
        ({"device_loss": 0.5, "communication_loss": 0.0}, {}),
        ({"balance": "device", "device_loss": 0.5}, {"balance": "sequence", "balance_loss": 0.003}),  # one group
        (
            {"balance": "device", "n_expert_groups": 4, "top_groups": 4, "group_score": "top2"},
            {"balance": "device", "n_expert_groups": 4, "top_groups": 4, "balance_loss": 0.003, "device_loss": 0.05},
        ),
        (
            {"balance": "device", "n_expert_groups": 4, "balance_loss": 0.0, "device_loss": 0, "communication_loss": 0},
            {"balance": "none", "n_expert_groups": 4},
        ),
        ({"top_k": 8, "balance": "device", "n_expert_groups": 4, "top_groups": 4}, {"top_k": 8, "balance": "none"}),
        ({"balance_loss": 0.01}, {}),
        ({"balance": "sequence", "balance_loss": 1e-4}, {"balance": "sequence"}),
        ({"capacity_factor": 4.0}, {}),  # all tokens: 8 / 2 even shares
        ({"capacity_factor": 100.0}, {}),
        ({"top_k": 8, "balance": "bias", "renormalize": False}, {"top_k": 8, "balance": "none"}),
        ({"top_k": 1, "weigh": "input"}, {"top_k": 1}),
        ({"top_k": 1, "score": "sigmoid", "balance": "none"}, {"top_k": 1, "balance": "none"}),
        ({"n_experts": 1, "top_k": 1, "jitter": 0.1, "renormalize": False}, {"n_experts": 1, "top_k": 1}),
        ({"d_ff": 24}, {}),  # 8/3 · 8 to a multiple of 8
    ],
    ids=str,
)
def test_what_has_no_effect_is_not_told_apart(same: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, other = (configured(**settings) for settings in same)
    assert one == other
    assert one.resolve(SHAPE) == one
    assert list(one.problems(SHAPE)) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"n_expert_groups": 4, "top_groups": 1},
        {"n_expert_groups": 4, "top_groups": 2, "group_score": "top2"},
        {"balance": "none"},
        {"balance": "bias"},
        {"balance": "bias", "balance_rate": 0.0},
        {"balance": "bias", "balance_loss": 0.01},
        {"balance": "sequence"},
        {"balance": "device", "n_expert_groups": 4, "top_groups": 4},
        {"balance": "device", "n_expert_groups": 4, "top_groups": 2, "balance_loss": 0.0, "communication_loss": 0.0},
        {"balance_loss": 0.02},
        {"capacity_factor": 3.9},
        {"weigh": "input"},
        {"score": "sigmoid"},
        {"renormalize": False},
        {"routed_scaling": 2.0},
        {"jitter": 0.1},
        {"top_k": 1, "weigh": "input", "renormalize": False},
        {"top_k": 1, "weigh": "input", "routed_scaling": 2.0},
        {"top_k": 1, "score": "sigmoid"},
        {"top_k": 8, "score": "sigmoid", "renormalize": False},
    ],
    ids=str,
)
def test_what_has_an_effect_is_told_apart(settings: dict[str, Any]) -> None:
    found = configured(**settings)
    plain = configured(**{key: value for key, value in settings.items() if key == "top_k"})
    assert found != plain
    assert found.settings() | settings == found.settings()


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_are_taken_away_had_no_effect(seed: int) -> None:
    logits = 3 * noise(200, 8, seed=seed)
    for groups, top, top_k in ((4, 2, 2), (8, 5, 5), (2, 1, 1), (4, 4, 8)):
        grouped, free = Routing(top_k, n_groups=groups, top_groups=top), Routing(top_k)
        assert torch.equal(grouped.choose(grouped.scores(logits))[1], free.choose(free.scores(logits))[1])


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"n_experts": 2, "top_k": 3}, "top_k 3 is more than n_experts 2"),
        ({"n_expert_groups": 3}, "n_experts 8 is not divisible by n_expert_groups 3"),
        ({"n_experts": 7, "n_expert_groups": 2, "top_groups": 2}, "n_experts 7 is not divisible by n_expert_groups 2"),
        ({"n_expert_groups": 4, "top_groups": 5}, "top_groups 5 is more than n_expert_groups 4"),
        ({"top_groups": 2}, "top_groups 2 is more than n_expert_groups 1"),
        ({"n_expert_groups": 4, "top_groups": 1, "top_k": 3}, "top_k 3 is more than top_groups 1 hold together: 2"),
        ({"n_expert_groups": 8, "top_groups": 2, "top_k": 3}, "top_k 3 is more than top_groups 2 hold together: 2"),
        (
            {"n_expert_groups": 8, "top_groups": 4, "group_score": "top2"},
            "group_score top2 needs two experts a group; 8 groups of 8 experts have one",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(settings: dict[str, Any], fault: str) -> None:
    (found,) = configured(**settings).problems(SHAPE)
    assert str(found) == fault
    assert found.cure


def test_cures_are_true() -> None:
    (found,) = configured(n_experts=12, top_k=1, n_expert_groups=5).problems(SHAPE)
    assert found.cure == "choose a divisor of n_experts, such as 4"
    (found,) = configured(n_expert_groups=4, top_groups=1, top_k=3).problems(SHAPE)
    assert found.cure == "choose top_k from 1 to 2, or raise top_groups"


def test_a_foreign_expert_without_a_width_can_be_shared_once(tmp_path: Path) -> None:
    file = tmp_path / "still.py"
    file.write_text(
        "from torch import nn\nfrom ablate.feed_forward import FeedForwardChoice\n\n\n"
        "class Still(nn.Linear):\n    def forward(self, x, mask=None):\n        return super().forward(x)\n\n\n"
        "class Config(FeedForwardChoice):\n"
        "    def build(self, shape):\n        return Still(shape.d_model, shape.d_model)\n",
        encoding="utf-8",
    )
    once, twice = (configured(expert=str(file), n_shared_experts=n) for n in (1, 2))
    assert list(once.problems(SHAPE)) == []
    assert once.params(SHAPE) == sum(p.numel() for p in once.build(SHAPE).parameters()) == 64 + 9 * 72
    assert once.flops(SHAPE) is None
    (fault,) = twice.problems(SHAPE)
    assert "needs an expert with a width d_ff" in str(fault)


THREE_GROUPS = {"n_experts": 12, "n_expert_groups": 3, "top_groups": 2, "group_score": "top2", "top_k": 7}


@pytest.mark.parametrize("settings", [*PUBLISHED.values(), THREE_GROUPS], ids=[*PUBLISHED, "three groups"])
def test_the_twin_keeps_every_trait(settings: dict[str, Any]) -> None:
    large = configured(**settings)
    small = large.twin(SHAPE)
    sizes = ("n_experts", "d_ff", "top_k", "n_expert_groups", "top_groups")
    assert {k: v for k, v in small.settings().items() if k not in sizes} == {
        k: v for k, v in large.settings().items() if k not in sizes
    }
    assert small.n_experts <= 8
    assert (small.n_expert_groups > 1) == (large.n_expert_groups > 1)
    assert (small.top_k > 1, small.top_k < small.n_experts) == (large.top_k > 1, large.top_k < large.n_experts)
    assert list(small.problems(SHAPE)) == []
    assert small.twin(SHAPE) == small


@pytest.mark.parametrize("name", PUBLISHED)
def test_identities_hold_for_what_is_published(name: str) -> None:
    told = list(configured(**PUBLISHED[name]).twin(SHAPE).identities(SHAPE))
    assert len(told) == 4
    for sentence, both in told:
        torch.testing.assert_close(*both(), atol=1e-12, rtol=0, msg=sentence)


def test_the_module_is_what_the_settings_say() -> None:
    module = configured(**V3_SETTINGS | {"z_loss": 0.1, "jitter": 0.2, "capacity_factor": 1.5, "d_ff": 4}).build(SHAPE)
    assert module.routing == Routing(8, "sigmoid", True, 2.5, 8, 4, "top2")
    assert module.loss_weights == {"balance": 1e-4, "z": 0.1}
    assert (module.balance, module.balance_rate) == ("bias", 0.001)
    assert (module.jitter, module.capacity_factor, module.weigh) == (0.2, 1.5, "output")
    assert (len(module.experts), module.shared is None) == (256, False)
    scout = configured(**SCOUT, balance="loss", balance_loss=0.2).build(SHAPE)
    assert scout.routing == Routing(1, "sigmoid", renormalize=False)
    assert (scout.balance, scout.weigh, scout.loss_weights) == ("loss", "input", {"balance": 0.2, "z": 0.0})
    v2 = configured(**V2_SETTINGS | {"d_ff": 4, "device_loss": 0.5}).build(SHAPE)
    assert v2.loss_weights == {"balance": 0.003, "device": 0.5, "communication": 0.02, "z": 0.0}
    assert configured().build(SHAPE).shared is None


@pytest.mark.parametrize("expert", ["relu", "gelu", "swiglu", "geglu", "linear"])
def test_experts_are_any_choice_of_the_slot(expert: str) -> None:
    found = configured(expert=expert, d_ff=24, n_shared_experts=1)
    one = registry.configure("feed_forward", {"name": expert, "d_ff": 24}).params(SHAPE)  # type: ignore[attr-defined]
    assert found.params(SHAPE) == 8 * 8 + 9 * one
    assert found.params_active(SHAPE) == 8 * 8 + 3 * one


@pytest.mark.parametrize(
    ("name", "d_model", "one", "per_layer"),
    [
        ("v3", 7168, 44_040_192, 257 * 44_040_192 + 7168 * 256),
        ("v2", 5120, 3 * 5120 * 1536, 162 * 3 * 5120 * 1536 + 5120 * 160),
    ],
)
def test_a_published_layer_has_the_published_size(name: str, d_model: int, one: int, per_layer: int) -> None:
    shape = Shape(d_model=d_model, n_layers=61, n_heads=128, max_seq_len=4096, vocab_size=129_280)
    found = configured(**PUBLISHED[name]).resolve(shape)
    assert found.params(shape) == per_layer
    assert found.params_active(shape) == per_layer - (found.n_experts - found.top_k) * one
    met = found.top_k + found.n_shared_experts
    assert found.flops(shape) == {"router": 2.0 * d_model * found.n_experts, "feed_forward": 2.0 * met * one}
    built = on_meta(lambda: found.build(shape))
    assert sum(p.numel() for p in built.parameters()) == per_layer
