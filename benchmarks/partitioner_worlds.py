"""Worlds, and every solver on each of them: alone, on a clock, in turn.

A run takes long, so what is found can be kept in a file, one line a world and budget;
the same run then goes on where it was stopped.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.partitioner_solvers import Answer, attempt
from envs.partition import GraphStore, World
from envs.partition.clusters import CLUSTER_KINDS, Scale, draw_cluster
from envs.partition.machines import KNOWN
from planner.errors import MeshwrightError, PlanFileError
from planner.search import Request

__all__ = ["FIRST", "Arena", "Kept", "Record", "identity", "result_of"]

_log = logging.getLogger(__name__)

#: Kind of worlds that are asked without any time: how soon is there a plan?
FIRST = "first plan"

#: What all solvers are asked before the clock counts, on a small cluster.
_WARM_UP: dict[str, Any] = {
    "model": {"model_type": "gpt2", "n_embd": 256, "n_layer": 8, "n_head": 8},
    "seq_len": 256,
    "global_batch": 96,
}
_SMALL = Scale(hosts=(3, 4), devices=(6, 32), site_devices=(6, 24))
_WARM_UP_S = 0.5
#: Times that a solver is asked it, if it was late because code was compiled.
_WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Answers of solvers to a world within a budget.

    Attributes:
        world: Its name.
        identity: Hash of all that it says.
        kind: Its kind.
        budget_s: Of each solver; None for no clock.
        devices: That are free.
        answers: By solver.
        clock: Of the budgets: ``wall`` or ``processor``.
    """

    world: str
    identity: str
    kind: str
    budget_s: float | None
    devices: int
    answers: dict[str, Answer]
    clock: str = "wall"


def identity(world: World) -> str:
    """A hash of what is asked, by which a world is known again."""
    data = {k: v for k, v in world.to_data().items() if k not in {"name", "kind"}}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


