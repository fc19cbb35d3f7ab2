"""BERT (Devlin et al., 2018, arXiv:1810.04805) with the head that fills in masked tokens."""

from __future__ import annotations

from ablate.hf import _bert
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

Tree = _bert.Tree
HARMLESS = _bert.HARMLESS


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    fields.only("hidden_act", "gelu", "gelu_python", reason="the head has the same function, and here it is GELU")
    max_seq_len = fields.whole("max_position_embeddings", default=512)
    return _bert.settings(fields, max_seq_len, {"name": "learned", "offset": 0}, n_token_types=2)


def layout(tree: Tree) -> Layout:
    """Where its tensors are; the head that judges pairs of sentences is left out."""
    transform = "cls.predictions.transform."
    head = {"dense": transform + "dense", "norm": transform + "LayerNorm"}
    head |= {"decoder": "cls.predictions.decoder", "bias": "cls.predictions.bias"}
    return _bert.layout("bert", head, ignored=(r"cls\.seq_relationship\..*",))
