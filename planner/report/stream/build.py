"""From records to all that a report of a job stream shows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from planner import __version__
from planner.errors import PlanFileError
from planner.report.stream.data import StreamData, stream_sums
from planner.schema.stream import StreamRecord

__all__ = [
    "PolicyTotals",
    "Stream",
    "StreamReport",
    "build_stream_report",
    "read_streams",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The same jobs, decided by one policy or by several.

    Attributes:
        name: Law or load, and seed.
        runs: One a policy, in the report's order; policies may lack.
    """

    name: str
    runs: tuple[StreamData, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTotals:
    """Results of a policy over the streams that all policies decided.

    Attributes:
        name: Name of the policy.
        rates: Blocking rate of each stream.
        sums: Means over the streams of
            :func:`planner.report.stream.data.stream_sums`; NaN where a stream has none.
    """

    name: str
    rates: tuple[float, ...]
    sums: dict[str, float]

    @property
    def rate(self) -> float:
        """Mean blocking rate."""
        return fmean(self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """Streams of one world on one cluster.

    Attributes:
        streams: In the order of their records.
        policies: Names, in the order of their records.
        common: Streams that all policies decided.
        totals: Results of each policy over these; empty if there are none.
        version: Version of this Meshwright.
    """

    streams: tuple[Stream, ...]
    policies: tuple[str, ...]
    common: tuple[Stream, ...]
    totals: tuple[PolicyTotals, ...]
    version: str

    @property
    def first(self) -> StreamRecord:
        """Any of the records: what they share."""
        return self.streams[0].runs[0].record

    @property
    def runs(self) -> tuple[StreamData, ...]:
        """All records, stream by stream."""
        return tuple(run for stream in self.streams for run in stream.runs)


def read_streams(
    paths: Iterable[str | os.PathLike[str]],
) -> tuple[StreamRecord, ...]:
    """Records from files, and from all ``.json`` files of folders, by name.

    Args:
        paths: Files and folders.

    Raises:
        PlanFileError: If a folder has none, or a file is no record.
    """
    found: list[StreamRecord] = []
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            files = sorted(f for f in path.glob("*.json") if not f.name.startswith("."))
            if not files:
                raise PlanFileError(
                    f"folder {path} has no records (.json); write some with meshwright "
                    f"evaluate job-stream or evaluate elastic, --record {path}"
                )
        found += [StreamRecord.load(file) for file in files]
    return tuple(found)


def build_stream_report(records: Sequence[StreamRecord]) -> StreamReport:
    """Lay records out by stream and policy.

    Args:
        records: Records of one world on one cluster.

    Raises:
        PlanFileError: If there are none, they are of several worlds or clusters, two
            are of one stream and policy, or what is called one stream is several.
    """
    if not records:
        raise PlanFileError("no records; give at least one")
    first = records[0]
    for record in records:
        for field in ("world", "cluster", "blocked"):
            if getattr(record, field) != getattr(first, field):
                raise PlanFileError(
                    f"{_told(first)} is of {first.world} on {first.cluster.name}, "
                    f"{_told(record)} of {record.world} on {record.cluster.name}: "
                    f"their {field} differs; report on each apart"
                )
    names = _policy_names(records)
    streams: dict[str, dict[str, StreamData]] = {}
    for record in records:
        name = names[record.policy, record.weights]
        runs = streams.setdefault(_stream_name(record), {})
        if name in runs:
            raise PlanFileError(
                f"{_told(record)} is there twice; name each record once"
            )
        for other in list(runs.values())[:1]:
            _require_same(other.record, record)
        runs[name] = StreamData(record=record, name=name)
    order = tuple(dict.fromkeys(names.values()))
    made = tuple(
        Stream(name=name, runs=tuple(runs[p] for p in order if p in runs))
        for name, runs in streams.items()
    )
    common = tuple(stream for stream in made if len(stream.runs) == len(order))
    totals = tuple(_totals(name, common) for name in order) if common else ()
    return StreamReport(
        streams=made,
        policies=order,
        common=common,
        totals=totals,
        version=__version__,
    )


def _policy_names(
    records: Sequence[StreamRecord],
) -> dict[tuple[str | None, str | None], str]:
    """Name of each policy; with its weights where one name has several."""
    keys = list(dict.fromkeys((r.policy, r.weights) for r in records))
    plain = [policy for policy, _ in keys]
    return {
        (policy, weights): (policy or "unnamed policy")
        + (f" ({weights})" if plain.count(policy) > 1 and weights else "")
        for policy, weights in keys
    }


def _stream_name(record: StreamRecord) -> str:
    parts = []
    if record.law is not None:
        parts.append(f"law {record.law}")
    if record.offered_load is not None:
        parts.append(f"load {record.offered_load:g}")
    if record.seed is not None:
        parts.append(f"seed {record.seed}")
    return ", ".join(parts) or "stream"


def _told(record: StreamRecord) -> str:
    return f"the record of {record.policy or 'unnamed policy'}, {_stream_name(record)}"


def _require_same(first: StreamRecord, second: StreamRecord) -> None:
    """Refuse what is called one stream and is not."""
    names = [[model.name for model in record.models] for record in (first, second)]
    same = names[0] == names[1] and first.horizon_s == second.horizon_s
    for column in ("arrival_s", "model", "beta", "size"):
        same = same and getattr(first.jobs, column) == getattr(second.jobs, column)
    if not same:
        raise PlanFileError(
            f"{_told(first)} and {_told(second)} are of different jobs "
            f"({len(first.jobs)} and {len(second.jobs)}, to {first.horizon_s:g} and "
            f"{second.horizon_s:g} s); record both with the same options"
        )


def _totals(name: str, streams: Sequence[Stream]) -> PolicyTotals:
    runs = [run for stream in streams for run in stream.runs if run.name == name]
    every = [stream_sums(run) for run in runs]
    return PolicyTotals(
        name=name,
        rates=tuple(run.blocking_rate for run in runs),
        sums={key: fmean(one[key] for one in every) for key in every[0]},
    )
