"""What is measured of a model whose attention compiles itself: on this CPU its operator runs, but does not train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import to_measure
from test_profiling import prompts

from ablate.attention import _scores
from ablate.model import Transformer, build
from ablate.profiling import decode, flops, kernels, live
from ablate.profiling.compilation import Compilation
from ablate.train import Learner, pieces

FLEX, MATH = ({"attention": {"name": "gqa", "n_kv_heads": 1, "kernel": kernel}} for kernel in ("flex", "math"))
OPERATOR = "flex_attention"


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Flex traces every new call, which takes longer than computing it."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def trainable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the operator forward, and backward the gradients of what it computes."""

    class Trained(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.save_for_backward(*given[:3])
            ctx.further = given[3:]
            q, k, v, bias, *further = given
            return flex(*(each.detach() for each in (q, k, v)), None if bias is None else bias.detach(), *further)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch.enable_grad():
                qkv = [each.detach().requires_grad_() for each in ctx.saved_tensors]
                grads = torch.autograd.grad(_scores._plain(*qkv, *ctx.further), qkv, grad)
            return (*grads, *(None for _ in ctx.further))

    flex = _scores._flex
    monkeypatch.setattr(_scores, "_flex", lambda *given: Trained.apply(*given))


def model(settings: dict[str, Any] = FLEX) -> Transformer:
    return build(to_measure(settings).model)


def test_its_operator_is_seen_where_it_is_one_and_its_path_is_told_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for looked in (kernels.prefill_kernels, kernels.decoding_kernels):
        assert {OPERATOR, "path flex"} <= set(looked(model(), prompts(1, 16)))
        assert "path flex" not in looked(model(MATH), prompts(1, 16))
    monkeypatch.setattr(_scores, "_flex", _scores._plain)  # as what is compiled, no flexible operator
    assert "path flex" in kernels.prefill_kernels(model(), prompts(1, 16))
    latent = model({"attention": {"name": "mla", "kernel": "flex"}})
    assert "path absorbed+flex" in kernels.decoding_kernels(latent, prompts(1, 16))


@pytest.mark.usefixtures("trainable")
def test_it_is_told_of_training() -> None:
    ran = kernels.training_kernels(model(), {"input_ids": prompts(1, 16)}, "fp32")
    assert {OPERATOR, "path flex"} <= set(ran)


def test_its_cache_is_measured() -> None:
    assert decode.held_bytes(model(), prompts(2, 8), 4) == decode.held_bytes(model(MATH), prompts(2, 8), 4) > 0


@pytest.mark.usefixtures("trainable")
def test_the_memory_of_its_training_is_measured() -> None:
    from test_train import batches_of

    def split(settings: dict[str, Any]) -> dict[str, int]:
        whole = to_measure(settings)
        built = build(whole.model)
        learner, batch = Learner.of(built, whole.train), batches_of(whole).batch(1)
        return live.training_split(built, lambda part: learner.update(batch, 0.0, part))

    found, held = split(FLEX), split(MATH)
    assert found["gradient_bytes"] == held["gradient_bytes"]
    assert 0 < found["activation_bytes"] < held["activation_bytes"], "scores are not kept"


@pytest.mark.usefixtures("trainable")
@pytest.mark.parametrize("every_key", [True, False])
def test_its_products_are_counted_as_those_of_the_definition(every_key: bool) -> None:
    from test_train import batches_of

    def counted(settings: dict[str, Any]) -> int:
        whole = to_measure(settings)
        built = build(whole.model)
        inputs, _ = next(pieces(batches_of(whole).batch(1), 1, torch.device("cpu")))
        work = lambda count: flops.count_flops(count, every_key=every_key)  # noqa: E731
        return kernels.training_pass(built, inputs, "fp32", work)

    assert counted(FLEX) == counted(MATH) > 0


def test_what_compiles_itself_does_so_while_it_is_looked_at() -> None:
    seen = Compilation()
    with torch.compiler.set_stance("default"), kernels._Names(), live.LiveBytes():
        torch.compile(torch.exp, backend="eager")(torch.ones(8, 64))
    assert seen.seconds() is not None
