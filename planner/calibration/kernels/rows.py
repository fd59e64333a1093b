"""Tables of measured kernels, read from the data folder, and who of them is held out.

The tables are not part of Meshwright: see the folder ``kernels`` of the project's data,
whose README names their source and what was timed.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.errors import CalibrationError

__all__ = ["SYSTEMS", "KernelRows", "kernel_folder", "read_kernel_rows"]

Array = NDArray[np.float64]

#: Device types of the tables' systems.
SYSTEMS = {
    "a100_sxm": "a100-80",
    "h100_sxm": "h100-80",
    "h200_sxm": "h200-141",
    "b200_sxm": "b200-180",
    "b300_sxm": "b300-270",
    "gb200": "gb200-186",
    "gb300": "gb300-279",
    "l40s": "l40s-48",
    "rtx_pro_6000_server": "rtxpro6000-96",
}

#: Share of the rows that no fit sees, and that no choice of a form has seen.
HELD_OUT = 0.3

#: Columns that are names.
_NAMES = frozenset(
    {"system", "run", "library", "version", "dtype", "kernel", "op", "distribution"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRows:
    """Rows of a table, column by column.

    Attributes:
        names: Columns of text. Shape [rows] each.
        numbers: Columns of numbers. Shape [rows] each.
    """

    names: Mapping[str, NDArray[np.str_]]
    numbers: Mapping[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.numbers.values())))

    def __getitem__(self, column: str) -> Array:
        return self.numbers[column]

    def at(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> KernelRows:
        """Return the chosen rows."""
        return KernelRows(
            names={name: values[chosen] for name, values in self.names.items()},
            numbers={name: values[chosen] for name, values in self.numbers.items()},
        )

    def where(self, **wanted: str) -> KernelRows:
        """Return the rows whose names begin so, but for a dtype, which is that."""
        chosen = np.ones(len(self), dtype=bool)
        for name, start in wanted.items():
            values = self.names[name]
            exact = name in {"dtype", "system", "op"}
            chosen &= values == start if exact else np.char.startswith(values, start)
        return self.at(chosen)

    @property
    def seconds(self) -> Array:
        """Measured seconds. Shape [rows]."""
        return np.asarray(self.numbers["latency_us"] * 1e-6)

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Mask of the rows that are kept from every fit: drawn with seed 0."""
        return np.random.RandomState(0).rand(len(self)) < HELD_OUT


def kernel_folder() -> Path:
    """Return the folder of the tables.

    Raises:
        CalibrationError: If MESHWRIGHT_DATA is unset or has none.
    """
    root = os.environ.get("MESHWRIGHT_DATA")
    folder = Path(root or "none") / "kernels"
    if not (folder / "gemm.csv.gz").is_file():
        raise CalibrationError(
            f"MESHWRIGHT_DATA={root} has no kernels/gemm.csv.gz; set it to the folder "
            f"that has the tables of measured kernels in kernels/"
        )
    return folder


@cache
def read_kernel_rows(name: str) -> KernelRows:
    """Read a table.

    Args:
        name: ``gemm``, ``nccl``: a file without its suffixes.
    """
    with gzip.open(kernel_folder() / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        reader = csv.reader(file)
        head = next(reader)
        columns = list(zip(*reader, strict=True))
    pairs = dict(zip(head, columns, strict=True))
    return KernelRows(
        names={key: np.array(pairs[key]) for key in head if key in _NAMES},
        numbers={key: np.array(pairs[key], float) for key in head if key not in _NAMES},
    )
