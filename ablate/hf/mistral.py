"""Mistral 7B (Jiang et al., 2023, arXiv:2310.06825)."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._activations import gated
from ablate.hf._fields import Fields
from ablate.hf._places import Layout
from ablate.hf._rope import rope

Tree = _llama.Tree
HARMLESS = _llama.DROPOUT


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    tree = _llama.sizes(fields, max_seq_len=131072)
    tree |= {
        "attention": _llama.attention(fields, tree, kv_heads=8),
        "position": rope(fields, tree["max_seq_len"]),
        "feed_forward": gated(fields, "hidden_act", "silu", d_ff=fields.whole("intermediate_size")),
        "norm": _llama.norm(fields, 1e-6),
    }
    return tree | _llama.one_window(fields, tree, 4096)


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout()
