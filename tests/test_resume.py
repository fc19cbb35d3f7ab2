"""Going on with a training: N + N steps are 2N steps to the last bit, and a bad checkpoint is as good as none."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ablate import checkpoint, resume
from ablate.checkpoint_file import as_json, from_json
from ablate.curve import Curve
from ablate.job import Past
from ablate.model import Transformer, build
from ablate.profiling.compilation import compiled
from ablate.resume import Checkpointer
from ablate.settings import VariantSettings
from ablate.train import Trained, pieces, train
from tests.test_train import FAMILIES, Notes, batches_of, held_out_of, variant

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8


class Told(Notes):
    """An observer that keeps every point in its order, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[int, str, str, float]] = []

    def record(self, step: int, split: str, values: dict[str, float]) -> None:
        self.all += [(step, split, metric, value) for metric, value in values.items()]


def noisy(model: Transformer) -> None:
    """A choice of a user's own: it draws from every generator that there is, and keeps state in every place."""

    class Drawing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.steps, self.word = inner, 0, "none"
            self.late: int | None = None
            self.register_buffer("seen", torch.zeros(3), persistent=False)
            self.register_buffer("grown", torch.zeros(0))
            self.register_buffer("unset", None)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if self.training:
                drawn = (
                    random.random() + np.random.random() + torch.rand(()).item() + random.gauss() + np.random.normal()
                )
                x = x + 0.1 * (drawn + self.steps + self.seen.sum() + self.grown.sum() + len(self.word))
                x = x + (0 if self.late is None else self.late) + (0 if self.unset is None else self.unset)
            out: Tensor = self.inner(x, mask) if mask is not None else self.inner(x)
            return out

        def after_step(self) -> None:
            self.steps, self.word, self.late = self.steps + 1, self.word + "x", self.steps
            self.seen += 0.01
            self.grown = torch.cat([self.grown, torch.full((1,), 0.01)])
            self.unset = torch.full((2, 1, 32), 0.01 * self.steps)[0]

    model.decoder.layers[0].feed_forward = Drawing(model.decoder.layers[0].feed_forward)


def stopping_after(step: int) -> Callable[[], bool]:
    """A word to stop that comes in the step of this number, counted from where the training goes on."""
    asked = iter(range(1, 10**6))
    return lambda: next(asked) >= step


def trained(
    settings: VariantSettings,
    checkpointer: Checkpointer | None = None,
    change: Callable[[Transformer], None] = lambda model: None,
) -> tuple[Transformer, Trained, Told]:
    """As a fresh process does it: whatever the generators were before, and whatever a model was built as."""
    random.seed(), np.random.seed(), torch.seed()
    model, told = build(settings.model, 3), Told()
    change(model)
    called = None
    batches = batches_of(settings)
    if settings.train.compile:
        called = compiled(model, next(pieces(batches.batch(1), 1, torch.device("cpu")))[0], "fp32")
    return model, train(model, batches, held_out_of(settings), settings.train, 0, told, called, checkpointer), told


