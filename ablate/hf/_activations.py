"""Their words for activation functions in ours."""

from __future__ import annotations

from typing import Any

from ablate.hf._fields import Fields

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
_ERF_GELU = ("gelu", "gelu_python")
_SILU = ("silu", "swish")
_DENSE: dict[str, dict[str, Any]] = {
    **{word: {"name": "gelu", "approximate": "none"} for word in _ERF_GELU},
    **{word: {"name": "gelu", "approximate": "tanh"} for word in TANH_GELU},
    **{word: {"name": "silu"} for word in _SILU},
    **{word: {"name": word} for word in ("relu", "relu2", "linear", "sigmoid", "tanh")},
}
_GATED: dict[str, dict[str, Any]] = {
    **{word: {"name": "swiglu"} for word in _SILU},
    **{word: {"name": "geglu", "approximate": "none"} for word in _ERF_GELU},
    **{word: {"name": "geglu", "approximate": "tanh"} for word in TANH_GELU},
    "relu": {"name": "reglu"},
}


def dense(fields: Fields, field: str, default: str, **settings: Any) -> dict[str, Any]:
    """Two projections with the function that `field` names between them."""
    return _feed_forward(_DENSE, fields, field, default, settings)


def gated(fields: Fields, field: str, default: str, **settings: Any) -> dict[str, Any]:
    """A gated network with the function that `field` names on its gate."""
    return _feed_forward(_GATED, fields, field, default, settings)


def _feed_forward(
    known: dict[str, dict[str, Any]], fields: Fields, field: str, default: str, settings: dict[str, Any]
) -> dict[str, Any]:
    act = fields.take(field, default=default)
    if not isinstance(act, str) or act not in known:
        fields.refuse(field, f"known functions are {', '.join(known)}")
    return {**known[act], **settings}
