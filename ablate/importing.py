"""Published checkpoints as models of `ablate`, and text from a model a token at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ablate import hf
from ablate.building import model_settings
from ablate.hf._fields import refusal
from ablate.hf._files import Checkpoint
from ablate.hf._matching import Match, check_sizes, matched, misfit
from ablate.linear import PackedLinear
from ablate.meta import on_meta
from ablate.model import Transformer
from ablate.settings import ModelSettings

_START = "decoder_start_id"
_ROUNDING = 2.0**-7
"""What half precision may change of a sine or cosine."""


def load_hf(folder: str | Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a folder in Hugging Face's layout: `config.json` and safetensors, whole or in shards with an index.

    It is in evaluation mode, on the CPU, in `dtype`, to which tensors are widened before anything else. Every field and
    every tensor must find its place: raises `Faults` that name those that do not. Files are read, and never run.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"a model's numbers are floats, not {dtype}")
    found = hf.described(folder)
    checkpoint = Checkpoint(Path(folder))
    settings = model_settings(found.settings)
    empty = _empty(settings, len(checkpoint.shapes))
    expected = _tensors(empty)
    match = matched(found.layout, expected, checkpoint.shapes)
    check_sizes(match, expected, checkpoint.shapes, _packed(empty))
    _check_doubles(match, checkpoint)
    with torch.random.fork_rng(devices=[]):
        model = Transformer(settings).to(dtype).eval()
    _fill(model, match, checkpoint, dtype)
    if found.start_id is not None:
        model.register_buffer(_START, torch.tensor([[found.start_id]]), persistent=False)
    return model


@torch.no_grad()
def generate(
    model: Transformer,
    input_ids: Tensor,
    n: int,
    *,
    attention_mask: Tensor | None = None,
    decoder_input_ids: Tensor | None = None,
) -> Tensor:
    """`input_ids` `(B, T)` followed by `n` tokens, each the likeliest after those before it: `(B, T + n)`.

    Decodes with a cache, in evaluation mode. Padding, where `attention_mask` `(B, T)` is False, comes before the
    tokens; a model that adds positions to its embeddings would count it, and is refused. An encoder-decoder reads
    `input_ids` and goes on from `decoder_input_ids` `(B, S)`: `(B, S + n)`; these are the one token that its
    `config.json` names unless given. Raises ValueError for a model that cannot write, or that has nothing to go on
    from.
    """
    two = model.settings.family == "encoder_decoder"
    start = _start(model, input_ids, decoder_input_ids) if two else input_ids
    if not model.settings.is_causal:
        raise ValueError("a model in which tokens see later ones does not write")
    if not two and attention_mask is not None and not attention_mask.all() and _counts_padding(model):
        raise ValueError("this model's positions count padding: give prompts of one length, without it")
    if n < 0 or not start.shape[1]:
        raise ValueError(f"{n} tokens cannot follow {start.shape[1]}")
    was_training = model.training
    model.eval()
    try:
        return _written(model, input_ids if two else None, start, n, attention_mask)
    finally:
        model.train(was_training)


def _counts_padding(model: Transformer) -> bool:
    """Whether a token's place is that in its row, padding included, and not its distance to others."""
    return any(stack.usual.position.embeds for stack in model.settings.stacks)


def _start(model: Transformer, source: Tensor, given: Tensor | None) -> Tensor:
    """What an encoder-decoder goes on from, `(B, S)`."""
    if given is not None:
        return given
    token = getattr(model, _START, None)
    if token is None:
        raise ValueError("an encoder-decoder goes on from decoder_input_ids, which are not given")
    start: Tensor = token.expand(len(source), 1)
    return start


def _written(model: Transformer, source: Tensor | None, ids: Tensor, n: int, mask: Tensor | None) -> Tensor:
    cache = model.new_cache(len(ids), ids.shape[1] + n, 0 if source is None else source.shape[1])
    step = ids
    for _ in range(n):
        inputs = (step,) if source is None else (source, step)
        step = model(*inputs, attention_mask=mask, cache=cache)[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], dim=1)
        if mask is not None and source is None:
            mask = torch.cat([mask.bool(), torch.ones_like(step, dtype=torch.bool)], dim=1)
    return ids


def _empty(settings: ModelSettings, n_tensors: int) -> torch.nn.Module:
    """The model that `config.json` asks for, without its numbers; every layer has one tensor at least."""
    n_layers = sum(stack.shape.n_layers for stack in settings.stacks)
    if n_layers > n_tensors:
        raise refusal(f"config.json asks for {n_layers} layers, and the checkpoint has {n_tensors} tensors in all")
    try:
        return on_meta(lambda: Transformer(settings))
    except RuntimeError:  # torch's word for sizes whose product it cannot count
        raise refusal(
            "config.json asks for tensors that no machine holds", "compare its sizes with the file's"
        ) from None


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that a checkpoint keeps, each once."""
    kept = model.state_dict(keep_vars=True)
    return {**dict(model.named_parameters()), **{name: x for name, x in model.named_buffers() if name in kept}}


def _packed(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The rows of each part of those that are several projections in one."""
    packed = {path: module.parts for path, module in model.named_modules() if isinstance(module, PackedLinear)}
    return {f"{path}.{kind}": parts for path, parts in packed.items() for kind in ("weight", "bias")}


def _check_doubles(match: Match, checkpoint: Checkpoint) -> None:
    """What stands twice in the file must be the same, and what is computed here must be what the file says."""
    for name, original in match.equal.items():
        if not torch.equal(checkpoint.read(name, torch.float64), checkpoint.read(original, torch.float64)):
            raise refusal(f"'{name}' differs from '{original}', and config.json says that they are one tensor")
    for name, make in match.computed.items():
        found, shape = checkpoint.read(name, torch.float64), checkpoint.shapes[name]
        if len(shape) != 2 or not torch.allclose(found, make(*shape), rtol=0, atol=_ROUNDING):
            raise refusal(f"'{name}' of the checkpoint is not what this family computes there")


@torch.no_grad()
def _fill(model: Transformer, match: Match, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    for name, tensor in _tensors(model).items():
        place = match.places[name]
        if not place.sources:
            continue
        try:
            made = place.make(*(checkpoint.read(source, dtype) for source in place.sources))
        except (RuntimeError, IndexError):  # torch's words for tensors that cannot be cut or put together
            raise misfit(name, tuple(tensor.shape), place, checkpoint.shapes) from None
        if made.shape != tensor.shape:
            raise misfit(name, tuple(tensor.shape), place, checkpoint.shapes)
        tensor.copy_(made)