def in_parts(
    settings: VariantSettings, folder: Path, *stops: int, change: Callable[[Transformer], None] = lambda model: None
) -> tuple[Transformer, Trained, Told]:
    """The same, in as many processes: each of `stops` is after how many steps one of them is told to stop."""
    for stop in stops:
        _, run, _ = trained(settings, Checkpointer(str(folder), stopped=stopping_after(stop)), change)
        assert run.stopped
    return trained(settings, Checkpointer(str(folder)), change)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(one: tuple[Transformer, Trained, Told], other: tuple[Transformer, Trained, Told]) -> None:
    """To the last bit."""
    (model, run, told), (same_model, same_run, same_told) = one, other
    assert run == same_run
    assert told.all == same_told.all
    weights, others = state(model), state(same_model)
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{family: (settings | {"dropout": 0.1}, {}) for family, settings in FAMILIES.items()},
    "bias": ({"feed_forward": {"name": "moe", "n_experts": 4, "balance": "bias"}, "dropout": 0.1}, {"accumulate": 2}),
    "jitter": ({"feed_forward": {"name": "moe", "n_experts": 4, "jitter": 0.1}}, {}),
    "batch norm": ({"norm": "batch_norm"}, {"accumulate": 4}),
    "tied": ({"tie_embeddings": True}, {"label_smoothing": 0.1}),
    "adam": ({}, {"optimizer": "adam", "schedule": "linear"}),
    "sgd": ({}, {"optimizer": "sgd", "schedule": "constant"}),
    "plain sgd": ({}, {"optimizer": {"name": "sgd", "momentum": 0.0}, "grad_clip": None}),
    "bf16": ({"dropout": 0.1}, {"precision": "bf16", "schedule": "noam", "warmup_steps": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_in_parts_it_comes_to_the_same(case: str, tmp_path: Path) -> None:
    model, recipe = CASES[case]
    settings = variant(model, steps=STEPS, eval_every=3, **recipe)
    assert_same(in_parts(settings, tmp_path / "a", 3, 1, 2), trained(settings))


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_it_does_not_matter_where_it_was_stopped(stop: int, tmp_path: Path) -> None:
    settings = variant({"dropout": 0.1}, steps=STEPS, eval_every=3)
    assert_same(in_parts(settings, tmp_path / "a", stop), trained(settings))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_a_compiled_training_goes_on_too(tmp_path: Path) -> None:
    settings = variant({"dropout": 0.1, "n_layers": 1}, steps=4, compile=True)
    assert_same(in_parts(settings, tmp_path / "a", 2), trained(settings))


def test_what_a_choice_of_ones_own_draws_and_keeps_goes_on(tmp_path: Path) -> None:
    settings = variant(steps=STEPS)
    assert_same(in_parts(settings, tmp_path / "a", 3, 2, change=noisy), trained(settings, change=noisy))


def test_checkpoints_by_steps_or_by_the_clock_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = variant({"dropout": 0.1}, steps=STEPS)
    plain = trained(settings)
    assert_same(trained(settings, Checkpointer(str(tmp_path / "a"), every=3)), plain)
    assert names(tmp_path / "a") == ["step-000000000003.safetensors", "step-000000000006.safetensors"]
    assert_same(trained(settings, Checkpointer(str(tmp_path / "b"))), plain)
    assert names(tmp_path / "b") == [], "a minute is not over"
    monkeypatch.setattr(resume, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(resume, "AT_MOST", 0)
    assert_same(trained(settings, Checkpointer(str(tmp_path / "b"))), plain)
    assert names(tmp_path / "b") == ["step-000000000006.safetensors", "step-000000000007.safetensors"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    "part", ["model", "buffers", "optimizer", "python", "numpy", "cpu", "numbers", "ledger", "curve"]
)
def test_every_piece_is_needed(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in a checkpoint is put in place: left as a fresh process has it, the training is another."""
    settings = variant({"norm": "batch_norm"}, steps=STEPS)
    whole = trained(settings, change=noisy)
    trained(settings, Checkpointer(str(tmp_path / "a"), stopped=stopping_after(4)), noisy)
    leave_out(part, monkeypatch)
    parts = trained(settings, Checkpointer(str(tmp_path / "a")), noisy)
    with pytest.raises(AssertionError):
        assert_same(parts, whole)


def leave_out(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    patches: dict[str, tuple[Any, str, Any]] = {
        "model": (nn.Parameter, "copy_", nothing),
        "buffers": (resume, "_put_buffer", nothing),
        "optimizer": (resume, "_fitted_optimizer", lambda *_: nothing),
        "python": (random, "setstate", nothing),
        "numpy": (np.random, "set_state", nothing),
        "cpu": (torch, "set_rng_state", nothing),
        "numbers": (resume, "setattr", nothing),
        "curve": (Curve, "records", lambda curve: iter(())),
    }
    if part == "ledger":
        fitted = resume_ledger_fitted
        monkeypatch.setattr("ablate.train.Ledger.fitted", fitted)
        return
    where, name, value = patches[part]
    monkeypatch.setattr(where, name, value, raising=False)


def resume_ledger_fitted(ledger: Any, plain: dict[str, Any], curve: Curve) -> Callable[[], None]:
    """As it is, but for the last losses."""

    def put() -> None:
        vars(ledger.run).update(plain["run"])
        ledger.curve, ledger.order = curve, plain["run"]["batch_order_hash"]
        for point in curve.records():
            ledger.observer.record(*point)

    return put


OF_OTHERS = ("diverged_step", "stopped", "seconds", "warm_seconds")
"""What a training that goes on has not, or only one whose seconds are counted (see `test_budget`)."""


@pytest.mark.parametrize("key", [field for field in vars(Trained()) if field not in OF_OTHERS])
def test_every_figure_of_the_run_is_needed(key: str, tmp_path: Path) -> None:
    moe = {"feed_forward": {"name": "moe", "n_experts": 4}}
    settings = variant(moe, steps=STEPS, eval_every=3)
    kept = Checkpointer(str(tmp_path / "a"), stopped=stopping_after(4))
    _, run, _ = trained(settings, kept)
    (found,) = checkpoint.newest(tmp_path / "a", lambda plain: None)
    assert found.plain["ledger"]["run"] | {"stopped": True, "optimizer_state_dtype": "float32"} == vars(run)
    assert key == "optimizer_state_dtype" or found.plain["ledger"]["run"][key]


def test_tied_weights_stay_one_and_are_kept_once(tmp_path: Path) -> None:
    settings = variant({"tie_embeddings": True}, steps=STEPS)
    model, _, _ = in_parts(settings, tmp_path / "a", 4)
    assert model.head.output.weight is model.embedding.tokens.weight
    (found,) = checkpoint.newest(tmp_path / "a", lambda plain: None)
    assert len([name for name in found.names() if "tokens.weight" in name or "output.weight" in name]) == 1


def test_on_a_gpu_its_generator_goes_on_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"now": torch.tensor([1, 2], dtype=torch.uint8)}
    monkeypatch.setattr(resume, "_device_of", lambda model: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states["now"].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update(now=state))
    settings = variant(steps=STEPS)
    trained(settings, Checkpointer(str(tmp_path / "a"), stopped=stopping_after(4)))
    states["now"] = torch.tensor([3, 4], dtype=torch.uint8)
    trained(settings, Checkpointer(str(tmp_path / "a")))
    assert states["now"].tolist() == [1, 2]


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(tmp_path: Path, caplog: Any) -> None:
    checkpoint.write(tmp_path, 3, {"a": torch.zeros(1)}, {})
    checkpoint.write(tmp_path, 4, {"a": torch.zeros(1)}, {})
    (tmp_path / "step-000000000003.safetensors").replace(tmp_path / "step-000000000009.safetensors")
    (found,) = checkpoint.newest(tmp_path, lambda plain: None)
    assert found.path.name == "step-000000000004.safetensors"
    assert "of step 3, and has another step's name" in caplog.text


def test_a_step_back_leaves_nothing_of_later_steps(tmp_path: Path) -> None:
    """What was not used must not push out what is written now."""
    for step in (3, 6, 4):
        checkpoint.write(tmp_path, step, {"a": torch.zeros(1)}, {})
    assert names(tmp_path) == ["step-000000000003.safetensors", "step-000000000004.safetensors"]


def test_losses_that_are_read_earlier_change_nothing_of_a_training_that_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = variant(lr=1e20, optimizer={"name": "sgd"}, grad_clip=None, steps=50, eval_every=50)
    whole = trained(settings)[1]
    monkeypatch.setattr("ablate.train.read_every", lambda model: 10)
    late = trained(settings)[1]
    early = trained(settings, Checkpointer(str(tmp_path / "a"), every=1))[1]
    assert whole == late == early


# --- Bad checkpoints --------------------------------------------------------------------------------------------------


def kept(folder: Path) -> list[Path]:
    """Two checkpoints of one training, of steps 3 and 6."""
    trained(variant({"dropout": 0.1}, steps=STEPS), Checkpointer(str(folder), every=3))
    return sorted(folder.iterdir())


def rewritten(path: Path, **changes: Any) -> None:
    """A whole file with other plain data, or other tensors where a name has a dot."""
    (found,) = [each for each in checkpoint.newest(path.parent, lambda plain: None) if each.path == path]
    tensors = {name: found.tensor(name) for name in found.names()} | {k: v for k, v in changes.items() if "." in k}
    plain = found.plain | {k: v for k, v in changes.items() if "." not in k}
    aside = path.parent.with_name("aside")
    step = found.plain["past"]["steps"]
    checkpoint.write(aside, step, {k: v for k, v in tensors.items() if v is not None}, plain)
    (aside / path.name).replace(path)


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


SPOILT: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(b"abc"),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "foreign": lambda path: path.write_bytes(b"PK\3\4" + bytes(5000)),
    "a bit of the header": lambda path: flipped(path, 30),
    "a bit of a tensor": lambda path: flipped(path, path.stat().st_size // 2),
    "a bit of the checksum": lambda path: flipped(path, path.stat().st_size - 1),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another trial": lambda path: rewritten(path, trial="b"),
    "another torch": lambda path: rewritten(path, torch="1.0"),
    "another ablate": lambda path: rewritten(path, ablate="0.0"),
    "another format": lambda path: rewritten(path, format=0),
    "another shape": lambda path: rewritten(path, **{"model.embedding.tokens.weight": torch.zeros(3, 32)}),
    "another dtype": lambda path: rewritten(path, **{"model.embedding.tokens.weight": torch.zeros(16, 32).half()}),
    "no weight": lambda path: rewritten(path, **{"model.embedding.tokens.weight": None}),
    "a weight too many": lambda path: rewritten(path, **{"model.embedding.more": torch.zeros(1)}),
    "a state of no weight": lambda path: rewritten(path, **{"optimizer.999.exp_avg": torch.zeros(1)}),
    "no generator": lambda path: rewritten(path, **{"generator.cpu": torch.zeros(3, dtype=torch.uint8)}),
    "no python": lambda path: rewritten(path, python=[3, [], None]),
    "no numpy": lambda path: rewritten(path, numpy={"bit_generator": "PCG64", "state": {"key": []}}),
    "no ledger": lambda path: rewritten(path, ledger={"run": {"epochs": 1}}),
    "no curve": lambda path: rewritten(path, curve=[]),
    "no past": lambda path: rewritten(path, past={}),
    "no module": lambda path: rewritten(path, numbers={"no.where": 1}),
}


@pytest.mark.parametrize("how", SPOILT)
def test_of_a_bad_checkpoint_the_one_before_is_used_then_none(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = variant({"dropout": 0.1}, steps=STEPS)
    whole = trained(settings)
    older, newer = kept(tmp_path / "a")
    pasts: list[Past] = []
    SPOILT[how](newer)
    assert_same(trained(settings, Checkpointer(str(tmp_path / "a"), told=pasts.append)), whole)
    assert [past.steps for past in pasts] == [3]
    assert [str(newer) in record.getMessage() for record in caplog.records] == [True]
    SPOILT[how](older)
    assert_same(trained(settings, Checkpointer(str(tmp_path / "a"), told=pasts.append)), whole)
    assert len(pasts) == 1


def test_what_spoils_nothing_is_used(tmp_path: Path) -> None:
    _, newer = kept(tmp_path / "a")
    pasts: list[Past] = []
    rewritten(newer)
    trained(variant({"dropout": 0.1}, steps=STEPS), Checkpointer(str(tmp_path / "a"), told=pasts.append))
    assert [past.steps for past in pasts] == [6]


def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = variant(steps=STEPS)
    whole = trained(settings)
    monkeypatch.setattr(checkpoint, "write_atomically", full)
    assert_same(trained(settings, Checkpointer(str(tmp_path / "a"), every=3)), whole)
    assert [record.getMessage() for record in caplog.records] == [
        f"no checkpoint of step {step} could be written: [Errno 28] No space left on device" for step in (3, 6)
    ]


def test_what_a_write_left_behind_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".step-000000000001.safetensors.0.tmp").write_bytes(bytes(10))
    assert len(kept(tmp_path / "a")) == 2


# --- Attempts ---------------------------------------------------------------------------------------------------------


def test_attempts_and_seconds_are_counted_on(tmp_path: Path) -> None:
    settings, pasts = variant(steps=STEPS), []
    for _ in range(3):
        trained(settings, Checkpointer(str(tmp_path / "a"), stopped=stopping_after(1), told=pasts.append))
    assert [past.attempts for past in pasts] == [2, 3]
    assert [past.steps for past in pasts] == [1, 2]
    assert pasts[0].began == pasts[1].began
    assert 0 < pasts[0].seconds < pasts[1].seconds


def test_a_training_that_has_ended_is_not_gone_on_with(tmp_path: Path) -> None:
    settings, pasts = variant(steps=STEPS), []
    trained(settings, Checkpointer(str(tmp_path / "a"), every=3, attempt=1))
    anew = {"attempt": 2, "first_attempt": 2}
    trained(settings, Checkpointer(str(tmp_path / "a"), told=pasts.append, stopped=stopping_after(2), **anew))
    assert pasts == []
    trained(settings, Checkpointer(str(tmp_path / "a"), told=pasts.append, **anew))
    assert [past.steps for past in pasts] == [2], "that one was begun by the second attempt"


def test_a_training_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    settings = variant({"dropout": 0.1}, steps=STEPS)
    checkpointer = Checkpointer(str(tmp_path / "a"), every=3)
    model, run, told = trained(settings, checkpointer)
    other, again = build(settings.model, 3), Told()
    assert Checkpointer(str(tmp_path / "a")).finished(other, again.record) is None, "the newest is of step 6"
    checkpointer.finish(STEPS, model, {"columns": {"val_loss": 1.5, "mfu": float("nan"), "seconds": None}})
    drawn = torch.rand(())
    said = Checkpointer(str(tmp_path / "a")).finished(other, again.record)
    assert repr(said) == "{'columns': {'val_loss': 1.5, 'mfu': nan, 'seconds': None}}"
    assert_same((other, run, again), (model, run, told))
    assert torch.rand(()) == drawn


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_safetensors_that_anybody_can_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "a": torch.arange(6).view(2, 3).T,
        "b": torch.tensor(1.5, dtype=torch.bfloat16),
        "c": torch.tensor([True, False, True]),
        "d": torch.zeros(0, 4),
    }
    checkpoint.write(tmp_path, 7, tensors, {"x": [1, None]})
    found = load_file(tmp_path / "step-000000000007.safetensors")
    assert {name: each.tolist() for name, each in found.items() if name != "sha256"} == {
        name: each.tolist() for name, each in tensors.items()
    }
    assert [each.dtype for name, each in sorted(found.items()) if name != "sha256"] == [
        each.dtype for each in tensors.values()
    ]


def test_plain_data_comes_back_in_strict_json() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": float("inf")}, "d": 0.1 + 0.2}
    assert from_json(as_json(value)) == value
    assert repr(from_json(as_json([float("nan"), -float("inf")]))) == "[nan, -inf]"
    json.loads(as_json({"n": float("nan")}), parse_constant=pytest.fail)


def test_a_curve_keeps_its_points_in_their_order() -> None:
    curve, points = (
        Curve(),
        [(1, "train", {"loss": 1.5, "lr": 0.1}), (1, "val", {"loss": 2.5}), (2, "train", {"lr": 1.0})],
    )
    for point in points:
        curve.add(*point)
    assert list(curve.records()) == points
    assert list(Curve.of(curve.names, curve.columns()).records()) == points
    assert list(Curve.of([], Curve().columns()).records()) == []
    with pytest.raises(ValueError, match="belong together"):
        Curve.of(curve.names[:1], curve.columns())
