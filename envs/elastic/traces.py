"""Job traces of published clusters, read as streams of elastic jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.elastic.throughput import ModelKey, ThroughputSource
from planner.errors import StrategyError, UnknownNameError
from planner.reading import read_table

__all__ = [
    "TRACE_FORMATS",
    "JobTrace",
    "TraceFormat",
    "at_load",
    "read_trace",
    "retimed",
    "window",
]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

#: Longest time that submissions may span, and that a job may take.
_ABSURD_S = 20 * 365.25 * 86400.0
_LOADS = (0.25, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """Jobs in the order of their submission, as arrays.

    Attributes:
        name: Name of the trace.
        job_id: Names of jobs. Shape [jobs].
        submit_s: Submission, from the first job's. Shape [jobs].
        deadline_s: Deadline, on the same clock. Shape [jobs].
        iterations: Iterations that a job needs. Shape [jobs].
        model: Index into ``models``. Shape [jobs].
        models: Models with their batches.
        gpus: Devices that the user asked for. Shape [jobs].
        duration_s: Running time on those devices; NaN where unknown. Shape [jobs].
        kind: Device type that the user asked for; empty where any will do.
    """

    name: str
    job_id: tuple[str, ...]
    submit_s: Floats
    deadline_s: Floats
    iterations: Floats
    model: Index
    models: tuple[ModelKey, ...]
    gpus: Index
    duration_s: Floats
    kind: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.job_id)

    def take(self, jobs: Index, submit_s: Floats | None = None) -> JobTrace:
        """Return some of the jobs, by submission, each as long before its deadline.

        Args:
            jobs: Their indices. Shape [n].
            submit_s: Their new submissions; as they were by default. Shape [n].
        """
        jobs = np.asarray(jobs, dtype=np.int64)
        given = self.submit_s[jobs] if submit_s is None else submit_s
        order = np.argsort(given, kind="stable")
        jobs, given = jobs[order], given[order] - (given.min() if len(given) else 0.0)
        return replace(
            self,
            job_id=tuple(self.job_id[job] for job in jobs),
            submit_s=given,
            deadline_s=given + (self.deadline_s - self.submit_s)[jobs],
            iterations=self.iterations[jobs],
            model=self.model[jobs],
            gpus=self.gpus[jobs],
            duration_s=self.duration_s[jobs],
            kind=tuple(self.kind[job] for job in jobs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """Columns of a published format.

    Attributes:
        source: Where traces of this format come from.
        columns: Column of each field, under the names that releases gave it.
        drawn: Whether models and deadlines are drawn, as the trace has none.
    """

    source: str
    columns: Mapping[str, tuple[str, ...]]
    drawn: bool = False


TRACE_FORMATS: Mapping[str, TraceFormat] = {
    "elasticflow": TraceFormat(
        source="microsoft/elasticflow-traces; Gu et al. 2023",
        columns={
            "job_id": ("job_id",),
            "submit": ("submission_time", "submit_time"),
            "deadline": ("deadline", "ddl"),
            "iterations": ("num_iteration", "iteration"),
            "model": ("model_name",),
            "batch": ("batch_size",),
            "gpus": ("num_gpu",),
            "duration": ("duration",),
        },
    ),
    "arena": TraceFormat(
        source="sjtu-epcc/arena",
        columns={
            "job_id": ("job_id",),
            "submit": ("submission_time",),
            "deadline": ("deadline",),
            "iterations": ("num_iteration",),
            "model": ("model_name",),
            "batch": ("batch_size",),
            "gpus": ("num_gpu",),
            "kind": ("gpu_type",),
        },
    ),
    "philly": TraceFormat(
        source="msr-fiddle/philly-traces; Jeon et al. 2019",
        columns={
            "submit": ("timestamp",),
            "duration": ("duration",),
            "gpus": ("num_gpus",),
            "group": ("cluster",),
        },
        drawn=True,
    ),
    "openb": TraceFormat(
        source="hkust-adsl/kubernetes-scheduler-simulator; Weng et al. 2023",
        columns={
            "job_id": ("name",),
            "submit": ("creation_time",),
            "start": ("scheduled_time",),
            "end": ("deletion_time",),
            "gpus": ("num_gpu",),
        },
        drawn=True,
    ),
}


def read_trace(
    path: str | os.PathLike[str],
    trace_format: str,
    source: ThroughputSource,
    *,
    group: str | None = None,
    seed: int = 0,
) -> JobTrace:
    """Read a trace, sorted by submission, with time 0 at the first job's.

    Philly's and openb's traces have neither models nor deadlines: each job then gets a
    model of the source with equal chances, the iterations that it does in the job's
    duration, and a deadline of 0.5 to 1.5 durations after its submission, as
    ElasticFlow drew them for Philly's. Lines that got no device, as openb's pods that
    never started, are no jobs.

    Args:
        path: CSV file, gzipped if it ends with ``.gz``.
        trace_format: A name in :data:`TRACE_FORMATS`.
        source: Throughputs; every model of the trace must be there.
        group: Virtual cluster to read, for Philly's format; all by default.
        seed: Seed of what is drawn.

    Raises:
        UnknownNameError: If no format has this name, or no throughput is known of a
            model.
        StrategyError: If a column lacks, or a value breaks a rule; the message has the
            line. If submissions span more than 20 years.
    """
    if trace_format not in TRACE_FORMATS:
        raise UnknownNameError("trace format", trace_format, TRACE_FORMATS)
    form = TRACE_FORMATS[trace_format]
    rows = [
        row
        for row in _rows(Path(path), form)
        if group is None or row.text.get("group") == group
    ]
    fill = _drawn if form.drawn else _given
    trace = fill(Path(path), rows, source, np.random.default_rng(seed))
    if not len(trace):
        raise StrategyError(
            f"{path} has no job that needs a device"
            + (f" in group {group!r}" if group else "")
            + "; there is nothing to decide, give another file or group"
        )
    first, last = int(np.argmin(trace.submit_s)), int(np.argmax(trace.submit_s))
    if trace.submit_s[last] - trace.submit_s[first] > _ABSURD_S:
        raise StrategyError(
            f"{path} has job {trace.job_id[first]} submitted at "
            f"{trace.submit_s[first]:.10g} s and job {trace.job_id[last]} at "
            f"{trace.submit_s[last]:.10g} s, more than 20 years later; give all times "
            "on one clock"
        )
    return trace.take(np.arange(len(trace)))


def at_load(
    trace: JobTrace,
    load: float,
    how: Literal["time", "thinning"] = "time",
    seed: int = 0,
) -> JobTrace:
    """Return the trace at another load; deadlines keep their distance.

    Args:
        trace: The trace, at load 1.
        load: Share of the trace's own load, from 0.25 to 2.
        how: ``"time"`` divides times between submissions by the load; ``"thinning"``
            keeps each job with this chance, and takes loads up to 1.
        seed: Seed of the thinning.

    Raises:
        StrategyError: If the load is out of range.
        UnknownNameError: If there is no such way.
    """
    if how not in ("time", "thinning"):
        raise UnknownNameError("way to change a load", how, ("time", "thinning"))
    upper = 1.0 if how == "thinning" else _LOADS[1]
    if not _LOADS[0] <= load <= upper:
        raise StrategyError(
            f"load={load} by {how}; give a share of the trace's load from {_LOADS[0]} "
            f"to {upper}" + (", or scale the time" if how == "thinning" else "")
        )
    if how == "time":
        return trace.take(np.arange(len(trace)), trace.submit_s / load)
    kept = np.random.default_rng(seed).random(len(trace)) < load
    return trace.take(np.flatnonzero(kept))


def retimed(
    trace: JobTrace, measured: ThroughputSource, source: ThroughputSource
) -> JobTrace:
    """Return the trace for another source, with jobs that take as long as they did.

    Iterations are changed so that a job has the same running time on the devices asked
    for. Where the two sources do not both know that number, it is the nearest that both
    know of one type. The load is then the trace's own, and what differs is how jobs get
    faster with more devices.

    Args:
        trace: The trace, read with ``measured``.
        measured: Throughputs of the trace.
        source: Throughputs of the new trace, of every model that has jobs.

    Raises:
        StrategyError: If the trace was not read with ``measured``, or a model has no
            number of devices that both sources know.
        UnknownNameError: If ``source`` lacks a model.
    """
    if trace.models != measured.models:
        raise StrategyError(
            f"trace {trace.name} was read with other models than {measured.name} has; "
            "give the source that it was read with"
        )
    known = {key: number for number, key in enumerate(source.models)}
    old, new = _common(measured, source)
    degrees = sorted(set(measured.degrees) & set(source.degrees))
    model = np.zeros_like(trace.model)
    iterations = trace.iterations.copy()
    for job, before in enumerate(trace.model.tolist()):
        key = trace.models[before]
        if key not in known:
            raise UnknownNameError(
                f"model in {source.name}:", str(key), map(str, known)
            )
        model[job] = known[key]
        both = (old[before] > 0.0) & (new[known[key]] > 0.0)
        if not both.any():
            raise StrategyError(
                f"{key} has no device type and number that {measured.name} and "
                f"{source.name} both know; give a source of more, or leave it out"
            )
        far = np.abs(
            np.searchsorted(degrees, trace.gpus[job]) - np.arange(len(degrees))
        )
        kind, at = np.unravel_index(
            np.argmin(np.where(both, far, len(degrees))), both.shape
        )
        iterations[job] *= new[known[key], kind, at] / old[before, kind, at]
    return replace(trace, models=source.models, model=model, iterations=iterations)


def _common(
    measured: ThroughputSource, source: ThroughputSource
) -> tuple[Floats, Floats]:
    """Packed throughputs of the types and numbers that two sources both know.

    Shapes [models, kinds, degrees]; spread ones where a source has no packed one.
    """
    kinds = [kind for kind in measured.kinds if kind in source.kinds]
    degrees = sorted(set(measured.degrees) & set(source.degrees))
    if not kinds or not degrees:
        raise StrategyError(
            f"{measured.name} and {source.name} have no device type and number in "
            "common; name types alike"
        )
    found = []
    for one in (measured, source):
        rates = one.rates()
        packed = np.where(rates[..., 0] > 0.0, rates[..., 0], rates[..., 1])
        types = [one.kinds.index(kind) for kind in kinds]
        numbers = [one.degrees.index(degree) for degree in degrees]
        found.append(packed[:, types][:, :, numbers])
    return found[0], found[1]


def window(trace: JobTrace, first: int, jobs: int) -> JobTrace:
    """Return consecutive jobs of a trace.

    Args:
        trace: The trace.
        first: The first job.
        jobs: Number of jobs.

    Raises:
        StrategyError: If the trace has no such jobs.
    """
    if jobs < 1 or first < 0 or first + jobs > len(trace):
        raise StrategyError(
            f"jobs {first} to {first + jobs - 1} of {trace.name}, which has "
            f"{len(trace)}; give a window inside the trace"
        )
    return trace.take(np.arange(first, first + jobs))


#: Fields of a job, in the order of a JobTrace.
_Fields = tuple[str, float, float, float, int, int, float, str]


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of a trace: its fields as text, and where it is."""

    where: str
    text: Mapping[str, str]

    def number(self, field: str, least: float, most: float = np.inf) -> float:
        """Return a field as a number between two, or refuse the line."""
        value = self.text[field]
        try:
            found = float(value)
        except ValueError:
            found = np.nan
        if not least <= found <= most or not np.isfinite(found):
            limit = (
                f"from {least:g} to {most:g}"
                if np.isfinite(most)
                else (f"of at least {least:g}")
            )
            raise StrategyError(
                f"{self.where}: {field}={value!r}; give a number {limit}, or leave the "
                "line out"
            )
        return found

    def time_s(self, field: str) -> float:
        """Seconds, or the seconds since 1970 of a date."""
        try:
            date = datetime.strptime(self.text[field], "%Y-%m-%d %H:%M:%S")
        except ValueError:
            return self.number(field, 0.0, 200 * 365.25 * 86400.0)
        return date.replace(tzinfo=UTC).timestamp()


