"""The contract that every choice keeps: over all that exist, and every attention with every position it can have."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import Any

import pytest
import torch
from references import CHOICES, REFUSED, TOKENS, VARIANTS, call, decoded, default, facts, reasons, spell, tiny
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ablate import registry
from ablate.choice import Faults
from ablate.cost import cache_bytes, cost, lengths
from ablate.model import Transformer, build
from ablate.profiling.flops import count_flops

DECODING = [variant for variant in VARIANTS if tiny(**variant).is_causal]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=spell)
every_decoding = pytest.mark.parametrize("variant", DECODING, ids=spell)
every_choice = pytest.mark.parametrize(("slot", "name"), CHOICES)


@cache
def _built(variant: str, dtype: torch.dtype) -> Transformer:
    return build(tiny(**json.loads(variant)), seed=1).to(dtype).eval()


def built(variant: dict[str, Any], dtype: torch.dtype = torch.float32) -> Transformer:
    """The variant in evaluation mode; shared between tests, which must leave it as it is."""
    return _built(json.dumps(variant), dtype)


def some_tokens(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(48, (batch, tokens), generator=torch.Generator().manual_seed(0))


@every_variant
def test_ids_become_logits_over_the_vocabulary(variant: dict[str, Any]) -> None:
    logits = call(built(variant), some_tokens(3, 7))
    assert logits.shape == (3, 7, 48)
    assert logits.isfinite().all()


@every_decoding
def test_no_output_depends_on_a_later_token(variant: dict[str, Any]) -> None:
    model, source = built(variant), (torch.arange(40, 46)[None],)
    ids = torch.arange(6)[None]  # row t of the embedding is used by token t alone
    logits = model(*(source if model.settings.family == "encoder_decoder" else ()), ids)[0]
    for t in range(6):
        (gradient,) = torch.autograd.grad(logits[t].square().sum(), model.embedding.tokens.weight, retain_graph=True)
        touched = gradient[:6].abs().sum(-1)
        assert (touched[t + 1 :] == 0).all()
        assert (touched[sees(model, t) : t + 1] > 0).all()


def sees(model: Transformer, t: int) -> int:
    """The first token that can matter to the one at t, through all layers."""
    stack = model.settings.stacks[-1]
    reach = [
        getattr(layer.attention, "window", None) or getattr(layer.attention, "chunk", None) for layer in stack.layers
    ]
    return 0 if None in reach else t


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v["family"] == "encoder"], ids=spell)
def test_an_encoder_looks_both_ways(variant: dict[str, Any]) -> None:
    model = built(variant)
    logits = model(torch.arange(3)[None])[0]
    (gradient,) = torch.autograd.grad(logits[0].square().sum(), model.embedding.tokens.weight)
    assert (gradient[:3].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v["family"] == "encoder_decoder"], ids=spell)
def test_a_decoder_reads_its_source(variant: dict[str, Any]) -> None:
    model = built(variant)
    logits = model(torch.arange(3)[None], torch.tensor([[20, 21]]))[0]
    (gradient,) = torch.autograd.grad(logits[0].square().sum(), model.embedding.tokens.weight)
    assert (gradient[:3].abs().sum(-1) > 0).all()


@every_variant
def test_every_parameter_gets_gradient(variant: dict[str, Any]) -> None:
    model = build(tiny(**variant), seed=1).train()
    types = {"token_type_ids": some_tokens(16, 16) % 2} if model.settings.n_token_types else {}
    types = {} if model.settings.family == "encoder_decoder" else types
    call(model, some_tokens(16, 16), **types).square().mean().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    rare = [] if types else ["embedding.types.weight"]
    assert [name for name in without if name not in rare] == []


@every_decoding
@pytest.mark.parametrize("pieces", [(TOKENS,), (4, TOKENS - 4), (1,) * TOKENS, (5, 2, 1, TOKENS - 8)], ids=len)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(variant: dict[str, Any], pieces: tuple[int, ...]) -> None:
    for dtype, within in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        model, ids = built(variant, dtype), some_tokens()
        logits, cache = decoded(model, ids, pieces)
        assert cache.length == TOKENS
        torch.testing.assert_close(logits, call(model, ids), atol=within, rtol=0)


@every_variant
def test_promised_parameters_are_the_measured_ones(variant: dict[str, Any]) -> None:
    promised = cost(tiny(**variant), TOKENS)
    model = built(variant)
    assert promised.params_total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", registry.names("feed_forward"))
def test_promised_active_parameters_are_those_that_one_token_moves(name: str) -> None:
    settings = tiny(feed_forward=name)
    module = settings.feed_forward.build(settings.shape)
    (module(torch.randn(1, 1, 32)) @ torch.randn(32)).backward()
    moved = sum(p.numel() for p in module.parameters() if p.grad is not None and p.grad.any())
    assert settings.feed_forward.params_active(settings.shape) == moved
    idle = settings.feed_forward.params(settings.shape) - moved
    promised = cost(settings, TOKENS)
    assert promised.params_active == promised.params_total - settings.n_layers * idle


@every_variant
def test_promised_flops_are_the_counted_ones(variant: dict[str, Any]) -> None:
    settings = tiny(**variant)
    model, tokens = built(variant), TOKENS
    ids = [some_tokens(1, length) for length in lengths(settings, tokens).values()]
    with torch.no_grad():
        fused = count_flops(lambda: model(*ids))
        with sdpa_kernel(SDPBackend.MATH):
            written_out = count_flops(lambda: model(*ids))
    promised = cost(settings, tokens, discount=False).flops_per_token
    assert promised == pytest.approx(fused / tokens, rel=0.01)
    assert promised == pytest.approx(written_out / tokens, rel=0.01)


@every_decoding
@torch.no_grad()
def test_promised_cache_is_what_the_live_tensors_hold(variant: dict[str, Any]) -> None:
    settings, model = tiny(**variant), built(variant)
    for length in (4, 5):
        _, cache = decoded(model, some_tokens(3, length), (3, length - 3))
        source = length if settings.family == "encoder_decoder" else 0
        assert cache.written_bytes() == cache_bytes(settings, 3, length, "fp32", source)
        assert cache.allocated_bytes() >= cache.written_bytes()


@torch.no_grad()
def test_a_window_bounds_the_room_that_its_cache_takes() -> None:
    model = build(tiny(attention={"name": "gqa", "window": 4}))
    whole = build(tiny(attention="gqa"))
    assert 4 * model.new_cache(1, 16).allocated_bytes() == whole.new_cache(1, 16).allocated_bytes()


@every_variant
@torch.no_grad()
def test_a_sequence_does_not_see_its_neighbours(variant: dict[str, Any]) -> None:
    model, ids = built(variant), some_tokens(3)
    alone = torch.cat([call(model, row[None]) for row in ids])
    torch.testing.assert_close(call(model, ids), alone, atol=1e-5, rtol=0)


@every_variant
@torch.no_grad()
def test_a_bf16_copy_says_nearly_the_same(variant: dict[str, Any]) -> None:
    model, ids = built(variant), some_tokens()
    wide, narrow = call(model, ids), call(copy.deepcopy(model).bfloat16(), ids)
    assert narrow.dtype == torch.bfloat16
    assert (narrow - wide).norm() < 0.1 * wide.norm()


@every_choice
def test_settings_survive_a_round_trip(slot: str, name: str) -> None:
    for choice in (default(slot, name), getattr(tiny(**{"position": "none", slot: name}), slot)):
        stored = json.loads(json.dumps(choice.settings()))
        assert registry.configure(slot, stored) == choice


@every_choice
def test_the_first_line_names_who_when_and_where(slot: str, name: str) -> None:
    line = registry.summary(slot, name)
    assert re.search(r"^[A-Z0-9].+ \([A-Za-z].*\d{4}, arXiv:\d{4}\.\d{4,5}\b.*\)\.$", line), line


@every_choice
def test_every_setting_is_described(slot: str, name: str) -> None:
    fields = registry.config_class(slot, name).model_fields
    assert [field for field, info in fields.items() if field != "name" and not info.description] == []


@pytest.mark.parametrize("variant", [*REFUSED, *VARIANTS], ids=spell)
def test_a_pairing_is_refused_in_one_line_where_facts_say_so_and_only_there(variant: dict[str, Any]) -> None:
    if all(isinstance(value, str) for value in variant.values()):
        offers, needs = facts(variant)
        assert bool(reasons(variant)) == bool(needs - offers)
    assert all(reason and "\n" not in reason for reason in reasons(variant))


def test_an_attention_without_hooks_refuses_every_scheme_that_needs_one(tmp_path: Any) -> None:
    file = tmp_path / "deaf.py"
    file.write_text(
        "from ablate.attention import mha\n\n\nclass Config(mha.Config):\n    offers = frozenset()\n", encoding="utf-8"
    )
    positions = {name: registry.config_class("position", name).needs for name in registry.names("position")}  # type: ignore[attr-defined]
    assert any(positions.values())
    for position, needs in positions.items():
        if needs:
            _refused(str(file), position)
        else:
            assert tiny(attention=str(file), position=position).attention.offers == frozenset()


def _refused(attention: str, position: str) -> None:
    with pytest.raises(Faults) as caught:
        tiny(attention=attention, position=position)
    (fault,) = caught.value.faults
    assert fault.path == ("position",)
    assert position in fault.message
    assert attention in fault.message
    assert "\n" not in fault.message
