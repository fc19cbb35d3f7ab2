"""Compiled training steps: equal to eager ones, counted, and found out where they were not compiled after all."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_trial import Parent, job, performed
from torch import Tensor, nn

from ablate.model import build
from ablate.profiling import compilation, kernels
from ablate.profiling.compilation import Compilation
from ablate.settings import typed

pytestmark = [
    pytest.mark.usefixtures("_forgotten"),
    # What torch's compiler does by itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
]

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler, and none is here"
)


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """What one test compiles is not there in the next."""
    yield
    torch.compiler.reset()


class Plain(nn.Module):
    """Nothing in the way of a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Printing(Plain):
    """Python between two parts."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        print("here")
        return super().forward(hidden)


class Counting(Plain):
    """Another graph for each pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) * self.passes


class Opaque(Plain):
    """Nothing that a compiler can take."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def watched(module: nn.Module, passes: int = 4, warm: int = 2) -> dict[str, Any]:
    """The columns after passes forward and backward, by a backend that needs no C++ compiler."""
    called, followed = torch.compile(module, backend="aot_eager", dynamic=False), Compilation()
    for number in range(passes):
        if number == warm:
            followed.warm()
        called(torch.ones(2, 4)).sum().backward()
    return followed.columns(asked=True)


def test_what_is_compiled_once_is_compiled_to_the_end() -> None:
    columns = watched(Plain())
    seconds = columns.pop("compile_seconds")
    assert columns == {"compiled": True, "compile_fault": None, "graph_breaks": 0, "recompiles": 0}
    assert seconds > 0


def test_a_graph_break_is_counted() -> None:
    columns = watched(Printing())
    assert columns["graph_breaks"] == 1
    assert columns["compiled"]


def test_beyond_the_limit_of_recompiles_it_is_not_compiled() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        columns = watched(Counting())
    assert not columns["compiled"]
    assert columns["compile_fault"].startswith("recompile limit reached, the rest ran eager: ")
    assert "passes" in columns["compile_fault"]
    assert "\n" not in columns["compile_fault"]
    assert columns["recompiles"] == 2


def test_a_recompile_in_timed_steps_is_told() -> None:
    columns = watched(Counting(), passes=3)
    assert columns["compiled"]
    assert "s of compilation in timed steps: " in columns["compile_fault"]


def test_where_nothing_could_be_compiled_nothing_is_compiled() -> None:
    columns = watched(Opaque())
    assert not columns["compiled"]
    assert columns["compile_fault"].startswith("nothing of it could be compiled")


def test_where_nobody_asked_nothing_is_counted() -> None:
    nothing = {"compiled": False, "compile_fault": None, "compile_seconds": None}
    assert Compilation().columns(asked=False) == nothing


def test_what_compiles_itself_says_where_it_gave_up() -> None:
    following = Compilation()
    with torch._dynamo.config.patch(recompile_limit=2):
        watched(Counting())
    found = following.columns(asked=False)
    assert not found["compiled"]
    assert found["compile_fault"].startswith("recompile limit reached, the rest ran eager: ")


def test_what_others_compiled_before_does_not_count() -> None:
    watched(Printing())
    assert watched(Plain())["graph_breaks"] == 0


def test_only_a_fault_of_the_compiler_is_one() -> None:
    def failing(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise OSError("no such compiler\nnor another")

    with pytest.raises(Exception, match="compiler") as caught:
        torch.compile(Plain(), backend=failing)(torch.ones(2, 4))
    told = compilation.failure(caught.value)
    assert told is not None
    assert told.startswith("torch.compile failed: ")
    assert "no such compiler" in told
    assert "\n" not in told
    assert compilation.failure(ValueError("of the model")) is None


class Attending(Plain):
    """A kernel of torch's library between generated code."""

    def forward(self, x: Tensor) -> Tensor:
        heads = F.gelu(super().forward(x))[None]
        return F.scaled_dot_product_attention(heads, heads, heads)