def _rows(path: Path, form: TraceFormat) -> Iterator[_Row]:
    heads, lines = read_table(path, "trace", error=StrategyError)
    named: dict[str, str] = {}
    for field, names in form.columns.items():
        found = [name for name in names if name in heads]
        # Only what a user asked for, and what a file may be without, can lack.
        if not found and field not in ("duration", "group", "job_id"):
            raise StrategyError(
                f"{path} has no column {' or '.join(names)}, only "
                f"{', '.join(heads) or 'nothing'}; give it, or name another format"
            )
        if found:
            named[field] = found[0]
    before: dict[str, str] = {}
    for where, row in lines:
        text = {field: row[name].strip() for field, name in named.items()}
        job = text.get("job_id")
        if job and before.setdefault(job, where) != where:
            raise StrategyError(
                f"{where}: job {job!r} is in {before[job]}, too; give each job one "
                "line, or leave the column out"
            )
        yield _Row(where, text)


def _given(
    path: Path, rows: list[_Row], source: ThroughputSource, _: np.random.Generator
) -> JobTrace:
    """Make a trace of lines that have models and deadlines."""
    known = {str(key): number for number, key in enumerate(source.models)}
    found: list[_Fields] = []
    for row in rows:
        key = ModelKey(row.text["model"], _whole(row, "batch", 1e9))
        if str(key) not in known:
            raise UnknownNameError(f"model in {row.where}:", str(key), known)
        submit_s, deadline_s = row.time_s("submit"), row.time_s("deadline")
        if not submit_s < deadline_s <= submit_s + _ABSURD_S:
            raise StrategyError(
                f"{row.where}: deadline={row.text['deadline']} of a job submitted at "
                f"{row.text['submit']}; give a deadline after the submission, by at "
                "most 20 years"
            )
        has_duration = bool(row.text.get("duration"))
        found.append(
            (
                row.text.get("job_id") or str(len(found)),
                submit_s,
                deadline_s,
                row.number("iterations", 1.0, 1e15),
                known[str(key)],
                _whole(row, "gpus"),
                row.number("duration", 0.0, _ABSURD_S) if has_duration else np.nan,
                row.text.get("kind", ""),
            )
        )
    return _trace(path, found, source)


