"""Qwen2 (Yang et al., 2024, arXiv:2407.10671): biases on queries, keys and values."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

Tree = _llama.Tree
HARMLESS = _llama.DROPOUT


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("use_mrope", False, reason="positions of images and video are not text's")
    tree = _llama.sizes(fields, max_seq_len=32768)
    return _llama.qwen(fields, tree, _llama.attention(fields, tree, kv_heads=32, bias="qkv"))


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout()
