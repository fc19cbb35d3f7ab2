"""What torch.compile did in this process, from its own record: how long it took, and whether it went on to the end.

Dynamo never says that it gave up: code that it would have to compile once more than its limit allows runs in Python
from then on, without an error. Its record tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import utils

from ablate.train import forward

_MOST = 100_000
"""Compilations that are kept in the record; by itself torch keeps the last 64, fewer than a deep model may have."""

_REASON_LENGTH = 200


def compiled(model: nn.Module, inputs: dict[str, Tensor], precision: str) -> Any:
    """What training steps call in place of `model`, which stays as it is: its weights and names are the same.

    One pass without it comes first, over the `inputs` of a step: tables that modules make at their first use are there
    when they are compiled, and no second step finds them changed.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        forward(model, inputs, precision)
    model.train(was_training)
    return torch.compile(model)


def failure(error: BaseException) -> str | None:
    """Why compiling failed, in one line, where it is what `error` says; None where it is something else."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    if not any(type(each).__module__.startswith(("torch._dynamo", "torch._inductor")) for each in chain):
        return None
    inner = getattr(error, "inner_exception", error)  # what a backend raised
    return f"torch.compile failed: {type(inner).__name__}: {_first_line(str(inner))}"


class Compilation:
    """Follows the compiler from when it is made on."""

    def __init__(self) -> None:
        utils.set_compilation_metrics_limit(_MOST)
        self._before, self._breaks_before = len(utils.get_compilation_metrics()), _graph_breaks()
        self._warm: int | None = None

    def warm(self) -> None:
        """From here on steps are timed."""
        self._warm = len(self._records())

    def seconds(self) -> float | None:
        """Time that compiling took, forward, backward and code; None where nothing was compiled."""
        records = self._records()
        return _seconds(records) if records else None

    def columns(self, asked: bool) -> dict[str, Any]:
        """The columns of the trial's row. Breaks and recompiles are None where nobody `asked` for compiled steps.

        Code may compile itself all the same, and then has faults too.
        """
        if not asked:
            fault = self._over_limit() or self._late()
            return {"compiled": False, "compile_fault": fault, "compile_seconds": self.seconds()}
        why = self._over_limit() or self._nothing()
        return {
            "compiled": why is None,
            "compile_fault": why or self._late(),
            "compile_seconds": self.seconds(),
            "graph_breaks": _graph_breaks() - self._breaks_before + sum(map(_left_out, self._records())),
            "recompiles": sum(each.recompile_reason is not None for each in self._records()),
        }

    def _records(self) -> list[utils.CompilationMetrics]:
        return utils.get_compilation_metrics()[self._before :]

    def _over_limit(self) -> str | None:
        for each in self._records():
            if each.recompile_reason is not None and not each.has_guarded_code:
                return f"recompile limit reached, the rest ran eager: {_first_line(each.recompile_reason)}"
        return None

    def _nothing(self) -> str | None:
        records = self._records()
        if not any(each.graph_op_count for each in records):
            reasons = [_first_line(each.fail_reason) for each in records if each.fail_reason]
            return ": ".join(["nothing of it could be compiled", *reasons[:1]])
        return None

    def _late(self) -> str | None:
        """What was compiled while steps were timed, and so is in their time."""
        late = [] if self._warm is None else self._records()[self._warm :]
        if not late:
            return None
        reasons = [_first_line(each.recompile_reason) for each in late if each.recompile_reason]
        return ": ".join([f"{_seconds(late):.1f} s of compilation in timed steps", *reasons[:1]])


def _graph_breaks() -> int:
    return sum(utils.counters["graph_break"].values())


def _left_out(record: utils.CompilationMetrics) -> bool:
    """Whether a whole function was left to Python, what it calls not included."""
    return record.fail_type is not None and record.recompile_reason is None


def _seconds(records: list[utils.CompilationMetrics]) -> float:
    return sum(each.duration_us or 0 for each in records) / 1e6


def _first_line(text: str) -> str:
    line = " ".join(text.strip().partition("\n")[0].split())
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"