@needs_compiler
def test_the_time_that_compiling_takes_is_what_the_first_pass_lost() -> None:
    module, x = Attending(), torch.randn(2, 8, 4)
    called, followed = torch.compile(module), Compilation()
    begin = time.perf_counter()
    called(x).sum().backward()
    lost = time.perf_counter() - begin
    columns = followed.columns(asked=True)
    assert columns["compiled"]
    assert 0.5 * lost < columns["compile_seconds"] < lost, "backward and generated code included"
    ran = kernels.training_kernels(module, {"x": x}, "fp32", called)
    assert attention(ran) == attention(kernels.training_kernels(module, {"x": x}, "fp32"))
    assert attention(ran)
    assert followed.columns(asked=True)["recompiles"] == 0, "looking compiles nothing anew"


# --- Kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [{"feed_forward": "moe"}, {"attention": {"name": "mha", "kernel": "math"}}])
def test_both_ways_of_looking_see_the_same_kernels(model: dict[str, Any], precision: str) -> None:
    built, inputs = build(typed(job(model=model).settings).model), {"input_ids": torch.arange(16)[None]}
    eager = kernels.training_kernels(built, inputs, precision)
    assert "mm" in eager
    assert kernels.training_kernels(built, inputs, precision, called=built) == eager


@pytest.mark.parametrize(
    ("form", "expected"),
    [({"fused": True}, "_fused_adamw_"), ({"foreach": True}, "_foreach_lerp_"), ({"foreach": False}, "lerp_")],
)
def test_the_optimizers_step_is_seen_and_nothing_around_it(form: dict[str, bool], expected: str) -> None:
    module = Plain()
    optimizer = torch.optim.AdamW(module.parameters(), **form)
    with kernels.optimizer_kernels(optimizer) as ran:
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert expected in ran
    assert not {"addmm", "mm", "sum"} & ran
    optimizer.step()
    assert sum(name.startswith(("_fused", "_foreach_lerp", "lerp")) for name in ran) == 1


# --- A whole trial ----------------------------------------------------------------------------------------------------

SMALL = {"model": {"d_model": 32, "feed_forward": "swiglu"}, "train": {"steps": 6, "eval_every": 3}}


def test_a_compiled_trial_learns_what_an_eager_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a backend that writes no code, which takes seconds for what the usual one takes a minute for."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiler(model, backend="aot_eager"))
    eager, compiled = performed(job(**SMALL)), performed(job(**with_compile()))
    assert compiled.outcome == ("ok", "profile", "")
    told = compiled.columns
    assert (told["compiled"], told["compile_fault"], told["graph_breaks"], told["recompiles"]) == (True, None, 0, 0)
    assert told["compile_seconds"] > 0
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)
    ran, expected = json.loads(told["kernels"]), json.loads(eager.columns["kernels"])
    assert ran.keys() == expected.keys()
    assert attention(ran["train"]) == attention(expected["train"])
    assert ran["optimizer"] == expected["optimizer"]
    for column in ("flops_per_token_counted", "train_flops_per_token_counted", "peak_live_bytes"):
        assert told[column] == eager.columns[column], "of the model as it is written"


def with_compile() -> dict[str, Any]:
    return SMALL | {"train": SMALL["train"] | {"compile": True}}


def losses(parent: Parent) -> list[float]:
    return [point["value"] for point in parent.table("curve") if point["metric"] == "loss"]


def attention(names: list[str]) -> list[str]:
    return [name for name in names if "attention" in name]


def test_a_trial_that_cannot_be_compiled_crashes_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: nn.Module) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            raise OSError("no C++ compiler")

        return compiler(model, backend=backend)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", failing)
    parent = performed(job(**with_compile()))
    status, phase, reason = parent.outcome
    assert (status, phase) == ("crashed", "train")
    assert reason.startswith("torch.compile failed: ")
    assert "no C++ compiler" in reason
    assert parent.columns["compiled"] is False
    assert parent.columns["compile_fault"] == reason


def test_a_fault_of_the_model_is_no_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compiled", lambda *_: None)
    monkeypatch.setattr("ablate.trial.train", lambda *_: 1 / 0)
    parent = performed(job(**with_compile()))
    assert parent.outcome[0] == "crashed"
    assert "ZeroDivisionError" in parent.outcome[2]
    assert "compile_fault" not in parent.columns
