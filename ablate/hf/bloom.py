"""BLOOM (BigScience Workshop, 2022, arXiv:2211.05100): ALiBi, a norm after the embedding."""

from __future__ import annotations

from typing import Any

from ablate.hf import _transformer
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places

Tree = dict[str, Any]
HARMLESS = (
    *("attention_dropout", "hidden_dropout", "pretraining_tp", "slow_but_exact", "attention_softmax_in_fp32"),
    *("bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
)
"""Dropout; how kernels were fused and weights split in training, which changes roundings alone."""


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("apply_residual_connection_post_layernorm", False, reason="residuals start before the norm here")
    d_model = fields.whole("hidden_size", "n_embed")
    n_heads = fields.whole("n_head", "num_attention_heads")
    fields.only("n_inner", None, 4 * d_model, reason="BLOOM's hidden layer is four times as wide as the model")
    return {
        "family": "decoder",
        "d_model": d_model,
        "n_layers": fields.few("n_layer", "num_hidden_layers"),
        "n_heads": n_heads,
        "max_seq_len": fields.whole("seq_length", default=2048),
        "vocab_size": fields.whole("vocab_size"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        "embed_norm": True,
        "attention": {"name": "mha", "head_dim": d_model // n_heads, "bias": True},
        "position": "alibi",
        "feed_forward": {"name": "gelu", "approximate": "tanh", "d_ff": 4 * d_model, "bias": True},
        "norm": {"name": "layer_norm", "eps": fields.number("layer_norm_epsilon", default=1e-5)},
        "block": "pre_norm",
        "head": {"transform": False, "bias": False},
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    places: Places = {
        "decoder.embed_norm.{p}": "transformer.word_embeddings_layernorm.{p}",
        "decoder.layers.{i}.norms.0.{p}": _transformer.LAYER + "input_layernorm.{p}",
        "decoder.layers.{i}.norms.1.{p}": _transformer.LAYER + "post_attention_layernorm.{p}",
        **_transformer.fused(tree["n_heads"], tree["attention"]["head_dim"]),
    }
    return _transformer.layout("word_embeddings", places)
