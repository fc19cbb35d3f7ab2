"""Published models: a folder's `config.json` as settings of `ablate`, and where its files keep the tensors.

One file a family, and the file's name is the `model_type`. It says which fields change no logit (`HARMLESS`), which
settings the others are (`settings`), and where the tensors are (`layout`). A field that is neither is refused by name.
What only training reads (rates of dropout, losses, how weights are drawn) is not imported: no logit depends on it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ablate.choice import Faults, unknown
from ablate.files import is_file
from ablate.hf._fields import HARMLESS, Fields, fault, refusal, shown
from ablate.hf._places import Layout

Tree = dict[str, Any]
CONFIG = "config.json"


def families() -> list[str]:
    """The families that can be imported: THE FILE IS THE NAME."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))


@dataclass(frozen=True)
class Description:
    """A model as settings, the layout of its files, and the token that an encoder-decoder starts to write from."""

    settings: Tree
    layout: Layout
    start_id: int | None


def settings(folder: str | Path) -> Tree:
    """The model that `config.json` in `folder` describes, as the `baseline` of an experiment file. Raises `Faults`."""
    return described(folder).settings


def described(folder: str | Path) -> Description:
    """What `config.json` in `folder` says; no other file is read. Raises `Faults`."""
    if not isinstance(folder, str | Path):
        raise refusal(f"a folder is needed, not {folder!r}", "write its path in quotes")
    config = _config(Path(folder))
    name = config.get("model_type")
    if name not in families():
        raise Faults([unknown(fault(str(name)).message, families(), "model_type", ())])
    family = import_module(f"ablate.hf.{name}")
    fields = Fields(config, (*HARMLESS, *family.HARMLESS))
    _general(fields)
    tree: Tree = family.settings(fields)
    fields.only("is_encoder_decoder", tree["family"] == "encoder_decoder")
    fields.close()
    return Description(tree, family.layout(tree), _start(fields, tree))


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not is_file(file):
        cure = f"give a folder that holds {CONFIG} and safetensors; nothing is downloaded"
        raise refusal(f"{file} does not exist", cure)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(f"{file} cannot be read: {str(error) or type(error).__name__}") from None
    if not isinstance(config, dict):
        raise refusal(f"{file} must be a mapping, not {shown(config)}")
    return config


def _start(fields: Fields, tree: Tree) -> int | None:
    """The token that an encoder-decoder starts to write from, where the file names one."""
    start = fields.take("decoder_start_token_id", default=None)
    if tree["family"] != "encoder_decoder" or start is None:
        return None
    if type(start) is not int or not 0 <= start < tree["vocab_size"]:
        fields.refuse("decoder_start_token_id", "a token of the vocabulary is needed")
    return int(start)


def _general(fields: Fields) -> None:
    """What is the same in all families."""
    fields.only("quantization_config", None, reason="weights of fewer bits give other numbers")
    fields.only("pruned_heads", {}, None, reason="all heads are imported")
    fields.only("tie_encoder_decoder", False, None, reason="encoder and decoder have weights of their own here")
    fields.only("cross_attention_hidden_size", None)
