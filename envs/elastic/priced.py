"""Throughputs of priced plans, and the models that stand for those of traces.

The planner searches the best plan of each model on each number of devices, packed on
the fewest hosts or spread over twice as many; the throughput is that plan's. With the
plans limited to data parallelism, the same scheduler on the same trace shows what the
other kinds of parallelism are worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from envs.elastic.throughput import SPREADS, ModelKey, ThroughputTable
from envs.stream.jobs import JobType
from envs.stream.network import HostKind, Shape, StreamNetwork
from envs.stream.prices import PlanPrice, PriceBook
from planner.cluster import Cluster
from planner.errors import StrategyError, UnknownNameError
from planner.measurements.store import CalibrationChoice
from planner.schema.cluster import Link, MeasuredCollective
from planner.space import Pin
from planner.yaml_reading import parse_yaml

__all__ = [
    "PLAN_LIMITS",
    "PlanLimit",
    "PricedHosts",
    "PricedPlans",
    "StandIn",
    "plan_throughputs",
    "priced_hosts",
    "stand_in_job",
    "stand_ins",
]

_STAND_INS = Path(__file__).parent / "data" / "stand_ins.yaml"

PlanLimit = Literal["replicas", "data", "all"]
_DATA: Mapping[str, Pin] = {"pp": 1, "tp": 1, "cp": 1, "ep": 1}
#: Pins of each limit, each within the next: whole replicas; data parallelism, also with
#: parameters and optimizer sharded (ZeRO); every plan. Recompute and gradient
#: accumulation are free in all.
PLAN_LIMITS: Mapping[PlanLimit, Mapping[str, Pin]] = {
    "replicas": {**_DATA, "dp_shard": 1, "zero_stage": 0},
    "data": _DATA,
    "all": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A model of the planner that stands for a model of a trace.

    Attributes:
        name: Name of the model in the trace.
        stands: Description of the model that stands for it.
        source: Where the trace's model is described.
        ref: Reference; see :func:`planner.capture.load_model`. Empty with a config.
        config: Fields of a transformers config; None with a reference.
        seq_len: Tokens of a sample; None for the model's own.
    """

    name: str
    stands: str
    source: str
    ref: str = ""
    config: Mapping[str, Any] | None = None
    seq_len: int | None = None


@cache
def stand_ins() -> Mapping[str, StandIn]:
    """Return the models that stand for those of ElasticFlow's and Arena's traces."""
    families = parse_yaml(_STAND_INS.read_text(), str(_STAND_INS))
    return {
        name: _stand_in(name, model, family)
        for family in families
        for name, model in family["models"].items()
    }


def _stand_in(
    name: str, model: Mapping[str, Any], family: Mapping[str, Any]
) -> StandIn:
    config = model.get("config")
    return StandIn(
        name=name,
        stands=model.get("stands") or family["stands"],
        source=family["source"],
        ref=model.get("ref", ""),
        config=None if config is None else {**family.get("shared", {}), **config},
        seq_len=model.get("seq_len", family.get("seq_len")),
    )


