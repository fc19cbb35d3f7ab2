"""The bytes of tensors, counted as they come and go: what a training step holds, and what of it is for what.

A storage counts once, however many tensors look at it, from the operator that made it until nothing refers to it any
more. What an operator takes and gives back within itself is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablate.train import Part


class LiveBytes(TorchDispatchMode):
    """Within it, `now` is the bytes of all live tensors that operators have met, and `peak` the most so far.

    Those of `known` are there from the start; another one that was there before counts once it is first used. `made` is
    the part of `now` that operators have made; of what is compiled, results are met where they are used.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.made = self.peak = 0
        self._alive: dict[int, Any] = {}
        self._meet(known, made=False)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled; else it would run in Python within this mode."""
        return True

    def __enter__(self) -> Self:
        """What is garbage goes before, and none goes within: when it does has to do with all else that goes on."""
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._collects:
            gc.enable()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meet(tree_leaves((args, kwargs)), made=False)
        out = func(*args, **(kwargs or {}))
        self._meet(tree_leaves(out), made=True)
        return out

    def _meet(self, values: Iterable[Any], *, made: bool) -> None:
        for value in values:
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in self._alive:
                place, size = storage._cdata, storage.nbytes()
                # The reference dies with the storage, not with this view of it: torch keeps the two together.
                self._alive[place] = weakref.ref(storage, partial(self._part, place, size, made))
                self.now += size
                self.made += made * size
        self.peak = max(self.peak, self.now)

    def _part(self, place: int, size: int, made: bool, _: Any) -> None:
        del self._alive[place]
        self.now -= size
        self.made -= made * size


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def training_split(model: nn.Module, step: Callable[[Part], Any]) -> dict[str, int]:
    """What a training step of `model` holds, in bytes: the columns `peak_live_bytes`, `parameter_bytes`,
    `gradient_bytes` and `activation_bytes`.

    `step` is run twice, since an optimizer makes its state in its first step. Activations are what a forward pass
    leaves behind, logits and losses among it; of a step that is cut in pieces, those of the largest.
    """
    gradients = activations = 0

    @contextmanager
    def part(name: str) -> Iterator[None]:
        nonlocal gradients, activations
        before = live.now
        yield
        if name == "forward":
            activations = max(activations, live.now - before)
        if name == "backward":
            gradients = bytes_of(p.grad for p in model.parameters() if p.grad is not None)

    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        step(part)
        live.peak = live.now
        step(part)
    return {
        "peak_live_bytes": live.peak,
        "parameter_bytes": bytes_of(model.parameters()),
        "gradient_bytes": gradients,
        "activation_bytes": activations,
    }


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """For a pass in training mode that leaves no trace: not in the mode, gradients, buffers or random numbers."""
    before, was_training = [buffer.clone() for buffer in model.buffers()], model.training
    device = next(model.parameters()).device
    model.train()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    model.train(was_training)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
