"""What the families in Llama's layout share: sizes, attention, experts, and the names of tensors."""

from __future__ import annotations

from typing import Any

from ablate.hf._activations import gated
from ablate.hf._fields import Fields
from ablate.hf._places import Layout, Places
from ablate.hf._rope import rope

Tree = dict[str, Any]
DROPOUT = ("attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout")

_LAYER = "model.layers.{i}."
_GATED = {
    "gate_up.{p}": ("gate_proj.{p}", "up_proj.{p}"),
    "down.{p}": ("down_proj.{p}",),
}
PLACES: Places = {
    "embedding.tokens.weight": "model.embed_tokens.weight",
    "decoder.layers.{i}.attention.qkv.{p}": tuple(_LAYER + f"self_attn.{x}_proj." + "{p}" for x in "qkv"),
    "decoder.layers.{i}.attention.out.{p}": _LAYER + "self_attn.o_proj.{p}",
    "decoder.layers.{i}.attention.q_norm.weight": _LAYER + "self_attn.q_norm.weight",
    "decoder.layers.{i}.attention.k_norm.weight": _LAYER + "self_attn.k_norm.weight",
    "decoder.layers.{i}.norms.0.{p}": _LAYER + "input_layernorm.{p}",
    "decoder.layers.{i}.norms.1.{p}": _LAYER + "post_attention_layernorm.{p}",
    "decoder.layers.{i}.feed_forward.router.weight": _LAYER + "mlp.gate.weight",
    "decoder.final_norm.{p}": "model.norm.{p}",
    "head.output.{p}": "lm_head.{p}",
    **{
        f"decoder.layers.{{i}}.feed_forward.{ours}{part}": tuple(f"{_LAYER}mlp.{theirs}{name}" for name in names)
        for ours, theirs in {"": "", "experts.{e}.": "experts.{e}.", "shared.": "shared_experts."}.items()
        for part, names in _GATED.items()
    },
}


def layout(places: Places = PLACES, ignored: tuple[str, ...] = ()) -> Layout:
    """Llama's files; old ones also hold the frequencies of the rotation, which are computed here."""
    copies = {"lm_head.weight": "model.embed_tokens.weight"}
    return Layout(places, "model.", copies, (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", *ignored))


def sizes(fields: Fields, max_seq_len: int) -> Tree:
    """What the model says of itself before its slots; `max_seq_len` is the family's default."""
    return {
        "family": "decoder",
        "d_model": fields.whole("hidden_size"),
        "n_layers": fields.few("num_hidden_layers"),
        "n_heads": fields.whole("num_attention_heads"),
        "max_seq_len": fields.whole("max_position_embeddings", default=max_seq_len),
        "vocab_size": fields.whole("vocab_size"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=False),
        "block": "pre_norm",
        "head": {"transform": False, "bias": False},
    }


def norm(fields: Fields, eps: float, **settings: Any) -> Tree:
    """The norm, whose eps is `eps` unless the file says so."""
    return {"name": "rms_norm", "eps": fields.number("rms_norm_eps", default=eps), **settings}


def heads(n_heads: int, n_kv_heads: int, **settings: Any) -> Tree:
    """Attention by the number of its key/value heads."""
    if n_kv_heads == n_heads:
        return {"name": "mha", **settings}
    return {"name": "gqa", "n_kv_heads": n_kv_heads, **settings}


def attention(
    fields: Fields, tree: Tree, *, kv_heads: int | None = None, head_dim: int | None = None, **more: Any
) -> Tree:
    """The attention; `kv_heads` and `head_dim` are the family's defaults, which else follow from the sizes."""
    width = head_dim if "head_dim" not in fields and head_dim else tree["d_model"] // tree["n_heads"]
    return heads(
        tree["n_heads"],
        fields.whole("num_key_value_heads", default=kv_heads or tree["n_heads"]),
        head_dim=fields.whole("head_dim", default=width),
        **more,
    )


def windows(tree: Tree, window: int | None, sliding: list[bool]) -> Tree:
    """Settings `attention` and `layers` of a model in which the layers that are `sliding` see `window` tokens."""
    if window is None or not any(sliding):
        return {}
    if all(sliding):
        return {"attention": {**tree["attention"], "window": window}}
    at = [i + 1 for i, slides in enumerate(sliding) if slides]
    return {"layers": [{"at": at, "attention": {"window": window}}]}


def one_window(fields: Fields, tree: Tree, default: int | None) -> Tree:
    """As `windows`, for families in which all layers have the window; `default` is theirs where the file is silent."""
    window = fields.whole("sliding_window", default=default if "sliding_window" not in fields else None)
    n_layers = tree["n_layers"]
    kind = "full_attention" if window is None else "sliding_attention"
    fields.only("layer_types", [kind] * n_layers, None, reason="all layers of this family are of one kind")
    return windows(tree, window, [True] * n_layers)


def mixture(fields: Fields, d_ff: int, n_experts: int, top_k: int, **settings: Any) -> Tree:
    """Softmax routing over gated experts."""
    fields.only("hidden_act", "silu", "swish", reason="experts are gated with silu here")
    return {"name": "moe", "expert": "swiglu", "n_experts": n_experts, "top_k": top_k, "d_ff": d_ff, **settings}


def qk_norm(fields: Fields, kind: str, eps: float) -> Tree:
    """Settings of an attention that normalises queries and keys with the model's own eps."""
    return {"qk_norm": kind, "qk_norm_eps": fields.number("rms_norm_eps", default=eps)}


def qwen(fields: Fields, tree: Tree, attention: Tree) -> Tree:
    """What the dense models of Qwen share: a window, if one is used, in the layers from `max_window_layers` on."""
    tree = {
        **tree,
        "attention": attention,
        "position": rope(fields, tree["max_seq_len"]),
        "feed_forward": gated(fields, "hidden_act", "silu", d_ff=fields.whole("intermediate_size")),
        "norm": norm(fields, 1e-6),
    }
    used = fields.flag("use_sliding_window", default=False)
    window = fields.whole("sliding_window", default=None if "sliding_window" in fields else 4096)
    first = fields.count("max_window_layers", 28)
    window = window if used else None
    usual = [window is not None and i >= first for i in range(tree["n_layers"])]
    return tree | windows(tree, window, _sliding(fields, usual, window))


def _sliding(fields: Fields, usual: list[bool], window: int | None) -> list[bool]:
    """Which layers slide: as `layer_types` says, or as the family has it."""
    types = fields.take("layer_types", default=None)
    if types is None:
        return usual
    words = {"full_attention": False, "sliding_attention": True}
    known = (
        isinstance(types, list)
        and len(types) == len(usual)
        and all(isinstance(each, str) and each in words for each in types)
    )
    if not known or (window is None and "sliding_attention" in types):
        fields.refuse("layer_types", f"one of {' and '.join(words)} is needed a layer, and a window where one slides")
    return [words[each] for each in types]


def some_dense(experts: Tree, d_ff: int, dense: list[int]) -> Tree:
    """Settings `feed_forward` and `layers` of a model with experts in all layers but the `dense`, counted from 0."""
    rule = {"at": [i + 1 for i in dense], "feed_forward": {"name": "swiglu", "d_ff": d_ff}}
    return {"feed_forward": experts, "layers": [rule] if dense else []}
