"""Qwen3 (Yang et al., 2025, arXiv:2505.09388): queries and keys are normalised a head at a time."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

Tree = _llama.Tree
HARMLESS = _llama.DROPOUT


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    tree = _llama.sizes(fields, max_seq_len=32768)
    bias, normed = fields.flag("attention_bias", default=False), _llama.qk_norm(fields, "head", 1e-6)
    return _llama.qwen(fields, tree, _llama.attention(fields, tree, kv_heads=32, head_dim=128, bias=bias, **normed))


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout()
