"""T5 (Raffel et al., 2019, arXiv:1910.10683), versions 1.0 and 1.1: distances in buckets, scores without a scale."""

from __future__ import annotations

from typing import Any

from ablate.hf._activations import dense, gated
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places

Tree = dict[str, Any]
HARMLESS = ("dropout_rate", "classifier_dropout")
GATED = "gated-"


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it; version 1.1, whose head is its own, does not scale before it."""
    fields.only("is_decoder", False, reason="an encoder-decoder is imported")
    n_layers = fields.few("num_layers", "num_hidden_layers")
    tied = fields.flag("tie_word_embeddings", default=True)
    # Files written since transformers 5 always say that the head is tied, and keep here whether it is.
    tied = tied and fields.flag("scale_decoder_outputs", default=True)
    return {
        "family": "encoder_decoder",
        "d_model": fields.whole("d_model", "hidden_size"),
        "n_layers": fields.few("num_decoder_layers", default=n_layers),
        "n_heads": fields.whole("num_heads", "num_attention_heads"),
        "max_seq_len": fields.whole("n_positions", default=512),
        "vocab_size": fields.whole("vocab_size"),
        "tie_embeddings": tied,
        "attention": {"name": "mha", "head_dim": fields.whole("d_kv", "head_dim"), "bias": False, "scale": "none"},
        "position": {
            "name": "t5",
            "n_buckets": fields.whole("relative_attention_num_buckets", default=32),
            "max_distance": fields.whole("relative_attention_max_distance", default=128),
        },
        "feed_forward": _feed_forward(fields),
        "norm": {"name": "rms_norm", "eps": fields.number("layer_norm_epsilon", default=1e-6)},
        "block": "pre_norm",
        "encoder": {"n_layers": n_layers},
        "head": {"transform": False, "bias": False, "scale": tied},
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are; an unused table of biases stands in some published files."""
    block = "{s}.block.{i}.layer."
    cross = "decoder.block.{i}.layer.1.EncDecAttention."
    places: Places = {
        "embedding.tokens.weight": "shared.weight",
        "{s}.positions.0.table.weight": "{s}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "{s}.layers.{i}.attention.qkv.weight": tuple(f"{block}0.SelfAttention.{x}.weight" for x in "qkv"),
        "{s}.layers.{i}.attention.out.weight": block + "0.SelfAttention.o.weight",
        "decoder.layers.{i}.cross_attention.q.weight": cross + "q.weight",
        "decoder.layers.{i}.cross_attention.kv.weight": (cross + "k.weight", cross + "v.weight"),
        "decoder.layers.{i}.cross_attention.out.weight": cross + "o.weight",
        "{s}.layers.{i}.norms.{j}.weight": block + "{j}.layer_norm.weight",
        "{s}.final_norm.weight": "{s}.final_layer_norm.weight",
        "head.output.weight": "lm_head.weight",
        **_feed_forward_places("encoder", 1),
        **_feed_forward_places("decoder", 2),
    }
    copies = dict.fromkeys(
        ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    )
    unused = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    return Layout(places, copies=copies, ignored=(unused,))


def _feed_forward(fields: Fields) -> Tree:
    """`gated-gelu` means the approximation by tanh; two younger fields repeat what the older one says."""
    written = fields.take("feed_forward_proj", default="relu")
    is_gated = isinstance(written, str) and written.startswith(GATED)
    act = "gelu_new" if written == GATED + "gelu" else str(written).removeprefix(GATED)
    fields.only("is_gated_act", is_gated, reason="'feed_forward_proj' says otherwise")
    fields.only("dense_act_fn", act, reason="'feed_forward_proj' says otherwise")
    make = gated if is_gated else dense
    return make(Fields({"feed_forward_proj": act}), "feed_forward_proj", act, d_ff=fields.whole("d_ff"), bias=False)


def _feed_forward_places(stack: str, sublayer: int) -> dict[str, str | tuple[str, ...]]:
    ours, theirs = f"{stack}.layers.{{i}}.feed_forward.", f"{stack}.block.{{i}}.layer.{sublayer}.DenseReluDense."
    return {
        ours + "up.weight": theirs + "wi.weight",
        ours + "gate_up.weight": (theirs + "wi_0.weight", theirs + "wi_1.weight"),
        ours + "down.weight": theirs + "wo.weight",
    }