def _drawn(
    path: Path,
    rows: list[_Row],
    source: ThroughputSource,
    generator: np.random.Generator,
) -> JobTrace:
    """Make a trace of lines without models and deadlines, which are drawn."""
    degrees = np.array(source.degrees)
    rates = source.rates()[..., 0].max(axis=1)
    found: list[_Fields] = []
    for row in rows:
        if row.number("gpus", 0.0, 1e6) == 0:
            continue
        submit_s = row.time_s("submit")
        if row.text.get("start") == "":
            continue
        if "duration" in row.text:
            duration_s = row.number("duration", 0.0, _ABSURD_S)
        else:
            start_s, end_s = row.time_s("start"), row.time_s("end")
            if not submit_s <= start_s <= end_s <= start_s + _ABSURD_S:
                raise StrategyError(
                    f"{row.where}: it is submitted at {submit_s:.10g} s, starts at "
                    f"{start_s:.10g} s and ends at {end_s:.10g} s; give times in this "
                    "order, an end at most 20 years after the start, or leave the "
                    "line out"
                )
            duration_s = end_s - start_s
        gpus = _whole(row, "gpus")
        at = int(np.searchsorted(degrees, gpus))
        if at == len(degrees):
            raise StrategyError(
                f"{row.where}: gpus={gpus}; the throughputs of {source.name} end at "
                f"{degrees[-1]} devices, leave the line out, or read another group"
            )
        able = np.flatnonzero(rates[:, at] > 0.0)
        if not len(able):
            raise StrategyError(
                f"{row.where}: gpus={gpus}; no model of {source.name} has a throughput "
                f"on {degrees[at]} devices, leave the line out, or give throughputs of "
                "more"
            )
        model = int(generator.choice(able))
        slack = generator.uniform(0.5, 1.5)
        if duration_s <= 0.0:
            continue
        found.append(
            (
                row.text.get("job_id") or str(len(found)),
                submit_s,
                submit_s + slack * duration_s,
                max(1.0, duration_s * rates[model, at]),
                model,
                int(degrees[at]),
                duration_s,
                "",
            )
        )
    return _trace(path, found, source)


def _whole(row: _Row, field: str, most: float = 1e6) -> int:
    value = row.number(field, 1.0, most)
    if value != int(value):
        raise StrategyError(
            f"{row.where}: {field}={row.text[field]!r}; give a whole number"
        )
    return int(value)


def _trace(
    path: Path,
    found: list[_Fields],
    source: ThroughputSource,
) -> JobTrace:
    columns = list(zip(*found, strict=True)) if found else [()] * 8
    return JobTrace(
        name=path.name.split(".")[0],
        job_id=tuple(columns[0]),
        submit_s=np.array(columns[1], dtype=np.float64),
        deadline_s=np.array(columns[2], dtype=np.float64),
        iterations=np.array(columns[3], dtype=np.float64),
        model=np.array(columns[4], dtype=np.int64),
        models=source.models,
        gpus=np.array(columns[5], dtype=np.int64),
        duration_s=np.array(columns[6], dtype=np.float64),
        kind=tuple(columns[7]),
    )
