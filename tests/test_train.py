"""Training: what a step sees, what it does, and what is told of it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ablate.batches import Batches, HeldOut, check_corpus
from ablate.choice import SettingsError
from ablate.data import Corpus
from ablate.model import Transformer, build
from ablate.objectives import IGNORED, Batch, NextToken, objective_of
from ablate.profiling.decode import Writer
from ablate.settings import OptimizerSettings, TrainSettings, VariantSettings, resolved, typed
from ablate.train import (
    Learner,
    Ledger,
    Trained,
    bits_per_byte,
    evaluate,
    make_optimizer,
    module_metrics,
    schedule,
    train,
)

MODEL = {
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 16,
    "vocab_size": 16,
    "attention": "mha",
    "position": "rope",
    "feed_forward": "gelu",
    "norm": "layer_norm",
    "block": "pre_norm",
}
TRAIN = {"steps": 12, "batch_tokens": 128, "lr": 3e-3, "eval_every": 6}
DATA = {"name": "random_tokens", "vocab_size": 16, "train_tokens": 4000, "validation_tokens": 2000}
CYCLE = {"name": "cycle", "period": 16, "train_tokens": 5000, "validation_tokens": 500}
DATA_TOKENS = {"random_tokens": 16, "cycle": 16, "text": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"family": "encoder", "vocab_size": 17},
    "encoder_decoder": {"family": "encoder_decoder", "vocab_size": 17},
}


pytestmark = pytest.mark.usefixtures("one_thread")


class Notes:
    """An observer that keeps every point."""

    def __init__(self) -> None:
        self.points: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluation(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, step: int, split: str, values: dict[str, float]) -> None:
        for metric, value in values.items():
            self.points.setdefault((split, metric), []).append((step, value))

    def values(self, split: str, metric: str) -> list[float]:
        return [value for _, value in self.points[split, metric]]


def variant(model: dict[str, Any] | None = None, data: dict[str, Any] = DATA, **recipe: Any) -> VariantSettings:
    tree = {"model": MODEL | (model or {}), "train": TRAIN | recipe, "data": data, "profile": {}}
    return resolved(typed(tree), DATA_TOKENS[data["name"]])


def run(settings: VariantSettings, seed: int = 0) -> tuple[Transformer, Trained, Notes]:
    model, notes = build(settings.model, seed), Notes()
    return model, train(model, batches_of(settings, seed), held_out_of(settings), settings.train, seed, notes), notes


def batches_of(settings: VariantSettings, seed: int = 0) -> Batches:
    corpus = settings.data.corpus()
    return Batches.of(corpus, settings.train, seed, objective_of(settings.model, corpus.vocab_size))


def held_out_of(settings: VariantSettings) -> HeldOut:
    corpus = settings.data.corpus()
    return HeldOut.of(corpus, settings.train, objective_of(settings.model, corpus.vocab_size))


def batch_of(inputs: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch({"input_ids": inputs}, targets)


SHOWN = batch_of(np.zeros((1, 2)), np.zeros((1, 2)))


def corpus_of(train_tokens: int, validation_tokens: int = 100) -> Corpus:
    """Each token is its own place, so that windows show where they come from."""
    return Corpus(np.arange(train_tokens), np.arange(validation_tokens), train_tokens, "", None, "")


def windows_of(tokens: int, sequences: int, seed: int = 0) -> Batches:
    return Batches(np.arange(tokens), 10, sequences, seed, NextToken())


# --- What a step sees -------------------------------------------------------------------------------------------------


def test_one_pass_predicts_no_token_twice_and_nearly_all() -> None:
    batches = windows_of(1003, sequences=3)
    targets = [batches.batch(step).targets for step in range(1, batches.windows_per_pass // 3 + 1)]
    seen = np.concatenate(targets).ravel()
    assert len(seen) == len(set(seen))
    assert len(seen) == 990


def test_passes_differ_in_order_and_offset() -> None:
    batches = windows_of(1000, sequences=99)
    offsets = {int(batches.windows(step)[0, 0]) % 10 for step in range(1, 20)}
    orders = {tuple(batches.windows(step)[:, 0] // 10) for step in range(1, 4)}
    assert len(offsets) > 5
    assert len(orders) == 3


def test_a_step_is_a_function_of_seed_and_step() -> None:
    one, other = (windows_of(1000, 4, seed=7) for _ in range(2))
    for step in range(1, 60):
        one.windows(step)
    assert (one.windows(31) == other.windows(31)).all()
    assert (one.windows(31) != windows_of(1000, 4, seed=8).windows(31)).any()


@pytest.mark.parametrize("extra", [0, 1, 9, 10, 11])
def test_the_smallest_corpus_works_and_a_smaller_one_is_refused(extra: int) -> None:
    recipe = variant(batch_tokens=160).train
    batches = Batches.of(corpus_of(161 + extra), recipe, 0, NextToken())
    assert all(batches.windows(step).max() < 161 + extra for step in range(1, 30))
    with pytest.raises(SettingsError, match="corpus has 160 tokens, one step needs 161"):
        check_corpus(corpus_of(160), recipe)
    with pytest.raises(SettingsError, match="corpus has 16 tokens for validation, one sequence needs 17"):
        check_corpus(corpus_of(500, 16), recipe)


def test_corpus_passes() -> None:
    recipe = variant(batch_tokens=160).train
    assert Batches.of(corpus_of(16 * 101), recipe, 0, NextToken()).passes(20) == pytest.approx(2.0)


def test_held_out_windows_are_whole_and_spread() -> None:
    recipe = variant(eval_tokens=40).train
    held_out = HeldOut.of(corpus_of(500, 16 * 10 + 5), recipe, NextToken())
    assert list(held_out.starts) == [0, 80]
    assert sum(batch.n_targets for batch in held_out.batches(1)) == 32
    every = HeldOut.of(corpus_of(500, 16 * 10 + 5), variant(eval_tokens=None).train, NextToken())
    assert list(every.starts) == list(range(0, 160, 16))


def test_batch_order_is_that_of_the_seed_whatever_the_architecture() -> None:
    dense = run(variant(steps=3))[1].batch_order_hash
    moe = variant({"feed_forward": "moe", "attention": "mqa", "dropout": 0.1}, steps=3, accumulate=2)
    assert run(moe)[1].batch_order_hash == dense
    assert run(variant(steps=3), seed=1)[1].batch_order_hash != dense
    assert run(variant(steps=4))[1].batch_order_hash != dense


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_the_hash_covers_what_a_family_is_shown_of_the_same_text(family: str) -> None:
    one = run(variant(FAMILIES[family], steps=2))[1].batch_order_hash
    other = FAMILIES[family] | {"attention": "mqa", "dropout": 0.1, "n_layers": 1}
    assert run(variant(other, steps=2, accumulate=2))[1].batch_order_hash == one
    assert run(variant(FAMILIES[family] | {"vocab_size": 18}, steps=2))[1].batch_order_hash != one
    assert run(variant(steps=2))[1].batch_order_hash != one


# --- The learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"schedule": "constant"}, {1: 1.0, 5: 1.0, 10: 1.0}),
        ({"schedule": "constant", "warmup_steps": 4}, {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 10: 1.0}),
        ({"schedule": "linear", "final_lr": 0.1}, {1: 1.0, 10: 0.1}),
        ({"schedule": "linear", "final_lr": 0.1, "warmup_steps": 2}, {1: 0.5, 2: 1.0, 6: 0.55, 10: 0.1}),
        ({"schedule": "cosine", "final_lr": 0.2, "warmup_steps": 2}, {1: 0.5, 2: 1.0, 6: 0.6, 10: 0.2}),
        ({"schedule": "cosine", "final_lr": 0.0}, {1: 1.0, 10: 0.0}),
        ({"schedule": "cosine", "warmup_steps": 10}, {1: 0.1, 10: 1.0}),
        ({"schedule": "noam", "warmup_steps": 4}, {1: 0.5 / 8, 2: 1 / 8, 4: 2 / 8, 9: 4 / 3 / 8}),
    ],
)
def test_schedules(recipe: dict[str, Any], expected: dict[int, float]) -> None:
    settings = TrainSettings(steps=10, lr=2.0 if recipe["schedule"] != "noam" else 8.0, **recipe)
    rate = schedule(settings, d_model=16)
    found = {step: rate(step) / settings.lr for step in expected}
    scale = 4.0 if recipe["schedule"] == "noam" else 1.0
    wanted = {step: value if scale == 1 else value * 8 / (16**0.5 * 4) for step, value in expected.items()}
    assert found == pytest.approx(wanted)


def test_a_run_of_one_step_has_the_peak() -> None:
    for name in ("constant", "linear", "cosine"):
        assert schedule(TrainSettings(steps=1, lr=0.5, schedule=name), 16)(1) == 0.5


def test_the_logged_rate_is_the_one_used() -> None:
    sgd = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    settings = variant(steps=4, warmup_steps=3, optimizer=sgd, grad_clip=None, lr=0.1)
    model = build(settings.model)
    learner, rate = Learner.of(model, settings.train), schedule(settings.train, 32)
    batches = batches_of(settings)
    for step in range(1, 5):
        before = model.head.output.weight.detach().clone()
        gradient: list[torch.Tensor] = []
        handle = model.head.output.weight.register_post_accumulate_grad_hook(
            lambda p, g=gradient: g.append(p.grad.clone())
        )
        learner.update(batches.batch(step), rate(step))
        handle.remove()
        torch.testing.assert_close(before - rate(step) * gradient[0], model.head.output.weight.detach())
    assert run(settings)[2].values("train", "lr") == [rate(step) for step in range(1, 5)]


# --- One step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "accumulate"), [("decoder", 2), ("decoder", 8), ("encoder", 4), ("encoder_decoder", 4)]
)
def test_how_a_step_is_cut_does_not_matter(family: str, accumulate: int) -> None:
    whole = run(variant(FAMILIES[family], steps=8))[2].values("train", "loss")
    cut = run(variant(FAMILIES[family], steps=8, accumulate=accumulate))[2].values("train", "loss")
    assert cut == pytest.approx(whole, abs=2e-6)


def test_targets_that_do_not_count_are_weighed_over_the_whole_step() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, 16, (4, 16)), rng.integers(0, 16, (4, 16))
    targets[:2, 1:] = -100  # 2 valid targets in the first half, 32 in the second
    losses, gradients = [], []
    for accumulate in (1, 2):
        settings = variant(accumulate=accumulate, batch_tokens=64, grad_clip=None)
        model = build(settings.model)
        caught: list[torch.Tensor] = []
        model.head.output.weight.register_post_accumulate_grad_hook(lambda p, c=caught: c.append(p.grad.clone()))
        losses.append(Learner.of(model, settings.train).update(batch_of(inputs, targets), 1e-3)["loss"].item())
        gradients.append(caught[-1])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1])
    logits = build(variant().model)(torch.from_numpy(inputs))
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
    assert losses[0] == pytest.approx(plain.item(), abs=1e-5)


def test_a_step_without_a_valid_target_does_no_harm() -> None:
    settings = variant(batch_tokens=64)
    model = build(settings.model)
    inputs, targets = np.zeros((4, 16), dtype=np.int64), np.full((4, 16), -100)
    measures = Learner.of(model, settings.train).update(batch_of(inputs, targets), 1e-3)
    assert measures["loss"].item() == 0
    assert all(p.isfinite().all() for p in model.parameters())


class Weighty(nn.Module):
    """A model whose auxiliary loss pulls a weight of its own, whatever the tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.weight = nn.Parameter(torch.tensor([[2.0]]))
        self.steps = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(input_ids)
        return out

    def losses(self) -> dict[str, torch.Tensor]:
        return {"pull": 3 * self.weight.sum()}

    def after_step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("accumulate", [1, 4])
