"""Gemma (Gemma Team, 2024, arXiv:2403.08295): scaled embeddings, norms by 1 + w, a gate of tanh-GELU."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._activations import TANH_GELU
from ablate.hf._fields import Fields
from ablate.hf._places import Layout
from ablate.hf._rope import rope

Tree = _llama.Tree
HARMLESS = _llama.DROPOUT


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    # The first files say `gelu`; the models were trained with the approximation, and all code runs them so.
    fields.only("hidden_act", "gelu", *TANH_GELU, reason="Gemma's gate is the approximation by tanh")
    fields.only("hidden_activation", None, *TANH_GELU, reason="Gemma's gate is the approximation by tanh")
    fields.only("use_bidirectional_attention", None, False, reason="a decoder is imported")
    tree = _llama.sizes(fields, max_seq_len=8192)
    bias = fields.flag("attention_bias", default=False)
    return {
        **tree,
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        "embed_scale": True,
        "attention": _llama.attention(fields, tree, kv_heads=16, head_dim=256, bias=bias),
        "position": rope(fields, tree["max_seq_len"]),
        "feed_forward": {"name": "geglu", "approximate": "tanh", "d_ff": fields.whole("intermediate_size")},
        "norm": _llama.norm(fields, 1e-6, unit_offset=True),
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout()
