"""Rotary positions as they are written since transformers 5 (`rope_parameters`) and before (`rope_theta`,
`rope_scaling`)."""

from __future__ import annotations

import math
from typing import Any

from ablate.hf._fields import Fields

Tree = dict[str, Any]


def rope(
    fields: Fields, max_seq_len: int, *, layout: str = "half", base: float = 10000.0, part: float | None = None
) -> Tree:
    """The `position` of a family whose default is `base`; one that rotates a part of each head has a default `part`."""
    below = _section(fields)
    theta, fraction = fields.number("rope_theta", default=base), _part(fields, part)
    if below is None:
        return _position(theta, fraction, layout, None)
    kind = below.take("rope_type", "type", default="default")
    theta, fraction = below.number("rope_theta", default=theta), _part(below, None if part is None else fraction)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        below.refuse("rope_type" if "rope_type" in below else "type", f"known are {', '.join(_SCALINGS)}")
    scaling = _SCALINGS[kind](below, max_seq_len)
    below.close()
    return _position(theta, fraction, layout, scaling)


def softmax_gain(fields: Fields, max_seq_len: int) -> float:
    """What DeepSeek's softmax scale is multiplied by under YaRN: the square of its temperature for all dimensions."""
    below = fields.section("rope_parameters") or fields.section("rope_scaling")
    if below is None or below.take("rope_type", "type", default="default") != "yarn":
        return 1.0
    gain = _temperature(_stretch(below, max_seq_len)[0], below.number("mscale_all_dim", default=0.0))
    return gain * gain


def _part(fields: Fields, default: float | None) -> float:
    """The fraction of a head that is rotated; all of it in a family that has no `default`."""
    if default is None:
        fields.only("partial_rotary_factor", 1.0, None, reason="this family rotates whole heads")
        return 1.0
    return float(fields.number("partial_rotary_factor", default=default))


def _section(fields: Fields) -> Fields | None:
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new and old:
        fields.refuse("rope_scaling", "'rope_parameters' is given too, and it is not said which one holds")
    return new or old


def _position(base: float, fraction: float, layout: str, scaling: Tree | None) -> Tree:
    return {"name": "rope", "base": base, "fraction": fraction, "layout": layout, "scaling": scaling}


def _none(below: Fields, max_seq_len: int) -> None:
    return None


def _linear(below: Fields, max_seq_len: int) -> Tree:
    return {"kind": "linear", "factor": below.number("factor")}


def _llama3(below: Fields, max_seq_len: int) -> Tree:
    return {
        "kind": "llama3",
        "factor": below.number("factor"),
        "original_max_seq_len": below.whole("original_max_position_embeddings", default=max_seq_len),
        "low_freq_factor": below.number("low_freq_factor"),
        "high_freq_factor": below.number("high_freq_factor"),
    }


def _yarn(below: Fields, max_seq_len: int) -> Tree:
    below.only("truncate", True, None, reason="the ends of the ramp are always rounded to whole pairs here")
    factor, original = _stretch(below, max_seq_len)
    mscale, all_dim = below.number("mscale", default=0.0), below.number("mscale_all_dim", default=0.0)
    usual = _temperature(factor, mscale) / _temperature(factor, all_dim) if mscale and all_dim else _temperature(factor)
    return {
        "kind": "yarn",
        "factor": factor,
        "original_max_seq_len": original,
        "beta_fast": below.number("beta_fast", default=32.0),
        "beta_slow": below.number("beta_slow", default=1.0),
        "attention_factor": below.number("attention_factor", default=usual),
    }


def _stretch(below: Fields, max_seq_len: int) -> tuple[float, int]:
    """How far YaRN stretches positions, and from which length; a missing factor is the ratio of the lengths."""
    original = below.whole("original_max_position_embeddings", default=max_seq_len)
    return below.number("factor", default=max_seq_len / original), original


def _temperature(factor: float, gain: float = 1.0) -> float:
    """YaRN's 0.1 ln(factor) + 1 (Peng et al., 2023, arXiv:2309.00071), with DeepSeek's gain on the logarithm."""
    return 0.1 * gain * math.log(factor) + 1 if factor > 1 else 1.0


_SCALINGS = {"default": _none, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
