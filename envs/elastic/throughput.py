"""Throughputs of jobs by device type, degree and spread: tables, and their readers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.reading import read_table

__all__ = [
    "SPREADS",
    "ModelKey",
    "ThroughputSource",
    "ThroughputTable",
    "arena_throughputs",
    "check_one_source",
    "elasticflow_throughputs",
]

Floats = NDArray[np.float64]

#: Ways to lay a job over hosts: on the fewest that hold it, or on more.
SPREADS = ("packed", "spread")


class ModelKey(NamedTuple):
    """A model and its global batch."""

    name: str
    batch: int

    def __str__(self) -> str:
        return f"{self.name}/{self.batch}"


class ThroughputSource(Protocol):
    """Where throughputs come from: somebody's measurements, or priced plans.

    One comparison takes all its throughputs from one source; see
    :func:`check_one_source`.
    """

    @property
    def name(self) -> str:
        """Name of the source, for tables and messages."""

    @property
    def models(self) -> tuple[ModelKey, ...]:
        """Models with their batches."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Device types."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of devices, ascending."""

    def rates(self) -> Floats:
        """Iterations per second, 0 where a job cannot run so.

        Shape [models, kinds, degrees, spreads].
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThroughputTable:
    """Throughputs that somebody measured; a :class:`ThroughputSource`.

    Attributes:
        name: Name of the source.
        models: Models with their batches.
        kinds: Device types.
        degrees: Numbers of devices, ascending.
        table: Iterations per second, 0 where a job cannot run so.
            Shape [models, kinds, degrees, spreads].
    """

    name: str
    models: tuple[ModelKey, ...]
    kinds: tuple[str, ...]
    degrees: tuple[int, ...]
    table: Floats

    def __post_init__(self) -> None:
        shape = (len(self.models), len(self.kinds), len(self.degrees), len(SPREADS))
        if self.table.shape != shape:
            raise StrategyError(
                f"throughputs of shape {self.table.shape} in {self.name}; give one for "
                f"each model, type, degree and spread, {shape}"
            )
        if list(self.degrees) != sorted(set(self.degrees)) or self.degrees[0] < 1:
            raise StrategyError(
                f"degrees={self.degrees} in {self.name}; give each once, from 1 or "
                "more, ascending"
            )
        if not np.isfinite(self.table).all() or (self.table < 0.0).any():
            raise StrategyError(
                f"a throughput in {self.name} is negative or not finite; give "
                "iterations per second, 0 where a job cannot run"
            )

    def rates(self) -> Floats:
        """Iterations per second. Shape [models, kinds, degrees, spreads]."""
        return self.table


def check_one_source(sources: Iterable[ThroughputSource]) -> None:
    """Check that a comparison takes all its throughputs from one source.

    Raises:
        StrategyError: If two differ.
    """
    names = sorted({source.name for source in sources})
    if len(names) > 1:
        raise StrategyError(
            f"throughputs of {' and of '.join(names)} in one comparison; policies can "
            "be compared on the throughputs of one source alone, run each apart"
        )


def elasticflow_throughputs(folder: str | os.PathLike[str]) -> ThroughputTable:
    """Read ElasticFlow's throughputs: a CSV a model, a line a global batch.

    Args:
        folder: Folder of the files, named ``throughputs_<type>``.

    Raises:
        StrategyError: If a file is not of this form.
    """
    path = Path(folder)
    found: dict[tuple[ModelKey, str, int, int], float] = {}
    kind = path.name.removeprefix("throughputs_").lower()
    for file in sorted(path.glob("*.csv")):
        needed = ("global_batch_size", "1")
        _, rows = read_table(file, "throughputs", needed, error=StrategyError)
        for where, row in rows:
            key = ModelKey(file.stem, int(_rate(where, row, "global_batch_size")))
            for column in row:
                if column.isdigit():
                    found[key, kind, int(column), 0] = _rate(where, row, column)
    if not found:
        raise StrategyError(
            f"{path} has no throughputs; give the folder with a CSV for each model"
        )
    return _table(f"ElasticFlow's {kind}", found)


def arena_throughputs(path: str | os.PathLike[str]) -> ThroughputTable:
    """Read Arena's measured iteration times, each of the best plan that was found.

    A degree that was measured on several numbers of hosts is ``packed`` on the fewest
    and ``spread`` on the next.

    Args:
        path: The CSV file.

    Raises:
        StrategyError: If the file is not of this form.
    """
    columns = ("model", "params", "global_batch", "gpu", "hosts", "n_gpus")
    times: dict[tuple[ModelKey, str, int], dict[int, float]] = {}
    needed = (*columns, "iter_time_s")
    _, rows = read_table(path, "throughputs", needed, error=StrategyError)
    for where, row in rows:
        key = ModelKey(
            f"{row['model']}__{row['params']}", int(_rate(where, row, "global_batch"))
        )
        at = (key, row["gpu"], int(_rate(where, row, "n_gpus")))
        # Arena writes -1 where nothing fitted.
        fits = row["iter_time_s"].strip() not in ("-1", "-1.0")
        seconds = _rate(where, row, "iter_time_s") if fits else np.inf
        if seconds <= 0.0:
            raise StrategyError(
                f"{where}: iter_time_s={row['iter_time_s']}; give a positive time, or "
                "-1 where the job cannot run"
            )
        times.setdefault(at, {})[int(_rate(where, row, "hosts"))] = 1.0 / seconds
    found = {
        (*at, spread): rate
        for at, by_hosts in times.items()
        for spread, (_, rate) in enumerate(sorted(by_hosts.items())[: len(SPREADS)])
    }
    return _table("Arena's", found)


def _table(
    name: str, found: Mapping[tuple[ModelKey, str, int, int], float]
) -> ThroughputTable:
    models = tuple(sorted({key for key, *_ in found}))
    kinds = tuple(sorted({kind for _, kind, *_ in found}))
    degrees = tuple(sorted({degree for _, _, degree, _ in found}))
    table = np.zeros((len(models), len(kinds), len(degrees), len(SPREADS)))
    for (key, kind, degree, spread), rate in found.items():
        table[models.index(key), kinds.index(kind), degrees.index(degree), spread] = (
            rate
        )
    return ThroughputTable(
        name=name, models=models, kinds=kinds, degrees=degrees, table=table
    )


def _rate(where: str, row: Mapping[str, str], column: str) -> float:
    """Read a number of at least 0; an empty cell is 0, a job that cannot run."""
    text = (row[column] or "0").strip()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < np.inf:
        raise StrategyError(
            f"{where}: {column}={text!r}; give a number of at least 0, or nothing "
            "where a job cannot run"
        )
    return value
