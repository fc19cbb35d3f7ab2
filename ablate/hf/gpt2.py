"""GPT-2 (Radford et al., 2019): matrices are kept as (in, out)."""

from __future__ import annotations

from typing import Any

from ablate.hf import _transformer
from ablate.hf._activations import dense
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places, transposed

Tree = dict[str, Any]
HARMLESS = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)
"""Dropout; a precision of training; a head for multiple choice."""


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("add_cross_attention", False, reason="a decoder is imported")
    d_model, n_layers = fields.whole("n_embd", "hidden_size"), fields.few("n_layer", "num_hidden_layers")
    n_heads = fields.whole("n_head", "num_attention_heads")
    max_seq_len = fields.whole("n_positions", "max_position_embeddings", "n_ctx", default=1024)
    d_ff = fields.whole("n_inner", default=4 * d_model)
    return {
        "family": "decoder",
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "max_seq_len": max_seq_len,
        "vocab_size": fields.whole("vocab_size"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=True),
        "position": {"name": "learned", "offset": 0},
        "feed_forward": dense(fields, "activation_function", "gelu_new", d_ff=d_ff, bias=True),
        "norm": {"name": "layer_norm", "eps": fields.number("layer_norm_epsilon", default=1e-5)},
        "block": "pre_norm",
        "head": {"transform": False, "bias": False},
        **_attention(fields, d_model // n_heads, n_layers),
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are; old files also hold the causal mask."""
    matrices = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
    matrices |= {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
    places: Places = {
        "decoder.positions.0.table.weight": "transformer.wpe.weight",
        **{
            f"decoder.layers.{{i}}.{our}.weight": transposed(f"{_transformer.LAYER}{its}.weight")
            for our, its in matrices.items()
        },
        **{f"decoder.layers.{{i}}.{our}.bias": f"{_transformer.LAYER}{its}.bias" for our, its in matrices.items()},
        "decoder.layers.{i}.norms.0.{p}": _transformer.LAYER + "ln_1.{p}",
        "decoder.layers.{i}.norms.1.{p}": _transformer.LAYER + "ln_2.{p}",
    }
    return _transformer.layout("wte", places, (r"h\.\d+\.attn\.(masked_)?bias",))


def _attention(fields: Fields, head_dim: int, n_layers: int) -> Tree:
    """Settings `attention` and `layers`: scores may be divided by the number of their layer, counted from 1."""
    usual = max(head_dim, 1) ** -0.5  # heads of no width are refused with the other settings
    scale = usual if fields.flag("scale_attn_weights", default=True) else 1.0
    attention = {"name": "mha", "head_dim": head_dim, "bias": True, "scale": scale}
    if not fields.flag("scale_attn_by_inverse_layer_idx", default=False):
        return {"attention": attention}
    rules = [{"at": [i], "attention": {"scale": scale / i}} for i in range(2, n_layers + 1)]
    return {"attention": attention, "layers": rules}
