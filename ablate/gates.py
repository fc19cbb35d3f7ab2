"""Whether a variant is what it says, asked before its first step. A variant that is not gives no number.

A gate is a function of a `Subject`, the variant's tiny twin in float64. It gives the figure that the twin passes with,
or raises `Failed` with the figure that it fails with, or `NotApplicable` with the reason.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ablate import cost
from ablate.choice import Identity
from ablate.document import FileFaults
from ablate.experiment import Experiment
from ablate.job import BuildJob, GateJob, Verdict
from ablate.meta import count_parameters
from ablate.model import Transformer, build
from ablate.profiling import memory
from ablate.profiling.decode import TOLERANCE, copy_as
from ablate.profiling.flops import count_flops
from ablate.settings import CROSS, LAYER_SLOTS, ModelSettings, typed
from ablate.train import offered
from ablate.twin import twin, wide_twin
from ablate.variant import of_own_code

TOKENS = 12
"""Tokens of a sequence: more than the windows of a twin hold."""

SOURCE_TOKENS = TOKENS
"""Those of the sequence that an encoder reads for a decoder."""

EXACT = 1e-9
"""Largest difference that rounding in float64 explains, in standard deviations of what differs."""

FLOPS_WITHIN = 1e-6
"""Largest deviation of counted FLOPs: what rounding of shares explains."""

DRAWS = 4
"""Times that weights and tokens are drawn for a parameter to get a gradient: an expert may see no token by chance."""

REASON_LENGTH = 300
"""Characters that an error is told with; all of it is in the log."""


class Failed(Exception):
    """The variant is not what it says."""


class NotApplicable(Exception):
    """The gate has nothing to say of such a variant."""


def main(job: GateJob | BuildJob, connection: Connection) -> None:
    """Do `job` in this process, and tell the parent over `connection` what comes next before it comes."""
    torch.set_num_threads(1)  # on tensors this small a second thread only costs
    if isinstance(job, BuildJob):
        _build_all(job, connection)
    else:
        _lead(job, connection)
    connection.send(("outcome", "ok", None, None))


def _build_all(job: BuildJob, connection: Connection) -> None:
    """What is wrong with the file is told. What raises besides is left for the parent to find, unless the parent's
    memory would be short too.
    """
    memory.limit_to_available()
    connection.send(("phase", "read"))
    try:
        experiment = Experiment.from_file(job.file, job.sets, job.max_trials)
    except FileFaults as faults:
        connection.send(("columns", {"faults": faults.lines}))
        return
    for index, group in list(enumerate(of_own_code(experiment.variants)))[job.first :]:
        connection.send(("phase", str(index)))
        model = group[0].settings.model
        try:
            count_parameters(lambda model=model: Transformer(model))  # type: ignore[misc]
            cost.cost(model, model.max_seq_len)
        except MemoryError:
            raise
        except BaseException:
            traceback.print_exc()


def _lead(job: GateJob, connection: Connection) -> None:
    memory.limit_to_available(job.memory_bytes)
    settings = typed(job.settings).model
    for verdict in verdicts(settings, lambda gate: connection.send(("phase", gate))):
        connection.send(("verdict", verdict))


def verdicts(settings: ModelSettings, enter: Callable[[str], None] = lambda gate: None) -> Iterator[Verdict]:
    """What each gate says; `enter` is called with its name before. Where no twin runs, the first is the last."""
    enter("builds")
    subject = Subject(settings, twin)
    built = tried("builds", partial(builds, subject))
    if built.result == "failed":
        subject = Subject(settings, wide_twin)
        wide = tried("builds", partial(builds, subject))
        built = wide if wide.result == "passed" else built
    yield built
    if built.result == "failed":
        return
    for name, gate in GATES.items():
        enter(name)
        yield tried(name, partial(gate, subject))
    enter("identities")
    listed = tried("identities", partial(identities, subject))
    yield listed
    for sentence, pair in subject.identities if listed.result == "passed" else []:
        enter(sentence)
        yield tried(sentence, partial(equal, pair))


def tried(name: str, gate: Callable[[], str]) -> Verdict:
    """What the gate says, whatever the variant does in it."""
    try:
        return Verdict(name, "passed", gate())
    except NotApplicable as reason:
        return Verdict(name, "not applicable", str(reason))
    except Failed as figure:
        return Verdict(name, "failed", str(figure))
    except BaseException as error:  # a user's own choice may leave in any way
        traceback.print_exc()
        return Verdict(name, "failed", explained(error))


def explained(error: BaseException) -> str:
    """An error's type and message on a line, and the place in the user's own code that it came from."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be read)"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}"[:REASON_LENGTH] + place


