"""What a profile of decoding tells of each cell, against answers that are known; and every way to read a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from references import to_measure
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablate import registry
from ablate.attention._grouped import GroupedQueryAttention
from ablate.attention.mla import LatentAttention
from ablate.choice import Faults
from ablate.model import Transformer, build
from ablate.profiling import bandwidth, decode, kernels, paths
from ablate.profiling.clock import Clock
from ablate.profiling.phase import required_columns
from ablate.settings import DecodeSettings

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(32, (batch, tokens), generator=torch.Generator().manual_seed(1))


class Scripted:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = Clock(lambda: self.now, lambda a, b: b - a)

    def costs(self, model: Transformer) -> None:
        """Every pass of the model takes a second for each sequence and token that it reads, and each earlier round ten.

        So that rounds differ.
        """
        self.prompts = 0

        def hook(_: Any, given: Any) -> None:
            batch, tokens = given[0].shape
            self.prompts += tokens > 1
            self.now += batch * tokens + 10 * self.prompts

        model.embedding.register_forward_pre_hook(hook)


# --- The grid ---------------------------------------------------------------------------------------------------------


def test_a_number_of_new_tokens_is_a_list_of_one() -> None:
    one, same = (DecodeSettings.model_validate({"context": [8], "new_tokens": n}) for n in (4, [4]))
    assert one == same
    assert one.model_dump() == same.model_dump()
    assert DecodeSettings.model_validate({"context": [8]}).new_tokens == [32]
    several = DecodeSettings.model_validate({"batch": [1, 2], "context": [8, 4], "new_tokens": [3, 5]})
    assert several.cells == [(b, c, n) for b in (1, 2) for c in (8, 4) for n in (3, 5)]


@pytest.mark.parametrize(
    ("decode_", "said", "cure"),
    [
        ({"context": [8, 16], "new_tokens": [4, 17]}, "context + new_tokens is 33, more than max_seq_len 32", "lower"),
        ({"context": [8], "new_tokens": []}, "'decode.new_tokens': it has too few values", "at least 1"),
        ({"context": [8], "new_tokens": [4, 0]}, "must be at least 1 (it is 0)", "write 1 or more"),
        ({"context": [8], "new_tokens": 0}, "must be at least 1 (it is 0)", "write 1 or more"),
        ({"context": [8, 4, 8], "new_tokens": 4}, "decode.context has 8 twice", "each number once"),
        ({"context": [8], "batch": [2, 2], "new_tokens": 4}, "decode.batch has 2 twice", "each number once"),
        ({"context": [8], "new_tokens": [4, 4]}, "decode.new_tokens has 4 twice", "each number once"),
        ({"context": [8], "new_tokens": "many"}, "a whole number is needed (it is 'many')", "whole number"),
    ],
)
def test_what_cannot_be_decoded_is_told_with_its_cure(decode_: dict[str, Any], said: str, cure: str) -> None:
    with pytest.raises(Faults) as caught:
        to_measure(decode=decode_)
    (fault,) = caught.value.faults
    assert said in fault.message
    assert cure in fault.cure
    assert fault.path[:2] == ("profile", "decode")


def test_every_cell_has_its_own_first_token_and_its_single_rounds() -> None:
    settings = to_measure(decode={"batch": [1, 2], "context": [8], "new_tokens": [3, 1]}, rounds=2)
    model, scripted = build(settings.model), Scripted()
    scripted.costs(model)
    found = decode.profile(model, settings.profile, "fp32", prompts, scripted.clock)
    cells = {(r["batch"], r["context"], r["new_tokens"], r["path"]) for r in found.rows}
    assert cells == {(b, 8, n, None) for b in (1, 2) for n in (3, 1)}
    first = [r for r in found.rows if (r["batch"], r["new_tokens"]) == (2, 3)]
    singles = {r["metric"]: [] for r in first if r.get("sample") is not None}
    for row in first:
        if row.get("sample") is not None:
            singles[row["metric"]].append((row["sample"], row["value"]))
    assert set(singles) == {"time_to_first_token_seconds", "decode_seconds_per_token"}
    ((one, early), (two, late)) = singles["time_to_first_token_seconds"]
    assert (one, two) == (1, 2)
    assert late - early == 10, "the warm-up is not among them, and each round is"
    by_metric = {r["metric"]: r for r in first if r.get("sample") is None}
    assert by_metric["time_to_first_token_seconds_p50"]["value"] == (early + late) / 2
    assert by_metric["time_to_first_token_seconds_p50"]["spread"] == pytest.approx(0.8 * 10)
    per_token = [value for _, value in singles["decode_seconds_per_token"]]
    assert per_token == [early - 16 + 2, late - 16 + 2]
    assert by_metric["decode_tokens_per_second"]["value"] == pytest.approx(2 / (sum(per_token) / 2))


def test_one_new_token_has_a_first_and_no_further_ones() -> None:
    settings = to_measure(decode={"context": [8], "new_tokens": [1, 3]}, rounds=1)
    model, scripted = build(settings.model), Scripted()
    scripted.costs(model)
    found = decode.profile(model, settings.profile, "fp32", prompts, scripted.clock, 1e9)
    alone = {r["metric"] for r in found.rows if r["new_tokens"] == 1}
    assert "time_to_first_token_seconds_p50" in alone
    assert not {name for name in alone if name.startswith("decode")}
    assert found.columns["time_to_first_token_seconds_p50"] == found.columns["prefill_seconds_p50"]


@pytest.mark.parametrize("new_tokens", [[1, 3], [3, 1], [1, 3, 5]])
def test_all_that_is_told_of_further_tokens_is_of_the_first_cell_that_has_one(new_tokens: list[int]) -> None:
    settings = to_measure(decode={"batch": [2, 1], "context": [8, 4], "new_tokens": new_tokens}, rounds=1)
    model, scripted = build(settings.model), Scripted()
    scripted.costs(model)
    found = decode.profile(model, settings.profile, "fp32", prompts, scripted.clock, 1e9)
    assert settings.profile.decode
    assert settings.profile.decode.timed_cell == (2, 8, 3)
    of_cell = {r["metric"]: r["value"] for r in found.rows if (r["batch"], r["context"], r["new_tokens"]) == (2, 8, 3)}
    told = ("decode_tokens_per_second", "decode_seconds_per_token_p50", "decode_bandwidth_share")
    assert [found.columns[name] for name in told] == [of_cell[name] for name in told]
    assert set(told[:2]) < set(required_columns(settings.profile))


def test_without_a_further_token_nothing_is_told_of_one() -> None:
    settings = to_measure(decode={"context": [8], "new_tokens": [1]}, rounds=1)
    model, scripted = build(settings.model), Scripted()
    scripted.costs(model)
    found = decode.profile(model, settings.profile, "fp32", prompts, scripted.clock, 1e9)
    assert settings.profile.decode
    assert settings.profile.decode.timed_cell is None
    assert not {name for name in (*found.columns, *required_columns(settings.profile)) if name.startswith("decode")}


# --- Bandwidth --------------------------------------------------------------------------------------------------------


def test_bytes_of_a_step_by_hand() -> None:
    """One layer of width 8, 2 heads of which keys and values are 1, feed-forward 16, 11 tokens, no biases."""
    small = {"d_model": 8, "n_layers": 1, "n_heads": 2, "max_seq_len": 64, "vocab_size": 32, "norm": "rms_norm"}
    small |= {"attention": "mqa", "feed_forward": {"name": "swiglu", "d_ff": 16}}
    settings = to_measure(small).model
    q, kv, out = 8 * 8, 2 * 8 * 4, 8 * 8
    gate_up_down, norms, head = 3 * 8 * 16, 3 * 8, 8 * 32
    weights = q + kv + out + gate_up_down + norms + head
    assert bandwidth.weight_elements(settings, 3) == weights + 3 * 8
    cache = 3 * (20 + 5) * 2 * 4  # sequences, tokens in the middle of 10 new ones, key and value of one head of 4
    assert bandwidth.step_bytes(settings, 3, 20, 10, "fp32") == 4 * (weights + 3 * 8 + cache)
    assert bandwidth.step_bytes(settings, 3, 20, 11, "bf16") == 2 * (weights + 3 * 8 + cache)
    tied = to_measure(small | {"tie_embeddings": True}).model
    assert bandwidth.weight_elements(tied, 3) == weights, "what is looked up is in the head, which is read"
    learned = to_measure(small | {"position": "learned"}).model
    assert bandwidth.weight_elements(learned, 3) == weights + 3 * 8 + 8


def test_a_share_is_bytes_a_second_by_those_of_a_copy() -> None:
    assert bandwidth.share(1000, 0.5, 8000.0) == 0.25
    assert bandwidth.share(1000, 0.01, 8000.0) == 12.5, "caches may hold the weights"
    assert bandwidth.share(None, 0.5, 8000.0) is None
    assert bandwidth.share(1000, 0.5, None) is None


def test_the_share_of_a_cell() -> None:
    settings = to_measure(decode={"batch": [2], "context": [8], "new_tokens": [3]}, rounds=2)
    model, scripted = build(settings.model), Scripted()
    scripted.costs(model)
    found = decode.profile(model, settings.profile, "fp32", prompts, scripted.clock, 1e6)
    (row,) = (r for r in found.rows if r["metric"] == "decode_bandwidth_share")
    seconds = found.columns["decode_seconds_per_token_p50"]
    read = bandwidth.step_bytes(settings.model, 2, 8, 3, "fp32")
    assert row["value"] == found.columns["decode_bandwidth_share"] == pytest.approx(read / seconds / 1e6)
    assert row["spread"] > 0


def test_of_experts_only_one_sequence_tells_what_is_read() -> None:
    settings = to_measure({"feed_forward": {"name": "moe", "n_experts": 4, "top_k": 1}}).model
    every = to_measure({"feed_forward": {"name": "moe", "n_experts": 4, "top_k": 4}}).model
    assert bandwidth.weight_elements(settings, 1) < bandwidth.weight_elements(every, 1)
    assert bandwidth.weight_elements(settings, 2) is None
    assert bandwidth.weight_elements(every, 2) == bandwidth.weight_elements(every, 1) + 32


def test_what_is_not_known_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = to_measure({"family": "encoder_decoder", "vocab_size": 33}).model
    assert bandwidth.step_bytes(crossed, 1, 8, 4, "fp32") is None
    settings = to_measure()
    kind = type(settings.model.attention)
    assert bandwidth.step_bytes(settings.model, 1, 8, 4, "fp32") > 0
    monkeypatch.setattr(kind, "cache_elements", lambda *_: None)
    assert bandwidth.step_bytes(settings.model, 1, 8, 4, "fp32") is None
    monkeypatch.undo()
    monkeypatch.setattr(kind, "flops", lambda *_, **__: None)
    assert bandwidth.step_bytes(settings.model, 1, 8, 4, "fp32") is None


class Met(TorchDispatchMode):
    """Parameters that operators meet."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.known = {p.untyped_storage()._cdata: p for p in model.parameters()}
        self.seen: dict[int, nn.Parameter] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and (place := value.untyped_storage()._cdata) in self.known:
                self.seen[place] = self.known[place]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", registry.names("attention"))
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_of_a_step_are_those_that_it_meets(attention: str, tied: bool) -> None:
    rotates = "rotate" in registry.config_class("attention", attention).offers
    changed = {"attention": attention, "position": "rope" if rotates else "none", "tie_embeddings": tied}
    model = build(to_measure(changed).model).eval()
    writer = decode.Writer(model, prompts(2, 8), 2)
    with torch.no_grad():
        writer.read()
        with Met(model) as met:
            writer.write(prompts(2, 1))
    elements = sum(p.numel() for p in met.seen.values())
    looked_up = 0 if tied else 2 * 32 - model.embedding.tokens.weight.numel()
    assert bandwidth.weight_elements(model.settings, 2) == elements + looked_up


