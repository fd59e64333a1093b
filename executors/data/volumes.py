"""Samples in arrays on disk, of which each rank reads its own shard alone.

One array an input, of shape [samples, ...]: ``.npy`` files, which are mapped into
memory, or datasets of HDF5 files, named ``FILE.h5:DATASET``, where h5py is installed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from planner.errors import ExecutionError

__all__ = ["Volumes"]

_HDF5 = (".h5", ".hdf5")


class Volumes(Dataset[dict[str, torch.Tensor]]):
    """Dataset of images or volumes that are read in parts.

    Under a plan with ``spatial`` each rank reads its shard of a sample, and no more.

    Args:
        files: Keyword of forward to the array of its samples.

    Attributes:
        bytes_read: Of all samples so far, in this process.

    Raises:
        ExecutionError: If a file cannot be read, or they hold unequally many samples.
    """

    def __init__(self, files: Mapping[str, str | os.PathLike[str]]) -> None:
        self._files = {name: os.fspath(path) for name, path in files.items()}
        self._arrays: dict[str, Any] = {}
        self._regions: dict[str, tuple[slice, ...]] = {}
        self.bytes_read = 0
        counts = {name: len(self._array(name)) for name in self._files}
        if not counts or len(set(counts.values())) > 1:
            raise ExecutionError(
                f"the arrays hold {counts or 'no'} samples; give at least one array, "
                f"and each as many"
            )
        self._count = next(iter(counts.values()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = {}
        for name in self._files:
            region = self._regions.get(name)
            where = (index,) if region is None else (index, slice(None), *region)
            values = np.array(self._array(name)[where])
            self.bytes_read += values.nbytes
            found[name] = torch.from_numpy(values)
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Workers open the files anew: a mapping would travel as its values.
        return {**self.__dict__, "_arrays": {}}

    def of_region(self, regions: Mapping[str, tuple[slice, ...]]) -> Volumes:
        """Return the same samples, of which some inputs are read in part.

        Args:
            regions: Keyword of forward to the part along each spatial dimension.
        """
        made = Volumes(self._files)
        made._regions = {n: part for n, part in regions.items() if n in self._files}
        return made

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = _open(self._files[name])
        return self._arrays[name]


def _open(path: str) -> Any:
    """Array of a file, whose values are read when they are asked for.

    Raises:
        ExecutionError: If it is none.
    """
    file, _, dataset = path.rpartition(":")
    if Path(file).suffix.lower() not in _HDF5:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ExecutionError(
                f"cannot map {path} into memory: {error}; give an array that np.save "
                f"wrote, or FILE.h5:DATASET"
            ) from error
    try:
        h5py = importlib.import_module("h5py")
    except ImportError as error:
        raise ExecutionError(
            f"{path} is an HDF5 file, which h5py reads, and it is not installed; pip "
            f"install h5py, or give .npy files"
        ) from error
    try:
        return h5py.File(file, "r")[dataset]
    except (OSError, KeyError) as error:
        raise ExecutionError(
            f"cannot read {dataset!r} of {file}: {error}; name a dataset of the file"
        ) from error