_NOT_THE_USERS = ("<", *(f"{folder}{os.sep}" for folder in (Path(__file__).parent, sys.prefix, sys.base_prefix)))


class Subject:
    """A variant's twin as the gates see it."""

    def __init__(self, variant: ModelSettings, shrunk: Callable[[ModelSettings], ModelSettings]) -> None:
        self.variant, self.shrunk = variant, shrunk

    @cached_property
    def settings(self) -> ModelSettings:
        """Those of the twin."""
        return self.shrunk(self.variant)

    @cached_property
    def model(self) -> Transformer:
        """The twin in float64, in evaluation mode."""
        return copy_as(self.measured, torch.float64)

    @cached_property
    def measured(self) -> Transformer:
        """The same in float32, as it is trained and its bytes and FLOPs are counted."""
        return self.draw(seed=0).eval()

    def draw(self, seed: int) -> Transformer:
        """A twin with weights of its own. Those that start at 0 or 1 do not stay there, where they would hide much."""
        model = build(self.settings, seed)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.data = torch.where(parameter == 0, 0.2 * noise, parameter * (1 + 0.5 * noise))
        return model

    def tokens(self, batch: int = 1, seed: int = 0) -> Tensor:
        """Random ids `(batch, TOKENS)`."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.settings.shape.vocab_size, (batch, TOKENS), generator=generator)

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the twin, `(B, T, vocab_size)`."""
        logits: Tensor = self.model(**inputs(self.settings, tokens))
        return logits

    @cached_property
    def tolerance(self) -> float:
        """How far equal numbers may be apart, in standard deviations."""
        with torch.no_grad(), _Dtypes() as seen:
            self.logits(self.tokens())
        return EXACT if seen.floats <= {torch.float64} else TOLERANCE

    @cached_property
    def identities(self) -> list[Identity]:
        """What its choices declare, each once."""
        found: dict[str, Identity] = {}
        for stack in self.settings.stacks:
            for layer, _ in stack.distinct_layers():
                for slot in LAYER_SLOTS:
                    shape = replace(stack.shape, cross=slot == CROSS)
                    if (choice := getattr(layer, slot)) is not None:
                        declared = [(f"{choice.name}: {sentence}", pair) for sentence, pair in choice.identities(shape)]
                        found |= {str((slot, choice, shape, each[0])): each for each in declared}
        return list(found.values())


class _Dtypes(TorchDispatchMode):
    """The floating point formats of all that is computed within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.floats: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.floats.add(each.dtype)
        return out


def inputs(settings: ModelSettings, tokens: Tensor) -> dict[str, Tensor]:
    """The model's arguments where `tokens` `(B, T)` are those whose logits it gives; an encoder reads some others."""
    if settings.family == "encoder_decoder":
        source = torch.arange(SOURCE_TOKENS, device=tokens.device) % settings.shape.vocab_size
        return {"input_ids": source.expand(len(tokens), -1), "decoder_input_ids": tokens}
    types = {"token_type_ids": tokens % settings.n_token_types} if settings.n_token_types else {}
    return {"input_ids": tokens, **types}


# --- The gates --------------------------------------------------------------------------------------------------------


def builds(subject: Subject) -> str:
    """There is a twin, and it gives finite logits."""
    settings, tokens = subject.settings, subject.tokens(batch=3)
    with torch.no_grad():
        logits = subject.logits(tokens)
    wanted = (*tokens.shape, settings.shape.vocab_size)
    if tuple(logits.shape) != wanted:
        raise Failed(f"logits are of shape {tuple(logits.shape)}, not {wanted}")
    if not logits.isfinite().all():
        raise Failed(f"{1 - logits.isfinite().double().mean():.0%} of the logits are not finite")
    layers = ", ".join(f"{stack.name} layers {stack.shape.n_layers}" for stack in settings.stacks)
    return f"{layers}, d_model {settings.d_model}, n_heads {settings.n_heads}"


def causal(subject: Subject) -> str:
    """No output depends on a later token: neither has it a gradient, nor does it change with the token itself."""
    _causal_only(subject.settings)
    largest = max(_gradient_to_later(subject), _change_by_later(subject))
    figure = f"later tokens account for {largest:.2g} of an output"
    if not largest <= subject.tolerance:
        raise Failed(figure)
    return figure


