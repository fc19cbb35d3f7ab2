"""Going on where a training stood: what it is made of at the end of a step, as tensors and plain data, and back again.

Everything that the next step depends on is in it; the learning rate and the batch of a step are functions of its
number. A module's own state is its parameters, its buffers, and those of its attributes that are plain numbers, words
or None. What is restored has been checked whole before the first value is put in its place.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import ablate
from ablate import checkpoint
from ablate.checkpoint import Checkpoint
from ablate.checkpoint_file import UnfitError
from ablate.curve import Curve
from ablate.job import Past

if TYPE_CHECKING:
    from ablate.train import Learner, Ledger

_log = logging.getLogger(__name__)

FORMAT = 1

EVERY_SECONDS = 60.0
"""Of training, by the clock, between two checkpoints where the file does not say how many steps."""

AT_MOST = 20
"""Where writing is slow, so many times as long is trained in between."""

Record = Callable[[int, str, dict[str, float]], None]
"""Takes points of the curves: step, split, values by metric."""


class Checkpointer:
    """Keeps checkpoints of one trial's training in `folder`, and finds the one to go on from.

    Without a folder it keeps nothing. `stopped` says whether the training is to end after this step, to go on another
    time. What was written by an attempt before `first_attempt` does not count.
    """

    def __init__(
        self,
        folder: str = "",
        *,
        every: int | None = None,
        attempt: int = 1,
        first_attempt: int = 1,
        began: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        told: Callable[[Past], None] = lambda past: None,
    ) -> None:
        self.folder = Path(folder) if folder else None
        self.every, self.attempt, self.first_attempt = every, attempt, first_attempt
        self.stopped, self.told = stopped, told
        self._start = time.perf_counter() if began is None else began
        self._began, self._seconds = time.time(), 0.0
        self._due = time.monotonic() + EVERY_SECONDS
        self._numbers: dict[str, Any] = {}
        self._curve = Curve()

    # --- On the way ---

    def restore(self, learner: Learner, ledger: Ledger) -> None:
        """Put the training where the newest checkpoint that fits has it, and tell of its curves; else leave it."""
        self._numbers = _numbers(learner.model)
        self._go_on(self._use(lambda found: _fitted(found, learner, ledger)))
        self._curve = ledger.curve
        self._due = time.monotonic() + EVERY_SECONDS

    def after(self, step: int, learner: Learner, ledger: Ledger) -> bool:
        """The end of a step that is not the last one. Returns whether the training ends here, to go on another time."""
        leave = self.stopped()
        if self.folder is not None and (leave or self._is_due(step)):
            with ledger.observer.pause():
                begin = time.monotonic()
                ledger.read()
                if ledger.run.diverged_step is None:
                    self._write(step, *_parts(learner, ledger, self._numbers))
                now = time.monotonic()
                self._due = now + max(EVERY_SECONDS, AT_MOST * (now - begin))
        return leave

    def _is_due(self, step: int) -> bool:
        return time.monotonic() >= self._due if self.every is None else step % self.every == 0

    # --- At the end ---

    def finish(self, step: int, model: nn.Module, told: Mapping[str, Any]) -> None:
        """Keep what came of a training that is done, with what was `told` of it."""
        if self.folder is not None:
            tensors, plain = _parts_of_model(model, self._curve, self._numbers)
            self._write(step, tensors, {**plain, "told": told})

    def finished(self, model: nn.Module, record: Record) -> dict[str, Any] | None:
        """What was told of a training that is done: `model` is then what came of it, and its curves are recorded.

        None where the newest checkpoint that can be used is not of the end.
        """
        said: list[dict[str, Any]] = []

        def fitted(found: Checkpoint) -> Callable[[], None] | None:
            if "told" not in found.plain:
                return None
            put_model, curve = _fitted_model(found, model), _curve(found)

            def put() -> None:
                put_model()
                said.append(found.plain["told"])
                for point in curve.records():
                    record(*point)

            return put

        self._go_on(self._use(fitted))
        return said[0] if said else None

    # --- Files ---

    def _use(self, fitted: Callable[[Checkpoint], Callable[[], None] | None]) -> Past | None:
        """Put the newest checkpoint in place that is one; what `fitted` says None of is not looked for."""
        for found in self._candidates():
            try:
                put = fitted(found)
                past = Past(**found.plain["past"])
            except Exception as error:  # a fault of the checkpoint, whatever it is
                _log.warning("checkpoint %s is not used: %s: %s", found.path, type(error).__name__, error)
                continue
            if put is None:
                return None
            put()
            print(f"goes on from {found.path}")
            return past
        return None

    def _candidates(self) -> Iterator[Checkpoint]:
        return checkpoint.newest(self.folder, self._check_origin) if self.folder else iter(())

    def _check_origin(self, plain: Mapping[str, Any]) -> None:
        """Raises where a checkpoint is not one of this trial's."""
        for key, mine in self._origin().items():
            if plain[key] != mine:
                raise UnfitError(f"its {key} is {plain[key]}, not {mine}")
        if plain["past"]["attempts"] < self.first_attempt:
            raise UnfitError("it is of a training that has ended")

    def _origin(self) -> dict[str, Any]:
        assert self.folder is not None
        return {
            "format": FORMAT,
            "trial": self.folder.name,
            "torch": str(torch.__version__),
            "ablate": ablate.__version__,
        }

    def _write(self, step: int, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        assert self.folder is not None
        past = Past(step, self._began, self._seconds + time.perf_counter() - self._start, self.attempt)
        try:
            checkpoint.write(self.folder, step, tensors, {**self._origin(), "past": asdict(past), **plain})
        except Exception as error:  # a full disk, most likely: no reason to end a training
            _log.warning("no checkpoint of step %d could be written: %s", step, error)

    def _go_on(self, past: Past | None) -> None:
        """Count the attempts and their time on."""
        if past is not None:
            self.attempt = max(self.attempt, past.attempts + 1)
            self._began, self._seconds = past.began, past.seconds
            self.told(replace(past, attempts=self.attempt))


# --- What a training is made of ---------------------------------------------------------------------------------------


def _parts(learner: Learner, ledger: Ledger, numbers: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All of a training at the end of a step, but the `numbers` that its modules had from the start."""
    tensors, plain = _parts_of_model(learner.model, ledger.curve, numbers)
    tensors |= {f"optimizer.{place}.{key}": each for place, key, each in _kept(learner.optimizer)}
    return tensors, {**plain, "ledger": ledger.plain()}


def _parts_of_model(
    model: nn.Module, curve: Curve, numbers: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model, every generator, and the curves so far."""
    tensors = {
        **{f"model.{name}": each for name, each in _tensors_of(model)},
        **{f"generator.{name}": each for name, each in _generators(model).items()},
        **{f"curve.{name}": torch.from_numpy(each) for name, each in curve.columns().items()},
    }
    changed = {name: value for name, value in _numbers(model).items() if not _same(value, numbers.get(name, ...))}
    plain = {"curve": curve.names, "python": random.getstate(), "numpy": _numpy_state(), "numbers": changed}
    return tensors, plain


def _fitted(found: Checkpoint, learner: Learner, ledger: Ledger) -> Callable[[], None]:
    """What puts a checkpoint in place. Raises where it is not of this training."""
    put_model, curve = _fitted_model(found, learner.model), _curve(found)
    put_optimizer = _fitted_optimizer(found, learner.optimizer)
    put_ledger = ledger.fitted(found.plain["ledger"], curve)

    def put() -> None:
        put_model()
        put_optimizer()
        put_ledger()

    return put


def _fitted_model(found: Checkpoint, model: nn.Module) -> Callable[[], None]:
    """The model with the state of its modules and of every generator."""
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    stored = {name.removeprefix("model."): name for name in found.names() if name.startswith("model.")}
    for name, parameter in parameters.items():
        if name not in stored or not found.is_like(stored[name], parameter):
            raise UnfitError(f"parameter {name} is another")
    buffers = {name: modules[name.rpartition(".")[0]] for name in stored if name not in parameters}
    if wrong := [name for name, module in buffers.items() if name.rpartition(".")[2] not in module._buffers]:
        raise UnfitError(f"there is no {wrong[0]}")
    numbers = {name: (modules[name.rpartition(".")[0]], value) for name, value in found.plain["numbers"].items()}
    put_generators = _fitted_generators(found, model)

    def put() -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(found.tensor(stored[name]))
            for name, module in buffers.items():
                _put_buffer(module, name.rpartition(".")[2], found.tensor(stored[name]), _device_of(model))
        for name, (module, value) in numbers.items():
            setattr(module, name.rpartition(".")[2], value)
        put_generators()

    return put


def _put_buffer(module: nn.Module, name: str, value: Tensor, device: torch.device) -> None:
    """In place where it can be: others may hold the same storage."""
    known = module._buffers[name]
    if known is not None and (known.shape, known.dtype) == (value.shape, value.dtype):
        known.copy_(value)
    else:
        module._buffers[name] = value.to(device)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those that are in no `state_dict`; what is tied comes once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _numbers(model: nn.Module) -> dict[str, Any]:
    """The attributes of all modules that are plain values, by path."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (bool, int, float, str, type(None))
    }


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)


# --- The optimizer ---


def _weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    """What it keeps of each weight, by the weight's place in its groups."""
    for place, weight in enumerate(_weights(optimizer)):
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                yield place, key, value


def _fitted_optimizer(found: Checkpoint, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    weights = _weights(optimizer)
    names = [name for name in found.names() if name.startswith("optimizer.")]
    places = [(int(place), key, name) for name in names for _, place, key in [name.split(".", 2)]]
    if any(place >= len(weights) for place, _, _ in places):
        raise UnfitError("the optimizer has fewer weights")

    def put() -> None:
        optimizer.state.clear()
        for place, key, name in sorted(places):
            optimizer.state[weights[place]][key] = found.tensor(name).to(weights[place].device)

    return put


# --- Generators ---


def _generators(model: nn.Module) -> dict[str, Tensor]:
    """The states of torch's generators that a step may draw from."""
    device = _device_of(model)
    on_device = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}


def _fitted_generators(found: Checkpoint, model: nn.Module) -> Callable[[], None]:
    now = _generators(model)
    if not all(found.is_like(f"generator.{name}", state) for name, state in now.items()):
        raise UnfitError("a generator is another")
    states = {name: found.tensor(f"generator.{name}") for name in now}
    version, words, gauss = found.plain["python"]
    of_python, of_numpy = (version, tuple(words), gauss), found.plain["numpy"]
    of_numpy["state"]["key"] = np.array(of_numpy["state"]["key"], dtype=np.uint32)
    # Tried on generators that nobody uses: a state that is none raises here.
    torch.Generator().set_state(states["cpu"])
    random.Random().setstate(of_python)
    np.random.RandomState().set_state(of_numpy)

    def put() -> None:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], _device_of(model))
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    return put


def _curve(found: Checkpoint) -> Curve:
    columns = {name: found.tensor(f"curve.{name}").numpy() for name in ("steps", "kinds", "values")}
    return Curve.of(found.plain["curve"], columns)
