"""What BART and Marian share: the wiring of the first transformer, and a bias on the logits that is not trained."""

from __future__ import annotations

from typing import Any

from ablate.hf._activations import dense
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places, flat

Tree = dict[str, Any]
HARMLESS = (
    *("dropout", "attention_dropout", "activation_dropout", "classifier_dropout", "classif_dropout"),
    *("encoder_layerdrop", "decoder_layerdrop", "force_bos_token_to_be_generated"),
)
"""Dropout, and how text is written."""

_LAYER = "model.{s}.layers.{i}."
_CROSS = "model.decoder.layers.{i}.encoder_attn."


def settings(fields: Fields, act: str, max_seq_len: int) -> Tree:
    """The model but for its positions; `act` and `max_seq_len` are the family's defaults."""
    fields.only("is_decoder", False, reason="an encoder-decoder is imported")
    for field in ("normalize_before", "add_final_layer_norm", "add_bias_logits"):
        fields.only(field, False, reason="BART as published has its norms after the sublayers, and no more")
    decoder, encoder = _stack(fields, "decoder", act), _stack(fields, "encoder", act)
    fields.only("num_hidden_layers", encoder["n_layers"], reason="it is not encoder_layers")
    fields.only("num_attention_heads", encoder["n_heads"], reason="it is not encoder_attention_heads")
    return {
        "family": "encoder_decoder",
        "d_model": fields.whole("d_model", "hidden_size"),
        "max_seq_len": fields.whole("max_position_embeddings", default=max_seq_len),
        "vocab_size": fields.whole("vocab_size"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        "embed_scale": fields.flag("scale_embedding", default=False),
        **decoder,
        "norm": {"name": "layer_norm", "eps": 1e-5},
        "block": "post_norm",
        "encoder": encoder,
        "head": {"transform": False, "bias": "fixed"},
    }


def layout() -> Layout:
    """Where the tensors are."""
    shared = "model.shared.weight"
    places: Places = {
        "embedding.tokens.weight": shared,
        "{s}.positions.0.table.weight": "model.{s}.embed_positions.weight",
        "{s}.embed_norm.{p}": "model.{s}.layernorm_embedding.{p}",
        "{s}.layers.{i}.attention.qkv.{p}": tuple(_LAYER + f"self_attn.{x}_proj." + "{p}" for x in "qkv"),
        "{s}.layers.{i}.attention.out.{p}": _LAYER + "self_attn.out_proj.{p}",
        "decoder.layers.{i}.cross_attention.q.{p}": _CROSS + "q_proj.{p}",
        "decoder.layers.{i}.cross_attention.kv.{p}": (_CROSS + "k_proj.{p}", _CROSS + "v_proj.{p}"),
        "decoder.layers.{i}.cross_attention.out.{p}": _CROSS + "out_proj.{p}",
        "{s}.layers.{i}.feed_forward.up.{p}": _LAYER + "fc1.{p}",
        "{s}.layers.{i}.feed_forward.down.{p}": _LAYER + "fc2.{p}",
        "{s}.layers.{i}.norms.0.{p}": _LAYER + "self_attn_layer_norm.{p}",
        "encoder.layers.{i}.norms.1.{p}": "model.encoder.layers.{i}.final_layer_norm.{p}",
        "decoder.layers.{i}.norms.1.{p}": "model.decoder.layers.{i}.encoder_attn_layer_norm.{p}",
        "decoder.layers.{i}.norms.2.{p}": "model.decoder.layers.{i}.final_layer_norm.{p}",
        "head.output.weight": "lm_head.weight",
        "head.bias": flat("final_logits_bias"),
    }
    names = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    return Layout(places, "model.", dict.fromkeys(names, shared), (r"(encoder|decoder)\.version",))


def _stack(fields: Fields, name: str, act: str) -> Tree:
    """The sizes of one stack, and its slots that have sizes."""
    return {
        "n_layers": fields.few(f"{name}_layers"),
        "n_heads": fields.whole(f"{name}_attention_heads"),
        "attention": {"name": "mha", "head_dim": _head_dim(fields, name), "bias": True},
        "feed_forward": dense(fields, "activation_function", act, d_ff=fields.whole(f"{name}_ffn_dim"), bias=True),
    }


def _head_dim(fields: Fields, name: str) -> int:
    width: int = fields.whole("d_model", "hidden_size") // fields.whole(f"{name}_attention_heads")
    return width
