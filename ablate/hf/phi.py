"""Phi-1, Phi-1.5 and Phi-2 (Li et al., 2023, arXiv:2309.05463): parallel sublayers, a part of each head rotated."""

from __future__ import annotations

from ablate.hf import _llama
from ablate.hf._activations import dense
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places
from ablate.hf._rope import rope

Tree = _llama.Tree
HARMLESS = _llama.DROPOUT

_LAYER = "model.layers.{i}."
_PLACES: Places = {
    "decoder.layers.{i}.attention.out.{p}": _LAYER + "self_attn.dense.{p}",
    "decoder.layers.{i}.feed_forward.up.{p}": _LAYER + "mlp.fc1.{p}",
    "decoder.layers.{i}.feed_forward.down.{p}": _LAYER + "mlp.fc2.{p}",
    "decoder.final_norm.{p}": "model.final_layernorm.{p}",
}


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("qk_layernorm", False, reason="queries and keys are normalised by their mean square alone here")
    tree = _llama.sizes(fields, max_seq_len=2048)
    return {
        **tree,
        "attention": _llama.attention(fields, tree, bias=True),
        "position": rope(fields, tree["max_seq_len"], part=0.5),
        "feed_forward": dense(fields, "hidden_act", "gelu_new", d_ff=fields.whole("intermediate_size"), bias=True),
        "norm": {"name": "layer_norm", "eps": fields.number("layer_norm_eps", default=1e-5)},
        "block": {"name": "parallel", "shared_norm": True},
        "head": {"transform": False, "bias": True},
    }


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _llama.layout({**_llama.PLACES, **_PLACES})
