"""The gates: every built-in choice passes them, and each of them is seen to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from references import FAMILIES, SETTINGS, VARIANTS, spell, tiny
from torch import nn

from ablate import catalogue, cost, gates
from ablate.attention import _scores, mha, mla
from ablate.building import model_settings
from ablate.cache import Cache
from ablate.job import Verdict
from ablate.model import Transformer
from ablate.settings import ModelSettings
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

    assert why() == {"tied": "the head has weights of its own", "identities": "its choices declare none"}
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
        {forward}
        return out


class Config(mha.Config):
    def build(self, shape):
        module = Module(shape.d_model, shape.n_heads, shape.n_heads, self.head_dim, causal=self.is_causal(shape))
        {build}
        return module

    def flops(self, shape, tokens, **how):
        found = super().flops(shape, tokens, **how)
        {flops}
        return found

    def params(self, shape):
        found = super().params(shape)
        {params}
        return found

    def cache_elements(self, shape, tokens):
        found = super().cache_elements(shape, tokens)
        {cache_elements}
        return found

    def identities(self, shape):
        {identities}
        return iter(())
'''
PLACES = ("forward", "build", "flops", "params", "cache_elements", "identities")

FAULTS = {
    "future": ("causal", "forward", "out = out + 0.01 * x.mean(1, keepdim=True)", "later tokens account for "),
    "future-by-choice": (
        "causal",
        "forward",
        "out = out * (1 + 0.1 * (x[:, -1:] > 0).to(x.dtype))",
        "later tokens account for ",
    ),
    "neighbours": ("rows", "forward", "out = out + x.mean(0)", "logits in a batch and alone differ by "),
    "cache": ("cached", "forward", "out = out * (1 + 1e-7 * (start > 0))", "cached and full logits differ by "),
    "cache-size": ("cache bytes", "cache_elements", "found += 8", "bytes are promised for 2 tokens, "),
    "parameters": ("parameters", "params", "found += 1", "are promised, "),
    "flops": ("flops", "flops", "found['x'] = 2", "a token are promised, "),
    "idle": ("gradients", "build", "module.idle = nn.Parameter(torch.ones(3))", "never gets one"),
    "cut-off": ("gradients", "forward", "out = out.detach() if self.training else out", "never gets one"),
    "zero-division": ("gradients", "forward", "1 / (not self.training)", "ZeroDivisionError: division by zero (own.py, line "),
    "identity": (
        "{own}: one is two",
        "identities",
        "yield 'one is two', lambda: (torch.ones(2), 2 * torch.ones(2))",
        "both sides differ by ",
    ),
    "identity-shape": (
        "{own}: one is two",
        "identities",
        "yield 'one is two', lambda: (torch.ones(1), torch.ones(2))",
        "both sides are of shapes (1,) and (2,)",
    ),
    "identity-error": ("identities", "identities", "yield 1 / 0", "ZeroDivisionError"),
    "nan": ("builds", "forward", "out = out * float('nan')", "100% of the logits are not finite"),
    "shape": ("builds", "forward", "out = out[:, 1:]", "RuntimeError"),
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


def own(folder: Path, **faults: str) -> str:
    """The path of a choice with the faults."""
    file = folder / "own.py"
    code = PLUG_IN
    for place in PLACES:
        code = code.replace("{%s}" % place, faults.get(place, "pass"))
    file.write_text(code, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_plug_in_fails_its_gate(tmp_path: Path, fault: str) -> None:
    gate, place, code, words = FAULTS[fault]
    attention = own(tmp_path, **{place: code})
    ((name, detail),) = failed(tiny(attention=attention)).items()
    assert name == gate.replace("{own}", attention)
    assert words in detail


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