# --- Several ways to read a cache -------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Has ways to read a cache."""

    def __init__(self, *decode_paths: str) -> None:
        super().__init__()
        self.decode_paths, self.decode_path = decode_paths, decode_paths[0]


def test_each_way_is_taken_and_the_settings_choice_comes_first_and_comes_back() -> None:
    model = nn.Sequential(Reader("a", "b"), nn.Linear(1, 1), Reader("b", "a", "c"))
    found = paths.ways(model)
    assert found == [("a", "b"), ("a", "a"), ("b", "b"), ("a", "c")]
    assert [paths.name_of(way) for way in found] == ["a+b", "a", "b", "a+c"]
    with paths.taking(model, found[3]):
        assert paths.taken(model) == ("a", "c")
    assert paths.taken(model) == ("a", "b")


def test_with_one_way_there_is_none_to_name() -> None:
    model = build(to_measure().model)
    assert paths.ways(model) == [()]
    assert paths.name_of(()) is None


@pytest.mark.parametrize("chosen", ["absorbed", "expanded"])
def test_a_latent_is_read_both_ways_and_a_slow_one_is_told(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = {"name": "mla", "decode": chosen}
    settings = to_measure({"attention": attention}, decode={"context": [8], "new_tokens": [3, 5]}, rounds=2)
    model, scripted = build(settings.model), Scripted()
    for way, seconds in (("_absorbed", 1.0), ("_expanded", 4.0)):
        took = getattr(LatentAttention, way)

        def taking(self: Any, *given: Any, took: Any = took, seconds: float = seconds) -> Any:
            scripted.now += seconds
            return took(self, *given)

        monkeypatch.setattr(LatentAttention, way, taking)
    found = decode.profile(model, settings.profile, "fp32", prompts, scripted.clock)
    told = {
        (r["new_tokens"], r["path"]): r["value"] for r in found.rows if r["metric"] == "decode_seconds_per_token_p50"
    }
    layers = 2
    assert told == {(n, way): layers * {"absorbed": 1.0, "expanded": 4.0}[way] for n, way in told}
    assert set(told) == {(n, way) for n in (3, 5) for way in ("absorbed", "expanded")}
    assert found.columns["decode_seconds_per_token_p50"] == told[3, chosen]
    assert found.problems == []
    assert f"path {chosen}" in kernels.decoding_kernels(model, prompts(1, 8))


def test_both_ways_give_the_same_logits() -> None:
    model = build(to_measure({"attention": "mla"}).model).double().eval()
    tokens, given = prompts(2, 12), []
    for way in paths.ways(model):
        with paths.taking(model, way), torch.no_grad():
            writer = decode.Writer(model, tokens[:, :8], 4)
            parts = [writer.read(), *(writer.write(token) for token in tokens[:, 8:].split(1, dim=1))]
        given.append(torch.cat(parts, dim=1))
        assert {module.path for module in model.modules() if hasattr(module, "decode_paths")} == set(way)
    assert len(given) == 2
    assert torch.allclose(given[0], given[1], atol=1e-12)
    assert not torch.equal(given[0], given[1]), "they are two ways"


def test_a_way_that_is_wrong_is_found_also_where_the_settings_choose_another(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = {"name": "mla", "decode": "expanded"}
    settings = to_measure({"attention": attention}, decode={"context": [8], "new_tokens": 4})
    model, absorbed = build(settings.model), LatentAttention._absorbed
    assert decode.cache_mismatch(model, settings.profile.decode, prompts) is None
    monkeypatch.setattr(LatentAttention, "_absorbed", lambda self, *given: 1.1 * absorbed(self, *given))
    wrong = decode.cache_mismatch(model, settings.profile.decode, prompts)
    assert wrong is not None
    assert wrong.endswith("(path absorbed)")
    assert set(paths.taken(model)) == {"expanded"}


def test_a_cache_that_is_wrong_only_in_the_longest_cell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"context": [8, 24, 12], "new_tokens": [2, 4]}
    settings = to_measure(decode=cells)
    model, forward = build(settings.model), GroupedQueryAttention.forward
    assert decode.cache_mismatch(model, settings.profile.decode, prompts) is None

    def late(self: Any, x: Any, position: Any, start: int, mask: Any = None, cache: Any = None, *rest: Any) -> Any:
        return forward(self, x, position, start, mask, cache, *rest) * (1.1 if cache is not None and start > 24 else 1)

    monkeypatch.setattr(GroupedQueryAttention, "forward", late)
    assert "logits differ" in str(decode.cache_mismatch(model, settings.profile.decode, prompts))
    of_first = to_measure(decode={"context": [8], "new_tokens": [2]})
    assert decode.cache_mismatch(model, of_first.profile.decode, prompts) is None
