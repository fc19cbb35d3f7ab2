"""Qwen3's mixtures of experts (Yang et al., 2025, arXiv:2505.09388)."""

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
    tree = _llama.sizes(fields, max_seq_len=32768)
    bias, normed = fields.flag("attention_bias", default=False), _llama.qk_norm(fields, "head", 1e-6)
    experts = _llama.mixture(
        fields,
        fields.whole("moe_intermediate_size", default=768),
        fields.few("num_experts", "num_local_experts", default=128),
        fields.whole("num_experts_per_tok", default=8),
        score="softmax",
        renormalize=fields.flag("norm_topk_prob", default=False),
    )
    tree |= {
        "attention": _llama.attention(fields, tree, kv_heads=4, bias=bias, **normed),
        "position": rope(fields, tree["max_seq_len"]),
        "norm": _llama.norm(fields, 1e-6),
        **_llama.some_dense(experts, fields.whole("intermediate_size"), _dense_layers(fields, tree["n_layers"])),
    }
    return _windowed(fields, tree)


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout()


def _dense_layers(fields: Fields, n_layers: int) -> list[int]:
    """Layers without experts, counted from 0: those that are named, and all but every `decoder_sparse_step`-th."""
    step = fields.whole("decoder_sparse_step", default=1)
    named = fields.take("mlp_only_layers", default=None) or []
    if not isinstance(named, list) or not all(type(each) is int for each in named):
        fields.refuse("mlp_only_layers", "a list of layers is needed")
    return [i for i in range(n_layers) if i in named or (i + 1) % step]


def _windowed(fields: Fields, tree: Tree) -> Tree:
    """The model with its window in all layers, if it uses one."""
    if not fields.flag("use_sliding_window", default=False):
        fields.unused("sliding_window", "max_window_layers")
        return tree
    fields.only("max_window_layers", 0, reason="code differs on which layers a window is for")
    return tree | _llama.one_window(fields, tree, 4096)
