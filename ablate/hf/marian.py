"""Marian's translation models (Junczys-Dowmunt et al., 2018, arXiv:1804.00344): fixed sinusoids, all sines first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ablate.hf import _bart
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

if TYPE_CHECKING:
    from torch import Tensor

Tree = _bart.Tree
HARMLESS = (*_bart.HARMLESS, "extra_pos_embeddings")
"""Beside BART's: rows of a table that Marian does not have."""


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("normalize_embedding", False, reason="Marian's embeddings have no norm")
    fields.only("static_position_embeddings", True, reason="Marian's positions are sinusoids")
    fields.only("share_encoder_decoder_embeddings", True, reason="both sequences have one embedding here")
    fields.only("decoder_vocab_size", fields.whole("vocab_size"), None, reason="it is not vocab_size")
    tree = _bart.settings(fields, "gelu", 1024)
    return {**tree, "position": {"name": "sinusoidal", "base": 10000.0, "layout": "half"}}


def layout(tree: Tree) -> Layout:
    """Where its tensors are; old files also hold the sinusoids."""
    return replace(
        _bart.layout(),
        computed=dict.fromkeys((f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")), _waves),
    )


def _waves(length: int, width: int) -> Tensor:
    """The table of sinusoids `(length, width)` in float64."""
    import torch

    even = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** (-even / width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]
