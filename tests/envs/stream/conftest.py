"""A cluster of leaves and a spine, and jobs whose prices are closed forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from envs.stream.arrivals import Stream
from envs.stream.decisions import Options, decide, empty_options, list_options
from envs.stream.events import Rewards, proceed
from envs.stream.jobs import JobType
from envs.stream.network import HostKind, Shape, StreamNetwork
from envs.stream.prices import STRETCHES, PlanPrice
from envs.stream.state import StreamState, StreamSummary, new_state, summarize
from envs.stream.tables import StreamTables, stream_tables
from planner.cluster import Cluster, device_type
from planner.schema.cluster import ClusterDocument, DeviceType, HostGroup, Level, Link

#: Bytes/s of a device inside a host, under a leaf, over the spine.
INSIDE, LEAF, SPINE = 100.0, 10.0, 5.0


def leaf_spine(hosts: int = 4, per_host: int = 2, device: str = "a100-80") -> Cluster:
    """Hosts in pairs under leaves, leaves under a spine."""
    link = Link(bandwidth_bytes_per_s=INSIDE, latency_s=0.0)
    leaf = Link(bandwidth_bytes_per_s=LEAF, latency_s=0.0)
    spine = Link(bandwidth_bytes_per_s=SPINE, latency_s=0.0)
    group = HostGroup(
        name="host", count=hosts, devices_per_host=per_host, device=device, link=link
    )
    return Cluster(
        ClusterDocument(
            name="leaf-spine",
            device_types=(device_type(device),),
            hosts=(group,),
            levels=(
                Level(name="leaf", hosts=2, link=leaf),
                Level(name="spine", link=spine),
            ),
        )
    )


@dataclass
class ClosedForms:
    """Instead of a price book. A step of work w on d devices takes w / d seconds.

    Of it a share is spent on links between hosts, if there are any, and nothing hides
    it; over the spine it takes as many times longer as that is slower.
    """

    share: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)

    def price(
        self,
        job: JobType,
        kind: HostKind,
        shape: Shape,
        between: Link | None,
        collectives: Any = (),
    ) -> PlanPrice | None:
        if shape.devices < self.least.get(job.name, 1):
            return None
        whole = job.global_batch / shape.devices
        busy = 0.0
        if between is not None and shape.hosts > 1:
            slower = LEAF / between.bandwidth_bytes_per_s
            busy = whole * self.share.get(job.name, 0.0) * slower
            whole += busy - whole * self.share.get(job.name, 0.0)
        times = tuple(whole - busy + busy * stretch for stretch in STRETCHES)
        return PlanPrice(
            label="closed form", step_s=times, duty=busy / whole, memory_bytes=1.0
        )

    def prices(
        self,
        job: JobType,
        kind: HostKind,
        shapes: Sequence[Shape],
        between: Link | None,
        collectives: Any = (),
    ) -> list[PlanPrice | None]:
        return [self.price(job, kind, one, between, collectives) for one in shapes]

    def sequential_step_s(self, job: JobType, device: DeviceType) -> float:
        return float(job.global_batch)


def job(name: str, work_s: int, steps: int = 1) -> JobType:
    return JobType(name=name, ref=name, global_batch=work_s, steps=steps)


MakeTables = Callable[..., StreamTables]


@pytest.fixture
def make_tables() -> MakeTables:
    def made(
        *jobs: JobType,
        cluster: Cluster | None = None,
        spread: int = 1,
        oversubscription: float = 1.0,
        bursts: Any = "spread",
        shifts: int = 1,
        **book: Any,
    ) -> StreamTables:
        network = StreamNetwork(cluster or leaf_spine())
        shapes = network.shapes(int(network.usable.sum()), spread, shifts=shifts)
        prices: Any = ClosedForms(**book)
        return stream_tables(
            jobs,
            network,
            shapes,
            prices,
            oversubscription=oversubscription,
            bursts=bursts,
        )

    return made


class Episode:
    """An episode that a test decides by hand."""

    def __init__(
        self,
        tables: StreamTables,
        jobs: list[tuple[float, int, float]],
        horizon_s: float = 1e4,
        max_waiting: int = 0,
        rewards: Rewards | None = None,
    ) -> None:
        self.tables = tables
        self.rewards = rewards or Rewards(1.0, -1.0, 0.0, 1.0)
        columns = [np.array(column, dtype=float) for column in zip(*jobs, strict=True)]
        self.stream = Stream(
            time_s=columns[0],
            model=columns[1].astype(np.int64),
            beta=columns[2],
            size=np.ones(len(jobs)),
        )
        self.state: StreamState = new_state(tables, horizon_s, 100.0, max_waiting)
        self.options: Options = empty_options(tables)
        self._go_on()

    def _go_on(self) -> None:
        proceed(self.tables, self.state, self.stream, self.rewards)
        if not self.over:
            list_options(self.tables, self.state, self.options, 0)

    @property
    def over(self) -> bool:
        return bool(self.state.counts[3])

    @property
    def now(self) -> float:
        return float(self.state.clock[0])

    def choice(self, devices: int, hosts: int) -> int:
        wanted = (self.tables.degrees == devices) & (self.tables.hosts == hosts)
        return 1 + int(np.flatnonzero(wanted)[0])

    def decide(self, action: int) -> int:
        outcome = decide(self.tables, self.state, self.options, self.rewards, action)
        self._go_on()
        return outcome

    def wait(self) -> int:
        return self.decide(1 + len(self.tables.degrees))

    def summary(self) -> StreamSummary:
        return summarize(self.tables, self.state)