def test_auxiliary_losses_weigh_the_same_however_a_step_is_cut(accumulate: int) -> None:
    sgd = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    settings = variant(accumulate=accumulate, batch_tokens=64, grad_clip=None, optimizer=sgd)
    model = Weighty()
    tokens = np.zeros((4, 16), dtype=np.int64)
    measures = Learner.of(model, settings.train).update(batch_of(tokens, tokens), lr=0.1)
    assert model.weight.item() == pytest.approx(2.0 - 0.1 * 3)
    assert measures["aux_pull"].item() == pytest.approx(6.0)
    assert model.steps == 1


def test_the_auxiliary_loss_is_not_in_the_logged_loss_and_reaches_the_router() -> None:
    def first(weight: float) -> tuple[float, float, torch.Tensor]:
        moe = {"feed_forward": {"name": "moe", "n_experts": 4, "balance_loss": weight}}
        model, _, notes = run(variant(moe, steps=1, grad_clip=None))
        router = model.decoder.layers[0].feed_forward.router.weight.detach()
        return notes.values("train", "loss")[0], notes.values("train", "aux_balance")[0], router

    light, heavy = first(0.01), first(1.0)
    assert light[0] == heavy[0]
    assert heavy[1] == pytest.approx(100 * light[1])
    assert not torch.equal(light[2], heavy[2])


