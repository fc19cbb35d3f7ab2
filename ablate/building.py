"""From settings as a person writes them to a model: what `ablate.build` is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ablate import grid, model
from ablate.settings import ModelSettings, resolved
from ablate.sizes import sized


def model_settings(baseline: Mapping[str, Any]) -> ModelSettings:
    """The resolved settings of a model, written as in the `baseline` of an experiment file. Raises `Faults`.

    Where it gives no `vocab_size` the tokens are bytes.
    """
    tree = grid.baseline_tree({"baseline": baseline, "train": {"steps": 1, "batch_tokens": 1, "seq_len": 1}})
    settings = sized(tree)
    return resolved(settings, 256 if settings.model.vocab_size is None else 0).model


def build(settings: Mapping[str, Any] | ModelSettings, seed: int = 0) -> model.Transformer:
    """A model from settings such as `{"preset": "llama", "n_layers": 2}`, its weights drawn from `seed`.

    A variant's own settings (`Experiment.from_file(path).variants[0].settings.model`) are taken as they are.
    `model(input_ids)` gives logits; `cache = model.new_cache(batch, tokens)` and `model(next_ids, cache=cache)` decode.
    An encoder-decoder is called as `model(input_ids, decoder_input_ids)`.
    """
    return model.build(settings if isinstance(settings, ModelSettings) else model_settings(settings), seed)
