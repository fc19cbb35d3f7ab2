"""Falcon (Almazrouei et al., 2023, arXiv:2311.16867): one key/value head or a few, sublayers side by side."""

from __future__ import annotations

from typing import Any

from ablate.hf import _transformer
from ablate.hf._activations import dense
from ablate.hf._fields import Fields
from ablate.hf._llama import heads
from ablate.hf._places import Layout, Places
from ablate.hf._rope import rope

Tree = dict[str, Any]
HARMLESS = ("attention_dropout", "hidden_dropout")


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("alibi", False, None, reason="Falcon rounds these biases to bfloat16 and scales them with the scores")
    fields.only("apply_residual_connection_post_layernorm", False)
    d_model = fields.whole("hidden_size", "n_embed")
    n_heads = fields.whole("num_attention_heads")
    max_seq_len = fields.whole("max_position_embeddings", default=2048)
    bias = fields.flag("bias", default=False)
    head_dim = d_model // n_heads
    fields.only("head_dim", head_dim, reason="it is not hidden_size / num_attention_heads")
    return {
        "family": "decoder",
        "d_model": d_model,
        "n_layers": fields.few("num_hidden_layers"),
        "n_heads": n_heads,
        "max_seq_len": max_seq_len,
        "vocab_size": fields.whole("vocab_size"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        "attention": heads(n_heads, _kv_heads(fields, n_heads), head_dim=head_dim, bias=bias),
        "position": rope(fields, max_seq_len),
        "feed_forward": _feed_forward(fields, d_model, bias),
        "norm": {"name": "layer_norm", "eps": fields.number("layer_norm_epsilon", default=1e-5)},
        "block": _block(fields),
        "head": {"transform": False, "bias": False},
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    attention, block = tree["attention"], tree["block"]
    groups = attention.get("n_kv_heads", tree["n_heads"])
    two = block["name"] == "parallel" and not block["shared_norm"]
    norms = ("ln_attn", "ln_mlp") if two else ("input_layernorm", "post_attention_layernorm")
    places: Places = {
        **{
            f"decoder.layers.{{i}}.norms.{j}.{{p}}": f"{_transformer.LAYER}{name}.{{p}}" for j, name in enumerate(norms)
        },
        **_transformer.fused(groups, attention["head_dim"]),
    }
    return _transformer.layout("word_embeddings", places, (r"h\.\d+\.self_attention\.rotary_emb\.inv_freq",))


def _kv_heads(fields: Fields, n_heads: int) -> int:
    """The count is read in the newer form alone: the older one has one key/value head, or one for each."""
    count: int = fields.whole("num_kv_heads", default=n_heads)
    if fields.flag("new_decoder_architecture", default=False):
        fields.unused("multi_query")
        return count
    return 1 if fields.flag("multi_query", default=True) else n_heads


def _block(fields: Fields) -> Tree:
    newer, parallel = fields.flag("new_decoder_architecture", default=False), fields.flag("parallel_attn", default=True)
    if newer and not parallel:
        fields.refuse("parallel_attn", "the newer form has its sublayers side by side")
    norms = (None, 1, 2) if newer else (None, 1)
    fields.only("num_ln_in_parallel_attn", *norms, reason="only the newer form has two")
    if not parallel:
        return {"name": "pre_norm"}
    one = not newer or fields.take("num_ln_in_parallel_attn", default=None) == 1
    return {"name": "parallel", "shared_norm": one}


def _feed_forward(fields: Fields, d_model: int, bias: bool) -> Tree:
    d_ff = fields.whole("ffn_hidden_size", default=4 * d_model)
    fields.only("ff_factor", d_ff // d_model, None, reason="it is not ffn_hidden_size / hidden_size")
    return dense(fields, "activation", "gelu", d_ff=d_ff, bias=bias)
