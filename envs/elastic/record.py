"""Sessions of elastic jobs that keep what happened, for ``meshwright report``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np

from envs.elastic.pools import Hosts
from envs.elastic.session import Allocation, ElasticSession, Fate
from planner.schema.elastic import (
    Answer,
    ElasticJobs,
    ElasticModel,
    ElasticOutcome,
    ElasticPieces,
    ElasticRecord,
    PieceChange,
)

__all__ = ["RecordedSession"]


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A job's time on the same devices."""

    job: int
    kind: int
    hosts: Hosts
    start_s: float
    stall_s: float
    change: PieceChange
    end_s: float = 0.0
    failed: bool = False

    @property
    def degree(self) -> int:
        return sum(count for _, count in self.hosts)


class RecordedSession(ElasticSession):
    """A session that keeps what each job was told, and on what it ran when.

    Decisions and figures are those of :class:`ElasticSession`, which keeps nothing and
    is faster; see :meth:`record`.
    """

    def begin(self, seed: int | np.random.Generator = 0) -> None:
        """Begin an episode, and forget the last."""
        self._seed = None if isinstance(seed, np.random.Generator) else seed
        super().begin(seed)
        self._told_s = np.full(len(self.fate), np.nan)
        self._ended: list[_Piece] = []
        self._current: dict[int, _Piece] = {}
        self._last: dict[int, _Piece] = {}
        self._alive = [(self.now_s, tuple(self.capacity.tolist()))]

    def record(
        self, policy: str | None = None, load: float | None = None
    ) -> ElasticRecord:
        """Return what has happened since the begin.

        Args:
            policy: Name of the scheduler, for the report.
            load: Load of the trace, for the report.
        """
        config, jobs = self.config, self._arrived
        source, trace = config.source, config.trace
        rates = self.rates.max(axis=3)
        used = np.unique(trace.model[:jobs])
        pieces = [
            *self._ended,
            *(replace(piece, end_s=self.now_s) for piece in self._current.values()),
        ]
        pieces.sort(key=lambda piece: (piece.start_s, piece.job))
        summary = asdict(self.summary())
        summary["broken"] = len(summary["broken"])
        answers = np.where(self._promised, "promised", "none")
        answers[self.fate == Fate.DECLINED] = "declined"
        return ElasticRecord(
            trace=trace.name,
            source=source.name,
            policy=policy,
            trace_load=load,
            seed=self._seed,
            end_s=self.now_s,
            kinds=source.kinds,
            degrees=tuple(self.degrees.tolist()),
            models=tuple(
                ElasticModel(
                    name=str(source.models[model]), rates=rates[model].tolist()
                )
                for model in used
            ),
            devices=tuple(self._alive),
            summary=summary,
            jobs=ElasticJobs(
                name=trace.job_id[:jobs],
                model=tuple(np.searchsorted(used, trace.model[:jobs]).tolist()),
                submit_s=tuple(trace.submit_s[:jobs].tolist()),
                deadline_s=tuple(trace.deadline_s[:jobs].tolist()),
                iterations=tuple(trace.iterations[:jobs].tolist()),
                answer=cast("tuple[Answer, ...]", tuple(answers[:jobs].tolist())),
                told_s=_or_none(self._told_s[:jobs]),
                end_s=_or_none(self.end_s[:jobs]),
                outcome=self._outcomes(),
            ),
            pieces=ElasticPieces(
                hosts=tuple(len(piece.hosts) for piece in pieces),
                **{
                    name: tuple(getattr(piece, name) for piece in pieces)
                    for name in ElasticPieces.model_fields
                    if name != "hosts"
                },
            ),
        )

    def _outcomes(self) -> tuple[ElasticOutcome, ...]:
        names = np.where(self.fate == Fate.DONE, "met", "open").astype("<U8")
        names[self.late] = "late"
        names[self.fate == Fate.DECLINED] = "declined"
        found: list[ElasticOutcome] = names[: self._arrived].tolist()
        return tuple(found)

    def _tell(self, decision: Allocation) -> None:
        super()._tell(decision)
        for jobs in (decision.promised, decision.declined):
            self._told_s[jobs] = self.now_s

    def _resize(self, decision: Allocation) -> None:
        super()._resize(decision)
        self._note()

    def _progress(self, until_s: float) -> None:
        super()._progress(until_s)
        self._note()

    def _fail(self) -> None:
        super()._fail()
        self._note(failed=True)
        alive = tuple(self.capacity.tolist())
        if alive != self._alive[-1][1]:
            self._alive.append((self.now_s, alive))

    def _note(self, *, failed: bool = False) -> None:
        """Keep what has changed of the jobs' devices."""
        held = self.room.held
        for job, piece in list(self._current.items()):
            if held.get(job) != piece.hosts:
                end_s = self.end_s[job] if self.fate[job] == Fate.DONE else np.nan
                at_s = self.now_s if np.isnan(end_s) else min(end_s, self.now_s)
                piece.failed = failed and job not in held
                piece.end_s = float(at_s)
                self._ended.append(piece)
                self._last[job] = self._current.pop(job)
        for job, hosts in held.items():
            if job not in self._current:
                self._current[job] = self._begun(job, hosts)

    def _begun(self, job: int, hosts: Hosts) -> _Piece:
        last = self._last.get(job)
        piece = _Piece(
            job=job,
            kind=int(self.kind[job]),
            hosts=hosts,
            start_s=self.now_s,
            stall_s=float(self.stall_s[job]),
            change="started",
        )
        if last is not None:
            same = (last.kind, last.degree) == (piece.kind, piece.degree)
            piece.change = "moved" if same else "resized"
            if last.end_s < self.now_s or last.failed:
                piece.change = "resumed"
        return piece


def _or_none(times: np.ndarray) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(time) else float(time) for time in times)
