"""What BERT and its like share: an encoder with norms after its sublayers, and a head for masked tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ablate.hf._activations import dense
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places

Tree = dict[str, Any]
HARMLESS = (
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
)
"""Dropout, and the head that judges pairs of sentences."""


def settings(fields: Fields, max_seq_len: int, position: Tree, n_token_types: int) -> Tree:
    """The model; `n_token_types` is the family's default."""
    fields.only("is_decoder", False, reason="an encoder is imported")
    fields.only("add_cross_attention", False, reason="an encoder is imported")
    fields.only("position_embedding_type", "absolute", None, reason="positions are added to the embeddings")
    d_model, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    return {
        "family": "encoder",
        "d_model": d_model,
        "n_layers": fields.few("num_hidden_layers"),
        "n_heads": n_heads,
        "max_seq_len": max_seq_len,
        "vocab_size": fields.whole("vocab_size"),
        "n_token_types": fields.whole("type_vocab_size", default=n_token_types),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        "embed_norm": True,
        "attention": {"name": "mha", "head_dim": d_model // n_heads, "bias": True},
        "position": position,
        "feed_forward": dense(fields, "hidden_act", "gelu", d_ff=fields.whole("intermediate_size"), bias=True),
        "norm": {"name": "layer_norm", "eps": fields.number("layer_norm_eps", default=1e-12)},
        "block": "post_norm",
        "head": {"transform": True, "bias": True},
    }


def layout(name: str, head: Mapping[str, str], ignored: tuple[str, ...] = ()) -> Layout:
    """Where the tensors of the family `name` are; the `head` says it for its dense layer, norm, decoder and bias."""
    embeddings, layer = f"{name}.embeddings.", f"{name}.encoder.layer.{{i}}."
    places: Places = {
        "embedding.tokens.weight": embeddings + "word_embeddings.weight",
        "embedding.types.weight": embeddings + "token_type_embeddings.weight",
        "encoder.positions.0.table.weight": embeddings + "position_embeddings.weight",
        "encoder.embed_norm.{p}": embeddings + "LayerNorm.{p}",
        "encoder.layers.{i}.attention.qkv.{p}": tuple(
            layer + f"attention.self.{part}." + "{p}" for part in ("query", "key", "value")
        ),
        "encoder.layers.{i}.attention.out.{p}": layer + "attention.output.dense.{p}",
        "encoder.layers.{i}.norms.0.{p}": layer + "attention.output.LayerNorm.{p}",
        "encoder.layers.{i}.feed_forward.up.{p}": layer + "intermediate.dense.{p}",
        "encoder.layers.{i}.feed_forward.down.{p}": layer + "output.dense.{p}",
        "encoder.layers.{i}.norms.1.{p}": layer + "output.LayerNorm.{p}",
        "head.transform.{p}": head["dense"] + ".{p}",
        "head.norm.{p}": head["norm"] + ".{p}",
        "head.output.weight": head["decoder"] + ".weight",
        "head.output.bias": head["bias"],
    }
    copies = {
        head["decoder"] + ".weight": embeddings + "word_embeddings.weight",
        head["decoder"] + ".bias": head["bias"],
    }
    unread = (r"pooler\..*", r"embeddings\.position_ids", *ignored)
    renamed = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return Layout(places, f"{name}.", copies, unread, renamed=renamed)
