"""LLaMA (Touvron et al., 2023, arXiv:2302.13971), versions 1 to 3."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._activations import gated
from ablate.hf._fields import Fields
from ablate.hf._places import Layout
from ablate.hf._rope import rope

Tree = _llama.Tree
HARMLESS = (*_llama.DROPOUT, "pretraining_tp", "max_sequence_length")
"""Dropout; how the weights were split in training; an older word for the length, which nothing reads."""


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    tree = _llama.sizes(fields, max_seq_len=2048)
    return {
        **tree,
        "attention": _llama.attention(fields, tree, bias=fields.flag("attention_bias", default=False)),
        "position": rope(fields, tree["max_seq_len"]),
        "feed_forward": gated(
            fields,
            "hidden_act",
            "silu",
            d_ff=fields.whole("intermediate_size"),
            bias=fields.flag("mlp_bias", default=False),
        ),
        "norm": _llama.norm(fields, 1e-6),
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout()
