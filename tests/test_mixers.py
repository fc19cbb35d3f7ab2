"""Mixers whose past is a state of fixed size: linear attention and the LSTM, each against a slow float64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ablate import registry
from ablate.attention import AttentionChoice
from ablate.attention.linear import CHUNK
from ablate.choice import Shape
from ablate.init import initialise
from ablate.position import Position
from ablate.profiling.flops import count_flops

MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
NOWHERE = Position()
both = pytest.mark.parametrize("name", ["linear", "lstm"])
LENGTHS = [1, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 5]


class Turn(Position):
    """Angles that grow with the place: what rotary schemes do, in two lines."""

    def rotate(self, x: Tensor, start: int) -> Tensor:
        angle = 0.3 * torch.arange(start, start + x.shape[-2], dtype=x.dtype)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def shape(**changes: Any) -> Shape:
    return Shape(**{"d_model": 12, "n_layers": 2, "n_heads": 3, "max_seq_len": 256, "vocab_size": 8} | changes)


def choice(name: str, **settings: Any) -> AttentionChoice:
    found = registry.configure("attention", {"name": name, **settings})
    assert isinstance(found, AttentionChoice)
    return found


def module(name: str, sizes: Shape | None = None, **settings: Any) -> Any:
    """In float64 and evaluation mode, with weights and biases wide enough for each to matter."""
    built = choice(name, **settings).build(sizes or shape()).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return built


def tokens(batch: int = 4, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


# Linear attention


def feature(x: float) -> float:
    return x + 1 if x > 0 else math.exp(x)


def linear_reference(
    mixer: Any, x: Tensor, source: Tensor, causal: bool, position: Position, real: Tensor | None = None
) -> Tensor:
    """One sequence `(T, D)`, query by query and key by key: turned features above, plain ones below."""
    packed = [mixer.q, mixer.kv] if mixer.cross else [mixer.qkv]
    w = torch.cat([each.weight for each in packed]).detach()
    b = torch.cat([each.bias for each in packed]).detach() if packed[0].bias is not None else torch.zeros(len(w))
    rows = zip((x, source, source), w.chunk(3), b.chunk(3), strict=True)
    q, k, v = (read @ weight.T + bias for read, weight, bias in rows)
    d, heads = mixer.head_dim, []
    for h in range(mixer.n_heads):
        cut = slice(h * d, (h + 1) * d)
        plain_q, plain_k = (each[:, cut].detach().clone().apply_(feature) for each in (q, k))
        turned_q, turned_k = (position.rotate(each, 0) for each in (plain_q, plain_k))
        out = torch.zeros(len(x), d, dtype=torch.float64)
        for t in range(len(x)):
            below = mixer.eps
            for s in range(len(source)):
                if (s <= t or not causal) and (real is None or real[s]):
                    out[t] += (turned_q[t] @ turned_k[s]) * v[s, cut]
                    below += float(plain_q[t] @ plain_k[s])
            out[t] /= below
        heads.append(out)
    return mixer.out(torch.cat(heads, dim=-1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", [NOWHERE, Turn()], ids=["nowhere", "turned"])
@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"bias": "qkv", "head_dim": 2, "eps": 0.5}], ids=str)
@torch.no_grad()
def test_linear_attention_is_its_loop_over_keys(causal: bool, position: Position, settings: dict[str, Any]) -> None:
    mixer, x = module("linear", causal=causal, **settings), tokens(2)
    expected = torch.stack([linear_reference(mixer, row, row, causal, position) for row in x])
    assert_same(mixer(x, position, 0), expected)


@torch.no_grad()
def test_chunks_do_not_show() -> None:
    mixer, x = module("linear"), tokens(1, CHUNK + 3)
    assert_same(mixer(x, Turn(), 0)[0], linear_reference(mixer, x[0], x[0], True, Turn()))


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_linear_attention_leaves_out_padding(causal: bool) -> None:
    mixer, x = module("linear", causal=causal), tokens()
    expected = [linear_reference(mixer, *(row, row), causal, Turn(), real) for row, real in zip(x, MASK, strict=True)]
    assert_same(mixer(x, Turn(), 0, MASK), torch.stack(expected))
    assert torch.equal(mixer(x, Turn(), 0, MASK)[3], torch.zeros(7, 12))


@pytest.mark.parametrize("settings", [{}, {"bias": True}], ids=str)
@torch.no_grad()
def test_linear_attention_reads_another_sequence_once(settings: dict[str, Any]) -> None:
    mixer = module("linear", shape(cross=True), **settings)
    x, memory, real = tokens(4, 5, seed=1), tokens(), MASK
    rows = zip(x, memory, real, strict=True)
    expected = torch.stack([linear_reference(mixer, a, b, False, Turn(), seen) for a, b, seen in rows])
    assert_same(mixer(x, Turn(), 0, real, None, memory), expected)
    assert_same(mixer(x[:, 2:], Turn(), 2, real, None, memory), expected[:, 2:])
    cache = mixer.new_cache(4, 7, torch.float64, x.device)
    first = mixer(x[:, :2], Turn(), 0, real, cache, memory)
    later = [mixer(x[:, t : t + 1], Turn(), t, real, cache) for t in range(2, 5)]
    assert_same(torch.cat([first, *later], dim=1), expected)
    assert cache.length == 7


@torch.no_grad()
def test_the_state_of_linear_attention_is_the_two_sums() -> None:
    mixer, x = module("linear"), tokens(2)
    cache = mixer.new_cache(2, 7, torch.float64, x.device)
    mixer(x, NOWHERE, 0, None, cache)
    _, k, v = (part.unflatten(-1, (3, 4)) for part in mixer.qkv.split(x))
    k = k.apply_(feature)
    assert_same(cache.tensors[0], torch.einsum("bthd,bthe->bhde", k, v))
    assert_same(cache.tensors[1], k.sum(1))


# LSTM


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def lstm_reference(mixer: Any, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence `(T, D)`, step by step; padding is passed by as if it were not there."""
    w_in, w_out, b_in, b_out = (parameter.detach() for parameter in mixer.lstm.parameters())
    h = c = torch.zeros(x.shape[-1], dtype=torch.float64)
    said = torch.zeros_like(x)
    for t in range(len(x)):
        if real is not None and not real[t]:
            continue
        enter, forget, new, leave = (w_in @ x[t] + b_in + w_out @ h + b_out).chunk(4)
        c = sigmoid(forget) * c + sigmoid(enter) * torch.tanh(new)
        h = sigmoid(leave) * torch.tanh(c)
        said[t] = h
    return said @ mixer.out.weight.detach().T, h, c


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_the_lstm_is_its_recurrence(padded: bool) -> None:
    mixer, x = module("lstm"), tokens()
    cache = mixer.new_cache(4, 7, torch.float64, x.device)
    y = mixer(x, NOWHERE, 0, MASK if padded else None, cache)
    for b, row in enumerate(x):
        expected, h, c = lstm_reference(mixer, row, MASK[b] if padded else None)
        assert_same(y[b], expected)
        assert_same(cache.tensors[0][0, b], h)
        assert_same(cache.tensors[1][0, b], c)


