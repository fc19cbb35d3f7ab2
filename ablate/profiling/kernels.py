"""Which kernels really ran: what a variant was promised and what the library chose for it may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ablate.model import Transformer
from ablate.profiling.decode import Writer
from ablate.profiling.live import aside

TELLING = ("attention", "softmax", "mm", "rnn")
"""Parts of the names of the operators that mixers and experts are made of."""


Seen = TypeVar("Seen")


class _Names(TorchDispatchMode):
    """Collects the names of telling operators, backward ones included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(part in name for part in TELLING):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def kernels_of(work: Callable[[], Any]) -> list[str]:
    """Names of the telling operators that `work` runs, sorted."""
    with _Names() as names:
        work()
    return sorted(names.seen)


def training_pass(
    model: nn.Module, inputs: dict[str, torch.Tensor], precision: str, watched: Callable[[Callable[[], None]], Seen]
) -> Seen:
    """What `watched` says of a forward and a backward pass in training mode, which it must carry out.

    Gradients, buffers, random numbers stay as they were.
    """
    device = next(model.parameters()).device

    def work() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**inputs)
        logits.float().square().mean().backward()

    with aside(model):
        return watched(work)


def training_kernels(model: nn.Module, inputs: dict[str, torch.Tensor], precision: str) -> list[str]:
    """Those of a forward and a backward pass in training mode."""
    return training_pass(model, inputs, precision, kernels_of)


def decoding_kernels(model: Transformer, prompt: torch.Tensor) -> list[str]:
    """Those of one token after a `prompt` `(B, T)`, in evaluation mode, with a cache.

    After them `path …`, where a module says which of several ways it took.
    """
    model.eval()
    with torch.no_grad():  # in inference mode operators arrive here whole, before a kernel is chosen for them
        writer = Writer(model, prompt, new_tokens=1)
        writer.read()
        ran = kernels_of(lambda: writer.write(prompt[:, -1:]))
    taken = {f"path {path}" for module in model.modules() if (path := getattr(module, "path", ""))}
    return [*ran, *sorted(taken)]
