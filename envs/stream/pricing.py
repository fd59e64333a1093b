"""What a job costs on a sub-cluster: the planner's best plan, and how it bears sharing.

The plan is searched with the links to itself. It is then priced again with the links
between hosts several times slower, which is what a plan sees whose traffic shares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from envs.stream.jobs import JobType
from envs.stream.network import HostKind, Shape, sub_cluster
from planner.cost import CostModel, PricingContext
from planner.schema import Precision
from planner.schema.cluster import DeviceType, Link, MeasuredCollective
from planner.search import Candidate, Request, get_partitioner

__all__ = ["STRETCHES", "PlanPrice", "price_plan", "sequential_step_s"]

#: By how much links between hosts are slowed down in the prices of a plan.
STRETCHES = (1.0, 2.0, 4.0, 8.0, 16.0)

#: Strategies that the search may simulate.
_EVALUATIONS = 12
#: How much slower than the fastest a frugal plan may be, and how busy its links; and
#: how busy those of the fastest must be for it to matter.
_FRUGAL_SLOWER, _FRUGAL_DUTY, _BUSY = 1.5, 0.5, 0.05
#: Of a device that is never full, in bytes.
_ROOMY = 1e15
#: Of PipeDream's profiles and of everything else.
_DTYPES = {"float32": Precision(compute="float32")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """A plan's price on one sub-cluster.

    Attributes:
        label: Of the strategy, for people.
        step_s: Seconds of a step with links slowed down by each of STRETCHES; never
            shorter than the one before.
        duty: Share of an undisturbed step for which its links between hosts are busy.
        memory_bytes: Of the fullest device.
    """

    label: str
    step_s: tuple[float, ...]
    duty: float
    memory_bytes: float


def _setting(
    job: JobType, kind: HostKind, shape: Shape, link: Link | None
) -> PricingContext:
    graph = job.read_graph()
    return PricingContext(
        graph=graph,
        cluster=sub_cluster(kind, shape, link),
        order=np.arange(shape.devices, dtype=np.int64),
        precision=_DTYPES.get(graph.dtype, Precision()),
    )


def price_plan(
    job: JobType,
    kind: HostKind,
    shape: Shape,
    between: Link | None,
    collectives: tuple[MeasuredCollective, ...] = (),
) -> PlanPrice | None:
    """Search the best plan and price it; None if none uses all devices and fits.

    Of a frugal shape it is the plan whose links between hosts are the least busy, of
    those at most half as slow again as the fastest; None unless they are half as busy
    or less, and those of the fastest busy for 5 % of a step.

    Args:
        job: To be run.
        kind: Of the hosts.
        shape: Devices that the plan must use.
        between: Link between the hosts.
        collectives: That were measured.
    """
    base = _setting(job, kind, shape, between)
    alone = sub_cluster(kind, shape, between, collectives=collectives)
    request = Request(
        setting=replace(base, cluster=alone),
        global_batch=job.global_batch,
        evaluation_budget=_EVALUATIONS,
    )
    found = [
        candidate
        for candidate in get_partitioner("exhaustive").search(request).candidates
        if candidate.strategy.mesh.num_devices == shape.devices
    ]
    if not found:
        return None
    stretches = STRETCHES[1:] if shape.hosts > 1 else ()
    models = [
        CostModel(replace(base, cluster=sub_cluster(kind, shape, between, stretch)))
        for stretch in stretches
    ]
    best = _priced(found[0], models)
    if not shape.frugal:
        return best
    limit = _FRUGAL_SLOWER * best.step_s[0]
    prices = [_priced(c, models) for c in found[1:] if c.cost.step_time_s <= limit]
    least = min(prices, key=lambda price: price.duty, default=best)
    saves = best.duty >= _BUSY and least.duty <= _FRUGAL_DUTY * best.duty
    return least if saves else None


def _priced(candidate: Candidate, slowed: Sequence[CostModel]) -> PlanPrice:
    """A strategy's price with links slowed down; the same for all if there are none."""
    times = [candidate.cost.step_time_s]
    for model in slowed:
        times.append(max(model.cost(candidate.strategy).step_time_s, times[-1]))
    times += times[-1:] * (len(STRETCHES) - len(times))
    # Where links are slow enough nothing hides them: the slope is their whole traffic.
    slope = (times[-1] - times[-2]) / (STRETCHES[-1] - STRETCHES[-2])
    return PlanPrice(
        label=candidate.strategy.label(),
        step_s=tuple(times),
        duty=min(slope / times[0], 1.0),
        memory_bytes=candidate.cost.peak_memory_bytes,
    )


def sequential_step_s(job: JobType, device: DeviceType) -> float:
    """Seconds of a step on one device that is never full: the yardstick of deadlines.

    Args:
        job: To be run.
        device: The reference; its memory is not looked at, so that a job which no
            single device holds has a yardstick as well.
    """
    roomy = device.model_copy(update={"memory_bytes": _ROOMY})
    link = Link(bandwidth_bytes_per_s=1e12, latency_s=0.0, source="unused")
    kind = HostKind(device=roomy, size=1, link=link, nic=None, compute_slots=None)
    price = price_plan(job, kind, Shape(kind=0, hosts=1, per_host=1), None)
    if price is None:
        return float("inf")
    return price.step_s[0]