def test_smoothing_is_of_the_objective_alone() -> None:
    plain, smooth = run(variant(steps=2)), run(variant(steps=2, label_smoothing=0.3))
    assert smooth[2].values("train", "loss")[0] == plain[2].values("train", "loss")[0]
    assert smooth[2].values("train", "grad_norm")[0] != plain[2].values("train", "grad_norm")[0]


def test_the_gradient_norm_is_that_before_clipping() -> None:
    free = run(variant(steps=2, grad_clip=None))[2].values("train", "grad_norm")
    clipped = run(variant(steps=2, grad_clip=1e-3))[2].values("train", "grad_norm")
    assert clipped[0] == free[0] > 1e-3


def test_weights_and_optimizer_state_stay_float32_at_bf16() -> None:
    model, trained, notes = run(variant(steps=3, precision="bf16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert trained.optimizer_state_dtype == "float32"
    full = run(variant(steps=3))[2].values("train", "loss")
    assert notes.values("train", "loss") == pytest.approx(full, rel=0.02)
    assert notes.values("train", "loss") != full


def test_matrices_are_decayed_once_and_norms_never() -> None:
    model = build(variant({"tie_embeddings": True}).model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimizerSettings(weight_decay=0.5), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert model.head.output.weight is model.embedding.tokens.weight
    for name, p in model.named_parameters():
        kept = 0.95 if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p.detach(), kept * before[name])
    assert any(p.dim() == 1 for p in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_every_optimizer_learns(name: str) -> None:
    lr = 0.3 if name == "sgd" else 3e-3
    _, trained, notes = run(variant(data=CYCLE, steps=25, lr=lr, optimizer=name, eval_every=25))
    assert trained.val_losses[-1] < notes.values("train", "loss")[0] - 0.3


# --- A whole run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cycle() -> tuple[Transformer, Trained, Notes]:
    return run(variant(data=CYCLE, steps=120, lr=1e-2, eval_every=40, batch_tokens=256))


def test_a_cycle_is_learned_and_generated(cycle: tuple[Transformer, Trained, Notes]) -> None:
    model, trained, _ = cycle
    assert trained.val_losses[-1] < 0.02
    model.eval()
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        for _ in range(12):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    assert tokens[0].tolist() == [token % 16 for token in range(5, 20)]


def test_curves_and_summary_tell_the_same(cycle: tuple[Transformer, Trained, Notes]) -> None:
    _, trained, notes = cycle
    losses = notes.values("train", "loss")
    assert len(losses) == len(notes.values("train", "lr")) == len(notes.values("train", "grad_norm")) == 120
    assert trained.train_loss == pytest.approx(sum(losses[-10:]) / 10)
    assert notes.points["val", "loss"] == list(zip([40, 80, 120], trained.val_losses, strict=True))
    assert trained.steps == 120
    assert trained.diverged_step is None


@pytest.mark.parametrize("model", [{}, {"attention": "mla", "feed_forward": "moe"}])
def test_random_tokens_cannot_be_predicted(model: dict[str, Any]) -> None:
    data = DATA | {"validation_tokens": 8000}
    _, trained, _ = run(variant(model, data=data, steps=40, eval_every=10))
    assert min(trained.val_losses) > math.log(16) - 0.01


@pytest.mark.parametrize("model", [{}, {"dropout": 0.2}, {"feed_forward": {"name": "moe", "jitter": 0.1}}])
def test_two_runs_are_equal_to_the_bit(model: dict[str, Any]) -> None:
    one, other = (run(variant(model)) for _ in range(2))
    assert one[2].points == other[2].points
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_no_family_is_shown_what_it_is_to_tell(family: str) -> None:
    """Where an encoder sees no mask, it sees what it is to tell in 0.1 + 0.1 / 16 of 0.2 cases, which is fair."""
    p = (0.1 + 0.1 / 16) / 0.2
    unmasked = -p * math.log(p) - (1 - p) * math.log((1 - p) / 15)
    honest = 0.8 * math.log(16) + 0.2 * unmasked if family == "encoder" else math.log(16)
    data = DATA | {"train_tokens": 30_000, "validation_tokens": 20_000}
    recipe = {"steps": 60, "batch_tokens": 512, "lr": 1e-2, "eval_every": 60, "eval_tokens": None}
    _, trained, _ = run(variant(FAMILIES[family] | {"n_layers": 1}, data=data, **recipe))
    assert honest - 0.01 < trained.val_losses[-1] < math.log(17)


@pytest.mark.parametrize(("family", "reached"), [("encoder", 2.0), ("encoder_decoder", 0.5)])
def test_every_family_learns_a_cycle_and_repeats_itself(family: str, reached: float) -> None:
    # Of another length than the windows, which else would all look the same.
    data = CYCLE | {"period": 13}
    settings = variant(
        FAMILIES[family] | {"n_layers": 1}, data=data, steps=90, batch_tokens=256, lr=1e-2, eval_every=45
    )
    one, other = run(settings), run(settings)
    assert one[1].val_losses[-1] < reached < 2.4 < one[2].values("train", "loss")[0]
    assert one[2].points == other[2].points
    if family == "encoder_decoder":
        writer = Writer(one[0].eval(), torch.arange(5, 13)[None], new_tokens=7)
        written = [writer.read().argmax(-1)]
        for _ in range(7):
            written.append(writer.write(written[-1]).argmax(-1))
        assert torch.cat(written, dim=1)[0].tolist() == list(range(8)), "labels shifted twice would give every second"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_text(family: str) -> None:
    model = FAMILIES[family] | {"vocab_size": None, "max_seq_len": 32}
    settings = variant(
        model, data={"name": "text"}, steps=30, batch_tokens=512, lr=1e-2, eval_tokens=2048, eval_every=15
    )
    _, trained, notes = run(settings)
    assert trained.val_losses[-1] < 4.0 < 5.0 < notes.values("train", "loss")[0]
    assert (("val", "bits_per_byte") in notes.points) == (family == "decoder"), "the others do not tell every byte"


def test_dropout_is_drawn_from_the_seed_of_the_trial() -> None:
    torch.manual_seed(99)
    first = run(variant({"dropout": 0.2}, steps=3))[2].values("train", "loss")
    assert run(variant({"dropout": 0.2}, steps=3))[2].values("train", "loss") == first
    assert run(variant(steps=3))[2].values("train", "loss") != first


def test_evaluation_leaves_no_trace_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Transformer.forward

    def greedy(self: Transformer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.training:
            torch.rand(100)  # a module that draws in evaluation mode
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Transformer, "forward", greedy)
    often, seldom = (run(variant({"dropout": 0.2}, eval_every=n))[2] for n in (1, 12))
    assert often.values("train", "loss") == seldom.values("train", "loss")
    assert len(often.values("val", "loss")) == 12


def test_the_last_step_is_evaluated_once() -> None:
    assert [step for step, _ in run(variant(eval_every=5))[2].points["val", "loss"]] == [5, 10, 12]
    assert [step for step, _ in run(variant(eval_every=6))[2].points["val", "loss"]] == [6, 12]


# --- Evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens", [48, 112, 1024])
def test_the_loss_does_not_depend_on_the_evaluation_batch(family: str, batch_tokens: int) -> None:
    settings = variant(FAMILIES[family], batch_tokens=1600, eval_tokens=None)
    model, held_out = build(settings.model), held_out_of(settings)
    assert len(held_out.starts) * 16 % batch_tokens  # a last batch that is smaller than the others
    expected = evaluate(model, held_out, settings.train)
    other = variant(batch_tokens=batch_tokens, eval_tokens=None).train
    assert evaluate(model, held_out, other) == pytest.approx(expected, abs=1e-6)
    assert evaluate(model, held_out, settings.train) == expected


@pytest.mark.parametrize(("family", "told"), [("decoder", 1), ("encoder", 2 / 16), ("encoder_decoder", 1 / 2)])
def test_the_loss_is_a_sum_divided_once(family: str, told: float) -> None:
    settings = variant(FAMILIES[family], eval_tokens=None)
    model, held_out = build(settings.model).eval(), held_out_of(settings)
    *inputs, targets = (torch.from_numpy(each) for each in next(held_out.batches(10**6)).arrays)
    with torch.no_grad():
        likely = model(*inputs).log_softmax(-1)
    valid = targets != IGNORED
    expected = -likely[valid].gather(-1, targets[valid][:, None]).double().sum().item() / valid.sum().item()
    assert valid.sum() == len(held_out.starts) * 16 * told
    assert evaluate(model, held_out, settings.train) == pytest.approx(expected, abs=1e-6)


def test_evaluation_is_without_dropout_and_restores_the_mode() -> None:
    settings = variant({"dropout": 0.5})
    model = build(settings.model).train()
    held_out = held_out_of(settings)
    first = evaluate(model, held_out, settings.train)
    assert evaluate(model, held_out, settings.train) == first
    assert evaluate(build(variant().model), held_out, settings.train) == first
    assert model.training


@pytest.mark.parametrize(
    "model",
    [
        {"dropout": 0.5},
        {"feed_forward": {"name": "moe", "jitter": 0.5, "capacity_factor": 0.5}},
        {"norm": "batch_norm"},
        {"family": "encoder", "vocab_size": 33},
    ],
)
def test_the_same_checkpoint_has_the_same_loss_to_the_bit(model: dict[str, Any]) -> None:
    settings = variant(model)
    held_out = held_out_of(settings)
    weights, losses = build(settings.model, seed=3).state_dict(), []
    for seed, training in ((0, True), (0, False), (1, True)):
        loaded = build(settings.model, seed=seed).train(training)
        loaded.load_state_dict(weights)
        torch.manual_seed(seed)
        losses += [evaluate(loaded, held_out, settings.train), evaluate(loaded, held_out, settings.train)]
    assert len(set(losses)) == 1
    assert math.isfinite(losses[0])


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(2) * 6, 4.0) == {"bits_per_byte": pytest.approx(1.5)}
    assert bits_per_byte(1.0, None) == {}


# --- Divergence -------------------------------------------------------------------------------------------------------


def test_a_run_ends_at_its_first_non_finite_loss() -> None:
    _, trained, notes = run(variant(lr=1e20, optimizer={"name": "sgd"}, grad_clip=None, steps=50))
    losses, norms = notes.values("train", "loss"), notes.values("train", "grad_norm")
    finite = [math.isfinite(loss) and math.isfinite(norm) for loss, norm in zip(losses, norms, strict=True)]
    assert 1 < trained.diverged_step == trained.steps == len(losses) < 50
    assert finite == [True] * (len(losses) - 1) + [False]
    assert trained.last_finite_loss == [loss for loss in losses if math.isfinite(loss)][-1]


@pytest.mark.parametrize(("metric", "bad"), [("loss", "nan"), ("loss", "inf"), ("grad_norm", "inf")])
def test_the_step_is_exact_although_losses_are_read_later(metric: str, bad: str) -> None:
    notes, trained = Notes(), Trained()
    ledger = Ledger(notes, trained, read_every=10)
    for step in range(1, 11):
        values = {"loss": torch.tensor(1.0 / step), "grad_norm": torch.tensor(2.0)}
        if step == 4:
            values[metric] = torch.tensor(float(bad))
        assert trained.diverged_step is None
        ledger.add(step, 0.1, values, SHOWN)
    assert trained.diverged_step == 4
    assert [step for step, _ in notes.points["train", "loss"]] == [1, 2, 3, 4]
    assert trained.last_finite_loss == pytest.approx(1 / 3 if metric == "loss" else 1 / 4)


def test_a_validation_loss_that_is_not_finite_is_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.train.evaluate", lambda *_: math.inf)
    trained = run(variant())[1]
    assert trained.diverged_step == 6
    assert trained.val_losses == []


# --- Mixture of experts -----------------------------------------------------------------------------------------------


def test_experts_without_a_token_train_on() -> None:
    moe = {"feed_forward": {"name": "moe", "n_experts": 32, "top_k": 1}}
    model, trained, notes = run(variant(moe, batch_tokens=16, steps=6))
    assert trained.module_metrics["decoder.layers.1.feed_forward.idle_experts"] >= 16
    assert notes.points["model", "decoder.layers.1.feed_forward.idle_experts"][-1][0] == 6
    assert all(math.isfinite(loss) for loss in notes.values("train", "loss"))
    assert all(p.isfinite().all() for p in model.parameters())


def test_padding_changes_no_statistic_of_a_router() -> None:
    settings = variant({"feed_forward": {"name": "moe", "n_experts": 4, "z_loss": 0.1}}).model
    moe = build(settings).decoder.layers[0].feed_forward.train()
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])

    def statistics(noise: float) -> tuple[dict[str, float], dict[str, float]]:
        moe(torch.where(mask[..., None], x, torch.full_like(x, noise)), mask)
        return {name: loss.item() for name, loss in moe.losses().items()}, moe.metrics()

    moe(torch.cat([x[0], x[1, :3]])[None])
    unpadded = {name: loss.item() for name, loss in moe.losses().items()}
    assert statistics(0.0) == statistics(7.0)
    assert statistics(7.0)[0] == pytest.approx(unpadded)


def test_metrics_are_named_by_the_path_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model[1].metrics = lambda: {"share": 0.5}
    model.metrics = lambda: {"whole": 1}
    assert module_metrics(model) == {"1.share": 0.5, "whole": 1.0}


@pytest.mark.parametrize("measure", ["loss", "aux_balance", "grad_norm"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_any_measure_that_is_not_finite_is_divergence(measure: str, value: float) -> None:
    run, measures = Trained(), {name: torch.tensor(1.0) for name in ("loss", "aux_balance", "grad_norm")}
    ledger = Ledger(Notes(), run, read_every=1)
    ledger.add(1, 0.1, measures, SHOWN)
    assert run.diverged_step is None
    ledger.add(2, 0.1, measures | {measure: torch.tensor(value)}, SHOWN)
    assert run.diverged_step == 2


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("how", ["constant", "linear", "cosine", "noam"])
def test_resolved_recipes_are_trained(name: str, how: str) -> None:
    settings = variant({"init": "xavier"}, steps=2, optimizer=name, schedule=how, warmup_steps=1)
    assert run(settings)[1].steps == 2
