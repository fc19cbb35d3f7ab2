"""OLMoE (Muennighoff et al., 2024, arXiv:2409.02060): small experts; queries and keys are normalised as a whole."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._fields import Fields
from ablate.hf._places import Layout
from ablate.hf._rope import rope

Tree = _llama.Tree
HARMLESS = (*_llama.DROPOUT, "output_router_logits", "router_aux_loss_coef")
"""Dropout, and what routing does in training alone."""


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("clip_qkv", None, reason="queries, keys and values are not clipped here")
    tree = _llama.sizes(fields, max_seq_len=4096)
    bias, normed = fields.flag("attention_bias", default=False), _llama.qk_norm(fields, "projection", 1e-5)
    return {
        **tree,
        "attention": _llama.attention(fields, tree, bias=bias, **normed),
        "position": rope(fields, tree["max_seq_len"]),
        "feed_forward": _llama.mixture(
            fields,
            fields.whole("intermediate_size"),
            fields.few("num_experts", "num_local_experts", default=64),
            fields.whole("num_experts_per_tok", default=8),
            score="softmax",
            renormalize=fields.flag("norm_topk_prob", default=False),
        ),
        "norm": _llama.norm(fields, 1e-5),
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout()
