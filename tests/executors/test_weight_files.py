"""Safetensors files: parts of tensors, and files that are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executors.weights import WeightFiles, WeightFolder
from planner.errors import ExecutionError


def _one(folder: Path) -> Path:
    save_file({"a": torch.arange(6.0).view(2, 3)}, folder / "model.safetensors")
    return folder


def test_a_part_is_read_as_a_slice_of_the_whole(tmp_path: Path) -> None:
    files = WeightFiles(_one(tmp_path))
    assert files.tensors["a"].shape == (2, 3)
    assert files.part("a", (slice(0, 1), slice(1, 3))).tolist() == [[1.0, 2.0]]
    assert torch.equal(files.whole("a"), torch.arange(6.0).view(2, 3))


def test_all_files_of_an_index_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "y.safetensors")
    # Another release of the same weights, which the index does not name.
    save_file({"c": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert WeightFiles(tmp_path).tensors.keys() == {"a", "b"}


def _cut(folder: Path) -> None:
    path = _one(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _text(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com")


def _lost_file(folder: Path) -> None:
    index = {"weight_map": {"a": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _lost_tensor(folder: Path) -> None:
    index = {"weight_map": {"b": "model.safetensors"}}
    (_one(folder) / "model.safetensors.index.json").write_text(json.dumps(index))


def _no_index(folder: Path) -> None:
    (_one(folder) / "model.safetensors.index.json").write_text("[]")


def _bin(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")


def _twice(folder: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.ones(2)}, folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_cut, "model.safetensors is cut off"),
        (_text, "model.safetensors is cut off or no safetensors file"),
        (_lost_file, "gone.safetensors is missing, one of 1 files"),
        (_lost_tensor, "model.safetensors lacks b"),
        (_no_index, "is no index of weights"),
        (_bin, "holds pytorch_model.bin, which is no safetensors file"),
        (_twice, "a is in x.safetensors and in y.safetensors"),
        (lambda _: None, "holds no weights"),
    ],
)
def test_files_that_are_not_whole_are_refused(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path)
    with pytest.raises(ExecutionError, match=said):
        WeightFiles(tmp_path)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="does not exist"):
        WeightFiles(tmp_path / "nowhere")
    with pytest.raises(ExecutionError, match="exists; name a new folder"):
        WeightFolder(path=tmp_path)
