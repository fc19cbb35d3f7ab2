"""A checkpoint's safetensors: names and shapes first, tensors when they are asked for. Nothing in a file is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ablate.files import is_file
from ablate.hf._fields import refusal, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F16", "BF16", "F32", "F64"}


class Checkpoint:
    """The tensors of a folder. Raises `Faults` for files that are missing, broken, or lead out of the folder."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for file in _files(folder):
            self._look_into(file)
        if is_file(folder / SINGLE):
            return
        listed, held = _index(folder / INDEX), {name: file.name for name, file in self.files.items()}
        for name in sorted(set(listed) | set(held)):
            if listed.get(name) != held.get(name):
                where = f"in {held[name]}" if name in held else "in none of the files"
                raise refusal(f"{INDEX} says that '{name}' is in {listed.get(name, 'no file')}; it is {where}")

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor, widened to `dtype` before anything else is done with it."""
        if self._dtypes[name] not in _FLOATS:
            raise refusal(f"{self.files[name].name}: '{name}' is of {self._dtypes[name]}, and not of floats")
        with _opened(self.files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(dtype)

    def _look_into(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self.files:
                    raise refusal(f"'{name}' is both in {self.files[name].name} and in {path.name}")
                part = file.get_slice(name)
                self.files[name], self.shapes[name] = path, tuple(part.get_shape())
                self._dtypes[name] = part.get_dtype()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise refusal(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _files(folder: Path) -> list[Path]:
    """The one file, or the shards that the index names."""
    if is_file(folder / SINGLE):
        return [folder / SINGLE]
    if is_file(folder / INDEX):
        return [_shard(folder, name) for name in sorted(set(_index(folder / INDEX).values()))]
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    if pickled:
        message = f"{folder} has its tensors in {pickled[0]} alone, which is a pickle: opening it runs what is in it"
        raise refusal(message, f"convert it to {SINGLE}")
    raise refusal(f"{folder} has neither {SINGLE} nor {INDEX}", "put them beside config.json")


def _shard(folder: Path, name: str) -> Path:
    if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
        raise refusal(f"{INDEX} names {shown(name)}, which is no safetensors file of its folder")
    if not is_file(folder / name):
        raise refusal(f"{INDEX} names {name}, which is missing", "put all files of the model into one folder")
    return folder / name


def _index(path: Path) -> dict[str, str]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise refusal(f"{path} cannot be read: {type(error).__name__} {error}") from None
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise refusal(f"{path}: 'weight_map' must name a file for every tensor")
    return listed
