"""Tensors of safetensors files, by name: shapes at once, values when they are read."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executors.weights.adapters import ADAPTER_WEIGHTS
from planner.adapters import ADAPTER_CONFIG, adapter_base
from planner.errors import CaptureError, ExecutionError

__all__ = ["INDEX", "WEIGHTS", "StoredTensor", "WeightFiles"]

#: File names of Hugging Face's format: all weights, or where each is.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_ENDING = ".safetensors"
#: Endings of weights that safetensors does not read.
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        path: The file.
        shape: Of the tensor.
        dtype: That it is stored in.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """Tensors of one safetensors file, or of all that make up a model's weights.

    Args:
        path: A file, or a folder with ``model.safetensors``, with an index and the
            files that it names, or with safetensors files alone. Of a folder with an
            ``adapter_config.json``, its base's weights too.

    Raises:
        ExecutionError: If there are none, or one is missing, cut off or no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: Mapping[str, StoredTensor] = _read(path)
        self._open: dict[Path, Any] = {}

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def part(self, name: str, places: tuple[slice, ...]) -> torch.Tensor:
        """Read a part of a tensor, and no more of the file.

        Args:
            name: Of the tensor.
            places: One slice a dimension.
        """
        if not places:
            return self.whole(name)
        tensor: torch.Tensor = self._file(name).get_slice(name)[places]
        return tensor

    def _file(self, name: str) -> Any:
        path = self.tensors[name].path
        if path not in self._open:
            # The tensors of one file come one after the other, mostly.
            self._open = {path: safe_open(path, framework="pt")}
        return self._open[path]


def _read(path: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file, names in _files(path).items():
        there = _read_file(file)
        if names is not None:
            lost = sorted(names - there.keys())
            if lost:
                raise ExecutionError(
                    f"{file} lacks {lost[0]} (of {len(lost)}), which {INDEX} says it "
                    f"holds; copy it again"
                )
        doubled = sorted(found.keys() & there.keys())
        if doubled:
            raise ExecutionError(
                f"{doubled[0]} is in {found[doubled[0]].path.name} and in {file.name} "
                f"of {path}; name one of the files"
            )
        found |= there
    return found


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Files to read, and the names that each must hold where an index says so."""
    if path.is_file():
        if path.suffix != _ENDING:
            raise ExecutionError(
                f"{path} is no safetensors file; name one, or the folder of a model"
            )
        return {path: None}
    if not path.is_dir():
        raise ExecutionError(
            f"{path} does not exist; name a folder with {WEIGHTS} or {INDEX}"
        )
    if (path / ADAPTER_CONFIG).is_file():
        return _adapted(path)
    return _listed(path)


def _adapted(path: Path) -> dict[Path, set[str] | None]:
    """Files of a model with adapters, which may lack weights so far."""
    try:
        found = _listed(adapter_base(path))
    except CaptureError as error:
        raise ExecutionError(str(error)) from error
    own = path / ADAPTER_WEIGHTS
    return found | ({own: None} if own.is_file() else {})


def _listed(path: Path) -> dict[Path, set[str] | None]:
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / WEIGHTS).is_file():
        return {path / WEIGHTS: None}
    files = sorted(f for f in path.glob(f"*{_ENDING}") if f.name != ADAPTER_WEIGHTS)
    if files:
        return dict.fromkeys(files)
    others = sorted(f.name for f in path.iterdir() if f.suffix in _OTHER_FORMATS)
    if others:
        raise ExecutionError(
            f"{path} holds {others[0]}, which is no safetensors file; write one by "
            f"transformers: AutoModel.from_pretrained(...).save_pretrained(...)"
        )
    raise ExecutionError(
        f"{path} holds no weights; name a folder with {WEIGHTS} or {INDEX}"
    )


def _indexed(path: Path) -> dict[Path, set[str] | None]:
    index = path / INDEX
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names: defaultdict[str, set[str]] = defaultdict(set)
        for name, file in places.items():
            names[file].add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExecutionError(
            f"{index} is no index of weights: it needs weight_map, from the name of "
            f"each tensor to its file ({type(error).__name__}: {error})"
        ) from error
    lost = sorted(file for file in names if not (path / file).is_file())
    if lost:
        raise ExecutionError(
            f"{path / lost[0]} is missing, one of {len(names)} files that {INDEX} "
            f"names; copy it, too"
        )
    return {path / file: names[file] for file in sorted(names)}


def _read_file(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: StoredTensor(
                    path=path,
                    shape=tuple(stored.get_shape()),
                    dtype=_dtype(path, name, stored.get_dtype()),
                )
                for name in list(file.keys())
                for stored in (file.get_slice(name),)
            }
    except (SafetensorError, OSError) as error:
        raise ExecutionError(
            f"{path} is cut off or no safetensors file ({error}); copy it again"
        ) from error


def _dtype(path: Path, name: str, said: str) -> torch.dtype:
    if said not in _DTYPES:
        raise ExecutionError(
            f"{name} of {path} is stored as {said}; use weights of "
            f"{', '.join(sorted(_DTYPES))}"
        )
    return _DTYPES[said]
