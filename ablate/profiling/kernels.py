"""Which kernels really ran: what a variant was promised and what the library chose for it may differ.

What runs as it is written is seen operator by operator. What is compiled would run otherwise if it were looked at so;
its kernels are those that torch's profiler meets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ablate.model import Transformer
from ablate.profiling.decode import Writer
from ablate.profiling.live import aside
from ablate.train import forward

TELLING = ("attention", "softmax", "mm", "rnn")
"""Parts of the names of the operators that mixers and experts are made of."""


Seen = TypeVar("Seen")


class _Names(TorchDispatchMode):
    """Collects the names of operators, backward ones included. What compiles itself runs as it would without."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled; else it would run in Python within this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(getattr(func, "overloadpacket", func).__name__)
        return func(*args, **(kwargs or {}))


def kernels_of(work: Callable[[], Any]) -> list[str]:
    """Names of the telling operators that `work` runs, sorted."""
    with _Names() as names:
        work()
    return _telling(names.seen)


def _telling(names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if any(part in name for part in TELLING)})


def compiled_kernels_of(work: Callable[[], Any]) -> list[str]:
    """The same where `work` calls compiled code, and where it falls back to what is not compiled."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        work()
    return _telling(_outermost(profiled.events() or ()))


_OPERATOR = "aten::"


def _outermost(events: Iterable[Any]) -> Iterator[str]:
    """Operators that no other called; what is made of others alone is none."""
    overloads = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    composite = {name.partition(".")[0] for name in overloads}

    def is_operator(event: Any) -> bool:
        return event.name.startswith(_OPERATOR) and event.name not in composite

    for event in filter(is_operator, events):
        above = event.cpu_parent
        while above is not None and not is_operator(above):
            above = above.cpu_parent
        if above is None:
            yield event.name.removeprefix(_OPERATOR)


def training_pass(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    precision: str,
    watched: Callable[[Callable[[], None]], Seen],
    called: nn.Module | None = None,
) -> Seen:
    """What `watched` says of a forward and a backward pass in training mode, which it must carry out.

    It goes through `called`, where steps call that for `model`. Gradients, buffers, random numbers stay as they were.
    """

    def work() -> None:
        forward(model if called is None else called, inputs, precision).square().mean().backward()

    with aside(model):
        return watched(work)


def training_kernels(
    model: nn.Module, inputs: dict[str, torch.Tensor], precision: str, called: nn.Module | None = None
) -> list[str]:
    """Those of a forward and a backward pass in training mode; of `called`, where steps call that for `model`."""
    names = kernels_of if called is None else compiled_kernels_of
    ran = training_pass(model, inputs, precision, names, called)
    return [*ran, *paths(model)]


def prefill_kernels(model: Transformer, prompt: torch.Tensor) -> list[str]:
    """Those of reading a `prompt` `(B, T)` in evaluation mode, with a cache where it has one."""
    model.eval()
    with torch.no_grad():  # in inference mode operators arrive here whole, before a kernel is chosen for them
        writer = Writer(model, prompt, new_tokens=1)
        ran = kernels_of(writer.read)
    return [*ran, *paths(model)]


def decoding_kernels(model: Transformer, prompt: torch.Tensor) -> list[str]:
    """Those of one token after a `prompt` `(B, T)`, in evaluation mode, with a cache."""
    model.eval()
    with torch.no_grad():
        writer = Writer(model, prompt, new_tokens=1)
        writer.read()
        ran = kernels_of(lambda: writer.write(prompt[:, -1:]))
    return [*ran, *paths(model)]


def paths(model: nn.Module) -> list[str]:
    """`path …`, where a module says in its attribute `path` which of several ways it took in its last pass."""
    return sorted({f"path {path}" for module in model.modules() if (path := getattr(module, "path", ""))})


@contextmanager
def optimizer_kernels(optimizer: torch.optim.Optimizer) -> Iterator[set[str]]:
    """The names of all operators that steps of the optimizer run within it."""
    names = _Names()

    def begin(*_: Any) -> None:
        names.__enter__()  # type: ignore[no-untyped-call]

    def end(*_: Any) -> None:
        names.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    hooks = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
    yield names.seen
    for hook in hooks:
        hook.remove()
