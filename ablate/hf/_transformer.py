"""What GPT-2, BLOOM and Falcon share: the names outside of layers, and for the last two those of a layer's matrices."""

from __future__ import annotations

from ablate.hf._places import Layout, Places, ungrouped

LAYER = "transformer.h.{i}."


def layout(embedding: str, places: Places, ignored: tuple[str, ...] = ()) -> Layout:
    """A decoder whose `places` in the layers are given, and whose head may be the table `embedding`."""
    table = f"transformer.{embedding}.weight"
    around: Places = {
        "embedding.tokens.weight": table,
        "decoder.final_norm.{p}": "transformer.ln_f.{p}",
        "head.output.weight": "lm_head.weight",
    }
    return Layout({**around, **places}, "transformer.", {"lm_head.weight": table}, ignored)


def fused(groups: int, head_dim: int) -> Places:
    """The matrices of a layer whose queries, keys and values are one tensor, by `groups` of heads."""
    return {
        "decoder.layers.{i}.attention.qkv.{p}": ungrouped(
            LAYER + "self_attention.query_key_value.{p}", groups, head_dim
        ),
        "decoder.layers.{i}.attention.out.{p}": LAYER + "self_attention.dense.{p}",
        "decoder.layers.{i}.feed_forward.up.{p}": LAYER + "mlp.dense_h_to_4h.{p}",
        "decoder.layers.{i}.feed_forward.down.{p}": LAYER + "mlp.dense_4h_to_h.{p}",
    }
