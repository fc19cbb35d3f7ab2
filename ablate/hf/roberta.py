"""RoBERTa (Liu et al., 2019, arXiv:1907.11692): positions count the tokens that are not padding."""

from __future__ import annotations

from ablate.hf import _bert
from ablate.hf._fields import Fields
from ablate.hf._places import Layout

Tree = _bert.Tree
HARMLESS = _bert.HARMLESS


def settings(fields: Fields) -> Tree:
    """The model as an experiment file writes it."""
    padding = fields.take("pad_token_id", default=1)
    rows = fields.whole("max_position_embeddings", default=512)
    if type(padding) is not int or not 0 <= padding < rows - 1:
        fields.refuse("pad_token_id", "positions start after the row that has its number")
    position = {"name": "learned", "offset": padding + 1, "padding_id": padding}
    return _bert.settings(fields, rows - padding - 1, position, n_token_types=2)


def layout(tree: Tree) -> Layout:
    """Where its tensors are."""
    head = {"dense": "lm_head.dense", "norm": "lm_head.layer_norm"}
    head |= {"decoder": "lm_head.decoder", "bias": "lm_head.bias"}
    return _bert.layout("roberta", head)
