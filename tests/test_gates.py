"""The gates: every built-in choice passes them, and each of them is seen to fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch
from references import FAMILIES, SETTINGS, VARIANTS, spell, tiny
from torch import Tensor, nn

from ablate import catalogue, cost, gates, presets
from ablate.attention import Scoring, _grouped, attend, mha, mla
from ablate.building import model_settings
from ablate.cache import Cache
from ablate.job import Verdict
from ablate.model import Transformer
from ablate.settings import LAYER_SLOTS, ModelSettings
from ablate.twin import VOCABULARY, twin


def _each() -> Iterator[dict[str, Any]]:
    """Variants that have a choice in a family for the first time, and a decoder with each of the settings."""
    seen: set[tuple[str, ...]] = set()
    for variant in VARIANTS:
        family, *slots = variant.items()
        new = {(*family, slot, name) for slot, name in slots if isinstance(name, str)} - seen
        if new or (family[1] == "decoder" and dict(slots) in SETTINGS):
            seen |= new
            yield variant


EACH = list(_each())


def verdicts(settings: ModelSettings) -> dict[str, Verdict]:
    return {verdict.gate: verdict for verdict in gates.verdicts(settings)}


def failed(settings: ModelSettings) -> dict[str, str]:
    return {name: verdict.detail for name, verdict in verdicts(settings).items() if verdict.result == "failed"}


# --- What passes ------------------------------------------------------------------------------------------------------


def test_every_choice_is_there() -> None:
    for slot in catalogue.SLOTS:
        for name in catalogue.names(slot):
            families = {each["family"] for each in EACH if each.get(slot) == name}
            assert families, f"{slot} {name} passes no gates"
    assert {each["family"] for each in EACH} == set(FAMILIES)


@pytest.mark.parametrize("variant", EACH, ids=spell)
def test_every_choice_passes(variant: dict[str, Any]) -> None:
    assert failed(tiny(**variant)) == {}


def test_what_does_not_apply_says_why() -> None:
    def why(**changes: Any) -> dict[str, str]:
        return {name: v.detail for name, v in verdicts(tiny(**changes)).items() if v.result == "not applicable"}

    assert why(attention="lstm", position="none") == {
        "tied": "the head has weights of its own",
        "identities": "its choices declare none",
    }
    assert why(tie_embeddings=True, attention="gqa") == {}
    sideways = "its attention is set to look both ways"
    both_ways = why(attention={"name": "gqa", "causal": False}, tie_embeddings=True)
    assert both_ways == dict.fromkeys(("causal", "cached", "cache bytes"), sideways)
    assert why(family="encoder", attention="gqa", tie_embeddings=True) == dict.fromkeys(
        ("causal", "cached", "cache bytes"), "an encoder looks both ways"
    )
    assert why(family="encoder_decoder", attention="gqa", tie_embeddings=True) == {}


def test_identities_are_gates_of_their_own() -> None:
    found = verdicts(tiny(attention="gqa"))
    assert found["gqa: with one key/value head it is mqa"].result == "passed"
    assert found["identities"].detail == "2 declared"


# --- A choice of one's own --------------------------------------------------------------------------------------------

PLUG_IN = '''"""Multi-head attention, and a fault."""

import torch
from torch import nn

from ablate.attention import mha, _grouped
from ablate.cache import Cache


class Module(_grouped.GroupedQueryAttention):
    def forward(self, x, position, start, mask=None, cache=None, memory=None):
        out = super().forward(x, position, start, mask, cache, memory)
        $forward
        return out


class Config(mha.Config):
    def build(self, shape):
        module = Module(shape.d_model, shape.n_heads, shape.n_heads, self.head_dim, causal=self.is_causal(shape))
        $build
        return module

    def flops(self, shape, tokens, **how):
        found = super().flops(shape, tokens, **how)
        $flops
        return found

    def params(self, shape):
        found = super().params(shape)
        $params
        return found

    def cache_elements(self, shape, tokens):
        found = super().cache_elements(shape, tokens)
        $cache_elements
        return found

    def identities(self, shape):
        $identities
        return iter(())
'''
PLACES = ("forward", "build", "flops", "params", "cache_elements", "identities")

FAULTS = {
    "future": ("causal cached", "forward", "out = out + 0.01 * x.mean(1, keepdim=True)", "later tokens account for "),
    "future-by-choice": (
        "causal cached",
        "forward",
        "out = out * (1 + 0.1 * (x[:, -1:] > 0).to(x.dtype))",
        "later tokens account for ",
    ),
    "neighbours": ("causal rows", "forward", "out = out + x.mean(0)", "later tokens account for "),
    "cache": ("cached", "forward", "out = out * (1 + 1e-7 * (start > 0))", "cached and full logits differ by "),
    "cache-size": ("cache-bytes", "cache_elements", "found += 8", "bytes are promised for 2 tokens, "),
    "parameters": ("parameters", "params", "found += 1", "are promised, "),
    "flops": ("flops", "flops", "found['x'] = 2", "a token are promised, "),
    "idle": ("parameters gradients", "build", "module.idle = torch.nn.Parameter(torch.ones(3))", "are promised, "),
    "cut-off": (
        "gradients",
        "forward",
        "out = out.detach() if self.training else out",
        "parameters never get one: decoder.layers.0.attention.out.weight, ",
    ),
    "division": (
        "gradients",
        "forward",
        "1 / (not self.training)",
        "ZeroDivisionError: division by zero (own.py, line ",
    ),
    "identity": (
        "one-is-two",
        "identities",
        "yield 'one is two', lambda: (torch.ones(2), 2 * torch.ones(2))",
        " differ by ",
    ),
    "shapes": (
        "one-is-two",
        "identities",
        "yield 'one is two', lambda: (torch.ones(1), torch.ones(2))",
        "both sides are of shapes (1,) and (2,)",
    ),
    "no-identity": ("identities", "identities", "yield 1 / 0", "ZeroDivisionError"),
    "nan": ("builds", "forward", "out = out * float('nan')", "100% of the logits are not finite"),
    "shape": ("builds", "forward", "out = out[:, 1:]", "RuntimeError"),
    "no-tensor": ("builds", "forward", "out = [out]", "TypeError: "),
    "raises": ("builds", "forward", "raise KeyError('gone')", "KeyError: 'gone' (own.py, line 13)"),
    "quits": ("builds", "build", "raise SystemExit(3)", "SystemExit: 3 (own.py, line "),
    "mute": (
        "builds",
        "forward",
        "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
        "Mute: (its message cannot be read)",
    ),
    "memory": ("builds", "forward", "torch.empty(2**60)", "RuntimeError: "),
}
"""The gates that see it, where in the plug-in it is, what it is, and what is said of it first."""


def own(folder: Path, **faults: str) -> str:
    """The path of a choice with the faults."""
    file = folder / "own.py"
    file.write_text(Template(PLUG_IN).substitute(dict.fromkeys(PLACES, "pass") | faults), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_plug_in_fails_its_gate(tmp_path: Path, fault: str) -> None:
    seen_by, place, code, words = FAULTS[fault]
    found = failed(tiny(attention=own(tmp_path, **{place: code})))
    assert [gate.rpartition(": ")[2].replace(" ", "-") for gate in found] == seen_by.split()
    assert words in next(iter(found.values()))


def test_without_a_fault_it_passes(tmp_path: Path) -> None:
    assert failed(tiny(attention=own(tmp_path))) == {}


def test_what_is_not_said_is_not_checked(tmp_path: Path) -> None:
    silent = own(tmp_path, flops="found = None", cache_elements="found = None")
    found = verdicts(tiny(attention=silent))
    assert failed(tiny(attention=silent)) == {}
    assert {name: found[name].detail for name in ("flops", "cache bytes")} == {
        "flops": "a choice does not say what it takes",
        "cache bytes": "a choice does not say what it keeps",
    }


def test_rounding_within_a_choice_is_no_fault(tmp_path: Path) -> None:
    rounds = own(tmp_path, forward="out = out.float().to(out.dtype)")
    assert failed(tiny(attention=rounds)) == {}


def test_a_choice_that_needs_room_gets_it(tmp_path: Path) -> None:
    proud = own(tmp_path, build="assert shape.d_model % 48 == 0")
    found = verdicts(tiny(attention=proud, d_model=96))
    assert found["builds"].detail == "decoder layers 2, d_model 96, n_heads 4"
    assert {verdict.result for verdict in found.values()} == {"passed", "not applicable"}


# --- A built-in choice that is broken ---------------------------------------------------------------------------------

_init, _append, _absorbed = Transformer.__init__, Cache.append, mla.LatentAttention._absorbed
_flops, _elements, _params = mha.Config.flops, mla.Config.cache_elements, mla.Config.params


def _untied(model: Transformer, settings: ModelSettings) -> None:
    _init(model, settings)
    model.head.output.weight = nn.Parameter(model.embedding.tokens.weight.detach().clone())


def _looking_ahead(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, **where: Any) -> Tensor:
    return attend(q, k, v, replace(scoring, causal=False), **where)


def _keys_out_of_place(cache: Cache, *entries: Tensor) -> list[Tensor]:
    keys, *rest = _append(cache, *entries)
    return [keys.roll(1, dims=-2), *rest]


BROKEN: dict[str, tuple[str, Any, str, Any, dict[str, Any]]] = {
    "mask": ("causal cached", _grouped, "attend", _looking_ahead, {}),
    "cache": ("cached", Cache, "append", _keys_out_of_place, {}),
    "absorbed": (
        "cached absorbed-it-is-what-it-is-expanded",
        mla.LatentAttention,
        "_absorbed",
        lambda *given: 1.01 * _absorbed(*given),
        {"attention": "mla"},
    ),
    "tied": ("parameters tied", Transformer, "__init__", _untied, {"tie_embeddings": True}),
    "flops": (
        "flops",
        mha.Config,
        "flops",
        lambda *given, **how: _flops(*given, **how) | {"attention.scores": 0.0},
        {},
    ),
    "params": ("parameters", mla.Config, "params", lambda *given: _params(*given) + 1, {"attention": "mla"}),
    "elements": (
        "cache-bytes",
        mla.Config,
        "cache_elements",
        lambda *given: 2 * _elements(*given),
        {"attention": "mla"},
    ),
}
"""The gates that see it, what is broken, how, and a variant that has it."""


@pytest.mark.parametrize("fault", BROKEN)
def test_each_fault_of_a_built_in_choice_fails_its_gate(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by, owner, name, wrong, variant = BROKEN[fault]
    settings = tiny(**variant)
    assert failed(settings) == {}
    monkeypatch.setattr(owner, name, wrong)
    assert [gate.rpartition(": ")[2].replace(" ", "-") for gate in failed(settings)] == seen_by.split()


# --- Twins ------------------------------------------------------------------------------------------------------------

PUBLISHED = [name for name in catalogue.names(catalogue.PRESETS) if "d_model" in presets.settings(name)]


def choices(settings: ModelSettings) -> list[set[tuple[str, str]]]:
    """Slots and names of each stack's layers."""
    layers = [[layer for layer, _ in stack.distinct_layers()] for stack in settings.stacks]
    return [
        {(slot, one.name) for layer in each for slot in LAYER_SLOTS if (one := getattr(layer, slot))} for each in layers
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_a_small_twin_of_the_same_choices(name: str) -> None:
    whole = model_settings({"preset": name})
    small = twin(whole)
    assert cost.cost(small, 12).params_total < 3e6
    assert small.shape.vocab_size == VOCABULARY
    assert choices(small) == choices(whole)
    for key in ("family", "tie_embeddings", "embed_scale", "embed_norm", "n_token_types", "head"):
        assert getattr(small, key) == getattr(whole, key)
    for few, many in zip(small.stacks, whole.stacks, strict=True):
        assert 2 <= few.shape.n_layers < many.shape.n_layers
        assert few.last.feed_forward.name == many.last.feed_forward.name


@pytest.mark.parametrize("name", ["deepseek-v3", "falcon-7b", "gemma-2-9b", "llama-4-scout-text", "phi-2", "t5-base"])
def test_a_published_model_passes(name: str) -> None:
    assert failed(model_settings({"preset": name})) == {}


def test_heads_that_share_keys_still_do() -> None:
    small = twin(model_settings({"preset": "llama-3-70b"}))
    assert (small.n_heads, small.attention.model_dump()["n_kv_heads"]) == (16, 8)
    assert twin(model_settings({"preset": "falcon-7b"})).n_heads == 4
    assert twin(tiny(n_heads=1)).n_heads == 1


def test_each_different_layer_is_there_once_and_the_last_one_is_last() -> None:
    windows = [{"at": [1, 3], "attention": {"window": 5}}, {"at": [4], "feed_forward": "moe"}]
    layers = twin(tiny(n_layers=6, layers=windows)).stacks[-1].layers
    assert [(each.attention.model_dump()["window"], each.feed_forward.name) for each in layers] == [
        (3, "relu"),
        (None, "moe"),
        (None, "relu"),
    ]


@pytest.mark.parametrize(("n_layers", "kept"), [(1, 1), (2, 2), (5, 2)])
def test_layers_that_are_alike_are_two_unless_there_is_one(n_layers: int, kept: int) -> None:
    wider = [{"first": 1, "feed_forward": {"d_ff": 500}}] if n_layers > 1 else []
    assert twin(tiny(n_layers=n_layers)).n_layers == kept
    assert twin(tiny(n_layers=n_layers, layers=wider)).n_layers == kept


def test_what_no_twin_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny()
    monkeypatch.setattr(mha.Config, "problems", lambda *given: ["nothing will do"])
    assert failed(settings) == {"builds": "Faults: nothing will do"}


def test_a_head_that_is_wide_enough_is_found() -> None:
    fraction = {"name": "rope", "fraction": 0.4}
    small = twin(model_settings({"d_model": 320, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "position": fraction}))
    assert small.d_model == 4 * 10


# --- A whole model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_leak_that_twins_are_too_small_for_is_seen_in_the_model(family: str, tmp_path: Path) -> None:
    late = own(tmp_path, forward="out = out + (x.shape[1] > 12) * x.mean(1, keepdim=True)")
    tokens = torch.arange(16)[None] % 48
    settings = tiny(family=family, attention=late, cross_attention="mha")
    assert failed(settings) == {}
    found = [gates.leak(Transformer(each), tokens) for each in (settings, tiny(family=family))]
    assert found[1] is None
    assert bool(found[0]) == (family != "encoder")
