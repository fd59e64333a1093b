"""Published measurements: one row, one figure of one training run.

The columns are those of ``points.csv``: model shape, cluster, parallel configuration,
metric, value. A run that several figures are known of has several rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from planner.errors import CalibrationError
from planner.reading import read_text

__all__ = ["Point", "parse_point", "parse_points", "read_cells", "read_points"]

_ABSENT = {"", "n/a", "na", "none", "-", "nan"}
_INTEGERS = (
    "layers",
    "hidden",
    "heads",
    "seq",
    "vocab",
    "n_gpus",
    "dp",
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "zero",
    "microbatch",
    "global_batch",
)
#: Above any whole number of a run: vocabulary, sequence, batch.
_MOST = 2**31
#: Metrics that say yes or no.
_YES_OR_NO = ("oom_or_failed", "feasible")
_NEEDED = ("point_id", "model", "gpu", "n_gpus", "metric", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row. Cells that a source leaves out are None, or "" where they are text.

    Attributes:
        point_id: Id in the file; figures of one run share it.
        source: Publication or people that measured it.
        model: Name in the source.
        params: Parameters in all.
        layers: Layers of the transformer; likewise hidden, heads, seq (tokens of a
            sample) and vocab.
        gpu: Name in the source.
        n_gpus: Devices.
        dp: Data-parallel degree, ZeRO included; likewise tp, pp, vp (virtual stages
            of a device), cp, ep.
        zero: Stage, 0 to 3.
        microbatch: Samples of a microbatch.
        global_batch: Samples of a step.
        schedule: Schedule of the pipeline, in the source's words.
        recompute: ``none``, ``selective`` or ``full``; in JAX words at times.
        precision: In the source's words.
        metric: A name of :mod:`planner.measurements.metrics`, if it can be
            predicted.
        value: Measured value.
        flag: Doubt about the row.
        inferred_fields: Columns that the source does not print.
        notes: For people.
    """

    point_id: str
    source: str
    model: str
    params: float | None
    layers: int | None
    hidden: int | None
    heads: int | None
    seq: int | None
    vocab: int | None
    gpu: str
    n_gpus: int
    dp: int | None
    tp: int | None
    pp: int | None
    vp: int | None
    cp: int | None
    ep: int | None
    zero: int | None
    microbatch: int | None
    global_batch: int | None
    schedule: str
    recompute: str
    precision: str
    metric: str
    value: float
    flag: str
    inferred_fields: str
    notes: str

    @property
    def complete(self) -> bool:
        """True if the plan is all there; dp follows from it.

        The shape may be left to the model's name: see
        :func:`planner.measurements.model_shapes.shape_of`.
        """
        return None not in (self.tp, self.pp, self.microbatch, self.global_batch)


def _number(row: Mapping[str, str], name: str, where: str) -> float | None:
    text = (row.get(name) or "").strip()
    if text.lower() in _ABSENT:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CalibrationError(
            f"{where}: {name}={text!r} is not a number; give one, or leave it empty"
        )
    return value


def _integer(row: Mapping[str, str], name: str, where: str) -> int | None:
    value = _number(row, name, where)
    least, most = (0, 3) if name == "zero" else (1, _MOST - 1)
    if value is None:
        return None
    if not least <= value <= most or value != int(value):
        raise CalibrationError(
            f"{where}: {name}={row[name]!r} is not a whole number from {least} to "
            f"{most:,}; correct it, or leave it empty"
        )
    return int(value)


def parse_point(row: Mapping[str, str], where: str) -> Point:
    """Parse one row.

    Args:
        row: Text by column.
        where: File and line, for errors.
    Raises:
        CalibrationError: If a cell holds an invalid value.
    """
    if None in row.values() or None in row:
        raise CalibrationError(
            f"{where}: {sum(v is not None for v in row.values())} fields, the header "
            f"has {len(row)}; quote fields that hold commas"
        )
    values: dict[str, object] = {}
    for field in fields(Point):
        if field.name in _INTEGERS:
            values[field.name] = _integer(row, field.name, where)
        elif field.name in ("params", "value"):
            values[field.name] = _number(row, field.name, where)
        else:
            values[field.name] = (row.get(field.name) or "").strip()
    for name in _NEEDED:
        if values[name] in (None, ""):
            raise CalibrationError(f"{where}: {name} is empty; every row needs it")
    if values["metric"] in _YES_OR_NO and values["value"] not in (0, 1):
        raise CalibrationError(
            f"{where}: value={row['value']!r}, but metric={row['metric']!r} is 0 or 1; "
            f"correct value or metric"
        )
    return Point(**values)  # type: ignore[arg-type]


def read_points(path: str | Path) -> tuple[Point, ...]:
    """Read measurements.

    Args:
        path: CSV with the columns of ``points.csv``; those that a row may leave empty
            may be missing altogether.
    Raises:
        CalibrationError: If it cannot be read, lacks a column that every row needs, or
            a row holds an invalid value.
    """
    return tuple(parse_point(cells, where) for cells, where in read_cells(path))


def read_cells(path: str | Path) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the cells of each row by column, and its file and line.

    Args:
        path: CSV as for :func:`read_points`.
    Raises:
        CalibrationError: If it cannot be read or lacks a column that every row needs.
    """
    text = read_text(path, "measurements", error=CalibrationError)
    return _rows(text.splitlines(keepends=True), str(path))


def parse_points(lines: Iterable[str], name: str) -> tuple[Point, ...]:
    """Parse measurements from lines of text; ``name`` is for errors."""
    return tuple(parse_point(cells, where) for cells, where in _rows(lines, name))


def _rows(lines: Iterable[str], name: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the cells of each row by column, and the place for errors."""
    reader = csv.DictReader(lines)
    missing = sorted(set(_NEEDED) - set(reader.fieldnames or ()))
    if missing:
        raise CalibrationError(
            f"{name} has no column {missing[0]!r}; the header needs "
            f"{', '.join(_NEEDED)}"
        )
    try:
        for row in reader:
            yield row, f"{name}, line {reader.line_num}"
    except csv.Error as error:
        raise CalibrationError(
            f"{name}, line {reader.line_num}: {error}; correct it"
        ) from error
