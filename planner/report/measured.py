"""Predicted beside measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.schema import Plan
from planner.schema.measurement import Measurement
from planner.units import format_bytes, format_seconds

__all__ = ["Row", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity.

    Attributes:
        unit: ``s`` or ``bytes``.
    """

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None where nothing was measured."""
        return self.predicted / self.measured if self.measured else None

    def cells(self) -> tuple[str, str, str, str]:
        """For a table."""
        form = format_seconds if self.unit == "s" else format_bytes
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return self.name, form(self.predicted), form(self.measured), ratio

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}


def compare(plan: Plan, measured: dict[str, Any]) -> list[Row]:
    """Step time, peak memory of every rank, payload of every kind of collective.

    Args:
        plan: With its prediction.
        measured: A :class:`planner.schema.measurement.Measurement` as JSON data.
    """
    found = Measurement.from_data(measured)
    prediction = plan.prediction
    rows = [
        Row(
            name="step time",
            predicted=prediction.step_time_s,
            measured=found.median_step_time_s,
            unit="s",
        )
    ]
    memory = {entry.rank: entry for entry in prediction.memory}
    for rank, peak in enumerate(found.peak_memory_bytes):
        entry = memory[plan.strategy.mesh.coordinates(rank)["pp"]]
        rows.append(
            Row(
                name=f"peak memory, rank {rank}",
                predicted=entry.total_bytes - entry.reserve_bytes,
                measured=float(peak),
                unit="bytes",
            )
        )
    kinds = {kind for traffic in found.collectives for kind in traffic}
    # What is received was sent by a neighbour: the same bytes, counted once.
    for kind in sorted((kinds | set(prediction.collective_bytes)) - {"recv"}):
        sent = [traffic[kind].bytes for traffic in found.collectives if kind in traffic]
        rows.append(
            Row(
                name=f"{kind.replace('_', '-')}, busiest rank",
                predicted=prediction.collective_bytes.get(kind, 0.0),
                measured=float(max(sent, default=0)),
                unit="bytes",
            )
        )
    return rows