def _gradient_to_later(subject: Subject) -> float:
    """The largest gradient of an output to a later token's embedding, by that to any; one row for each output."""
    embedded: list[Tensor] = []

    def keep(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        embedded.append(out.detach().requires_grad_())
        return embedded[-1]

    with subject.model.embedding.register_forward_hook(keep):
        logits = subject.logits(subject.tokens().expand(TOKENS, -1))
    weights = torch.linspace(-1, 2, logits.shape[-1], dtype=logits.dtype)
    (gradient,) = torch.autograd.grad((logits.diagonal().T @ weights).sum(), embedded[-1])
    influence = gradient.abs().sum(-1)
    if not influence.any():
        raise Failed("no output depends on any token")
    return float(influence.triu(1).max() / influence.max())


@torch.no_grad()
def _change_by_later(subject: Subject) -> float:
    """The largest change of an output as all later tokens change, in standard deviations; one row for each output."""
    tokens = subject.tokens()
    others = (tokens + 1) % subject.settings.shape.vocab_size
    is_later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    before, after = subject.logits(tokens), subject.logits(torch.where(is_later, others, tokens))
    change = (after - before).abs().amax(-1).masked_fill(is_later, 0.0)
    return float(change.max() / before.std())


def rows(subject: Subject) -> str:
    """A sequence's outputs are the same whatever stands beside it in a batch."""
    tokens = subject.tokens(batch=3)
    with torch.no_grad():
        alone = torch.cat([subject.logits(row[None]) for row in tokens])
        return _same(subject.logits(tokens), alone, subject.tolerance, "logits in a batch and alone")


@torch.no_grad()
def cached(subject: Subject) -> str:
    """Decoding with a cache, in pieces of one token and of several, gives the logits of one pass over all."""
    _causal_only(subject.settings)
    tokens = subject.tokens(batch=2)
    cache = subject.model.new_cache(len(tokens), TOKENS, _source_tokens(subject.settings))
    pieces = tokens.split([5, 1, 3, *[1] * (TOKENS - 9)], dim=1)
    logits = [subject.model(**inputs(subject.settings, piece), cache=cache) for piece in pieces]
    return _same(torch.cat(logits, dim=1), subject.logits(tokens), subject.tolerance, "cached and full logits")


@torch.no_grad()
def cache_bytes(subject: Subject) -> str:
    """The cache holds what `ablate.cost` promises."""
    _causal_only(subject.settings)
    source, tokens, model = _source_tokens(subject.settings), subject.tokens(batch=2), subject.measured
    cache, sizes = model.new_cache(len(tokens), TOKENS, source), []
    for piece in tokens.split([2, TOKENS - 2], dim=1):
        model(**inputs(subject.settings, piece), cache=cache)
        promised = cost.cache_bytes(subject.settings, len(tokens), cache.length, "fp32", source)
        if promised is None:
            raise NotApplicable("a choice does not say what it keeps")
        if (has := cache.written_bytes()) != promised:
            raise Failed(f"{promised:,} bytes are promised for {cache.length} tokens, {has:,} are kept")
        sizes.append(has)
    return f"{sizes[-1]:,} bytes"


def parameters(subject: Subject) -> str:
    """The twin has as many parameters as `ablate.cost` promises."""
    promised = cost.cost(subject.settings, TOKENS).params_total
    has = sum(parameter.numel() for parameter in subject.model.parameters())
    if has != promised:
        raise Failed(f"{promised:,} are promised, {has:,} are there")
    return f"{has:,}"


@torch.no_grad()
def flops(subject: Subject) -> str:
    """A sequence takes the FLOPs that `ablate.cost` promises, as a counter that knows no causality counts them."""
    given = inputs(subject.settings, subject.tokens())
    read = TOKENS + _source_tokens(subject.settings)
    promised = cost.cost(subject.settings, read, discount=False).flops_per_token
    if promised is None:
        raise NotApplicable("a choice does not say what it takes")
    counted = count_flops(lambda: subject.measured(**given)) / read
    if not abs(counted - promised) <= FLOPS_WITHIN * promised:
        raise Failed(f"{promised:,.0f} a token are promised, {counted:,.0f} are counted")
    return f"{counted:,.0f} a token"


def tied(subject: Subject) -> str:
    """Tied weights are one tensor, after a change of dtype and from a checkpoint too; others are not."""
    for model in (subject.measured, subject.model):
        head, table = model.head.output.weight, model.embedding.tokens.weight
        one = head.data_ptr() == table.data_ptr() and head is table
        if one != subject.settings.tie_embeddings:
            raise Failed("the head's weights are the embeddings'" if one else "the head's weights are a copy")
    if not subject.settings.tie_embeddings:
        raise NotApplicable("the head has weights of its own")
    return "one tensor"


def gradients(subject: Subject) -> str:
    """Every parameter that is to be trained gets a gradient in training mode, and a finite one."""
    missing: set[str] | None = None
    for seed in range(DRAWS):
        model = subject.draw(seed).train()
        torch.manual_seed(seed)
        logits = model(**inputs(subject.settings, subject.tokens(batch=16, seed=seed)))
        auxiliary = [loss for _, losses in offered(model, "losses") for loss in losses().values()]
        torch.stack([logits.square().mean(), *auxiliary]).sum().backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        if broken := [name for name, grad in trained.items() if grad is not None and not grad.isfinite().all()]:
            raise Failed(f"the gradient of {broken[0]} is not finite")
        none = {name for name, grad in trained.items() if grad is None or not grad.any()}
        missing = none if missing is None else missing & none
        if not missing:
            return f"all of {len(trained)} parameters get one"
    names = sorted(missing or ())
    raise Failed(f"{len(names)} of {len(trained)} parameters never get one: {', '.join(names[:3])}")


def identities(subject: Subject) -> str:
    """How many there are; each is a gate of its own after this one."""
    if not subject.identities:
        raise NotApplicable("its choices declare none")
    return f"{len(subject.identities)} declared"


GATES: dict[str, Callable[[Subject], str]] = {
    "causal": causal,
    "rows": rows,
    "cached": cached,
    "cache bytes": cache_bytes,
    "parameters": parameters,
    "flops": flops,
    "tied": tied,
    "gradients": gradients,
}


def equal(pair: Callable[[], tuple[Tensor, Tensor]]) -> str:
    """What an identity says is equal is."""
    one, other = pair()
    return _same(one, other, EXACT, "both sides")


def _same(one: Tensor, other: Tensor, tolerance: float, what: str) -> str:
    """How far two tensors are apart, in standard deviations of the second."""
    if one.shape != other.shape:
        raise Failed(f"{what} are of shapes {tuple(one.shape)} and {tuple(other.shape)}")
    largest = float((one - other).abs().max())
    apart = largest / max(float(other.std()), 1e-300) if largest else 0.0
    figure = f"{what} differ by {apart:.2g} standard deviations"
    if not apart <= tolerance:
        raise Failed(figure)
    return figure


def _source_tokens(settings: ModelSettings) -> int:
    """Tokens that `inputs` gives an encoder to read."""
    return SOURCE_TOKENS if settings.family == "encoder_decoder" else 0


def _causal_only(settings: ModelSettings) -> None:
    if settings.family == "encoder":
        raise NotApplicable("an encoder looks both ways")
    if not settings.is_causal:
        raise NotApplicable("its attention is set to look both ways")


# --- Of a whole model -------------------------------------------------------------------------------------------------


def leak(model: Transformer, tokens: Tensor) -> str | None:
    """How a causal model's earlier logits depend on later ones of the `tokens` `(B, T)`; None where they do not.

    A twin may be too small to show it. A difference in float32 counts if float64 shows it too. Logits that are not
    finite tell nothing: training will.
    """
    if model.settings.family == "encoder" or not model.settings.is_causal or tokens.shape[1] < 2:
        return None
    if not _differs(_influence(model, tokens)) or not _differs(_influence(copy_as(model, torch.float64), tokens)):
        return None
    return "a later token changes the logits of earlier ones: the model sees what it is to predict"


def _differs(influence: float) -> bool:
    return math.isfinite(influence) and influence > TOLERANCE


@torch.inference_mode()
def _influence(model: Transformer, tokens: Tensor) -> float:
    """The largest change of any logit of the first half when the second half changes, in standard deviations."""
    was_training = model.training
    model.eval()
    half = tokens.shape[1] // 2
    changed = tokens.clone()
    changed[:, half:] = (changed[:, half:] + 1) % model.settings.shape.vocab_size
    before, after = (model(**inputs(model.settings, each))[:, :half] for each in (tokens, changed))
    model.train(was_training)
    largest = (before - after).abs().max()
    return 0.0 if largest == 0 else float(largest / before.std())
