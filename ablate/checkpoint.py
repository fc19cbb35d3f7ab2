"""Checkpoints, written and read back: safetensors with strict JSON in its header, nothing in them is ever executed.

A file is written beside and renamed, tensor by tensor, so that writing one takes no memory worth the name. The two
newest of a folder stay, for the newest may turn out to be bad.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ablate.checkpoint_file import CHECKSUM, DIGEST_BYTES, PLAIN, STEP, as_json, files, path_of, plain_data
from ablate.files import write_atomically

_log = logging.getLogger(__name__)

KEPT = 2

_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


@dataclass(frozen=True)
class Checkpoint:
    """A file that holds what was once written: its plain data, and tensors that are read one by one."""

    path: Path
    plain: dict[str, Any]
    tensors: Any  # what safetensors has opened

    def names(self) -> set[str]:
        """Of the tensors."""
        return set(self.tensors.keys()) - {CHECKSUM}

    def is_like(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor of this name has the shape and dtype of another; without reading it."""
        stored = self.tensors.get_slice(name)
        return bool(stored.get_shape() == list(tensor.shape) and stored.get_dtype() == _DTYPES[tensor.dtype])

    def tensor(self, name: str) -> Tensor:
        """One of them, on the CPU, as memory of its own."""
        tensor: Tensor = self.tensors.get_tensor(name).clone()
        return tensor


def newest(folder: Path, check: Callable[[Mapping[str, Any]], None]) -> Iterator[Checkpoint]:
    """What can be trusted of a folder, the newest first; of the rest the log tells. `check` raises of plain data."""
    for path in reversed(files(folder)):
        try:
            found = _opened(path)
            check(found.plain)
        except Exception as error:  # whatever stands in the file
            _log.warning("checkpoint %s is not used: %s: %s", path, type(error).__name__, error)
        else:
            yield found


def write(folder: Path, step: int, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """One more checkpoint. The one before it stays; all else that is in the folder goes.

    That is what is older, what is of a later step, which was not used, and what is left of writes that did not finish.
    """
    ordered = dict(sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0])))  # keeps them aligned
    header = _header(step, ordered, plain)

    def stream(file: Any) -> None:
        digest = hashlib.sha256(header)
        file.write(header)
        for tensor in ordered.values():
            content = _bytes_of(tensor)
            digest.update(content)
            file.write(content)
        file.write(digest.digest())

    written = path_of(folder, step)
    write_atomically(written, stream)
    kept = [path for path in files(folder) if path <= written][-KEPT:]
    for path in folder.iterdir():
        if path not in kept:
            with suppress(OSError):
                path.unlink()


def _header(step: int, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {STEP: str(step), PLAIN: as_json(plain)}}
    place = 0
    sizes = {name: (_DTYPES[each.dtype], list(each.shape), each.nbytes) for name, each in tensors.items()}
    for name, (dtype, shape, size) in (sizes | {CHECKSUM: ("U8", [DIGEST_BYTES], DIGEST_BYTES)}).items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> Any:
    """A view of the bytes; of what is on the CPU no copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _opened(path: Path) -> Checkpoint:
    plain = plain_data(path)
    # The file stays open, and its tensors unread, as long as somebody holds it.
    tensors: Any = safe_open(path, framework="pt")
    return Checkpoint(path, plain, tensors)