def stand_in_job(key: ModelKey) -> JobType:
    """Return the job that stands for a model of a trace at a global batch.

    Raises:
        UnknownNameError: If no model stands for it.
    """
    known = stand_ins()
    if key.name not in known:
        raise UnknownNameError(
            "model of a trace that the planner has a model for (give a JobType of "
            "your own for others)",
            key.name,
            known,
        )
    found = known[key.name]
    return JobType(
        name=key.name,
        ref=found.ref,
        global_batch=key.batch,
        steps=1,
        seq_len=found.seq_len,
        config=found.config,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedHosts:
    """Hosts that plans are priced on.

    Attributes:
        kind: Device type, as pools and results name it.
        host: Devices of a host, with their links.
        between: Link between hosts.
        collectives: Measured collectives within a host.
    """

    kind: str
    host: HostKind
    between: Link | None
    collectives: tuple[MeasuredCollective, ...] = ()


def priced_hosts(
    cluster: Cluster, *, kind: str | None = None, devices: int | None = None
) -> tuple[PricedHosts, ...]:
    """Return the kinds of hosts of a cluster, which hold any number of equal hosts.

    Hosts are priced as if they met at the outermost level.

    Args:
        cluster: A preset, or a cluster of your own.
        kind: Another name of the device type, for a cluster of one kind.
        devices: Devices of each host that are used; all by default.

    Raises:
        StrategyError: If ``kind`` is given for a cluster of several kinds, two kinds
            have the same devices, or a host has fewer devices.
    """
    network = StreamNetwork(cluster)
    names = [host.device.name for host in network.kinds]
    if kind is not None and len(names) > 1:
        raise StrategyError(
            f"kind={kind!r} for {cluster.name}, which has hosts of {', '.join(names)}; "
            "a name can be given to a cluster of one kind, give none"
        )
    if len(set(names)) < len(names):
        raise StrategyError(
            f"{cluster.name} has hosts of {', '.join(names)}; a device type has one "
            "kind of host here, price the others as a cluster of their own"
        )
    for host in network.kinds:
        if devices is not None and not 1 <= devices <= host.size:
            raise StrategyError(
                f"devices={devices} of hosts of {host.size} {host.device.name}; give "
                f"1 to {host.size}"
            )
    return tuple(
        PricedHosts(
            kind=kind or host.device.name,
            host=host if devices is None else host.part(devices),
            between=network.levels[-1] if network.levels else None,
            collectives=cluster.document.collectives,
        )
        for host in network.kinds
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedPlans(ThroughputTable):
    """Throughputs of priced plans; a :class:`ThroughputSource`.

    Attributes:
        labels: Label of each plan, empty where none fits.
            Shape [models, kinds, degrees, spreads].
        memory_bytes: Memory of its fullest device, in the same shape.
    """

    labels: NDArray[Any]
    memory_bytes: NDArray[np.float64]


def plan_throughputs(
    jobs: Iterable[JobType],
    hosts: Sequence[PricedHosts],
    degrees: Sequence[int],
    *,
    plans: PlanLimit = "all",
    book: PriceBook | None = None,
    calibration: CalibrationChoice = "shipped",
) -> PricedPlans:
    """Price the best plan of each job on each type, number and spread of devices.

    A degree is packed on the fewest hosts that hold it, and spread over twice as many,
    in equal parts; 0 stands where it cannot be divided so, or no plan fits. New prices
    are kept in the book; call its ``save`` to keep them in its file, where a second
    call finds them all.

    Args:
        jobs: Models with their global batches; see :func:`stand_in_job` for those of
            traces.
        hosts: Hosts of each device type; see :func:`priced_hosts`.
        degrees: Numbers of devices, ascending.
        plans: Plans that are searched: ``"replicas"`` for data parallelism of whole
            replicas, ``"data"`` for all data parallelism, ZeRO included, ``"all"``.
        book: Prices that are known; those that ship by default. With one of
            ``search="closed_forms"`` the missing prices of a job on a type are made at
            once instead of one by one.
        calibration: Fitted constants, as :func:`planner.plan` takes them.

    Raises:
        UnknownNameError: If there is no such limit of plans.
        StrategyError: If jobs or types are given twice or not at all, or degrees are
            no ascending numbers.
        CaptureError: If a model cannot be read.
    """
    if plans not in PLAN_LIMITS:
        raise UnknownNameError("limit of plans", plans, PLAN_LIMITS)
    jobs = tuple(jobs)
    models = tuple(ModelKey(job.name, job.global_batch) for job in jobs)
    kinds = tuple(one.kind for one in hosts)
    _check_given(models, kinds, degrees)
    book = PriceBook() if book is None else book
    shape = (len(models), len(kinds), len(degrees), len(SPREADS))
    table, memory = np.zeros(shape), np.zeros(shape)
    labels = np.full(shape, "", dtype=np.object_)
    for model, job in enumerate(jobs):
        for kind, one in enumerate(hosts):
            laid = {
                (degree, spread): _shape(int(number), one, spread)
                for degree, number in enumerate(degrees)
                for spread in range(len(SPREADS))
            }
            places = {at: found for at, found in laid.items() if found is not None}
            shapes = list(places.values())
            prices = _best(job, one, shapes, plans, book, calibration)
            for (degree, spread), price in zip(places, prices, strict=True):
                at = model, kind, degree, spread
                if price is not None:
                    table[at] = 1.0 / price.step_s[0]
                    labels[at], memory[at] = price.label, price.memory_bytes
    return PricedPlans(
        name=f"priced plans ({plans})",
        models=models,
        kinds=kinds,
        degrees=tuple(int(degree) for degree in degrees),
        table=table,
        labels=labels,
        memory_bytes=memory,
    )


def _check_given(
    models: tuple[ModelKey, ...], kinds: tuple[str, ...], degrees: Sequence[int]
) -> None:
    for what, given in (("jobs", models), ("device types", kinds)):
        if not given or len(set(given)) < len(given):
            raise StrategyError(
                f"{what} {', '.join(map(str, given)) or 'none'} for prices of plans; "
                "give at least one, and each once"
            )
    if not len(degrees) or list(degrees) != sorted(set(degrees)) or degrees[0] < 1:
        raise StrategyError(
            f"degrees={tuple(degrees)} for prices of plans; give numbers of devices "
            "from 1 or more, each once, ascending"
        )


def _shape(degree: int, hosts: PricedHosts, spread: int) -> Shape | None:
    """Lay a degree in equal parts on the fewest hosts, or on twice as many."""
    count = -(-degree // hosts.host.size) * (1 + spread)
    if degree % count or (count > 1 and hosts.between is None):
        return None
    return Shape(kind=0, hosts=count, per_host=degree // count)


def _best(
    job: JobType,
    hosts: PricedHosts,
    shapes: Sequence[Shape],
    plans: PlanLimit,
    book: PriceBook,
    calibration: CalibrationChoice,
) -> list[PlanPrice | None]:
    """Return the fastest plans within a limit, and within those that it contains.

    A search may stop before it has found the best; a wider limit is never slower.
    """
    best: list[PlanPrice | None] = [None] * len(shapes)
    on = hosts.host, shapes, hosts.between, hosts.collectives
    for limit, pins in PLAN_LIMITS.items():
        prices = book.prices(job, *on, pins, calibration)
        for at, (price, known) in enumerate(zip(prices, best, strict=True)):
            if price and (known is None or price.step_s[0] < known.step_s[0]):
                best[at] = price
        if limit == plans:
            break
    return best
