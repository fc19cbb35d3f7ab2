"""OPT (Zhang et al., 2022, arXiv:2205.01068): positions start at row 2 of their table."""

from __future__ import annotations

from typing import Any

from ablate.hf._activations import dense
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places

Tree = dict[str, Any]
HARMLESS = ("dropout", "attention_dropout", "activation_dropout")

_LAYER = "model.decoder.layers.{i}."


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    before = fields.flag("do_layer_norm_before", default=True)
    reason = "what reads its input through a norm ends in one here"
    fields.only("_remove_final_layer_norm", *((False,) if before else (False, True)), reason=reason)
    fields.only("layer_norm_elementwise_affine", True, reason="norms have a scale and a shift here")
    d_model, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    bias = fields.flag("enable_bias", default=True)
    return {
        "family": "decoder",
        "d_model": d_model,
        "n_layers": fields.few("num_hidden_layers"),
        "n_heads": n_heads,
        "max_seq_len": fields.whole("max_position_embeddings", default=2048),
        "vocab_size": fields.whole("vocab_size"),
        "d_embed": fields.whole("word_embed_proj_dim", default=d_model),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        "attention": {"name": "mha", "head_dim": d_model // n_heads, "bias": bias},
        "position": {"name": "learned", "offset": 2},
        "feed_forward": dense(fields, "activation_function", "relu", d_ff=fields.whole("ffn_dim"), bias=bias),
        "norm": {"name": "layer_norm", "eps": 1e-5},
        "block": "pre_norm" if before else "post_norm",
        "head": {"transform": False, "bias": False},
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    places: Places = {
        "embedding.tokens.weight": "model.decoder.embed_tokens.weight",
        "embedding.project.weight": "model.decoder.project_in.weight",
        "decoder.positions.0.table.weight": "model.decoder.embed_positions.weight",
        "decoder.layers.{i}.attention.qkv.{p}": tuple(_LAYER + f"self_attn.{x}_proj." + "{p}" for x in "qkv"),
        "decoder.layers.{i}.attention.out.{p}": _LAYER + "self_attn.out_proj.{p}",
        "decoder.layers.{i}.feed_forward.up.{p}": _LAYER + "fc1.{p}",
        "decoder.layers.{i}.feed_forward.down.{p}": _LAYER + "fc2.{p}",
        "decoder.layers.{i}.norms.0.{p}": _LAYER + "self_attn_layer_norm.{p}",
        "decoder.layers.{i}.norms.1.{p}": _LAYER + "final_layer_norm.{p}",
        "decoder.final_norm.{p}": "model.decoder.final_layer_norm.{p}",
        "head.project.weight": "model.decoder.project_out.weight",
        "head.output.weight": "lm_head.weight",
    }
    return Layout(places, "model.", {"lm_head.weight": "model.decoder.embed_tokens.weight"})
