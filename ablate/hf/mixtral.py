"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Mistral with experts, two of which a token meets."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places
from ablate.hf._rope import rope

Tree = _llama.Tree
HARMLESS = (*_llama.DROPOUT, "output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Dropout, and what routing does in training alone."""

_EXPERTS = "model.layers.{i}.block_sparse_moe."
_PLACES: Places = {
    "decoder.layers.{i}.feed_forward.router.weight": _EXPERTS + "gate.weight",
    "decoder.layers.{i}.feed_forward.experts.{e}.gate_up.{p}": (
        _EXPERTS + "experts.{e}.w1.{p}",
        _EXPERTS + "experts.{e}.w3.{p}",
    ),
    "decoder.layers.{i}.feed_forward.experts.{e}.down.{p}": _EXPERTS + "experts.{e}.w2.{p}",
}


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    tree = _llama.sizes(fields, max_seq_len=131072)
    n_experts = fields.few("num_local_experts", "num_experts", default=8)
    top_k = fields.whole("num_experts_per_tok", default=2)
    tree |= {
        "attention": _llama.attention(fields, tree, kv_heads=8),
        "position": rope(fields, tree["max_seq_len"], base=1e6),
        "feed_forward": _llama.mixture(
            fields, fields.whole("intermediate_size"), n_experts, top_k, score="softmax", renormalize=True
        ),
        "norm": _llama.norm(fields, 1e-5),
    }
    return tree | _llama.one_window(fields, tree, None)


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout({**_llama.PLACES, **_PLACES})