class Kept:
    """Answers, in memory and in a file if there is one.

    Args:
        path: Of lines of JSON; read if it is there, then added to.

    Raises:
        PlanFileError: If a line but the last, where a run may have been killed, is no
            record.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._records: dict[tuple[str, str, float | None], Record] = {}
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        for number, line in enumerate(whole, 1):
            try:
                data = json.loads(line)
                answers = {n: Answer(**a) for n, a in data.pop("answers").items()}
                self._put(Record(answers=answers, **data))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise PlanFileError(
                    f"{path}, line {number} is no answer to a world ({error}); name "
                    f"another file, or remove this one"
                ) from error
        if len(whole) < len(lines):
            path.write_text("".join(whole), encoding="utf-8")

    def _put(self, record: Record) -> None:
        key = (record.world, record.identity, record.budget_s)
        before = self._records.get(key)
        answers = {**(before.answers if before else {}), **record.answers}
        self._records[key] = replace(record, answers=answers)

    def add(self, record: Record) -> None:
        """Keep new answers; those of other solvers to the same question stay."""
        self._put(record)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")

    def missing(
        self, world: World, budget_s: float | None, names: Iterable[str]
    ) -> list[str]:
        """Solvers that have not been asked this."""
        record = self._records.get((world.name, identity(world), budget_s))
        return [n for n in names if record is None or n not in record.answers]

    def answer(self, world: World, budget_s: float | None, name: str) -> Answer | None:
        """Answer of a solver that took part."""
        record = self._records.get((world.name, identity(world), budget_s))
        return None if record is None else record.answers.get(name)

    @property
    def records(self) -> list[Record]:
        """All of them, in the order in which they were first asked."""
        return list(self._records.values())


@dataclass(frozen=True, slots=True)
class Arena:
    """Where solvers are asked.

    Attributes:
        kept: Their answers.
        graphs: Models that were read, shared by all.
        no_graphs: Folder of weights that were trained without graphs.
        tell: Called with a line before something that takes long.
        clock: Name of the clock that :func:`time.perf_counter` is.
    """

    kept: Kept
    graphs: GraphStore = field(default_factory=GraphStore)
    no_graphs: Path | None = None
    tell: Callable[[str], None] = _log.info
    clock: str = "wall"
    _warm: set[tuple[str, str]] = field(default_factory=set)

    def ask(
        self,
        world: World,
        budget_s: float | None,
        names: Sequence[str],
        turn: int,
    ) -> None:
        """Ask those that have not been asked this yet.

        Args:
            world: The question.
            budget_s: Of each; None for no clock.
            names: Solvers.
            turn: Who begins: the next one with every turn.

        Raises:
            MeshwrightError: If the world itself is wrong: its model cannot be read,
                its cluster is described wrongly.
        """
        missing = self.kept.missing(world, budget_s, names)
        if not missing:
            return
        first = turn % len(missing)
        self._warm_up(world.kind, missing)
        limit = "no clock" if budget_s is None else f"{budget_s:g} s"
        self.tell(f"{world.name}, {limit}: {len(missing)} solvers")
        devices = int(self._request(world, budget_s).context.cluster.num_free)
        answers = {
            name: attempt(name, lambda: self._request(world, budget_s), self.no_graphs)
            for name in [*missing[first:], *missing[:first]]
        }
        self.kept.add(
            Record(
                world=world.name,
                identity=identity(world),
                kind=world.kind,
                budget_s=budget_s,
                devices=devices,
                answers=answers,
                clock=self.clock,
            )
        )

    def _request(self, world: World, budget_s: float | None) -> Request:
        """With nothing worked out yet but the graph."""
        request = world.request(self.graphs)
        graph = replace(request.context.graph)
        context = replace(request.context, graph=graph)
        return replace(request, context=context, time_budget_s=budget_s)

    def _warm_up(self, kind: str, names: Sequence[str]) -> None:
        """Have everything imported and compiled that a kind of cluster needs."""
        # What is new in a transfer is the figures, not what has to be compiled.
        kind = kind if kind in CLUSTER_KINDS else "mixed"
        cold = [name for name in names if (kind, name) not in self._warm]
        if not cold:
            return
        self.tell(f"warming up on {kind} devices")
        drawn = draw_cluster(kind, "train", np.random.default_rng(0), KNOWN, _SMALL)
        world = World(name=kind, cluster=drawn, devices="any", **_WARM_UP)
        for name in cold:
            for _ in range(_WARM_UPS):
                answer = attempt(
                    name,
                    lambda: self._request(world, _WARM_UP_S),
                    self.no_graphs,
                    patient=True,
                )
                if not answer.late:
                    break
            self._warm.add((kind, name))
        # What is there now stays: it need not be looked through before every search.
        gc.collect()
        gc.freeze()


def result_of(
    arena: Arena, worlds: Sequence[World], budgets: Sequence[float], names: list[str]
) -> dict[str, Any]:
    """Ask all, and say what came of it by world.

    Returns:
        ``{"worlds": [{"name", "kind", "objective", "budget_s",
        "step_time_s", "score", "seconds", "late", "strategy", "why"}]}``, the last six
        by solver; null where a solver found nothing.
    """
    entries = []
    for turn, world in enumerate(worlds):
        for budget_s in budgets:
            try:
                arena.ask(world, budget_s, names, turn)
            except MeshwrightError as error:
                _log.error("%s: %s", world.name, error)
                entries.append(_entry_without(world, budget_s, names, str(error)))
                continue
            entries.append(_entry(arena.kept, world, budget_s, names))
    return {"worlds": entries}


def _about(world: World, budget_s: float) -> dict[str, Any]:
    return {
        "name": world.name,
        "kind": world.kind,
        "objective": world.objective,
        "budget_s": budget_s,
    }


def _entry(
    kept: Kept, world: World, budget_s: float, names: Sequence[str]
) -> dict[str, Any]:
    answers: Mapping[str, Answer | None] = {
        name: kept.answer(world, budget_s, name) for name in names
    }
    fields = ("step_time_s", "score", "seconds", "late", "strategy", "why")
    return _about(world, budget_s) | {
        key: {name: getattr(answer, key, None) for name, answer in answers.items()}
        for key in fields
    }


def _entry_without(
    world: World, budget_s: float, names: Sequence[str], why: str
) -> dict[str, Any]:
    empty = dict.fromkeys(names)
    fields = ("step_time_s", "score", "seconds", "strategy")
    return _about(world, budget_s) | {
        **{key: dict(empty) for key in fields},
        "late": dict.fromkeys(names, False),
        "why": dict.fromkeys(names, why),
    }
