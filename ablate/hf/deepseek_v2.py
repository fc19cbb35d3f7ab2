"""DeepSeek-V2 (2024, arXiv:2405.04434)."""

from __future__ import annotations

from ablate.hf import _deepseek, _llama
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

Tree = _llama.Tree
HARMLESS = _deepseek.HARMLESS


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("scoring_func", "softmax", reason="DeepSeek-V2 routes by a softmax")
    fields.only("norm_topk_prob", False, None, reason="code differs on whether it is read")
    fields.only("topk_method", "greedy", "group_limited_greedy", None)
    routing = {"score": "softmax", "renormalize": False, "group_score": "max", **_groups(fields)}
    sizes = _llama.sizes(fields, max_seq_len=2048)
    return _deepseek.settings(fields, sizes, routing, pairs="interleaved", first_dense=0, n_shared=2)


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    return _deepseek.layout(tree)


def _groups(fields: Fields) -> Tree:
    """Greedy routing knows no groups, whatever is said of them."""
    groups = _deepseek.groups(fields, 1, 1)
    limited = fields.take("topk_method", default="greedy") == "group_limited_greedy"
    return groups if limited else {"n_expert_groups": 1, "top_groups": 1}
