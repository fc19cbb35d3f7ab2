"""The training loop: one plain loop, the same for every variant."""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.batches import Batches, HeldOut
from ablate.curve import Curve
from ablate.model import Transformer
from ablate.objectives import IGNORED, Batch
from ablate.pace import Pace
from ablate.pulse import beat
from ablate.resume import Checkpointer
from ablate.settings import OptimizerSettings, TrainSettings

LAST_STEPS = 10
"""`train_loss` is the mean over so many steps at the end, since a single batch's loss is mostly noise."""

READ_EVERY = 10
"""On a GPU losses are read every so many steps, since reading one makes the CPU wait."""

Part = Callable[[str], AbstractContextManager[None]]
"""Goes around a part of a step: `data`, `forward`, `backward` or `optimizer`."""


class Observer(Protocol):
    """What watches a run: it measures, and hands the points of the curves on. It changes nothing."""

    def step(self) -> AbstractContextManager[None]:
        """Around the work of one step, and nothing else."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a step; a step that is cut in pieces has some parts several times."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Around one evaluation."""

    def pause(self) -> AbstractContextManager[None]:
        """Around what is no part of the run, although it lies between steps."""

    def record(self, step: int, split: str, values: dict[str, float]) -> None:
        """Points of the curves."""


@dataclass
class Trained:
    """What came of a run; of one that diverged, or was stopped before its end, what there was until then."""

    steps: int = 0
    diverged_step: int | None = None
    stopped: bool = False
    train_loss: float | None = None
    last_finite_loss: float | None = None
    val_losses: list[float] = field(default_factory=list)
    module_metrics: dict[str, float] = field(default_factory=dict)
    batch_order_hash: str = ""
    optimizer_state_dtype: str | None = None
    seconds: float = 0.0
    """Of training, where the recipe counts them; up to the end of the warm-up `warm_seconds`."""
    warm_seconds: float = 0.0


def train(
    model: Transformer,
    batches: Batches,
    held_out: HeldOut,
    recipe: TrainSettings,
    seed: int,
    observer: Observer,
    called: nn.Module | None = None,
    checkpointer: Checkpointer | None = None,
) -> Trained:
    """Train `model` where it is. Steps call `called` in its place, where that is given: the same, compiled.

    Evaluations always call `model`: they have other shapes and another mode, which would be compiled again.
    The first loss, auxiliary or not, or gradient norm that is not finite ends the run: a result, not an error.
    With a `checkpointer` it goes on from where that has kept it, and comes to the same to the last bit.
    """
    learner, rate = Learner.of(model, recipe, called), schedule(recipe, model.settings.d_model)
    run, checkpointer = Trained(), checkpointer or Checkpointer()
    pace = Pace(recipe, run)
    ledger = Ledger(observer, run, 1 if pace.is_timed else read_every(model))
    seed_generators(seed)
    model.train()
    checkpointer.restore(learner, ledger)
    for step in range(run.steps + 1, recipe.n_steps + 1):
        pace.begin()
        lr = rate(step, pace.share)
        with observer.step():
            with observer.part("data"):
                batch = batches.batch(step)
            measures = learner.update(batch, lr, observer.part)
        ledger.add(step, lr, measures, batch)
        pace.end(step)
        if pace.evaluates(step) or pace.is_over(step):
            ledger.read()
            if run.diverged_step is None:
                _evaluate(model, held_out, recipe, step, ledger)
        if run.diverged_step is None and not pace.is_over(step):
            run.stopped = checkpointer.after(step, learner, ledger)
        if run.stopped or run.diverged_step is not None or pace.is_over(step):
            break
    run.optimizer_state_dtype, _ = state_of(learner.optimizer)
    return run


