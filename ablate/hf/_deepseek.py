"""What DeepSeek's second and third version share: latent attention, dense first layers, experts in groups."""

from __future__ import annotations

from dataclasses import replace

from ablate.hf import _llama
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places
from ablate.hf._rope import rope, softmax_gain

Tree = _llama.Tree
HARMLESS = (
    *("attention_dropout", "pretraining_tp", "ep_size", "output_router_logits"),
    *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "num_nextn_predict_layers"),
)
"""Dropout; how training was split over machines; losses of training; layers beside the model that predict further
tokens, whose tensors are left out."""

_ATTENTION = "model.layers.{i}.self_attn."
_PLACES: Places = {
    "decoder.layers.{i}.attention.q_norm.weight": _ATTENTION + "q_a_layernorm.weight",
    "decoder.layers.{i}.attention.q_up.weight": _ATTENTION + "q_b_proj.weight",
    "decoder.layers.{i}.attention.kv_norm.weight": _ATTENTION + "kv_a_layernorm.weight",
    "decoder.layers.{i}.attention.kv_up.weight": _ATTENTION + "kv_b_proj.weight",
    "decoder.layers.{i}.feed_forward.selection_bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
}


def settings(fields: Fields, sizes: Tree, routing: Tree, *, pairs: str, first_dense: int, n_shared: int) -> Tree:
    """The model; `pairs` is the layout of the rotation, the numbers are the version's defaults."""
    for field in ("attention_bias", "mlp_bias"):
        fields.only(field, False, reason="latent attention and its experts have no biases here")
    fields.only("moe_layer_freq", 1, reason="only the first layers are without experts")
    experts = _llama.mixture(
        fields,
        fields.whole("moe_intermediate_size"),
        fields.few("n_routed_experts", "num_local_experts", "num_experts"),
        fields.whole("num_experts_per_tok"),
        n_shared_experts=fields.count("n_shared_experts", n_shared),
        routed_scaling=fields.number("routed_scaling_factor", default=1.0),
        **routing,
    )
    dense = range(min(fields.count("first_k_dense_replace", first_dense), sizes["n_layers"]))
    return {
        **sizes,
        "attention": _attention(fields, sizes["n_heads"], sizes["max_seq_len"]),
        "position": rope(fields, sizes["max_seq_len"], layout=pairs),
        "norm": _llama.norm(fields, 1e-6),
        **_llama.some_dense(experts, fields.whole("intermediate_size"), list(dense)),
    }


def groups(fields: Fields, n_groups: int, n_kept: int) -> Tree:
    """Groups of experts, of which the best are kept."""
    return {
        "n_expert_groups": fields.whole("n_group", default=n_groups),
        "top_groups": fields.whole("topk_group", default=n_kept),
    }


def layout(tree: Tree) -> Layout:
    """Where the tensors are; a layer that joins two embeddings predicts further tokens, and no logit depends on it."""
    q = "q_a_proj" if tree["attention"]["q_lora_rank"] else "q_proj"
    compress = {
        "decoder.layers.{i}.attention.compress.weight": (
            f"{_ATTENTION}{q}.weight",
            _ATTENTION + "kv_a_proj_with_mqa.weight",
        )
    }
    return replace(_llama.layout({**_llama.PLACES, **_PLACES, **compress}), beside="eh_proj.weight")


def _attention(fields: Fields, n_heads: int, max_seq_len: int) -> Tree:
    nope, turned = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    fields.only("num_key_value_heads", n_heads, None, reason="latent attention has keys for every head")
    fields.only("qk_head_dim", nope + turned, None, reason="it is not qk_nope_head_dim + qk_rope_head_dim")
    fields.only("head_dim", turned, None, reason="it is not qk_rope_head_dim, the part that is rotated")
    q_rank = fields.take("q_lora_rank")
    return {
        "name": "mla",
        "q_lora_rank": None if q_rank is None else fields.whole("q_lora_rank"),
        "kv_lora_rank": fields.whole("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": turned,
        "v_head_dim": fields.whole("v_head_dim"),
        "scale": (nope + turned) ** -0.5 * softmax_gain(fields, max_seq_len),
    }
