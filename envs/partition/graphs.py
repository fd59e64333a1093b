"""Store of model graphs, which reads each model once."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from planner import __version__
from planner.api import read_model
from planner.errors import CaptureError
from planner.graph import ModelGraph
from planner.schema.base import fingerprint_bytes, write_atomically

__all__ = ["GraphStore", "process_store"]


class GraphStore:
    """Reads models, caches them, and keeps them in a folder if it has one.

    Reading a model takes 0.3 to 2 seconds, its file a few hundredths. Files are
    compressed JSON named by a hash of the model's reference and of the versions of the
    packages that read it; a model in a file of its own (``hf:``, a profile, user code)
    may change and is never kept in the folder.

    Attributes:
        folder: Keeps graphs between processes; None for none.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._graphs: dict[str, ModelGraph] = {}
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def graph(
        self,
        model: str | Mapping[str, Any],
        *,
        seq_len: int | None = None,
        dtype: str = "bfloat16",
    ) -> ModelGraph:
        """Return the graph of a model; the same object for the same arguments.

        Args:
            model: As for :func:`planner.api.read_model`.
            seq_len: Tokens per sample; None for the model's own.
            dtype: Compute dtype.

        Raises:
            CaptureError: If the model cannot be read.
            UnknownNameError: If no model has that name.
        """
        spoken = json.dumps([model, seq_len, dtype], sort_keys=True)
        if spoken not in self._graphs:
            self._graphs[spoken] = self._read(spoken, model, seq_len, dtype)
        return self._graphs[spoken]

    def _read(
        self,
        spoken: str,
        model: str | Mapping[str, Any],
        seq_len: int | None,
        dtype: str,
    ) -> ModelGraph:
        path = self._path(spoken, model)
        if path is not None and path.is_file():
            return _load(path)
        graph = read_model(model, None, seq_len=seq_len, dtype=dtype)
        if path is not None:
            text = _ADAPTER.dump_json(graph, exclude={"fusions"})
            write_atomically(path, gzip.compress(text, 4, mtime=0))
        return graph

    def _path(self, spoken: str, model: str | Mapping[str, Any]) -> Path | None:
        changes = isinstance(model, str) and (":" in model or model.endswith(".txt"))
        if self.folder is None or changes:
            return None
        made_by = [__version__, torch.__version__, _transformers()]
        name = fingerprint_bytes(f"{spoken}|{made_by}".encode())
        return self.folder / f"{name.rpartition(':')[2][:40]}.json.gz"


def _transformers() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "none"


_ADAPTER = TypeAdapter(ModelGraph)


def _load(path: Path) -> ModelGraph:
    try:
        return _ADAPTER.validate_json(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValidationError) as error:
        raise CaptureError(
            f"graph {path} is damaged ({type(error).__name__}); remove the file, the "
            f"model is then read again"
        ) from error


@cache
def process_store() -> GraphStore:
    """Return the store of this process, which has no folder."""
    return GraphStore()
