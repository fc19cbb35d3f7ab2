"""DeepSeek-V3 (2024, arXiv:2412.19437), without the layers that predict further tokens."""

from __future__ import annotations

from ablate.hf import _deepseek, _llama
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

Tree = _llama.Tree
HARMLESS = _deepseek.HARMLESS


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("scoring_func", "sigmoid", reason="DeepSeek-V3 routes by sigmoids")
    fields.only("topk_method", "noaux_tc", reason="DeepSeek-V3 chooses experts by biased scores")
    routing = {
        "score": "sigmoid",
        "renormalize": fields.flag("norm_topk_prob", default=True),
        "group_score": "top2",
        "balance": "bias",
        **_deepseek.groups(fields, 8, 4),
    }
    pairs = "interleaved" if fields.flag("rope_interleave", default=True) else "half"
    sizes = _llama.sizes(fields, max_seq_len=4096)
    return _deepseek.settings(fields, sizes, routing, pairs=pairs, first_dense=3, n_shared=1)


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _deepseek.layout(tree)