def test_the_lstm_starts_from_the_seed_and_its_place_alone() -> None:
    def started(seed: int, *before: nn.Module) -> nn.Module:
        torch.manual_seed(len(before))
        model = nn.ModuleDict({"mixer": choice("lstm").build(shape()), **dict(zip("ab", before, strict=False))})
        initialise(model, "normal", 0.5, seed)
        return model["mixer"]

    one, again, other = started(1), started(1, nn.Linear(2, 2)), started(2)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == ("bias" in name)


def test_the_lstms_matrices_are_drawn_gate_by_gate_and_its_forget_gate_starts_open() -> None:
    wide = shape(d_model=96)
    mixer: Any = choice("lstm").build(wide)
    initialise(mixer, "xavier", 0.0, 0)
    for matrix in (*mixer.lstm.weight_ih_l0.chunk(4), *mixer.lstm.weight_hh_l0.chunk(4), mixer.out.weight):
        assert 0.99 * math.sqrt(6 / 192) < matrix.abs().max().item() <= math.sqrt(6 / 192)
    gates = (mixer.lstm.bias_ih_l0 + mixer.lstm.bias_hh_l0).chunk(4)
    assert [gate.unique().tolist() for gate in gates] == [[0.0], [1.0], [0.0], [0.0]]
    initialise(mixer, "normal", 0.05, 0)
    assert mixer.lstm.weight_hh_l0.std().item() == pytest.approx(0.05, rel=0.05)


# Both


