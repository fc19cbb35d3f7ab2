"""Mixture of experts: what is computed, what is lost, what is counted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from references import mixture, tiny
from torch import Tensor, nn

from ablate.choice import Faults
from ablate.feed_forward.moe import MixtureOfExperts
from ablate.feed_forward.swiglu import SwiGLU
from ablate.init import initialise
from ablate.model import build

ORACLE = json.loads((Path(__file__).parent / "data" / "moe_losses.json").read_text(encoding="utf-8"))
LOGITS = torch.tensor(ORACLE["router_logits"], dtype=torch.float64)  # (layers, B, T, E), exact in bf16
MASK = torch.tensor(ORACLE["attention_mask"]).bool()


def router_of_logits(n_experts: int, top_k: int, **losses: float) -> MixtureOfExperts:
    """A mixture whose inputs are its router logits."""
    experts: list[nn.Module] = [nn.Identity() for _ in range(n_experts)]
    module = MixtureOfExperts(n_experts, experts, [], top_k, **losses).double().train()
    nn.init.eye_(module.router.weight)
    return module


def raw_losses(logits: Tensor, top_k: int, mask: Tensor | None = None) -> dict[str, Tensor]:
    module = router_of_logits(logits.shape[-1], top_k, balance_loss=1.0, z_loss=1.0)
    module(logits, mask)
    return module.losses()


def small_mixture(n_experts: int = 4, top_k: int = 2, n_shared: int = 0, **settings: Any) -> MixtureOfExperts:
    experts = [[SwiGLU(8, 12) for _ in range(n)] for n in (n_experts, n_shared)]
    module = MixtureOfExperts(8, *experts, top_k, **settings)  # type: ignore[arg-type]
    initialise(module, "normal", 0.5, seed=0)
    return module


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("top_k", "n_shared"), [(1, 0), (2, 0), (2, 2), (4, 1)])
@torch.no_grad()
def test_the_mixture_is_the_loop_over_experts(top_k: int, n_shared: int, renormalize: bool) -> None:
    module = small_mixture(top_k=top_k, n_shared=n_shared, renormalize=renormalize).double()
    x = noise(2, 7, 8).double()
    expected = mixture(module, x.flatten(0, 1), top_k, renormalize).view_as(x)
    torch.testing.assert_close(module(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_balance_loss_is_the_published_one_on_fractions_of_slots(layer: int, top_k: int) -> None:
    expected = ORACLE["summed_fractions"][str(top_k)]["per_layer"][layer] / top_k
    assert raw_losses(LOGITS[layer], top_k)["balance"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_leaves_padding_out(top_k: int) -> None:
    pooled, mask = LOGITS.flatten(0, 1), MASK.repeat(3, 1)
    published = ORACLE["summed_fractions"][str(top_k)]
    assert raw_losses(pooled, top_k)["balance"].item() == pytest.approx(published["all_layers"] / top_k, rel=1e-12)
    masked = raw_losses(pooled, top_k, mask)["balance"].item()
    assert masked == pytest.approx(published["all_layers_masked"] / top_k, rel=1e-12)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_z_loss_is_the_published_one(layer: int) -> None:
    assert raw_losses(LOGITS[layer], 2)["z"].item() == pytest.approx(ORACLE["z_loss"]["per_layer"][layer], rel=1e-12)


def test_z_loss_leaves_padding_out() -> None:
    assert raw_losses(LOGITS[0], 2, MASK)["z"].item() == pytest.approx(ORACLE["z_loss"]["layer_0_masked"], rel=1e-12)


@pytest.mark.parametrize(("name", "top_k", "source"), [("balance", 1, "switch"), ("z", 2, "z_loss")])
def test_gradients_of_the_losses_are_the_published_ones(name: str, top_k: int, source: str) -> None:
    logits = LOGITS[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(raw_losses(logits, top_k)[name], logits)
    expected = torch.tensor(ORACLE[source]["gradient_layer_0"], dtype=torch.float64).view_as(gradient)
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balance_loss_is_1_when_balanced_and_experts_over_k_when_collapsed(top_k: int) -> None:
    turns = torch.stack([torch.eye(8, dtype=torch.float64)[(i + torch.arange(top_k)) % 8].sum(0) for i in range(8)])
    assert raw_losses(10 * turns[None], top_k)["balance"].item() == pytest.approx(1, abs=1e-12)
    collapsed = 50 * turns[:1].expand(1, 16, 8)
    assert raw_losses(collapsed, top_k)["balance"].item() == pytest.approx(8 / top_k, abs=1e-9)


def test_a_coefficient_multiplies_once() -> None:
    module = router_of_logits(8, 2, balance_loss=0.01, z_loss=0.001)
    module(LOGITS[0])
    raw = raw_losses(LOGITS[0], 2)
    assert {name: loss.item() for name, loss in module.losses().items()} == pytest.approx(
        {"balance": 0.01 * raw["balance"].item(), "z": 0.001 * raw["z"].item()}, rel=1e-12
    )
    assert module.metrics()["balance_loss_raw"] == pytest.approx(raw["balance"].item())
    assert module.metrics()["z_loss_raw"] == pytest.approx(raw["z"].item())


@pytest.mark.parametrize("coefficient", ["balance_loss", "z_loss"])
def test_a_coefficient_reaches_the_router(coefficient: str) -> None:
    gradients = []
    for weight in (0.0, 0.1, 0.2):
        module, x = small_mixture(**{coefficient: weight}).double().train(), noise(2, 9, 8).double()
        (module(x).square().mean() + sum(module.losses().values())).backward()
        gradients.append(module.router.weight.grad)
    none, some, twice = gradients
    assert (some - none).abs().max() > 1e-4
    torch.testing.assert_close(twice - none, 2 * (some - none), atol=1e-12, rtol=0)


def test_chosen_weights_sum_to_1_when_renormalized() -> None:
    x = noise(1, 9, 6).double()
    kept, shrunk = (router_of_logits(6, 2, renormalize=on)(x) for on in (True, False))
    # experts are identities: what comes out is the sum of the weights, times x
    torch.testing.assert_close(kept, x, atol=1e-12, rtol=0)
    chosen_mass = x.softmax(-1).topk(2).values.sum(-1, keepdim=True)
    torch.testing.assert_close(shrunk, x * chosen_mass, atol=1e-12, rtol=0)


@torch.no_grad()
def test_renormalized_choice_equals_softmax_over_the_chosen_logits() -> None:
    module, x = small_mixture(renormalize=True).double(), noise(1, 9, 8).double()
    logits, chosen = module.router(x[0]).topk(2)
    outputs = torch.stack([expert(x[0]) for expert in module.experts], 1)
    mine = outputs.gather(1, chosen[..., None].expand(-1, -1, 8))
    torch.testing.assert_close(module(x)[0], (logits.softmax(-1)[..., None] * mine).sum(1), atol=1e-12, rtol=0)


def test_the_router_is_float32_under_bf16_autocast() -> None:
    x, module = noise(4, 256, 8).bfloat16().float(), small_mixture(16, 2, balance_loss=1.0, z_loss=1.0).train()
    module(x)
    wide, counts = module.losses(), module._counts
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x.bfloat16())
    narrow = module.losses()
    assert out.dtype == torch.bfloat16
    assert torch.equal(module._counts, counts)
    assert {name: loss.item() for name, loss in narrow.items()} == {name: loss.item() for name, loss in wide.items()}
    assert narrow["balance"].dtype == narrow["z"].dtype == torch.float32


def test_one_expert_is_the_dense_network() -> None:
    module, x = small_mixture(n_experts=1, top_k=1), noise(2, 5, 8)
    dense = SwiGLU(8, 12)
    dense.load_state_dict(module.experts[0].state_dict())
    torch.testing.assert_close(module(x), dense(x), atol=1e-6, rtol=0)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    module, x = small_mixture(n_experts=4, top_k=1, balance_loss=0.1).train(), noise(2, 5, 8).abs()
    with torch.no_grad():
        module.router.weight.copy_(torch.tensor([[1.0], [-1], [-2], [-3]]).expand(4, 8))
    (module(x).square().mean() + module.losses()["balance"]).backward()
    gradients = [[p.grad for p in expert.parameters()] for expert in module.experts]
    assert all(g is not None and g.any() for g in gradients[0])
    assert all(g is not None and not g.any() for idle in gradients[1:] for g in idle)
    assert module.metrics()["idle_experts"] == 3
    assert module.metrics()["busiest_expert_share"] == 1.0


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_every_real_token_is_counted_top_k_times_and_none_is_dropped(top_k: int) -> None:
    module = router_of_logits(8, top_k)
    module(LOGITS[0], MASK)
    assert module._counts.sum() == top_k * MASK.sum()
    assert module.metrics()["dropped_fraction"] == 0.0


@pytest.mark.parametrize("filler", [0.0, 100.0, -3.0])
def test_adding_padding_changes_no_statistic(filler: float) -> None:
    module, x = small_mixture(balance_loss=0.1, z_loss=0.1).train(), noise(2, 5, 8)
    out = module(x)
    losses, metrics = module.losses(), module.metrics()
    padded = torch.cat([x, torch.full((2, 3, 8), filler)], 1)
    mask = torch.arange(8).expand(2, 8) < 5
    torch.testing.assert_close(module(padded, mask)[:, :5], out, atol=1e-6, rtol=0)
    assert module.metrics() == pytest.approx(metrics, abs=1e-6)
    assert {k: v.item() for k, v in module.losses().items()} == pytest.approx(
        {k: v.item() for k, v in losses.items()}, rel=1e-6
    )


def test_padding_alone_gives_losses_of_zero_and_no_nan() -> None:
    losses = raw_losses(LOGITS[0], 2, torch.zeros(2, 12, dtype=torch.bool))
    assert [loss.item() for loss in losses.values()] == [0.0, 0.0]


def test_before_training_there_is_nothing_to_lose_and_nothing_to_report() -> None:
    module = small_mixture().eval()
    module(noise(1, 3, 8))
    assert module.losses() == {}
    assert module.metrics() == {}


def test_evaluation_leaves_the_losses_of_training_alone() -> None:
    module = small_mixture(balance_loss=1.0).train()
    module(noise(1, 9, 8))
    before = module.metrics()
    module.eval()(noise(1, 3, 8) + 1)
    assert module.metrics() == before


def test_a_trained_model_can_be_copied() -> None:
    model = build(tiny(feed_forward="moe")).train()
    model(torch.arange(8)[None]).sum().backward()
    twin, ids = copy.deepcopy(model).eval(), torch.arange(5)[None]
    assert torch.equal(twin(ids), model.eval()(ids))


def test_jitter_works_in_training_alone() -> None:
    module, x = small_mixture(jitter=0.5), noise(1, 9, 8)
    torch.manual_seed(0)
    assert not torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize("expert", ["relu", "gelu", "swiglu"])
def test_experts_are_any_choice_of_the_slot(expert: str) -> None:
    settings = tiny(feed_forward={"name": "moe", "expert": expert, "d_ff": 24, "n_shared_experts": 1})
    dense = tiny(feed_forward={"name": expert, "d_ff": 24})
    one = dense.feed_forward.params(dense.shape)
    assert settings.feed_forward.params(settings.shape) == 32 * 8 + 9 * one
    assert settings.feed_forward.params_active(settings.shape) == 32 * 8 + 3 * one


def test_more_chosen_than_there_are_is_refused() -> None:
    with pytest.raises(Faults, match="top_k 3 is more than n_experts 2"):
        tiny(feed_forward={"name": "moe", "n_experts": 2, "top_k": 3})