def exercise(
    model: Transformer,
    batches: Batches,
    recipe: TrainSettings,
    seed: int,
    observer: Observer,
    called: nn.Module | None = None,
) -> Learner:
    """The steps of `train` at a learning rate of 0, for what they cost: `model` stays what it is.

    What they measure is read as often as there, which is when the CPU waits, and told to nobody.
    """
    learner = Learner.of(model, recipe, called)
    pending: list[dict[str, Tensor]] = []
    seed_generators(seed)
    model.train()
    for step in range(1, recipe.n_steps + 1):
        with observer.step():
            with observer.part("data"):
                batch = batches.batch(step)
            pending.append(learner.update(batch, 0.0, observer.part))
        if len(pending) >= read_every(model) or step == recipe.n_steps:
            values_of(pending)
            pending.clear()
    return learner


def unobserved(name: str) -> AbstractContextManager[None]:
    """Around a part that nobody watches."""
    return nullcontext()


@dataclass(frozen=True)
class Learner:
    """A model, what changes its weights, and what its modules have to say in it."""

    model: nn.Module
    recipe: TrainSettings
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    losses: list[Callable[[], dict[str, Tensor]]]
    after_step: list[Callable[[], None]]
    called: nn.Module  # for logits: the model, or what was compiled of it

    @classmethod
    def of(cls, model: nn.Module, recipe: TrainSettings, called: nn.Module | None = None) -> Learner:
        """Looks through the model once, which is not free where there are many experts."""
        offers = {name: [method for _, method in offered(model, name)] for name in ("losses", "after_step")}
        optimizer = make_optimizer(model, recipe.optimizer, recipe.lr)
        called = model if called is None else called
        return cls(model, recipe, optimizer, list(model.parameters()), **offers, called=called)

    def update(self, batch: Batch, lr: float, part: Part = unobserved) -> dict[str, Tensor]:
        """One optimizer step, in `accumulate` pieces. Its measures stay on the device.

        The loss is the sum over all valid targets of the step by their number, however the step is cut. `loss` is the
        plain cross entropy, also where the objective is smoothed; `aux_…` are the weighted auxiliary losses, averaged
        over the pieces.
        """
        recipe, n_targets = self.recipe, max(1, batch.n_targets)
        measures: dict[str, Tensor] = {}
        with part("data"):
            given = list(pieces(batch, recipe.accumulate, device_of(self.model)))
        for inputs, targets in given:
            with part("forward"):
                logits = forward(self.called, inputs, recipe.precision)
                objective, plain = cross_entropy(logits, targets, recipe.label_smoothing)
                auxiliary = {f"aux_{name}": loss / recipe.accumulate for name, loss in self.auxiliary_losses().items()}
                total = sum(auxiliary.values(), objective / n_targets)
            with part("backward"):
                total.backward()
            for name, loss in {"loss": plain / n_targets, **auxiliary}.items():
                measures[name] = measures[name] + loss.detach() if name in measures else loss.detach()
        with part("optimizer"):
            measures["grad_norm"] = self._step(lr)
        return measures

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """What modules add to the loss of their last forward pass, summed over modules by name."""
        found: dict[str, Tensor] = {}
        for losses in self.losses:
            for name, loss in losses().items():
                found[name] = found[name] + loss if name in found else loss
        return found

    def _step(self, lr: float) -> Tensor:
        """Clip the gradients, use and forget them; their norm before clipping. A missing one does not matter."""
        present = [parameter for parameter in self.parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in present if p.grad is not None])
        if self.recipe.grad_clip is not None:
            nn.utils.clip_grads_with_norm_(present, self.recipe.grad_clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for after_step in self.after_step:
            after_step()
        return norm


def offered(model: nn.Module, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The methods `name` of those modules that have one, each with the module's path."""
    for path, module in model.named_modules():
        method = getattr(module, name, None)
        if method is not None:
            yield path, method


def device_of(model: nn.Module) -> torch.device:
    """Where the weights are."""
    return next(model.parameters()).device


def on_device(tokens: np.ndarray, device: torch.device) -> Tensor:
    """Token ids as a tensor; on a GPU without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(tokens))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pieces(batch: Batch, n: int, device: torch.device) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """A batch on the device, cut in `n`: each piece's inputs by name, and its targets."""
    chunks = [on_device(array, device).chunk(n) for array in batch.arrays]
    for *inputs, targets in zip(*chunks, strict=True):
        yield dict(zip(batch.inputs, inputs, strict=True)), targets


def forward(model: nn.Module, inputs: dict[str, Tensor], precision: str) -> Tensor:
    """Logits in float32; at bf16 the products on the way are of that precision, the weights stay float32."""
    with torch.autocast(device_of(model).type, torch.bfloat16, enabled=precision == "bf16"):
        logits: Tensor = model(**inputs)
    return logits.float()


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The objective and the plain cross entropy, both summed over the valid targets, in nats."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if not smoothing:
        plain = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return plain, plain
    with torch.no_grad():
        plain = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    smoothed = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing)
    return smoothed, plain


def module_metrics(model: nn.Module) -> dict[str, float]:
    """What modules tell of themselves, by the path of the module: `decoder.layers.3.feed_forward.idle_experts`."""
    told = ((path, metrics()) for path, metrics in offered(model, "metrics"))
    return {f"{path}.{name}".lstrip("."): float(value) for path, values in told for name, value in values.items()}


# --- Optimizer and schedule -------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, settings: OptimizerSettings, lr: float) -> torch.optim.Optimizer:
    """The optimizer, in its fused form. Matrices are decayed, norms and biases are not; a tied weight is one parameter.

    AdamW decays weights apart from the gradient, Adam and SGD add the decay to it.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        assert settings.momentum is not None, "resolve() comes first"
        return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum, fused=True)
    assert settings.betas is not None, "resolve() comes first"
    assert settings.eps is not None, "resolve() comes first"
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=lr, betas=(settings.betas[0], settings.betas[1]), eps=settings.eps, fused=True)


def state_of(optimizer: torch.optim.Optimizer) -> tuple[str | None, int]:
    """The dtype of what an optimizer keeps for each weight, None where it keeps nothing, and the bytes of all of it."""
    kept = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in kept if each.dim()})
    return "+".join(dtypes) or None, sum(each.numel() * each.element_size() for each in kept)


def schedule(recipe: TrainSettings, d_model: int) -> Callable[..., float]:
    """The learning rate by step, counted from 1: never 0 at first, the peak exactly at the last step of the warm-up.

    Without warm-up the first step has the peak. `linear` and `cosine` end at `final_lr` times the peak in the last
    step; where seconds are counted they follow the `share` of the time after the warm-up that has passed. `noam` is
    lr · d_model^-½ · min(step^-½, step · warmup^-1½), as in Vaswani et al., 2017.
    """
    peak, warmup, last, lowest = recipe.lr, recipe.warmup_steps, recipe.n_steps, recipe.final_lr or 0.0

    def rate(step: int, share: float | None = None) -> float:
        if recipe.schedule == "noam":
            return float(peak * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))
        if step <= warmup:
            return peak * (step / warmup)
        start = max(1, warmup)
        done = (step - start) / (last - start) if last > start else 0.0
        done = done if share is None else share
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[recipe.schedule]
        return peak * (lowest + (1 - lowest) * left)

    return rate


def generator_seed(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose of one trial."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:7], "big")


def seed_generators(seed: int) -> None:
    """What a step may draw from: torch's generators, which dropout uses, and those that a choice may use as well."""
    torch.manual_seed(generator_seed(seed, "dropout"))
    random.seed(generator_seed(seed, "python"))
    np.random.seed(generator_seed(seed, "numpy") % 2**32)


# --- Evaluation and records -------------------------------------------------------------------------------------------


def bits_per_byte(nats_per_token: float, bytes_per_token: float | None) -> dict[str, float]:
    """The loss in a unit that does not depend on the tokenizer; nothing where the text's bytes are not all told."""
    return {"bits_per_byte": nats_per_token / math.log(2) / bytes_per_token} if bytes_per_token else {}


def evaluate(model: nn.Module, held_out: HeldOut, recipe: TrainSettings) -> float:
    """Nats per target over everything held out: one sum, divided once.

    In evaluation mode, without smoothing, and without a trace in any random number that training draws later.
    """
    device = device_of(model)
    total, n_targets = torch.zeros((), dtype=torch.float64, device=device), 0
    sequences = max(1, recipe.batch_tokens // recipe.accumulate // recipe.length)
    was_training = model.training
    model.eval()
    with torch.inference_mode(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        for batch in held_out.batches(sequences):
            for inputs, targets in pieces(batch, 1, device):
                logits = forward(model, inputs, recipe.precision).flatten(0, 1)
                each = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
                total += each.double().sum()
            beat()
            n_targets += batch.n_targets
    model.train(was_training)
    return total.item() / n_targets


def _evaluate(model: nn.Module, held_out: HeldOut, recipe: TrainSettings, step: int, ledger: Ledger) -> None:
    run = ledger.run
    with ledger.observer.evaluation():
        loss = evaluate(model, held_out, recipe)
    run.module_metrics = module_metrics(model)
    ledger.record(step, "val", {"loss": loss, **bits_per_byte(loss, held_out.bytes_per_token)})
    ledger.record(step, "model", run.module_metrics)
    if math.isfinite(loss):
        run.val_losses.append(loss)
    else:
        run.diverged_step = step


def read_every(model: nn.Module) -> int:
    """After so many steps measures are read."""
    return 1 if device_of(model).type == "cpu" else READ_EVERY


def values_of(measures: Iterable[dict[str, Tensor]]) -> list[float]:
    """All of them on end, read at once."""
    values: list[float] = torch.stack([each.float() for step in measures for each in step.values()]).tolist()
    return values


class Ledger:
    """The measures of the last few steps, left on the device until they are read all at once; none is lost."""

    def __init__(self, observer: Observer, run: Trained, read_every: int) -> None:
        self.observer, self.run, self.read_every = observer, run, read_every
        self.pending: list[tuple[int, float, dict[str, Tensor], str]] = []
        self.last_losses: deque[float] = deque(maxlen=LAST_STEPS)
        self.order = ""
        self.curve = Curve()

    def add(self, step: int, lr: float, measures: dict[str, Tensor], batch: Batch) -> None:
        """Keep a step's measures, and what it was shown; now and then read."""
        self.order = chained(self.order, batch)
        self.pending.append((step, lr, measures, self.order))
        if len(self.pending) >= self.read_every:
            self.read()

    def read(self) -> None:
        """Hand the measures on, step by step, up to the first that is not finite."""
        if not self.pending:
            return
        place = iter(values_of(measures for _, _, measures, _ in self.pending))
        for step, lr, measures, order in self.pending:
            if self.run.diverged_step is None:
                self.run.batch_order_hash = order
                self._enter(step, lr, {name: next(place) for name in measures})
        self.pending.clear()

    def record(self, step: int, split: str, values: dict[str, float]) -> None:
        """Points of the curves."""
        self.curve.add(step, split, values)
        self.observer.record(step, split, values)

    def plain(self) -> dict[str, Any]:
        """All that it knows, as plain data, but for the curves; nothing may be pending."""
        return {"run": asdict(self.run), "last_losses": list(self.last_losses)}

    def fitted(self, plain: dict[str, Any], curve: Curve) -> Callable[[], None]:
        """What puts in place what `plain` and `curve` were of, and tells of the points once more."""
        run = Trained(**plain["run"])

        def put() -> None:
            vars(self.run).update(vars(run))
            self.last_losses.extend(plain["last_losses"])
            self.order, self.curve = run.batch_order_hash, curve
            for point in curve.records():
                self.observer.record(*point)

        return put

    def _enter(self, step: int, lr: float, values: dict[str, float]) -> None:
        self.record(step, "train", {**values, "lr": lr})
        self.run.steps = step
        if not all(map(math.isfinite, values.values())):
            self.run.diverged_step = step
        if math.isfinite(values["loss"]):
            self.run.last_finite_loss = values["loss"]
            self.last_losses.append(values["loss"])
            self.run.train_loss = sum(self.last_losses) / len(self.last_losses)


def chained(order: str, batch: Batch) -> str:
    """The digest of all batches up to this one, from that of those before: what a training can go on with."""
    digest = hashlib.sha256(order.encode())
    for array in batch.arrays:
        digest.update(array.astype("<i8").data)
    return digest.hexdigest()