@both
@pytest.mark.parametrize("pieces", [(7,), (1,) * 7, (3, 1, 2, 1)], ids=len)
@pytest.mark.parametrize("mask", [None, MASK], ids=["all real", "padded"])
@torch.no_grad()
def test_the_recurrence_equals_the_whole_sequence(name: str, pieces: tuple[int, ...], mask: Tensor | None) -> None:
    mixer, x, start = module(name), tokens(), 0
    cache = mixer.new_cache(4, 7, torch.float64, x.device)
    said = []
    for piece in x.split(pieces, dim=1):
        end = start + piece.shape[1]
        said.append(mixer(piece, Turn(), start, None if mask is None else mask[:, :end], cache))
        start = end
    assert cache.length == 7
    real = torch.ones(4, 7, dtype=torch.bool) if mask is None else mask
    assert_same(torch.cat(said, dim=1)[real], mixer(x, Turn(), 0, mask)[real])


@torch.no_grad()
def test_a_state_goes_on_across_chunks() -> None:
    mixer, x = module("linear"), tokens(2, 2 * CHUNK + 9)
    cache = mixer.new_cache(2, 0, torch.float64, x.device)
    pieces = zip(x.split((CHUNK + 2, 1, CHUNK + 6), dim=1), (0, CHUNK + 2, CHUNK + 3), strict=True)
    assert_same(torch.cat([mixer(p, Turn(), start, None, cache) for p, start in pieces], 1), mixer(x, Turn(), 0))


@both
def test_what_stands_in_padding_changes_nothing(name: str) -> None:
    seen = []
    for filler in (4.0, -9.0):
        mixer = module(name).train()
        y = mixer(tokens().masked_fill(~MASK[..., None], filler), Turn(), 0, MASK)
        y[MASK].square().sum().backward()
        seen.append([y.detach()[MASK], *(parameter.grad for parameter in mixer.parameters())])
    for one, other in zip(*seen, strict=True):
        assert_same(one, other)


@both
def test_a_row_of_padding_alone_gives_finite_gradients(name: str) -> None:
    mixer, x = module(name).train(), tokens().requires_grad_()
    y = mixer(x, NOWHERE, 0, MASK)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@both
def test_no_output_depends_on_a_later_token(name: str) -> None:
    mixer, x = module(name), tokens(1, 70).requires_grad_()
    y = mixer(x, Turn(), 0)
    for t in (0, 1, CHUNK - 1, CHUNK, 69):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        touched = gradient[0].abs().sum(-1) > 0
        assert touched[t]
        assert not touched[t + 1 :].any()
        assert touched[max(0, t - 2) : t + 1].all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all real", "padded"])
def test_narrower_numbers_say_nearly_the_same(name: str, dtype: torch.dtype, mask: Tensor | None) -> None:
    mixer, x = module(name), tokens()
    whole = mixer(x, Turn(), 0, mask).detach()
    y = mixer.to(dtype)(x.to(dtype), Turn(), 0, mask)
    y.float().sum().backward()
    assert y.dtype == dtype
    assert (y.double() - whole).norm() < (1e-5 if dtype == torch.float32 else 0.03) * whole.norm()


@both
@pytest.mark.parametrize("mask", [None, MASK], ids=["all real", "padded"])
def test_autocast_over_wide_weights_trains_and_decodes(name: str, mask: Tensor | None) -> None:
    mixer, x = module(name), tokens()
    whole, mixer = mixer(x, Turn(), 0, mask).detach(), mixer.float().train()
    for each in (x.float(), x.bfloat16()):
        cache = mixer.new_cache(4, 7, torch.float32, x.device)
        with torch.autocast("cpu", torch.bfloat16):
            y = mixer(each, Turn(), 0, mask)
            y.float().sum().backward()
            pieces = ((0, 4), (4, 7))
            said = [mixer(each[:, a:b], Turn(), a, None if mask is None else mask[:, :b], cache) for a, b in pieces]
        assert y.dtype == torch.bfloat16
        for result in (y, torch.cat(said, dim=1)):
            assert (result.double() - whole).norm() < 0.03 * whole.norm()
        assert all(tensor.dtype == torch.float32 for tensor in cache.tensors)


@torch.no_grad()
def test_sums_over_many_tokens_are_kept_wide_where_they_are_stored_so() -> None:
    mixer, x = module("linear"), tokens(1, 600)
    whole, mixer = mixer(x, NOWHERE, 0), mixer.float()
    cache = mixer.new_cache(1, 600, torch.float32, x.device)
    with torch.autocast("cpu", torch.bfloat16):
        said = [mixer(x[:, t : t + 1].float(), NOWHERE, t, None, cache) for t in range(600)]
    assert (torch.cat(said[500:], dim=1) - whole[:, 500:]).norm() < 0.03 * whole[:, 500:].norm()


