"""BART (Lewis et al., 2019, arXiv:1910.13461): learned positions from row 2 on, a norm after the embedding."""

from __future__ import annotations

from ablate.hf import _bart
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

Tree = _bart.Tree
HARMLESS = _bart.HARMLESS


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("normalize_embedding", True, reason="BART as published normalises its embeddings")
    fields.only("static_position_embeddings", False, reason="BART as published has learned positions")
    fields.only("extra_pos_embeddings", 2, reason="BART as published has two rows before the first position's")
    tree = _bart.settings(fields, "gelu", 1024)
    return {**tree, "embed_norm": True, "position": {"name": "learned", "offset": 2}}


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _bart.layout()