VARIANTS = [
    ("linear", {}, {}),
    ("linear", {"bias": True}, {}),
    ("linear", {"bias": "qkv", "head_dim": 2}, {}),
    ("linear", {"causal": False}, {}),
    ("linear", {"bias": True}, {"cross": True}),
    ("lstm", {}, {}),
]
every_variant = pytest.mark.parametrize(("name", "settings", "changes"), VARIANTS, ids=str)


@every_variant
def test_promised_parameters_are_the_built_ones(name: str, settings: dict[str, Any], changes: dict[str, Any]) -> None:
    built = choice(name, **settings).build(shape(**changes))
    assert choice(name, **settings).params(shape(**changes)) == sum(p.numel() for p in built.parameters())


@every_variant
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_promised_flops_are_the_counted_ones(
    name: str, settings: dict[str, Any], changes: dict[str, Any], length: int, dtype: torch.dtype
) -> None:
    sizes, source = shape(**changes), 11 if changes else 0
    mixer, x = module(name, sizes, **settings).to(dtype), tokens(2, length).to(dtype)
    memory = tokens(2, source).to(dtype) if source else None
    promised = choice(name, **settings).flops(sizes, length, discount=False, source_tokens=source)
    assert promised is not None
    counted = count_flops(lambda: mixer(x, NOWHERE, 0, None, None, memory))
    assert sum(promised.values()) * 2 * length == pytest.approx(counted, rel=1e-12)


def test_linear_attention_is_charged_for_the_keys_that_it_sees() -> None:
    per_head_and_key = 2.0 * 12
    for length in LENGTHS:
        seen = [t % CHUNK + 1 for t in range(length)]
        terms = choice("linear").flops(shape(), length)
        assert terms is not None
        assert terms["attention.scores"] == terms["attention.values"]
        assert terms["attention.scores"] == pytest.approx(per_head_and_key * sum(seen) / length)
        assert terms["attention.state"] == 2 * 2 * 12 * 4


@both
@torch.no_grad()
def test_the_cache_holds_what_was_promised_however_many_tokens_there_are(name: str) -> None:
    found, mixer = choice(name), module(name)
    cache = mixer.new_cache(3, 9, torch.float64, torch.device("cpu"))
    for length in range(1, 4):
        mixer(tokens(3, 1), NOWHERE, length - 1, None, cache)
        promised = found.cache_elements(shape(), length)
        assert promised is not None
        assert cache.written_bytes() == cache.allocated_bytes() == 3 * 8 * promised
    assert found.cache_elements(shape(), 256) == found.cache_elements(shape(), 255)


@both
def test_dropout_of_weights_that_do_not_exist_is_refused(name: str) -> None:
    (problem,) = choice(name).problems(shape(attention_dropout=0.1))
    assert name in str(problem)
    assert not choice(name).problems(shape())


@both
def test_the_value_path_is_made_of_its_own_weights(name: str) -> None:
    mixer = module(name)
    owned = {parameter.untyped_storage().data_ptr() for parameter in mixer.parameters()}
    values, out = mixer.value_path()
    assert {weight.untyped_storage().data_ptr() for weight in (values, out)} <= owned
    before = mixer(tokens(), NOWHERE, 0)
    values.zero_()
    silent = mixer(tokens(), NOWHERE, 0)
    assert not torch.equal(before, silent)
    assert name == "lstm" or torch.equal(silent, torch.zeros(4, 7, 12))


def test_recurrent_layers_are_counted_where_one_kernel_runs_them() -> None:
    inner = nn.LSTM(6, 6)
    meta = [torch.empty(shape, device="meta") for shape in ((5, 2, 6), (24, 6), (24, 6), (24,), (24,), (1, 2, 6))]
    x, state = meta[0], meta[5]
    rest = (4, None, state, state, 2, 6, 0, 1, False, 0.0, True, False, [], None)
    every_token = 2 * 10 * (24 * 6 + 24 * 6)
    assert count_flops(lambda: torch.ops.aten._cudnn_rnn(x, meta[1:5], *rest)) == every_token
    assert count_flops(lambda: inner(torch.zeros(5, 2, 6))[0].sum().backward()) == 3 * every_token
